"""Everything that was read from the cluster for one endpoint, as plain values: the only input of `plan`.

The rim reads objects as JSON and hands them over; `from_object` of each class distils what a plan depends on, so that
tests write down facts instead of whole API objects. Nothing here asks the cluster or the clock.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any

from penstock.quantity import is_quantity, parse_quantity
from penstock_operator.plan.names import ARTEFACT, ATTEMPT, CONTAINER, OPTIMIZED_MODEL, TEMPLATE_HASH
from penstock_operator.plan.settings import Json, PlanSettings

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
            ready=(conditions.get("Ready") or {}).get("status") == "True",
            unschedulable=(scheduled.get("message") or "") if scheduled.get("reason") == "Unschedulable" else "",
            disruption=(disrupted.get("reason") or "") if disrupted.get("status") == "True" else "",
            container=ContainerFacts.from_pod(pod),
            owner=next(
                (entry["name"] for entry in metadata.get("ownerReferences") or [] if entry.get("controller")), ""
            ),
            template=annotations.get(TEMPLATE_HASH) or "",
            artefact=annotations.get(ARTEFACT) or "",
            optimized_model=labels.get(OPTIMIZED_MODEL) or "",
            attempt=_number(labels.get(ATTEMPT)),
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
        """Of the JSON of `/info`; None while the process has not looked at its host yet."""
        host = info.get("host")
        if not host:
            return None
        cores, artefact = host.get("cores") or {}, info.get("artefact") or {}
        return cls(
            cpus=tuple(host.get("cpus_allowed") or ()),
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


@dataclass(frozen=True)
class Progress:
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
    """What the tail of a job's log says."""

    progress: Progress | None = None
    baseline_digest: str = ""
    """`sha256:...` of the fp32 artefact, once it is published."""
    baseline_uri: str = ""
    baseline_bytes: int | None = None
    """Where the job says it."""

    @classmethod
    def from_lines(cls, text: str) -> JobLog:
        """Read JSON lines; what is not one of ours (a library's chatter, a line cut in half) is passed over."""
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
                log = replace(log, progress=Progress(done, of, stage, message))
            elif value.get("event") == "baseline" and isinstance(digest, str):
                size = value.get("bytes")
                uri, known = str(value.get("uri") or ""), size if isinstance(size, int) and size >= 0 else None
                log = replace(log, baseline_digest=digest, baseline_uri=uri, baseline_bytes=known)
        return log


@dataclass(frozen=True)
class JobFacts:
    """A Job of ours with its pod, if it has one."""

    name: str
    attempt: int
    uid: str = ""
    created: datetime | None = None
    complete: bool = False
    failed: str = ""
    """Reason of the Failed condition: `DeadlineExceeded`, `BackoffLimitExceeded`; empty: not failed."""
    failed_message: str = ""
    ended: datetime | None = None
    """When it completed or failed."""
    deleting: bool = False
    pod: PodFacts | None = None
    log: JobLog = JobLog()

    @classmethod
    def from_object(cls, job: Object, pod: Object | None = None, log: str = "") -> JobFacts:
        """Distil a Job object, its (newest) pod and the tail of that pod's log."""
        metadata, status = job["metadata"], job.get("status") or {}
        true = {entry["type"]: entry for entry in status.get("conditions") or [] if entry.get("status") == "True"}
        failed = true.get("Failed") or {}
        end = true.get("Complete") or failed
        return cls(
            name=metadata["name"],
            attempt=_number((metadata.get("labels") or {}).get(ATTEMPT)),
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


@dataclass(frozen=True, order=True)
class User:
    """A ModelEndpoint that uses an OptimizedModel: its status names it (`optimizedModel` or `serving`)."""

    name: str
    uid: str


@dataclass(frozen=True)
class OptimizedModelFacts:
    """An OptimizedModel with the jobs that it owns."""

    name: str
    spec: Json
    """As the API has it (`penstock.optimized.OptimizedModelSpec`)."""
    uid: str = ""
    generation: int = 1
    created: datetime | None = None
    deleting: bool = False
    status: Json = field(default_factory=dict)
    jobs: tuple[JobFacts, ...] = ()
    users: tuple[User, ...] = ()
    """The endpoints of the namespace that use it, this one or others."""

    @classmethod
    def from_object(
        cls, value: Object, jobs: tuple[JobFacts, ...] = (), users: tuple[User, ...] = ()
    ) -> OptimizedModelFacts:
        """Distil an OptimizedModel object."""
        metadata = value["metadata"]
        return cls(
            name=metadata["name"],
            spec=dict(value.get("spec") or {}),
            uid=metadata.get("uid") or "",
            generation=int(metadata.get("generation") or 1),
            created=moment(metadata.get("creationTimestamp")),
            deleting="deletionTimestamp" in metadata,
            status=dict(value.get("status") or {}),
            jobs=jobs,
            users=users,
        )


@dataclass(frozen=True)
class DeploymentFacts:
    """The endpoint's Deployment."""

    uid: str = ""
    generation: int = 1
    observed_generation: int = 1
    wanted: int = 1
    """`spec.replicas`."""
    replicas: int = 0
    updated: int = 0
    ready: int = 0
    available: int = 0
    progressing: str = ""
    """Reason of the Progressing condition: `NewReplicaSetAvailable`, `ProgressDeadlineExceeded` ..."""
    failure: str = ""
    """Message of the ReplicaFailure condition (quota, admission); empty: none."""
    deleting: bool = False
    template: str = ""
    """Our hash of its pod template (annotation)."""
    artefact: str = ""
    """`sha256:...` that its pod template serves."""
    optimized_model: str = ""
    """The OptimizedModel that the artefact is from; empty for a pinned one."""

    @classmethod
    def from_object(cls, value: Object) -> DeploymentFacts:
        """Distil a Deployment object."""
        metadata, spec, status = value["metadata"], value["spec"], value.get("status") or {}
        template = spec["template"].get("metadata") or {}
        labels, annotations = template.get("labels") or {}, template.get("annotations") or {}
        conditions = {entry["type"]: entry for entry in status.get("conditions") or []}
        failure = conditions.get("ReplicaFailure") or {}
        wanted = spec.get("replicas")
        return cls(
            uid=metadata.get("uid") or "",
            generation=int(metadata.get("generation") or 1),
            observed_generation=int(status.get("observedGeneration") or 0),
            wanted=1 if wanted is None else int(wanted),
            replicas=int(status.get("replicas") or 0),
            updated=int(status.get("updatedReplicas") or 0),
            ready=int(status.get("readyReplicas") or 0),
            available=int(status.get("availableReplicas") or 0),
            progressing=(conditions.get("Progressing") or {}).get("reason") or "",
            failure=(failure.get("message") or "") if failure.get("status") == "True" else "",
            deleting="deletionTimestamp" in metadata,
            template=annotations.get(TEMPLATE_HASH) or "",
            artefact=annotations.get(ARTEFACT) or "",
            optimized_model=labels.get(OPTIMIZED_MODEL) or "",
        )


@dataclass(frozen=True)
class ReplicaSetFacts:
    """A ReplicaSet of the endpoint's Deployment."""

    name: str
    template: str = ""
    artefact: str = ""
    wanted: int = 0
    ready: int = 0

    @classmethod
    def from_object(cls, value: Object) -> ReplicaSetFacts:
        """Distil a ReplicaSet object."""
        spec, status = value["spec"], value.get("status") or {}
        annotations = ((spec.get("template") or {}).get("metadata") or {}).get("annotations") or {}
        return cls(
            name=value["metadata"]["name"],
            template=annotations.get(TEMPLATE_HASH) or "",
            artefact=annotations.get(ARTEFACT) or "",
            wanted=int(spec.get("replicas") or 0),
            ready=int(status.get("readyReplicas") or 0),
        )


@dataclass(frozen=True)
class Neighbour:
    """A runtime pod of another endpoint, of whatever namespace, on the node of one of this endpoint's."""

    name: str
    namespace: str
    node: str
    cpus: tuple[int, ...] = ()


@dataclass(frozen=True, order=True)
class Ref:
    """An object by kind and name, in the endpoint's namespace."""

    kind: str
    """`Deployment`, `Service`, `PodDisruptionBudget`, `NetworkPolicy`, `ConfigMap`, `Job`, `OptimizedModel`."""
    name: str


@dataclass(frozen=True)
class Scale:
    """What the autoscaler has decided: Internal mode only."""

    replicas: int
    reason: str = ""
    """The figures that it was made from, in one sentence."""
    metrics_available: bool = True
    metrics_message: str = ""
    """Why the load cannot be read, and what to do."""
    requests_per_second: float | None = None
    """The load that was read."""
    capacity_per_replica: float | None = None
    """Requests a second."""


@dataclass(frozen=True)
class Observed:
    """One endpoint and all that belongs to it, at one moment."""

    endpoint: Json
    """The ModelEndpoint object as the API has it, with metadata and status."""
    now: datetime
    """With a time zone."""
    settings: PlanSettings
    hardware_classes: Mapping[str, Json] = field(default_factory=dict)
    """The HardwareClass objects of the cluster, by name: the one of the spec, and of what serves, are looked up."""
    optimized_models: tuple[OptimizedModelFacts, ...] = ()
    """At least that of the spec's key (`optimized_model_name`), and the one that the Deployment serves."""
    deployment: DeploymentFacts | None = None
    replica_sets: tuple[ReplicaSetFacts, ...] = ()
    pods: tuple[RuntimePod, ...] = ()
    """The runtime pods, those that are being deleted as well."""
    neighbours: tuple[Neighbour, ...] = ()
    present: frozenset[Ref] = frozenset()
    """Which objects of ours exist: only these are ever deleted."""
    workload_texts: tuple[str, ...] | None = None
    """The texts of `workload.textsFrom`, without empty lines; None: there is no such ConfigMap or key."""
    foreign: frozenset[Ref] = frozenset()
    """Objects that have the names of ours and are not ours (no label `app.kubernetes.io/managed-by: penstock`): never
    touched, and said."""
    nodes: tuple[Json, ...] = ()
    """Node objects as the API has them (labels, taints, unschedulable, allocatable suffice)."""
    scale: Scale | None = None
    """None: no decision, and the present number stays."""


def moment(text: str | None) -> datetime | None:
    """A time of the API, such as `2026-11-21T19:30:00Z`; None for none."""
    return datetime.fromisoformat(text) if text else None


def _whole_cpus(spec: Object) -> int:
    for container in spec.get("containers") or []:
        if container.get("name") == CONTAINER:
            asked = str(((container.get("resources") or {}).get("requests") or {}).get("cpu") or "")
            return int(parse_quantity(asked)) if is_quantity(asked) else 0
    return 0


def _number(text: str | None) -> int:
    return int(text) if text and text.isdigit() else 0
