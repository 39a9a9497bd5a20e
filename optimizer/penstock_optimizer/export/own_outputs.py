"""The outputs of a model's own ONNX graph: names, types, and the function from logits to scores at its end.

Tasks take logits. A graph that ends in Softmax, LogSoftmax or Sigmoid gets the input of that node as its output: the
function is then applied once, by the task, and scores that need logits (zero-shot classification, raw scores) have
them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import AttributeProto, TensorProto, helper

from penstock_runtime.tasks.classification.text_classification import Function

FUNCTIONS: Mapping[str, Function] = {
    "Softmax": Function.SOFTMAX,
    "LogSoftmax": Function.SOFTMAX,
    "Sigmoid": Function.SIGMOID,
}
"""Operators from logits to scores."""
PASSED_OVER = frozenset({"Identity", "Cast"})
"""Operators between such a function and the output."""
LAST_AXIS_SINCE = 13
"""The first opset in which the axis of Softmax is the last one by default; before, it is the second."""
SUM_CLOSE = 1e-4
"""Largest distance of a sum of probabilities from 1."""


@dataclass(frozen=True)
class Source:
    """Where an output of ours comes from."""

    value: str
    """The value of the graph."""
    is_float32: bool
    """False: its type is another one, or not known."""
    function: Function | None = None
    """The function behind `value` that is left out."""


def source_of(model: Any, name: str, rank: int, *, is_float32: bool) -> Source:
    """The logits of the output `name`, which has `rank` axes; itself if the graph does not end in a function."""
    producers = {output: node for node in model.graph.node for output in node.output}
    node = producers.get(name)
    while node is not None and node.op_type in PASSED_OVER:
        node = producers.get(node.input[0])
    if node is None or node.op_type not in FUNCTIONS:
        return Source(name, is_float32)
    if node.op_type != "Sigmoid" and _axis(model, node) not in {-1, rank - 1}:
        return Source(name, is_float32)
    return Source(node.input[0], is_float32=is_float32 and name in node.output, function=FUNCTIONS[node.op_type])


def _axis(model: Any, node: Any) -> int:
    axis = next((one.i for one in node.attribute if one.name == "axis"), None)
    if axis is not None:
        return int(axis)
    version = next((one.version for one in model.opset_import if one.domain in {"", "ai.onnx"}), LAST_AXIS_SINCE)
    return -1 if version >= LAST_AXIS_SINCE else 1


def are_probabilities(values: NDArray[Any]) -> bool:
    """True if all values are from 0 to 1 and sum to 1 over the last axis, as no logits do."""
    if values.shape[-1] < 2:
        return False
    sums = values.sum(axis=-1, dtype=np.float64)
    return bool(values.min() >= 0 and values.max() <= 1 and np.abs(sums - 1).max() <= SUM_CLOSE)


def set_outputs(model: Any, chosen: Mapping[str, Source]) -> None:
    """Give the graph the outputs of `chosen` (our names to their sources), as float32, and no other outputs."""
    types = {value.name: value.type for value in model.graph.output}
    fallback = next(iter(types.values()))
    # A value within the graph may be called as one of ours is to be.
    taken = set(_values(model.graph))
    inner = {name: _free(f"{name}/own", taken) for name in chosen if name in taken}
    _rename(model.graph, inner)
    del model.graph.output[:]
    for ours, source in chosen.items():
        value = inner.get(source.value, source.value)
        kind = {} if source.is_float32 else {"to": TensorProto.FLOAT}
        operator = "Identity" if source.is_float32 else "Cast"
        model.graph.node.append(helper.make_node(operator, [value], [ours], name=f"penstock/{ours}", **kind))
        output = model.graph.output.add(name=ours)
        output.type.CopyFrom(types.get(source.value, fallback))
        output.type.tensor_type.elem_type = TensorProto.FLOAT


def _values(graph: Any) -> Iterator[str]:
    """The names of all values of a graph and of the graphs within its nodes."""
    for value in (*graph.input, *graph.initializer):
        yield value.name
    for tensor in graph.sparse_initializer:
        yield tensor.values.name
    for node in graph.node:
        yield from node.output
        for inner in _graphs(node):
            yield from _values(inner)


def _graphs(node: Any) -> Iterator[Any]:
    for attribute in node.attribute:
        if attribute.type == AttributeProto.GRAPH:
            yield attribute.g
        yield from attribute.graphs


def _free(name: str, taken: set[str]) -> str:
    while name in taken:
        name += "_"
    taken.add(name)
    return name


def _rename(graph: Any, names: Mapping[str, str]) -> None:
    """Rename values of a graph, also where graphs within its nodes use them."""
    if not names:
        return
    for value in (*graph.input, *graph.output, *graph.initializer, *graph.value_info):
        value.name = names.get(value.name, value.name)
    for tensor in graph.sparse_initializer:
        tensor.values.name = names.get(tensor.values.name, tensor.values.name)
    for annotation in graph.quantization_annotation:
        annotation.tensor_name = names.get(annotation.tensor_name, annotation.tensor_name)
    for node in graph.node:
        for part in (node.input, node.output):
            part[:] = [names.get(name, name) for name in part]
        for inner in _graphs(node):
            _rename(inner, names)
