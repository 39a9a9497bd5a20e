"""The rights of the operator in the cluster: exactly the requests that it sends, each with its reason.

The chart renders its ClusterRole (or a Role for each namespace) and the Role of the lease from here, and
docs/reference/operator.md lists them. Every service account may do discovery, so it is not listed. Secrets are not
readable unless the installation names them: pods get their names only. There are no rights to escalate or impersonate,
none to bind but the role of gateways, and none on webhooks or CRDs.

RBAC limits writes to kinds of objects. Which objects of a kind, and their content, is limited by the
ValidatingAdmissionPolicies in charts/penstock/templates/operator-admission.yaml.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from penstock_operator.cluster.api import (
    CLUSTER_ROLE,
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
    names: tuple[str, ...] = ()
    """Only objects with these names; `{operator}` is the name of the operator's own objects. Empty: all objects."""

    @property
    def resource(self) -> str:
        """The resource as in RBAC rules: `modelendpoints`, `modelendpoints/status`."""
        return f"{self.kind.plural}{'/' if self.subresource else ''}{self.subresource}"

    def rule(self, operator: str) -> Json:
        """The rule of a Role."""
        rule: Json = {"apiGroups": [self.kind.group], "resources": [self.resource], "verbs": list(self.verbs)}
        if self.names:
            rule["resourceNames"] = [name.format(operator=operator) for name in self.names]
        return rule


_SEE = ("list", "watch")
_MAKE = (*_SEE, "create", "patch")
"""Server-side apply is the verb patch, and needs create as well for a new object. Objects that an endpoint may stop
needing are deleted; all other objects are deleted with their owner."""
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
    Grant(
        POD,
        (*_SEE, "delete"),
        "to report why pods do not run, and to find the address of those that do; delete replaces a pod whose live "
        "answers differ from those of the others (spec.guard.live)",
    ),
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
    Grant(
        ROLE_BINDING,
        (*_LOOK_AND_MAKE, "delete"),
        "to bind the role of gateways to the service account of a gateway; delete as for Deployments",
    ),
    Grant(
        CLUSTER_ROLE,
        ("bind",),
        "to bind this role, which lets gateways list the endpoint slices of their namespace",
        names=("{operator}-gateway",),
    ),
    Grant(CONFIG_MAP, ("get",), "to read the texts that an endpoint names in workload.textsFrom"),
    Grant(EVENT, ("create",), "to post Events on endpoints"),
)
"""In each namespace that the operator reconciles."""

SCALERS: tuple[Grant, ...] = (
    Grant(HORIZONTAL_POD_AUTOSCALER, _SEE, "to know whether an HPA, or that of KEDA, works, and when it is gone"),
)
"""In the same namespaces, unless both `hpa.enabled` and `keda.enabled` of the chart are false."""

HPA: tuple[Grant, ...] = (
    Grant(
        HORIZONTAL_POD_AUTOSCALER,
        ("get", "create", "patch", "delete"),
        "to create the HPA of endpoints with scaling.mode HPA",
    ),
)
"""In the same namespaces, unless `hpa.enabled` of the chart is false."""

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
"""In the same namespaces, for Secrets with the names in `prometheus.secretNames` of the chart only."""

COLLECTION: tuple[Grant, ...] = (
    Grant(JOB, (*_SEE, "create"), "to delete unused artefacts from the store"),
    Grant(NETWORK_POLICY, ("create", "patch"), "to close the network of these jobs"),
)
"""In the operator's own namespace, where it reconciles some namespaces only and collects garbage in the store."""

OWN: tuple[Grant, ...] = (
    Grant(LEASE, ("create",), "to elect the leader; RBAC does not limit a create by name"),
    Grant(LEASE, ("get", "update"), "to elect the leader", names=("{operator}",)),
)
"""In the operator's own namespace."""

GATEWAY: tuple[Grant, ...] = (
    Grant(ENDPOINT_SLICE, _SEE, "to know the replicas of the endpoint and which of them are ready"),
)
"""Of gateways, in their own namespace: the role that the operator may bind."""


def rules(grants: Iterable[Grant], operator: str = "penstock-operator") -> list[Json]:
    """The `rules` of a Role or ClusterRole. `operator`: the name of the operator's own objects."""
    return [grant.rule(operator) for grant in grants]
