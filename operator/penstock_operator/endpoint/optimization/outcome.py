"""The outcome of an optimisation job: running, succeeded with a result, or failed for a reason.

The result comes from the termination message alone: texts of a model may occur in the log. A job reports most failures
there too. Other failures (killed for lack of memory, evicted, node lost, deadline exceeded) are derived from the pod
and the Job.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from penstock.artefact_store import Digest, StoreUri
from penstock.errors import ArtefactError
from penstock.resources.job_summary import Failure, Summary
from penstock.resources.optimized_model import OptimizedModelStatus, Phase
from penstock.resources.result import ArtefactReference
from penstock_operator.endpoint.pods.judging import waiting
from penstock_operator.facts.findings import clipped, sentence, unprintable_as_spaces
from penstock_operator.facts.pod_data import MESSAGE_MAX_BYTES, read_json
from penstock_operator.facts.pods import JobFacts, PodFacts
from penstock_operator.facts.reasons import Reason

KILLED = 137
"""Exit code of a process that SIGKILL ended."""
_NODE_GONE = {"NodeLost", "NodeShutdown", "Shutdown", "Terminated", "DeletionByTaintManager", "DeletionByPodGC"}
_EVICTED = {"Evicted", "PreemptionByScheduler", "EvictionByEvictionAPI", "TerminationByKubelet", "Preempting"}
_REFUSED_BY_NODE = {
    "OutOfcpu",
    "OutOfmemory",
    "OutOfpods",
    "UnexpectedAdmissionError",
    "NodeAffinity",
    "TopologyAffinityError",
}


@dataclass(frozen=True)
class JobRunning:
    """The job runs or is about to."""

    started: bool
    """False while the pod has no node, or its container does not run."""
    waiting: str = ""
    """The reason for waiting; empty when nothing is wrong."""
    unschedulable: str = ""
    """The scheduler's message while no node fits."""


@dataclass(frozen=True)
class JobSucceeded:
    """The artefact is published."""

    summary: Summary


@dataclass(frozen=True)
class JobFailed:
    """The job ended without a result."""

    failure: Failure
    baseline: Summary | None = None
    """The summary, when it reports a published fp32 artefact."""


JobOutcome = JobRunning | JobSucceeded | JobFailed


def checked_outcome(job: JobFacts, store: StoreUri) -> JobOutcome:
    """The outcome of this job. A result counts only if it is directly in `store`, where the job had to publish.

    Otherwise a job that runs foreign code could name an artefact of another namespace, and pods would serve it.
    """
    outcome = job_outcome(job)
    if isinstance(outcome, JobSucceeded) and not lies_in(store, outcome.summary.artefact):
        return _failed(
            Reason.RESULT_LOST,
            f"the job {job.name} did not publish its result in {store}: the settings of the store have changed since "
            "it started",
            "",
            retryable=True,
        )
    return outcome


def lies_in(store: StoreUri, artefact: ArtefactReference | None) -> bool:
    """Whether an artefact is directly in this store."""
    return artefact is not None and artefact.uri == store.of(Digest.parse(artefact.digest))


def job_outcome(job: JobFacts) -> JobOutcome:
    """The outcome of this job."""
    pod = job.pod
    if pod is None:
        return _without_pod(job)
    message = pod.container.termination_message
    if pod.phase in {"Succeeded", "Failed"} or job.complete or job.failed:
        return _ended(job, pod, message)
    if pod.deleting:
        return _failed(Reason.INTERRUPTED, f"the job's pod {pod.name} is being deleted", "", retryable=True)
    started = bool(pod.node) and pod.phase == "Running" and not pod.container.waiting_reason
    return JobRunning(started, waiting(pod), pod.unschedulable)


def _without_pod(job: JobFacts) -> JobOutcome:
    if job.failed == "DeadlineExceeded":
        return _timed_out(job.failed_message)
    if job.failed:
        return _failed(
            Reason.INTERRUPTED,
            f"the job {job.name} failed and its pod is gone ({job.failed_message or job.failed})",
            "",
            retryable=True,
        )
    if job.complete:
        return _failed(
            Reason.RESULT_LOST,
            f"the pod of the job {job.name} was deleted before its result was read",
            "",
            retryable=True,
        )
    return JobRunning(started=False)


def _ended(job: JobFacts, pod: PodFacts, message: str) -> JobOutcome:
    summary: Summary | None = None
    unread = ""
    if message:
        try:
            summary = Summary.from_message(message, read=partial(read_json, max_bytes=MESSAGE_MAX_BYTES))
        except ArtefactError as error:
            unread = unprintable_as_spaces(error.message)
    if summary is not None and summary.failure is None:
        return JobSucceeded(summary)
    if summary is not None and summary.failure is not None:
        return JobFailed(summary.failure, summary if summary.baseline is not None else None)
    return _without_summary(job, pod, unread)


def _without_summary(job: JobFacts, pod: PodFacts, unread: str) -> JobFailed:
    """The outcome of a job without a readable summary, from the pod and the Job."""
    container = pod.container
    detail = f": {pod.message}" if pod.message else ""
    if container.ended_reason == "OOMKilled" or (
        container.exit_code == KILLED and not pod.reason and not pod.disruption
    ):
        return _failed(
            Reason.OUT_OF_MEMORY,
            f"the optimisation was killed: it needed more memory than its pod {pod.name} has",
            "Raise spec.pod.memory of the endpoint",
            retryable=True,
        )
    if pod.reason == "DeadlineExceeded" or job.failed == "DeadlineExceeded":
        return _timed_out(pod.message)
    if pod.reason == "SMTAlignmentError":
        return _failed(
            Reason.SMT_ALIGNMENT_ERROR,
            f"the node {pod.node} gives out whole cores only, and the pod asked for half of one{detail}",
            "Set threadsPerCore of the HardwareClass to what its nodes have",
            retryable=False,
        )
    gone = {pod.reason, pod.disruption}
    if gone & _NODE_GONE:
        return _failed(Reason.NODE_GONE, f"the node {pod.node or 'of the job'} went away{detail}", "", retryable=True)
    if gone & _EVICTED:
        return _failed(
            Reason.EVICTED,
            f"the pod {pod.name} was evicted from {pod.node or 'its node'}{detail}",
            "If it comes again, give the pods a priority class (spec.pod.priorityClassName), or their node more room",
            retryable=True,
        )
    if pod.reason in _REFUSED_BY_NODE:
        return _failed(
            Reason.REFUSED_BY_NODE,
            f"the node {pod.node} did not take the pod ({pod.reason}){detail}",
            "",
            retryable=True,
        )
    if container.exit_code == 0:
        return _failed(Reason.RESULT_LOST, unread or "the job ended well and left no summary", "", retryable=True)
    code = "an unknown code" if container.exit_code is None else f"code {container.exit_code}"
    return _failed(
        Reason.JOB_CRASHED,
        f"the job's process ended with {code}" + (f"; {unread}" if unread else detail),
        f"Look into the log: kubectl logs {pod.name}",
        retryable=True,
    )


def _timed_out(detail: str) -> JobFailed:
    return _failed(
        Reason.TIMED_OUT,
        "the job was ended because it took far longer than its budget" + (f" ({detail})" if detail else ""),
        "If it comes again, raise spec.optimization.budgetSeconds, or see whether the download hangs",
        retryable=True,
    )


def _failed(reason: str, message: str, remedy: str, *, retryable: bool) -> JobFailed:
    return JobFailed(Failure(reason=reason, message=clipped(message, 2048), remedy=remedy, retryable=retryable))


def failure_text(name: str, status: OptimizedModelStatus) -> str:
    """The failure of the last run of an OptimizedModel, the next action, and whether it is retried."""
    failure = status.failure
    if failure is None:
        return ""
    parts = [sentence(failure.message), sentence(failure.remedy)]
    if status.retry_after is not None:
        parts.append(f"Run {status.attempts} failed; the next one starts at {status.retry_after}.")
    elif status.phase is Phase.FAILED:
        runs = f"after {status.attempts} runs" if status.attempts > 1 else "and is not tried again by itself"
        parts.append(
            f"It was given up {runs}: a changed spec starts anew, and so does kubectl delete optimizedmodel {name}."
        )
    return " ".join(filter(None, parts))
