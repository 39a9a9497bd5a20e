"""Reads the terms of attention scores that depend on distances, as `DistanceScores` of export writes them (DeBERTa).

The graph multiplies queries and keys with vectors of all distances and shifts the products. The native engine has no
steps for that: its attention takes the vectors.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock_optimizer.quantise.linear import attributes
from penstock_optimizer.quantise.native.inputs import DistanceTable
from penstock_optimizer.quantise.native.reading import Reading
from penstock_optimizer.quantise.native.values import GraphValue, Heads, MaskedLines, refusal

MOST_ROWS = 2**15
"""Vectors of distances: their numbers have 16 bits in the file."""


@dataclass(frozen=True, eq=False)
class DistanceTerms:
    """Products of queries, and of keys, with vectors of the distance from query to key."""

    rows: NDArray[np.int64]
    """[2 * positions - 1]: the vector for each distance, from a key that is furthest before its query to one that is
    furthest after it."""
    first: bool
    """For the first token's query alone."""
    queries: GraphValue | None = None
    """What `query_vectors` are multiplied with."""
    query_vectors: str = ""
    """A constant: [heads, rows, width of a head]."""
    keys: GraphValue | None = None
    key_vectors: str = ""

    def plus(self, other: DistanceTerms) -> DistanceTerms | None:
        """The sum; None if both are products with the same, or their distances differ."""
        one, two = (self, other) if self.queries is not None else (other, self)
        if one.keys is not None or two.queries is not None or one.first != two.first:
            return None
        if not np.array_equal(one.rows, two.rows):
            return None
        return DistanceTerms(one.rows, one.first, one.queries, one.query_vectors, two.keys, two.key_vectors)

    @property
    def positions(self) -> int:
        """The number of tokens that it is for."""
        return (len(self.rows) + 1) // 2


class DistanceReading(Reading):
    """The nodes between queries and keys and the terms of their scores."""

    def _transpose(self, node: Any) -> None:
        """Heads of queries or keys before their tokens. The attention itself reads these where they are."""
        value = self._find(node, 0)
        if isinstance(value, MaskedLines):
            raise refusal(f"a convolution over neighbouring tokens ({node.name})")
        if not isinstance(value, Heads) or value.grouped or attributes(node).get("perm") != [0, 2, 1, 3]:
            raise refusal(f"the operator Transpose ({node.name})")
        self._left[value.whole.buffer] -= 1
        self._set(node, value)

    def _distance_products(self, node: Any, heads: Heads, vectors: DistanceTable) -> None:
        """MatMul of heads with vectors, of which each line takes its distances; or, of the keys for the
        first token's query, Mul and ReduceSum."""
        chain = [node]
        while (after := self._only_reader(chain[-1])) is not None and after.op_type in {
            "Reshape", "Slice", "ReduceSum", "Transpose",
        }:  # fmt: skip
            chain.append(self._take(after))
        names = [one.op_type for one in chain]
        of_keys = names[-1] == "Transpose"
        expected = {
            (False, False): ["MatMul", "Reshape", "Slice", "Reshape", "Slice"],
            (False, True): ["MatMul", "Reshape", "Slice", "Reshape", "Slice", "Transpose"],
            (True, False): ["MatMul"],
            (True, True): ["Mul", "ReduceSum", "Transpose"],
        }[vectors.first, of_keys]
        if names != expected or vectors.turned != (names[0] == "MatMul") or not self._shifts(chain[1:5]):
            raise refusal(f"{node.name}, products with vectors of distances in another order")
        if of_keys and attributes(chain[-1]).get("perm") != [0, 1, 3, 2]:
            raise refusal(f"{chain[-1].name}, scores in another order")
        rows = self._rows(node, vectors, of_keys=of_keys)
        if of_keys:
            scores = DistanceTerms(rows, vectors.first, keys=heads.whole, key_vectors=vectors.table)
        else:
            scores = DistanceTerms(rows, vectors.first, queries=heads.whole, query_vectors=vectors.table)
        self._set(chain[-1], scores)

    def _shifts(self, nodes: list[Any]) -> bool:
        """Whether the nodes after a product leave out one number less in each line, then all but as many as tokens; or
        add up the numbers of each vector."""
        if len(nodes) < 4:
            return all(self._array(one.input[1]).tolist() == [3] for one in nodes if one.op_type == "ReduceSum")
        flat, skipped, lines, shifted = nodes
        return all(
            (
                self._array(flat.input[1]).tolist() == [0, 0, -1],
                (self._find(skipped, 1), self._array(skipped.input[3]).tolist()) == ("length less 1", [2]),
                self._find(lines, 1) == "lines of distances",
                self._array(shifted.input[1]).tolist() == [0],
                (self._find(shifted, 2), self._array(shifted.input[3]).tolist()) == ("length", [3]),
            )
        )

    def _rows(self, node: Any, vectors: DistanceTable, *, of_keys: bool) -> NDArray[np.int64]:
        """`DistanceTerms.rows`, from the constant in the order of the products.

        The products are made of the constant from number positions - length on; token i reads them from number
        length - 1 - i on. So number n of the constant is for the token n - (positions - 1) after token i.
        """
        order = self._array(vectors.order)
        positions = len(order) - 1 if vectors.first else len(order) // 2
        table = self._constants[vectors.table].dims
        if positions < 1 or len(table) != 3 or (not vectors.first and vectors.middle != positions):
            raise refusal(f"{node.name}, vectors of distances in another order")
        if not 0 <= order.min() <= order.max() < min(table[1], MOST_ROWS):
            raise refusal(f"{node.name}, distances without a vector")
        if vectors.first:  # no key is before its query
            return np.concatenate([np.repeat(order[:1], positions - 1), order[:positions]])
        return np.asarray(order[::-1][1:] if of_keys else order[:-1])
