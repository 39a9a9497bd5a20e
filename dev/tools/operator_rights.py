"""The rights of the operator in the cluster: exactly the requests that it sends, each with its reason.

The chart renders its ClusterRole (or a Role for each namespace) and the Role of the lease from here, and
docs/reference/operator.md lists them. Every service account may do discovery, so it is not listed. Secrets are not
readable unless the installation enables it: pods get their names only. There are no rights to bind, escalate or
impersonate, and none on webhooks or CRDs.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from penstock_operator.cluster.api import (
    CONFIG_MAP,
    DEPLOYMENT,
    ENDPOINT_SLICE,
    EVENT,
    HARDWARE_CLASS,
    HORIZONTAL_POD_AUTOSCALER,
    HTTP_ROUTE,
    INGRESS,
    JOB,
    LEASE,
    MODEL_ENDPOINT,
    NAMESPACE,
    NETWORK_POLICY,
    NODE,
    OPTIMIZED_MODEL,
    POD,
    POD_DISRUPTION_BUDGET,
    REPLICA_SET,
    ROLE,
    ROLE_BINDING,
    SCALED_OBJECT,
    SECRET,
    SERVICE,
    SERVICE_ACCOUNT,
    Json,
    ResourceKind,
)


@dataclass(frozen=True)
class Grant:
    """One resource, its verbs and the reason."""

    kind: ResourceKind
    verbs: tuple[str, ...]
    why: str
    subresource: str = ""

    @property
    def resource(self) -> str:
        """The resource as in RBAC rules: `pods`, `pods/log`."""
        return f"{self.kind.plural}{'/' if self.subresource else ''}{self.subresource}"

    def rule(self) -> Json:
        """The rule of a Role."""
        return {"apiGroups": [self.kind.group], "resources": [self.resource], "verbs": list(self.verbs)}


_SEE = ("list", "watch")
_MAKE = (*_SEE, "create", "patch")
"""Server-side apply is the verb patch, and needs create as well for a new object. Objects that an endpoint may stop
needing are deleted; the others are deleted with their owner."""
_LOOK_AND_MAKE = ("get", *_MAKE)
"""For objects named after the endpoint: get finds out whether another program's object has the name."""

CLUSTER: tuple[Grant, ...] = (
    Grant(HARDWARE_CLASS, _SEE, "to read the node labels and CPUs that a class selects"),
    Grant(NAMESPACE, _SEE, "to read the labels by which a class selects the namespaces that may use it"),
    Grant(NODE, _SEE, "to report which label, taint or resource is missing when no node fits a pod"),
)
"""Of the whole cluster; also needed by an operator that is limited to some namespaces."""

NAMESPACED: tuple[Grant, ...] = (
    Grant(
        MODEL_ENDPOINT,
        ("get", *_SEE),
        "to watch them; get checks that an endpoint still exists before objects are created for it",
    ),
    Grant(MODEL_ENDPOINT, ("patch",), "to write their status", "status"),
    Grant(OPTIMIZED_MODEL, (*_MAKE, "delete"), "to create them, shared by endpoints, and to delete unused ones"),
    Grant(OPTIMIZED_MODEL, ("patch",), "to write their status", "status"),
    Grant(
        JOB,
        (*_MAKE, "delete"),
        "to create optimisation jobs, and to delete them when their endpoint is suspended or changed",
    ),
    Grant(
        DEPLOYMENT,
        (*_LOOK_AND_MAKE, "delete"),
        "to create the runtime and gateway Deployments; delete removes a gateway that is no longer needed",
    ),
    Grant(REPLICA_SET, _SEE, "to know which artefacts old ReplicaSets serve during rollouts"),
    Grant(POD, _SEE, "to report why pods do not run, and to find the address of those that do"),
    Grant(POD, ("get",), "to read the progress of a job from its log", "log"),
    Grant(SERVICE, (*_LOOK_AND_MAKE, "delete"), "to create the Service of an endpoint; delete as for Deployments"),
    Grant(
        POD_DISRUPTION_BUDGET,
        (*_LOOK_AND_MAKE, "delete"),
        "to limit evictions during node drains; delete when one replica is left",
    ),
    Grant(NETWORK_POLICY, (*_LOOK_AND_MAKE, "delete"), "to allow only requests into pods; delete as for Deployments"),
    Grant(
        INGRESS,
        (*_LOOK_AND_MAKE, "delete"),
        "to expose endpoints with spec.exposure.ingress; delete when it is removed",
    ),
    Grant(
        SERVICE_ACCOUNT,
        (*_LOOK_AND_MAKE, "delete"),
        "to create a service account for each gateway; delete as for Deployments",
    ),
    Grant(ROLE, (*_LOOK_AND_MAKE, "delete"), "to let a gateway list the endpoint slices of its namespace"),
    Grant(ROLE_BINDING, (*_LOOK_AND_MAKE, "delete"), "to bind that role to the gateway's service account"),
    Grant(
        ENDPOINT_SLICE,
        _SEE,
        "to grant this right to gateways: RBAC lets an account grant only the rights that it has itself",
    ),
    Grant(
        HORIZONTAL_POD_AUTOSCALER,
        (*_LOOK_AND_MAKE, "delete"),
        "to create the HPA of endpoints with scaling.mode HPA, and to watch KEDA's HPAs",
    ),
    Grant(
        CONFIG_MAP, _LOOK_AND_MAKE, "to create the input of jobs; get and watch for the texts that an endpoint names"
    ),
    Grant(EVENT, ("create",), "to post Events on endpoints"),
)
"""In each namespace that the operator reconciles."""

KEDA: tuple[Grant, ...] = (
    Grant(SCALED_OBJECT, (*_LOOK_AND_MAKE, "delete"), "to create the ScaledObject of endpoints with scaling.mode KEDA"),
)
"""In the same namespaces, where KEDA is installed."""

GATEWAY_API: tuple[Grant, ...] = (
    Grant(HTTP_ROUTE, (*_LOOK_AND_MAKE, "delete"), "to expose endpoints with spec.exposure.httpRoute"),
)
"""In the same namespaces, where the Gateway API is installed."""

SECRETS: tuple[Grant, ...] = (
    Grant(
        SECRET, ("get",), "to read the credentials of an endpoint's Prometheus from a Secret that has the consent label"
    ),
)
"""In the same namespaces, and only where the installation enables it: the operator reads no other Secrets."""

COLLECTION: tuple[Grant, ...] = (
    Grant(JOB, (*_SEE, "create"), "to delete unused artefacts from the store"),
    Grant(NETWORK_POLICY, ("create", "patch"), "to close the network of these jobs"),
)
"""In the operator's own namespace, where it reconciles some namespaces only and collects garbage in the store."""

OWN: tuple[Grant, ...] = (Grant(LEASE, ("get", "create", "update"), "to elect the leader"),)
"""In the operator's own namespace."""


def rules(grants: Iterable[Grant]) -> list[Json]:
    """The `rules` of a Role or ClusterRole."""
    return [grant.rule() for grant in grants]
