"""The Kubernetes API as the operator uses it: kinds of objects and their paths, and the interface of the API client."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

Json = dict[str, Any]
"""An object of the API as JSON."""


@dataclass(frozen=True)
class ResourceKind:
    """A kind of object and its path."""

    group: str
    """Empty for the core group."""
    version: str
    name: str
    """Such as `Deployment`."""
    plural: str
    namespaced: bool = True
    metadata_only: bool = False
    """Lists and watches return the metadata only: enough to detect changes of a large object."""
    api_version: str = field(init=False)
    """As in objects: `apps/v1`, `v1`."""

    def __post_init__(self) -> None:
        """Join group and version."""
        object.__setattr__(self, "api_version", f"{self.group}/{self.version}" if self.group else self.version)

    def path(self, namespace: str = "", name: str = "", subresource: str = "") -> str:
        """The URL path; without a namespace: of all namespaces."""
        parts = [f"/apis/{self.group}/{self.version}" if self.group else f"/api/{self.version}"]
        if self.namespaced and namespace:
            parts.append(f"namespaces/{namespace}")
        parts.append(self.plural)
        parts.extend(part for part in (name, subresource) if part)
        return "/".join(parts)

    def __str__(self) -> str:
        return self.name


PENSTOCK = "penstock.dev"
MODEL_ENDPOINT = ResourceKind(PENSTOCK, "v1alpha1", "ModelEndpoint", "modelendpoints")
OPTIMIZED_MODEL = ResourceKind(PENSTOCK, "v1alpha1", "OptimizedModel", "optimizedmodels")
HARDWARE_CLASS = ResourceKind(PENSTOCK, "v1alpha1", "HardwareClass", "hardwareclasses", namespaced=False)
DEPLOYMENT = ResourceKind("apps", "v1", "Deployment", "deployments")
REPLICA_SET = ResourceKind("apps", "v1", "ReplicaSet", "replicasets")
JOB = ResourceKind("batch", "v1", "Job", "jobs")
POD = ResourceKind("", "v1", "Pod", "pods")
SERVICE = ResourceKind("", "v1", "Service", "services")
SECRET = ResourceKind("", "v1", "Secret", "secrets")
"""Never written or listed: read by name where an endpoint names one for its Prometheus and the Secret has the
consent label."""
CONFIG_MAP = ResourceKind("", "v1", "ConfigMap", "configmaps")
"""Never written or listed: read by name where an endpoint takes texts from one."""
NODE = ResourceKind("", "v1", "Node", "nodes", namespaced=False)
NAMESPACE = ResourceKind("", "v1", "Namespace", "namespaces", namespaced=False, metadata_only=True)
"""For their labels, which select the namespaces that may use a HardwareClass."""
SERVICE_ACCOUNT = ResourceKind("", "v1", "ServiceAccount", "serviceaccounts")
ROLE_BINDING = ResourceKind("rbac.authorization.k8s.io", "v1", "RoleBinding", "rolebindings")
CLUSTER_ROLE = ResourceKind("rbac.authorization.k8s.io", "v1", "ClusterRole", "clusterroles", namespaced=False)
"""Never read or written. The operator binds the one of gateways, which the chart makes."""
ENDPOINT_SLICE = ResourceKind("discovery.k8s.io", "v1", "EndpointSlice", "endpointslices")
"""Read by gateways only."""
POD_DISRUPTION_BUDGET = ResourceKind("policy", "v1", "PodDisruptionBudget", "poddisruptionbudgets")
NETWORK_POLICY = ResourceKind("networking.k8s.io", "v1", "NetworkPolicy", "networkpolicies")
INGRESS = ResourceKind("networking.k8s.io", "v1", "Ingress", "ingresses")
HTTP_ROUTE = ResourceKind("gateway.networking.k8s.io", "v1", "HTTPRoute", "httproutes")
"""Exists only where the Gateway API is installed."""
HORIZONTAL_POD_AUTOSCALER = ResourceKind("autoscaling", "v2", "HorizontalPodAutoscaler", "horizontalpodautoscalers")
SCALED_OBJECT = ResourceKind("keda.sh", "v1alpha1", "ScaledObject", "scaledobjects")
"""Exists only where KEDA is installed."""
LEASE = ResourceKind("coordination.k8s.io", "v1", "Lease", "leases")
EVENT = ResourceKind("events.k8s.io", "v1", "Event", "events")
KINDS: dict[str, ResourceKind] = {
    kind.name: kind
    for kind in (
        MODEL_ENDPOINT,
        OPTIMIZED_MODEL,
        HARDWARE_CLASS,
        DEPLOYMENT,
        REPLICA_SET,
        JOB,
        POD,
        SERVICE,
        CONFIG_MAP,
        NODE,
        NAMESPACE,
        SERVICE_ACCOUNT,
        ROLE_BINDING,
        POD_DISRUPTION_BUDGET,
        NETWORK_POLICY,
        INGRESS,
        HTTP_ROUTE,
        HORIZONTAL_POD_AUTOSCALER,
        SCALED_OBJECT,
        LEASE,
        EVENT,
    )
}
"""By `kind` as in objects."""
WatchType = Literal["ADDED", "MODIFIED", "DELETED", "BOOKMARK"]


@dataclass(frozen=True)
class ListPage:
    """A part of a list."""

    items: tuple[Json, ...]
    resource_version: str
    """Of the whole list: a watch continues from it."""


@dataclass(frozen=True)
class WatchEvent:
    """One event of a watch; the object of a bookmark has a resourceVersion only."""

    type: WatchType
    object: Json


class ClusterPort(Protocol):
    """A client of the API server. Every method raises a `ClusterError`, and retries temporary failures for a while."""

    async def get(self, kind: ResourceKind, name: str, namespace: str = "") -> Json | None:
        """One object; None when it does not exist."""

    def pages(self, kind: ResourceKind, namespace: str = "", *, labels: str = "") -> AsyncIterator[ListPage]:
        """All objects, in pages. WatchExpired when the list took so long that its first page is outdated."""

    def watch(
        self, kind: ResourceKind, namespace: str = "", *, labels: str = "", resource_version: str
    ) -> AsyncIterator[WatchEvent]:
        """Events since then, until the server ends the stream or it falls silent. WatchExpired: list again."""

    async def apply(self, value: Json, *, subresource: str = "") -> Json:
        """Server-side apply as `penstock-operator`, with force; returns the stored object.

        A `metadata.resourceVersion` in it is a precondition: Conflict when the object has another version.
        """

    async def create(self, value: Json) -> Json:
        """Create an object; Conflict when one of that name exists."""

    async def replace(self, value: Json) -> Json:
        """Replace the object if it has the given `metadata.resourceVersion`: Conflict otherwise."""

    async def remove_owners(self, kind: ResourceKind, value: Json, entries: Sequence[int]) -> Json:
        """Remove the managedFields entries with these indexes from an object; returns the stored object.

        Conflict when the object has another version.
        """

    async def scale(self, kind: ResourceKind, name: str, namespace: str, replicas: int, *, uid: str) -> Json:
        """Set `spec.replicas` of an object and nothing else; returns the stored object.

        Conflict when the object has another uid.
        """

    async def delete(self, kind: ResourceKind, name: str, namespace: str = "", *, uid: str = "") -> bool:
        """Delete in the background; False when no such object (or none with that uid) exists."""
