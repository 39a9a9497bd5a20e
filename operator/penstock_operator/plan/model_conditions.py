"""Conditions about the spec, the model and the optimisation: Accepted, ModelResolved, Optimized,
AccuracyWithinBudget and ObjectiveMet; and the p95 and speed-up as text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from penstock.capacity import TokenCurve
from penstock.hardware import NeuronGeneration
from penstock.resources.endpoint import Objective, OptimizationMode
from penstock.resources.hardware_class import HardwareClassSpec
from penstock.resources.optimized_model import Phase
from penstock.resources.result import CapacityFacts, Result, TokenCapacityFacts
from penstock.tasks import TaskName
from penstock_operator.plan.conditions import Finding, Reason, no, sentence, stopped, unknown, yes
from penstock_operator.plan.endpoint import ParsedEndpoint, refusal, refused_store
from penstock_operator.plan.names import gateway_binding_name, gateway_name, pods_service_name
from penstock_operator.plan.observed import EndpointSnapshot, Ref
from penstock_operator.plan.optimized_model import (
    OptimizationState,
    failure_text,
    is_of_later_release,
    pinned_model,
    queue_text,
    target_of,
)
from penstock_operator.plan.pod_conditions import PinVerdict
from penstock_operator.plan.serving import ServingChoice

NAMED_KINDS = ("Deployment", "Service", "PodDisruptionBudget", "NetworkPolicy", "ServiceAccount", "RoleBinding")
"""Kinds whose objects are named after the endpoint."""


def accepted(endpoint: ParsedEndpoint, observed: EndpointSnapshot, hardware: HardwareClassSpec | Finding) -> Finding:
    """The condition Accepted: the spec is valid and allowed, and what it names exists."""
    spec = endpoint.spec
    if isinstance(hardware, Finding):
        return hardware
    allowed = hardware.allowed_namespaces
    if allowed is not None and not allowed.includes(observed.namespace_labels):
        return no(
            Reason.HARDWARE_CLASS_NOT_ALLOWED,
            f"The HardwareClass {spec.hardware_class} is not for the namespace {endpoint.namespace}: its "
            "allowedNamespaces does not select the labels of the namespace. Write another class in "
            "spec.hardwareClass, or ask an administrator of the cluster to add the namespace.",
        )
    wrong = hardware.objection_to_cores(spec.cores)
    if wrong is not None:
        return no(Reason.INVALID_CORES, sentence(str(wrong)))
    if hardware.neuron is not None and spec.task is TaskName.TEXT_GENERATION:
        return no(
            Reason.TASK_NOT_SUPPORTED,
            f"The HardwareClass {spec.hardware_class} has Inferentia devices, and Penstock compiles encoders for them, "
            "no models that generate text. Write a class of CPUs in spec.hardwareClass.",
        )
    refused = refusal(spec, observed.settings.allowed, observed.namespace_labels) or refused_store(
        spec.source, observed.settings
    )
    if refused is not None:
        return refused
    pins = spec.optimization.artefact
    shared = observed.settings.allowed.shared_artefacts
    pinned = pinned_model(spec, observed.optimized_models)
    target = hardware.target
    if pins is not None and not shared and pinned is None:
        return no(
            Reason.ARTEFACT_NOT_ALLOWED,
            f"No OptimizedModel of the namespace {endpoint.namespace} has the artefact {_short(pins)} that "
            "optimization.artefact names. Write a digest from the status of an OptimizedModel of this namespace "
            "(kubectl get optimizedmodels -o yaml), or mode: Auto; or ask the cluster's administrator to allow "
            "artefacts that were made elsewhere (policy.sharedArtefacts of the chart).",
        )
    if pinned is not None and target_of(pinned) is not target:
        return no(
            Reason.ARTEFACT_NOT_FOR_CLASS,
            f"The artefact {_short(str(pins))} that optimization.artefact names is for {_devices(target_of(pinned))}, "
            f"and the HardwareClass {spec.hardware_class} has {_devices(target)}. Write a class that fits in "
            "spec.hardwareClass, or mode: Auto in optimization.",
        )
    if pinned is not None and is_of_later_release(pinned):
        return no(
            Reason.ARTEFACT_NOT_FOR_VERSION,
            f"A later version of Penstock made the artefact {_short(str(pins))} that optimization.artefact names, and "
            "this version does not read its format. Write mode: Auto in optimization, or upgrade Penstock.",
        )
    taken = _taken_names(endpoint, observed.conflicting)
    if taken:
        objects = " and ".join(f"a {ref.kind} named {ref.name}" for ref in taken)
        return no(
            Reason.NAME_TAKEN,
            f"There is {objects} in this namespace that was not made for this endpoint, and it is left alone. Delete "
            "it, or give the endpoint another name.",
        )
    source = spec.workload.texts_from
    if source is not None and observed.workload_texts is None:
        return no(
            Reason.TEXTS_NOT_FOUND,
            f"workload.textsFrom names the key {source.key} of the ConfigMap {source.config_map_name}, which is not "
            "in this namespace. Create it with one text on each line, or remove textsFrom.",
        )
    if source is not None and not observed.workload_texts:
        return no(
            Reason.TEXTS_EMPTY,
            f"The key {source.key} of the ConfigMap {source.config_map_name} holds no text. Write one on each line, "
            "or remove textsFrom.",
        )
    return yes(Reason.VALID, f"The spec is valid, and the hardware class {spec.hardware_class} exists.")


def _devices(target: NeuronGeneration | None) -> str:
    return "CPUs" if target is None else f"devices of {target.value}"


def _taken_names(endpoint: ParsedEndpoint, conflicting: Iterable[Ref]) -> list[Ref]:
    """Objects with the names of the operator's own that it did not create."""
    ours = {endpoint.name, gateway_name(endpoint.name), pods_service_name(endpoint.name)}
    ours.add(gateway_binding_name(endpoint.name))
    return sorted(ref for ref in conflicting if ref.kind in NAMED_KINDS and ref.name in ours)


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
        return yes(Reason.PINNED, f"The spec pins the artefact {_short(spec.optimization.artefact or '')}.")
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
            f"The verdict on the artefact {_short(serving.digest)} is in its report.html"
            f"{f' and in the OptimizedModel {serving.optimized_model}' if serving.optimized_model else ''}.",
        )
    verdict = stopped(result.accuracy.reason)
    if not result.accuracy.within_budget:
        return no(Reason.OVER_BUDGET, f"{verdict} Loosen optimization.accuracy, or allow other engines or precisions.")
    return yes(Reason.WITHIN_BUDGET, verdict or f"Judged on {result.accuracy.texts} texts.")


NOT_MEASURED = "The capacity of this plan was not measured: the time budget was too short."


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
    if wishes.latency is None and wishes.throughput is None and not wishes.is_for_tokens:
        return yes(Reason.NO_OBJECTIVE, "The spec states none: the best of latency and throughput serves.")
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


def p95_text(result: Result | None, headroom: float) -> str:
    """The p95 at the planned load of a replica, such as `14 ms`; empty when not measured."""
    if result is None or result.pinned is False:
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


def _runs_again(wanted: OptimizationState) -> bool:
    return wanted.running is not None and wanted.running.started


def _short(digest: str) -> str:
    return digest.removeprefix("sha256:")[:DIGITS]


def _pods(names: Sequence[str]) -> str:
    return f"the pod {names[0]}" if len(names) == 1 else f"{len(names)} pods ({names[0]}, ...)"
