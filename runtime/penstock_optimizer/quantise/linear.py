"""Finds the linear layers of an ONNX graph and rewrites them to 8-bit integer operators of ONNX Runtime.

Works on graphs that are already fused (`penstock_optimizer.export`): biases and activations then stand in operators
of their own behind the product, and `Attention` holds its three projections. Only products with constant weights are
quantised; softmax, normalisation, GELU, residual sums and the products within the attention stay in float.
Knows ONNX; runs nothing.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

from penstock_optimizer.quantise.smoothing import factors
from penstock_optimizer.quantise.weights import FULL, REDUCED, QuantisedWeight, grid, quantise_weight
from penstock_runtime.rows import Float

MICROSOFT = "com.microsoft"
SMALLEST_WEIGHT = 16_384
"""Elements. Smaller products (a classifier's last layer) cost next to nothing in fp32, and rounding them costs most."""
FEWEST_OUTPUTS = 16
"""Output channels: below, it is a classifier's last layer."""
_QATTENTION_ATTRIBUTES = {"num_heads", "unidirectional", "mask_filter_value", "scale"}


@dataclass(frozen=True, eq=False)
class Range:
    """What an activation reached over the calibration texts."""

    low: Float
    """[channels]"""
    high: Float
    """[channels]"""

    @property
    def magnitude(self) -> Float:
        """[channels]: the largest absolute value."""
        return np.maximum(np.abs(self.low), np.abs(self.high))


@dataclass(frozen=True)
class Style:
    """How to quantise."""

    static: bool
    """Activations by calibrated ranges; else by their own range at each run."""
    per_channel: bool = True
    reduced_range: bool = False
    smoothing: float | None = None
    """The alpha of SmoothQuant; None: off."""

    @property
    def needs_ranges(self) -> bool:
        """True when calibration has something to tell."""
        return self.static or self.smoothing is not None


@dataclass(frozen=True, eq=False)
class Group:
    """Linear nodes that share an input or a weight, directly or through each other: they are smoothed alike."""

    nodes: tuple[Any, ...]
    values: tuple[str, ...]
    """Their distinct activations, in order."""
    weights: tuple[str, ...]
    """Their distinct weights, in order."""


class LinearGraph:
    """A model with its linear layers found. `quantise` changes the model in place: once only."""

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
        self._scaled: dict[tuple[str, int], QuantisedWeight] = {}
        self._counts: Counter[str] = Counter()
        self.groups = self._find_groups()

    @property
    def values(self) -> tuple[str, ...]:
        """The activations to calibrate, each once."""
        return tuple(value for group in self.groups for value in group.values)

    def quantise(self, style: Style, ranges: Mapping[str, Range]) -> dict[str, int]:
        """Rewrite all linear layers; returns the counts of what was written, by operator type.

        `ranges` holds each of `values` where the style needs them.
        """
        before: dict[int, list[Any]] = defaultdict(list)
        instead: dict[int, list[Any]] = {}
        smoothing = {} if style.smoothing is None else self._smooth(style.smoothing, ranges, before)
        quantised: dict[str, _Activation] = {}
        for group in self.groups:
            divisors = smoothing.get(group.values[0])
            for node in group.nodes:
                value = node.input[0]
                if value not in quantised:
                    source = divisors.value[value] if divisors else value
                    span = ranges[value] if style.static else None
                    quantised[value] = self._activation(
                        source, span, divisors.by if divisors else None, alone=self._alone(value)
                    )
                    before[id(node)] += quantised[value].nodes
                weight = self._weight(node, style, divisors.by if divisors else None)
                instead[id(node)] = [self._product(node, quantised[value], weight)]
        self._replace(before, instead)
        return dict(sorted(self._counts.items()))

    def _find_groups(self) -> tuple[Group, ...]:
        """Nodes in order, joined by what they share (ALBERT's layers share weights, Q, K and V share an input)."""
        found = [node for node in self.model.graph.node if self._is_linear(node)]
        group_of: dict[str, int] = {}
        members: dict[int, list[Any]] = {}
        for index, node in enumerate(found):
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
        attributes = {attribute.name: helper.get_attribute_value(attribute) for attribute in node.attribute}
        match node.op_type:
            case "MatMul":
                outputs = weight.dims[1]
            case "Gemm":
                plain = attributes.get("alpha", 1.0) == attributes.get("beta", 1.0) == 1.0
                if (
                    not plain
                    or attributes.get("transA", 0)
                    or (len(node.input) > 2 and not self._is_vector(node.input[2]))
                ):
                    return False
                outputs = weight.dims[0] if attributes.get("transB", 0) else weight.dims[1]
            case "Attention":
                # QAttention knows neither a bias on the scores nor sizes that differ; past states are not for encoders.
                if any(node.input[4:]) or not set(attributes) <= _QATTENTION_ATTRIBUTES or not node.input[2]:
                    return False
                outputs = weight.dims[1]
            case _:
                return False
        return bool(outputs >= FEWEST_OUTPUTS and weight.dims[0] * weight.dims[1] >= SMALLEST_WEIGHT)

    def _is_vector(self, name: str) -> bool:
        return name in self._constants and len(self._constants[name].dims) == 1

    def _alone(self, value: str) -> bool:
        """True when one plain product reads the value, which may then quantise it by itself."""
        readers = [node for node in self._consumers[value] if self._is_linear(node) and node.input[0] == value]
        return len(readers) == 1 and readers[0].op_type != "Attention"

    def _array(self, name: str) -> Float:
        if name not in self._arrays:
            self._arrays[name] = np.asarray(numpy_helper.to_array(self._constants[name]))
        return self._arrays[name]

    def _matrix(self, node: Any) -> Float:
        """The weight [in, out]."""
        array = self._array(node.input[1])
        transposed = node.op_type == "Gemm" and any(a.name == "transB" and a.i for a in node.attribute)
        return array.T if transposed else array

    def _smooth(self, alpha: float, ranges: Mapping[str, Range], before: dict[int, list[Any]]) -> dict[str, _Divisors]:
        """The divisors of each group, by its first value, with the nodes that divide written into `before`."""
        result: dict[str, _Divisors] = {}
        for group in self.groups:
            magnitude = np.max([ranges[value].magnitude for value in group.values], axis=0)
            matrices = [self._matrix(node) for node in group.nodes]
            by = factors(magnitude, matrices, alpha)
            if self._fold(group, by):
                result[group.values[0]] = _Divisors(by, {value: value for value in group.values})
                continue
            inverse = self._constant(np.float32(1) / by, f"{group.weights[0]}/smoothing")
            renamed = {}
            for value in group.values:
                renamed[value] = self._fresh(f"{value}/smoothed")
                first = next(node for node in group.nodes if node.input[0] == value)
                before[id(first)].append(helper.make_node("Mul", [value, inverse], [renamed[value]], renamed[value]))
                self._counts["Mul"] += 1
            result[group.values[0]] = _Divisors(by, renamed)
        return result

    def _fold(self, group: Group, by: Float) -> bool:
        """Let the attention that makes the group's values divide: by its value projection, at no cost. False where
        something else reads the values or the projection."""
        makers = [self._producers.get(value) for value in group.values]
        if not all(maker is not None and maker.op_type == "Attention" and self._is_linear(maker) for maker in makers):
            return False
        nodes = {id(node) for node in group.nodes}
        makers_ids = {id(maker) for maker in makers}
        read_elsewhere = any(
            value in self._outputs or any(id(node) not in nodes for node in self._consumers[value])
            for value in group.values
        )
        shared = any(
            id(user) not in makers_ids
            for maker in makers
            for name in (maker.input[1], maker.input[2])  # type: ignore[union-attr]  # all are nodes, see above
            for user in self._consumers[name]
        )
        if read_elsewhere or shared:
            return False
        for name in dict.fromkeys(name for maker in makers for name in (maker.input[1], maker.input[2])):  # type: ignore[union-attr]
            array = self._array(name).copy()
            array[..., -by.size :] /= by
            self._arrays[name] = array
            self._constants[name].CopyFrom(numpy_helper.from_array(array, name))
        return True

    def _activation(self, source: str, span: Range | None, by: Float | None, *, alone: bool) -> _Activation:
        if span is None and alone:
            return _Activation(source, "", "", [])  # DynamicQuantizeMatMul takes the float tensor itself
        name = self._fresh(f"{source}/quantised")
        scale, zero = f"{name}.scale", f"{name}.zero"
        if span is None:
            self._counts["DynamicQuantizeLinear"] += 1
            return _Activation(
                name, scale, zero, [helper.make_node("DynamicQuantizeLinear", [source], [name, scale, zero], name)]
            )
        divisors = np.float32(1) if by is None else by
        cells = grid(float((span.low / divisors).min()), float((span.high / divisors).max()))
        self._constant(np.asarray(cells.step, np.float32), scale)
        self._constant(np.asarray(cells.zero, np.uint8), zero)
        self._counts["QuantizeLinear"] += 1
        return _Activation(name, scale, zero, [helper.make_node("QuantizeLinear", [source, scale, zero], [name], name)])

    def _weight(self, node: Any, style: Style, by: Float | None) -> _Weight:
        """Quantised once for all nodes that share it: they are in one group, so their divisors are the same."""
        name = f"{node.input[1]}/int8"
        if name not in self._constants:
            matrix = self._matrix(node)
            weight = quantise_weight(
                matrix if by is None else matrix * by[:, np.newaxis],
                per_channel=style.per_channel,
                largest=REDUCED if style.reduced_range else FULL,
            )
            self._constant(weight.values, name)
            self._constant(weight.scale, f"{name}.scale")
            self._constant(np.zeros(weight.scale.shape, np.int8), f"{name}.zero")
        return _Weight(name, f"{name}.scale", f"{name}.zero")

    def _product(self, node: Any, x: _Activation, w: _Weight) -> Any:
        bias = node.input[2] if len(node.input) > 2 else ""
        if node.op_type == "Attention":
            mask = node.input[3] if len(node.input) > 3 else ""
            operator = "QAttention"
            inputs = [x.name, w.name, bias, x.scale, w.scale, mask, x.zero, w.zero]
            attributes = {a.name: helper.get_attribute_value(a) for a in node.attribute}
        elif not x.scale:
            operator, inputs, attributes = "DynamicQuantizeMatMul", [x.name, w.name, w.scale, w.zero, bias], {}
        else:
            operator, attributes = "MatMulIntegerToFloat", {}
            inputs = [x.name, w.name, x.scale, w.scale, x.zero, w.zero, bias]
        while inputs and not inputs[-1]:
            inputs.pop()
        self._counts[operator] += 1
        return helper.make_node(operator, inputs, list(node.output), node.name, domain=MICROSOFT, **attributes)

    def _constant(self, array: Any, name: str) -> str:
        tensor = numpy_helper.from_array(np.asarray(array), name)
        self._constants[name] = tensor
        self.model.graph.initializer.append(tensor)
        return name

    def _fresh(self, name: str) -> str:
        while name in self._constants or name in self._producers:
            name += "'"
        return name

    def _replace(self, before: Mapping[int, Sequence[Any]], instead: Mapping[int, Sequence[Any]]) -> None:
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


@dataclass(frozen=True, eq=False)
class _Divisors:
    by: Float
    value: Mapping[str, str]
    """The name under which each value stands once divided."""


@dataclass(frozen=True, eq=False)
class _Activation:
    name: str
    scale: str
    """Empty: not quantised yet, the product does it."""
    zero: str
    nodes: list[Any]


@dataclass(frozen=True)
class _Weight:
    name: str
    scale: str
    zero: str
