"""Pods and Jobs as plans see them: the facts of the API objects, a runtime's `/info`, a job's log, and a job's outcome.

A job reports most failures itself, in its termination message. Others (killed for lack of memory, evicted, node lost,
deadline exceeded) are derived from the pod and the Job.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any

from penstock.errors import ArtefactError
from penstock.resources.job_summary import Failure, Summary
from penstock.resources.text_fields import is_quantity, parse_quantity
from penstock_operator.plan.conditions import Reason, clipped
from penstock_operator.plan.installation import Json
from penstock_operator.plan.names import ARTEFACT, ATTEMPT, CONTAINER, OPTIMIZED_MODEL, TEMPLATE_HASH

Object = Mapping[str, Any]
"""An object of the API as JSON."""


@dataclass(frozen=True)
class ContainerFacts:
    """The one container of a pod."""

    ready: bool = False
    restarts: int = 0
    waiting_reason: str = ""
    """Such as `CrashLoopBackOff`, `ImagePullBackOff`, `CreateContainerConfigError`."""
    waiting_message: str = ""
    ended_reason: str = ""
    """Of the last run that ended: `OOMKilled`, `Error`, `Completed`."""
    exit_code: int | None = None
    termination_message: str = ""
    """Of the last run that ended."""

    @classmethod
    def from_pod(cls, pod: Object) -> ContainerFacts:
        """Extract the facts from a pod object; all defaults while it has no container status."""
        statuses = (pod.get("status") or {}).get("containerStatuses") or []
        status = next((entry for entry in statuses if entry.get("name") == CONTAINER), None)
        if status is None:
            return cls()
        state, last = status.get("state") or {}, status.get("lastState") or {}
        waiting = state.get("waiting") or {}
        ended = state.get("terminated") or last.get("terminated") or {}
        return cls(
            ready=bool(status.get("ready")),
            restarts=int(status.get("restartCount") or 0),
            waiting_reason=waiting.get("reason") or "",
            waiting_message=waiting.get("message") or "",
            ended_reason=ended.get("reason") or "",
            exit_code=ended.get("exitCode"),
            termination_message=ended.get("message") or "",
        )


@dataclass(frozen=True)
class PodFacts:
    """A runtime pod or the pod of a job."""

    name: str
    uid: str = ""
    node: str = ""
    ip: str = ""
    phase: str = "Pending"
    reason: str = ""
    """Of the pod itself: `Evicted`, `NodeLost`, `SMTAlignmentError`, `UnexpectedAdmissionError`."""
    message: str = ""
    qos: str = ""
    deleting: bool = False
    created: datetime | None = None
    ready: bool = False
    """The Ready condition."""
    ready_since: datetime | None = None
    """When it became ready; None while it is not."""
    unschedulable: str = ""
    """The scheduler's message while no node fits."""
    disruption: str = ""
    """Reason of the DisruptionTarget condition: `PreemptionByScheduler`, `EvictionByEvictionAPI`,
    `TerminationByKubelet`, `DeletionByTaintManager`."""
    container: ContainerFacts = ContainerFacts()
    cpus: int = 0
    """CPUs that its container requests; 0 for less than one."""
    owner: str = ""
    """The name of the controlling ReplicaSet or Job."""
    template: str = ""
    """The operator's hash of the pod template that it was created from (annotation)."""
    artefact: str = ""
    """`sha256:...` of the artefact that it serves (annotation); empty in jobs."""
    optimized_model: str = ""
    attempt: int = 0
    """Jobs only."""

    @classmethod
    def from_object(cls, pod: Object) -> PodFacts:
        """Extract the facts of a pod object."""
        metadata, status = pod["metadata"], pod.get("status") or {}
        labels, annotations = metadata.get("labels") or {}, metadata.get("annotations") or {}
        conditions = {entry.get("type"): entry for entry in status.get("conditions") or []}
        scheduled, disrupted = conditions.get("PodScheduled") or {}, conditions.get("DisruptionTarget") or {}
        readiness = conditions.get("Ready") or {}
        is_ready = readiness.get("status") == "True"
        return cls(
            name=metadata["name"],
            uid=metadata.get("uid") or "",
            node=(pod.get("spec") or {}).get("nodeName") or "",
            ip=status.get("podIP") or "",
            phase=status.get("phase") or "Pending",
            reason=status.get("reason") or "",
            message=status.get("message") or "",
            qos=status.get("qosClass") or "",
            deleting="deletionTimestamp" in metadata,
            created=moment(metadata.get("creationTimestamp")),
            ready=is_ready,
            ready_since=moment(readiness.get("lastTransitionTime")) if is_ready else None,
            unschedulable=(scheduled.get("message") or "") if scheduled.get("reason") == "Unschedulable" else "",
            disruption=(disrupted.get("reason") or "") if disrupted.get("status") == "True" else "",
            container=ContainerFacts.from_pod(pod),
            cpus=_whole_cpus(pod.get("spec") or {}),
            owner=next(
                (entry["name"] for entry in metadata.get("ownerReferences") or [] if entry.get("controller")), ""
            ),
            template=annotations.get(TEMPLATE_HASH) or "",
            artefact=annotations.get(ARTEFACT) or "",
            optimized_model=labels.get(OPTIMIZED_MODEL) or "",
            attempt=number(labels.get(ATTEMPT)),
        )


@dataclass(frozen=True)
class HostReport:
    """What a runtime pod reports about its host: `host` of its `/info`."""

    cpus: tuple[int, ...] = ()
    """CPUs where it may run: cpuset and affinity."""
    quota: float | None = None
    """CFS quota in CPUs; None without a limit."""
    granted: int = 0
    """Physical cores in use."""
    pinned: bool = False
    """Its own check: a cpuset of exactly its cores, not the whole machine, no quota below them."""
    findings: tuple[str, ...] = ()
    cpu: Json = field(default_factory=dict)
    """`penstock.hardware.CpuIdentity` as JSON."""
    measured_on: Json = field(default_factory=dict)
    """The processor that the artefact was measured on, in the same form."""
    artefact_key: str = ""
    plan: str = ""
    """Summary of the served plan."""
    tokens: int | None = None
    """Number of bearer tokens that it accepts; None: requests need none."""

    @classmethod
    def from_info(cls, info: Object) -> HostReport | None:
        """Parse `/info`; None while the process has not inspected its host, or for JSON of another form."""
        try:
            return cls._from_info(info)
        except (TypeError, ValueError, AttributeError):  # any program may listen on that port
            return None

    @classmethod
    def _from_info(cls, info: Object) -> HostReport | None:
        host = info.get("host")
        if not host:
            return None
        cores, artefact = host.get("cores") or {}, info.get("artefact") or {}
        tokens = (info.get("access") or {}).get("tokens")
        return cls(
            cpus=tuple(map(int, host.get("cpus_allowed") or ())),
            quota=host.get("quota"),
            granted=int(cores.get("granted") or 0),
            pinned=bool(cores.get("pinned")),
            findings=tuple(cores.get("findings") or ()),
            cpu=dict(host.get("cpu") or {}),
            measured_on=dict(artefact.get("cpu") or {}),
            artefact_key=artefact.get("key") or "",
            plan=(info.get("plan") or {}).get("summary") or "",
            tokens=None if tokens is None else int(tokens),
        )


@dataclass(frozen=True)
class RuntimePod:
    """A runtime pod and its report."""

    pod: PodFacts
    report: HostReport | None = None
    report_problem: str = ""
    """Why `/info` could not be read."""

    @classmethod
    def from_object(cls, pod: Object, info: Object | None = None, problem: str = "") -> RuntimePod:
        """Extract the facts of a pod object and of its `/info`."""
        return cls(PodFacts.from_object(pod), None if info is None else HostReport.from_info(info), problem)


def moment(text: str | None) -> datetime | None:
    """A time of the API, such as `2026-11-21T19:30:00Z`; None for an empty value."""
    return datetime.fromisoformat(text) if text else None


def _whole_cpus(spec: Object) -> int:
    for container in spec.get("containers") or []:
        if container.get("name") == CONTAINER:
            asked = str(((container.get("resources") or {}).get("requests") or {}).get("cpu") or "")
            return int(parse_quantity(asked)) if is_quantity(asked) else 0
    return 0


def number(text: str | None) -> int:
    """The number in a label; 0 when it is not a number."""
    return int(text) if text and text.isdigit() else 0


@dataclass(frozen=True)
class JobProgress:
    """The newest progress line of a job's log."""

    done: int
    of: int
    stage: str = ""
    message: str = ""

    @property
    def summary(self) -> str:
        """Such as `7/23`."""
        return f"{self.done}/{self.of}"


@dataclass(frozen=True)
class JobLog:
    """What the tail of a job's log contains."""

    progress: JobProgress | None = None
    baseline_digest: str = ""
    """`sha256:...` of the fp32 artefact, once it is published."""
    baseline_uri: str = ""
    baseline_bytes: int | None = None
    """None: the log does not state it."""

    @classmethod
    def from_lines(cls, text: str) -> JobLog:
        """Parse JSON lines; lines that are not the job's own (a library's output, a truncated line) are skipped."""
        log = cls()
        for line in text.splitlines():
            try:
                value = json.loads(line)
            except ValueError:
                continue
            if not isinstance(value, dict):
                continue
            done, of, digest = value.get("done"), value.get("of"), value.get("digest")
            if value.get("event") == "progress" and isinstance(done, int) and isinstance(of, int):
                stage, message = str(value.get("stage") or ""), str(value.get("message") or "")
                log = replace(log, progress=JobProgress(done, of, stage, message))
            elif value.get("event") == "baseline" and isinstance(digest, str):
                size = value.get("bytes")
                uri, known = str(value.get("uri") or ""), size if isinstance(size, int) and size >= 0 else None
                log = replace(log, baseline_digest=digest, baseline_uri=uri, baseline_bytes=known)
        return log


@dataclass(frozen=True)
class JobFacts:
    """An optimisation Job with its pod."""

    name: str
    attempt: int
    uid: str = ""
    created: datetime | None = None
    complete: bool = False
    failed: str = ""
    """Reason of the Failed condition: `DeadlineExceeded`, `BackoffLimitExceeded`; empty: it has not failed."""
    failed_message: str = ""
    ended: datetime | None = None
    """When it completed or failed."""
    deleting: bool = False
    pod: PodFacts | None = None
    log: JobLog = JobLog()

    @classmethod
    def from_object(cls, job: Object, pod: Object | None = None, log: str = "") -> JobFacts:
        """Extract the facts of a Job object, its (newest) pod and the tail of that pod's log."""
        metadata, status = job["metadata"], job.get("status") or {}
        true = {entry["type"]: entry for entry in status.get("conditions") or [] if entry.get("status") == "True"}
        failed = true.get("Failed") or {}
        end = true.get("Complete") or failed
        return cls(
            name=metadata["name"],
            attempt=number((metadata.get("labels") or {}).get(ATTEMPT)),
            uid=metadata.get("uid") or "",
            created=moment(metadata.get("creationTimestamp")),
            complete="Complete" in true,
            failed=(failed.get("reason") or "Failed") if failed else "",
            failed_message=failed.get("message") or "",
            ended=moment(end.get("lastTransitionTime")),
            deleting="deletionTimestamp" in metadata,
            pod=None if pod is None else PodFacts.from_object(pod),
            log=JobLog.from_lines(log),
        )


IMAGE_PULL_REASONS = frozenset({"ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull"})
"""Waiting reasons of a container whose image cannot be pulled."""
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
    """What it waits for; empty when nothing is wrong."""
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


def waiting(pod: PodFacts) -> str:
    """Why the container of this pod does not start, with the next action; empty when nothing is wrong."""
    reason, detail = pod.container.waiting_reason, pod.container.waiting_message
    if reason in IMAGE_PULL_REASONS:
        return (
            f"the image of the pod {pod.name} cannot be pulled ({detail or reason}): check the image's name in the "
            "operator's settings and spec.pod.imagePullSecrets"
        )
    if reason in {"CreateContainerConfigError", "CreateContainerError", "RunContainerError"}:
        return f"the container of the pod {pod.name} cannot be created: {detail or reason}"
    return ""


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
            summary = Summary.from_message(message)
        except ArtefactError as error:
            unread = error.message
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
