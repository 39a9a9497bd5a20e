"""What an optimisation is doing: events for the terminal, and as JSON lines for whoever runs it as a job."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any, Protocol


class Stage(StrEnum):
    """The stages of an optimisation, in order."""

    DOWNLOAD = "download"
    """Only where the model comes over the network: `done` of `total` bytes. Fact: `note`, a sentence for people."""
    EXPORT = "export"
    """Facts: first `budget_seconds`, which the whole may take; then `seconds`, `fused_nodes`, `parameters`."""
    CANDIDATES = "candidates"
    """One event for each candidate that is settled. Facts: `candidate` (a CandidateFacts as JSON)."""
    MEASURE = "measure"
    """Survivors measured at length, in turns. Facts of the last event: `candidates`, all of them as JSON."""
    PLANS = "plans"
    """Facts: `plan`, `promoted`, `reason`."""
    CAPACITY = "capacity"
    """Facts: `arrivals_per_second`, `p95_milliseconds`; of the last event `requests_per_second` too."""
    REPORT = "report"
    DONE = "done"
    """Facts: `artefact`, `found` (true when nothing had to be done), `seconds`."""


@dataclass(frozen=True)
class Progress:
    """One event. `done` of `total` are steps of the stage (bytes of a download); `step` of `steps` those of the whole
    optimisation, 0 before it begins."""

    stage: Stage
    done: int
    total: int
    message: str
    """One line for people."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """JSON values, by stage."""
    step: int = 0
    steps: int = 0

    @property
    def short(self) -> str:
        """For a table cell: `Optimizing 7/23`."""
        return f"Optimizing {self.step}/{self.steps}"

    def to_json_line(self) -> str:
        """One JSON object on one line, without the line end; `short` included."""
        return json.dumps({**asdict(self), "stage": self.stage.value, "short": self.short}, ensure_ascii=False)


class OnProgress(Protocol):
    """Takes events; must return quickly, since measuring waits for it."""

    def __call__(self, progress: Progress, /) -> None:
        """Take one event."""
        ...


def ignore(_: Progress, /) -> None:
    """Nobody watches."""


class Reporter:
    """Counts the steps of the whole and sends events.

    The number of steps of a stage is a promise when the stage begins (`expect`), and corrected when it ends: a climb
    that ends early gives its steps back, so that the last event always reads `n/n`.
    """

    def __init__(self, on_progress: OnProgress, expected: Mapping[Stage, int]) -> None:
        self._on_progress = on_progress
        self._expected = {stage: expected.get(stage, 0) for stage in Stage}
        self._done = dict.fromkeys(Stage, 0)

    def expect(self, stage: Stage, total: int) -> None:
        """Correct the number of steps of a stage."""
        self._expected[stage] = max(total, self._done[stage])

    def finish(self, stage: Stage) -> None:
        """The stage has had all its steps."""
        self._expected[stage] = self._done[stage]

    def advance(self, stage: Stage, message: str, *, facts: Mapping[str, Any] | None = None, by: int = 1) -> None:
        """Some steps (perhaps none) are done: say so."""
        self._done[stage] += by
        self._expected[stage] = max(self._expected[stage], self._done[stage])
        self._on_progress(
            Progress(
                stage=stage,
                done=self._done[stage],
                total=self._expected[stage],
                message=message,
                facts=facts or {},
                step=sum(self._done.values()),
                steps=sum(self._expected.values()),
            )
        )
