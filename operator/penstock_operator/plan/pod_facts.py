"""Pods of ours as plans look at them: what the API says of them, and what a runtime says of its host."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from penstock.resources.text_fields import is_quantity, parse_quantity
from penstock_operator.plan.names import ARTEFACT, ATTEMPT, CONTAINER, OPTIMIZED_MODEL, TEMPLATE_HASH
from penstock_operator.plan.settings import Json

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
        """Of a pod object; all defaults while the kubelet has said nothing."""
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
    """A pod of ours, runtime or job."""

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
    """Since when, while it is ready."""
    unschedulable: str = ""
    """The scheduler's message while it finds no node."""
    disruption: str = ""
    """Reason of the DisruptionTarget condition: `PreemptionByScheduler`, `EvictionByEvictionAPI`,
    `TerminationByKubelet`, `DeletionByTaintManager`."""
    container: ContainerFacts = ContainerFacts()
    cpus: int = 0
    """What its container asks for, in whole CPUs; 0 for less than one."""
    owner: str = ""
    """The name of the controlling ReplicaSet or Job."""
    template: str = ""
    """Our hash of the pod template that it was made from (annotation)."""
    artefact: str = ""
    """`sha256:...` that it serves (annotation); empty in jobs."""
    optimized_model: str = ""
    attempt: int = 0
    """Jobs only."""

    @classmethod
    def from_object(cls, pod: Object) -> PodFacts:
        """Distil a pod object."""
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
    """What a runtime pod says about where it runs: the `host` of its `/info`."""

    cpus: tuple[int, ...] = ()
    """Where it may run: cpuset and affinity."""
    quota: float | None = None
    """CPUs' worth of time; None without a limit."""
    granted: int = 0
    """Physical cores in use."""
    pinned: bool = False
    """Its own judgement: a cpuset of exactly its cores, not the whole machine, no quota that cuts into them."""
    findings: tuple[str, ...] = ()
    cpu: Json = field(default_factory=dict)
    """`penstock.hardware.CpuIdentity` as JSON."""
    measured_on: Json = field(default_factory=dict)
    """The processor that the artefact was measured on, likewise."""
    artefact_key: str = ""
    plan: str = ""
    """The served plan in words."""

    @classmethod
    def from_info(cls, info: Object) -> HostReport | None:
        """Of the JSON of `/info`; None while the process has not looked at its host yet, or for another JSON."""
        try:
            return cls._from_info(info)
        except (TypeError, ValueError, AttributeError):  # whatever listens on that port is not to stop the operator
            return None

    @classmethod
    def _from_info(cls, info: Object) -> HostReport | None:
        host = info.get("host")
        if not host:
            return None
        cores, artefact = host.get("cores") or {}, info.get("artefact") or {}
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
        )


@dataclass(frozen=True)
class RuntimePod:
    """A runtime pod and what it reports."""

    pod: PodFacts
    report: HostReport | None = None
    report_problem: str = ""
    """Why `/info` could not be read, in plain words."""

    @classmethod
    def from_object(cls, pod: Object, info: Object | None = None, problem: str = "") -> RuntimePod:
        """Distil a pod object and the JSON of its `/info`."""
        return cls(PodFacts.from_object(pod), None if info is None else HostReport.from_info(info), problem)


def moment(text: str | None) -> datetime | None:
    """A time of the API, such as `2026-11-21T19:30:00Z`; None for none."""
    return datetime.fromisoformat(text) if text else None


def _whole_cpus(spec: Object) -> int:
    for container in spec.get("containers") or []:
        if container.get("name") == CONTAINER:
            asked = str(((container.get("resources") or {}).get("requests") or {}).get("cpu") or "")
            return int(parse_quantity(asked)) if is_quantity(asked) else 0
    return 0


def number(text: str | None) -> int:
    """A label that is a number; 0 for any other."""
    return int(text) if text and text.isdigit() else 0
