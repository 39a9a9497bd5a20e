"""Writes limits of the attention range, and biases of the scores by distance."""

from __future__ import annotations

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
