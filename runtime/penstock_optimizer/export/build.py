"""Builds the ONNX graph of an encoder and its head.

Node and weight names tell where they belong: `embeddings`, `layer.N.attention`, `layer.N.output`, `layer.N.up`,
`layer.N.down`, `head`. Quantisers may leave `head` alone by that name.
"""

from __future__ import annotations

from onnx import TensorProto

from penstock.manifest import GRAPH_OUTPUTS, GraphIO
from penstock.tasks import Head
from penstock_optimizer.export.encoder import (
    Classifier,
    Dense,
    Embeddings,
    Encoder,
    MaskFiller,
    Positions,
    SpanClassifier,
    TokenClassifier,
    Top,
)
from penstock_optimizer.export.graph import Graph
from penstock_optimizer.export.operators import Context, Flavour, Fused, Operators, Plain

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
