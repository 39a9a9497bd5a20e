"""The status of a ModelEndpoint, and the Events about conditions that changed.

`penstock_operator.endpoint.conditions` computes the findings; this module writes them and the other fields.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from pydantic import ValidationError

from penstock.prices.pod_costs import per_million, per_month
from penstock.resources.conditions import (
    Condition,
    ConditionType,
    find_condition,
    timestamp,
    updated_conditions,
)
from penstock.resources.endpoint import OptimizationMode
from penstock.resources.hardware_class import HardwareClassSpec
from penstock.resources.status import EndpointStatus, PlanStatus, ServedBefore
from penstock_operator.endpoint.conditions import accuracy, available, model_resolved, optimized, progressing
from penstock_operator.endpoint.live_guard import LiveGuardPlan
from penstock_operator.endpoint.objects import gateway
from penstock_operator.endpoint.objects.canary import NO_CANARY, CanaryPlan
from penstock_operator.endpoint.objects.exposure import ExposurePlan
from penstock_operator.endpoint.optimization.index_gate import index_compatible
from penstock_operator.endpoint.optimization.model import OptimizationState
from penstock_operator.endpoint.pods.judging import PinVerdict, PodProblem, pod_reports
from penstock_operator.endpoint.pods.placement import price_of_nodes
from penstock_operator.endpoint.replica_count import (
    DECIDED,
    ReplicaTarget,
    curve_current,
    metrics_available,
    scaling_status,
)
from penstock_operator.endpoint.reported import cores_pinned, curve_known, objective, p95_text, speed_text
from penstock_operator.endpoint.serving import ServingChoice
from penstock_operator.endpoint.snapshot import EndpointSnapshot
from penstock_operator.endpoint.spec import ParsedEndpoint, hardware_class
from penstock_operator.facts.findings import TRUE, UNKNOWN, Event, Finding, clipped, no, unknown, yes
from penstock_operator.facts.names import Json, runtime_selector
from penstock_operator.facts.pods import RuntimePod
from penstock_operator.facts.reasons import NORMAL, UNFINISHED, WITHOUT_EVENTS, Reason
from penstock_operator.limits.concurrency import SlotDecision

NEEDED = (ConditionType.ACCEPTED, ConditionType.OPTIMIZED, ConditionType.AVAILABLE, ConditionType.CORES_PINNED)
"""Ready requires these conditions to be true."""
NOT_DENIED = (
    ConditionType.MODEL_RESOLVED,
    ConditionType.ACCURACY_WITHIN_BUDGET,
    ConditionType.OBJECTIVE_MET,
    ConditionType.EXPOSED,
)
"""Ready requires these conditions not to be false. Unknown does not prevent Ready: an artefact may be pinned, or a
measurement may have been left out.

MetricsAvailable is in neither group: an endpoint serves without metrics; only its replica count no longer changes.
"""


@dataclass(frozen=True)
class EndpointState:
    """Everything that the conditions and the status of one endpoint are computed from."""

    endpoint: ParsedEndpoint
    observed: EndpointSnapshot
    acceptance: Finding
    wanted: OptimizationState | None
    """The OptimizedModel of the present spec; None: the artefact is pinned, or the spec is not accepted."""
    serving: ServingChoice | None
    models: tuple[OptimizationState, ...]
    """`wanted`, and the OptimizedModel of the Deployment."""
    replicas: ReplicaTarget
    desired_template: str
    """The hash of the desired pod template; empty: the present template stays."""
    cpus: int
    """CPUs that a new pod requests."""
    devices: str
    """Devices that a new pod requests, such as `1 aws.amazon.com/neuron`; empty: none."""
    hardware: HardwareClassSpec | None
    """The class of the pods, if pods are possible on it."""
    pods: tuple[RuntimePod, ...]
    """The runtime pods that are not being deleted."""
    problems: tuple[PodProblem, ...]
    verdicts: tuple[PinVerdict, ...]
    missing_for_job: str
    """Why no node takes the optimisation job; empty: nothing is known to be missing."""
    exposure: ExposurePlan
    rollout: SlotDecision | None = None
    """Whether the rollout has a slot; None: none needs one."""
    canary: CanaryPlan = NO_CANARY
    live: LiveGuardPlan | None = None


def conditions_of(state: EndpointState) -> dict[str, Finding]:
    """The findings of all conditions by type, Ready last."""
    endpoint, observed, serving = state.endpoint, state.observed, state.serving
    ready_pods = {entry.pod.name for entry in state.pods if entry.pod.ready}
    pinned = unknown(Reason.NO_PODS, "No pod runs that could say where.")
    if state.verdicts or state.devices:
        pinned = cores_pinned(state.verdicts, ready_pods, devices=state.devices)
    aims = endpoint.spec.objective
    met = yes(Reason.NO_OBJECTIVE, "The spec states none: the best of latency and throughput serves.")
    stated = aims.latency is not None or aims.throughput is not None or aims.is_for_tokens
    if stated or any(verdict.wrong_cpu for verdict in state.verdicts):
        met = objective(endpoint, serving, pinned, state.verdicts)
    curve = curve_current(endpoint, observed.scale)
    if observed.scale is not None:
        curve = curve_known(curve, serving, state.pods)
    found: dict[str, Finding] = {
        ConditionType.ACCEPTED: state.acceptance,
        ConditionType.MODEL_RESOLVED: model_resolved(endpoint, state.wanted),
        ConditionType.OPTIMIZED: optimized(endpoint, state.wanted, serving, state.missing_for_job),
        ConditionType.ACCURACY_WITHIN_BUDGET: accuracy(state.wanted, serving),
        ConditionType.CORES_PINNED: pinned,
        ConditionType.AVAILABLE: available(
            endpoint,
            serving,
            observed.deployment,
            state.replicas,
            state.problems,
            held=gateway.answers(endpoint, observed.gateway) if endpoint.wants_gateway else None,
        ),
        ConditionType.OBJECTIVE_MET: met,
        ConditionType.CURVE_CURRENT: curve,
        ConditionType.METRICS_AVAILABLE: metrics_available(observed, endpoint),
        ConditionType.PROGRESSING: progressing(
            endpoint,
            observed.deployment,
            state.replicas,
            desired_template=state.desired_template,
            pods=state.pods,
            problems=state.problems,
            room=state.devices or f"{state.cpus} free CPUs",
            slot=state.rollout,
            canary=state.canary.finding,
        ),
    }
    if endpoint.spec.vector_space is not None:
        found[ConditionType.INDEX_COMPATIBLE] = index_compatible(state.wanted)
    if state.exposure.finding is not None:
        found[ConditionType.EXPOSED] = state.exposure.finding
    if state.live is not None:
        found[ConditionType.ANSWERS_AGREE] = state.live.finding
    found[ConditionType.READY] = ready(endpoint, found, state.problems)
    return found


def ready(endpoint: ParsedEndpoint, findings: Mapping[str, Finding], problems: Sequence[PodProblem]) -> Finding:
    """Ready: the pods serve the present spec and are known to own their cores.

    The reason of a false Ready is the reason of the first condition that prevents it. An endpoint may answer requests
    without being Ready: that is the condition Available.
    """
    if endpoint.spec.suspend:
        return no(Reason.SUSPENDED, "The endpoint is suspended. Set spec.suspend to false to serve again.")
    answering = findings[ConditionType.AVAILABLE]
    idle = answering.true and answering.reason == Reason.SCALED_TO_ZERO
    for kind in NEEDED:
        finding = findings[kind]
        if idle and kind == ConditionType.CORES_PINNED and not finding.false:
            # There is no pod to inspect. The next one will be inspected.
            continue
        if not finding.true:
            return no(finding.reason, finding.message)
    for kind in NOT_DENIED:
        found = findings.get(kind)
        if found is not None and found.false:
            return no(found.reason, found.message)
    crashing = [problem for problem in problems if problem.crashing]
    if crashing:
        return no(crashing[0].reason, crashing[0].message)
    rollout = findings[ConditionType.PROGRESSING]
    if rollout.reason in UNFINISHED:
        return no(rollout.reason, rollout.message)
    return yes(Reason.SCALED_TO_ZERO if idle else Reason.SERVING, answering.message)


def conditions(
    findings: Mapping[str, Finding], *, before: Iterable[Mapping[str, Any]], generation: int, now: datetime
) -> tuple[Condition, ...]:
    """The conditions to write, with the time when the status of each last changed."""
    fresh = [
        Condition(
            type=kind,
            status=finding.status,
            reason=str(finding.reason),
            message=clipped(finding.message),
            observed_generation=generation,
            last_transition_time=timestamp(now),
        )
        for kind, finding in findings.items()
    ]
    kept = [condition for condition in map(_parsed, before) if condition is not None and condition.type in findings]
    return updated_conditions(kept, fresh)


def _parsed(entry: Mapping[str, Any]) -> Condition | None:
    """A condition of the present status; None if it is not valid."""
    try:
        return Condition.model_validate(entry)
    except ValidationError:
        return None


def events(before: Iterable[Condition], after: Iterable[Condition]) -> tuple[Event, ...]:
    """One Event for each condition with another status or reason."""
    old = tuple(before)
    found: dict[tuple[str, str], Event] = {}
    for condition in after:
        last = find_condition(old, condition.type)
        if condition.status is UNKNOWN or condition.reason in WITHOUT_EVENTS or condition.type == ConditionType.READY:
            # Ready repeats another condition.
            continue
        if last is not None and (last.status, last.reason) == (condition.status, condition.reason):
            continue
        normal = condition.status is TRUE or condition.reason in NORMAL
        event = Event("Normal" if normal else "Warning", condition.reason, condition.message)
        # Two conditions may have the same reason and message (a model that was not found): one Event suffices.
        found.setdefault((event.reason, event.message), event)
    return tuple(found.values())


MAX_HISTORY = 5


def endpoint_status(state: EndpointState, findings: Mapping[str, Finding], before: EndpointStatus) -> EndpointStatus:
    """The status to write. `before`: the present status."""
    endpoint, observed, serving = state.endpoint, state.observed, state.serving
    present = observed.deployment
    shown = plan_status(serving, before.plan, state.pods, state.models)
    p95, speed_up = _figures(state, shown, findings)
    replicas = present.replicas if present is not None else 0
    return EndpointStatus(
        observed_generation=endpoint.generation,
        conditions=conditions(
            findings, before=endpoint.status.get("conditions") or (), generation=endpoint.generation, now=observed.now
        ),
        reason=_printed_reason(findings[ConditionType.READY], state.wanted),
        optimized_model=_model_of_spec(state),
        plan=_with_cost(state, shown, replicas),
        replicas=replicas,
        ready_replicas=present.ready if present is not None else 0,
        selector=",".join(f"{key}={value}" for key, value in sorted(runtime_selector(endpoint.name).items())),
        url=endpoint.url,
        public_url=state.exposure.url,
        p95=p95,
        speed_up=speed_up,
        scaling=scaling_status(
            before.scaling if endpoint.spec.scaling.mode in DECIDED else None,
            state.replicas,
            observed.scale,
            observed.now,
        ),
        canary=state.canary.status,
        guard=None if state.live is None else state.live.status,
        vector_spaces=vector_spaces(state.pods, before.vector_spaces),
        pods=pod_reports(state.pods, state.verdicts, state.problems) if state.pods else (),
        history=history(before, shown, observed.now),
    )


MOST_SPACES = 8


def vector_spaces(pods: Sequence[RuntimePod], before: tuple[str, ...]) -> tuple[str, ...]:
    """The spaces of the ready pods, or those `before` while no ready pod has reported."""
    reported = [entry.report.space for entry in pods if entry.pod.ready and entry.report is not None]
    return tuple(sorted({space for space in reported if space})[:MOST_SPACES]) if reported else before


def _model_of_spec(state: EndpointState) -> str:
    """The OptimizedModel of the spec, or the one that has the pinned artefact. It is kept while a status names it."""
    if state.wanted is not None:
        return state.wanted.name
    pins = state.endpoint.spec.optimization.mode is OptimizationMode.PINNED
    return state.serving.optimized_model if pins and state.serving is not None and state.acceptance.true else ""


def read_status(value: Json) -> EndpointStatus:
    """Parse the present status; an empty status when it is not valid (another program wrote it)."""
    try:
        return EndpointStatus.model_validate(value)
    except ValidationError:
        return EndpointStatus()


def plan_status(
    serving: ServingChoice | None,
    before: PlanStatus | None,
    pods: Sequence[RuntimePod],
    models: Sequence[OptimizationState],
) -> PlanStatus | None:
    """The served plan. During a rollout it is the old plan until a pod answers with the new one."""
    answering = {entry.pod.artefact for entry in pods if entry.pod.ready and not entry.pod.deleting}
    if before is not None and before.digest in answering and (serving is None or serving.digest not in answering):
        return before
    return None if serving is None else _plan_status(serving, pods, models)


def _plan_status(serving: ServingChoice, pods: Sequence[RuntimePod], models: Sequence[OptimizationState]) -> PlanStatus:
    summary = serving.result.plan.summary if serving.result is not None else ""
    if not summary:
        reported = (
            entry.report.plan for entry in pods if entry.report is not None and entry.pod.artefact == serving.digest
        )
        summary = next(filter(None, reported), "fp32, while the optimisation runs" if serving.baseline else "")
    if not summary:
        known = (model.status for model in models if model.status.artefact is not None)
        same = (status.result for status in known if status.artefact and status.artefact.digest == serving.digest)
        summary = next((result.plan.summary for result in same if result is not None), "")
    return PlanStatus(
        summary=clipped(summary, 256),
        digest=serving.digest,
        optimized_model=serving.optimized_model,
        baseline=serving.baseline,
    )


def history(before: EndpointStatus, plan: PlanStatus | None, now: datetime) -> tuple[ServedBefore, ...]:
    """Plans that were served earlier, newest first, each digest once."""
    past = before.history
    last = before.plan
    if last is not None and last.digest and plan is not None and plan.digest != last.digest:
        past = (ServedBefore(digest=last.digest, summary=last.summary, until=timestamp(now)), *past)
    present = plan.digest if plan is not None else ""
    unique = {entry.digest: entry for entry in reversed(past) if entry.digest != present}
    return tuple(reversed(unique.values()))[:MAX_HISTORY]


def _printed_reason(summary: Finding, wanted: OptimizationState | None) -> str:
    """The reason for the printer column, with the progress while the job runs: `Optimizing 7/23`."""
    if summary.reason == Reason.OPTIMIZING and wanted is not None and wanted.status.progress:
        return f"{Reason.OPTIMIZING} {wanted.status.progress}"
    return str(summary.reason)


def _figures(state: EndpointState, shown: PlanStatus | None, findings: Mapping[str, Finding]) -> tuple[str, str]:
    """p95 and speed-up as text. Empty unless the pods serve this plan and own their cores: else they do not apply."""
    serving = state.serving
    if serving is None or not findings[ConditionType.CORES_PINNED].true:
        return "", ""
    if shown is None or shown.digest != serving.digest:
        return "", ""
    return p95_text(serving.result, state.endpoint.spec.scaling.headroom), speed_text(serving.result)


def _with_cost(state: EndpointState, shown: PlanStatus | None, replicas: int) -> PlanStatus | None:
    """The plan with its costs, where the class that it serves on has a price."""
    serving = state.serving
    if serving is None or shown is None or shown.digest != serving.digest:
        return shown
    hardware = hardware_class(serving.hardware_class, state.observed.hardware_classes)
    if isinstance(hardware, Finding):
        return shown
    nodes = state.observed.nodes
    price = hardware.price or (price_of_nodes(hardware, nodes) if nodes else None)
    if price is None:
        return shown
    per_hour = price.per_core_hour * serving.cores
    result = serving.result
    rate = None if result is None or result.capacity.provisional else result.requests_per_second
    planned = (rate or 0.0) * state.endpoint.spec.scaling.headroom
    million = per_million(per_hour, planned) if planned > 0 else None
    costs = {"cost_per_million": million, "cost_per_month": per_month(per_hour * replicas)}
    # Four significant digits: the status changes only where people see a difference.
    rounded = {name: None if cost is None else float(f"{cost:.4g}") for name, cost in costs.items()}
    return shown.model_copy(update={**rounded, "currency": price.currency})
