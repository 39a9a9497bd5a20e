"""What the optimisation says: ModelResolved, Optimized, AccuracyWithinBudget, ObjectiveMet, and the figures."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.resources.endpoint import OptimizationMode
from penstock.resources.optimized_model import Phase
from penstock.resources.result import CapacityFacts, Result
from penstock_operator.plan.conditions import Finding, no, sentence, stopped, unknown, yes
from penstock_operator.plan.endpoint import Endpoint
from penstock_operator.plan.optimized_model import Optimization, failure_told
from penstock_operator.plan.pinning import PinVerdict
from penstock_operator.plan.serving import NO_CANDIDATE, Serving

MODEL_FAILURES = {
    "ModelNotFound",
    "ModelAccessDenied",
    "ModelUnavailable",
    "ModelUnusable",
    "UnsafeModel",
    "CorruptModel",
    "UnsupportedModel",
}
"""Failures whose cause is the model itself, or the way to it."""
DIGITS = 12
"""Of a digest, for people."""


def model_resolved(endpoint: Endpoint, wanted: Optimization | None) -> Finding:
    """Whether the model was found and can be read."""
    model = endpoint.spec.model
    if endpoint.spec.optimization.mode is OptimizationMode.PINNED:
        return yes("Pinned", "The artefact that optimization.artefact names holds the model; nothing is downloaded.")
    if wanted is None:
        return unknown("NotAsked", "The model is looked for once the spec is accepted.")
    result = wanted.status.result
    if wanted.ready and result is not None:
        size = f"{result.parameters / 1e6:.4g} million weights" if result.parameters else "its weights"
        digest = f", digest {result.model_digest.removeprefix('sha256:')[:DIGITS]}" if result.model_digest else ""
        return yes("Resolved", f"{model} was read: {size}{digest}.")
    failure = wanted.status.failure
    if failure is not None and failure.reason in MODEL_FAILURES and not _runs_again(wanted):
        return no(failure.reason, failure_told(wanted))
    if wanted.status.baseline is not None:
        return yes("Resolved", f"{model} was read, and its fp32 graph is published.")
    return unknown("Resolving", f"The optimisation job finds {model} when it runs.")


def optimized(endpoint: Endpoint, wanted: Optimization | None, serving: Serving | None, missing: str) -> Finding:
    """Whether the result of the present spec is there. `missing`: what placement misses for the job; empty: nothing."""
    spec = endpoint.spec
    if spec.optimization.mode is OptimizationMode.PINNED:
        return yes("Pinned", f"The spec pins the artefact {_short(spec.optimization.artefact or '')}.")
    if wanted is None:
        return unknown("NotAsked", "The optimisation begins once the spec is accepted.")
    status, result = wanted.status, wanted.status.result
    if wanted.ready and result is not None:
        if serving is not None and serving.kept:
            kept = sentence(f"{serving.kept}; what serves is kept")
            return yes("KeptPrevious", kept) if serving.same_wish else no("KeptPrevious", kept)
        if spec.optimization.mode is OptimizationMode.OFF:
            return yes("Disabled", f"Optimisation is disabled: {result.plan.summary}.")
        speed = f", {result.speed_up:.1f}x as fast as fp32" if result.speed_up else ""
        cut = " The time budget left something untried: a larger optimization.budgetSeconds goes on."
        return yes("Optimized", f"{result.plan.summary}{speed}.{cut if result.cut_short else ''}")
    goes_on = " What serves goes on serving." if serving is not None else ""
    if wanted.failed and status.failure is not None:
        return no(status.failure.reason, failure_told(wanted) + goes_on)
    if status.retry_after is not None:
        return no("WaitingToRetry", failure_told(wanted) + goes_on)
    if spec.suspend:
        return no("Suspended", "The endpoint is suspended: set spec.suspend to false to have it optimised.")
    running = wanted.running
    if running is not None and running.unschedulable:
        reason = "NoNodeForClass" if missing else "Unschedulable"
        return no(reason, f"No node takes the optimisation job: {stopped(missing or running.unschedulable)}{goes_on}")
    if running is not None and running.waiting:
        return no("JobWaiting", sentence(running.waiting) + goes_on)
    if status.phase is Phase.OPTIMIZING:
        at = f", at {status.stage}" if status.stage else ""
        return no("Optimizing", f"{status.progress or 'The job has begun'}{at} (job {status.job}).{goes_on}")
    return no(
        "OptimizationPending", f"The optimisation job {status.job or 'is about to be made'} has not begun.{goes_on}"
    )


def accuracy(wanted: Optimization | None, serving: Serving | None) -> Finding:
    """Whether what serves answers as the fp32 model does."""
    failure = wanted.status.failure if wanted is not None else None
    if wanted is not None and wanted.failed and failure is not None and failure.reason == NO_CANDIDATE:
        return no(NO_CANDIDATE, failure_told(wanted))
    if serving is None:
        return unknown("NothingServes", "Nothing serves yet.")
    if serving.baseline:
        return yes("Baseline", "The fp32 graph serves: it is what all others are judged by.")
    result = serving.result
    if result is None:
        return unknown(
            "NotKnown",
            f"The verdict on the artefact {_short(serving.digest)} is in its report.html: no OptimizedModel has it.",
        )
    said = stopped(result.accuracy.reason)
    if not result.accuracy.within_budget:
        return no("OverBudget", f"{said} Loosen optimization.accuracy, or allow other engines or precisions.")
    return yes("WithinBudget", said or f"Judged on {result.accuracy.texts} texts.")


def objective(endpoint: Endpoint, serving: Serving | None, pinned: Finding, verdicts: Sequence[PinVerdict]) -> Finding:
    """Whether the objective is kept, as far as it was measured. Figures of pods that share their cores mean nothing."""
    wishes = endpoint.spec.objective
    wrong = [verdict for verdict in verdicts if verdict.wrong_cpu]
    if wrong:
        return no(
            "OtherProcessor",
            f"{_pods([verdict.pod for verdict in wrong])} on {wrong[0].node}: {stopped(wrong[0].wrong_cpu)} "
            "Narrow the hardware class to nodes of one kind.",
        )
    if wishes.latency is None and wishes.throughput is None:
        return yes("NoObjective", "The spec states none: the best of latency and throughput serves.")
    if serving is None or serving.result is None:
        return unknown("NotMeasured", "What serves, if anything, was not measured.")
    if not pinned.true:
        return unknown(
            "CoresNotPinned", "The figures hold for pods that own their cores, which these are not known to."
        )
    if serving.result.pinned is False:
        return unknown(
            "MeasuredUnpinned",
            "The optimisation job did not own its cores, so its figures mean little. Run the nodes of this class with "
            f"cpuManagerPolicy: static, then: kubectl delete optimizedmodel {serving.optimized_model}.",
        )
    capacity = serving.result.capacity
    rate = capacity.requests_per_second
    if capacity.p95_objective_milliseconds is None or (rate is None and not capacity.points):
        return unknown("NotMeasured", "The capacity of this plan was not measured: the time budget was too short.")
    if rate is None:
        return no(
            "ObjectiveMissed",
            f"Not even a nearly idle replica keeps p95 within {capacity.p95_objective_milliseconds:g} ms. Give it more "
            "cores, a smaller model, shorter inputs (serving.maxInputTokens), or a longer objective.latency.",
        )
    asked = wishes.throughput.requests_per_second if wishes.throughput is not None else None
    keeps = f"one replica takes {rate:.4g} requests/s with p95 within {capacity.p95_objective_milliseconds:g} ms"
    if asked is not None and rate < asked:
        return no(
            "ObjectiveMissed",
            f"{sentence(keeps)} objective.throughput asks for {asked:g}: give it more cores, or ask for less of one "
            "replica and let scaling add more.",
        )
    return yes("Measured", sentence(keeps))


def p95_words(result: Result | None, headroom: float) -> str:
    """The p95 at the load that a replica is planned to have, for people, such as `14 ms`; empty when not measured."""
    if result is None or result.pinned is False:
        return ""
    point = _planned_point(result.capacity, headroom)
    if point is None:
        return ""
    return f"{point:.0f} ms" if point >= 10 else f"{point:.1f} ms"


def speed_words(result: Result | None) -> str:
    """The gain against fp32, for people, such as `4.7x`; empty when not measured."""
    if result is None or not result.speed_up or result.pinned is False:
        return ""
    return f"{result.speed_up:.1f}x"


def _planned_point(capacity: CapacityFacts, headroom: float) -> float | None:
    points = sorted(capacity.points, key=lambda point: point.requests_per_second)
    if not points:
        return None
    planned = (capacity.requests_per_second or 0.0) * headroom
    below = [point for point in points if point.requests_per_second <= planned]
    return (below[-1] if below else points[0]).p95_milliseconds


def _runs_again(wanted: Optimization) -> bool:
    return wanted.running is not None and wanted.running.started


def _short(digest: str) -> str:
    return digest.removeprefix("sha256:")[:DIGITS]


def _pods(names: Sequence[str]) -> str:
    return f"the pod {names[0]}" if len(names) == 1 else f"{len(names)} pods ({names[0]}, ...)"
