"""Writes 8-bit products whose activations are quantised row by row (token by token) at run time.

No library has such an operator, so it is an ONNX function of standard ones: ONNX Runtime computes the very numbers that
the native engine will, in floating point and slowly, which is how the strength of smoothing is chosen and what the
tests compare with. `native_steps` reads it again.
"""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
from onnx import TensorProto, helper

from penstock_optimizer.export.graph import OPSET
from penstock_optimizer.quantise.linear import LinearGraph
from penstock_optimizer.quantise.quantiser import Product

DOMAIN = "penstock"
OPERATOR = "RowwiseLinear"
"""Inputs: activation [..., in], weight int8 [in, out], scale [out], bias [out]."""


class RowwiseWriter:
    """See `Writer`."""

    opset: ClassVar[int] = 1
    """Any: the function brings the version of its own operators."""

    def write(self, graph: LinearGraph, product: Product) -> tuple[list[Any], list[Any]]:
        """The product; of a fused attention the three products as one, and what is left of the attention."""
        _declare(graph.model)
        node, weight = product.node, product.weight
        outputs = weight.values.shape[1]
        inputs = [
            product.source,
            graph.constant(weight.values, product.name),
            graph.constant(np.broadcast_to(weight.scale, outputs).copy(), f"{product.name}.scale"),
            product.bias or graph.constant(np.zeros(outputs, np.float32), f"no bias {outputs}"),
        ]
        if node.op_type != "Attention":
            return [], [helper.make_node(OPERATOR, inputs, [product.output], node.name, domain=DOMAIN)]
        together = f"{node.name}/together"
        parts = [f"{node.name}/{part}" for part in ("query", "key", "value")]
        attributes = {one.name: helper.get_attribute_value(one) for one in node.attribute}
        mask = [node.input[3]] if len(node.input) > 3 else []
        return [], [
            helper.make_node(OPERATOR, inputs, [together], together, domain=DOMAIN),
            helper.make_node("Split", [together], parts, f"{node.name}/Split", axis=-1),
            helper.make_node(
                "MultiHeadAttention",
                [*parts, *([""] if mask else []), *mask],
                [product.output],
                node.name,
                domain=node.domain,
                **{name: value for name, value in attributes.items() if name != "unidirectional"},
            ),
        ]


def _declare(model: Any) -> None:
    """Add the function to the model, once."""
    if any(function.name == OPERATOR for function in model.functions):
        return

    def constant(name: str, value: float) -> Any:
        return helper.make_node("Constant", [], [name], value=helper.make_tensor(name, TensorProto.FLOAT, [], [value]))

    nodes = [
        *(constant(name, value) for name, value in (("nought", 0.0), ("steps", 255.0), ("least", 1e-30))),
        helper.make_node("ReduceMin", ["x"], ["lowest"], axes=[-1], keepdims=1),
        helper.make_node("ReduceMax", ["x"], ["highest"], axes=[-1], keepdims=1),
        helper.make_node("Min", ["lowest", "nought"], ["low"]),
        helper.make_node("Max", ["highest", "nought"], ["high"]),
        helper.make_node("Sub", ["high", "low"], ["span"]),
        helper.make_node("Div", ["span", "steps"], ["raw"]),
        helper.make_node("Max", ["raw", "least"], ["step"]),
        helper.make_node("Neg", ["low"], ["depth"]),
        helper.make_node("Div", ["depth", "step"], ["shift"]),
        helper.make_node("Round", ["shift"], ["zero"]),
        helper.make_node("Div", ["x", "step"], ["scaled"]),
        helper.make_node("Round", ["scaled"], ["rounded"]),
        helper.make_node("Add", ["rounded", "zero"], ["shifted"]),
        helper.make_node("Clip", ["shifted", "nought", "steps"], ["stored"]),
        helper.make_node("Sub", ["stored", "zero"], ["centred"]),
        helper.make_node("Mul", ["centred", "step"], ["again"]),
        helper.make_node("Cast", ["w"], ["whole"], to=TensorProto.FLOAT),
        helper.make_node("Mul", ["whole", "scale"], ["weight"]),
        helper.make_node("MatMul", ["again", "weight"], ["product"]),
        helper.make_node("Add", ["product", "bias"], ["y"]),
    ]
    opset = [helper.make_opsetid("", OPSET)]
    model.functions.append(helper.make_function(DOMAIN, OPERATOR, ["x", "w", "scale", "bias"], ["y"], nodes, opset))
    model.opset_import.append(helper.make_opsetid(DOMAIN, 1))
