"""Builds the ONNX graph of an encoder and its head from the blocks of an encoder, in two flavours.

`Fused` writes ONNX Runtime's own operators: nothing is left to be found by pattern matching, and `quantize_dynamic`
meets what it knows. `Plain` writes standard operators only, in the forms that the patterns of OpenVINO were
made for, and that both engines fuse into one kernel when they load a graph. docs/decisions/export.md has the
measurements.

Node and weight names tell where they belong: `embeddings`, `layer.N.attention`, `layer.N.output`, `layer.N.up`,
`layer.N.down`, `head`. Quantisers may leave `head` alone by that name.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from onnx import TensorProto

from penstock.manifest import GRAPH_OUTPUTS, GraphIO
from penstock.tasks import Head
from penstock_optimizer.export.encoder import (
    Activation,
    Classifier,
    Dense,
    Embeddings,
    Encoder,
    Layer,
    MaskFiller,
    Norm,
    Positions,
    SpanClassifier,
    TokenClassifier,
    Top,
)
from penstock_optimizer.export.graph import MICROSOFT, Graph

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
        return _WRITERS[activation](self.graph, x, name)

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


ROWS = ["batch", "tokens"]


def build(encoder: Encoder, top: Top, flavour: Flavour) -> tuple[Graph, GraphIO]:
    """The graph, ready to be saved, and its inputs and outputs."""
    graph = Graph("encoder")
    operators: Operators = (Fused if flavour is Flavour.FUSED else Plain)(graph, encoder.heads)
    inputs = ["input_ids", "attention_mask"]
    if _has_type_input(encoder.embeddings):
        inputs.append("token_type_ids")
    for name in inputs:
        graph.input(name, ROWS)
    states = _write_encoder(operators, encoder, first_only=isinstance(top, Classifier))
    head = _write_top(operators, encoder, top, states)
    return graph, GraphIO(inputs=tuple(inputs), outputs=dict(GRAPH_OUTPUTS[head]))


def _write_encoder(operators: Operators, encoder: Encoder, *, first_only: bool) -> str:
    """The hidden states [batch, tokens, hidden]; of the first token alone when that is all that will be read."""
    graph = operators.graph
    x = _write_embeddings(operators, encoder.embeddings)
    context = _write_context(operators, encoder)
    for index, layer in enumerate(encoder.layers):
        name = f"layer.{index}"
        queries = x
        if first_only and index == len(encoder.layers) - 1:
            # No later layer reads the other tokens: their queries, output projection and feed-forward are saved.
            queries = _first(graph, x, 1, f"{name}/first")
            if context.bias:
                context = Context(context.mask, _first(graph, context.bias, 2, "distance/first"))
        mixed = operators.attention(queries, x, layer, context, f"{name}.attention")
        mixed = operators.dense(mixed, layer.output, f"{name}.output")
        x = operators.add_norm(mixed, queries, layer.attention_norm, f"{name}.output")
        inner = operators.activation(operators.dense(x, layer.up, f"{name}.up"), encoder.activation, f"{name}.up")
        x = operators.add_norm(operators.dense(inner, layer.down, f"{name}.down"), x, layer.output_norm, f"{name}.down")
    return x


def _has_type_input(embeddings: Embeddings) -> bool:
    return embeddings.types is not None and len(embeddings.types) > 1


def _write_embeddings(operators: Operators, embeddings: Embeddings) -> str:
    graph = operators.graph
    words = graph.node(
        "Gather", [graph.constant(embeddings.words, "embeddings.words"), "input_ids"], "embeddings/words"
    )
    others = _write_positions(graph, embeddings)
    if embeddings.types is not None and _has_type_input(embeddings):
        table = graph.constant(embeddings.types, "embeddings.types")
        types = graph.node("Gather", [table, "token_type_ids"], "embeddings/types")
        others = graph.node("Add", [types, others], "embeddings/Add")
    x = operators.add_norm(words, others, embeddings.norm, "embeddings")
    if embeddings.projection is not None:
        x = operators.dense(x, embeddings.projection, "embeddings.projection")
    return x


def _write_positions(graph: Graph, embeddings: Embeddings) -> str:
    """Position vectors [tokens, width] or [batch, tokens, width]; the only type's vector is added ahead of time."""
    sources, single = [embeddings.positions], embeddings.types
    if single is not None and len(single) == 1:
        sources.append(single)
    table = graph.derived(sources, "sum", "embeddings.positions", lambda: sum(sources[1:], start=sources[0]))
    if embeddings.position_kind is Positions.INDEX:
        ends = [graph.integers([0], "zero"), _length(graph), graph.integers([0], "zero")]
        return graph.node("Slice", [table, *ends], "embeddings/positions")
    padding = graph.integers(embeddings.padding_id, "embeddings.padding")
    real = graph.node("Equal", ["input_ids", padding], "positions/padding")
    real = graph.node("Cast", [graph.node("Not", [real], "positions/Not")], "positions/real", to=TensorProto.INT64)
    count = graph.node("CumSum", [real, graph.integers(1, "one")], "positions/CumSum")
    count = graph.node("Mul", [count, real], "positions/Mul")
    return graph.node("Gather", [table, graph.node("Add", [count, padding], "positions/Add")], "embeddings/positions")


def _write_context(operators: Operators, encoder: Encoder) -> Context:
    mask = operators.mask("attention_mask")
    if encoder.distance_bias is None:
        return Context(mask)
    graph = operators.graph
    length = _length(graph)
    ends = graph.node("Concat", [length, length], "distance/ends", axis=0)
    table = graph.constant(encoder.distance_bias, "distance.bias")
    starts, axes = graph.integers([0, 0], "distance.starts"), graph.integers([2, 3], "distance.axes")
    return Context(mask, graph.node("Slice", [table, starts, ends, axes], "distance/Slice"))


def _length(graph: Graph) -> str:
    """int64 [1]: tokens."""
    return graph.node("Shape", ["input_ids"], "tokens/Shape", start=1, end=2)


def _first(graph: Graph, x: str, axis: int, name: str) -> str:
    """The first entry along an axis, which stays."""
    ends = [graph.integers([value], f"at.{value}") for value in (0, 1, axis)]
    return graph.node("Slice", [x, *ends], name)


def _write_top(operators: Operators, encoder: Encoder, top: Top, states: str) -> Head:
    graph = operators.graph
    if top is None:
        graph.output("last_hidden_state", states, [*ROWS, encoder.hidden])
        return Head.ENCODER
    if isinstance(top, Classifier):
        first = graph.node("Squeeze", [states, graph.integers([1], "at.1")], "head/first")
        pooled = operators.activation(_gemm(graph, first, top.dense, "head.dense"), top.activation, "head.dense")
        graph.output("logits", _gemm(graph, pooled, top.out, "head.out"), ["batch", len(top.out.bias)])
        return Head.SEQUENCE
    if isinstance(top, TokenClassifier):
        graph.output("logits", operators.dense(states, top.out, "head.out"), [*ROWS, len(top.out.bias)])
        return Head.TOKEN
    if isinstance(top, SpanClassifier):
        logits = operators.dense(states, top.out, "head.out")
        parts = graph.split(logits, 2, 2, "head/Split")
        for name, part in zip(("start_logits", "end_logits"), parts, strict=True):
            squeezed = graph.node("Squeeze", [part, graph.integers([2], "at.2")], f"head/{name}")
            graph.output(name, squeezed, ROWS)
        return Head.SPAN
    _write_mask_filler(operators, top, states)
    return Head.MASKED_LM


def _write_mask_filler(operators: Operators, top: MaskFiller, states: str) -> None:
    """Only the mask tokens' states go through the vocabulary: [masks, vocabulary], row by row in order."""
    graph = operators.graph
    masked = graph.node("Equal", ["input_ids", graph.integers(top.mask_id, "head.mask_id")], "head/masked")
    where = graph.node("NonZero", [masked], "head/NonZero")
    where = graph.node("Transpose", [where], "head/where", perm=[1, 0])
    x = graph.node("GatherND", [states, where], "head/GatherND")
    x = operators.activation(_gemm(graph, x, top.dense, "head.dense"), top.activation, "head.dense")
    x = operators.norm(x, top.norm, "head")
    graph.output("logits", _gemm(graph, x, top.out, "head.out"), ["masks", len(top.out.bias)])


def _gemm(graph: Graph, x: str, dense: Dense, name: str) -> str:
    """A product with the weights as they are stored: those shared with the word vectors are written once."""
    inputs = [x, graph.constant(dense.weight, f"{name}.weight"), graph.constant(dense.bias, f"{name}.bias")]
    return graph.node("Gemm", inputs, f"{name}/Gemm", transB=1)
