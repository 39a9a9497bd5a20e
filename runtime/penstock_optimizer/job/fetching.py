"""What the fetch of a model tells, as events, at the pace of whoever shows them."""

from __future__ import annotations

import time
from collections.abc import Callable

from penstock_optimizer.job.progress import OnProgress, Progress, Stage
from penstock_runtime.models.progress import Progress as Transfer

FIRST_SECONDS = 2.0
"""What takes less needs no words: a model that is there already, mostly."""
_MB = 1e6


class Fetching:
    """Takes the steps of a fetch, from any thread; passes notes on at once, and the rest now and then.

    Where two come at once, one may be told twice.
    """

    def __init__(
        self, on_progress: OnProgress, *, every_seconds: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._on_progress = on_progress
        self._every_seconds = every_seconds
        self._clock = clock
        self._due: float | None = None
        self._is_told = False
        """Somebody was told that it began, and is owed the end."""

    def __call__(self, step: Transfer) -> None:
        """Take one step."""
        now = self._clock()
        if self._due is None:
            self._due = now + min(FIRST_SECONDS, self._every_seconds)
        is_end = step.bytes_done == step.bytes_total > 0
        if not step.note:
            if now < self._due and not (is_end and self._is_told):
                return
            self._due = now + self._every_seconds
            self._is_told = not is_end
        facts = {"note": step.note} if step.note else {}
        self._on_progress(Progress(Stage.DOWNLOAD, step.bytes_done, step.bytes_total, said(step), facts))


def said(step: Transfer, verb: str = "fetching") -> str:
    """One line for people."""
    amount = f": {step.bytes_done / _MB:.0f} of {step.bytes_total / _MB:.0f} MB" if step.bytes_total else ""
    return step.note or f"{verb} {step.file}{amount}"
