"""Trying again: only what is temporary, with growing waits, a bounded number of times."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from penstock.errors import HostError, PenstockError

T = TypeVar("T")


@dataclass(frozen=True)
class Retries:
    """How often and how patiently."""

    attempts: int = 4
    """Calls in all, the first one included."""
    first_wait_seconds: float = 1.0
    """Before the second call; doubles from call to call, each shortened at random by up to a half, so that many pods
    that started together do not come back together."""
    longest_wait_seconds: float = 30.0
    """Also for a source that asks for more: a start-up that waits longer had better fail and be seen."""
    sleep: Callable[[float], None] = time.sleep
    told: Callable[[PenstockError, float], None] = lambda _error, _seconds: None
    """Before each wait: why, and how many seconds."""

    def run(self, action: Callable[[], T]) -> T:
        """Call until it succeeds; what is not temporary, and the last of what is, is passed on."""
        wait = self.first_wait_seconds
        for _ in range(self.attempts - 1):
            try:
                return action()
            except PenstockError as failure:
                error = failure
                # A disk that is full may be cleared some day, but not while this waits.
                if not error.temporary or isinstance(error, HostError):
                    raise
                asked = getattr(error, "retry_after_seconds", None)
            shortened = wait * random.uniform(0.5, 1.0)  # noqa: S311 - spreads load, guards nothing
            seconds = min(asked if asked is not None else shortened, self.longest_wait_seconds)
            self.told(error, seconds)
            self.sleep(seconds)
            wait = min(2 * wait, self.longest_wait_seconds)
        return action()


DEFAULT_RETRIES = Retries()
