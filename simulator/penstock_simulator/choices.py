"""Names for users: policies, dispatch modes, built-in traces. Imports nothing, for the command line."""

from __future__ import annotations

from enum import StrEnum


class PolicyKind(StrEnum):
    """The autoscaling policies."""

    PENSTOCK = "penstock"
    """With the operator's own scrapes, its default."""
    PENSTOCK_PROMETHEUS = "penstock-prometheus"
    """With the latency of Prometheus, at the same interval as the rivals, and the load of its own scrapes."""
    HPA_P95 = "hpa-p95"
    HPA_IN_FLIGHT = "hpa-in-flight"
    KEDA = "keda"
    """With the rate of two minutes, as its documents have it."""
    KEDA_RECENT = "keda-recent"
    """With the shortest rate that the scrapes allow."""
    KEDA_IN_FLIGHT = "keda-in-flight"
    KPA = "kpa"


class Dispatch(StrEnum):
    """How a replica is chosen for a request."""

    LEAST_OUTSTANDING = "least-outstanding"
    """A gateway sends each request to the replica with the fewest unanswered ones."""
    RANDOM = "random"
    """A Service without a gateway: kube-proxy chooses at random."""
    GATEWAY_QUEUE = "gateway-queue"
    """A gateway keeps the queue and hands out a request when a server is free."""


BUILT_IN_TRACES = ("step", "ramp", "spike", "diurnal", "flash-crowd", "noisy", "on-off")
