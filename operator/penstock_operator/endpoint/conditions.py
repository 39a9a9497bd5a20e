"""The conditions of an endpoint, each computed from its state."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from penstock.resources.endpoint import OptimizationMode
from penstock.resources.hardware_class import HardwareClassSpec
from penstock.resources.optimized_model import Phase
from penstock.tasks import TaskName
from penstock_operator.endpoint.optimization.index_gate import index_compatible
from penstock_operator.endpoint.optimization.model import (
    OptimizationState,
    is_of_later_release,
    pinned_model,
    target_of,
)
from penstock_operator.endpoint.optimization.outcome import failure_text
from penstock_operator.endpoint.pods.judging import PodProblem
from penstock_operator.endpoint.replica_count import ReplicaTarget
from penstock_operator.endpoint.serving import ServingChoice
from penstock_operator.endpoint.snapshot import EndpointSnapshot
from penstock_operator.endpoint.spec import ParsedEndpoint, refusal, refused_store
from penstock_operator.facts.findings import Finding, no, sentence, stopped, unknown, yes
from penstock_operator.facts.names import ENDPOINT, gateway_names
from penstock_operator.facts.pods import RuntimePod
from penstock_operator.facts.reasons import MODEL_FAILURES, Reason
from penstock_operator.facts.workloads import DeploymentFacts, OptimizedModelFacts
from penstock_operator.limits.concurrency import OPTIMIZATIONS, ROLLOUTS, SlotDecision

NAMED_KINDS = ("Deployment", "Service", "PodDisruptionBudget", "NetworkPolicy", "ServiceAccount", "RoleBinding")
"""Kinds of objects that are named after the endpoint."""


class AcceptanceInput(NamedTuple):
    """The input of the rules of the condition Accepted."""

    endpoint: ParsedEndpoint
    observed: EndpointSnapshot
    hardware: HardwareClassSpec
    pinned: OptimizedModelFacts | None
    """The OptimizedModel that has the artefact which the spec pins."""


def accepted(endpoint: ParsedEndpoint, observed: EndpointSnapshot, hardware: HardwareClassSpec | Finding) -> Finding:
    """The condition Accepted: the spec is valid and allowed, and the named objects exist. The first broken rule of
    `ACCEPTANCE_RULES` is the reason why not."""
    if isinstance(hardware, Finding):
        return hardware
    given = AcceptanceInput(endpoint, observed, hardware, pinned_model(endpoint.spec, observed.optimized_models))
    valid = f"The spec is valid, and the hardware class {endpoint.spec.hardware_class} exists."
    broken = (rule(given) for rule in ACCEPTANCE_RULES)
    return next(filter(None, broken), None) or yes(Reason.VALID, valid)


def _class_is_for_namespace(given: AcceptanceInput) -> Finding | None:
    allowed, endpoint = given.hardware.allowed_namespaces, given.endpoint
    if allowed is None or allowed.includes(given.observed.namespace_labels):
        return None
    return no(
        Reason.HARDWARE_CLASS_NOT_ALLOWED,
        f"The HardwareClass {endpoint.spec.hardware_class} is not for the namespace {endpoint.namespace}: its "
        "allowedNamespaces does not select the labels of the namespace. Write another class in "
        "spec.hardwareClass, or ask an administrator of the cluster to add the namespace.",
    )


def _class_has_cores(given: AcceptanceInput) -> Finding | None:
    wrong = given.hardware.objection_to_cores(given.endpoint.spec.cores)
    return None if wrong is None else no(Reason.INVALID_CORES, sentence(str(wrong)))


def _class_computes_task(given: AcceptanceInput) -> Finding | None:
    spec = given.endpoint.spec
    if given.hardware.neuron is None or spec.task is not TaskName.TEXT_GENERATION:
        return None
    return no(
        Reason.TASK_NOT_SUPPORTED,
        f"The HardwareClass {spec.hardware_class} has Inferentia devices, and Penstock compiles encoders for them, "
        "no models that generate text. Write a class of CPUs in spec.hardwareClass.",
    )


def _administrator_allows(given: AcceptanceInput) -> Finding | None:
    spec, observed = given.endpoint.spec, given.observed
    refused = refusal(spec, observed.settings.allowed, observed.namespace_labels)
    return refused or refused_store(spec.sources, observed.settings)


def _artefact_fits(given: AcceptanceInput) -> Finding | None:
    endpoint, pinned, spec = given.endpoint, given.pinned, given.endpoint.spec
    pins, target = spec.optimization.artefact, given.hardware.target
    if pins is None:
        return None
    if pinned is None:
        if given.observed.settings.allowed.shared_artefacts:
            return None
        return no(
            Reason.ARTEFACT_NOT_ALLOWED,
            f"No OptimizedModel of the namespace {endpoint.namespace} has the artefact {short_digest(pins)} that "
            "optimization.artefact names. Write a digest from the status of an OptimizedModel of this namespace "
            "(kubectl get optimizedmodels -o yaml), or mode: Auto; or ask the cluster's administrator to allow "
            "artefacts that were made elsewhere (policy.sharedArtefacts of the chart).",
        )
    if target_of(pinned) is not target:
        made, has = ("CPUs" if one is None else f"devices of {one.value}" for one in (target_of(pinned), target))
        return no(
            Reason.ARTEFACT_NOT_FOR_CLASS,
            f"The artefact {short_digest(pins)} that optimization.artefact names is for {made}, and the HardwareClass "
            f"{spec.hardware_class} has {has}. Write a class that fits in spec.hardwareClass, or mode: Auto in "
            "optimization.",
        )
    if is_of_later_release(pinned):
        return no(
            Reason.ARTEFACT_NOT_FOR_VERSION,
            f"A later version of Penstock made the artefact {short_digest(pins)} that optimization.artefact names, and "
            "this version does not read its format. Write mode: Auto in optimization, or upgrade Penstock.",
        )
    return None


def _names_are_free(given: AcceptanceInput) -> Finding | None:
    ours = {given.endpoint.name, *gateway_names(given.endpoint.name)}
    taken = sorted(ref for ref in given.observed.conflicting if ref.kind in NAMED_KINDS and ref.name in ours)
    if not taken:
        return None
    objects = " and ".join(f"a {ref.kind} named {ref.name}" for ref in taken)
    return no(
        Reason.NAME_TAKEN,
        f"There is {objects} in this namespace that was not made for this endpoint, and it is left alone. Delete "
        "it, or give the endpoint another name.",
    )


def _texts_exist(given: AcceptanceInput) -> Finding | None:
    source, texts = given.endpoint.spec.workload.texts_from, given.observed.workload_texts
    if source is None or texts:
        return None
    if texts is None:
        return no(
            Reason.TEXTS_NOT_FOUND,
            f"workload.textsFrom names the key {source.key} of the ConfigMap {source.config_map_name}, which is not "
            "in this namespace. Create it with one text on each line, or remove textsFrom.",
        )
    return no(
        Reason.TEXTS_EMPTY,
        f"The key {source.key} of the ConfigMap {source.config_map_name} holds no text. Write one on each line, "
        "or remove textsFrom.",
    )


ACCEPTANCE_RULES = (
    _class_is_for_namespace,
    _class_has_cores,
    _class_computes_task,
    _administrator_allows,
    _artefact_fits,
    _names_are_free,
    _texts_exist,
)
"""In the order in which they are reported."""


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
        return yes(Reason.RESOLVED, f"{result.model_resolved or model} was read: {size}{digest}.")
    failure, running = wanted.status.failure, wanted.running
    runs_again = running is not None and running.started
    if failure is not None and failure.reason in MODEL_FAILURES and not runs_again:
        return no(failure.reason, failure_text(wanted.name, wanted.status))
    if wanted.status.baseline is not None:
        return yes(Reason.RESOLVED, f"{model} was read, and its fp32 graph is published.")
    return unknown(Reason.RESOLVING, f"The optimisation job finds {model} when it runs.")


def optimized(
    endpoint: ParsedEndpoint, wanted: OptimizationState | None, serving: ServingChoice | None, missing: str
) -> Finding:
    """The condition Optimized: the result of the present spec is published. `missing`: why no node takes the
    job."""
    spec = endpoint.spec
    if spec.optimization.mode is OptimizationMode.PINNED:
        return yes(Reason.PINNED, f"The spec pins the artefact {short_digest(spec.optimization.artefact or '')}.")
    if wanted is None:
        return unknown(Reason.NOT_ASKED, "The optimisation begins once the spec is accepted.")
    status, result = wanted.status, wanted.status.result
    if wanted.ready and result is not None:
        if spec.vector_space is not None and (index := index_compatible(wanted)).false:
            return index
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
        return no(status.failure.reason, failure_text(wanted.name, wanted.status) + goes_on)
    if wanted.slot is not None and wanted.queued:
        return no(Reason.OPTIMIZATION_QUEUED, wanted.slot.waits_for(*OPTIMIZATIONS) + goes_on)
    if status.retry_after is not None:
        return no(Reason.WAITING_TO_RETRY, failure_text(wanted.name, wanted.status) + goes_on)
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
        return no(Reason.NO_CANDIDATE_WITHIN_BUDGET, failure_text(wanted.name, wanted.status))
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


def short_digest(digest: str) -> str:
    """The first digits of a digest, for messages."""
    return digest.removeprefix("sha256:")[:DIGITS]


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
    slot: SlotDecision | None = None,
    canary: Finding | None = None,
) -> Finding:
    """The condition Progressing: a rollout or a change of the replica count is under way, or waits for a reason.

    `desired_template`: the hash of the desired pod template; empty: the present one stays. `room`: the requests of
    a new pod, such as `2 free CPUs`. `slot`: whether the rollout has a slot; None: none needs one.
    `canary`: the state of its canary; None: it has none.
    """
    if deployment is None or endpoint.spec.suspend:
        return no(Reason.SETTLED, "No rollout is under way.")
    if slot is not None and not slot.allowed:
        waits = slot.waits_for(*ROLLOUTS)
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
