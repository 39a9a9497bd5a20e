"""Inputs of a graph: arrays by name, padding, and the grid of padded lengths for engines that compile for each shape.

OpenVINO compiles its layers for every new input shape. That takes five times as long as a run, and some 6 MB of kernels
for each number of tokens (int8, MiniLM): gigabytes for all lengths of 1 to 512, and most requests of a server with
little traffic would have a new shape. So lengths are rounded up to eight steps for each doubling: 32 lengths up to 512
tokens, 4 % of padding on average. A layer sees rows x tokens as one number: with powers of two as row counts, batches
reuse the kernels of longer single rows.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from penstock_runtime.rows import Batch, Int

_FINEST = 8
"""Steps between short lengths."""
_STEPS_LOG2 = 3
"""Eight steps for each doubling."""


@dataclass(frozen=True, slots=True)
class ShapeGrid:
    """Lengths and row counts that are compiled for."""

    longest: int | None = None
    """Never rounded beyond this (the model's position table ends there); None: no such limit."""

    def length(self, tokens: int) -> int:
        """What a row of `tokens` is padded to."""
        step = max(_FINEST, 1 << max(0, (tokens - 1).bit_length() - 1 - _STEPS_LOG2))
        rounded = -(-tokens // step) * step
        return rounded if self.longest is None else max(tokens, min(rounded, self.longest))

    def rows(self, count: int) -> int:
        """How many of `count` rows to run at once: the largest power of two."""
        return 1 << (count.bit_length() - 1)

    def lengths(self, longest: int) -> tuple[int, ...]:
        """All of them for rows up to `longest` tokens, rising."""
        return tuple(sorted({self.length(tokens) for tokens in range(1, longest + 1)}))


def feed(batch: Batch, names: Iterable[str]) -> dict[str, Int]:
    """Those of `input_ids`, `attention_mask` and `token_type_ids` that the graph has: int64 [batch, tokens]."""
    return {name: getattr(batch, name) for name in names}


def pad(batch: Batch, tokens: int) -> Batch:
    """The batch with masked zeros on the right, up to `tokens`; the same one when it is that long."""
    more = tokens - batch.input_ids.shape[1]
    if more <= 0:
        return batch
    width = ((0, 0), (0, more))
    return Batch(
        np.pad(batch.input_ids, width), np.pad(batch.attention_mask, width), np.pad(batch.token_type_ids, width)
    )
