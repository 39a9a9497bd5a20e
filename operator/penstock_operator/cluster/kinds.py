"""The kinds of objects that the operator touches, and where the API serves them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

Json = dict[str, Any]
"""An object of the API, as it comes over the wire."""


@dataclass(frozen=True)
class Kind:
    """A kind of object and its path."""

    group: str
    """Empty for the core group."""
    version: str
    name: str
    """Such as `Deployment`."""
    plural: str
    namespaced: bool = True
    metadata_only: bool = False
    """Lists and watches leave out all but the metadata: of a large object it may be enough to know that it changed."""

    @property
    def api_version(self) -> str:
        """As objects state it: `apps/v1`, `v1`."""
        return f"{self.group}/{self.version}" if self.group else self.version

    def path(self, namespace: str = "", name: str = "", subresource: str = "") -> str:
        """The URL path; without a namespace, all of them."""
        parts = [f"/apis/{self.group}/{self.version}" if self.group else f"/api/{self.version}"]
        if self.namespaced and namespace:
            parts.append(f"namespaces/{namespace}")
        parts.append(self.plural)
        parts.extend(part for part in (name, subresource) if part)
        return "/".join(parts)

    def __str__(self) -> str:
        return self.name


PENSTOCK = "penstock.dev"

MODEL_ENDPOINT = Kind(PENSTOCK, "v1alpha1", "ModelEndpoint", "modelendpoints")
OPTIMIZED_MODEL = Kind(PENSTOCK, "v1alpha1", "OptimizedModel", "optimizedmodels")
HARDWARE_CLASS = Kind(PENSTOCK, "v1alpha1", "HardwareClass", "hardwareclasses", namespaced=False)
DEPLOYMENT = Kind("apps", "v1", "Deployment", "deployments")
REPLICA_SET = Kind("apps", "v1", "ReplicaSet", "replicasets")
JOB = Kind("batch", "v1", "Job", "jobs")
POD = Kind("", "v1", "Pod", "pods")
SERVICE = Kind("", "v1", "Service", "services")
SECRET = Kind("", "v1", "Secret", "secrets")
"""Never written nor listed: read by name where an endpoint names one for its Prometheus, and the Secret agrees."""
CONFIG_MAP = Kind("", "v1", "ConfigMap", "configmaps")
CONFIG_MAP_METADATA = Kind("", "v1", "ConfigMap", "configmaps", metadata_only=True)
"""For the ones that are not ours: endpoints take texts from them."""
NODE = Kind("", "v1", "Node", "nodes", namespaced=False)
SERVICE_ACCOUNT = Kind("", "v1", "ServiceAccount", "serviceaccounts")
ROLE = Kind("rbac.authorization.k8s.io", "v1", "Role", "roles")
ROLE_BINDING = Kind("rbac.authorization.k8s.io", "v1", "RoleBinding", "rolebindings")
ENDPOINT_SLICE = Kind("discovery.k8s.io", "v1", "EndpointSlice", "endpointslices")
"""Read by gateways alone: the operator may read it so that it may let them."""
POD_DISRUPTION_BUDGET = Kind("policy", "v1", "PodDisruptionBudget", "poddisruptionbudgets")
NETWORK_POLICY = Kind("networking.k8s.io", "v1", "NetworkPolicy", "networkpolicies")
HORIZONTAL_POD_AUTOSCALER = Kind("autoscaling", "v2", "HorizontalPodAutoscaler", "horizontalpodautoscalers")
SCALED_OBJECT = Kind("keda.sh", "v1alpha1", "ScaledObject", "scaledobjects")
"""KEDA's: there only where KEDA is installed."""
LEASE = Kind("coordination.k8s.io", "v1", "Lease", "leases")
EVENT = Kind("events.k8s.io", "v1", "Event", "events")

KINDS: dict[str, Kind] = {
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
        SERVICE_ACCOUNT,
        ROLE,
        ROLE_BINDING,
        POD_DISRUPTION_BUDGET,
        NETWORK_POLICY,
        HORIZONTAL_POD_AUTOSCALER,
        SCALED_OBJECT,
        LEASE,
        EVENT,
    )
}
"""By name, as objects state it in `kind`."""
