"""The gateway in front of an endpoint's replicas: holds requests while none is up, and spreads them by work."""

from __future__ import annotations

from enum import StrEnum

from pydantic import Field

from penstock.resources.base import Spec


class GatewayMode(StrEnum):
    """Whether there is one."""

    AUTO = "Auto"
    ALWAYS = "Always"
    NEVER = "Never"


class Gateway(Spec):
    """What stands between the endpoint's address and its replicas (docs/reference/gateway.md)."""

    mode: GatewayMode = Field(
        default=GatewayMode.AUTO,
        description="`Auto` has one where scaling.minReplicas is 0; `Always`, so that each request goes to the replica "
        "with the least to do; `Never`: requests go straight to the replicas, and the last one stays.",
    )
    replicas: int = Field(
        default=2, ge=1, le=20, description="Pods of the gateway. Two, so that one may go without anybody's noticing."
    )
    max_held_requests: int = Field(
        default=512,
        ge=0,
        le=20_000,
        description="Requests that one pod of the gateway holds while no replica is up; the next is answered with 429.",
    )
    hold_seconds: int = Field(
        default=120, ge=1, le=3600, description="How long a request is held; then it is answered with 503."
    )
