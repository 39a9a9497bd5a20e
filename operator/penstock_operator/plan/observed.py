"""Everything that was read from the cluster for one endpoint, as plain values: the only input of `plan`.

The rim reads objects as JSON and hands them over; `from_object` of each class distils what a plan depends on, so that
tests write down facts instead of whole API objects. Nothing here asks the cluster or the clock.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime

from penstock_operator.plan.names import ARTEFACT, ATTEMPT, FIELD_MANAGER, OPTIMIZED_MODEL, TEMPLATE_HASH
from penstock_operator.plan.ownership import left_behind, writers
from penstock_operator.plan.pod_facts import ContainerFacts, HostReport, Object, PodFacts, RuntimePod, moment, number
from penstock_operator.plan.scalers import ScalerFacts
from penstock_operator.plan.settings import Json, PlanSettings

__all__ = [
    "ContainerFacts",
    "DeploymentFacts",
    "HostReport",
    "JobFacts",
    "JobLog",
    "Neighbour",
    "Observed",
    "OptimizedModelFacts",
    "PodFacts",
    "Progress",
    "Ref",
    "ReplicaSetFacts",
    "RuntimePod",
    "Scale",
    "ScalerFacts",
    "User",
    "moment",
]


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
    """As the API has it (`penstock.resources.optimized_model.OptimizedModelSpec`)."""
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
    replicas_ours_alone: bool = False
    """The operator has applied `spec.replicas`, and nobody else has written it since."""
    replicas_scaled: bool = False
    """Somebody who has scaled it owns `spec.replicas`, alone or with others."""
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
        managed = metadata.get("managedFields") or []
        wanted = spec.get("replicas")
        return cls(
            uid=metadata.get("uid") or "",
            generation=int(metadata.get("generation") or 1),
            observed_generation=int(status.get("observedGeneration") or 0),
            wanted=1 if wanted is None else int(wanted),
            replicas_ours_alone=writers(managed) == {FIELD_MANAGER},
            replicas_scaled=bool(left_behind(managed)),
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
    """What the autoscaler has decided: in the modes Internal, HPA and KEDA."""

    replicas: int
    reason: str = ""
    """The figures that it was made from, in one sentence."""
    cause: str = ""
    """What kind of a decision it is, in one CamelCase word."""
    metrics_available: bool = True
    metrics_reason: str = ""
    """CamelCase, where the load cannot be read."""
    metrics_message: str = ""
    """Why the load cannot be read, and what to do."""
    requests_per_second: float | None = None
    """The load that was read."""
    capacity_per_replica: float | None = None
    """Requests a second."""
    p95_milliseconds: float | None = None
    """As observed."""
    curve_current: bool | None = None
    """Whether replicas are as fast as their capacity curve says; None: nobody can tell."""
    curve_reason: str = ""
    curve_message: str = ""
    slowdown: float | None = None
    """How many times slower replicas are than their curve."""
    memory: str = ""
    """What a new leader's autoscaler goes on from."""


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
    gateway: DeploymentFacts | None = None
    """The Deployment of its gateway."""
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
    scalers: tuple[ScalerFacts, ...] = ()
    """What scales the Deployment besides the operator: what it made for that, and what KEDA made of that."""
    unknown_kinds: frozenset[str] = frozenset()
    """Kinds that the API server does not serve, of those that it need not: `ScaledObject`."""
