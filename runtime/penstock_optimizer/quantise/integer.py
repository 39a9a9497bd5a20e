"""Writes 8-bit products in ONNX Runtime's own operators, each of which does what else takes four."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
from onnx import helper

from penstock_optimizer.quantise.linear import MICROSOFT, LinearGraph
from penstock_optimizer.quantise.quantiser import Product


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
            attributes = {attribute.name: helper.get_attribute_value(attribute) for attribute in node.attribute}
            inputs = [x, weight, product.bias, x_scale, scale, mask, x_zero, zero]
            return front, [_node("QAttention", inputs, product, **attributes)]
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


def _node(operator: str, inputs: list[str], product: Product, **attributes: Any) -> Any:
    while not inputs[-1]:
        inputs.pop()
    name = product.node.name
    return helper.make_node(operator, inputs, [product.output], name, domain=MICROSOFT, **attributes)
