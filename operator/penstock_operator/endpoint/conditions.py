"""The conditions of an endpoint, each computed from its state."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from penstock.resources.endpoint import OptimizationMode
from penstock.resources.hardware_class import HardwareClassSpec
from penstock.resources.optimized_model import Phase
from penstock.resources.status import (
    ConditionType,
)
from penstock_operator.endpoint.objective import objective
from penstock_operator.endpoint.objects import gateway
from penstock_operator.endpoint.objects.canary import NO_CANARY, CanaryPlan
from penstock_operator.endpoint.objects.exposure import ExposurePlan
from penstock_operator.endpoint.optimization.model import OptimizationState, failure_text, queue_text
from penstock_operator.endpoint.pods.judging import PinVerdict, PodProblem
from penstock_operator.endpoint.replica_count import ReplicaTarget, curve_current, metrics_available
from penstock_operator.endpoint.serving import ServingChoice
from penstock_operator.endpoint.snapshot import EndpointSnapshot
from penstock_operator.endpoint.spec import ParsedEndpoint
from penstock_operator.facts.findings import Finding, no, sentence, stopped, unknown, yes
from penstock_operator.facts.names import (
    ENDPOINT,
)
from penstock_operator.facts.pods import RuntimePod
from penstock_operator.facts.reasons import Reason
from penstock_operator.facts.workloads import DeploymentFacts
from penstock_operator.limits.concurrency import TurnDecision

MODEL_FAILURES = {
    "ModelNotFound",
    "ModelAccessDenied",
    "ModelUnavailable",
    "ModelUnusable",
    "UnsafeModel",
    "CorruptModel",
    "UnsupportedModel",
}
"""Failures caused by the model itself or by its download."""
DIGITS = 12
"""Digits of a digest in messages."""


def model_resolved(endpoint: ParsedEndpoint, wanted: OptimizationState | None) -> Finding:
    """The condition ModelResolved: the model was found and can be read."""
    model = endpoint.spec.model
    if endpoint.spec.optimization.mode is OptimizationMode.PINNED:
        return yes(
            Reason.PINNED, "The artefact that optimization.artefact names holds the model; nothing is downloaded."
        )
    if wanted is None:
        return unknown(Reason.NOT_ASKED, "The model is looked for once the spec is accepted.")
    result = wanted.status.result
    if wanted.ready and result is not None:
        size = f"{result.parameters / 1e6:.4g} million weights" if result.parameters else "its weights"
        digest = f", digest {result.model_digest.removeprefix('sha256:')[:DIGITS]}" if result.model_digest else ""
        return yes(Reason.RESOLVED, f"{model} was read: {size}{digest}.")
    failure = wanted.status.failure
    if failure is not None and failure.reason in MODEL_FAILURES and not _runs_again(wanted):
        return no(failure.reason, failure_text(wanted))
    if wanted.status.baseline is not None:
        return yes(Reason.RESOLVED, f"{model} was read, and its fp32 graph is published.")
    return unknown(Reason.RESOLVING, f"The optimisation job finds {model} when it runs.")


def optimized(
    endpoint: ParsedEndpoint, wanted: OptimizationState | None, serving: ServingChoice | None, missing: str
) -> Finding:
    """The condition Optimized: the result of the present spec is published. `missing`: what the nodes lack for the
    job."""
    spec = endpoint.spec
    if spec.optimization.mode is OptimizationMode.PINNED:
        return yes(Reason.PINNED, f"The spec pins the artefact {short_digest(spec.optimization.artefact or '')}.")
    if wanted is None:
        return unknown(Reason.NOT_ASKED, "The optimisation begins once the spec is accepted.")
    status, result = wanted.status, wanted.status.result
    if wanted.ready and result is not None:
        if serving is not None and serving.kept:
            kept = sentence(f"{serving.kept}; what serves is kept")
            return yes(Reason.KEPT_PREVIOUS, kept) if serving.same_spec else no(Reason.KEPT_PREVIOUS, kept)
        if spec.optimization.mode is OptimizationMode.OFF:
            return yes(Reason.DISABLED, f"Optimisation is disabled: {result.plan.summary}.")
        speed = f", {result.speed_up:.1f}x as fast as fp32" if result.speed_up else ""
        cut = " The time budget left something untried: a larger optimization.budgetSeconds goes on."
        return yes(Reason.OPTIMIZED, f"{result.plan.summary}{speed}.{cut if result.cut_short else ''}")
    goes_on = " What serves goes on serving." if serving is not None else ""
    if wanted.failed and status.failure is not None:
        return no(status.failure.reason, failure_text(wanted) + goes_on)
    if wanted.turn is not None and wanted.queued:
        return no(Reason.OPTIMIZATION_QUEUED, queue_text(wanted.turn) + goes_on)
    if status.retry_after is not None:
        return no(Reason.WAITING_TO_RETRY, failure_text(wanted) + goes_on)
    if spec.suspend:
        return no(Reason.SUSPENDED, "The endpoint is suspended: set spec.suspend to false to have it optimised.")
    running = wanted.running
    if running is not None and running.unschedulable:
        reason = Reason.NO_NODE_FOR_CLASS if missing else Reason.UNSCHEDULABLE
        return no(reason, f"No node takes the optimisation job: {stopped(missing or running.unschedulable)}{goes_on}")
    if running is not None and running.waiting:
        return no(Reason.JOB_WAITING, sentence(running.waiting) + goes_on)
    if status.phase is Phase.OPTIMIZING:
        at = f", at {status.stage}" if status.stage else ""
        return no(Reason.OPTIMIZING, f"{status.progress or 'The job has begun'}{at} (job {status.job}).{goes_on}")
    return no(
        Reason.OPTIMIZATION_PENDING,
        f"The optimisation job {status.job or 'is about to be made'} has not begun.{goes_on}",
    )


def accuracy(wanted: OptimizationState | None, serving: ServingChoice | None) -> Finding:
    """The condition AccuracyWithinBudget: what serves answers like the fp32 model."""
    failure = wanted.status.failure if wanted is not None else None
    if (
        wanted is not None
        and wanted.failed
        and failure is not None
        and failure.reason == Reason.NO_CANDIDATE_WITHIN_BUDGET
    ):
        return no(Reason.NO_CANDIDATE_WITHIN_BUDGET, failure_text(wanted))
    if serving is None:
        return unknown(Reason.NOTHING_SERVES, "Nothing serves yet.")
    if serving.baseline:
        return yes(Reason.BASELINE, "The fp32 graph serves: it is what all others are judged by.")
    result = serving.result
    if result is None:
        return unknown(
            Reason.NOT_KNOWN,
            f"The verdict on the artefact {short_digest(serving.digest)} is in its report.html"
            f"{f' and in the OptimizedModel {serving.optimized_model}' if serving.optimized_model else ''}.",
        )
    verdict = stopped(result.accuracy.reason)
    if not result.accuracy.within_budget:
        return no(Reason.OVER_BUDGET, f"{verdict} Loosen optimization.accuracy, or allow other engines or precisions.")
    return yes(Reason.WITHIN_BUDGET, verdict or f"Judged on {result.accuracy.texts} texts.")


def _runs_again(wanted: OptimizationState) -> bool:
    return wanted.running is not None and wanted.running.started


def short_digest(digest: str) -> str:
    """The first digits of a digest, for messages."""
    return digest.removeprefix("sha256:")[:DIGITS]


def cores_pinned(verdicts: Sequence[PinVerdict], serving: Collection[str], *, devices: str = "") -> Finding:
    """The condition CoresPinned; `serving` are the names of the ready pods. `devices`: what a pod requests, such as
    `1 aws.amazon.com/neuron`; empty: CPUs compute.

    One pod that shares its cores makes it false. A pod without a report makes it unknown only when it is ready:
    starting pods report soon.
    """
    if devices:
        return yes(
            Reason.NOT_NEEDED,
            f"Each pod has {devices}, which no other pod gets. The CPUs of its host need not be its own.",
        )
    if not verdicts:
        return unknown(Reason.NO_PODS, "No pod runs that could say where.")
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


def available(
    endpoint: ParsedEndpoint,
    serving: ServingChoice | None,
    deployment: DeploymentFacts | None,
    replicas: ReplicaTarget,
    problems: Sequence[PodProblem],
    *,
    held: bool | None = None,
) -> Finding:
    """The condition Available: requests are answered. `held`: a gateway holds requests while no replica is ready;
    None: the endpoint has no gateway."""
    there = deployment.available if deployment is not None else 0
    if there:
        answering = f"{there} of {replicas.wanted} replicas answer" if replicas.wanted != there else _count(there)
        around = f" No pod of its gateway is up: requests go to the pods directly. {_gateway_hint(endpoint)}"
        return yes(Reason.ANSWERING, sentence(answering) + (around if held is False else ""))
    if endpoint.spec.suspend:
        return no(
            Reason.SUSPENDED, "The endpoint is suspended and has no pods. Set spec.suspend to false to serve again."
        )
    if serving is None:
        return no(
            Reason.NOTHING_TO_SERVE, "There is no artefact to serve yet; see the condition Optimized for its progress."
        )
    if replicas.wanted == 0 and held:
        return yes(
            Reason.SCALED_TO_ZERO,
            "No replica runs, because there are no requests. The gateway holds the next one and answers it when a "
            "replica is up.",
        )
    if replicas.wanted == 0 and held is False:
        return no(
            Reason.GATEWAY_UNAVAILABLE,
            "The endpoint is scaled to zero replicas, and no pod of its gateway is up to hold requests. "
            + _gateway_hint(endpoint),
        )
    if replicas.wanted == 0:
        return no(
            Reason.SCALED_TO_ZERO,
            "The endpoint is scaled to zero replicas, so no pod answers. Raise replicas to serve.",
        )
    if deployment is not None and deployment.failure:
        return no(
            Reason.PODS_REFUSED,
            f"No pod can be made: {stopped(deployment.failure)} Raise the quota, or allow what the policy refuses "
            "(docs/reference/conditions.md#available).",
        )
    if problems:
        return no(problems[0].reason, _summary(problems))
    return no(Reason.STARTING, "Pods are starting: they fetch the artefact, load it and warm up.")


def _gateway_hint(endpoint: ParsedEndpoint) -> str:
    return f"Look at the gateway's pods: kubectl get pods -l {ENDPOINT}={endpoint.name}."


def progressing(
    endpoint: ParsedEndpoint,
    deployment: DeploymentFacts | None,
    replicas: ReplicaTarget,
    *,
    desired_template: str,
    pods: Sequence[RuntimePod],
    problems: Sequence[PodProblem],
    room: str,
    turn: TurnDecision | None = None,
    canary: Finding | None = None,
) -> Finding:
    """The condition Progressing: a rollout or a change of the replica count is under way, and what it waits for.

    `desired_template`: the hash of the desired pod template; empty: the present one stays. `room`: what a new pod
    needs, such as `2 free CPUs`. `turn`: the place in the line of the rollout; None: there is none that needs one.
    `canary`: the state of its canary; None: it has none.
    """
    if deployment is None or endpoint.spec.suspend:
        return no(Reason.SETTLED, "No rollout is under way.")
    if turn is not None and not turn.allowed:
        waits = turn.waits_for("rollout", "maxConcurrentRollouts")
        return no(Reason.ROLLOUT_QUEUED, f"A new plan is to roll out. {waits} The present pods serve on.")
    if canary is not None:
        return canary
    if desired_template and desired_template != deployment.template:
        return yes(Reason.ROLLING_OUT, "A new plan is about to roll out: new pods come first, old ones go afterwards.")
    replacing = deployment.updated < deployment.replicas or deployment.observed_generation < deployment.generation
    waiting_pods = [entry.pod for entry in pods if entry.pod.unschedulable and not entry.pod.deleting]
    if replacing and waiting_pods and deployment.available:
        where = f"hardware class {endpoint.spec.hardware_class}"
        return no(
            Reason.NO_ROOM_FOR_SURGE,
            f"The new pod {waiting_pods[0].name} waits for {room} of {where} while the old ones serve on: "
            f"{sentence(waiting_pods[0].unschedulable)} Add a node or free them; or accept an interruption "
            "and set spec.suspend to true and back to false.",
        )
    if deployment.progressing == "ProgressDeadlineExceeded" or (replacing and any(one.crashing for one in problems)):
        message = (
            _summary(problems) if problems else "New pods do not get ready; look at them with kubectl describe pod."
        )
        serves = " The old pods serve on." if deployment.available else ""
        return no(Reason.ROLLOUT_STUCK, f"{message}{serves}")
    if replacing:
        return yes(Reason.ROLLING_OUT, f"{deployment.updated} of {deployment.replicas} pods have the new plan.")
    if deployment.available != replicas.wanted:
        return yes(Reason.SCALING, f"{deployment.available} of {replicas.wanted} replicas answer.")
    return no(Reason.SETTLED, "No rollout is under way.")


def _summary(problems: Sequence[PodProblem]) -> str:
    more = f" The same or another problem keeps {len(problems) - 1} more from serving." if len(problems) > 1 else ""
    return f"{problems[0].message}{more}"


def _count(count: int) -> str:
    return "the replica answers" if count == 1 else f"all {count} replicas answer"


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

UNFINISHED = {
    Reason.ROLLING_OUT,
    Reason.ROLLOUT_QUEUED,
    Reason.NO_ROOM_FOR_SURGE,
    Reason.ROLLOUT_STUCK,
    Reason.CANARY_RUNNING,
    Reason.CANARY_REJECTED,
    Reason.NAME_TAKEN,
}
"""Reasons of Progressing with which the pods do not, or not all, serve what the spec asks for."""


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
    """What the nodes lack for the optimisation job; empty: nothing is known to be missing."""
    exposure: ExposurePlan
    rollout: TurnDecision | None = None
    """The place in the line of the rollout; None: there is none that needs one."""
    canary: CanaryPlan = NO_CANARY


def conditions_of(state: EndpointState) -> dict[str, Finding]:
    """The findings of all conditions by type, Ready last."""
    endpoint, observed, serving = state.endpoint, state.observed, state.serving
    ready_pods = {entry.pod.name for entry in state.pods if entry.pod.ready}
    pinned = cores_pinned(state.verdicts, ready_pods, devices=state.devices)
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
        ConditionType.OBJECTIVE_MET: objective(endpoint, serving, pinned, state.verdicts),
        ConditionType.CURVE_CURRENT: curve_current(endpoint, observed.scale),
        ConditionType.METRICS_AVAILABLE: metrics_available(observed, endpoint),
        ConditionType.PROGRESSING: progressing(
            endpoint,
            observed.deployment,
            state.replicas,
            desired_template=state.desired_template,
            pods=state.pods,
            problems=state.problems,
            room=state.devices or f"{state.cpus} free CPUs",
            turn=state.rollout,
            canary=state.canary.finding,
        ),
    }
    if state.exposure.finding is not None:
        found[ConditionType.EXPOSED] = state.exposure.finding
    found[ConditionType.READY] = ready(endpoint, found, state.problems)
    return found


def ready(endpoint: ParsedEndpoint, findings: Mapping[str, Finding], problems: Sequence[PodProblem]) -> Finding:
    """Ready: the pods serve what the spec asks for and are known to own their cores.

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
