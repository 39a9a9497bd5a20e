"""The OptimizedModel of a key: created once, shared by the endpoints that ask for it, retried where a retry can help.

Its state is derived from the jobs and the last written status. Runs are numbered from 1, and the number is part of the
job's name, so that planning twice starts the same run.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Any

from pydantic import ValidationError

from penstock.artefact_store import StoreUri
from penstock.hardware import NeuronGeneration
from penstock.resources.endpoint import ModelEndpointSpec, OptimizationMode
from penstock.resources.job_summary import Failure
from penstock.resources.optimized_model import (
    RESULT_FORMAT,
    OptimizedModelSpec,
    OptimizedModelStatus,
    Phase,
    Toolchain,
    optimized_model_name,
    texts_digest,
)
from penstock.resources.result import ArtefactReference
from penstock.resources.status import Condition, ConditionStatus, timestamp, updated_conditions
from penstock_operator.plan.conditions import Reason, clipped, sentence
from penstock_operator.plan.endpoint import ParsedEndpoint
from penstock_operator.plan.installation import Json, PlanSettings
from penstock_operator.plan.job_outcome import (
    JobFailed,
    JobOutcome,
    JobRunning,
    JobSucceeded,
    checked_outcome,
    job_outcome,
    lies_in,
)
from penstock_operator.plan.names import API_VERSION, job_name, model_labels
from penstock_operator.plan.observed import ModelUser, OptimizedModelFacts
from penstock_operator.plan.turns import Line, TurnDecision, TurnKey
from penstock_operator.plan.workloads import JobFacts, moment


@dataclass(frozen=True)
class StatusWrite:
    """The whole status of an OptimizedModel, to write if it differs from the present one."""

    name: str
    status: Json


OWNERS = 16
"""Maximum number of endpoints that own a shared OptimizedModel: the first by name. Thousands may share one, and
their plans must name the same owners, or each plan would undo the others'."""
NEW_SECONDS = 30.0
"""An OptimizedModel that is younger is kept without users: the status of its endpoint may not name it yet."""
MAX_DOUBLINGS = 3
"""How often the memory of a job is doubled after it ran out of memory."""


def wanted_spec(
    spec: ModelEndpointSpec,
    settings: PlanSettings,
    texts: Sequence[str] | None,
    target: NeuronGeneration | None = None,
) -> OptimizedModelSpec | None:
    """The OptimizedModel spec that an endpoint needs; None when it pins an artefact, or its texts do not exist.
    `target`: the Inferentia devices of its hardware class; None: CPUs."""
    if spec.optimization.mode is OptimizationMode.PINNED:
        return None
    if spec.workload.texts_from is not None and texts is None:
        return None
    digest = texts_digest(texts) if spec.workload.texts_from is not None and texts is not None else None
    image = settings.optimizer_image_for(target)
    toolchain = Toolchain(image=image, version=settings.toolchain, target=target, format=RESULT_FORMAT)
    return OptimizedModelSpec.of(spec, toolchain, texts_digest=digest)


def wanted_name(
    spec: ModelEndpointSpec,
    settings: PlanSettings,
    texts: Sequence[str] | None,
    target: NeuronGeneration | None = None,
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
    turn: TurnDecision | None = None
    """The place in the line of the run that is to begin; None: it does not begin, or there is no line."""

    @property
    def queued(self) -> bool:
        """Whether the next run waits for its turn."""
        return self.turn is not None and not self.turn.allowed

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


def assess(
    facts: OptimizedModelFacts,
    store: StoreUri,
    *,
    now: datetime,
    settings: PlanSettings,
    suspended: bool = False,
    line: Line | None = None,
    namespace: str = "",
) -> OptimizationState | None:
    """The state of an OptimizedModel and the next run; None when this version cannot parse its spec, or does not have
    the format of its result. Fields of later releases are ignored.

    `store`: where its jobs publish. Only artefacts that they published there are taken into its status. The next run
    begins only if it is its turn in `line`, if there is one; `namespace` is that of the OptimizedModel.
    """
    try:
        spec = OptimizedModelSpec.model_validate(facts.spec, extra="ignore")
    except ValidationError:
        return None
    if spec.toolchain.format > RESULT_FORMAT:
        return None
    before = _status(facts.status)
    initial = OptimizationState(facts.name, spec, before)
    jobs = sorted((job for job in facts.jobs if job.attempt), key=lambda job: job.attempt)
    if before.phase is Phase.READY or facts.deleting:
        return _with_conditions(initial, facts, now)
    if jobs and jobs[-1].attempt >= before.attempts:
        state = _from_job(initial, store, jobs, now, settings)
    else:
        state = _without_job(initial, jobs, now, settings)
    pending = {"phase": Phase.PENDING, "progress": "", "stage": ""}
    if suspended and state.start:
        state = replace(initial, status=before.model_copy(update=pending))
    elif state.start and line is not None:
        turn = line.turn(TurnKey(namespace, facts.name), state.due or facts.created or now)
        state = replace(state, turn=turn)
        if not turn.allowed:
            state = _queued(state, before, turn)
    return _with_conditions(state, facts, now)


def _queued(state: OptimizationState, before: OptimizedModelStatus, turn: TurnDecision) -> OptimizationState:
    """The state in which the run that was to begin waits. The next plan finds the same run and the same time."""
    update: dict[str, Any] = {"attempts": before.attempts, "job": before.job}
    if state.due is not None:
        last = state.start - 1
        update = {"attempts": last, "job": job_name(state.name, last), "retry_after": timestamp(state.due)}
    status = state.status.model_copy(update=update)
    return replace(state, status=status, start=0, running=None, requeue_seconds=turn.requeue_seconds, turn=turn)


def _from_job(
    initial: OptimizationState, store: StoreUri, jobs: list[JobFacts], now: datetime, settings: PlanSettings
) -> OptimizationState:
    job = jobs[-1]
    outcome = checked_outcome(job, store)
    known = initial.status.model_copy(
        update={
            "attempts": job.attempt,
            "job": job.name,
            "retry_after": None,
            # The first baseline stays: it may be serving, and another run's would be the same.
            "baseline": initial.status.baseline or _baseline(job, outcome, store),
        }
    )
    if isinstance(outcome, JobSucceeded):
        update = {
            "phase": Phase.READY,
            "artefact": outcome.summary.artefact,
            "result": outcome.summary.result,
            "failure": None,
            "progress": "",
            "stage": "",
        }
        return replace(initial, status=known.model_copy(update=update))
    if isinstance(outcome, JobFailed):
        known = known.model_copy(update={"failure": outcome.failure, "progress": "", "stage": ""})
        return _after_failure(replace(initial, status=known), jobs, job.ended or now, now, settings)
    progress = job.report.progress
    update = {
        "phase": Phase.OPTIMIZING if outcome.started else Phase.PENDING,
        "progress": progress.summary if progress is not None else "",
        "stage": clipped(" ".join(filter(None, (progress.stage, progress.message))), 256) if progress else "",
    }
    return replace(initial, status=known.model_copy(update=update), running=outcome)


def _baseline(job: JobFacts, outcome: JobOutcome, store: StoreUri) -> ArtefactReference | None:
    found: ArtefactReference | None = None
    if isinstance(outcome, JobSucceeded):
        found = outcome.summary.baseline
    elif isinstance(outcome, JobFailed) and outcome.baseline is not None:
        found = outcome.baseline.baseline
    if found is None and job.report.baseline_digest:
        try:
            found = ArtefactReference(
                digest=job.report.baseline_digest, uri=job.report.baseline_uri, bytes=job.report.baseline_bytes
            )
        except ValidationError:  # a line of another program in the same form
            return None
    return found if found is not None and lies_in(store, found) else None


def _without_job(
    initial: OptimizationState, jobs: list[JobFacts], now: datetime, settings: PlanSettings
) -> OptimizationState:
    """The run that the status counts has no job: not created yet, deleted, or removed after its TTL."""
    status = initial.status
    if status.phase is Phase.FAILED:
        return initial
    if status.failure is not None and status.retry_after is not None:
        return _after_failure(initial, jobs, None, now, settings, due=moment(status.retry_after))
    # The same number again: that run was never created, or its job was deleted.
    return _starting(initial, max(1, status.attempts), jobs)


def _after_failure(
    initial: OptimizationState,
    jobs: list[JobFacts],
    ended: datetime | None,
    now: datetime,
    settings: PlanSettings,
    *,
    due: datetime | None = None,
) -> OptimizationState:
    status, failure = initial.status, initial.status.failure
    if failure is None or not _worth_another(failure, status.attempts, settings):
        return replace(initial, status=status.model_copy(update={"phase": Phase.FAILED, "retry_after": None}))
    if due is None:
        due = (ended or now) + timedelta(seconds=backoff(status.attempts, settings))
    if due > now:
        waits = status.model_copy(update={"phase": Phase.PENDING, "retry_after": timestamp(due)})
        # The time is written in whole seconds, so it may be slightly before the exact moment.
        return replace(initial, status=waits, requeue_seconds=max(1.0, (due - now).total_seconds()))
    return _starting(initial, status.attempts + 1, jobs, due)


def _starting(
    initial: OptimizationState, attempt: int, jobs: list[JobFacts], due: datetime | None = None
) -> OptimizationState:
    doublings = sum(1 for job in jobs if _ran_out_of_memory(job))
    if not jobs and initial.status.failure is not None and initial.status.failure.reason == Reason.OUT_OF_MEMORY:
        doublings = attempt - 1
    update = {
        "phase": Phase.PENDING,
        "attempts": attempt,
        "job": job_name(initial.name, attempt),
        "retry_after": None,
        "progress": "",
        "stage": "",
    }
    return replace(
        initial,
        status=initial.status.model_copy(update=update),
        start=attempt,
        memory_factor=2 ** min(doublings, MAX_DOUBLINGS),
        running=JobRunning(started=False),
        due=due,
    )


def _ran_out_of_memory(job: JobFacts) -> bool:
    outcome = job_outcome(job)
    return isinstance(outcome, JobFailed) and outcome.failure.reason == Reason.OUT_OF_MEMORY


def _worth_another(failure: Failure, attempts: int, settings: PlanSettings) -> bool:
    # The job treats out of memory as permanent; the next one gets more.
    return attempts < settings.max_attempts and (failure.retryable or failure.reason == Reason.OUT_OF_MEMORY)


def backoff(attempts: int, settings: PlanSettings) -> float:
    """Seconds to wait after the run of this number failed."""
    return min(settings.backoff_limit_seconds, settings.backoff_seconds * 2.0 ** min(attempts - 1, 30))


def optimized_model_object(
    facts: OptimizedModelFacts | None, spec: OptimizedModelSpec, endpoint: ParsedEndpoint, *, ready: bool
) -> Json:
    """The desired OptimizedModel.

    Until there is a result, the endpoints that wait for it own it, so the API server deletes a job that no endpoint
    waits for, also while no operator runs. A result has no owner: it stays for the grace time.
    """
    users = {ModelUser(endpoint.name, endpoint.uid), *(facts.users if facts is not None else ())}
    name = optimized_model_name(spec) if facts is None else facts.name
    metadata: dict[str, Any] = {
        "name": name,
        "namespace": endpoint.namespace,
        "labels": model_labels(name),
    }
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


@dataclass(frozen=True)
class UnusedModelAction:
    """What to do about an OptimizedModel that may be unused."""

    delete: bool = False
    status: StatusWrite | None = None
    """A status to write; None: unchanged."""
    requeue_seconds: float | None = None


def unused_model_action(facts: OptimizedModelFacts, *, now: datetime, settings: PlanSettings) -> UnusedModelAction:
    """Mark, keep or delete an OptimizedModel by its users (`facts.users`). Call it for each from time to time, and
    when an endpoint is deleted or changed."""
    status = _status(facts.status)
    if facts.deleting:
        return UnusedModelAction()
    if facts.users:
        if status.last_used is None:
            return UnusedModelAction()
        return UnusedModelAction(
            status=StatusWrite(facts.name, status.model_copy(update={"last_used": None}).to_object())
        )
    grace = timedelta(seconds=settings.unused_grace_seconds)
    kept = timedelta(seconds=NEW_SECONDS)
    if not facts.owned and not facts.status:
        # Restored from a backup: kubectl writes the status only after it has created all OptimizedModels.
        kept = max(kept, grace)
    if facts.created is not None and now - facts.created < kept:
        return UnusedModelAction(requeue_seconds=(facts.created + kept - now).total_seconds())
    if status.phase is not Phase.READY:
        return UnusedModelAction(delete=True)
    since = moment(status.last_used)
    if since is None or (facts.created is not None and since < facts.created):
        # The second is the status of a backup. Its time is overwritten, not only ignored: kubectl owns it, and an apply
        # without it would not remove it when an endpoint uses the result.
        marked = status.model_copy(update={"last_used": timestamp(now)})
        return UnusedModelAction(
            status=StatusWrite(facts.name, marked.to_object()), requeue_seconds=grace.total_seconds()
        )
    left = (since + grace - now).total_seconds()
    return UnusedModelAction(delete=True) if left <= 0 else UnusedModelAction(requeue_seconds=left)


def superfluous_jobs(facts: OptimizedModelFacts) -> list[JobFacts]:
    """Its jobs that run although it has a result: its status was restored from a backup after they had begun."""
    if _status(facts.status).phase is not Phase.READY:
        return []
    return [job for job in facts.jobs if isinstance(job_outcome(job), JobRunning) and not job.deleting]


def status_of(facts: OptimizedModelFacts) -> OptimizedModelStatus:
    """Its parsed status; an empty one if another program wrote it."""
    return _status(facts.status)


def _status(value: Json) -> OptimizedModelStatus:
    try:
        return OptimizedModelStatus.model_validate(value)
    except ValidationError:  # written by another program: the jobs have the state
        return OptimizedModelStatus()


def _with_conditions(state: OptimizationState, facts: OptimizedModelFacts, now: datetime) -> OptimizationState:
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
        return ConditionStatus.FALSE, status.failure.reason, failure_text(state)
    if state.turn is not None and state.queued:
        return ConditionStatus.FALSE, Reason.OPTIMIZATION_QUEUED, queue_text(state.turn)
    if status.failure is not None and status.retry_after is not None:
        return ConditionStatus.FALSE, Reason.WAITING_TO_RETRY, failure_text(state)
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


def queue_text(turn: TurnDecision) -> str:
    """Why the next run waits."""
    return turn.waits_for("optimisation", "maxConcurrentOptimizations")


def failure_text(state: OptimizationState) -> str:
    """The failure of the last run, the next action, and whether it is retried."""
    status, failure = state.status, state.status.failure
    if failure is None:
        return ""
    parts = [sentence(failure.message), sentence(failure.remedy)]
    if status.retry_after is not None:
        parts.append(f"Run {status.attempts} failed; the next one starts at {status.retry_after}.")
    elif state.failed:
        runs = f"after {status.attempts} runs" if status.attempts > 1 else "and is not tried again by itself"
        parts.append(
            f"It was given up {runs}: a changed spec starts anew, and so does "
            f"kubectl delete optimizedmodel {state.name}."
        )
    return " ".join(filter(None, parts))


def digests(status: Json) -> tuple[str, ...]:
    """The artefacts in the status of an OptimizedModel: the result and the fp32 graph; empty for none."""
    return tuple(str((status.get(name) or {}).get("digest") or "") for name in ("artefact", "baseline"))


def artefact_uri(status: Json, digest: str) -> str:
    """The address of an artefact by the status of an OptimizedModel; empty: it does not have the artefact."""
    found = (status.get(name) or {} for name in ("artefact", "baseline"))
    return next((str(reference.get("uri") or "") for reference in found if reference.get("digest") == digest), "")


def pinned_model(
    spec: ModelEndpointSpec, models: Iterable[OptimizedModelFacts], *, present: str = ""
) -> OptimizedModelFacts | None:
    """The OptimizedModel whose status has the artefact that the endpoint pins; None if it pins none, or none has it.

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
