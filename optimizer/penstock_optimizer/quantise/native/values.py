"""Meanings of the names of an ONNX graph while it is read for the native engine, with buffers and constants.

Values that depend on a graph's inputs alone (ids, mask, length) have no steps in the native engine: they are part of
the steps that read them, such as the attention's mask and its bias on the scores.
"""

from __future__ import annotations

from collections.abc import Callable, MutableMapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from penstock.errors import OptimizationError
from penstock_optimizer.quantise.linear import attributes
from penstock_runtime.engines.native.graph_file import DISTANCES_SPARE, GraphStep
from penstock_runtime.rows import Float

Per = Literal["token", "row", "chosen"]
"""A buffer has a line for each token, each row, or each token of one id."""


@dataclass(frozen=True)
class HeadNorm:
    """A root mean square normalisation of each head."""

    weights: str
    """A tensor of the file, [width of a head]."""
    epsilon: float


@dataclass(frozen=True, eq=False)
class GraphValue:
    """A buffer, times factors for each of its channels."""

    buffer: int
    width: int
    per: Per
    factors: str = ""
    rotary: tuple[str, str] | None = None
    """Tensors with the cosines and sines of rotary positions that are still to be applied."""
    head_norm: HeadNorm | None = None
    """The normalisation of each head that is still to be applied, before the rotary positions."""
    repeated: int = 1
    """How many heads of queries read each of its heads."""
    used: int = 0
    """How many numbers of a line count, where a product was filled up; 0: all."""


@dataclass(frozen=True, eq=False)
class TableSum:
    """A sum of rows of tables for each token: not computed yet."""

    words: str = ""
    positions: str = ""
    types: str = ""
    padding: int = -1
    scale: float = 1.0
    """Of the words."""


@dataclass(frozen=True, eq=False)
class Heads:
    """A buffer with lines of heads of `width` numbers; `grouped`: with an axis for queries of one key."""

    whole: GraphValue
    width: int = 0
    grouped: bool = False


@dataclass(frozen=True)
class MaskedLines:
    """Lines of tokens with zeros for padding, or their sum over each row."""

    whole: GraphValue
    summed: bool = False


@dataclass(frozen=True)
class BufferPart:
    """One of the equal parts of a buffer's lines: queries, keys or values, or one of the numbers."""

    whole: GraphValue
    index: int
    count: int


@dataclass(frozen=True)
class Column:
    """One number of each line of a buffer."""

    whole: GraphValue
    index: int


class Buffers:
    """Hands out buffers. A buffer without further readers is used again for a value of the same shape."""

    def __init__(self) -> None:
        self._free: list[tuple[int, int, Per]] = []
        self.count = 0

    def take(self, width: int, per: Per) -> GraphValue:
        """One with lines of `width` numbers."""
        for index, (buffer, *shape) in enumerate(self._free):
            if shape == [width, per]:
                del self._free[index]
                return GraphValue(buffer, width, per)
        self.count += 1
        return GraphValue(self.count - 1, width, per)

    def give(self, value: GraphValue) -> None:
        """Take back a buffer that nothing reads any more."""
        self._free.append((value.buffer, value.width, value.per))


Tensors = MutableMapping[str, Any]


def spread_bias(steps: list[GraphStep], tensors: Tensors, buffers: Sequence[int], bias: Float, name: str) -> None:
    """Give each of several products, the last that write to `buffers`, its part of a bias [all their outputs] that is
    called `name`."""
    begin = 0
    for index, buffer in enumerate(buffers):
        at = next(i for i in reversed(range(len(steps))) if steps[i].target == buffer)
        step, end = steps[at], begin + steps[at].outputs
        total = f"{step.tensors['bias']} + {name}/{index}"
        tensors[total] = tensors[step.tensors["bias"]] + bias[begin:end]
        steps[at] = step.model_copy(update={"tensors": {**step.tensors, "bias": total}})
        begin = end


def side_by_side(steps: Sequence[GraphStep], tensors: Tensors) -> GraphStep | None:
    """One step for several 8-bit products of one source, with the outputs one after the other in each line of the
    target of the first step. Adds its tensors. None for other steps, and for products with activation or residual."""
    alike = {(step.operator, step.source, step.inputs, step.tensors.get("factors")) for step in steps}
    if len(alike) > 1 or any(
        (step.operator, step.activation, step.residual) != ("linear8", "none", -1) for step in steps
    ):
        return None
    names = dict(steps[0].tensors)
    for part in ("weights", "scales", "bias"):
        parts = [step.tensors[part] for step in steps]
        names[part] = f"{parts[0]}/together"
        tensors[names[part]] = np.concatenate([tensors[name] for name in parts], axis=-1)
    return steps[0].model_copy(update={"outputs": sum(step.outputs for step in steps), "tensors": names})


def narrow(words: Float) -> tuple[NDArray[np.int16], Float]:
    """Word vectors [words, width] in 16 bits, and the scale of each word."""
    scale = np.maximum(np.abs(words).max(axis=1), np.float32(1e-12)) / np.float32(32767)
    return np.rint(words / scale[:, np.newaxis]).astype(np.int16), scale.astype(np.float32)


def refusal(what: str) -> OptimizationError:
    """The error for a graph with something that the engine does not know."""
    return OptimizationError(
        f"the native engine does not know {what}",
        remedy="Let another engine serve the model: leave optimization.engines as it is",
    )


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
