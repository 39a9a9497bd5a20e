"""How an endpoint is exposed: its Ingress or HTTPRoute, and the condition Exposed.

All endpoints of a cluster share its host names and its ingress controllers. So the administrator lists the hosts that a
namespace may use and the annotations of Ingresses (some controllers run code that an annotation has), and a host that
one namespace has is not given to another.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from penstock.resources.endpoint_parts.exposure import ROOT, Exposure, IngressExposure, RouteExposure
from penstock_operator.endpoint.snapshot import EndpointSnapshot, Part
from penstock_operator.endpoint.spec import ParsedEndpoint
from penstock_operator.facts.findings import Finding, no, stopped, unknown, yes
from penstock_operator.facts.names import Json, Ref, moment
from penstock_operator.facts.reasons import Reason
from penstock_operator.facts.routes import HTTP_ROUTE, INGRESS, HostClaim, RouteFacts
from penstock_operator.facts.tenants import AllowList, is_allowed, is_well_known

GUIDE = "docs/how-to/expose-an-endpoint.md"


@dataclass(frozen=True)
class ExposurePlan:
    """The objects and the condition of `spec.exposure`."""

    finding: Finding | None = None
    """The condition Exposed; None: the endpoint is not to be exposed."""
    part: Part = Part()  # noqa: RUF009 - frozen
    url: str = ""
    """The public URL; empty: there is none."""


NOT_EXPOSED = ExposurePlan()


def expose(endpoint: ParsedEndpoint, observed: EndpointSnapshot, *, accepted: bool) -> ExposurePlan:
    """What to do for `spec.exposure`. While the spec is not accepted, a route to its host stays as it is."""
    exposure = endpoint.spec.exposure
    present = [ref for kind in (INGRESS, HTTP_ROUTE) if (ref := Ref(kind, endpoint.name)) in observed.present]
    if exposure is None:
        return ExposurePlan(part=Part(delete=tuple(present)))
    refused = _refusal(endpoint, exposure, observed)
    if refused is not None:
        return ExposurePlan(refused, Part(delete=tuple(present)))
    kind = INGRESS if exposure.ingress is not None else HTTP_ROUTE
    others = tuple(ref for ref in present if ref.kind != kind)
    if not accepted:
        waiting = unknown(Reason.NOT_ACCEPTED, "The endpoint is exposed once its spec is accepted.")
        if observed.route is None or (observed.route.kind, observed.route.host) != (kind, exposure.host):
            # A route to the host of an earlier spec: only the present host was compared with the allowed hosts.
            return ExposurePlan(waiting, Part(delete=tuple(present)))
        return ExposurePlan(waiting, Part(delete=others), exposure.url)
    if exposure.ingress is not None:
        wanted = ingress(endpoint, exposure.host, exposure.ingress)
    else:
        assert exposure.http_route is not None  # noqa: S101 - narrows for mypy: a spec has one of the two
        wanted = http_route(endpoint, exposure, exposure.http_route)
    found = _routed(exposure, kind, observed.route)
    return ExposurePlan(found, Part(apply=(wanted,), delete=others), "" if found.false else exposure.url)


def ingress(endpoint: ParsedEndpoint, host: str, wanted: IngressExposure) -> Json:
    """The desired Ingress."""
    backend: Json = {"service": {"name": endpoint.name, "port": {"number": endpoint.service_port}}}
    paths: list[Json] = [{"path": ROOT, "pathType": "Prefix", "backend": backend}]
    spec: Json = {"rules": [{"host": host, "http": {"paths": paths}}]}
    if wanted.class_name is not None:
        spec["ingressClassName"] = wanted.class_name
    if wanted.tls_secret_name is not None:
        spec["tls"] = [{"hosts": [host], "secretName": wanted.tls_secret_name}]
    made = endpoint.owned("networking.k8s.io/v1", INGRESS, spec)
    if wanted.annotations:
        made["metadata"]["annotations"] = dict(wanted.annotations)
    return made


def http_route(endpoint: ParsedEndpoint, exposure: Exposure, wanted: RouteExposure) -> Json:
    """The desired HTTPRoute. A prefix is removed, because the runtime serves at the root."""
    rule: Json = {
        "matches": [{"path": {"type": "PathPrefix", "value": exposure.path}}],
        "backendRefs": [{"name": endpoint.name, "port": endpoint.service_port}],
    }
    if exposure.path != ROOT:
        rewrite: Json = {"path": {"type": "ReplacePrefixMatch", "replacePrefixMatch": ROOT}}
        rule["filters"] = [{"type": "URLRewrite", "urlRewrite": rewrite}]
    parents = [parent.to_object() for parent in wanted.parent_refs]
    spec: Json = {"parentRefs": parents, "hostnames": [exposure.host], "rules": [rule]}
    return endpoint.owned("gateway.networking.k8s.io/v1", HTTP_ROUTE, spec)


def hosts_of(labels: Mapping[str, str], allowed: AllowList) -> list[str]:
    """The hosts that a namespace with these labels may use: names, or `*.` and a domain."""
    return [host for rule in allowed.hosts if rule.namespace_selector.includes(labels) for host in rule.hosts]


def may_use(host: str, patterns: Iterable[str]) -> bool:
    """Whether one of the patterns of `hosts_of` includes the host. `*.example.com` does not include `example.com`."""
    return any(host == one or (one.startswith("*.") and host.endswith(one[1:])) for one in patterns)


def _refusal(endpoint: ParsedEndpoint, exposure: Exposure, observed: EndpointSnapshot) -> Finding | None:
    """Why the endpoint may not be exposed; None if it may."""
    settings, host = observed.settings, exposure.host
    patterns = hosts_of(observed.namespace_labels, settings.allowed)
    if not may_use(host, patterns):
        listed = ", ".join(patterns[:8]) or "none"
        return no(
            Reason.HOST_NOT_ALLOWED,
            f"spec.exposure.host is {host}, which the cluster's administrator does not allow in the namespace "
            f"{endpoint.namespace} (allowed: {listed}). Write an allowed host, or ask the administrator to add this "
            f"one to policy.exposure.hosts of the chart ({GUIDE}).",
        )
    for key in exposure.ingress.annotations if exposure.ingress is not None else ():
        if not is_allowed(key, settings.allowed.ingress_annotations, is_well_known):
            return no(
                Reason.ANNOTATION_NOT_ALLOWED,
                f"spec.exposure.ingress.annotations has {key[:80]!r}, which the cluster's administrator does not "
                "allow. Remove it, or ask the administrator to add it to policy.exposure.annotations of the chart.",
            )
    if exposure.http_route is not None and not settings.gateway_api:
        return no(
            Reason.NO_GATEWAY_API,
            "spec.exposure.httpRoute needs the Gateway API, and the operator is installed without it. Use "
            "spec.exposure.ingress, or ask the administrator to set gatewayApi.enabled of the chart.",
        )
    if exposure.http_route is not None and HTTP_ROUTE in observed.unknown_kinds:
        return no(
            Reason.NO_GATEWAY_API,
            "spec.exposure.httpRoute needs the Gateway API, and this cluster does not serve HTTPRoutes "
            "(gateway.networking.k8s.io/v1). Use spec.exposure.ingress, or ask the administrator to install it.",
        )
    taken = _holder(endpoint, exposure, observed)
    if taken is not None and taken.namespace != endpoint.namespace:
        return no(
            Reason.HOST_TAKEN,
            f"Another namespace already uses the host {host}. Write another one in spec.exposure.host.",
        )
    if taken is not None:
        return no(
            Reason.HOST_TAKEN,
            f"The endpoint {taken.name} already uses {host}{exposure.path}. Write another host, or another path with "
            "httpRoute.",
        )
    kind = INGRESS if exposure.ingress is not None else HTTP_ROUTE
    if Ref(kind, endpoint.name) in observed.conflicting:
        return no(
            Reason.NAME_TAKEN,
            f"There is an {kind} named {endpoint.name} in this namespace that was not made for this endpoint, and it "
            "is left alone. Delete it, or give the endpoint another name.",
        )
    return None


def _holder(endpoint: ParsedEndpoint, exposure: Exposure, observed: EndpointSnapshot) -> HostClaim | None:
    """The endpoint that has the host, or the host and path within its namespace; None: this one has it.

    The first one keeps it, as long as its route exists: a later change of an older endpoint takes no host away. The
    order does not depend on which endpoint is planned, so two that begin at the same time do not both get it.
    """
    created = moment_of(observed.endpoint)
    route = observed.route
    since = route.created if route is not None and route.host == exposure.host else None
    own = HostClaim(endpoint.namespace, endpoint.name, exposure.path, since, created)
    claims = (own, *observed.host_claims)
    first = min(claims, key=_order)
    if first.namespace == endpoint.namespace:
        first = min(
            (one for one in claims if (one.namespace, one.path) == (endpoint.namespace, exposure.path)), key=_order
        )
    return None if first is own else first


def _order(claim: HostClaim) -> tuple[bool, datetime, datetime, str, str]:
    held = claim.routed_since
    return held is None, held or claim.created, claim.created, claim.namespace, claim.name


def moment_of(value: Mapping[str, Any]) -> datetime:
    """When an object was created; the end of time if that is not known."""
    return moment((value.get("metadata") or {}).get("creationTimestamp")) or datetime.max.replace(tzinfo=UTC)


def _routed(exposure: Exposure, kind: str, route: RouteFacts | None) -> Finding:
    """Whether requests reach the endpoint, as far as the status of the route shows it."""
    if route is None or route.kind != kind:
        return yes(Reason.EXPOSED, f"{exposure.url} is routed to the endpoint by a new {kind}.")
    if route.refused:
        return no(
            Reason.ROUTE_REFUSED,
            f"No Gateway accepts the HTTPRoute: {stopped(route.refused)} Check spec.exposure.httpRoute.parentRefs, and "
            "ask the owner of the Gateway to admit routes of this namespace.",
        )
    at = f" at {', '.join(route.addresses[:4])}" if route.addresses else ""
    return yes(Reason.EXPOSED, f"{exposure.url} is routed to the endpoint by the {kind}{at}.")
