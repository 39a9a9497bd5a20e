"""Writes 8-bit products in the operators of an engine.

`IntegerWriter` uses ONNX Runtime's own operators, each of which does what else takes four. `QdqWriter` uses standard
operators: both sides quantised and dequantised, then multiplied in float; OpenVINO recognises the pairs as
quantisation, and multiplies integers. `RowwiseWriter` quantises activations row by row (token by token) at run time,
for the native engine. No library has such an operator, so it is an ONNX function of standard ones: ONNX Runtime
computes the very numbers that the native engine will, in floating point and slowly, which is how the strength of
smoothing is chosen. The tests compare with it too. `native.steps` reads it again.
"""

from __future__ import annotations

from itertools import starmap
from typing import Any, ClassVar

import numpy as np
from onnx import TensorProto, helper

from penstock_optimizer.export.build.graph import MICROSOFT, OPSET
from penstock_optimizer.quantise.linear import LinearGraph, attributes
from penstock_optimizer.quantise.quantiser import Product
from penstock_optimizer.quantise.rounding import SMALLEST_SCALE


class IntegerWriter:
    """One for each graph: activations that several products read are quantised once."""

    opset: ClassVar[int] = 11
    """DynamicQuantizeLinear."""

    def __init__(self) -> None:
        self._quantised: dict[str, tuple[str, str, str]] = {}

    def write(self, graph: LinearGraph, product: Product) -> tuple[list[Any], list[Any]]:
        """See `Writer`."""
        weight = graph.constant(product.weight.values, product.name)
        scale = graph.constant(product.weight.scale, f"{product.name}.scale")
        zero = graph.constant(np.zeros(product.weight.scale.shape, np.int8), f"{product.name}.zero")
        node = product.node
        if product.grid is None and product.alone and node.op_type != "Attention":
            inputs = [product.source, weight, scale, zero, product.bias]
            return [], [_node("DynamicQuantizeMatMul", inputs, product)]
        front, (x, x_scale, x_zero) = self._activation(graph, product)
        if node.op_type == "Attention":
            mask = node.input[3] if len(node.input) > 3 else ""
            inputs = [x, weight, product.bias, x_scale, scale, mask, x_zero, zero]
            return front, [_node("QAttention", inputs, product, **attributes(node))]
        inputs = [x, weight, x_scale, scale, x_zero, zero, product.bias]
        return front, [_node("MatMulIntegerToFloat", inputs, product)]

    def _activation(self, graph: LinearGraph, product: Product) -> tuple[list[Any], tuple[str, str, str]]:
        source = product.source
        if source in self._quantised:
            return [], self._quantised[source]
        name = f"{source}/quantised"
        names = self._quantised[source] = (name, f"{name}.scale", f"{name}.zero")
        if product.grid is None:
            return [helper.make_node("DynamicQuantizeLinear", [source], list(names), name)], names
        graph.constant(np.asarray(product.grid.step, np.float32), names[1])
        graph.constant(np.asarray(product.grid.zero, np.uint8), names[2])
        return [helper.make_node("QuantizeLinear", [source, names[1], names[2]], [name], name)], names


def _node(operator: str, inputs: list[str], product: Product, **given: Any) -> Any:
    while not inputs[-1]:
        inputs.pop()
    name = product.node.name
    return helper.make_node(operator, inputs, [product.output], name, domain=MICROSOFT, **given)


class QdqWriter:
    """One for each graph: activations that several products read are quantised once.

    For calibrated activations (static styles) and graphs of MatMul and Gemm.
    """

    opset: ClassVar[int] = 13
    """DequantizeLinear by channels."""

    def __init__(self) -> None:
        self._quantised: dict[str, str] = {}
        self._weights: dict[str, str] = {}

    def write(self, graph: LinearGraph, product: Product) -> tuple[list[Any], list[Any]]:
        """See `Writer`."""
        if product.grid is None or product.node.op_type == "Attention":
            raise ValueError("QdqWriter wants calibrated activations and plain products")
        front: list[Any] = []
        if product.source not in self._quantised:
            name = f"{product.source}/quantised"
            step = graph.constant(np.asarray(product.grid.step, np.float32), f"{name}.scale")
            zero = graph.constant(np.asarray(product.grid.zero, np.uint8), f"{name}.zero")
            self._quantised[product.source] = f"{name}.float"
            front += [
                helper.make_node("QuantizeLinear", [product.source, step, zero], [name], name),
                helper.make_node("DequantizeLinear", [name, step, zero], [f"{name}.float"], f"{name}.float"),
            ]
        if product.name not in self._weights:
            name = self._weights[product.name] = f"{product.name}.float"
            weight = graph.constant(product.weight.values, product.name)
            scale = graph.constant(product.weight.scale, f"{product.name}.scale")
            zero = graph.constant(np.zeros(product.weight.scale.shape, np.int8), f"{product.name}.zero")
            front.append(helper.make_node("DequantizeLinear", [weight, scale, zero], [name], name, axis=1))
        return front, self._product(product)

    def _product(self, product: Product) -> list[Any]:
        inputs = [self._quantised[product.source], self._weights[product.name]]
        if not product.bias:
            return [helper.make_node("MatMul", inputs, [product.output], product.node.name)]
        name = f"{product.output}/product"
        return [
            helper.make_node("MatMul", inputs, [name], name),
            helper.make_node("Add", [name, product.bias], [product.output], product.node.name),
        ]


DOMAIN = "penstock"
OPERATOR = "RowwiseLinear"
"""Inputs: activation [..., in], weight int8 [in, out], scale [out], bias [out]."""


class RowwiseWriter:
    """See `Writer`."""

    opset: ClassVar[int] = 1
    """Any: the function states the version of its operators."""

    def write(self, graph: LinearGraph, product: Product) -> tuple[list[Any], list[Any]]:
        """The product; of a fused attention the three products as one, and the rest of the attention."""
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
                **{name: value for name, value in attributes(node).items() if name != "unidirectional"},
            ),
        ]


def _declare(model: Any) -> None:
    """Add the function to the model, once."""
    if any(function.name == OPERATOR for function in model.functions):
        return

    def constant(name: str, value: float) -> Any:
        return helper.make_node("Constant", [], [name], value=helper.make_tensor(name, TensorProto.FLOAT, [], [value]))

    nodes = [
        *starmap(constant, (("nought", 0.0), ("steps", 255.0), ("least", float(SMALLEST_SCALE)))),
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
