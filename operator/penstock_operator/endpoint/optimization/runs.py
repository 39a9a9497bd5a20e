"""The runs of an OptimizedModel's job: how the last one ended, and whether and when the next one begins."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any

from pydantic import ValidationError

from penstock.artefact_store import StoreUri
from penstock.resources.conditions import timestamp
from penstock.resources.hardware_class import HardwareClassSpec
from penstock.resources.job_summary import Failure
from penstock.resources.optimized_model import OptimizedModelStatus, Phase
from penstock.resources.result import ArtefactReference
from penstock_operator.endpoint.optimization.job import job, job_policy
from penstock_operator.endpoint.optimization.model import OptimizationState
from penstock_operator.endpoint.optimization.outcome import (
    JobFailed,
    JobOutcome,
    JobRunning,
    JobSucceeded,
    checked_outcome,
    job_outcome,
    lies_in,
)
from penstock_operator.endpoint.snapshot import REPORT_SECONDS, EndpointSnapshot, Part
from penstock_operator.endpoint.spec import ParsedEndpoint
from penstock_operator.facts.findings import Event, clipped
from penstock_operator.facts.installation import PlanSettings
from penstock_operator.facts.names import Json, Ref, job_name, moment
from penstock_operator.facts.pods import JobFacts
from penstock_operator.facts.reasons import Reason
from penstock_operator.facts.workloads import OptimizedModelFacts
from penstock_operator.limits.concurrency import Line, SlotDecision, SlotKey

PROGRESS_SECONDS = 5.0
"""Interval between plans while a job runs, to show its progress."""
MAX_DOUBLINGS = 3
"""How often the memory of a job is doubled after it ran out of memory."""


def next_run(
    initial: OptimizationState,
    facts: OptimizedModelFacts,
    store: StoreUri,
    *,
    now: datetime,
    settings: PlanSettings,
    suspended: bool = False,
    line: Line | None = None,
    namespace: str = "",
) -> OptimizationState:
    """The state of an OptimizedModel without a result after its last run, and the next run.

    `store`: where its jobs publish. Only artefacts that they published there are taken into its status. The next run
    begins only if `line`, if there is one, allows it; `namespace` is the namespace of the OptimizedModel.
    """
    before = initial.status
    jobs = sorted((job for job in facts.jobs if job.attempt), key=lambda job: job.attempt)
    if jobs and jobs[-1].attempt >= before.attempts:
        state = _from_job(initial, store, jobs, now, settings)
    else:
        state = _without_job(initial, jobs, now, settings)
    pending = {"phase": Phase.PENDING, "progress": "", "stage": ""}
    if suspended and state.start:
        state = replace(initial, status=before.model_copy(update=pending))
    elif state.start and line is not None:
        slot = line.slot(SlotKey(namespace, facts.name), state.due or facts.created or now)
        state = replace(state, slot=slot)
        if not slot.allowed:
            state = _queued(state, before, slot)
    return state


def run_part(
    state: OptimizationState,
    facts: OptimizedModelFacts,
    endpoint: ParsedEndpoint,
    observed: EndpointSnapshot,
    hardware: HardwareClassSpec,
) -> tuple[OptimizationState, Part]:
    """The objects of the next run, and when to look at a run again."""
    apply: tuple[Json, ...] = ()
    delete: tuple[Ref, ...] = ()
    requeue = () if state.requeue_seconds is None else (state.requeue_seconds,)
    if state.start and (left := Ref("Job", job_name(state.name, state.start))) in observed.present:
        # Of a deleted OptimizedModel of this name. An apply would take it over with its result, faster than the API
        # server deletes it.
        delete, requeue = (left,), (*requeue, REPORT_SECONDS)
        state = replace(state, start=0)
    if state.start:
        apply = (
            job_policy(state, facts, endpoint, observed.settings),
            job(state, facts, endpoint, hardware, observed.settings),
        )
    if endpoint.spec.suspend and state.running is not None:
        delete += ended_jobs(facts, endpoint, observed)
    if state.running is not None and state.status.phase is Phase.OPTIMIZING:
        requeue = (*requeue, PROGRESS_SECONDS)
    return state, Part(apply=apply, delete=delete, requeue=requeue, events=_started(state))


def ended_jobs(facts: OptimizedModelFacts, endpoint: ParsedEndpoint, observed: EndpointSnapshot) -> tuple[Ref, ...]:
    """The jobs of an OptimizedModel to delete, because this endpoint, its only user, does not want their result."""
    if any(user.uid != endpoint.uid for user in facts.users):
        return ()
    jobs = (Ref("Job", one.name) for one in facts.jobs)
    return tuple(ref for ref in jobs if ref in observed.present)


def _started(wanted: OptimizationState) -> tuple[Event, ...]:
    if not wanted.start:
        return ()
    which = "" if wanted.start == 1 else f", run {wanted.start}"
    return (Event("Normal", Reason.OPTIMIZATION_STARTED, f"The job {wanted.status.job} is created{which}."),)


def _queued(state: OptimizationState, before: OptimizedModelStatus, slot: SlotDecision) -> OptimizationState:
    """The state in which the run that was to begin waits. The next plan finds the same run and the same time."""
    update: dict[str, Any] = {"attempts": before.attempts, "job": before.job}
    if state.due is not None:
        last = state.start - 1
        update = {"attempts": last, "job": job_name(state.name, last), "retry_after": timestamp(state.due)}
    status = state.status.model_copy(update=update)
    return replace(state, status=status, start=0, running=None, requeue_seconds=slot.requeue_seconds, slot=slot)


def _from_job(
    initial: OptimizationState, store: StoreUri, jobs: list[JobFacts], now: datetime, settings: PlanSettings
) -> OptimizationState:
    last = jobs[-1]
    outcome = checked_outcome(last, store)
    known = initial.status.model_copy(
        update={
            "attempts": last.attempt,
            "job": last.name,
            "retry_after": None,
            # The first baseline stays: it may be serving, and another run's would be the same.
            "baseline": initial.status.baseline or _baseline(last, outcome, store),
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
        return _after_failure(replace(initial, status=known), jobs, last.ended or now, now, settings)
    progress = last.report.progress
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


def superfluous_jobs(facts: OptimizedModelFacts) -> list[JobFacts]:
    """The jobs that run although there is a result: the status was restored from a backup after they had begun."""
    return [one for one in facts.jobs if isinstance(job_outcome(one), JobRunning) and not one.deleting]
