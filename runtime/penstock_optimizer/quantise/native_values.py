"""What the names of an ONNX graph stand for while it is read for the native engine, its buffers, and its constants.

What an encoder's graph makes of ids, mask and length before any hidden state is no step of the native engine: it is
what some of its steps do with every batch.
"""

from __future__ import annotations

from collections.abc import Callable, MutableMapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from penstock.errors import OptimizationError
from penstock_optimizer.export.operators import MASKED_SCORE
from penstock_optimizer.quantise.linear import attributes
from penstock_runtime.engines.native.graph_file import DISTANCES_SPARE, GraphStep
from penstock_runtime.rows import Float

Per = Literal["token", "row", "chosen"]
"""What a buffer has a line for: each token, each row, or each token of one id."""


@dataclass(frozen=True, eq=False)
class GraphValue:
    """A buffer, times factors for each of its channels."""

    buffer: int
    width: int
    per: Per
    factors: str = ""
    rotary: tuple[str, str] | None = None
    """Tensors with the cosines and sines of rotary positions that are still to be applied."""
    used: int = 0
    """How many numbers of a line count, where a product was filled up; 0: all."""


@dataclass(frozen=True, eq=False)
class TableSum:
    """Tables whose rows are added up for each token: not computed yet."""

    words: str = ""
    positions: str = ""
    types: str = ""
    padding: int = -1


class Mask:
    """What is computed of the attention mask."""


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
    """Positions that count from the padding id."""

    padding: int


@dataclass(frozen=True)
class Distances:
    """A bias on the scores by how far a key is behind its query."""

    table: str
    """A tensor of the file."""
    positions: int
    first: bool = False
    """For the first token's query alone."""


@dataclass(frozen=True)
class LocalWindow:
    """A bias on the scores of keys that are further than `reach` from their query; None: not known yet."""

    reach: int | None = None
    first: bool = False
    """For the first token's query alone."""


@dataclass(frozen=True)
class MaskedLines:
    """Lines of tokens, those of padding as zeros, or their sum over each row."""

    whole: GraphValue
    summed: bool = False


@dataclass(frozen=True)
class Part:
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
    """Hands out buffers; one whose readers are through is used again for what has the same shape."""

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
        """What it holds is not needed any more."""
        self._free.append((value.buffer, value.width, value.per))


INPUTS = {"input_ids": "ids", "attention_mask": Mask(), "token_type_ids": "types"}
"""What the graph's inputs stand for."""


def of_inputs(node: Any, values: Sequence[Any], constant: Callable[[str], Any]) -> Any | None:
    """The meaning of a node's result, from the meanings of its inputs (None: a constant, or something else). None where
    the node makes nothing known of them."""
    match node.op_type, list(values):
        case ("Unsqueeze", [Mask() as mask, None]):
            return mask
        case ("ReduceSum", [Mask(), None]):
            return "tokens of each row"
        case ("Squeeze", ["length", None]) | ("Range", [None, "length", None]) | ("Unsqueeze", ["places", None]):
            return "places" if node.op_type != "Squeeze" else "length"
        case "Sub", ["places", "places"]:
            return "ahead"
        case "Abs", ["ahead"]:  # without it, keys on one side only would be masked
            return LocalWindow()
        case "Greater", [LocalWindow(reach=None), None]:
            return LocalWindow(int(constant(node.input[1])))
        case ("Cast", [LocalWindow() as window]) | ("Mul" | "Unsqueeze", [LocalWindow() as window, None]):
            return window
        case "Shape", ["ids"] if attributes(node) == {"start": 1, "end": 2}:
            return "length"
        case "Concat", ["length", "length"]:
            return "lengths"
        case "Equal", ["ids", None]:
            return Same(int(constant(node.input[1])))
        case "Not", [Same(number=number)]:
            return Counted(number)
        case ("Cast", [Mask() | Counted() as value]) | ("CumSum" | "Mul" | "Add", [Counted() as value, *_]):
            return value
        case "NonZero", [Same(number=number)]:
            return Where(number)
        case "Transpose", [Where(turned=False) as where] if attributes(node).get("perm", [1, 0]) == [1, 0]:
            return replace(where, turned=True)
    return None


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
    """8-bit products of one source as one whose results stand side by side, its tensors added; its target is that of
    the first. None for steps that are no such products, or do more than multiply."""
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


def window_bias(reach: int, heads: int, positions: int) -> Float:
    """The bias of a window in the form of `by_distance`."""
    distances = np.abs(np.arange(1 - positions, positions))
    line = np.where(distances > reach, np.float32(MASKED_SCORE), np.float32(0))
    return np.pad(np.tile(line, (heads, 1)), ((0, 0), (0, DISTANCES_SPARE))).astype(np.float32)


def narrow(words: Float) -> tuple[NDArray[np.int16], Float]:
    """Word vectors [words, width] in 16 bits, and the scale of each word."""
    scale = np.maximum(np.abs(words).max(axis=1), np.float32(1e-12)) / np.float32(32767)
    return np.rint(words / scale[:, np.newaxis]).astype(np.int16), scale.astype(np.float32)


def by_distance(bias: NDArray[Any]) -> Float | None:
    """From a bias on the scores [1, heads, positions, positions], of a query (third axis) and a key (fourth), to
    [heads, 2 * positions - 1 + spare]: from the key that is furthest before its query to the one furthest behind it.
    None for a bias that is of another shape, or not the same wherever query and key are as far apart."""
    if bias.ndim != 4 or len(bias) != 1 or bias.shape[2] != bias.shape[3]:
        return None
    if not np.array_equal(bias[:, :, 1:, 1:], bias[:, :, :-1, :-1]):
        return None
    line = np.concatenate([bias[0, :, :0:-1, 0], bias[0, :, 0]], axis=1)
    return np.pad(line, ((0, 0), (0, DISTANCES_SPARE))).astype(np.float32)


def refusal(what: str) -> OptimizationError:
    """The error for a graph with something that the engine does not know."""
    return OptimizationError(
        f"the native engine does not know {what}",
        remedy="Let another engine serve the model: leave optimization.engines as it is",
    )
