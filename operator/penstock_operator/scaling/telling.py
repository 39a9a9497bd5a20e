"""Which decisions are worth a write. Pure.

A decision is made every few seconds, and its figures are never twice the same; the API server is to hear of it when the
number changes, when metrics come or go, and when the figures have become others, but not more often than people read.
"""

from __future__ import annotations

from penstock_operator.autoscaler import Decision, Observation, Unknown, Value
from penstock_operator.plan.observed import Scale

QUIET_SECONDS = 60.0
"""Nothing but the number and the availability of metrics is told more often."""
NOTICEABLE = 0.25
"""Figures that differ by less are the same."""


def scale_of(decision: Decision, seen: Observation) -> Scale:
    """The decision as the plan takes it. Figures have three digits: more would be chance."""
    demand, p95 = decision.demand, seen.metrics.p95_milliseconds
    available = decision.metrics_available
    return Scale(
        replicas=decision.replicas,
        reason=f"{decision.reason}.",
        cause=decision.cause.value,
        metrics_available=available.status,
        metrics_reason=available.reason,
        metrics_message=available.message,
        requests_per_second=None if demand is None else _rounded(demand.now),
        capacity_per_replica=None if decision.capacity is None else _rounded(decision.capacity),
        p95_milliseconds=_rounded(p95.value) if isinstance(p95, Value) else None,
        slowdown=round(decision.slowdown, 2),
    )


def is_blind(seen: Observation) -> bool:
    """Nothing is known of the load: neither rate."""
    return isinstance(seen.metrics.arrivals_fast, Unknown) and isinstance(seen.metrics.arrivals_slow, Unknown)


def worth_telling(before: Scale | None, now: Scale, *, seconds: float) -> bool:
    """Whether to tell `now`, `seconds` after `before` was told."""
    if before is None or before.replicas != now.replicas:
        return True
    if (before.metrics_available, before.metrics_reason) != (now.metrics_available, now.metrics_reason):
        return True
    if seconds < QUIET_SECONDS:
        return False
    if before.cause != now.cause:
        return True
    return any(
        _differ(old, new)
        for old, new in (
            (before.requests_per_second, now.requests_per_second),
            (before.capacity_per_replica, now.capacity_per_replica),
            (before.slowdown, now.slowdown),
        )
    )


def _differ(old: float | None, new: float | None) -> bool:
    if old is None or new is None:
        return old is not new
    # Of a load under one request a second only its end is worth a word.
    if max(old, new) < 1:
        return (old == 0) is not (new == 0)
    return abs(new - old) > NOTICEABLE * max(old, new)


def _rounded(value: float) -> float:
    return float(f"{value:.3g}")
