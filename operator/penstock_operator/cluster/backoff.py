"""How long to wait before trying again. Pure, but for the dice."""

from __future__ import annotations

import random
from dataclasses import dataclass


@dataclass(frozen=True)
class Backoff:
    """Doubling waits with jitter."""

    first_seconds: float
    limit_seconds: float
    attempts: int = 0
    """Tries in all; 0: without end."""

    def seconds(self, failures: int, *, at_least: float = 0.0) -> float:
        """The wait after this many failures (from 1): half to all of the doubled time, so that crowds disperse.

        `at_least` is what the other side asked for (Retry-After); a quarter more of it at most.
        """
        # 2.0 ** 1024 overflows, and a limit is reached long before 2 ** 30.
        wait = min(self.limit_seconds, self.first_seconds * 2.0 ** min(failures - 1, 30))
        return max(wait * random.uniform(0.5, 1.0), at_least * random.uniform(1.0, 1.25))  # noqa: S311

    def allows(self, failures: int) -> bool:
        """Whether there is another try after this many failures."""
        return self.attempts == 0 or failures < self.attempts
