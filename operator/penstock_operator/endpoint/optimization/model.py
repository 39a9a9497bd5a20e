"""The OptimizedModel of a key: created once, shared by the endpoints with this key, retried where a retry can help.

Its state is derived from the jobs and the last written status. Runs are numbered from 1, and the number is part of the
job's name, so that planning twice starts the same run.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from pydantic import ValidationError

from penstock.hardware import NeuronGeneration
from penstock.resources.conditions import Condition, ConditionStatus, timestamp, updated_conditions
from penstock.resources.endpoint import ModelEndpointSpec, OptimizationMode
from penstock.resources.optimized_model import (
    RESULT_FORMAT,
    OptimizedModelSpec,
    OptimizedModelStatus,
    Phase,
    Toolchain,
    optimized_model_name,
    texts_digest,
)
from penstock_operator.endpoint.optimization.outcome import JobRunning, failure_text
from penstock_operator.endpoint.snapshot import StatusWrite
from penstock_operator.endpoint.spec import ParsedEndpoint
from penstock_operator.facts.findings import clipped, sentence
from penstock_operator.facts.installation import PlanSettings
from penstock_operator.facts.names import API_VERSION, Json, model_labels
from penstock_operator.facts.pods import RuntimePod
from penstock_operator.facts.reasons import Reason
from penstock_operator.facts.workloads import ModelUser, OptimizedModelFacts
from penstock_operator.limits.concurrency import OPTIMIZATIONS, SlotDecision

OWNERS = 16
"""Maximum number of endpoints that own a shared OptimizedModel: the first by name. Thousands may share one, and
their plans must name the same owners, or each plan would undo another one."""


def wanted_spec(
    spec: ModelEndpointSpec, settings: PlanSettings, texts: Sequence[str] | None, target: NeuronGeneration | None = None
) -> OptimizedModelSpec | None:
    """The OptimizedModel spec that an endpoint needs; None when it pins an artefact, or its texts do not exist.
    `target`: the Inferentia devices of its hardware class; None: CPUs."""
    if spec.optimization.mode is OptimizationMode.PINNED:
        return None
    if spec.workload.texts_from is not None and texts is None:
        return None
    digest = texts_digest(texts) if spec.workload.texts_from is not None and texts is not None else None
    image = settings.optimizer_image_for(target)
    toolchain = Toolchain(
        image=image,
        version=settings.toolchain,
        target=target,
        format=RESULT_FORMAT,
        revision=settings.search_revision,
    )
    return OptimizedModelSpec.of(spec, toolchain, texts_digest=digest)


def wanted_name(
    spec: ModelEndpointSpec, settings: PlanSettings, texts: Sequence[str] | None, target: NeuronGeneration | None = None
) -> str:
    """The name of the OptimizedModel that an endpoint needs; empty for none. `target` as in `wanted_spec`."""
    wanted = wanted_spec(spec, settings, texts, target)
    return "" if wanted is None else optimized_model_name(wanted)


@dataclass(frozen=True)
class OptimizationState:
    """The state of an OptimizedModel, and the next run."""

    name: str
    spec: OptimizedModelSpec
    status: OptimizedModelStatus
    exists: bool = True
    start: int = 0
    """The run to start now; 0: none."""
    memory_factor: int = 1
    """Factor on the memory of that run: earlier runs ran out of memory."""
    requeue_seconds: float | None = None
    running: JobRunning | None = None
    """The run that is under way."""
    due: datetime | None = None
    """When the next run could begin first; None: it does not begin."""
    slot: SlotDecision | None = None
    """Whether the run that is to begin has a slot; None: none begins, or there is no limit."""

    @property
    def queued(self) -> bool:
        """Whether the next run waits for a slot."""
        return self.slot is not None and not self.slot.allowed

    @property
    def ready(self) -> bool:
        """The result exists."""
        return self.status.phase is Phase.READY

    @property
    def failed(self) -> bool:
        """It failed and is not retried."""
        return self.status.phase is Phase.FAILED

    @property
    def write(self) -> StatusWrite:
        """The status to write."""
        return StatusWrite(self.name, self.status.to_object())


def read_state(facts: OptimizedModelFacts) -> OptimizationState | None:
    """The state by the last written status; None when this version cannot parse the spec, or does not have the format
    of the result. Fields of later releases are ignored."""
    try:
        spec = OptimizedModelSpec.model_validate(facts.spec, extra="ignore")
    except ValidationError:
        return None
    return None if spec.toolchain.format > RESULT_FORMAT else OptimizationState(facts.name, spec, status_of(facts))


def optimized_model_object(
    facts: OptimizedModelFacts | None, spec: OptimizedModelSpec, endpoint: ParsedEndpoint, *, ready: bool
) -> Json:
    """The desired OptimizedModel.

    Until there is a result, the endpoints that wait for it own it, so the API server deletes a job that no endpoint
    waits for, also while no operator runs. A result has no owner: it stays for the grace time.
    """
    users = {ModelUser(endpoint.name, endpoint.uid), *(facts.users if facts is not None else ())}
    name = optimized_model_name(spec) if facts is None else facts.name
    metadata: dict[str, Any] = {"name": name, "namespace": endpoint.namespace, "labels": model_labels(name)}
    if not ready:
        metadata["ownerReferences"] = [
            {"apiVersion": API_VERSION, "kind": "ModelEndpoint", "name": user.name, "uid": user.uid}
            for user in sorted(users)[:OWNERS]
            if user.uid
        ]
    # Keep the stored spec where it means the same (the API server writes 600.0 as 600), so that an apply that changes
    # nothing is recognised. Another version of the types may have written it differently.
    ours = spec.to_object()
    return {
        "apiVersion": API_VERSION,
        "kind": "OptimizedModel",
        "metadata": metadata,
        "spec": ours if facts is None or facts.spec == ours else dict(facts.spec),
    }


def status_of(facts: OptimizedModelFacts) -> OptimizedModelStatus:
    """Its parsed status; an empty one if another program wrote it: then the jobs have the state."""
    try:
        return OptimizedModelStatus.model_validate(facts.status)
    except ValidationError:
        return OptimizedModelStatus()


def with_conditions(state: OptimizationState, facts: OptimizedModelFacts, now: datetime) -> OptimizationState:
    """The state with the condition Ready of its status."""
    status, reason, message = _ready_condition(state)
    fresh = Condition(
        type="Ready",
        status=status,
        reason=reason,
        message=clipped(message),
        observed_generation=facts.generation,
        last_transition_time=timestamp(now),
    )
    conditions = updated_conditions([one for one in state.status.conditions if one.type == "Ready"], [fresh])
    update = {"conditions": conditions, "observed_generation": facts.generation, "last_used": None}
    return replace(state, status=state.status.model_copy(update=update))


def _ready_condition(state: OptimizationState) -> tuple[ConditionStatus, str, str]:
    status = state.status
    if status.phase is Phase.READY:
        plan = status.result.plan.summary if status.result is not None else "the result"
        return ConditionStatus.TRUE, Reason.PUBLISHED, f"{sentence(plan)} The artefact is in the store."
    if status.failure is not None and status.phase is Phase.FAILED:
        return ConditionStatus.FALSE, status.failure.reason, failure_text(state.name, status)
    if state.slot is not None and state.queued:
        return ConditionStatus.FALSE, Reason.OPTIMIZATION_QUEUED, state.slot.waits_for(*OPTIMIZATIONS)
    if status.failure is not None and status.retry_after is not None:
        return ConditionStatus.FALSE, Reason.WAITING_TO_RETRY, failure_text(state.name, status)
    if state.running is not None and state.running.unschedulable:
        return (
            ConditionStatus.FALSE,
            Reason.UNSCHEDULABLE,
            sentence(f"no node takes the job: {state.running.unschedulable}"),
        )
    if state.running is not None and state.running.waiting:
        return ConditionStatus.FALSE, Reason.JOB_WAITING, sentence(state.running.waiting)
    if status.phase is Phase.OPTIMIZING:
        at = f" ({status.stage})" if status.stage else ""
        return (
            ConditionStatus.FALSE,
            Reason.OPTIMIZING,
            f"The job {status.job} runs: {status.progress or 'starting'}{at}.",
        )
    job = f"The job {status.job} is about to start." if status.job else "The job is about to be created."
    return ConditionStatus.FALSE, Reason.PENDING, job


def digests(status: Json) -> tuple[str, ...]:
    """The artefacts in the status of an OptimizedModel: the result and the fp32 graph; empty for none."""
    return tuple(str((status.get(name) or {}).get("digest") or "") for name in ("artefact", "baseline"))


def with_measured_capacity(state: OptimizationState, pods: Iterable[RuntimePod]) -> OptimizationState:
    """The state with the capacity that one of its pods measured; unchanged where that is known, or none has.

    Only of models for Inferentia: the job of others measures it, and its figures stay."""
    status = state.status
    if state.spec.toolchain.target is None or status.result is None or status.artefact is None:
        return state
    if status.result.capacity.is_measured:
        return state
    digest = status.artefact.digest
    reports = (pod.report for pod in pods if (pod.pod.optimized_model, pod.pod.artefact) == (state.name, digest))
    found = (report.capacity for report in reports if report is not None and report.capacity is not None)
    capacity = next((one for one in found if one.is_measured), None)
    if capacity is None:
        return state
    result = status.result.model_copy(update={"capacity": capacity})
    return replace(state, status=status.model_copy(update={"result": result}))


def artefact_uri(status: Json, digest: str) -> str:
    """The address of an artefact by the status of an OptimizedModel; empty: it does not have the artefact."""
    found = (status.get(name) or {} for name in ("artefact", "baseline"))
    return next((str(reference.get("uri") or "") for reference in found if reference.get("digest") == digest), "")


def pinned_model(
    spec: ModelEndpointSpec, models: Iterable[OptimizedModelFacts], *, present: str = ""
) -> OptimizedModelFacts | None:
    """The OptimizedModel with the pinned artefact in its status; None if the spec pins none, or none has it.

    If several have it, one that this release reads comes first, then the one of the name `present`: pods have the name
    as a label, and another name would replace them.
    """
    digest = spec.optimization.artefact

    def order(facts: OptimizedModelFacts) -> tuple[bool, bool, bool, str]:
        return is_of_later_release(facts), facts.name != present, digests(facts.status)[0] != digest, facts.name

    return min((facts for facts in models if digest and digest in digests(facts.status)), key=order, default=None)


def is_of_later_release(facts: OptimizedModelFacts) -> bool:
    """Whether its artefacts have a format that the pods of this release do not read."""
    value = (facts.spec.get("toolchain") or {}).get("format")
    return isinstance(value, int) and value > RESULT_FORMAT


def target_of(facts: OptimizedModelFacts) -> NeuronGeneration | None:
    """The Inferentia devices that its artefacts are compiled for; None: CPUs."""
    value = (facts.spec.get("toolchain") or {}).get("target")
    return NeuronGeneration(value) if value in set(NeuronGeneration) else None


def find(models: Iterable[OptimizedModelFacts], name: str) -> OptimizedModelFacts | None:
    """The OptimizedModel of this name."""
    return next((facts for facts in models if name and facts.name == name), None)
