"""Values that depend on a graph's inputs alone (ids, mask, length), and their form in the native engine.

The native engine has no steps for these values: they are part of the steps that read them, such as the attention's
mask and its bias on the scores.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock_optimizer.quantise.linear import attributes
from penstock_runtime.engines.native.graph_file import DISTANCES_SPARE
from penstock_runtime.rows import Float

LONGEST = 8192
"""Tokens of a row, where the bias on the scores is known for any distance: the engine has a table of distances."""


class Mask:
    """A value made of the attention mask."""


@dataclass(frozen=True)
class Same:
    """Which tokens have an id."""

    number: int


@dataclass(frozen=True)
class Where:
    """Where they are: two numbers for each of them, or two lines of numbers."""

    number: int
    turned: bool = False


@dataclass(frozen=True)
class Counted:
    """Positions that count from the padding id; of the same form: which tokens are not padding."""

    padding: int


@dataclass(frozen=True)
class LastPlace:
    """The index of the last token that is not masked, in each row."""

    token_id: int = -1
    """Only tokens of this id count; -1: all do."""
    other: bool = False
    """Only tokens of other ids count."""


@dataclass(frozen=True)
class Clipped:
    """The distance from query to key, at most `furthest` in both directions. `shifted`: from 0 on."""

    furthest: int
    shifted: bool = False


@dataclass(frozen=True)
class ScoreBias:
    """A bias on the scores by the distance from query to key."""

    before: int = -1
    """How many keys before its own a query attends to; -1: all."""
    after: int = -1
    """The same after its own."""
    table: str = ""
    """A constant: [1, heads, positions, positions], or what `kind` states."""
    kind: str = "pairs"
    """pairs; distances: [heads, 2 * furthest + 1]; slopes: [1, heads, 1, 1], times the distance."""
    first: bool = False
    """For the first token's query alone."""

    def plus(self, other: ScoreBias) -> ScoreBias | None:
        """The sum; None if both have a table."""
        if self.table and other.table:
            return None
        both = self if self.table else other
        ranges = zip((self.before, self.after), (other.before, other.after), strict=True)
        before, after = (max(pair) if -1 in pair else min(pair) for pair in ranges)
        return replace(both, before=before, after=after)


@dataclass(frozen=True)
class DistanceEdge:
    """`middle`, less or plus the number of tokens."""

    middle: int
    end: bool


@dataclass(frozen=True)
class DistanceTable:
    """Vectors of the distances of a text's tokens, in an order."""

    order: str
    """A constant with the numbers of the vectors. Those from `middle` less to `middle` plus the number of tokens are
    taken; `first`: as many as there are tokens."""
    first: bool = False
    middle: int = 0
    table: str = ""
    """A constant: [heads, vectors, width]; empty: not looked up yet."""
    turned: bool = False
    """Width before vectors."""


INPUTS = {"input_ids": "ids", "attention_mask": Mask(), "token_type_ids": "types"}
"""The meanings of the graph's inputs."""


def of_inputs(node: Any, values: Sequence[Any], constant: Callable[[str], Any]) -> Any | None:
    """The meaning of a node's result, from the meanings of its inputs (None: a constant, or something else). None where
    the node makes nothing known of them."""
    match node.op_type, list(values):
        case ("Unsqueeze", [Mask() as mask, None]):
            return mask
        case ("ReduceSum", [Mask(), None]):
            return "tokens of each row"
        case ("Squeeze", ["length", None]) | ("Range", [None, "length", None]):
            return "places" if node.op_type == "Range" else "length"
        case ("Unsqueeze", ["places", None]) if constant(node.input[1]).tolist() == [1]:
            return "places of queries"
        case "Shape", ["ids"]:
            return "length" if attributes(node) == {"start": 1, "end": 2} else "shape"
        case "Concat", ["length", "length"]:
            return "lengths"
        case "Concat", ["shape", None]:
            return "shape of scores"
        case "Equal", ["ids", None]:
            return Same(int(constant(node.input[1])))
        case "Not", [Same(number=number)]:
            return Counted(number)
        case ("Cast", [Mask() | Counted() | Same() as value]) | ("CumSum" | "Mul" | "Add", [Counted() as value, *_]):
            return value
        case "Mul", [Same() as value, Mask()]:
            return value
        case "NonZero", [Same(number=number)]:
            return Where(number)
        case "Transpose", [Where(turned=False) as where] if attributes(node).get("perm", [1, 0]) == [1, 0]:
            return replace(where, turned=True)
    return _last_place(node, values) or _score_bias(node, values, constant) or _distances(node, values, constant)


def _last_place(node: Any, values: Sequence[Any]) -> LastPlace | None:
    match node.op_type, list(values):
        case "Mul", ["places", Mask()]:
            return LastPlace()
        case "Mul", ["places", Same(number=number)]:
            return LastPlace(number)
        case "Mul", ["places", Counted(padding=number)]:
            return LastPlace(number, other=True)
        case "ReduceMax", [LastPlace() as place]:
            return place
    return None


def _score_bias(node: Any, values: Sequence[Any], constant: Callable[[str], Any]) -> Any | None:
    match node.op_type, list(values):
        case "Sub", ["places", "places of queries"]:
            return "ahead"
        case ("Abs", ["ahead"]) | ("Cast", ["away"]):
            return "away"
        case "Greater", ["away", None]:
            reach = int(constant(node.input[1]))
            return ScoreBias(before=reach, after=reach)
        case "Greater", ["ahead", None]:
            return ScoreBias(after=int(constant(node.input[1])))
        case "Mul", ["away", None]:
            return ScoreBias(table=node.input[1], kind="slopes")
        case "Clip", ["ahead", None, None]:
            least, most = (int(constant(name)) for name in node.input[1:3])
            return Clipped(most) if least == -most else None
        case "Add", [Clipped(shifted=False) as clipped, None] if int(constant(node.input[1])) == clipped.furthest:
            return replace(clipped, shifted=True)
        case "Gather", [None, Clipped(shifted=True)] if attributes(node).get("axis", 0) == 1:
            return ScoreBias(table=node.input[0], kind="distances")
        case ("Cast", [ScoreBias() as bias]) | ("Mul" | "Unsqueeze", [ScoreBias() as bias, None]):
            return bias
        case "Add", [ScoreBias() as one, ScoreBias() as other]:
            return one.plus(other)
    return None


def _distances(node: Any, values: Sequence[Any], constant: Callable[[str], Any]) -> Any | None:
    match node.op_type, list(values):
        case ("Sub", ["length", None]) if constant(node.input[1]).tolist() == [1]:
            return "length less 1"
        case ("Mul", ["length", None]) if constant(node.input[1]).tolist() == [2]:
            return "length twice"
        case ("Sub", ["length twice", None]) if constant(node.input[1]).tolist() == [1]:
            return "length twice less 1"
        case ("Concat", [None, "length twice less 1"]) if constant(node.input[0]).tolist() == [0, 0, -1]:
            return "lines of distances"
        case (("Sub" | "Add"), [None, "length"]):
            return DistanceEdge(int(constant(node.input[0])[0]), end=node.op_type == "Add")
        case "Slice", [None, DistanceEdge(middle=middle, end=False), DistanceEdge(middle=end, end=True), None]:
            return DistanceTable(node.input[0], middle=middle) if middle == end else None
        case ("Slice", [None, None, "length", None]) if constant(node.input[0]).ndim == 1:
            return DistanceTable(node.input[0], first=True) if constant(node.input[1]).tolist() == [0] else None
        case "Gather", [None, DistanceTable(table="") as vectors] if attributes(node).get("axis", 0) == 1:
            return replace(vectors, table=node.input[0])
        case ("Transpose", [DistanceTable(turned=False) as vectors]) if attributes(node).get("perm") == [0, 2, 1]:
            return replace(vectors, turned=True)
    return None


def distance_table(bias: ScoreBias, array: NDArray[Any]) -> Float | None:
    """The table of a bias for the engine: [heads, 2 * positions - 1 + spare], from the key that is furthest before its
    query to the one that is furthest after it. `array` is the constant. None if it has another shape, or is a bias of
    pairs that is not the same for all pairs of a distance."""
    if bias.kind == "pairs":
        return by_distance(array)
    distances = np.arange(1 - LONGEST, LONGEST)
    if bias.kind == "slopes":
        line = array.reshape(-1, 1) * np.abs(distances).astype(np.float32)
    else:
        furthest = array.shape[1] // 2
        line = array[:, np.clip(distances, -furthest, furthest) + furthest]
    return np.pad(line, ((0, 0), (0, DISTANCES_SPARE))).astype(np.float32)


def by_distance(bias: NDArray[Any]) -> Float | None:
    """`distance_table` of a bias [1, heads, positions, positions] of a query (third axis) and a key (fourth)."""
    if bias.ndim != 4 or len(bias) != 1 or bias.shape[2] != bias.shape[3]:
        return None
    if not np.array_equal(bias[:, :, 1:, 1:], bias[:, :, :-1, :-1]):
        return None
    line = np.concatenate([bias[0, :, :0:-1, 0], bias[0, :, 0]], axis=1)
    return np.pad(line, ((0, 0), (0, DISTANCES_SPARE))).astype(np.float32)
