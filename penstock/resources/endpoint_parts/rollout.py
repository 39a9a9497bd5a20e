"""How pods are replaced, and the gateway in front of them."""

from __future__ import annotations

from enum import StrEnum

from pydantic import Field

from penstock.resources.base import Spec


class Canary(Spec):
    """A first share of the requests for new pods, before they replace the others."""

    percent: int = Field(default=10, ge=1, le=50, description="Share of the requests that the new pods get.")
    minutes: int = Field(
        default=10,
        ge=1,
        le=1440,
        description="How long. It takes up to ten times as long until the new pods have answered 200 requests.",
    )


class Rollout(Spec):
    """How pods are replaced when the plan or the spec changes."""

    canary: Canary | None = Field(
        default=None,
        description="New pods get a share of the requests first. They replace the others if their errors and p95 are "
        "not worse (docs/explanation/canary.md). The endpoint then always has a gateway. Default: no canary.",
    )
    max_surge: int = Field(
        default=1, ge=1, le=100, description="Additional pods during a rollout: each needs its own cores."
    )
    drain_seconds: int = Field(
        default=20,
        ge=0,
        le=600,
        description="How long a terminating pod still accepts requests, until the Service has removed it.",
    )
    finish_seconds: int | None = Field(
        default=None,
        ge=5,
        le=3600,
        description="How long after that a terminating pod goes on with the requests that it has accepted. Streams "
        "that are left then end with an error. Default: 35, and 300 for text-generation.",
    )


class GatewayMode(StrEnum):
    """When an endpoint has a gateway."""

    AUTO = "Auto"
    ALWAYS = "Always"
    NEVER = "Never"


class Gateway(Spec):
    """The gateway between the endpoint's address and its replicas (docs/reference/gateway.md)."""

    mode: GatewayMode = Field(
        default=GatewayMode.AUTO,
        description="`Auto`: a gateway where scaling.minReplicas is 0. `Always`: a gateway, which sends each request "
        "to the least loaded replica. `Never`: requests go directly to the replicas, and one replica remains.",
    )
    replicas: int = Field(
        default=2, ge=1, le=20, description="Pods of the gateway. Two, so that one may end without failed requests."
    )
    max_held_requests: int = Field(
        default=512,
        ge=0,
        le=20_000,
        description="Requests that one pod of the gateway holds while no replica is ready; further ones get 429.",
    )
    hold_seconds: int = Field(
        default=120, ge=1, le=3600, description="How long a request is held; after that it is answered with 503."
    )
    max_connections: int | None = Field(
        default=None,
        ge=16,
        le=65_536,
        description="Connections of clients that one pod of the gateway accepts at a time; further ones wait. Its "
        "memory is reserved for as many. Default: twice maxHeldRequests, and 1,024.",
    )
    max_connections_per_client: int | None = Field(
        default=None,
        ge=1,
        le=65_536,
        description="Connections of one client address; further ones are closed. Raise it if requests come through a "
        "proxy or an ingress, which is one client. Default: a quarter of maxConnections.",
    )

    @property
    def connections(self) -> int:
        """`max_connections`, or its default."""
        return 2 * self.max_held_requests + 1024 if self.max_connections is None else self.max_connections

    @property
    def connections_per_client(self) -> int:
        """`max_connections_per_client`, or its default."""
        return self.connections // 4 if self.max_connections_per_client is None else self.max_connections_per_client
