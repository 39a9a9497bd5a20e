"""Rows, batches and outputs: the values between tasks, batching and engines.

A `Row` is a whole token sequence, a `StepRow` the part of one that a step of text generation computes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

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
