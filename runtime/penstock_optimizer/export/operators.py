"""The blocks of an encoder as ONNX operators, in two flavours.

`Fused` writes ONNX Runtime's own operators: nothing is left to be found by pattern matching, and `quantize_dynamic`
meets what it knows. `Plain` writes standard operators only, in the forms that the patterns of OpenVINO and NNCF were
made for. docs/decisions/export.md has the measurements.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from onnx import TensorProto

from penstock_optimizer.export.activations import write_activation
from penstock_optimizer.export.encoder import Activation, Dense, Layer, Norm
from penstock_optimizer.export.graph import MICROSOFT, Graph

MASKED_SCORE = -10_000.0
"""Added to the score of padding: its share after softmax is then exactly 0, in bfloat16 as well."""


class Flavour(StrEnum):
    """Which operators a built graph is written in."""

    FUSED = "fused"
    """ONNX Runtime's fused operators (domain com.microsoft), where there is one."""
    PLAIN = "plain"
    """Standard operators only (opset 17)."""


@dataclass(frozen=True)
class Context:
    """Graph values that every attention shares."""

    mask: str
    """What `Operators.mask` wrote."""
    bias: str = ""
    """float32 [1, heads, queries, tokens], added to the scores; empty: none."""


class Operators(ABC):
    """Writes blocks into a graph. `x` is float32 [batch, tokens, hidden]; each method returns the result's name."""

    def __init__(self, graph: Graph, heads: int) -> None:
        self.graph = graph
        self.heads = heads

    def matmul(self, x: str, dense: Sequence[Dense], name: str) -> str:
        """X W^T without the bias; several layers side by side become one product with as many times the width."""
        return self.graph.node("MatMul", [x, self.weights(dense, name)], f"{name}/MatMul")

    def weights(self, dense: Sequence[Dense], name: str) -> str:
        """[in, out]: the weights of layers side by side, transposed."""
        arrays = [layer.weight for layer in dense]
        return self.graph.derived(
            arrays, "transposed", f"{name}.weight", lambda: np.concatenate([array.T for array in arrays], axis=1)
        )

    def biases(self, dense: Sequence[Dense], name: str) -> str:
        """The biases of layers side by side."""
        if len(dense) == 1:
            return self.graph.constant(dense[0].bias, f"{name}.bias")
        arrays = [layer.bias for layer in dense]
        return self.graph.derived(arrays, "joined", f"{name}.bias", lambda: np.concatenate(arrays))

    def dense(self, x: str, dense: Dense, name: str) -> str:
        """X W^T + b."""
        return self.graph.node("Add", [self.matmul(x, [dense], name), self.biases([dense], name)], f"{name}/Add")

    def norm(self, x: str, norm: Norm, name: str) -> str:
        """Layer normalisation."""
        parts = (("weight", norm.weight), ("bias", norm.bias))
        weights = [self.graph.constant(array, f"{name}.norm.{part}") for part, array in parts]
        return self.graph.node(
            "LayerNormalization", [x, *weights], f"{name}/LayerNormalization", axis=-1, epsilon=norm.epsilon
        )

    def activation(self, x: str, activation: Activation, name: str) -> str:
        """The activation of every value."""
        return write_activation(self.graph, x, activation, name)

    @abstractmethod
    def mask(self, attention_mask: str) -> str:
        """From int64 [batch, tokens], 1 a token and 0 padding, to the form that this flavour's attention takes."""

    @abstractmethod
    def add_norm(self, x: str, y: str, norm: Norm, name: str) -> str:
        """norm(x + y); y may lack the batch axis."""

    @abstractmethod
    def attention(self, queries: str, x: str, layer: Layer, context: Context, name: str) -> str:
        """Scaled dot-product attention of all heads over `x`, before the output projection.

        `queries` is `x` itself, or fewer of its tokens; the result has as many.
        """


class Fused(Operators):
    """ONNX Runtime's own operators."""

    def mask(self, attention_mask: str) -> str:
        """int32 [batch, tokens]."""
        return self.graph.node("Cast", [attention_mask], "mask/Cast", to=TensorProto.INT32)

    def activation(self, x: str, activation: Activation, name: str) -> str:
        """Gelu and FastGelu; others as standard operators.

        Without the bias, which BiasGelu would take in: in float the runtime fuses it by itself, and in int8 the
        quantised product takes it in, which is faster (MiniLM, 128 tokens: 1.2 against 1.8 ms for all layers).
        """
        operator = {Activation.GELU: "Gelu", Activation.GELU_TANH: "FastGelu"}.get(activation)
        if operator is None:
            return super().activation(x, activation, name)
        return self.graph.node(operator, [x], f"{name}/{operator}", domain=MICROSOFT)

    def add_norm(self, x: str, y: str, norm: Norm, name: str) -> str:
        """Sum, LayerNormalization.

        SkipLayerNormalization is not used: its kernel is scalar (MiniLM, 128 tokens, one thread: 4.1 ms for all
        layers against 1.1 ms; a third of an int8 model's time). Sum is Add by another name, which keeps ONNX
        Runtime from fusing the two into it when it loads the graph.
        """
        return self.norm(self.graph.node("Sum", [x, y], f"{name}/residual"), norm, name)

    def attention(self, queries: str, x: str, layer: Layer, context: Context, name: str) -> str:
        """Attention, which holds the three projections; MultiHeadAttention after them where it cannot.

        `Attention` takes as many queries as keys, and `quantize_dynamic` drops its score bias when it makes a
        QAttention of it; MultiHeadAttention stays in float, and the products before it are quantised.
        """
        three = (layer.query, layer.key, layer.value)
        biases = self.biases(three, f"{name}.qkv")
        if queries == x and not context.bias:
            operator, inputs = "Attention", [x, self.weights(three, f"{name}.qkv"), biases, context.mask]
        else:
            parts = (("query", queries, layer.query), ("key", x, layer.key), ("value", x, layer.value))
            products = [self.matmul(source, [dense], f"{name}.{part}") for part, source, dense in parts]
            operator, inputs = "MultiHeadAttention", [*products, biases, context.mask]
            if context.bias:
                inputs.append(context.bias)
        return self.graph.node(operator, inputs, f"{name}/{operator}", domain=MICROSOFT, num_heads=self.heads)


class Plain(Operators):
    """Standard operators only."""

    def mask(self, attention_mask: str) -> str:
        """float32 [batch, 1, 1, tokens]: added to the scores, 0 for a token."""
        graph = self.graph
        real = graph.node("Cast", [attention_mask], "mask/Cast", to=TensorProto.FLOAT)
        padding = graph.node("Sub", [graph.number(1, "number.1"), real], "mask/Sub")
        scores = graph.node("Mul", [padding, graph.number(MASKED_SCORE, "mask.score")], "mask/Mul")
        return graph.node("Unsqueeze", [scores, graph.integers([1, 2], "mask.axes")], "mask/Unsqueeze")

    def add_norm(self, x: str, y: str, norm: Norm, name: str) -> str:
        """Add, LayerNormalization."""
        return self.norm(self.graph.node("Add", [x, y], f"{name}/residual"), norm, name)

    def attention(self, queries: str, x: str, layer: Layer, context: Context, name: str) -> str:
        """Softmax(Q K^T / sqrt(width) + bias + mask) V, with three products for Q, K and V."""
        graph = self.graph
        width = layer.query.weight.shape[0] // self.heads
        query = self._split_heads(queries, layer.query, [0, 2, 1, 3], f"{name}.query")
        key = self._split_heads(x, layer.key, [0, 2, 3, 1], f"{name}.key")
        value = self._split_heads(x, layer.value, [0, 2, 1, 3], f"{name}.value")
        scores = graph.node("MatMul", [query, key], f"{name}/scores")
        scores = graph.node("Mul", [scores, graph.number(1 / math.sqrt(width), "attention.scale")], f"{name}/scale")
        if context.bias:
            scores = graph.node("Add", [scores, context.bias], f"{name}/bias")
        scores = graph.node("Add", [scores, context.mask], f"{name}/mask")
        shares = graph.node("Softmax", [scores], f"{name}/Softmax", axis=-1)
        mixed = graph.node("MatMul", [shares, value], f"{name}/mixed")
        mixed = graph.node("Transpose", [mixed], f"{name}/Transpose", perm=[0, 2, 1, 3])
        shape = graph.integers([0, 0, self.heads * width], "attention.joined")
        return graph.node("Reshape", [mixed, shape], f"{name}/Reshape")

    def _split_heads(self, x: str, dense: Dense, order: list[int], name: str) -> str:
        shape = self.graph.integers([0, 0, self.heads, dense.weight.shape[0] // self.heads], "attention.split")
        split = self.graph.node("Reshape", [self.dense(x, dense, name), shape], f"{name}/Reshape")
        return self.graph.node("Transpose", [split], f"{name}/Transpose", perm=order)
