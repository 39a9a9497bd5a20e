"""How an endpoint is reached from outside the cluster: an Ingress or an HTTPRoute, for one host."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from penstock.resources.base import Spec
from penstock.resources.fields.rules import ObjectName, Rule, TextRule
from penstock.resources.fields.text_fields import DnsLabel

_HOST_LABEL = r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?"
HOST_PATTERN = rf"({_HOST_LABEL}\.)+[a-z]([-a-z0-9]{{0,61}}[a-z0-9])?"
"""The last label begins with a letter: an IP address is no host of an Ingress."""
ROOT = "/"

HostName = Annotated[
    str,
    Field(min_length=1, max_length=253),
    TextRule(
        HOST_PATTERN,
        "{self} is not a host name",
        "Write a full DNS name in lower case, such as emotion.example.com, without port and wildcard",
    ),
]
UrlPath = Annotated[
    str,
    Field(min_length=1, max_length=256),
    TextRule(
        r"/|(/[A-Za-z0-9_~-][A-Za-z0-9._~-]*)+",
        "{self} is not a path",
        "Write / or /name/name, with letters, digits and -._~, and without / at its end",
    ),
]


class IngressExposure(Spec):
    """An Ingress."""

    class_name: ObjectName | None = Field(
        default=None, description="The IngressClass. None: the cluster's default class."
    )
    tls_secret_name: ObjectName | None = Field(
        default=None,
        description="A Secret of this namespace with certificate and key, which the Ingress names; cert-manager "
        "creates it when an annotation asks for it. None: plain HTTP.",
    )
    annotations: dict[str, Annotated[str, Field(max_length=1024)]] = Field(
        default_factory=dict,
        max_length=16,
        description="Annotations of the Ingress, such as cert-manager.io/cluster-issuer. The administrator lists the "
        "allowed ones (docs/how-to/expose-an-endpoint.md).",
    )


class ParentReference(Spec):
    """A Gateway."""

    name: ObjectName = Field(description="The Gateway.")
    namespace: DnsLabel | None = Field(default=None, description="Its namespace. None: this one.")
    section_name: ObjectName | None = Field(default=None, description="One listener of it. None: all that match.")


class RouteExposure(Spec):
    """An HTTPRoute of the Gateway API. The Gateway terminates TLS."""

    parent_refs: tuple[ParentReference, ...] = Field(
        min_length=1,
        max_length=8,
        description="The Gateways that receive the requests. They must admit routes of this namespace.",
    )
    scheme: Literal["https", "http"] = Field(
        default="https", description="Scheme of status.publicUrl. The listener of the Gateway decides what is served."
    )


class Exposure(Spec):
    """Requests from outside the cluster, by an Ingress or an HTTPRoute."""

    host: HostName = Field(
        description="The host name of the endpoint. The administrator lists the hosts that a namespace may use "
        "(docs/how-to/expose-an-endpoint.md)."
    )
    path: UrlPath = Field(
        default=ROOT,
        description="Requests below this path are for the endpoint, which sees them without it. An Ingress cannot "
        "remove a prefix, so another path than / needs httpRoute.",
    )
    ingress: IngressExposure | None = Field(default=None, description="Create an Ingress.")
    http_route: RouteExposure | None = Field(default=None, description="Create an HTTPRoute.")

    RULES: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "has(self.ingress) != has(self.httpRoute)",
            lambda it: (it.ingress is None) is not (it.http_route is None),
            "exposure needs either ingress or httpRoute: write one of them, such as ingress: {}",
        ),
        Rule(
            "self.path == '/' || has(self.httpRoute)",
            lambda it: it.path == ROOT or it.http_route is not None,
            "path is {path}, and an Ingress cannot remove a prefix: write path: / or use httpRoute",
        ),
    )

    @property
    def url(self) -> str:
        """The public URL."""
        if self.http_route is not None:
            scheme: str = self.http_route.scheme
        else:
            scheme = "https" if self.ingress is not None and self.ingress.tls_secret_name is not None else "http"
        return f"{scheme}://{self.host}{self.path if self.path != ROOT else ''}"
