"""Deployments, ReplicaSets and OptimizedModels of endpoints, as plain values.

`from_object` extracts from an object of the API the fields that plans depend on.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import datetime

from penstock_operator.facts.names import (
    ARTEFACT,
    CORES,
    FIELD_MANAGER,
    FP32,
    OPTIMIZED_MODEL,
    ROLLOUT_BEGAN,
    ROLLOUT_SINCE,
    TEMPLATE_HASH,
    Json,
    Object,
    Owner,
    moment,
)
from penstock_operator.facts.pods import JobFacts


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
    """A client of the scale subresource owns `spec.replicas`, perhaps together with another client."""
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
    serves_fp32: bool = False
    cores: int = 0
    """`cores` of one replica; 0: an earlier version made it."""
    paused: bool = False
    """Its pods are not replaced, although their template is another one."""
    waits_since: datetime | None = None
    """Since when its new template waits for a slot."""
    rollout_began: datetime | None = None
    """When its last rollout got a slot."""

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
            serves_fp32=FP32 in (metadata.get("annotations") or {}),
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


def rollout_has_slot(deployment: DeploymentFacts, replica_sets: Iterable[ReplicaSetFacts]) -> bool:
    """Whether a rollout uses a slot: it replaces pods, and Kubernetes has not found it stuck."""
    stuck = deployment.progressing == "ProgressDeadlineExceeded"
    return not deployment.paused and not stuck and replaced(deployment, replica_sets, deployment.template)


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
