"""Meanings of the names of an ONNX graph while it is read for the native engine, with buffers and constants."""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from penstock.errors import OptimizationError
from penstock_runtime.engines.native.graph_file import GraphStep
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
