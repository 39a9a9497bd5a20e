"""Rows, batches and outputs: the values between tasks, batching and engines. Makes batches of rows, and splits outputs.

A `Row` is a whole token sequence, a `StepRow` the part of one that a step of text generation computes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from penstock.manifest import Axes, GraphIO
from penstock_runtime.errors import InferenceFailed

Float = NDArray[np.float32]
Int = NDArray[np.int64]

POOLED = "pooled"
"""Name of the output that replaces the token vectors if the engine has pooled them (`Batch.pooling`)."""


class Pooling(StrEnum):
    """How token vectors are combined into one (`1_Pooling/config.json` of sentence-transformers)."""

    CLS = "cls"
    MEAN = "mean"
    MAX = "max"
    LAST = "last"
    MEAN_SQRT_LEN = "mean_sqrt_len"
    """The sum divided by the square root of the number of tokens."""
    WEIGHTED_MEAN = "weighted_mean"
    """The mean in which a token counts as many times as its position, from 1."""


@dataclass(frozen=True, slots=True)
class Poolings:
    """Poolings whose vectors are joined, over the tokens after a prompt."""

    kinds: tuple[Pooling, ...]
    skip: int = 0
    """Tokens at the beginning that do not count."""


AnyPooling = Pooling | Poolings
"""One pooling, or several together."""


@dataclass(frozen=True, slots=True, eq=False)
class Row:
    """One sequence, special tokens included, no padding."""

    ids: list[int]
    type_ids: list[int] | None = None
    """Token types (segments); None: all zero."""
    pooling: AnyPooling | None = None
    """How its token vectors are pooled; None: not at all, or the graph has none."""
    attended: int | None = field(default=None, kw_only=True)
    """How many of its first tokens are attended to; None: all. The others get vectors too."""

    @property
    def length(self) -> int:
        """Number of tokens."""
        return len(self.ids)


@runtime_checkable
class Masked(Protocol):
    """A row with the positions of its mask tokens, for graphs with `Axes.MASKS` outputs."""

    @property
    def masks(self) -> tuple[int, ...]:
        """Positions of the mask tokens, ascending."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """Padded rows, the input of an engine. All arrays int64 [batch, tokens]."""

    input_ids: Int
    attention_mask: Int
    """1 for a token that is attended to; 0 for others at the end of a row, and padding (always on the right)."""
    token_type_ids: Int
    pooling: AnyPooling | None = field(default=None, kw_only=True)
    """The pooling of all rows. An engine may pool, and then has the single output `POOLED` [batch, width]."""


@dataclass(frozen=True, slots=True)
class StepRow:
    """The tokens of one sequence that one step computes.

    tokens: int32 [n], n >= 1: one while decoding, a chunk of the prompt before that.
    position: the number of tokens of the sequence that the cache holds already.
    blocks: int32 [ceil((position + n) / block_size)], the blocks of the pool that hold the sequence, in order.
    logits: how many of the row's last tokens need logits (0 for a chunk inside a prompt, 1 usually, n for the guard).
    """

    tokens: NDArray[np.int32]
    position: int
    blocks: NDArray[np.int32]
    logits: int


Outputs = Mapping[str, Float]
"""Outputs of a batch, or of one row without batch axis and padding (see `penstock.manifest.Axes`)."""


# Shared, since making arrays of ones and zeros costs more than the rest of collating a short row.
_LONGEST_SHARED = 4096
_ONES = np.ones((1, _LONGEST_SHARED), dtype=np.int64)
_ZEROS = np.zeros((1, _LONGEST_SHARED), dtype=np.int64)
for _shared in (_ONES, _ZEROS):
    _shared.setflags(write=False)


def collate(rows: Sequence[Row]) -> Batch:
    """A batch of rows, the shorter ones padded on the right with zeros (masked, so the value does not matter).

    Mask and types may be views of shared read-only memory.
    """
    if len(rows) == 1:
        row = rows[0]
        width = row.length
        ids = np.array([row.ids], dtype=np.int64)
        types = _part(_ZEROS, width) if row.type_ids is None else np.array([row.type_ids], dtype=np.int64)
        mask = _part(_ONES, width)
        if row.attended is not None:
            mask = mask.copy()
            mask[:, row.attended :] = 0
        return Batch(ids, mask, types, pooling=row.pooling)
    width = max(row.length for row in rows)
    ids = np.zeros((len(rows), width), dtype=np.int64)
    mask = np.zeros((len(rows), width), dtype=np.int64)
    types = np.zeros((len(rows), width), dtype=np.int64)
    for index, row in enumerate(rows):
        ids[index, : row.length] = row.ids
        mask[index, : row.length if row.attended is None else row.attended] = 1
        if row.type_ids is not None:
            types[index, : row.length] = row.type_ids
    (pooling, *others) = {row.pooling for row in rows}
    return Batch(ids, mask, types, pooling=None if others else pooling)


def split(outputs: Outputs, rows: Sequence[Row], io: GraphIO) -> list[Outputs]:
    """Each row's part of every output, without padding: views of the batch's arrays. Only `POOLED` if that is present.

    InferenceFailed if the shapes differ from `io`.
    """
    if POOLED in outputs:
        vectors = outputs[POOLED]
        _expect(POOLED, vectors, 0, len(rows))
        return [{POOLED: vector} for vector in vectors]
    divided = {name: _divide(name, outputs[name], rows, axes) for name, axes in io.outputs.items()}
    if len(rows) == 1:
        return [{name: parts[0] for name, parts in divided.items()}]
    return [{name: parts[index] for name, parts in divided.items()} for index in range(len(rows))]


def run_rows(run: Callable[[Batch], Outputs], io: GraphIO, rows: Sequence[Row]) -> list[Outputs]:
    """Run `rows` as one batch, padded to the longest; each row's outputs. `run`: such as `Engine.run`."""
    return split(run(collate(rows)), rows, io)


def _part(shared: Int, width: int) -> Int:
    return shared[:, :width] if width <= _LONGEST_SHARED else np.full((1, width), shared[0, 0], dtype=np.int64)


def _divide(name: str, values: Float, rows: Sequence[Row], axes: Axes) -> list[Float]:
    if axes is Axes.MASKS:
        counts = [len(row.masks) if isinstance(row, Masked) else 0 for row in rows]
        _expect(name, values, 0, sum(counts))
        ends = np.cumsum(counts).tolist()
        return [values[end - count : end] for end, count in zip(ends, counts, strict=True)]
    _expect(name, values, 0, len(rows))
    if axes is Axes.ROW:
        return list(values)
    _expect(name, values, 1, max(row.length for row in rows))
    return [values[index, : row.length] for index, row in enumerate(rows)]


def _expect(name: str, values: Float, axis: int, wanted: int) -> None:
    if values.ndim <= axis or values.shape[axis] != wanted:
        raise InferenceFailed(
            f"output {name} has shape {list(values.shape)}: {wanted} was expected on axis {axis}",
            remedy="The artefact's manifest describes another graph: run penstock optimize again",
        )
