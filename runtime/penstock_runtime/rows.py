"""The unit of work between tasks, batching and engines: one token sequence through the model once."""

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
"""What the outputs hold instead of token vectors where the engine has made one of them (`Batch.pooling`)."""


class Pooling(StrEnum):
    """How token vectors become one (`1_Pooling/config.json` of sentence-transformers)."""

    CLS = "cls"
    MEAN = "mean"
    MAX = "max"
    LAST = "last"


@dataclass(frozen=True, slots=True, eq=False)
class Row:
    """One sequence, special tokens included, no padding."""

    ids: list[int]
    type_ids: list[int] | None = None
    """Token types (segments); None: all zero."""
    pooling: Pooling | None = None
    """What is to become of its token vectors; None: they are wanted as they are, or it has none."""

    @property
    def length(self) -> int:
        """Tokens."""
        return len(self.ids)


@runtime_checkable
class Masked(Protocol):
    """A row that knows its mask tokens: what a graph with `Axes.MASKS` outputs wants."""

    @property
    def masks(self) -> tuple[int, ...]:
        """Their positions, rising."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """Rows side by side, as an engine takes them. All arrays int64 [batch, tokens]."""

    input_ids: Int
    attention_mask: Int
    """1 for a token, 0 for padding (always on the right)."""
    token_type_ids: Int
    pooling: Pooling | None = field(default=None, kw_only=True)
    """Of all its rows. An engine may do it, and then gives `POOLED` [batch, width] alone; none has to."""


Outputs = Mapping[str, Float]
"""Of a whole batch, or of one row with neither batch axis nor padding (see `penstock.manifest.Axes`)."""
