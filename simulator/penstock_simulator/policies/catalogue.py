"""The policies by name, each with its knob and the values that a comparison tries."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from penstock_operator.scaling.decide import ScalingSettings, Service
from penstock_simulator.policies.base import Limits, Policy
from penstock_simulator.policies.hpa import HpaOnInFlight, HpaOnP95
from penstock_simulator.policies.keda import Keda
from penstock_simulator.policies.kpa import Kpa
from penstock_simulator.policies.ours import Ours
from penstock_simulator.replica import ReplicaModel


@dataclass(frozen=True)
class Endpoint:
    """What policies may know about the endpoint, and how they are fed."""

    service: Service
    model: ReplicaModel
    limits: Limits
    scrape_interval: int = 5


class PolicyKind(StrEnum):
    """The policies."""

    PENSTOCK = "penstock"
    """Fed by the operator's own scrapes, its default."""
    PENSTOCK_PROMETHEUS = "penstock-prometheus"
    """Fed by Prometheus, at the interval of the others."""
    HPA_P95 = "hpa-p95"
    HPA_IN_FLIGHT = "hpa-in-flight"
    KEDA = "keda"
    KPA = "kpa"


@dataclass(frozen=True)
class PolicyFacts:
    """A policy for tables and sweeps."""

    title: str
    knob: str
    """What the knob is, for people."""
    values: tuple[float, ...]
    """What a comparison tries, from many replicas to few."""
    make: Callable[[Endpoint, float], Policy]
    own_scrape_seconds: int | None = None
    """It scrapes by itself, at this interval; None: Prometheus does, for it as for the others."""
    is_ours: bool = False


OWN_SCRAPE_SECONDS = 2
"""The operator's own scrapes: two counters and a gauge of each pod."""
HEADROOMS = (0.35, 0.4, 0.45, 0.5, 0.55, 0.6, 0.65, 0.7, 0.75, 0.82, 0.9)


def _ours(endpoint: Endpoint, headroom: float, scrape_interval: int) -> Ours:
    limits = endpoint.limits
    settings = ScalingSettings(
        min_replicas=limits.min_replicas,
        max_replicas=limits.max_replicas,
        headroom=headroom,
    )
    # Its own scrapes make a rate of any two samples; a query of Prometheus has to survive lost ones.
    samples = 1.5 if scrape_interval == OWN_SCRAPE_SECONDS else 4.0
    fast = samples * scrape_interval
    return Ours(settings, endpoint.service, interval=scrape_interval, fast_seconds=fast, slow_seconds=120.0)


def _in_flight(endpoint: Endpoint) -> float:
    """Requests in flight on a replica at its limit: Little's law with the mean service time."""
    return endpoint.service.rate * (endpoint.model.mean_service_seconds + endpoint.model.fixed_seconds)


POLICIES: dict[PolicyKind, PolicyFacts] = {
    PolicyKind.PENSTOCK: PolicyFacts(
        "Penstock",
        "headroom",
        HEADROOMS,
        lambda endpoint, knob: _ours(endpoint, knob, OWN_SCRAPE_SECONDS),
        OWN_SCRAPE_SECONDS,
        is_ours=True,
    ),
    PolicyKind.PENSTOCK_PROMETHEUS: PolicyFacts(
        "Penstock on Prometheus",
        "headroom",
        HEADROOMS,
        lambda endpoint, knob: _ours(endpoint, knob, endpoint.scrape_interval),
        is_ours=True,
    ),
    PolicyKind.HPA_P95: PolicyFacts(
        "HPA on p95",
        "target p95, share of the objective",
        (0.5, 0.55, 0.6, 0.65, 0.7, 0.75, 0.8, 0.85, 0.9, 1.0, 1.15, 1.3, 1.6, 2.0, 2.6),
        lambda endpoint, knob: HpaOnP95(
            endpoint.limits,
            target_seconds=knob * endpoint.service.p95_objective_milliseconds / 1000,
            window_seconds=max(60.0, 4 * endpoint.scrape_interval),
        ),
    ),
    PolicyKind.HPA_IN_FLIGHT: PolicyFacts(
        "HPA on requests in flight",
        "target in flight, share of a replica at its limit",
        (0.4, 0.45, 0.5, 0.55, 0.6, 0.65, 0.7, 0.78, 0.85, 0.93, 1.0, 1.15, 1.3, 1.5, 1.7, 2.1, 2.5),
        lambda endpoint, knob: HpaOnInFlight(endpoint.limits, target=knob * _in_flight(endpoint)),
    ),
    PolicyKind.KEDA: PolicyFacts(
        "KEDA on the request rate",
        "threshold, share of a replica's rate at its limit",
        (0.2, 0.25, 0.3, 0.35, 0.4, 0.45, 0.5, 0.55, 0.6, 0.65, 0.7, 0.75, 0.8, 0.85, 0.9, 0.95, 1.0, 1.1),
        lambda endpoint, knob: Keda(endpoint.limits, threshold=knob * endpoint.service.rate),
    ),
    PolicyKind.KPA: PolicyFacts(
        "Knative KPA",
        "target concurrency, share of a replica at its limit",
        (0.2, 0.25, 0.3, 0.35, 0.4, 0.45, 0.5, 0.55, 0.6, 0.68, 0.75, 0.82, 0.9, 1.05, 1.2, 1.4, 1.6, 2.0, 2.5),
        lambda endpoint, knob: Kpa(endpoint.limits, target=knob * _in_flight(endpoint)),
    ),
}


def make_policy(kind: PolicyKind, endpoint: Endpoint, knob: float) -> Policy:
    """A fresh policy with a value of its knob."""
    if not math.isfinite(knob) or knob <= 0:
        raise ValueError(f"{kind.value}: the knob must be a positive number, not {knob}")
    return POLICIES[kind].make(endpoint, knob)
