"""What an optimisation says while it works: the wording of its progress, stage by stage."""

from __future__ import annotations

from pathlib import Path

from penstock.capacity import CapacityPoint
from penstock.manifest import CandidateFacts, Manifest
from penstock.recipe import Plan, Recipe
from penstock_optimizer.candidate.lab import ExportedFacts
from penstock_optimizer.capacity.curve import Measured
from penstock_optimizer.job.progress import OnProgress, Reporter, Stage
from penstock_optimizer.job.screening import ROUNDS, Entrant
from penstock_optimizer.search.climb import Step
from penstock_optimizer.search.survivors import WITHIN_BUDGET

EXPECTED_PLANS = 12
EXPECTED_POINTS = 10


class Events:
    """Says it."""

    def __init__(self, on_progress: OnProgress, *, candidates: int, searches: bool) -> None:
        self._reporter = Reporter(
            on_progress,
            {
                Stage.EXPORT: 1,
                Stage.CANDIDATES: candidates,
                Stage.MEASURE: ROUNDS,
                Stage.PLANS: EXPECTED_PLANS if searches else 0,
                Stage.CAPACITY: EXPECTED_POINTS,
                Stage.REPORT: 1,
            },
        )

    def exporting(self, budget_seconds: float) -> None:
        """The export begins; the whole may take so long."""
        facts = {"budget_seconds": budget_seconds}
        self._reporter.advance(Stage.EXPORT, "writing the fp32 graph", facts=facts, by=0)

    def exported(self, exported: ExportedFacts) -> None:
        """The fp32 graph is there."""
        facts = {
            "seconds": exported.seconds,
            "fused_nodes": exported.fused_nodes,
            "parameters": exported.parameters,
        }
        self._reporter.advance(Stage.EXPORT, export_message(exported), facts=facts)

    def trying(self, recipe: Recipe) -> None:
        """A candidate's turn begins."""
        self._reporter.advance(Stage.CANDIDATES, recipe.name, by=0)

    def settled(self, entrant: Entrant) -> None:
        """It is known what becomes of a candidate, for now."""
        self._reporter.advance(
            Stage.CANDIDATES,
            settled_message(entrant.facts),
            facts={"candidate": entrant.facts.model_dump(mode="json")},
        )

    def round(self, number: int) -> None:
        """A round of measuring is through."""
        self._reporter.advance(Stage.MEASURE, f"all that are left, in turns: round {number} of {ROUNDS}")

    def step(self, step: Step) -> None:
        """A plan was tried."""
        facts = {
            "plan": step.challenger.model_dump(mode="json"),
            "promoted": step.promoted,
            "reason": step.reason,
        }
        self._reporter.advance(Stage.PLANS, f"{step.challenger.summary}: {step.reason}", facts=facts)

    def planned(self, draft: Manifest) -> None:
        """The plan is found."""
        self._reporter.finish(Stage.PLANS)
        facts = {"candidates": [one.model_dump(mode="json") for one in draft.candidates]}
        self._reporter.advance(Stage.PLANS, draft.chosen.plan.summary, by=0, facts=facts)

    def point(self, point: CapacityPoint) -> None:
        """A point of the capacity curve."""
        facts = {"arrivals_per_second": point.arrivals_per_second, "p95_milliseconds": point.p95_milliseconds}
        message = f"p95 {point.p95_milliseconds:.3g} ms at {point.arrivals_per_second:.3g} requests/s"
        self._reporter.advance(Stage.CAPACITY, message, facts=facts)

    def capacity(self, measured: Measured) -> None:
        """The curve is there."""
        self._reporter.finish(Stage.CAPACITY)
        rate = measured.curve.requests_per_second
        limit = measured.curve.p95_objective_milliseconds or 0.0
        within = f"p95 stays within {limit:.3g} ms up to {rate:.3g} requests/s" if rate is not None else ""
        facts = {"requests_per_second": rate, "saturation_per_second": measured.saturation_per_second}
        self._reporter.advance(Stage.CAPACITY, within or f"p95 is over {limit:.3g} ms at any rate", by=0, facts=facts)

    def no_capacity(self, reason: str) -> None:
        """There will be no curve."""
        self._reporter.finish(Stage.CAPACITY)
        self._reporter.advance(Stage.CAPACITY, f"not measured: {reason}", by=0)

    def done(self, artefact: Path, plan: Plan, seconds: float) -> None:
        """The artefact is written."""
        self._reporter.advance(Stage.REPORT, str(artefact / "report.html"))
        facts = {"artefact": str(artefact), "found": False, "seconds": seconds}
        self._reporter.advance(Stage.DONE, plan.summary, facts=facts, by=0)


def settled_message(facts: CandidateFacts) -> str:
    """One line: how a candidate stands after its turn. One that passed may yet be the best: nothing is called slower
    before it was held against another."""
    if facts.reason != WITHIN_BUDGET:
        return f"{facts.recipe.name}: {facts.outcome.value}, {facts.reason}"
    agreement = f" ({facts.verdict.reason})" if facts.verdict is not None and facts.verdict.reason else ""
    return f"{facts.recipe.name}: passed{agreement}, to be measured with the others that pass"


def export_message(exported: ExportedFacts) -> str:
    """One line: where the graph came from, what is fused, how long it took."""
    made = {"builder": "built from the weights", "own-onnx": "the model's own file", "torch": "through torch"}
    fused = " / ".join(f"{count} {name}" for name, count in sorted(exported.fused_nodes.items()))
    graph = f"fused ONNX graph, {fused}" if fused else "ONNX graph, nothing fused"
    how = made.get(exported.how, exported.how)
    return f"{graph}, {how}, {exported.parameters / 1e6:.1f} M weights, {exported.seconds:.1f} s"
