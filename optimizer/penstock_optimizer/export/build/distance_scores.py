"""Writes the terms of attention scores that depend on distances (DeBERTa's disentangled attention)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from penstock_optimizer.export.build.graph import Graph
from penstock_optimizer.export.transformer import DistanceVectors


class DistanceScores:
    """For all layers of an encoder, which have the same distances and each its own vectors of them.

    Every token is multiplied with the vector of every distance that occurs in the batch. Of these products each token
    then takes the ones for its distances by shifting its line. Gathering them one by one with an index for each score
    reads and writes several times as much.
    """

    def __init__(self, graph: Graph, rows: NDArray[np.int64]) -> None:
        """`rows` is `Encoder.distance_rows`."""
        self._graph = graph
        self._rows = rows
        self._zero, self._three = graph.integers([0], "zero"), graph.integers([3], "at.3")
        self._length = graph.node("Shape", ["input_ids"], "distances/tokens", start=1, end=2)
        one, two = graph.integers([1], "at.1"), graph.integers([2], "at.2")
        self._skipped = graph.node("Sub", [self._length, one], "distances/skipped")
        twice = graph.node("Sub", [graph.node("Mul", [self._length, two], "distances/twice"), one], "distances/line")
        parts = [graph.integers([0, 0, -1], "distances.flat"), twice]
        self._shape = graph.node("Concat", parts, "distances/shape", axis=0)
        self._chosen: dict[str, str] = {}

    def write(self, query: str, key: str, vectors: DistanceVectors, name: str, *, first_only: bool) -> str:
        """float32 [batch, heads, queries, tokens]; of queries and keys as [batch, heads, tokens, width of a head].

        `first_only`: the query is the first token alone.
        """
        graph, scores = self._graph, []
        if vectors.keys is not None:
            found = self._vectors(vectors.keys, "first" if first_only else "of queries", f"{name}.keys")
            turned = graph.node("Transpose", [found], f"{name}.keys/Transpose", perm=[0, 2, 1])
            products = graph.node("MatMul", [query, turned], f"{name}.keys/MatMul")
            scores.append(products if first_only else self._shifted(products, f"{name}.keys"))
        if vectors.queries is not None:
            found = self._vectors(vectors.queries, "first" if first_only else "of keys", f"{name}.queries")
            if first_only:  # one distance for each key
                products = graph.node("Mul", [key, found], f"{name}.queries/Mul")
                products = graph.node("ReduceSum", [products, self._three], f"{name}.queries/ReduceSum", keepdims=1)
            else:
                turned = graph.node("Transpose", [found], f"{name}.queries/Transpose", perm=[0, 2, 1])
                products = graph.node("MatMul", [key, turned], f"{name}.queries/MatMul")
                products = self._shifted(products, f"{name}.queries")
            scores.append(graph.node("Transpose", [products], f"{name}.queries/scores", perm=[0, 1, 3, 2]))
        return scores[0] if len(scores) == 1 else graph.node("Add", scores, f"{name}/Add")

    def _vectors(self, table: NDArray[np.float32], order: str, name: str) -> str:
        """[heads, distances, width]: the vectors in the order of distances that `_shifted` expects, or of the keys of
        the first token."""
        graph = self._graph
        return graph.node("Gather", [graph.constant(table, name), self._order(order)], f"{name}/Gather", axis=1)

    def _order(self, order: str) -> str:
        """int64 [2 * tokens], or [tokens] for the first token: rows of the table; the last of the former is not used.

        Along the keys the distances from a query fall; along the queries the distances from a key rise.
        """
        if order not in self._chosen:
            graph, positions, zero = self._graph, len(self._rows) // 2, self._zero
            if order == "first":
                table, start, end = self._rows[positions::-1], zero, self._length
            else:
                middle = graph.integers([positions], "distances.positions")
                start = graph.node("Sub", [middle, self._length], f"distances/{order}/start")
                end = graph.node("Add", [middle, self._length], f"distances/{order}/end")
                table = self._rows[1:] if order == "of keys" else self._rows[-2::-1]
            rows = graph.constant(np.ascontiguousarray(table), f"distances.{order}")
            self._chosen[order] = graph.node("Slice", [rows, start, end, zero], f"distances/{order}")
        return self._chosen[order]

    def _shifted(self, products: str, name: str) -> str:
        """From [batch, heads, tokens, 2 * tokens] to [batch, heads, tokens, tokens].

        Line i takes its numbers from tokens - 1 - i on. Written one after the other, lines that are shorter by one
        begin one further to the left each.
        """
        graph = self._graph
        flat = graph.node("Reshape", [products, graph.integers([0, 0, -1], "distances.flat")], f"{name}/flat")
        ends = [self._skipped, graph.integers([-1], "at.-1"), graph.integers([2], "at.2")]
        flat = graph.node("Slice", [flat, *ends], f"{name}/skipped")
        lines = graph.node("Reshape", [flat, self._shape], f"{name}/lines")
        return graph.node("Slice", [lines, self._zero, self._length, self._three], f"{name}/shifted")
