"""Writes the blocks of an encoder into a graph, in two flavours.

`Fused` writes ONNX Runtime's own operators: nothing is left to be found by pattern matching, and `quantize_dynamic`
knows all of them. `Plain` writes standard operators only, in the forms that OpenVINO's patterns match
and that both engines fuse into one kernel when they load a graph. docs/decisions/export.md has the
measurements.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import partial

import numpy as np
from onnx import TensorProto

from penstock_optimizer.export.build.distance_scores import DistanceScores
from penstock_optimizer.export.build.graph import MICROSOFT, Graph
from penstock_optimizer.export.transformer import Activation, AnyNorm, Dense, Layer, RootMeanSquareNorm, Rotary

QUICK_GELU_SLOPE = 1.702


def _constant(graph: Graph, value: float) -> str:
    return graph.number(value, f"number.{value:.6g}")


def _single(operator: str) -> Callable[[Graph, str, str], str]:
    def write(graph: Graph, x: str, name: str) -> str:
        return graph.node(operator, [x], f"{name}/{operator}")

    return write


def _gelu(graph: Graph, x: str, name: str) -> str:
    share = graph.node("Div", [x, _constant(graph, math.sqrt(2))], f"{name}/Gelu/Div")
    share = graph.node("Erf", [share], f"{name}/Gelu/Erf")
    share = graph.node("Add", [share, _constant(graph, 1)], f"{name}/Gelu/Add")
    product = graph.node("Mul", [x, share], f"{name}/Gelu/Mul")
    return graph.node("Mul", [product, _constant(graph, 0.5)], f"{name}/Gelu/half")


def _gelu_tanh(graph: Graph, x: str, name: str) -> str:
    cube = graph.node("Pow", [x, _constant(graph, 3)], f"{name}/Gelu/Pow")
    cube = graph.node("Mul", [cube, _constant(graph, 0.044715)], f"{name}/Gelu/cube")
    inner = graph.node("Add", [x, cube], f"{name}/Gelu/inner")
    inner = graph.node("Mul", [inner, _constant(graph, math.sqrt(2 / math.pi))], f"{name}/Gelu/scale")
    share = graph.node("Tanh", [inner], f"{name}/Gelu/Tanh")
    share = graph.node("Add", [share, _constant(graph, 1)], f"{name}/Gelu/Add")
    half = graph.node("Mul", [x, _constant(graph, 0.5)], f"{name}/Gelu/half")
    return graph.node("Mul", [half, share], f"{name}/Gelu/Mul")


def _gelu_sigmoid(graph: Graph, x: str, name: str) -> str:
    scaled = graph.node("Mul", [x, _constant(graph, QUICK_GELU_SLOPE)], f"{name}/QuickGelu/scale")
    return graph.node("Mul", [x, graph.node("Sigmoid", [scaled], f"{name}/Sigmoid")], f"{name}/QuickGelu/Mul")


def _silu(graph: Graph, x: str, name: str) -> str:
    return graph.node("Mul", [x, graph.node("Sigmoid", [x], f"{name}/Sigmoid")], f"{name}/Silu/Mul")


def _relu_squared(graph: Graph, x: str, name: str) -> str:
    positive = graph.node("Relu", [x], f"{name}/Relu")
    return graph.node("Mul", [positive, positive], f"{name}/Relu/squared")


def _linear(_graph: Graph, x: str, _name: str) -> str:
    return x


_WRITERS: Mapping[Activation, Callable[[Graph, str, str], str]] = {
    Activation.GELU: _gelu,
    Activation.GELU_TANH: _gelu_tanh,
    Activation.GELU_SIGMOID: _gelu_sigmoid,
    Activation.SILU: _silu,
    Activation.RELU: _single("Relu"),
    Activation.RELU_SQUARED: _relu_squared,
    Activation.TANH: _single("Tanh"),
    Activation.SIGMOID: _single("Sigmoid"),
    Activation.LINEAR: _linear,
}


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
    """What `Operators.mask` wrote; empty when `bias` has it."""
    bias: str = ""
    """float32 [batch or 1, heads or 1, queries, tokens], added to the scores; empty: none."""
    distances: DistanceScores | None = None
    """Where layers have vectors of distances."""


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
        """The biases of layers side by side, zeros for those without; empty when none has one."""
        given = [layer.bias for layer in dense if layer.bias is not None]
        if not given:
            return ""
        if len(dense) == 1:
            return self.graph.constant(given[0], f"{name}.bias")
        arrays = [np.zeros(len(layer.weight), np.float32) if layer.bias is None else layer.bias for layer in dense]
        return self.graph.derived(arrays, "joined", f"{name}.bias", lambda: np.concatenate(arrays))

    def dense(self, x: str, dense: Dense | Sequence[Dense], name: str) -> str:
        """X W^T + b; several layers side by side become one product."""
        layers = [dense] if isinstance(dense, Dense) else dense
        product, bias = self.matmul(x, layers, name), self.biases(layers, name)
        return self.graph.node("Add", [product, bias], f"{name}/Add") if bias else product

    def feed_forward(self, x: str, layer: Layer, activation: Activation, name: str) -> str:
        """The network of a layer, without norm and residual sum."""
        if layer.gate is None:
            inner = self.activation(self.dense(x, layer.up, f"{name}.up"), activation, f"{name}.up")
        else:
            # One product for both: they share the activations, and large products are faster.
            both = self.dense(x, (layer.up, layer.gate), f"{name}.up")
            up, gate = self.graph.split(both, 2, 2, f"{name}.up/Split")
            inner = self.graph.node("Mul", [self.activation(up, activation, f"{name}.up"), gate], f"{name}.up/gate")
        return self.dense(inner, layer.down, f"{name}.down")

    def norm(self, x: str, norm: AnyNorm | None, name: str) -> str:
        """Over the last axis; `x` without a norm."""
        if norm is None:
            return x
        if isinstance(norm, RootMeanSquareNorm):
            return self._root_mean_square_norm(x, norm, f"{name}/RMSNorm", f"{name}.norm.weight")
        parts = (("weight", norm.weight), ("bias", norm.bias))
        weights = [self.graph.constant(array, f"{name}.norm.{part}") for part, array in parts]
        return self.graph.node(
            "LayerNormalization", [x, *weights], f"{name}/LayerNormalization", axis=-1, epsilon=norm.epsilon
        )

    def _root_mean_square_norm(self, x: str, norm: RootMeanSquareNorm, name: str, weight: str) -> str:
        """In the form that both engines fuse into one kernel when they load a graph."""
        graph = self.graph
        mean = graph.node("Pow", [x, graph.number(2, "number.2")], f"{name}/Pow")
        mean = graph.node("ReduceMean", [mean], f"{name}/ReduceMean", axes=[-1], keepdims=1)
        mean = graph.node("Add", [mean, graph.number(norm.epsilon, "norm.epsilon")], f"{name}/Add")
        root = graph.node("Sqrt", [mean], f"{name}/Sqrt")
        return graph.node(
            "Mul", [graph.node("Div", [x, root], f"{name}/Div"), graph.constant(norm.weight, weight)], name
        )

    def activation(self, x: str, activation: Activation, name: str) -> str:
        """The activation of every value."""
        return _WRITERS[activation](self.graph, x, name)

    @abstractmethod
    def mask(self, attention_mask: str) -> str:
        """From int64 [batch, tokens], 1 a token and 0 padding, to the form that this flavour's attention takes."""

    def head_width(self, layer: Layer) -> int:
        """Values of a head."""
        return len(layer.query.weight) // self.heads

    def key_heads(self, layer: Layer) -> int:
        """Heads of keys and values, which may be fewer than heads of queries."""
        return len(layer.key.weight) // self.head_width(layer)

    def split_heads(self, x: str, heads: int, width: int, name: str, *, turned: bool = False) -> str:
        """From [batch, tokens, heads * width] to [batch, heads, tokens, width]; `turned`: width before tokens."""
        shape = self.graph.integers([0, 0, heads, width], f"attention.split.{heads}")
        split = self.graph.node("Reshape", [x, shape], f"{name}/Reshape")
        order = [0, 2, 3, 1] if turned else [0, 2, 1, 3]
        return self.graph.node("Transpose", [split], f"{name}/Transpose", perm=order)

    @abstractmethod
    def with_bias(self, context: Context, bias: str) -> Context:
        """The context with a bias on the scores, float32 [1, heads or 1, queries, tokens]; it had none before."""

    @abstractmethod
    def add(self, x: str, y: str, name: str) -> str:
        """The residual sum x + y."""

    def add_norm(self, x: str, y: str, norm: AnyNorm | None, name: str) -> str:
        """norm(x + y); y may lack the batch axis."""
        return self.norm(self.add(x, y, f"{name}/residual"), norm, name)

    @abstractmethod
    def attention(self, queries: str, x: str, layer: Layer, context: Context, name: str) -> str:
        """Scaled dot-product attention of all heads over `x`, before the output projection.

        `queries` is `x` itself, or its first token alone; the result has as many.
        """


class Fused(Operators):
    """ONNX Runtime's own operators."""

    def mask(self, attention_mask: str) -> str:
        """int32 [batch, tokens]."""
        return self.graph.node("Cast", [attention_mask], "mask/Cast", to=TensorProto.INT32)

    def activation(self, x: str, activation: Activation, name: str) -> str:
        """Gelu and FastGelu; other activations as standard operators.

        Without the bias, which BiasGelu would take in: in float the runtime fuses it by itself, and in int8 the
        quantised product takes it in, which is faster (MiniLM, 128 tokens: 1.2 against 1.8 ms for all layers).
        """
        operator = {Activation.GELU: "Gelu", Activation.GELU_TANH: "FastGelu"}.get(activation)
        if operator is None:
            return super().activation(x, activation, name)
        return self.graph.node(operator, [x], f"{name}/{operator}", domain=MICROSOFT)

    def with_bias(self, context: Context, bias: str) -> Context:
        """Next to the mask."""
        return Context(context.mask, bias)

    def add(self, x: str, y: str, name: str) -> str:
        """Sum, which is Add by another name.

        ONNX Runtime fuses an Add and the LayerNormalization after it into SkipLayerNormalization when it loads a
        graph, whose kernel is scalar (MiniLM, 128 tokens, one thread: 4.1 ms for all layers against 1.1 ms; a third of
        an int8 model's time).
        """
        return self.graph.node("Sum", [x, y], name)

    def attention(self, queries: str, x: str, layer: Layer, context: Context, name: str) -> str:
        """Attention, which holds the three projections; MultiHeadAttention after them where it cannot.

        `Attention` takes as many queries as keys, and `quantize_dynamic` drops its score bias when it makes a
        QAttention of it; MultiHeadAttention stays in float, and the products before it are quantised.
        """
        grouped = self.key_heads(layer) != self.heads
        if grouped or not all(part is None for part in (layer.rotary, layer.distances, layer.key_norm)):
            return self._attention_of_products(queries, x, layer, context, name)
        three = (layer.query, layer.key, layer.value)
        biases = self.biases(three, f"{name}.qkv")
        if queries == x and not context.bias and biases:
            operator, inputs = "Attention", [x, self.weights(three, f"{name}.qkv"), biases, context.mask]
        else:
            parts = (("query", queries, layer.query), ("key", x, layer.key), ("value", x, layer.value))
            products = [self.matmul(source, [dense], f"{name}.{part}") for part, source, dense in parts]
            operator, inputs = "MultiHeadAttention", [*products, biases, context.mask]
            if context.bias:
                inputs.append(context.bias)
        return self.graph.node(operator, inputs, f"{name}/{operator}", domain=MICROSOFT, num_heads=self.heads)

    def _attention_of_products(self, queries: str, x: str, layer: Layer, context: Context, name: str) -> str:
        """MultiHeadAttention, where something happens between it and the three products."""
        heads, width = self.key_heads(layer), self.head_width(layer)
        query, key = (
            self._normed_heads(self.dense(source, dense, f"{name}.{part}"), norm, width, f"{name}.{part}")
            for part, source, dense, norm in (
                ("query", queries, layer.query, layer.query_norm),
                ("key", x, layer.key, layer.key_norm),
            )
        )
        value, bias = self.dense(x, layer.value, f"{name}.value"), context.bias
        if layer.rotary is not None:
            key = self._rotated(key, layer.rotary, heads, f"{name}.key")
            if queries == x:  # else the first token alone, at position 0, where the angle is 0
                query = self._rotated(query, layer.rotary, self.heads, f"{name}.query")
        if heads != self.heads:
            key, value = self._repeated(key, heads, f"{name}.key"), self._repeated(value, heads, f"{name}.value")
        if layer.distances is not None and context.distances is not None:
            parts = ((query, f"{name}.query"), (key, f"{name}.key"))
            both = [self.split_heads(part, self.heads, width, place) for part, place in parts]
            place, first_only = f"{name}.distances", queries != x
            bias = context.distances.write(both[0], both[1], layer.distances, place, first_only=first_only)
        inputs = [query, key, value, "", context.mask, bias]
        name = f"{name}/MultiHeadAttention"
        inputs = inputs if bias else inputs[:-1]
        return self.graph.node("MultiHeadAttention", inputs, name, domain=MICROSOFT, num_heads=self.heads)

    def _normed_heads(self, x: str, norm: AnyNorm | None, width: int, name: str) -> str:
        """[batch, tokens, heads * width], each head normalised by itself."""
        if norm is None:
            return x
        split = self.graph.node("Reshape", [x, self.graph.integers([0, 0, -1, width], "heads.split")], f"{name}/heads")
        normed = self.norm(split, norm, name)
        return self.graph.node("Reshape", [normed, self.graph.integers([0, 0, -1], "heads.joined")], f"{name}/joined")

    def _repeated(self, x: str, heads: int, name: str) -> str:
        """From [batch, tokens, heads * width] to as many heads as queries have, each several times in a row."""
        graph, count = self.graph, self.heads // heads
        split = graph.node("Reshape", [x, graph.integers([0, 0, heads, 1, -1], f"groups.{heads}")], f"{name}/groups")
        shape = graph.integers([1, 1, 1, count, 1], f"groups.of.{count}")
        wide = graph.node("Expand", [split, shape], f"{name}/Expand")
        return graph.node("Reshape", [wide, graph.integers([0, 0, -1], "heads.joined")], f"{name}/repeated")

    def _rotated(self, x: str, rotary: Rotary, heads: int, name: str) -> str:
        graph = self.graph
        tables = [graph.constant(table, f"rotary.{part}") for part, table in (("cos", rotary.cos), ("sin", rotary.sin))]
        inputs = [x, graph.integers([0], "zero"), *tables]
        return graph.node("RotaryEmbedding", inputs, f"{name}/RotaryEmbedding", domain=MICROSOFT, num_heads=heads)


class Plain(Operators):
    """Standard operators only."""

    def mask(self, attention_mask: str) -> str:
        """float32 [batch, 1, 1, tokens]: added to the scores, 0 for a token."""
        graph = self.graph
        real = graph.node("Cast", [attention_mask], "mask/Cast", to=TensorProto.FLOAT)
        padding = graph.node("Sub", [graph.number(1, "number.1"), real], "mask/Sub")
        scores = graph.node("Mul", [padding, graph.number(MASKED_SCORE, "mask.score")], "mask/Mul")
        return graph.node("Unsqueeze", [scores, graph.integers([1, 2], "mask.axes")], "mask/Unsqueeze")

    def with_bias(self, context: Context, bias: str) -> Context:
        """With the mask in the bias: OpenVINO's pattern of the attention has one addition."""
        return Context("", self.graph.node("Add", [context.mask, bias], f"{bias}/mask"))

    def add(self, x: str, y: str, name: str) -> str:
        """Add."""
        return self.graph.node("Add", [x, y], name)

    def attention(self, queries: str, x: str, layer: Layer, context: Context, name: str) -> str:
        """Softmax(Q K^T / sqrt(width) + bias + mask) V, with three products for Q, K and V."""
        graph = self.graph
        width, heads = self.head_width(layer), self.key_heads(layer)
        plain_key = heads == self.heads and all(
            part is None for part in (layer.rotary, layer.distances, layer.key_norm)
        )
        parts = (
            ("query", queries, layer.query, layer.query_norm, self.heads),
            ("key", x, layer.key, layer.key_norm, heads),
            ("value", x, layer.value, None, heads),
        )
        query, key, value = (
            self.norm(self.split_heads(product, count, width, place, turned=turned), norm, place)
            for product, count, norm, place, turned in (
                (
                    self.dense(source, dense, f"{name}.{part}"),
                    count,
                    norm,
                    f"{name}.{part}",
                    plain_key and part == "key",
                )
                for part, source, dense, norm, count in parts
            )
        )
        if layer.rotary is not None:
            key = self._rotated(key, layer.rotary, f"{name}.key")
            if queries == x:  # else the first token alone, at position 0, where the angle is 0
                query = self._rotated(query, layer.rotary, f"{name}.query")
        if heads != self.heads:
            key, value = self._repeated(key, heads, f"{name}.key"), self._repeated(value, heads, f"{name}.value")
        if layer.distances is not None and context.distances is not None:
            place, first_only = f"{name}.distances", queries != x
            bias = context.distances.write(query, key, layer.distances, place, first_only=first_only)
            context = self.with_bias(context, bias)
        if not plain_key:
            key = graph.node("Transpose", [key], f"{name}.key/transposed", perm=[0, 1, 3, 2])
        scores = graph.node("MatMul", [query, key], f"{name}/scores")
        scores = graph.node("Mul", [scores, graph.number(1 / math.sqrt(width), "attention.scale")], f"{name}/scale")
        for part, addition in (("bias", context.bias), ("mask", context.mask)):
            if addition:
                scores = graph.node("Add", [scores, addition], f"{name}/{part}")
        shares = graph.node("Softmax", [scores], f"{name}/Softmax", axis=-1)
        mixed = graph.node("MatMul", [shares, value], f"{name}/mixed")
        mixed = graph.node("Transpose", [mixed], f"{name}/Transpose", perm=[0, 2, 1, 3])
        shape = graph.integers([0, 0, self.heads * width], "attention.joined")
        return graph.node("Reshape", [mixed, shape], f"{name}/Reshape")

    def _repeated(self, x: str, heads: int, name: str) -> str:
        """From [batch, heads, tokens, width] to as many heads as queries have, each several times in a row."""
        graph, count = self.graph, self.heads // heads
        split = graph.node("Unsqueeze", [x, graph.integers([2], "at.2")], f"{name}/groups")
        shape = graph.integers([1, 1, count, 1, 1], f"groups.of.{count}")
        wide = graph.node("Expand", [split, shape], f"{name}/Expand")
        width = graph.node("Shape", [x], f"{name}/Shape", start=2, end=4)
        shape = graph.node("Concat", [graph.integers([0, self.heads], "groups.heads"), width], f"{name}/shape", axis=0)
        return graph.node("Reshape", [wide, shape], f"{name}/repeated")

    def _rotated(self, x: str, rotary: Rotary, name: str) -> str:
        """Of [batch, heads, tokens, width]: x cos + (-second half, first half) sin."""
        graph = self.graph
        length = graph.node("Shape", ["input_ids"], "tokens/Shape", start=1, end=2)
        zero, tables = graph.integers([0], "zero"), []
        for part, table in (("cos", rotary.cos), ("sin", rotary.sin)):
            whole = graph.derived([table], "twice", f"rotary.{part}", partial(np.tile, table, 2))
            tables.append(graph.node("Slice", [whole, zero, length, zero], f"{name}/{part}"))
        first, second = graph.split(x, 2, 3, f"{name}/halves")
        turned = graph.node("Concat", [graph.node("Neg", [second], f"{name}/Neg"), first], f"{name}/turned", axis=-1)
        straight = graph.node("Mul", [x, tables[0]], f"{name}/straight")
        across = graph.node("Mul", [turned, tables[1]], f"{name}/across")
        return graph.node("Add", [straight, across], f"{name}/rotated")
