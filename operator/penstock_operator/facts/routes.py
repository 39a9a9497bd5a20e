"""Ingresses and HTTPRoutes of endpoints, and which endpoints claim a host, as plain values."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import datetime

from penstock_operator.facts.names import Object, Owner, moment

INGRESS = "Ingress"
HTTP_ROUTE = "HTTPRoute"


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
    """An endpoint with a host in its spec which its namespace may use, or that still has a route to it."""

    namespace: str
    name: str
    path: str
    routed_since: datetime | None
    """When its present route to this host was created; None: it has none."""
    created: datetime
    """When the endpoint was created."""
