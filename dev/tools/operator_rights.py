"""The RBAC rules of the operator: exactly the permissions that it uses, each with its reason.

The chart renders its ClusterRole (or a Role for each namespace) and the Role of the lease from here. Discovery is open
to every service account, so it is not listed. No secrets by default: their names are passed on, their contents
not read. No rights to bind, escalate or impersonate, and none on webhooks or CRDs.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from penstock_operator.cluster.kinds import (
    CONFIG_MAP,
    DEPLOYMENT,
    ENDPOINT_SLICE,
    EVENT,
    HARDWARE_CLASS,
    HORIZONTAL_POD_AUTOSCALER,
    JOB,
    LEASE,
    MODEL_ENDPOINT,
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
    Kind,
)


@dataclass(frozen=True)
class Grant:
    """One resource, and the verbs that are granted on it."""

    kind: Kind
    verbs: tuple[str, ...]
    why: str
    subresource: str = ""

    @property
    def resource(self) -> str:
        """As RBAC names it: `pods`, `pods/log`."""
        return f"{self.kind.plural}{'/' if self.subresource else ''}{self.subresource}"

    def rule(self) -> Json:
        """As a rule of a Role."""
        return {"apiGroups": [self.kind.group], "resources": [self.resource], "verbs": list(self.verbs)}


_SEE = ("list", "watch")
_MAKE = (*_SEE, "create", "patch")
"""Server-side apply is the verb patch, and asks for create as well when there is no such object yet. What an endpoint
may cease to want while it lives is deleted; all else is deleted with its owner."""
_LOOK_AND_MAKE = ("get", *_MAKE)
"""Objects with the name of the endpoint: read first, in case another owner's object has that name."""

CLUSTER: tuple[Grant, ...] = (
    Grant(HARDWARE_CLASS, _SEE, "to know what nodes a class means"),
    Grant(NODE, _SEE, "to report which label, taint or resource is missing"),
)
"""Cluster-scoped: also needed by an operator that watches some namespaces only."""

NAMESPACED: tuple[Grant, ...] = (
    Grant(MODEL_ENDPOINT, ("get", *_SEE), "to follow them; get before making anything for one"),
    Grant(MODEL_ENDPOINT, ("patch",), "to write what was found", "status"),
    Grant(OPTIMIZED_MODEL, (*_MAKE, "delete"), "to share optimisations, and to delete unused ones"),
    Grant(OPTIMIZED_MODEL, ("patch",), "to write their results", "status"),
    Grant(JOB, (*_MAKE, "delete"), "to optimise"),
    Grant(DEPLOYMENT, (*_LOOK_AND_MAKE, "delete"), "to serve; delete for gateways that are not wanted any more"),
    Grant(REPLICA_SET, _SEE, "to follow rollouts"),
    Grant(POD, _SEE, "to see why they do not run, and where they do"),
    Grant(POD, ("get",), "to read how far a job is", "log"),
    Grant(SERVICE, (*_LOOK_AND_MAKE, "delete"), "to give the pods an address; delete as above"),
    Grant(POD_DISRUPTION_BUDGET, (*_LOOK_AND_MAKE, "delete"), "to keep replicas through node drains"),
    Grant(NETWORK_POLICY, (*_LOOK_AND_MAKE, "delete"), "to allow requests and nothing else; delete as above"),
    Grant(SERVICE_ACCOUNT, (*_LOOK_AND_MAKE, "delete"), "to give gateways a separate identity"),
    Grant(ROLE, (*_LOOK_AND_MAKE, "delete"), "to let gateways read which replicas there are, in their own namespace"),
    Grant(ROLE_BINDING, (*_LOOK_AND_MAKE, "delete"), "to give them that role"),
    Grant(ENDPOINT_SLICE, _SEE, "to grant it to gateways: Kubernetes lets a client grant only permissions that it has"),
    Grant(HORIZONTAL_POD_AUTOSCALER, (*_LOOK_AND_MAKE, "delete"), "to scale in the mode HPA"),
    Grant(CONFIG_MAP, _LOOK_AND_MAKE, "to pass jobs their spec; get for the texts that an endpoint names"),
    Grant(EVENT, ("create",), "to report what has happened"),
)
"""In every namespace that the operator watches."""

KEDA: tuple[Grant, ...] = (Grant(SCALED_OBJECT, (*_LOOK_AND_MAKE, "delete"), "to scale in the mode KEDA"),)
"""In the same namespaces, where KEDA is."""

SECRETS: tuple[Grant, ...] = (
    Grant(SECRET, ("get",), "to sign in to the Prometheus of an endpoint, where the Secret's label agrees"),
)
"""In the same namespaces, and only where the installation enables it: nothing else of the operator reads Secrets."""

OWN: tuple[Grant, ...] = (Grant(LEASE, ("get", "create", "update"), "to lead"),)
"""In the operator's own namespace."""


def rules(grants: Iterable[Grant]) -> list[Json]:
    """As the `rules` of a Role or ClusterRole."""
    return [grant.rule() for grant in grants]
