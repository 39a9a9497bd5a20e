"""The lengths that an engine with kernels made for each shape is fed with. Pure.

OpenVINO compiles its layers for every shape that comes by: five times a run's own time, and some 6 MB of kernels for
each number of tokens (int8, MiniLM). Over lengths of 1 to 512 that would be gigabytes, and most requests of a quiet
server would meet a shape for the first time. So lengths are rounded up to eight steps for each doubling: 32 lengths up
to 512 tokens, 4 % of padding on average. A layer sees rows x tokens as one number: with powers of two as row counts,
batches find the kernels of longer single rows.
"""

from __future__ import annotations

from dataclasses import dataclass

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
