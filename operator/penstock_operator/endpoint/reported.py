"""The conditions CoresPinned, ObjectiveMet and CurveCurrent, by measurements and reports of pods; p95 and speed-up as
text."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from penstock.capacity import TokenCurve
from penstock.resources.endpoint import Objective
from penstock.resources.result import CapacityFacts, Result, TokenCapacityFacts
from penstock.tasks import TaskName
from penstock_operator.endpoint.pods.judging import PinVerdict
from penstock_operator.endpoint.serving import ServingChoice
from penstock_operator.endpoint.spec import ParsedEndpoint
from penstock_operator.facts.findings import Finding, no, sentence, stopped, unknown, yes
from penstock_operator.facts.pods import RuntimePod
from penstock_operator.facts.reasons import Reason

NOT_MEASURED = "The capacity of this plan was not measured: the time budget was too short."


def cores_pinned(verdicts: Sequence[PinVerdict], serving: Collection[str], *, devices: str = "") -> Finding:
    """The condition CoresPinned; `serving` are the names of the ready pods. `devices`: the requested devices, such as
    `1 aws.amazon.com/neuron`; empty: CPUs compute.

    One pod that shares its cores makes it false. A pod without a report makes it unknown only when it is ready:
    starting pods report soon.
    """
    if devices:
        return yes(
            Reason.NOT_NEEDED,
            f"Each pod has {devices}, which no other pod gets. The CPUs of its host need not be its own.",
        )
    shared = [verdict for verdict in verdicts if verdict.pinned is False]
    if shared:
        first = shared[0]
        more = f" (and {len(shared) - 1} more pods)" if len(shared) > 1 else ""
        where = f" on the node {first.node}" if first.node else ""
        return no(first.reason, sentence(f"the pod {first.pod}{where}{more}: {first.message}"))
    silent = [verdict for verdict in verdicts if verdict.pinned is None and verdict.pod in serving]
    if silent:
        return unknown(
            Reason.NOT_REPORTED,
            sentence(f"the pod {silent[0].pod} has not reported where it runs: {silent[0].message}"),
        )
    own = sum(1 for verdict in verdicts if verdict.pinned)
    if not own:
        return unknown(Reason.NOT_REPORTED, "The pods are starting and have not reported where they run.")
    return yes(Reason.PINNED, "The pod owns its cores." if own == 1 else f"All {own} pods own their cores.")


def objective(
    endpoint: ParsedEndpoint, serving: ServingChoice | None, pinned: Finding, verdicts: Sequence[PinVerdict]
) -> Finding:
    """The condition ObjectiveMet, as far as it was measured. Figures of pods that share their cores are not used."""
    wishes = endpoint.spec.objective
    wrong = [verdict for verdict in verdicts if verdict.wrong_cpu]
    if wrong:
        return no(
            Reason.OTHER_PROCESSOR,
            f"{_pods([verdict.pod for verdict in wrong])} on {wrong[0].node}: {stopped(wrong[0].wrong_cpu)} "
            "Narrow the hardware class to nodes of one kind.",
        )
    if serving is None or serving.result is None:
        return unknown(Reason.NOT_MEASURED, "What serves, if anything, was not measured.")
    if not pinned.true:
        return unknown(
            Reason.CORES_NOT_PINNED, "The figures hold for pods that own their cores, which these are not known to."
        )
    if serving.result.pinned is False:
        return unknown(
            Reason.MEASURED_UNPINNED,
            "The optimisation job did not own its cores, so its figures mean little. Run the nodes of this class with "
            f"cpuManagerPolicy: static, then: kubectl delete optimizedmodel {serving.optimized_model}.",
        )
    if endpoint.spec.task is TaskName.TEXT_GENERATION:
        return _token_objective(wishes, serving.result.token_capacity)
    capacity = serving.result.capacity
    if capacity.provisional:
        return unknown(Reason.NOT_MEASURED, "The capacity is provisional: see the condition CurveCurrent.")
    rate = capacity.requests_per_second
    if capacity.p95_objective_milliseconds is None or (rate is None and not capacity.points):
        return unknown(Reason.NOT_MEASURED, NOT_MEASURED)
    if rate is None:
        return no(
            Reason.OBJECTIVE_MISSED,
            f"Not even a nearly idle replica keeps p95 within {capacity.p95_objective_milliseconds:g} ms. Give it more "
            "cores, a smaller model, shorter inputs (serving.maxInputTokens), or a longer objective.latency.",
        )
    asked = wishes.throughput.requests_per_second if wishes.throughput is not None else None
    keeps = f"one replica takes {rate:.4g} requests/s with p95 within {capacity.p95_objective_milliseconds:g} ms"
    if asked is not None and rate < asked:
        return no(
            Reason.OBJECTIVE_MISSED,
            f"{sentence(keeps)} objective.throughput asks for {asked:g}: give it more cores, or ask for less of one "
            "replica and let scaling add more.",
        )
    return yes(Reason.MEASURED, sentence(keeps))


def _token_objective(wishes: Objective, capacity: TokenCapacityFacts | None) -> Finding:
    """The same for text generation: the limits of time, and the rates within them."""
    curve = TokenCurve() if capacity is None else capacity.curve
    best = curve.within
    if not curve.points:
        return unknown(Reason.NOT_MEASURED, NOT_MEASURED)
    if best is None:
        return no(
            Reason.OBJECTIVE_MISSED,
            f"{sentence(curve.summary)} Give it more cores, a smaller model, shorter prompts, or a longer "
            "objective.timeToFirstToken or objective.timePerOutputToken.",
        )
    keeps = f"one replica generates {curve.summary}"
    asked = wishes.throughput.requests_per_second if wishes.throughput is not None else None
    for name, wanted, reached in (
        ("tokensPerSecond", wishes.tokens_per_second, best.tokens_per_second),
        ("throughput", asked, best.requests_per_second),
    ):
        if wanted is not None and reached < wanted:
            return no(
                Reason.OBJECTIVE_MISSED,
                f"{sentence(keeps)} objective.{name} asks for {wanted:g}, and it reaches {reached:.4g}: give it more "
                "cores, or ask for less of one replica and let scaling add more.",
            )
    return yes(Reason.MEASURED, sentence(keeps))


def curve_known(found: Finding, serving: ServingChoice | None, pods: Sequence[RuntimePod]) -> Finding:
    """The condition CurveCurrent, where the capacity of a replica is unknown or provisional: why, and what makes it
    known. `found`: the condition by the latency of the traffic."""
    if found.reason == Reason.NO_CURVE:
        return no(Reason.NO_CURVE, f"{_why_no_curve(serving, pods)} Until then the number of replicas stays as it is.")
    if serving is not None and serving.measured is not None and serving.measured.capacity.provisional:
        return no(Reason.PROVISIONAL, _provisional(serving, pods))
    return found


def _why_no_curve(serving: ServingChoice | None, pods: Sequence[RuntimePod]) -> str:
    """Why the capacity of a replica is not known, and what makes it known."""
    if serving is None or (serving.known and serving.baseline):
        return "The fp32 model serves, which is not measured. The result of the optimisation will be."
    if serving.target is not None and serving.optimized_model:
        return f"No pod has measured the capacity of a replica yet. {_next_measurement(pods)}"
    result, name = serving.measured, serving.optimized_model
    if result is None:
        return (
            "No OptimizedModel of this namespace has measurements of the artefact that serves. Write mode: Auto in "
            "spec.optimization to have the model measured here, or scale it by hand (scaling.mode: External)."
        )
    if result.capacity.points or result.token_capacity is not None:
        return (
            "The replica kept up with none of the rates that were measured, so that no rate per replica is known. Give "
            "it more cores, a smaller model, or shorter inputs (serving.maxInputTokens)."
        )
    return (
        "The time budget of the optimisation ended before the capacity was measured. Raise "
        "spec.optimization.budgetSeconds, which starts another run; to try again with the same: kubectl delete "
        f"optimizedmodel {name}."
    )


def _provisional(serving: ServingChoice, pods: Sequence[RuntimePod]) -> str:
    rate = serving.measured.requests_per_second if serving.measured is not None else None
    figure = "" if rate is None else f" ({rate:.4g} requests/s for one replica)"
    return (
        f"The capacity is provisional: from the slow end of published figures for models of this size{figure}. "
        f"{_next_measurement(pods)}"
    )


def _next_measurement(pods: Sequence[RuntimePod]) -> str:
    """How the capacity on Inferentia will be measured, by the reports of the pods."""
    if any(pod.report is not None and pod.report.measures_capacity for pod in pods):
        return "A pod measures it now, before it is ready."
    failed = [(pod.pod.name, pod.report.capacity_problem) for pod in pods if pod.report and pod.report.capacity_problem]
    if failed:
        name, problem = failed[0]
        return (
            f"The pod {name} could not measure it: {stopped(problem)} Its next start tries again: kubectl delete pod "
            f"{name}."
        )
    return "The next pod that starts measures it before it is ready."


def p95_text(result: Result | None, headroom: float) -> str:
    """The p95 at the planned load of a replica, such as `14 ms`; empty when not measured."""
    if result is None or result.pinned is False or result.capacity.provisional:
        return ""
    point = _planned_point(result.capacity, headroom)
    if point is None:
        return ""
    return f"{point:.0f} ms" if point >= 10 else f"{point:.1f} ms"


def speed_text(result: Result | None) -> str:
    """The speed-up against fp32, such as `4.7x`; empty when not measured."""
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


def _pods(names: Sequence[str]) -> str:
    return f"the pod {names[0]}" if len(names) == 1 else f"{len(names)} pods ({names[0]}, ...)"
