"""Finds the linear layers of an ONNX graph, and observes their activations over calibration rows (ONNX Runtime).

Linear layers are products with constant weights that are worth quantising, of fused graphs and of plain ones.
Softmax, normalisation, GELU, residual sums and the products within the attention are left as they
are.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

from penstock_optimizer.export.build.graph import MICROSOFT
from penstock_optimizer.export.reader import open_session
from penstock_runtime.engines.grid import feed as graph_feed
from penstock_runtime.rows import Float, Row, collate

SMALLEST_WEIGHT = 16_384
"""Elements. Smaller products (a classifier's last layer) cost next to nothing in fp32, and rounding them costs most."""
FEWEST_OUTPUTS = 16
"""Output channels: below, it is a classifier's last layer."""
_QATTENTION_ATTRIBUTES = {"num_heads", "unidirectional", "mask_filter_value", "scale"}


@dataclass(frozen=True, eq=False)
class Group:
    """Linear nodes that share an input or a weight, directly or through each other: they are smoothed alike."""

    nodes: tuple[Any, ...]
    values: tuple[str, ...]
    """Their distinct activations, in order."""
    weights: tuple[str, ...]
    """Their distinct weights, in order."""

    def values_of(self, weight: str) -> tuple[str, ...]:
        """The distinct activations that meet a weight."""
        return tuple(dict.fromkeys(node.input[0] for node in self.nodes if node.input[1] == weight))


class LinearGraph:
    """A model with its linear layers, which can be changed."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self._constants = {tensor.name: tensor for tensor in model.graph.initializer}
        self._producers = {output: node for node in model.graph.node for output in node.output}
        self._consumers: dict[str, list[Any]] = defaultdict(list)
        for node in model.graph.node:
            for name in dict.fromkeys(node.input):
                self._consumers[name].append(node)
        self._outputs = {output.name for output in model.graph.output}
        self._arrays: dict[str, Float] = {}
        self._linear = {id(node) for node in model.graph.node if self._is_linear(node)}
        self.groups = self._find_groups()

    @property
    def values(self) -> tuple[str, ...]:
        """The activations to calibrate, each once."""
        return tuple(value for group in self.groups for value in group.values)

    def matrix(self, node: Any) -> Float:
        """A linear node's weight [in, out]."""
        array = self.array(node.input[1])
        return array.T if attributes(node).get("transB", 0) else array

    def array(self, name: str) -> Float:
        """A constant."""
        if name not in self._arrays:
            self._arrays[name] = np.asarray(numpy_helper.to_array(self._constants[name]))
        return self._arrays[name]

    def change(self, name: str, array: Float) -> None:
        """Give a constant other values."""
        self._arrays[name] = array
        self._constants[name].CopyFrom(numpy_helper.from_array(array, name))

    def constant(self, array: Any, name: str) -> str:
        """Add a constant; its name is returned. One that is there already stays."""
        if name not in self._constants:
            self._constants[name] = numpy_helper.from_array(np.asarray(array), name)
            self.model.graph.initializer.append(self._constants[name])
        return name

    def producer(self, value: str) -> Any | None:
        """The node that computes a value; None for inputs and constants."""
        return self._producers.get(value)

    def readers(self, name: str) -> Sequence[Any]:
        """The nodes that read a value or a constant."""
        return self._consumers[name]

    def is_output(self, value: str) -> bool:
        """True when the graph gives the value to its caller."""
        return value in self._outputs

    def is_linear(self, node: Any) -> bool:
        """True for the nodes of the groups."""
        return id(node) in self._linear

    def bias_after(self, node: Any) -> Any | None:
        """The Add of a constant vector that alone reads a product; None where there is no such."""
        value = node.output[0]
        readers = self.readers(value)
        if node.op_type != "MatMul" or len(readers) != 1 or self.is_output(value) or readers[0].op_type != "Add":
            return None
        (other,) = [name for name in readers[0].input if name != value] or [""]
        fits = self._is_vector(other) and self.array(other).size == self.matrix(node).shape[1]
        return readers[0] if fits else None

    def replace(self, before: Mapping[int, Sequence[Any]], instead: Mapping[int, Sequence[Any]]) -> None:
        """Put nodes in front of nodes, or instead of them, by `id(node)`; unused constants are removed."""
        graph = self.model.graph
        nodes = [new for node in graph.node for new in (*before.get(id(node), ()), *instead.get(id(node), (node,)))]
        del graph.node[:]
        graph.node.extend(nodes)
        used = {name for node in nodes for name in node.input} | self._outputs
        kept = [tensor for tensor in graph.initializer if tensor.name in used]
        del graph.initializer[:]
        graph.initializer.extend(kept)
        del graph.value_info[:]  # types of values that are gone
        if not any(opset.domain == MICROSOFT for opset in self.model.opset_import):
            self.model.opset_import.append(helper.make_opsetid(MICROSOFT, 1))

    def _find_groups(self) -> tuple[Group, ...]:
        """Nodes in order, joined by shared inputs (Q, K and V) and weights (ALBERT's layers)."""
        group_of: dict[str, int] = {}
        members: dict[int, list[Any]] = {}
        for index, node in enumerate(node for node in self.model.graph.node if self.is_linear(node)):
            members[index] = [node]
            for name in (node.input[0], node.input[1]):
                other = group_of.get(name, index)
                if other != index:
                    members[index] = members.pop(other) + members[index]
                    group_of.update({key: index for key, value in group_of.items() if value == other})
                group_of[name] = index
        return tuple(
            Group(
                tuple(nodes),
                tuple(dict.fromkeys(node.input[0] for node in nodes)),
                tuple(dict.fromkeys(node.input[1] for node in nodes)),
            )
            for nodes in members.values()
        )

    def _is_linear(self, node: Any) -> bool:
        if len(node.input) < 2 or node.input[0] in self._constants or node.input[1] not in self._constants:
            return False
        weight = self._constants[node.input[1]]
        if weight.data_type != onnx.TensorProto.FLOAT or len(weight.dims) != 2:
            return False
        given = attributes(node)
        match node.op_type:
            case "MatMul":
                outputs = weight.dims[1]
            case "Gemm":
                if given.get("alpha", 1.0) != 1.0 or given.get("beta", 1.0) != 1.0:
                    return False
                if given.get("transA", 0) or (len(node.input) > 2 and not self._is_vector(node.input[2])):
                    return False
                outputs = weight.dims[0] if given.get("transB", 0) else weight.dims[1]
            case "Attention":
                # QAttention knows neither a bias on the scores nor sizes that differ; past states are not for encoders.
                if node.domain != MICROSOFT or any(node.input[4:]) or not set(given) <= _QATTENTION_ATTRIBUTES:
                    return False
                if not self._is_vector(node.input[2]):
                    return False
                outputs = weight.dims[1]
            case _:
                return False
        return bool(outputs >= FEWEST_OUTPUTS and weight.dims[0] * weight.dims[1] >= SMALLEST_WEIGHT)

    def _is_vector(self, name: str) -> bool:
        return name in self._constants and len(self._constants[name].dims) == 1


def attributes(node: Any) -> dict[str, Any]:
    """A node's attributes by name."""
    return {attribute.name: helper.get_attribute_value(attribute) for attribute in node.attribute}


@dataclass(frozen=True, eq=False)
class Seen:
    """One activation over the calibration texts, by channel (its last axis). Each text counts the same."""

    low: Float
    """[channels]: the smallest value."""
    high: Float
    """[channels]: the largest value."""
    mean: Float
    """[channels]"""
    samples: Float
    """[n, channels]: some tokens of each text, scaled so that `samples.T @ samples` is a sum of means over texts."""

    @property
    def magnitude(self) -> Float:
        """[channels]: the largest absolute value."""
        return np.maximum(np.abs(self.low), np.abs(self.high))


class Watch:
    """Collects `Seen` text by text. `tokens` is about how many samples there will be at most, over `texts` texts."""

    def __init__(self, *, texts: int, tokens: int) -> None:
        self._most = max(1, tokens // max(texts, 1))
        self._low: list[Float] = []
        self._high: list[Float] = []
        self._mean: list[Float] = []
        self._samples: list[Float] = []

    def add(self, values: Float) -> None:
        """One text's activation, float32 [..., channels]."""
        flat = values.reshape(-1, values.shape[-1])
        self._low.append(flat.min(axis=0))
        self._high.append(flat.max(axis=0))
        self._mean.append(flat.mean(axis=0))
        count = min(len(flat), self._most)
        # Evenly from the first token to the last: special tokens, which stand there, reach the largest values.
        picked = flat[np.linspace(0, len(flat) - 1, count).round().astype(int)]
        self._samples.append(picked / np.float32(np.sqrt(count)))

    def seen(self) -> Seen:
        """The summary. At least one text must have been added."""
        return Seen(
            low=np.min(self._low, axis=0),
            high=np.max(self._high, axis=0),
            mean=np.mean(self._mean, axis=0, dtype=np.float32),
            samples=np.concatenate(self._samples),
        )


def together(several: Sequence[Seen]) -> Seen:
    """Several activations that meet the same weight, as one."""
    return Seen(
        low=np.min([one.low for one in several], axis=0),
        high=np.max([one.high for one in several], axis=0),
        mean=np.mean([one.mean for one in several], axis=0, dtype=np.float32),
        samples=np.concatenate([one.samples for one in several]),
    )


LARGE = 1_500_000_000
"""Bytes of a graph beyond which its weights go to a separate file: protobuf ends at 2 GB."""
SAMPLE_TOKENS = 2048
"""Of each activation: enough to know how its channels vary together, for layers of up to some 4,000 inputs."""
PASS_BYTES = 400_000_000


def feed(row: Row, inputs: Sequence[str]) -> dict[str, Any]:
    """One row as a batch of one: int64 [1, tokens] for each of the graph's inputs."""
    return dict(graph_feed(collate([row]), inputs))


def outputs(path: Path, inputs: Sequence[str], rows: Sequence[Row], threads: int) -> list[list[Float]]:
    """The graph's outputs for each row."""
    running = open_session(path, threads)
    return [running.run(None, feed(row, inputs)) for row in rows]


def observe(
    model: Any, values: Sequence[str], inputs: Sequence[str], rows: Sequence[Row], *, threads: int, scratch: Path
) -> dict[str, Seen]:
    """The range of each value over the rows. `scratch` is a file path to write and remove.

    Over the rows several times when the samples of one would take more memory than `PASS_BYTES`.
    """
    tokens = max(SAMPLE_TOKENS, len(rows))
    result: dict[str, Seen] = {}
    try:
        save(_watched(model, values), scratch)
        running = open_session(scratch, threads)
        first = running.run(list(values), feed(rows[0], inputs))
        bytes_each = {value: array.shape[-1] * tokens * 4 for value, array in zip(values, first, strict=True)}
        for some in _passes(bytes_each):
            watches = {value: Watch(texts=len(rows), tokens=tokens) for value in some}
            for row in rows:
                for watch, array in zip(watches.values(), running.run(some, feed(row, inputs)), strict=True):
                    watch.add(array)
            result |= {value: watch.seen() for value, watch in watches.items()}
    finally:
        for path in (scratch, weights_file(scratch)):
            path.unlink(missing_ok=True)
    return result


def _watched(model: Any, values: Sequence[str]) -> Any:
    watched = onnx.ModelProto()
    watched.CopyFrom(model)
    floats = onnx.TensorProto.FLOAT
    watched.graph.output.extend(onnx.helper.make_tensor_value_info(value, floats, None) for value in values)
    return watched


def _passes(bytes_each: Mapping[str, int]) -> list[list[str]]:
    passes: list[list[str]] = [[]]
    taken = 0
    for value, size in bytes_each.items():
        if passes[-1] and taken + size > PASS_BYTES:
            passes.append([])
            taken = 0
        passes[-1].append(value)
        taken += size
    return passes


def difference(expected: Sequence[Sequence[Float]], actual: Sequence[Sequence[Float]]) -> float:
    """The mean over the rows of |actual - expected|^2 / |expected|^2, all outputs of a row together; inf for NaN."""
    total = 0.0
    for row_expected, row_actual in zip(expected, actual, strict=True):
        squared = sum(
            float(np.sum((b - a).astype(np.float64) ** 2)) for a, b in zip(row_expected, row_actual, strict=True)
        )
        norm = sum(float(np.sum(a.astype(np.float64) ** 2)) for a in row_expected)
        total += squared / max(norm, 1e-12)
    return total / len(expected) if np.isfinite(total) else float("inf")


def weights_file(path: Path) -> Path:
    """Where the weights of a large graph stand."""
    return path.with_name(f"{path.name}.data")


def save(model: Any, path: Path) -> None:
    """Write a graph; its weights to a separate file when protobuf's 2 GB would not hold them."""
    if model.ByteSize() > LARGE:
        onnx.save_model(model, str(path), save_as_external_data=True, location=weights_file(path).name)
    else:
        path.write_bytes(model.SerializeToString())
