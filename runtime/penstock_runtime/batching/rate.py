"""How fast the rows are served, measured from the runs themselves. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass

FIRST_GUESS = 2000.0
"""Tokens a second and worker, before anything is measured: a small encoder on one core without VNNI."""
_MEMORY_SECONDS = 5.0
"""Older runs count for less: after this many seconds of running for half."""


@dataclass(slots=True)
class DrainRate:
    """Tokens a second that all the workers serve together while they are busy."""

    workers: int
    _tokens: float = 0.0
    _seconds: float = 0.0

    def ran(self, tokens: int, seconds: float) -> None:
        """A worker has run a batch of so many real tokens."""
        decay = 0.5 ** (seconds / _MEMORY_SECONDS)
        self._tokens = self._tokens * decay + tokens
        self._seconds = self._seconds * decay + seconds

    @property
    def is_measured(self) -> bool:
        """Not a guess."""
        return self._seconds > 0 and self._tokens > 0

    @property
    def tokens_per_second(self) -> float:
        """The rate; a guess before the first run."""
        if not self.is_measured:
            return FIRST_GUESS * self.workers
        return self.workers * self._tokens / self._seconds

    def retry_after_seconds(self, waiting_tokens: int) -> int:
        """When to come again, whole seconds from 1 to 60: once what waits now has been served."""
        return max(1, min(60, math.ceil(waiting_tokens / self.tokens_per_second)))
