"""From the logits of a masked language model to a weight for each token of the vocabulary: the end of SPLADE graphs.

`models.sentence.SparsePooling` has the formula and its source.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from penstock.manifest import GRAPH_OUTPUTS
from penstock.tasks import Head
from penstock_optimizer.export.build.graph import OPSET
from penstock_runtime.models.sentence import SparsePooling

AXES_SINCE = 13
"""The first opset in which operators take their axes as an input."""
MAXIMUM_AXES_SINCE = 18
"""The same of ReduceMax."""
(WEIGHTS,) = GRAPH_OUTPUTS[Head.SPARSE]
(LOGITS,) = GRAPH_OUTPUTS[Head.MASKED_LM]


class NodeWriter(Protocol):
    """Appends to a graph, as `Graph` does."""

    def node(self, operator: str, inputs: list[str], name: str, **attributes: Any) -> str:
        """Append a node with one output, which is returned."""
        ...

    def constant(self, array: NDArray[Any], name: str) -> str:
        """Add a constant; returns its name."""
        ...


def write_weights(writer: NodeWriter, logits: str, mask: str, pooling: SparsePooling, *, opset: int = OPSET) -> str:
    """Append the nodes from `logits` [batch, tokens, vocabulary] to weights [batch, vocabulary].

    `mask`: int64 [batch, tokens, 1], 1 a token and 0 padding; empty if padding cannot change the maximum.
    """
    one = writer.constant(np.ones((), np.float32), "weights.one")
    if mask:
        real = writer.node("Cast", [mask], "weights/Cast", to=TensorProto.FLOAT)
        logits = writer.node("Mul", [logits, real], "weights/Mul")
    if pooling.sums:
        # Masked logits are 0, and so are their logarithms.
        each = _logarithm(writer, logits, one, pooling)
        return _with_axes(writer, "ReduceSum", each, 1, since=AXES_SINCE, opset=opset, keepdims=0)
    # The logarithm rises with the logit: it is taken of the largest alone.
    largest = _with_axes(writer, "ReduceMax", logits, 1, since=MAXIMUM_AXES_SINCE, opset=opset, keepdims=0)
    return _logarithm(writer, largest, one, pooling)


def _logarithm(writer: NodeWriter, x: str, one: str, pooling: SparsePooling) -> str:
    x = writer.node("Relu", [x], "weights/Relu")
    for _ in range(2 if pooling.twice else 1):
        x = writer.node("Log", [writer.node("Add", [x, one], "weights/Add")], "weights/Log")
    return x


def _with_axes(
    writer: NodeWriter, operator: str, x: str, axis: int, *, since: int, opset: int, **attributes: Any
) -> str:
    if opset < since:
        return writer.node(operator, [x], f"weights/{operator}", axes=[axis], **attributes)
    axes = writer.constant(np.array([axis], np.int64), f"weights.at.{axis}")
    return writer.node(operator, [x, axes], f"weights/{operator}", **attributes)


def pool_file(path: Path, pooling: SparsePooling) -> None:
    """Change the graph at `path`: its output `logits` [batch, tokens, vocabulary] becomes `weights`."""
    model = onnx.load(str(path), load_external_data=False)
    graph = model.graph
    opset = next((one.version for one in model.opset_import if one.domain in {"", "ai.onnx"}), OPSET)
    writer = _Appended(graph)
    mask = ""
    if any(value.name == "attention_mask" for value in graph.input):
        mask = _with_axes(writer, "Unsqueeze", "attention_mask", 2, since=AXES_SINCE, opset=opset)
    weights = write_weights(writer, LOGITS, mask, pooling, opset=opset)
    graph.node.append(helper.make_node("Identity", [weights], [WEIGHTS], name=f"{WEIGHTS}/Identity"))
    (scores,) = graph.output
    vocabulary = scores.type.tensor_type.shape.dim[-1:]
    sizes = [dim.dim_value if dim.HasField("dim_value") else "vocabulary" for dim in vocabulary] or ["vocabulary"]
    graph.output[0].CopyFrom(helper.make_tensor_value_info(WEIGHTS, TensorProto.FLOAT, ["batch", *sizes]))
    onnx.save(model, str(path))


class _Appended:
    """Appends to a graph that exists, under names that it does not have."""

    def __init__(self, graph: Any) -> None:
        self._graph = graph
        self._constants: set[str] = set()
        self._nodes = 0

    def node(self, operator: str, inputs: list[str], name: str, **attributes: Any) -> str:
        """See `NodeWriter`."""
        self._nodes += 1
        output = f"penstock/{name}.{self._nodes}"
        self._graph.node.append(helper.make_node(operator, inputs, [output], name=output, **attributes))
        return output

    def constant(self, array: NDArray[Any], name: str) -> str:
        """See `NodeWriter`."""
        unique = f"penstock/{name}"
        if unique not in self._constants:
            self._constants.add(unique)
            self._graph.initializer.append(numpy_helper.from_array(array, unique))
        return unique
