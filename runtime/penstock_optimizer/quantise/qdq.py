"""Writes 8-bit products in standard operators: both sides quantised and dequantised, then multiplied in float.

It is not computed this way: OpenVINO recognises the pairs as quantisation, and multiplies integers.
"""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
from onnx import helper

from penstock_optimizer.quantise.linear import LinearGraph
from penstock_optimizer.quantise.quantiser import Product


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
