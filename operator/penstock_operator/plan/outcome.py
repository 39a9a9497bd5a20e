"""What became of one run of an optimisation job: still under way, succeeded, or failed, and whether to try again.

Most failures the job tells itself, in its termination message. The others (killed for memory, evicted, node gone, out
of time) are read off the pod and the Job, and put into the same words.
"""

from __future__ import annotations

from dataclasses import dataclass

from penstock.errors import ArtefactError
from penstock.resources.job_summary import Failure, Summary
from penstock_operator.plan.conditions import clipped
from penstock_operator.plan.observed import JobFacts, PodFacts

OUT_OF_MEMORY = "OutOfMemory"
KILLED = 137
"""Exit code of a process that was ended by SIGKILL."""
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
class Running:
    """Under way, or about to be."""

    started: bool
    """False while the pod has no node, or its container does not run."""
    waiting: str = ""
    """What it waits for, in plain words; empty when nothing is wrong."""
    unschedulable: str = ""
    """The scheduler's words while no node fits."""


@dataclass(frozen=True)
class Succeeded:
    """The artefact is published."""

    summary: Summary


@dataclass(frozen=True)
class Failed:
    """It ended without a result."""

    failure: Failure
    baseline: Summary | None = None
    """The summary, when it told of a published fp32 artefact."""


Outcome = Running | Succeeded | Failed


def outcome(job: JobFacts) -> Outcome:
    """What became of this job."""
    pod = job.pod
    if pod is None:
        return _without_pod(job)
    message = pod.container.termination_message
    if pod.phase in {"Succeeded", "Failed"} or job.complete or job.failed:
        return _ended(job, pod, message)
    if pod.deleting:
        return _failed("Interrupted", f"the job's pod {pod.name} is being deleted", "", retryable=True)
    started = bool(pod.node) and pod.phase == "Running" and not pod.container.waiting_reason
    return Running(started, waiting(pod), pod.unschedulable)


def waiting(pod: PodFacts) -> str:
    """Why the container of this pod does not run, in plain words with what to do; empty when it is nothing unusual."""
    reason, told = pod.container.waiting_reason, pod.container.waiting_message
    if reason in {"ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull"}:
        return (
            f"the image of the pod {pod.name} cannot be pulled ({told or reason}): check the image's name in the "
            "operator's settings and spec.pod.imagePullSecrets"
        )
    if reason in {"CreateContainerConfigError", "CreateContainerError", "RunContainerError"}:
        return f"the container of the pod {pod.name} cannot be made: {told or reason}"
    return ""


def _without_pod(job: JobFacts) -> Outcome:
    if job.failed == "DeadlineExceeded":
        return _timed_out(job.failed_message)
    if job.failed:
        return _failed(
            "Interrupted",
            f"the job {job.name} failed and its pod is gone ({job.failed_message or job.failed})",
            "",
            retryable=True,
        )
    if job.complete:
        return _failed(
            "ResultLost", f"the pod of the job {job.name} was deleted before its result was read", "", retryable=True
        )
    return Running(started=False)


def _ended(job: JobFacts, pod: PodFacts, message: str) -> Outcome:
    summary: Summary | None = None
    unread = ""
    if message:
        try:
            summary = Summary.from_message(message)
        except ArtefactError as error:
            unread = error.message
    if summary is not None and summary.failure is None:
        return Succeeded(summary)
    if summary is not None and summary.failure is not None:
        return Failed(summary.failure, summary if summary.baseline is not None else None)
    return _silent(job, pod, unread)


def _silent(job: JobFacts, pod: PodFacts, unread: str) -> Failed:
    """It ended and told nothing that can be read: what killed it?"""
    container = pod.container
    told = f": {pod.message}" if pod.message else ""
    if container.ended_reason == "OOMKilled" or (
        container.exit_code == KILLED and not pod.reason and not pod.disruption
    ):
        return _failed(
            OUT_OF_MEMORY,
            f"the optimisation was killed: it needed more memory than its pod {pod.name} has",
            "Raise spec.pod.memory of the endpoint",
            retryable=True,
        )
    if pod.reason == "DeadlineExceeded" or job.failed == "DeadlineExceeded":
        return _timed_out(pod.message)
    if pod.reason == "SMTAlignmentError":
        return _failed(
            "SMTAlignmentError",
            f"the node {pod.node} gives out whole cores only, and the pod asked for half of one{told}",
            "Set threadsPerCore of the HardwareClass to what its nodes have",
            retryable=False,
        )
    gone = {pod.reason, pod.disruption}
    if gone & _NODE_GONE:
        return _failed("NodeGone", f"the node {pod.node or 'of the job'} went away{told}", "", retryable=True)
    if gone & _EVICTED:
        return _failed(
            "Evicted",
            f"the pod {pod.name} was evicted from {pod.node or 'its node'}{told}",
            "If it comes again, give the pods a priority class (spec.pod.priorityClassName), or their node more room",
            retryable=True,
        )
    if pod.reason in _REFUSED_BY_NODE:
        return _failed(
            "RefusedByNode", f"the node {pod.node} did not take the pod ({pod.reason}){told}", "", retryable=True
        )
    if container.exit_code == 0:
        return _failed("ResultLost", unread or "the job ended well and left no summary", "", retryable=True)
    code = "an unknown code" if container.exit_code is None else f"code {container.exit_code}"
    return _failed(
        "JobCrashed",
        f"the job's process ended with {code}" + (f"; {unread}" if unread else told),
        f"Look into the log: kubectl logs {pod.name}",
        retryable=True,
    )


def _timed_out(told: str) -> Failed:
    return _failed(
        "TimedOut",
        "the job was ended because it took far longer than its budget" + (f" ({told})" if told else ""),
        "If it comes again, raise spec.optimization.budgetSeconds, or see whether the download hangs",
        retryable=True,
    )


def _failed(reason: str, message: str, remedy: str, *, retryable: bool) -> Failed:
    return Failed(Failure(reason=reason, message=clipped(message, 2048), remedy=remedy, retryable=retryable))
