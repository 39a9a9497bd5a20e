"""The state of reading a graph for the native engine: steps, buffers and tensors so far, and the meanings of values."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from onnx import numpy_helper

from penstock_optimizer.quantise.native.inputs import INPUTS
from penstock_optimizer.quantise.native.values import Buffers, Column, GraphValue, TableSum, narrow, refusal
from penstock_runtime.engines.native.graph_file import Activation, GraphStep, Operator

WIDTH = 32
"""Widths of hidden states are multiples of it, widths of heads of half of it: the kernels have no tails."""
ACTIVATIONS: Mapping[str, Activation] = {
    "Gelu": "gelu", "FastGelu": "gelu-tanh", "Relu": "relu", "Tanh": "tanh",
}  # fmt: skip


class Reading:
    """The base of the readers of nodes."""

    def __init__(self, model: Any) -> None:
        self._graph = model.graph
        self._nodes = list(model.graph.node)  # kept: nodes are known by their identity
        self._constants = {tensor.name: tensor for tensor in model.graph.initializer}
        self._readers = Counter(name for node in self._nodes for name in node.input)
        self._after = {name: node for node in self._nodes for name in node.input}
        self._done: set[int] = set()
        self._known: dict[str, Any] = dict(INPUTS)
        self._left: Counter[int] = Counter()
        self._buffers = Buffers()
        self._tensors: dict[str, Any] = {}
        self._steps: list[GraphStep] = []
        self._results: dict[str, GraphValue | Column] = {}
        self._chosen = -1

    def _embed(self, node: Any, tables: TableSum) -> GraphValue:
        if not tables.words:
            raise refusal(f"{node.name}, embeddings without words")
        words = self._array(tables.words) * np.float32(tables.scale)
        vectors, scales = f"{tables.words}/int16", f"{tables.words}/int16.scale"
        self._tensors[vectors], self._tensors[scales] = narrow(words)
        target = self._buffers.take(words.shape[1], "token")
        tensors = {
            "weights": vectors,
            "scales": scales,
            **({"position_table": self._keep(tables.positions)} if tables.positions else {}),
            **({"type_table": self._keep(tables.types)} if tables.types else {}),
        }
        self._step(
            node, "embed", target=target.buffer, inputs=len(words), outputs=target.width,
            positions=len(self._array(tables.positions)) if tables.positions else 0, padding=tables.padding,
            types=len(self._array(tables.types)) if tables.types else 0, tensors=tensors,
        )  # fmt: skip
        return target

    def _activation_after(self, node: Any) -> tuple[Any, Activation]:
        after = self._only_reader(node)
        if after is None or after.op_type not in ACTIVATIONS:
            return node, "none"
        return self._take(after), ACTIVATIONS[after.op_type]

    def _residual_after(self, node: Any) -> tuple[Any, GraphValue | None]:
        after = self._only_reader(node)
        if after is None or after.op_type not in {"Sum", "Add"} or len(after.input) != 2:
            return node, None
        (other,) = [name for name in after.input if name != node.output[0]] or [""]
        value = self._known.get(other)
        if not isinstance(value, GraphValue) or value.factors:
            raise refusal(f"the sum {after.name}")
        return self._take(after), value

    def _only_reader(self, node: Any) -> Any | None:
        return self._after[node.output[0]] if self._readers[node.output[0]] == 1 else None

    def _take(self, node: Any) -> Any:
        self._done.add(id(node))
        return node

    def _find(self, node: Any, index: int) -> Any:
        return self._known.get(node.input[index])

    def _buffer(self, node: Any, index: int) -> GraphValue:
        value = self._find(node, index)
        if isinstance(value, TableSum):
            value = self._embed(node, value)
            self._set_value(node.input[index], value)
        if not isinstance(value, GraphValue):
            raise refusal(f"{node.name}, which reads what is no hidden state")
        return value

    def _array(self, name: str) -> Any:
        if name not in self._constants:
            raise refusal(f"{name}, which is no constant")
        return numpy_helper.to_array(self._constants[name])

    def _is_output(self, node: Any) -> bool:
        """True if only the graph's caller reads the result of a node."""
        after = self._only_reader(node)
        return after is not None and after.op_type == "Identity"

    def _keep(self, name: str, columns: int = 0) -> str:
        """Put a constant into the file, with zeros up to this number of columns."""
        array = self._array(name)
        missing = max(columns - array.shape[-1], 0)
        name = f"{name}/{columns}" if missing else name
        if name not in self._tensors:
            padded = np.pad(array, [*[(0, 0)] * (array.ndim - 1), (0, missing)])
            self._tensors[name] = np.ascontiguousarray(padded)
        return name

    def _set_value(self, name: str, value: GraphValue) -> None:
        """The buffer of a value that is written."""
        self._known[name] = value
        self._left[value.buffer] = self._readers[name]

    def _set(self, node: Any, value: Any) -> None:
        self._known[node.output[0]] = value

    def _write(self, node: Any, target: GraphValue, *read: GraphValue) -> None:
        """The node's result is written, and each value that it read has one reader less."""
        self._set_value(node.output[0], target)
        for value in read:
            self._left[value.buffer] -= 1
            if not self._left[value.buffer]:
                self._buffers.give(replace(value, factors=""))

    def _step(self, node: Any, operator: Operator, *, outputs: int, inputs: int = 0, **fields: Any) -> None:
        widths = {
            "linear8": (inputs, outputs), "largest": (inputs, outputs), "linear32": (inputs,),
            **dict.fromkeys(("first", "last", "chosen", "average"), ()),
        }.get(operator, (outputs,))  # fmt: skip
        for width in widths:
            if width % WIDTH:
                raise refusal(f"{node.name}, whose width of {width} is no multiple of {WIDTH}")
        self._steps.append(GraphStep(operator=operator, outputs=outputs, inputs=inputs, **fields))
