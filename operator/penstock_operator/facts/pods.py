"""Pods and Jobs as plain values: the API objects, a runtime's `/info` and a job's `/progress`."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Annotated, Any, TypeGuard

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from penstock.resources.fields.text_fields import is_quantity, parse_quantity
from penstock.resources.result import CapacityFacts
from penstock.vector_space import SPACE_PATTERN
from penstock_operator.facts.findings import clipped
from penstock_operator.facts.names import (
    ARTEFACT,
    ATTEMPT,
    CONTAINER,
    OPTIMIZED_MODEL,
    TEMPLATE_HASH,
    Json,
    Object,
    Owner,
    moment,
)
from penstock_operator.facts.pod_data import MESSAGE_MAX_BYTES, Unreadable, first_problem


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
            termination_message=(ended.get("message") or "")[:MESSAGE_MAX_BYTES],
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
    owner: Owner = field(default_factory=Owner)
    """The controlling ReplicaSet or Job."""
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
            owner=Owner.of(metadata),
            template=annotations.get(TEMPLATE_HASH) or "",
            artefact=annotations.get(ARTEFACT) or "",
            optimized_model=labels.get(OPTIMIZED_MODEL) or "",
            attempt=number(labels.get(ATTEMPT)),
        )


@dataclass(frozen=True)
class LiveReport:
    """What a pod's guard of live traffic has found. Of two digits, so that plans follow changes that matter only."""

    answers: int = 0
    """Compared with fp32's."""
    evidence: float = 1.0
    """That they are worse than those that judged the plan."""
    check: float = 1.0
    """Evidence that the comparison itself is wrong."""


@dataclass(frozen=True)
class HostReport:
    """A runtime pod's report about its host: `host` of its `/info`."""

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
    plan: str = ""
    """Summary of the served plan."""
    tokens: int | None = None
    """Number of bearer tokens that it accepts; None: requests need none."""
    space: str = ""
    """The identifier of its vector space; empty: it states none."""
    live: LiveReport | None = None
    """What its guard of live traffic has found; None: it compares nothing."""
    capacity: CapacityFacts | None = None
    """What a replica takes, as this one measured it before it was ready; None: it did not."""
    measures_capacity: bool = False
    """It measures that now, or is about to."""
    capacity_problem: str = ""
    """Why it did not measure it."""

    @classmethod
    def from_info(cls, info: object) -> HostReport | None:
        """Take the report from `/info` (JSON); None while the process has not inspected its host.

        Unreadable when it has another form: any program may listen on that port.
        """
        try:
            found = _Info.model_validate(info)
        except ValidationError as error:
            raise Unreadable(first_problem(error)) from None
        host, artefact = found.host, found.artefact or _Artefact()
        if host is None or not host.model_fields_set:
            return None
        cores, capacity = host.cores or _Cores(), found.capacity or _Capacity()
        return cls(
            cpus=host.cpus_allowed,
            quota=host.quota,
            granted=cores.granted,
            pinned=cores.pinned,
            findings=cores.findings,
            cpu=host.cpu or {},
            measured_on=artefact.cpu or {},
            plan=(found.plan or _Plan()).summary,
            tokens=(found.access or _Access()).tokens,
            space=(found.vector_space or _Space()).id,
            live=None if found.live_guard is None else found.live_guard.report,
            capacity=capacity.facts,
            measures_capacity=capacity.state in {"pending", "measuring"},
            capacity_problem=clipped(capacity.message, 256) if capacity.state == "failed" else "",
        )


MAX_CPUS = 8192
"""CPUs of one machine: the limit of the Linux kernel."""
Cpu = Annotated[int, Field(ge=0, lt=MAX_CPUS)]


class _Part(BaseModel):
    """A part of `/info`; other fields of it are ignored."""

    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False, hide_input_in_errors=True)


class _Cores(_Part):
    granted: int = Field(default=0, ge=0, le=MAX_CPUS)
    pinned: bool = False
    findings: tuple[str, ...] = ()


class _Host(_Part):
    cpus_allowed: tuple[Cpu, ...] = Field(default=(), max_length=MAX_CPUS)
    quota: float | None = Field(default=None, ge=0)
    cores: _Cores | None = None
    cpu: dict[str, Any] | None = None


class _Artefact(_Part):
    cpu: dict[str, Any] | None = None


class _Plan(_Part):
    summary: str = ""


class _Access(_Part):
    tokens: int | None = Field(default=None, ge=0)


class _Capacity(_Part):
    state: str = ""
    message: str = ""
    facts: CapacityFacts | None = None


class _Space(_Part):
    id: str = Field(default="", pattern=SPACE_PATTERN)


class _Live(_Part):
    answers: int = Field(default=0, ge=0, le=10**15)
    evidence: float = Field(default=1.0, ge=0, le=1e15)
    check_evidence: float = Field(default=1.0, ge=0, le=1e15)

    @property
    def report(self) -> LiveReport:
        """Below 10 evidence is shown as 1, or 0 if it is under 1: nothing follows from it."""
        evidence, check = (
            float(f"{one:.2g}") if one >= 10 else float(one >= 1) for one in (self.evidence, self.check_evidence)
        )
        return LiveReport(int(float(f"{self.answers:.1g}")), evidence, check)


class _Info(_Part):
    live_guard: _Live | None = None
    vector_space: _Space | None = None
    capacity: _Capacity | None = None
    host: _Host | None = None
    access: _Access | None = None
    artefact: _Artefact | None = None
    plan: _Plan | None = None


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


def _whole_cpus(spec: Object) -> int:
    for container in spec.get("containers") or []:
        if container.get("name") == CONTAINER:
            asked = str(((container.get("resources") or {}).get("requests") or {}).get("cpu") or "")
            return int(parse_quantity(asked)) if is_quantity(asked) else 0
    return 0


def number(text: str | None) -> int:
    """The number in a label; 0 when it is not a number of at most nine digits."""
    return int(text) if text and len(text) < 10 and text.isascii() and text.isdigit() else 0


@dataclass(frozen=True)
class JobProgress:
    """The last step that a job reported."""

    done: int
    of: int
    stage: str = ""
    message: str = ""

    @property
    def summary(self) -> str:
        """Such as `7/23`."""
        return f"{self.done}/{self.of}"


@dataclass(frozen=True)
class JobReport:
    """The answer of a running job's pod to `GET /progress`."""

    progress: JobProgress | None = None
    baseline_digest: str = ""
    """`sha256:...` of the fp32 artefact, once it is published."""
    baseline_uri: str = ""
    baseline_bytes: int | None = None
    """None: the report does not have it."""

    @classmethod
    def from_json(cls, value: object) -> JobReport:
        """Extract the report from the parsed answer (`read_json`). Unreadable when it has another form."""
        if not isinstance(value, dict):
            raise Unreadable("it is not an object")
        done, of = value.get("done"), value.get("of")
        if not _is_count(done) or not _is_count(of):
            raise Unreadable("`done` and `of` are not counts")
        report = cls(JobProgress(done, of, str(value.get("stage") or ""), str(value.get("message") or "")))
        baseline = value.get("baseline")
        if baseline is None:
            return report
        digest = baseline.get("digest") if isinstance(baseline, dict) else None
        if not isinstance(digest, str):
            raise Unreadable("`baseline` has no digest")
        size = baseline.get("bytes")
        return replace(
            report,
            baseline_digest=digest,
            baseline_uri=str(baseline.get("uri") or ""),
            baseline_bytes=size if _is_count(size) else None,
        )


def _is_count(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


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
    owner: Owner = field(default_factory=Owner)
    """The OptimizedModel that it was created for."""
    pod: PodFacts | None = None
    report: JobReport = JobReport()

    @classmethod
    def from_object(cls, job: Object, pod: Object | None = None, report: JobReport | None = None) -> JobFacts:
        """Extract the facts of a Job object and its (newest) pod with its report."""
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
            owner=Owner.of(metadata),
            pod=None if pod is None else PodFacts.from_object(pod),
            report=report or JobReport(),
        )


@dataclass(frozen=True)
class Neighbour:
    """A runtime pod of another endpoint (of any namespace) on a node of one of this endpoint's pods."""

    name: str
    namespace: str
    node: str
    cpus: tuple[int, ...] = ()
