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
"""Step between short lengths."""
_STEPS_LOG2 = 3
"""Eight steps for each doubling."""


@dataclass(frozen=True, slots=True)
class ShapeGrid:
    """The lengths and row counts that the engine compiles for."""

    longest: int | None = None
    """The highest length (the model's position table ends there); None: no limit."""

    def length(self, tokens: int) -> int:
        """The padded length of a row of `tokens`."""
        step = max(_FINEST, 1 << max(0, (tokens - 1).bit_length() - 1 - _STEPS_LOG2))
        rounded = -(-tokens // step) * step
        return rounded if self.longest is None else max(tokens, min(rounded, self.longest))

    def rows(self, count: int) -> int:
        """Rows to run at once out of `count`: the largest power of two."""
        return 1 << (count.bit_length() - 1)

    def lengths(self, longest: int) -> tuple[int, ...]:
        """All padded lengths of rows of up to `longest` tokens, ascending."""
        return tuple(sorted({self.length(tokens) for tokens in range(1, longest + 1)}))


def feed(batch: Batch, names: Iterable[str]) -> dict[str, Int]:
    """The arrays of the inputs `names` (`input_ids`, `attention_mask`, `token_type_ids`): int64 [batch, tokens]."""
    return {name: getattr(batch, name) for name in names}


def pad(batch: Batch, tokens: int) -> Batch:
    """The batch padded with masked zeros on the right to `tokens`; unchanged if it is long enough."""
    more = tokens - batch.input_ids.shape[1]
    if more <= 0:
        return batch
    width = ((0, 0), (0, more))
    return Batch(
        np.pad(batch.input_ids, width), np.pad(batch.attention_mask, width), np.pad(batch.token_type_ids, width)
    )
