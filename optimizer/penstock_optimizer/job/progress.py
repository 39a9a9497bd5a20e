"""Reports the progress of an optimisation: events for the terminal, and as JSON lines for a program that runs it."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.manifest import CandidateFacts, ReasonCode
from penstock.recipe import Plan, Recipe

if TYPE_CHECKING:
    # Types only: the command line imports this module, and `penstock optimize --help` needs no numpy.
    from penstock.capacity import CapacityCurve, CapacityPoint
    from penstock_optimizer.candidate.work_folder import ExportedFacts
    from penstock_optimizer.search.climb import SearchStep
    from penstock_runtime.models.sources.transfer import FetchProgress as Transfer


class Stage(StrEnum):
    """The stages of an optimisation, in order."""

    DOWNLOAD = "download"
    """Only when the model comes over the network: `done` of `total` bytes. Fact: `note`, a sentence for people."""
    EXPORT = "export"
    """Facts: first `budget_seconds`, the limit of the whole; then `seconds`, `fused_nodes`, `parameters`."""
    CANDIDATES = "candidates"
    """One event for each candidate with an outcome. Facts: `candidate` (a CandidateFacts as JSON)."""
    MEASURE = "measure"
    """Candidates measured at length, alternately. Facts of the last event: `candidates`, all of them as JSON."""
    PLANS = "plans"
    """Facts: `plan`, `promoted`, `reason`."""
    CAPACITY = "capacity"
    """Facts: `arrivals_per_second`, `p95_milliseconds`; of the last event `requests_per_second` too."""
    REPORT = "report"
    DONE = "done"
    """Facts: `artefact`, `found` (true when it was there already), `seconds`."""


@dataclass(frozen=True)
class ProgressEvent:
    """One event. `done` of `total` count the steps of the stage (bytes of a download); `step` of `steps` the steps of
    the whole optimisation, 0 before it begins."""

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


OnProgressEvent = Callable[[ProgressEvent], None]
"""Receives events; must return quickly, since measuring waits for it."""


def ignore_progress(_: ProgressEvent, /) -> None:
    """For callers that do not watch."""


class ProgressReporter:
    """Counts the steps of the whole and sends events.

    The number of steps of a stage is an estimate while it runs, and corrected when it ends: a search that ends early
    gives its steps back, so that the last event always reads `n/n`.
    """

    def __init__(self, on_progress: OnProgressEvent, expected: Mapping[Stage, int]) -> None:
        self._on_progress = on_progress
        self._expected = {stage: expected.get(stage, 0) for stage in Stage}
        self._done = dict.fromkeys(Stage, 0)

    def finish(self, stage: Stage) -> None:
        """The stage has had all its steps."""
        self._expected[stage] = self._done[stage]

    def advance(self, stage: Stage, message: str, *, facts: Mapping[str, Any] | None = None, by: int = 1) -> None:
        """Count `by` steps (or none) as done, and send an event."""
        self._done[stage] += by
        self._expected[stage] = max(self._expected[stage], self._done[stage])
        self._on_progress(
            ProgressEvent(
                stage=stage,
                done=self._done[stage],
                total=self._expected[stage],
                message=message,
                facts=facts or {},
                step=sum(self._done.values()),
                steps=sum(self._expected.values()),
            )
        )

    def trying(self, recipe: Recipe) -> None:
        """A candidate is started."""
        self.advance(Stage.CANDIDATES, recipe.name, by=0)

    def settled(self, facts: CandidateFacts, message: str = "", by: int = 1) -> None:
        """A candidate has an outcome, for now."""
        found = {"candidate": facts.model_dump(mode="json")}
        self.advance(Stage.CANDIDATES, message or settled_message(facts), facts=found, by=by)

    def round(self, number: int, rounds: int) -> None:
        """A round of measuring has ended."""
        self.advance(Stage.MEASURE, f"all remaining candidates in turn: round {number} of {rounds}")

    def step(self, step: SearchStep) -> None:
        """A plan was tried."""
        facts = {"plan": step.challenger.model_dump(mode="json"), "promoted": step.promoted, "reason": step.reason}
        self.advance(Stage.PLANS, f"{step.challenger.summary}: {step.reason}", facts=facts)

    def planned(self, plan: Plan, candidates: Sequence[CandidateFacts]) -> None:
        """The plan search has ended."""
        self.finish(Stage.PLANS)
        facts = {"candidates": [one.model_dump(mode="json") for one in candidates]}
        self.advance(Stage.PLANS, plan.summary, by=0, facts=facts)

    def point(self, point: CapacityPoint) -> None:
        """A point of the capacity curve was measured."""
        facts = {"arrivals_per_second": point.arrivals_per_second, "p95_milliseconds": point.p95_milliseconds}
        message = f"p95 {point.p95_milliseconds:.3g} ms at {point.arrivals_per_second:.3g} requests/s"
        self.advance(Stage.CAPACITY, message, facts=facts)

    def capacity(self, curve: CapacityCurve, saturation_per_second: float) -> None:
        """The capacity curve is complete."""
        self.finish(Stage.CAPACITY)
        rate = curve.requests_per_second
        limit = curve.p95_objective_milliseconds or 0.0
        within = f"p95 stays within {limit:.3g} ms up to {rate:.3g} requests/s" if rate is not None else ""
        facts = {"requests_per_second": rate, "saturation_per_second": saturation_per_second}
        self.advance(Stage.CAPACITY, within or f"p95 is over {limit:.3g} ms at any rate", by=0, facts=facts)

    def no_capacity(self, reason: str) -> None:
        """The capacity curve is not measured."""
        self.finish(Stage.CAPACITY)
        self.advance(Stage.CAPACITY, f"not measured: {reason}", by=0)

    def done(self, artefact: Path, plan: str, seconds: float) -> None:
        """The artefact of this plan is written."""
        self.advance(Stage.REPORT, str(artefact / "report.html"))
        facts = {"artefact": str(artefact), "found": False, "seconds": seconds}
        self.advance(Stage.DONE, plan, facts=facts, by=0)


def settled_message(facts: CandidateFacts) -> str:
    """One line: a candidate's outcome after screening. A candidate that passed is not called slower before it was
    measured with the rest."""
    if facts.reason_code is not ReasonCode.WITHIN_BUDGET:
        return f"{facts.recipe.name}: {facts.outcome.value}, {facts.reason}"
    agreement = f" ({facts.verdict.reason})" if facts.verdict is not None and facts.verdict.reason else ""
    return f"{facts.recipe.name}: passed{agreement}, to be measured with the others that pass"


def export_message(exported: ExportedFacts) -> str:
    """One line: the graph's source, its fused nodes, the time it took."""
    made = {"builder": "built from the weights", "own-onnx": "the model's own file", "torch": "through torch"}
    fused = " / ".join(f"{count} {name}" for name, count in sorted(exported.fused_nodes.items()))
    graph = f"fused ONNX graph, {fused}" if fused else "ONNX graph, nothing fused"
    how = made.get(exported.how, exported.how)
    line = f"{graph}, {how}, {exported.parameters / 1e6:.1f} M weights, {exported.seconds:.1f} s"
    return "; ".join((line, *(f"{note[:1].lower()}{note[1:]}" for note in exported.notes)))


FIRST_SECONDS = 2.0
"""A faster download is not reported: mostly the model is there already."""
_MB = 1e6


class DownloadReporter:
    """Converts the steps of a download, from any thread, to events: notes at once, the rest at intervals.

    Of two steps at the same time, one may be reported twice.
    """

    def __init__(
        self, on_progress: OnProgressEvent, *, every_seconds: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._on_progress = on_progress
        self._every_seconds = every_seconds
        self._clock = clock
        self._due: float | None = None
        self._shown = False
        """The start was reported, so the end must be."""

    def __call__(self, step: Transfer) -> None:
        """Receive one step."""
        now = self._clock()
        if self._due is None:
            self._due = now + min(FIRST_SECONDS, self._every_seconds)
        is_end = step.bytes_done == step.bytes_total > 0
        if not step.note:
            if now < self._due and not (is_end and self._shown):
                return
            self._due = now + self._every_seconds
            self._shown = not is_end
        facts = {"note": step.note} if step.note else {}
        self._on_progress(
            ProgressEvent(Stage.DOWNLOAD, step.bytes_done, step.bytes_total, transfer_message(step), facts)
        )


def transfer_message(step: Transfer, verb: str = "fetching") -> str:
    """One line for people."""
    amount = f": {step.bytes_done / _MB:.0f} of {step.bytes_total / _MB:.0f} MB" if step.bytes_total else ""
    return step.note or f"{verb} {step.file}{amount}"
