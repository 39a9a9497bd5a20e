"""The OptimizedModel of a key: made once, shared by the endpoints that ask for it, tried again where that can help.

State is read off the jobs and the status that was written last. Runs are numbered from 1, and the number is part of the
job's name: whoever plans, and however often, starts the same run.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Any

from pydantic import ValidationError

from penstock.resources.endpoint import ModelEndpointSpec, OptimizationMode
from penstock.resources.job_summary import Failure
from penstock.resources.optimized_model import (
    OptimizedModelSpec,
    OptimizedModelStatus,
    Phase,
    Toolchain,
    optimized_model_name,
)
from penstock.resources.result import ArtefactReference
from penstock.resources.status import Condition, ConditionStatus, timestamp, updated_conditions
from penstock.resources.text_fields import Digest
from penstock_operator.plan.actions import StatusWrite
from penstock_operator.plan.conditions import clipped, sentence
from penstock_operator.plan.endpoint import Endpoint
from penstock_operator.plan.names import API_VERSION, job_name, model_labels
from penstock_operator.plan.observed import JobFacts, OptimizedModelFacts, User
from penstock_operator.plan.outcome import OUT_OF_MEMORY, Failed, Outcome, Running, Succeeded, outcome
from penstock_operator.plan.settings import Json, PlanSettings

OWNERS = 16
"""How many of the endpoints that share an OptimizedModel own it, the first by name. Thousands may share one; all of
their plans have to name the same owners, or each would undo what the other did."""
MOST_DOUBLINGS = 3
"""How often a job that ran out of memory gets twice as much."""


def texts_digest(texts: Sequence[str]) -> Digest:
    """The digest of the texts of a ConfigMap."""
    return f"sha256:{hashlib.sha256(texts_file(texts).encode()).hexdigest()}"


def texts_file(texts: Sequence[str]) -> str:
    """Texts as the job reads them: one on each line."""
    return "".join(f"{text}\n" for text in texts)


def wanted_spec(
    spec: ModelEndpointSpec, settings: PlanSettings, texts: Sequence[str] | None
) -> OptimizedModelSpec | None:
    """What an endpoint wants optimised; None when it names an artefact itself, or its texts are not there."""
    if spec.optimization.mode is OptimizationMode.PINNED:
        return None
    if spec.workload.texts_from is not None and texts is None:
        return None
    digest = texts_digest(texts) if spec.workload.texts_from is not None and texts is not None else None
    toolchain = Toolchain(image=settings.optimizer_image, version=settings.toolchain)
    return OptimizedModelSpec.of(spec, toolchain, texts_digest=digest)


def wanted_name(spec: ModelEndpointSpec, settings: PlanSettings, texts: Sequence[str] | None) -> str:
    """The name of the OptimizedModel that an endpoint wants; empty for none."""
    wanted = wanted_spec(spec, settings, texts)
    return "" if wanted is None else optimized_model_name(wanted)


@dataclass(frozen=True)
class Optimization:
    """An OptimizedModel as it stands, and what to do about it."""

    name: str
    spec: OptimizedModelSpec
    status: OptimizedModelStatus
    exists: bool = True
    start: int = 0
    """The run to start now; 0: none."""
    memory_factor: int = 1
    """What the memory of that run is multiplied by: earlier ones had too little."""
    requeue_seconds: float | None = None
    running: Running | None = None
    """The run that is under way."""

    @property
    def ready(self) -> bool:
        """The result is there."""
        return self.status.phase is Phase.READY

    @property
    def failed(self) -> bool:
        """Nothing will happen by itself."""
        return self.status.phase is Phase.FAILED

    @property
    def write(self) -> StatusWrite:
        """The status to write."""
        return StatusWrite(self.name, self.status.to_object())


def assess(
    facts: OptimizedModelFacts, *, now: datetime, settings: PlanSettings, suspended: bool = False
) -> Optimization | None:
    """Where an OptimizedModel stands and what to do next; None when its spec is of another version of the types."""
    try:
        spec = OptimizedModelSpec.model_validate(facts.spec)
    except ValidationError:
        return None
    before = _status(facts.status)
    begun = Optimization(facts.name, spec, before)
    jobs = sorted((job for job in facts.jobs if job.attempt), key=lambda job: job.attempt)
    if before.phase is Phase.READY or facts.deleting:
        return _with_conditions(begun, facts, now)
    if jobs and jobs[-1].attempt >= before.attempts:
        stands = _from_job(begun, jobs, now, settings)
    else:
        stands = _without_job(begun, jobs, now, settings)
    if suspended and stands.start:
        pending = {"phase": Phase.PENDING, "progress": "", "stage": ""}
        stands = replace(begun, status=before.model_copy(update=pending))
    return _with_conditions(stands, facts, now)


def _from_job(begun: Optimization, jobs: list[JobFacts], now: datetime, settings: PlanSettings) -> Optimization:
    job = jobs[-1]
    seen = outcome(job)
    known = begun.status.model_copy(
        update={
            "attempts": job.attempt,
            "job": job.name,
            "retry_after": None,
            # The first one stays: it may be serving, and another run's would only be the same again.
            "baseline": begun.status.baseline or _baseline(job, seen),
        }
    )
    if isinstance(seen, Succeeded):
        update = {
            "phase": Phase.READY,
            "artefact": seen.summary.artefact,
            "result": seen.summary.result,
            "failure": None,
            "progress": "",
            "stage": "",
        }
        return replace(begun, status=known.model_copy(update=update))
    if isinstance(seen, Failed):
        known = known.model_copy(update={"failure": seen.failure, "progress": "", "stage": ""})
        return _after_failure(replace(begun, status=known), jobs, job.ended or now, now, settings)
    progress = job.log.progress
    update = {
        "phase": Phase.OPTIMIZING if seen.started else Phase.PENDING,
        "progress": progress.summary if progress is not None else "",
        "stage": clipped(" ".join(filter(None, (progress.stage, progress.message))), 256) if progress else "",
    }
    return replace(begun, status=known.model_copy(update=update), running=seen)


def _baseline(job: JobFacts, seen: Outcome) -> ArtefactReference | None:
    if isinstance(seen, Succeeded) and seen.summary.baseline is not None:
        return seen.summary.baseline
    if isinstance(seen, Failed) and seen.baseline is not None:
        return seen.baseline.baseline
    if job.log.baseline_digest:
        try:
            return ArtefactReference(
                digest=job.log.baseline_digest, uri=job.log.baseline_uri, bytes=job.log.baseline_bytes
            )
        except ValidationError:  # a line that only looks like ours
            return None
    return None


def _without_job(begun: Optimization, jobs: list[JobFacts], now: datetime, settings: PlanSettings) -> Optimization:
    """No job of the run that the status counts: it is yet to be made, was deleted, or ended long ago."""
    status = begun.status
    if status.phase is Phase.FAILED:
        return begun
    if status.failure is not None and status.retry_after is not None:
        return _after_failure(begun, jobs, None, now, settings, due=_moment(status.retry_after))
    # The same number again: that run was never made, or somebody deleted it.
    return _starting(begun, max(1, status.attempts), jobs)


def _after_failure(
    begun: Optimization,
    jobs: list[JobFacts],
    ended: datetime | None,
    now: datetime,
    settings: PlanSettings,
    *,
    due: datetime | None = None,
) -> Optimization:
    status, failure = begun.status, begun.status.failure
    if failure is None or not _worth_another(failure, status.attempts, settings):
        return replace(begun, status=status.model_copy(update={"phase": Phase.FAILED, "retry_after": None}))
    if due is None:
        due = (ended or now) + timedelta(seconds=backoff(status.attempts, settings))
    if due > now:
        waits = status.model_copy(update={"phase": Phase.PENDING, "retry_after": timestamp(due)})
        # The time is written in whole seconds, so it may lie a little before the moment that is meant.
        return replace(begun, status=waits, requeue_seconds=max(1.0, (due - now).total_seconds()))
    return _starting(begun, status.attempts + 1, jobs)


def _starting(begun: Optimization, attempt: int, jobs: list[JobFacts]) -> Optimization:
    doublings = sum(1 for job in jobs if _ran_out_of_memory(job))
    if not jobs and begun.status.failure is not None and begun.status.failure.reason == OUT_OF_MEMORY:
        doublings = attempt - 1
    update = {
        "phase": Phase.PENDING,
        "attempts": attempt,
        "job": job_name(begun.name, attempt),
        "retry_after": None,
        "progress": "",
        "stage": "",
    }
    return replace(
        begun,
        status=begun.status.model_copy(update=update),
        start=attempt,
        memory_factor=2 ** min(doublings, MOST_DOUBLINGS),
        running=Running(started=False),
    )


def _ran_out_of_memory(job: JobFacts) -> bool:
    seen = outcome(job)
    return isinstance(seen, Failed) and seen.failure.reason == OUT_OF_MEMORY


def _worth_another(failure: Failure, attempts: int, settings: PlanSettings) -> bool:
    # Out of memory is permanent to the job itself; the next one gets more.
    return attempts < settings.max_attempts and (failure.retryable or failure.reason == OUT_OF_MEMORY)


def backoff(attempts: int, settings: PlanSettings) -> float:
    """Seconds to wait after the run of this number failed."""
    return min(settings.backoff_limit_seconds, settings.backoff_seconds * 2.0 ** min(attempts - 1, 30))


def resource(facts: OptimizedModelFacts | None, spec: OptimizedModelSpec, endpoint: Endpoint, *, ready: bool) -> Json:
    """The desired OptimizedModel.

    Until there is a result, the endpoints that wait for it own it, so that a job that nobody waits for goes with them,
    also while no operator runs. A result belongs to nobody: it outlives them for the grace time.
    """
    users = {User(endpoint.name, endpoint.uid), *(facts.users if facts is not None else ())}
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
    # As it was written at first, where that means the same (the API server tells 600.0 as 600): then it is known for an
    # apply that would change nothing. Another version of the types may have written it otherwise.
    ours = spec.to_object()
    return {
        "apiVersion": API_VERSION,
        "kind": "OptimizedModel",
        "metadata": metadata,
        "spec": ours if facts is None or facts.spec == ours else dict(facts.spec),
    }


@dataclass(frozen=True)
class Sweep:
    """What to do about an OptimizedModel that may be out of use."""

    delete: bool = False
    status: StatusWrite | None = None
    """A status to write; None: nothing has changed."""
    requeue_seconds: float | None = None


def sweep(facts: OptimizedModelFacts, *, now: datetime, settings: PlanSettings) -> Sweep:
    """What becomes of an OptimizedModel, by who uses it (`facts.users`): to be asked for each of them now and then,
    and when an endpoint goes or changes."""
    status = _status(facts.status)
    if facts.deleting:
        return Sweep()
    if facts.users:
        if status.last_used is None:
            return Sweep()
        return Sweep(status=StatusWrite(facts.name, status.model_copy(update={"last_used": None}).to_object()))
    young = facts.created is not None and now - facts.created < timedelta(seconds=30)
    if young:
        # Its endpoint's status may not name it yet.
        return Sweep(requeue_seconds=30.0)
    if status.phase is not Phase.READY:
        return Sweep(delete=True)
    since = _moment(status.last_used)
    grace = timedelta(seconds=settings.unused_grace_seconds)
    if since is None:
        marked = status.model_copy(update={"last_used": timestamp(now)})
        return Sweep(status=StatusWrite(facts.name, marked.to_object()), requeue_seconds=grace.total_seconds())
    left = (since + grace - now).total_seconds()
    return Sweep(delete=True) if left <= 0 else Sweep(requeue_seconds=left)


def _status(value: Json) -> OptimizedModelStatus:
    try:
        return OptimizedModelStatus.model_validate(value)
    except ValidationError:  # somebody else wrote it: the jobs tell the rest
        return OptimizedModelStatus()


def _with_conditions(stands: Optimization, facts: OptimizedModelFacts, now: datetime) -> Optimization:
    status, reason, message = _told(stands)
    fresh = Condition(
        type="Ready",
        status=status,
        reason=reason,
        message=clipped(message),
        observed_generation=facts.generation,
        last_transition_time=timestamp(now),
    )
    conditions = updated_conditions([one for one in stands.status.conditions if one.type == "Ready"], [fresh])
    update = {"conditions": conditions, "observed_generation": facts.generation, "last_used": None}
    return replace(stands, status=stands.status.model_copy(update=update))


def _told(stands: Optimization) -> tuple[ConditionStatus, str, str]:
    status = stands.status
    if status.phase is Phase.READY:
        plan = status.result.plan.summary if status.result is not None else "the result"
        return ConditionStatus.TRUE, "Published", f"{sentence(plan)} The artefact is in the store."
    if status.failure is not None and status.phase is Phase.FAILED:
        return ConditionStatus.FALSE, status.failure.reason, failure_told(stands)
    if status.failure is not None and status.retry_after is not None:
        return ConditionStatus.FALSE, "WaitingToRetry", failure_told(stands)
    if stands.running is not None and stands.running.unschedulable:
        return (
            ConditionStatus.FALSE,
            "Unschedulable",
            sentence(f"no node takes the job: {stands.running.unschedulable}"),
        )
    if stands.running is not None and stands.running.waiting:
        return ConditionStatus.FALSE, "JobWaiting", sentence(stands.running.waiting)
    if status.phase is Phase.OPTIMIZING:
        at = f" ({status.stage})" if status.stage else ""
        return ConditionStatus.FALSE, "Optimizing", f"The job {status.job} runs: {status.progress or 'starting'}{at}."
    job = f"The job {status.job} is about to start." if status.job else "The job is about to be made."
    return ConditionStatus.FALSE, "Pending", job


def failure_told(stands: Optimization) -> str:
    """The failure of the last run, with what to do and what happens next."""
    status, failure = stands.status, stands.status.failure
    if failure is None:
        return ""
    parts = [sentence(failure.message), sentence(failure.remedy)]
    if status.retry_after is not None:
        parts.append(f"Run {status.attempts} failed; the next one starts at {status.retry_after}.")
    elif stands.failed:
        runs = f"after {status.attempts} runs" if status.attempts > 1 else "and is not tried again by itself"
        parts.append(
            f"It was given up {runs}: a changed spec starts anew, and so does "
            f"kubectl delete optimizedmodel {stands.name}."
        )
    return " ".join(filter(None, parts))


def _moment(text: str | None) -> datetime | None:
    return None if text is None else datetime.fromisoformat(text)


def find(models: Iterable[OptimizedModelFacts], name: str) -> OptimizedModelFacts | None:
    """The one of this name."""
    return next((facts for facts in models if name and facts.name == name), None)
