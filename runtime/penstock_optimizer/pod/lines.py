"""What a job says on standard output: one JSON object a line, for whoever reads the pod's log.

    {"event": "progress", "done": 7, "of": 23, "stage": "candidates", "message": "onnxruntime int8-dynamic"}
    {"event": "baseline", "digest": "sha256:...", "uri": "...", "bytes": 90000000}
    {"event": "artefact", "digest": "sha256:...", "uri": "...", "bytes": 110000000}
    {"event": "summary", "summary": {...}}

`done` and `of` are steps of the whole; both 0 until it is known how many there are.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from typing import Any

from penstock.resources.job_summary import Summary
from penstock_optimizer.job.fetching import said
from penstock_optimizer.job.progress import Progress
from penstock_runtime.models.progress import Progress as Transfer
from penstock_runtime.store import Published

Write = Callable[[bytes], object]
QUIET_SECONDS = 2.0
"""Bytes that were moved are told at most this often."""


def to_standard_output(line: bytes) -> None:
    """At once and in one piece, as a signal handler needs it."""
    os.write(1, line)


class Lines:
    """Says it."""

    def __init__(self, write: Write = to_standard_output) -> None:
        self._write = write
        self._step, self._steps = 0, 0
        self._moved = 0.0

    def progress(self, event: Progress) -> None:
        """A step of the optimisation."""
        self._step, self._steps = event.step, event.steps
        self.stage(event.stage.value, event.message)

    def stage(self, stage: str, message: str) -> None:
        """What it is at, between steps."""
        self._say("progress", done=self._step, of=self._steps, stage=stage, message=message)

    def transfer(self, stage: str, verb: str) -> Callable[[Transfer], None]:
        """For downloads and uploads, such as `download` and `fetching`."""

        def moved(event: Transfer) -> None:
            now = time.monotonic()
            last = event.bytes_total > 0 and event.bytes_done == event.bytes_total
            if not event.note and not last and now - self._moved < QUIET_SECONDS:
                return
            self._moved = now
            self.stage(stage, said(event, verb))

        return moved

    def published(self, event: str, published: Published) -> None:
        """An artefact is in the store; `event` is `baseline` or `artefact`."""
        self._say(event, digest=str(published.digest), uri=published.uri, bytes=published.bytes)

    def summary(self, summary: Summary) -> None:
        """How it ended."""
        self._say("summary", summary=json.loads(summary.to_message()))

    def _say(self, event: str, **fields: Any) -> None:
        self._write(json.dumps({"event": event, **fields}, ensure_ascii=False).encode() + b"\n")
