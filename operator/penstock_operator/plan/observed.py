"""The input of a plan: what was read from the cluster for one endpoint, as plain values.

`from_object` of each class extracts from an API object the fields that plans depend on, so that tests can state facts
instead of whole API objects. Nothing here calls the cluster or reads the clock.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime

from penstock_operator.decide.canary_rule import CanaryOutcome, CanaryReason
from penstock_operator.plan.conditions import Finding
from penstock_operator.plan.endpoint import ParsedEndpoint
from penstock_operator.plan.installation import Json, PlanSettings
from penstock_operator.plan.names import (
    ARTEFACT,
    CORES,
    FIELD_MANAGER,
    OPTIMIZED_MODEL,
    ROLLOUT_BEGAN,
    ROLLOUT_SINCE,
    TEMPLATE_HASH,
)
from penstock_operator.plan.quotas import NamespaceUse
from penstock_operator.plan.turns import Line
from penstock_operator.plan.workloads import JobFacts, Object, Owner, RuntimePod, moment


def replica_owners(managed: Iterable[Object]) -> set[str]:
    """The field managers that own `spec.replicas`."""
    return {str(entry.get("manager")) for entry in managed if _owns(entry)}


def scale_entries(managed: Iterable[Object]) -> tuple[int, ...]:
    """Indexes of the managedFields entries of clients that used the scale subresource (an HPA, `kubectl scale`).

    When an apply sets the same count that such a client has set, both own the field, although the client may no longer
    exist. Such an entry contains only the replica count, so it can be removed before the operator takes the field over.
    """
    return tuple(place for place, entry in enumerate(managed) if entry.get("subresource") == "scale" and _owns(entry))


def _owns(entry: Object) -> bool:
    return "f:replicas" in ((entry.get("fieldsV1") or {}).get("f:spec") or {})


HPA = "HorizontalPodAutoscaler"
SCALED_OBJECT = "ScaledObject"
INGRESS = "Ingress"
HTTP_ROUTE = "HTTPRoute"


@dataclass(frozen=True)
class ScalerFacts:
    """A HorizontalPodAutoscaler or ScaledObject of the endpoint: the operator's, or the HPA that KEDA creates."""

    kind: str
    name: str
    owner: str = ""
    """Kind of its controller: `ModelEndpoint` when the operator created it, `ScaledObject` when KEDA did."""
    exact: bool = False
    """The API server kept the requested tolerance of 0 (feature gate HPAConfigurableTolerance)."""
    working: bool | None = None
    """Whether it can scale: the condition ScalingActive of an HPA, Ready of a ScaledObject; None: not reported yet."""
    reason: str = ""
    message: str = ""
    deleting: bool = False
    most: int = 0
    """The largest number of replicas that it may set."""

    @property
    def ours(self) -> bool:
        """Whether the operator created it, and so deletes it."""
        return self.owner == "ModelEndpoint"

    @property
    def broken(self) -> bool:
        """Whether it reports that it cannot scale. At zero replicas an HPA reports ScalingDisabled, which is normal."""
        return self.working is False and self.reason != "ScalingDisabled"

    @classmethod
    def from_object(cls, value: Object) -> ScalerFacts:
        """Extract the facts of a HorizontalPodAutoscaler (autoscaling/v2) or a ScaledObject (keda.sh/v1alpha1)."""
        metadata, spec, status = value["metadata"], value.get("spec") or {}, value.get("status") or {}
        kind = SCALED_OBJECT if "triggers" in spec else HPA
        wanted = "Ready" if kind == SCALED_OBJECT else "ScalingActive"
        condition: Object = next((entry for entry in status.get("conditions") or [] if entry.get("type") == wanted), {})
        owners = metadata.get("ownerReferences") or []
        return cls(
            kind=kind,
            name=metadata["name"],
            owner=next((str(owner["kind"]) for owner in owners if owner.get("controller")), ""),
            exact=_tolerance(spec.get("behavior") or {}),
            working={"True": True, "False": False}.get(condition.get("status") or ""),
            reason=condition.get("reason") or "",
            message=condition.get("message") or "",
            deleting="deletionTimestamp" in metadata,
            most=int(spec.get("maxReplicaCount" if kind == SCALED_OBJECT else "maxReplicas") or 0),
        )


def _tolerance(behaviour: Object) -> bool:
    """Whether both directions have the tolerance that the operator sets. API servers without the feature drop the
    field."""
    return all("tolerance" in (behaviour.get(direction) or {}) for direction in ("scaleUp", "scaleDown"))


@dataclass(frozen=True, order=True)
class ModelUser:
    """A ModelEndpoint that uses an OptimizedModel: its status names it (`optimizedModel` or `plan.optimizedModel`)."""

    name: str
    uid: str


@dataclass(frozen=True)
class OptimizedModelFacts:
    """An OptimizedModel with its jobs."""

    name: str
    spec: Json
    """As JSON (`penstock.resources.optimized_model.OptimizedModelSpec`)."""
    uid: str = ""
    generation: int = 1
    created: datetime | None = None
    deleting: bool = False
    owned: bool = False
    """Endpoints own it. The operator creates it so, and gives it up when there is a result."""
    status: Json = field(default_factory=dict)
    jobs: tuple[JobFacts, ...] = ()
    users: tuple[ModelUser, ...] = ()
    """The endpoints of the namespace that use it, at most `OWNERS` of them."""

    @classmethod
    def from_object(
        cls, value: Object, jobs: tuple[JobFacts, ...] = (), users: tuple[ModelUser, ...] = ()
    ) -> OptimizedModelFacts:
        """Extract the facts of an OptimizedModel object."""
        metadata = value["metadata"]
        return cls(
            name=metadata["name"],
            spec=dict(value.get("spec") or {}),
            uid=metadata.get("uid") or "",
            generation=int(metadata.get("generation") or 1),
            created=moment(metadata.get("creationTimestamp")),
            deleting="deletionTimestamp" in metadata,
            owned=bool(metadata.get("ownerReferences")),
            status=dict(value.get("status") or {}),
            jobs=jobs,
            users=users,
        )


@dataclass(frozen=True)
class DeploymentFacts:
    """The endpoint's Deployment."""

    uid: str = ""
    owner: Owner = field(default_factory=Owner)
    """The ModelEndpoint that it was created for."""
    generation: int = 1
    observed_generation: int = 1
    wanted: int = 1
    """`spec.replicas`."""
    replicas_ours_alone: bool = False
    """The operator applied `spec.replicas`, and no other client has written it since."""
    replicas_scaled: bool = False
    """A client of the scale subresource owns `spec.replicas`, alone or with others."""
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
    """The operator's hash of its pod template (annotation)."""
    artefact: str = ""
    """`sha256:...` of the artefact that its pod template serves."""
    optimized_model: str = ""
    """The OptimizedModel of the artefact; empty for a pinned one that no OptimizedModel of the namespace has."""
    cores: int = 0
    """`cores` of one replica; 0: an earlier version made it."""
    paused: bool = False
    """Its pods are not replaced, although their template is another one."""
    waits_since: datetime | None = None
    """Since when its new template waits for its turn."""
    rollout_began: datetime | None = None
    """When its last rollout had its turn."""

    @classmethod
    def from_object(cls, value: Object) -> DeploymentFacts:
        """Extract the facts of a Deployment object."""
        metadata, spec, status = value["metadata"], value["spec"], value.get("status") or {}
        template = spec["template"].get("metadata") or {}
        labels, annotations = template.get("labels") or {}, template.get("annotations") or {}
        conditions = {entry["type"]: entry for entry in status.get("conditions") or []}
        failure = conditions.get("ReplicaFailure") or {}
        managed = metadata.get("managedFields") or []
        wanted = spec.get("replicas")
        return cls(
            uid=metadata.get("uid") or "",
            owner=Owner.of(metadata),
            generation=int(metadata.get("generation") or 1),
            observed_generation=int(status.get("observedGeneration") or 0),
            wanted=1 if wanted is None else int(wanted),
            replicas_ours_alone=replica_owners(managed) == {FIELD_MANAGER},
            replicas_scaled=bool(scale_entries(managed)),
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
            cores=int(text) if (text := (metadata.get("annotations") or {}).get(CORES) or "").isdecimal() else 0,
            paused=bool(spec.get("paused")),
            waits_since=_time(metadata, ROLLOUT_SINCE),
            rollout_began=_time(metadata, ROLLOUT_BEGAN),
        )


def _time(metadata: Object, annotation: str) -> datetime | None:
    """The time in an annotation. People may change annotations: None for another form."""
    try:
        found = datetime.fromisoformat(str((metadata.get("annotations") or {}).get(annotation) or ""))
    except ValueError:
        return None
    return found if found.tzinfo is not None else None


@dataclass(frozen=True)
class ReplicaSetFacts:
    """A ReplicaSet of the endpoint's Deployment."""

    name: str
    owner: Owner = field(default_factory=Owner)
    template: str = ""
    artefact: str = ""
    wanted: int = 0
    ready: int = 0

    @classmethod
    def from_object(cls, value: Object) -> ReplicaSetFacts:
        """Extract the facts of a ReplicaSet object."""
        spec, status = value["spec"], value.get("status") or {}
        annotations = ((spec.get("template") or {}).get("metadata") or {}).get("annotations") or {}
        return cls(
            name=value["metadata"]["name"],
            owner=Owner.of(value["metadata"]),
            template=annotations.get(TEMPLATE_HASH) or "",
            artefact=annotations.get(ARTEFACT) or "",
            wanted=int(spec.get("replicas") or 0),
            ready=int(status.get("readyReplicas") or 0),
        )


def replaced(deployment: DeploymentFacts, replica_sets: Iterable[ReplicaSetFacts], template: str) -> bool:
    """Whether the Deployment has pods of another template than the one with this hash."""
    own = (one for one in replica_sets if one.owner.uid == deployment.uid)
    return any(one.wanted and one.template != template for one in own)


def rollout_has_place(deployment: DeploymentFacts, replica_sets: Iterable[ReplicaSetFacts]) -> bool:
    """Whether a rollout keeps others waiting: it replaces pods, and Kubernetes has not found it stuck."""
    stuck = deployment.progressing == "ProgressDeadlineExceeded"
    return not deployment.paused and not stuck and replaced(deployment, replica_sets, deployment.template)


@dataclass(frozen=True)
class RouteFacts:
    """The Ingress or HTTPRoute of an endpoint."""

    kind: str
    owner: Owner = field(default_factory=Owner)
    host: str = ""
    created: datetime | None = None
    addresses: tuple[str, ...] = ()
    """Of the load balancer, if the ingress controller reports them."""
    refused: str = ""
    """Why no Gateway accepts an HTTPRoute; empty: one does, or none has reported yet."""

    @classmethod
    def from_object(cls, value: Object) -> RouteFacts:
        """Extract the facts of an Ingress or an HTTPRoute."""
        metadata, spec, status = value["metadata"], value.get("spec") or {}, value.get("status") or {}
        hosts = [str(rule.get("host") or "") for rule in spec.get("rules") or []]
        balancer = (status.get("loadBalancer") or {}).get("ingress") or []
        return cls(
            kind=HTTP_ROUTE if "parentRefs" in spec else INGRESS,
            owner=Owner.of(metadata),
            host=next(iter([*(spec.get("hostnames") or []), *hosts]), ""),
            created=moment(metadata.get("creationTimestamp")),
            addresses=tuple(str(one.get("hostname") or one.get("ip") or "") for one in balancer),
            refused=_refused(status.get("parents") or []),
        )


def _refused(parents: Iterable[Object]) -> str:
    """The message of the first Gateway that refuses a route, if all that have reported do."""
    reported = [one for parent in parents for one in parent.get("conditions") or [] if one.get("type") == "Accepted"]
    if any(one.get("status") != "False" for one in reported):
        return ""
    return next((str(one.get("message") or one.get("reason") or "refused") for one in reported), "")


@dataclass(frozen=True)
class HostClaim:
    """An endpoint that asks for a host which its namespace may use, or that still has a route to it."""

    namespace: str
    name: str
    path: str
    routed_since: datetime | None
    """When its present route to this host was created; None: it has none."""
    created: datetime
    """When the endpoint was created."""


@dataclass(frozen=True)
class Neighbour:
    """A runtime pod of another endpoint (of any namespace) on a node of one of this endpoint's pods."""

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
class DesiredScale:
    """The autoscaler's last published decision, in the modes Internal, HPA and KEDA."""

    replicas: int
    reason: str = ""
    """The figures of the decision in one sentence."""
    cause: str = ""
    """The kind of decision, as one CamelCase word."""
    metrics: Finding | None = None
    """Whether the load can be read, for the condition MetricsAvailable; None: it can."""
    requests_per_second: float | None = None
    """The measured load."""
    capacity_per_replica: float | None = None
    """Requests per second."""
    p95_milliseconds: float | None = None
    """As observed."""
    curve: Finding | None = None
    """Whether replicas are as fast as their capacity curve, for the condition CurveCurrent; None: not known."""
    slowdown: float | None = None
    """How many times slower the replicas are than their capacity curve."""
    memory: str = ""
    """The autoscaler's state that a new leader continues from."""


@dataclass(frozen=True)
class CanaryReport:
    """The last look at a canary."""

    template: str
    """The hash of the pod template that it tries."""
    outcome: CanaryOutcome
    reason: CanaryReason | None = None
    """None while it continues."""
    message: str = ""
    """The figures of both plans, as a clause."""
    requests: int = 0
    """Answered by its pods."""
    errors: int = 0


@dataclass(frozen=True)
class EndpointSnapshot:
    """One endpoint and everything that belongs to it, at one moment."""

    endpoint: Json
    """The ModelEndpoint object as JSON, with metadata and status."""
    now: datetime
    """With a time zone."""
    settings: PlanSettings
    parsed: ParsedEndpoint | Finding | None = None
    """The endpoint as it was parsed for this reconcile, or why it cannot be; None: the plan parses it."""
    hardware_classes: Mapping[str, Json] = field(default_factory=dict)
    """The HardwareClass objects of the cluster by name."""
    optimized_models: tuple[OptimizedModelFacts, ...] = ()
    """Of its namespace: at least the OptimizedModel of the spec's key, the one that the Deployment serves, and those
    that have the artefact which the spec pins."""
    deployment: DeploymentFacts | None = None
    gateway: DeploymentFacts | None = None
    """The Deployment of its gateway."""
    canary: DeploymentFacts | None = None
    """The Deployment of its canary."""
    canary_pods: tuple[RuntimePod, ...] = ()
    canary_report: CanaryReport | None = None
    """None: no look yet."""
    replica_sets: tuple[ReplicaSetFacts, ...] = ()
    pods: tuple[RuntimePod, ...] = ()
    """The runtime pods, including those that are being deleted."""
    neighbours: tuple[Neighbour, ...] = ()
    present: frozenset[Ref] = frozenset()
    """Which of the operator's objects exist: only these are ever deleted."""
    workload_texts: tuple[str, ...] | None = None
    """The texts of `workload.textsFrom` without empty lines; None: the ConfigMap or the key does not exist."""
    conflicting: frozenset[Ref] = frozenset()
    """Objects with the operator's names that it did not create (no label `app.kubernetes.io/managed-by: penstock`).
    They are never changed; the condition Accepted names them."""
    namespace_labels: Mapping[str, str] = field(default_factory=dict)
    """Labels of the endpoint's namespace."""
    quota: NamespaceUse | None = None
    """The use of the namespace's quota; None: it has none."""
    nodes: tuple[Json, ...] = ()
    """Node objects as JSON (labels, taints, unschedulable, allocatable are enough)."""
    scale: DesiredScale | None = None
    """None: no decision, and the present replica count stays."""
    optimizations: Line | None = None
    """The line for optimisation jobs, of OptimizedModels; None: without a limit."""
    rollouts: Line | None = None
    """The line for rollouts, of endpoints; None: without a limit."""
    scalers: tuple[ScalerFacts, ...] = ()
    """The objects besides the operator that scale the Deployment: those that it created, and KEDA's HPAs."""
    unknown_kinds: frozenset[str] = frozenset()
    """Optional kinds that the API server does not serve: `ScaledObject`, `HTTPRoute`."""
    route: RouteFacts | None = None
    """Its Ingress or HTTPRoute."""
    host_claims: tuple[HostClaim, ...] = ()
    """The other endpoints of the cluster that ask for the same host or have it."""
