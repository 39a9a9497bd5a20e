"""Builds the ONNX graph of an encoder and its head from the blocks that `operators` writes.

Node and weight names tell where they belong: `embeddings`, `layer.N.attention`, `layer.N.output`, `layer.N.up`,
`layer.N.down`, `head`. Quantisers may leave `head` alone by that name.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from onnx import TensorProto
from penstock.manifest import GRAPH_OUTPUTS, GraphIO
from penstock.tasks import Head
from penstock_optimizer.export.build.distance_scores import DistanceScores
from penstock_optimizer.export.transformer import (
    Classifier,
    Convolution,
    CrossAttention,
    DecoderHalf,
    Dense,
    Embeddings,
    Encoder,
    Last,
    Layer,
    MaskFiller,
    Pooled,
    Positions,
    SparseWeights,
    TokenClassifier,
    Top,
    Transform,
)
from penstock_optimizer.export.build.graph import Graph
from penstock_optimizer.export.build.operators import Context, Flavour, Fused, Operators, Plain
from penstock_optimizer.export.reader import NotBuildable
from penstock_optimizer.export.build.sparse import WEIGHTS, write_weights
from penstock_runtime.rows import Float
import numpy as np
from onnx import TensorProto
from penstock_optimizer.export.transformer import EVERY_TOKEN, AttentionRange, DistanceBias, Slopes
from penstock_optimizer.export.build.operators import MASKED_SCORE, Context, Operators

class Contexts:
    """The context of every attention range, written once for all layers that have it."""

    def __init__(self, operators: Operators, every: Context) -> None:
        """`every`: the context of layers without a limit."""
        self._operators, self._graph = operators, operators.graph
        self._written = {EVERY_TOKEN: every}
        self._found: dict[str, str] = {}

    def of(self, attention_range: AttentionRange) -> Context:
        """The context of layers with this range."""
        if attention_range not in self._written:
            terms = []
            if attention_range.window is not None:
                terms.append(self._beyond(self._away(), attention_range.window, f"window.{attention_range.window}"))
            if attention_range.causal:
                terms.append(self._beyond(self._ahead(), 0, "causal"))
            if isinstance(attention_range.bias, DistanceBias):
                terms.append(self._looked_up(attention_range.bias))
            elif attention_range.bias is not None:
                terms.append(self._sloping(attention_range.bias))
            bias = terms[0]
            for term in terms[1:]:
                bias = self._graph.node("Add", [bias, term], "range/Add")
            self._written[attention_range] = self._operators.with_bias(self._written[EVERY_TOKEN], bias)
        return self._written[attention_range]

    def _ahead(self) -> str:
        """int64 [tokens, tokens]: index of the key less index of the query."""
        if "ahead" not in self._found:
            graph = self._graph
            length = graph.node("Shape", ["input_ids"], "range/Shape", start=1, end=2)
            scalar = graph.node("Squeeze", [length, graph.integers([0], "zero")], "range/tokens")
            ends = graph.integers(0, "range.start"), scalar, graph.integers(1, "one")
            places = graph.node("Range", ends, "range/Range")
            column = graph.node("Unsqueeze", [places, graph.integers([1], "at.1")], "range/queries")
            self._found["ahead"] = graph.node("Sub", [places, column], "range/Sub")
        return self._found["ahead"]

    def _away(self) -> str:
        """int64 [tokens, tokens]: the distance of query and key."""
        if "away" not in self._found:
            self._found["away"] = self._graph.node("Abs", [self._ahead()], "range/Abs")
        return self._found["away"]

    def _beyond(self, distances: str, limit: int, name: str) -> str:
        """[1, 1, tokens, tokens]: a score that masks keys further away than `limit`."""
        graph = self._graph
        beyond = graph.node("Greater", [distances, graph.integers(limit, name)], f"{name}/Greater")
        beyond = graph.node("Cast", [beyond], f"{name}/Cast", to=TensorProto.FLOAT)
        scores = graph.node("Mul", [beyond, graph.number(MASKED_SCORE, "mask.score")], f"{name}/Mul")
        return graph.node("Unsqueeze", [scores, graph.integers([0, 1], "at.0.1")], name)

    def _looked_up(self, bias: DistanceBias) -> str:
        """[1, heads, tokens, tokens]"""
        graph, furthest = self._graph, bias.table.shape[1] // 2
        ends = [graph.integers(value, f"distance.{value}") for value in (-furthest, furthest)]
        rows = graph.node("Clip", [self._ahead(), *ends], "distance/Clip")
        rows = graph.node("Add", [rows, ends[1]], "distance/Add")
        found = graph.node("Gather", [graph.constant(bias.table, "distance.bias"), rows], "distance/Gather", axis=1)
        return graph.node("Unsqueeze", [found, graph.integers([0], "zero")], "distance")

    def _sloping(self, bias: Slopes) -> str:
        """[1, heads, tokens, tokens]"""
        graph = self._graph
        away = graph.node("Cast", [self._away()], "slopes/Cast", to=TensorProto.FLOAT)
        slopes = -bias.slopes[np.newaxis, :, np.newaxis, np.newaxis]
        return graph.node("Mul", [away, graph.derived([bias.slopes], "slopes", "slopes", lambda: slopes)], "slopes/Mul")


ROWS = ["batch", "tokens"]


def build(encoder: Encoder, top: Top, flavour: Flavour) -> tuple[Graph, GraphIO]:
    """The graph, ready to be saved, and its inputs and outputs. NotBuildable for rotary positions that it has no
    nodes for."""
    _check_rotary(encoder)
    graph = Graph("encoder")
    operators: Operators = (Fused if flavour is Flavour.FUSED else Plain)(graph, encoder.heads)
    inputs = ["input_ids", "attention_mask"]
    if _has_type_input(encoder.embeddings):
        inputs.append("token_type_ids")
    for name in inputs:
        graph.input(name, ROWS)
    first_only = isinstance(top, Classifier) and top.pooled is Pooled.FIRST
    states = _write_encoder(operators, encoder, first_only=first_only)
    if encoder.decoder is not None:
        states = _write_decoder(operators, encoder, encoder.decoder, states)
    head = _write_top(operators, encoder, top, states)
    return graph, GraphIO(inputs=tuple(inputs), outputs=dict(GRAPH_OUTPUTS[head]))


def _check_rotary(encoder: Encoder) -> None:
    for layer in encoder.layers:
        rotary, width = layer.rotary, len(layer.query.weight) // encoder.heads
        if rotary is not None and 2 * len(rotary.frequencies) != width:
            raise NotBuildable("only a part of each head has rotary positions")
        if rotary is not None and rotary.limit is not None and rotary.limit < rotary.positions:
            raise NotBuildable(f"its rotary positions change in texts of more than {rotary.limit} tokens (longrope)")


def _write_encoder(operators: Operators, encoder: Encoder, *, first_only: bool) -> str:
    """The hidden states [batch, tokens, hidden]; of the first token alone when that is all that will be read."""
    x = embedded = _write_embeddings(operators, encoder.embeddings, "input_ids", "embeddings")
    every = _write_context(operators, encoder)
    contexts = Contexts(operators, every)
    for index, layer in enumerate(encoder.layers):
        # No later layer reads the other tokens: their queries, output projection and feed-forward are saved.
        last = index == len(encoder.layers) - 1
        convolution = encoder.convolution if index == 0 else None
        only = first_only and last and convolution is None
        x = _write_layer(
            operators, encoder, layer, x, contexts.of(layer.attends_to), name=f"layer.{index}", first_only=only
        )
        if convolution is not None:
            x = _write_convolution(operators, convolution, embedded, x)
            x = _first(operators.graph, x, 1, "convolution/first") if first_only and last else x
    return operators.norm(x, encoder.final_norm, "final")


@dataclass(frozen=True)
class Encoded:
    """The encoder's results that a decoder reads."""

    states: str
    context: Context
    """Of attention to all tokens."""


def _write_layer(
    operators: Operators,
    encoder: Encoder,
    layer: Layer,
    x: str,
    context: Context,
    *,
    name: str,
    first_only: bool,
    encoded: Encoded | None = None,
) -> str:
    """The hidden states after a layer; of the first token alone with `first_only`. `encoded`: for a decoder's layer."""
    graph, before = operators.graph, encoder.final_norm is not None
    read = operators.norm(x, layer.attention_norm, f"{name}.attention") if before else x
    queries, residual = read, x
    if first_only:
        queries = residual = _first(graph, x, 1, f"{name}/first")
        if read != x:
            queries = _first(graph, read, 1, f"{name}/first")
        if context.bias:
            context = replace(context, bias=_first(graph, context.bias, 2, f"{name}/bias"))
    mixed = operators.attention(queries, read, layer, context, f"{name}.attention")
    mixed = operators.dense(mixed, layer.output, f"{name}.output")
    if before:
        mixed = operators.norm(mixed, layer.attention_output_norm, f"{name}.attention.output")
        x = operators.add(mixed, residual, f"{name}.output/residual")
        read = operators.norm(x, layer.feed_forward_norm, f"{name}.output")
        inner = operators.feed_forward(read, layer, encoder.activation, name)
        inner = operators.norm(inner, layer.feed_forward_output_norm, f"{name}.down.output")
        return operators.add(inner, x, f"{name}.down/residual")
    x = operators.add_norm(mixed, residual, layer.attention_norm, f"{name}.output")
    if layer.cross is not None and encoded is not None:
        x = _write_cross_attention(operators, layer, layer.cross, x, encoded, name=f"{name}.cross")
    inner = operators.feed_forward(x, layer, encoder.activation, name)
    return operators.add_norm(inner, x, layer.feed_forward_norm, f"{name}.down")


def _write_cross_attention(
    operators: Operators, layer: Layer, cross: CrossAttention, x: str, encoded: Encoded, *, name: str
) -> str:
    """norm(x + attention of the decoder's tokens to the encoder's hidden states)"""
    crossing = replace(layer, query=cross.query, key=cross.key, value=cross.value)
    mixed = operators.attention(x, encoded.states, crossing, encoded.context, name)
    return operators.add_norm(operators.dense(mixed, cross.output, f"{name}.output"), x, cross.norm, f"{name}.output")


def _write_decoder(operators: Operators, encoder: Encoder, decoder: DecoderHalf, states: str) -> str:
    """The decoder's hidden states. Its tokens are the encoder's, moved on by one."""
    graph = operators.graph
    operators = type(operators)(graph, decoder.heads)
    zero, one, end = (graph.integers([value], f"at.{value}") for value in (0, 1, -1))
    first = graph.node("Slice", ["input_ids", zero, one, one], "decoder/first")
    first = graph.node("Mul", [first, graph.integers(0, "decoder.zero")], "decoder/zero")
    first = graph.node("Add", [first, graph.integers(decoder.start_id, "decoder.start")], "decoder/start")
    others = graph.node("Slice", ["input_ids", zero, end, one], "decoder/others")
    ids = graph.node("Concat", [first, others], "decoder/ids", axis=1)
    x = _write_embeddings(operators, decoder.embeddings, ids, "decoder.embeddings")
    every = _write_context(operators, encoder)
    contexts, encoded = Contexts(operators, every), Encoded(states, every)
    for index, layer in enumerate(decoder.layers):
        name, context = f"decoder.layer.{index}", contexts.of(layer.attends_to)
        x = _write_layer(operators, encoder, layer, x, context, name=name, first_only=False, encoded=encoded)
    return x


def _write_convolution(operators: Operators, convolution: Convolution, embedded: str, x: str) -> str:
    """norm(x + activation(convolution of the embeddings)); padding counts as zeros."""
    graph, name = operators.graph, "convolution"
    real = graph.node("Cast", ["attention_mask"], f"{name}/Cast", to=TensorProto.FLOAT)
    real = graph.node("Unsqueeze", [real, graph.integers([2], "at.2")], f"{name}/Unsqueeze")
    y = graph.node("Mul", [embedded, real], f"{name}/Mul")
    y = graph.node("Transpose", [y], f"{name}/channels", perm=[0, 2, 1])
    parts = (("weight", convolution.weight), ("bias", convolution.bias))
    weights = [graph.constant(array, f"{name}.{part}") for part, array in parts]
    around = convolution.weight.shape[2] // 2
    y = graph.node("Conv", [y, *weights], f"{name}/Conv", group=convolution.groups, pads=[around, around])
    y = graph.node("Transpose", [y], f"{name}/tokens", perm=[0, 2, 1])
    y = operators.activation(y, convolution.activation, name)
    return operators.add_norm(y, x, convolution.norm, name)


def _has_type_input(embeddings: Embeddings) -> bool:
    return embeddings.types is not None and len(embeddings.types) > 1


def _write_embeddings(operators: Operators, embeddings: Embeddings, ids: str, name: str) -> str:
    graph = operators.graph
    words = graph.node("Gather", [graph.constant(embeddings.words, f"{name}.words"), ids], f"{name}/words")
    if embeddings.scale != 1:
        words = graph.node("Mul", [words, graph.number(embeddings.scale, "words.scale")], f"{name}/scale")
    others = _write_others(graph, embeddings)
    if others:
        x = operators.add_norm(words, others, embeddings.norm, name)
    else:
        x = operators.norm(words, embeddings.norm, name)
    if embeddings.projection is not None:
        x = operators.dense(x, embeddings.projection, f"{name}.projection")
    return x


def _write_others(graph: Graph, embeddings: Embeddings) -> str:
    """The addition to the word vectors, [tokens, width], [batch, tokens, width] or [1, width]; empty: nothing."""
    types = embeddings.types
    if types is None or not _has_type_input(embeddings):
        if embeddings.positions is not None:
            return _write_positions(graph, embeddings.positions, embeddings)
        return "" if types is None else graph.constant(types, "embeddings.types")
    typed = graph.node("Gather", [graph.constant(types, "embeddings.types"), "token_type_ids"], "embeddings/types")
    if embeddings.positions is None:
        return typed
    return graph.node("Add", [typed, _write_positions(graph, embeddings.positions, embeddings)], "embeddings/Add")


def _write_positions(graph: Graph, positions: Float, embeddings: Embeddings) -> str:
    """Position vectors [tokens, width] or [batch, tokens, width]; the only type's vector is added ahead of time."""
    sources, single = [positions], embeddings.types
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
    if encoder.distance_rows is not None:
        return Context(mask, distances=DistanceScores(operators.graph, encoder.distance_rows))
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
        graph.output("logits", _write_classifier(operators, top, states), ["batch", len(top.out.weight)])
        return Head.SEQUENCE
    if isinstance(top, MaskFiller):
        _write_mask_filler(operators, top, states)
        return Head.MASKED_LM
    if isinstance(top, SparseWeights):
        _write_sparse(operators, top, states)
        return Head.SPARSE
    states = _write_transform(operators, states, top.transform, Operators.dense)
    logits = operators.dense(states, top.out, "head.out")
    if isinstance(top, TokenClassifier):
        graph.output("logits", logits, [*ROWS, len(top.out.weight)])
        return Head.TOKEN
    parts = graph.split(logits, 2, 2, "head/Split")
    for name, part in zip(("start_logits", "end_logits"), parts, strict=True):
        squeezed = graph.node("Squeeze", [part, graph.integers([2], "at.2")], f"head/{name}")
        graph.output(name, squeezed, ROWS)
    return Head.SPAN


def _write_classifier(operators: Operators, top: Classifier, states: str) -> str:
    """[batch, labels]"""
    if top.pooled is Pooled.LATE:
        states = _write_transform(operators, states, top.transform, Operators.dense)
        return _write_mean(operators.graph, operators.dense(states, top.out, "head.out"))
    pooled = _write_pooled(operators.graph, states, top)
    return _gemm(operators, _write_transform(operators, pooled, top.transform, _gemm), top.out, "head.out")


def _write_pooled(graph: Graph, states: str, top: Classifier) -> str:
    """[batch, hidden]"""
    if top.pooled is Pooled.FIRST:
        return graph.node("Squeeze", [states, graph.integers([1], "at.1")], "head/first")
    if top.pooled is Pooled.LAST:
        return graph.node("GatherND", [states, _write_last(graph, top.last)], "head/last", batch_dims=1)
    return _write_mean(graph, states)


def _write_mean(graph: Graph, states: str) -> str:
    """[batch, width]: over the tokens that are not padding."""
    axis = graph.integers([1], "at.1")
    real = graph.node("Cast", ["attention_mask"], "head/Cast", to=TensorProto.FLOAT)
    shares = graph.node("Unsqueeze", [real, graph.integers([2], "at.2")], "head/Unsqueeze")
    total = graph.node("ReduceSum", [graph.node("Mul", [states, shares], "head/Mul"), axis], "head/sum", keepdims=0)
    count = graph.node("ReduceSum", [real, axis], "head/tokens", keepdims=1)
    return graph.node("Div", [total, count], "head/mean")


def _write_last(graph: Graph, last: Last | None) -> str:
    """int64 [batch, 1]: the index of the token to read; 0 where there is none."""
    counted = "attention_mask"
    if last is not None:
        counted = graph.node("Equal", ["input_ids", graph.integers(last.token_id, "head.last_id")], "head/Equal")
        counted = graph.node("Not", [counted], "head/Not") if last.other else counted
        counted = graph.node("Cast", [counted], "head/counted", to=TensorProto.INT64)
        counted = graph.node("Mul", [counted, "attention_mask"], "head/real")
    ends = graph.integers(0, "head.start"), _scalar_length(graph), graph.integers(1, "one")
    places = graph.node("Mul", [graph.node("Range", ends, "head/Range"), counted], "head/places")
    return graph.node("ReduceMax", [places], "head/place", axes=[1], keepdims=1)


def _scalar_length(graph: Graph) -> str:
    """int64 []: tokens."""
    return graph.node("Squeeze", [_length(graph), graph.integers([0], "zero")], "head/length")


def _write_transform(
    operators: Operators, x: str, transform: Transform | None, product: Callable[[Operators, str, Dense, str], str]
) -> str:
    if transform is None:
        return x
    x = operators.activation(product(operators, x, transform.dense, "head.dense"), transform.activation, "head.dense")
    return operators.norm(x, transform.norm, "head")


def _write_mask_filler(operators: Operators, top: MaskFiller, states: str) -> None:
    """Only the mask tokens' states go through the vocabulary: [masks, vocabulary], row by row in order."""
    graph = operators.graph
    masked = graph.node("Equal", ["input_ids", graph.integers(top.mask_id, "head.mask_id")], "head/masked")
    where = graph.node("NonZero", [masked], "head/NonZero")
    where = graph.node("Transpose", [where], "head/where", perm=[1, 0])
    x = graph.node("GatherND", [states, where], "head/GatherND")
    x = _write_transform(operators, x, top.transform, _gemm)
    graph.output("logits", _gemm(operators, x, top.out, "head.out"), ["masks", len(top.out.weight)])


def _write_sparse(operators: Operators, top: SparseWeights, states: str) -> None:
    """All tokens' states go through the vocabulary: [batch, vocabulary]."""
    graph, out = operators.graph, top.scores.out
    mask = graph.node("Unsqueeze", ["attention_mask", graph.integers([2], "at.2")], "head/Unsqueeze")
    if not top.pooling.sums:
        # Padding repeats the first token, which changes no maximum: cheaper than to mask the scores.
        real = graph.node("Cast", [mask], "head/Cast", to=TensorProto.BOOL)
        states = graph.node("Where", [real, states, _first(graph, states, 1, "head/first")], "head/Where")
        mask = ""
    # Products of two axes: the vocabulary's weights are used as they are stored, which may be with the word vectors.
    width = (out if top.scores.transform is None else top.scores.transform.dense).weight.shape[1]
    lines = graph.node("Reshape", [states, graph.integers([-1, width], "head.lines")], "head/lines")
    scores = _gemm(operators, _write_transform(operators, lines, top.scores.transform, _gemm), out, "head.out")
    shape = [graph.node("Shape", ["input_ids"], "head/Shape"), graph.integers([len(out.weight)], "head.vocabulary")]
    scores = graph.node("Reshape", [scores, graph.node("Concat", shape, "head/shape", axis=0)], "head/scores")
    graph.output(WEIGHTS, write_weights(graph, scores, mask, top.pooling), ["batch", len(out.weight)])


def _gemm(operators: Operators, x: str, dense: Dense, name: str) -> str:
    """A product with the weights as they are stored: those shared with the word vectors are written once."""
    graph = operators.graph
    inputs = [x, graph.constant(dense.weight, f"{name}.weight")]
    if dense.bias is not None:
        inputs.append(graph.constant(dense.bias, f"{name}.bias"))
    return graph.node("Gemm", inputs, f"{name}/Gemm", transB=1)
