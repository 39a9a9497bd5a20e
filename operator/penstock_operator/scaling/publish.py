"""Which decisions are worth a write. Pure.

A decision is made every few seconds, and its figures are never twice the same; the API server is to hear of it when the
number changes, when metrics come or go, and when the figures have become others, but not more often than people read.
"""

from __future__ import annotations

from dataclasses import replace

from penstock_operator.plan.observed import Scale
from penstock_operator.scaling.decide import Decision, Observation, Unknown, Value

QUIET_SECONDS = 60.0
"""Nothing but the number and the availability of metrics is told more often."""
NOTICEABLE = 0.25
"""Figures that differ by less are the same."""


def scale_of(decision: Decision, seen: Observation, memory: str = "") -> Scale:
    """The decision as the plan takes it, with what a new leader goes on from. Figures have three digits: more would be
    chance."""
    demand, p95 = decision.demand, seen.metrics.p95_milliseconds
    available, curve = decision.metrics_available, decision.curve_current
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
        curve_current=curve.status,
        curve_reason=curve.reason,
        curve_message=curve.message,
        slowdown=round(decision.slowdown, 2),
        memory=memory,
    )


def blindness(seen: Observation) -> str:
    """Why nothing is known of the load, neither rate, as a clause; empty: something is."""
    fast, slow = seen.metrics.arrivals_fast, seen.metrics.arrivals_slow
    return fast.reason if isinstance(fast, Unknown) and isinstance(slow, Unknown) else ""


def unavailable(scale: Scale, why: str, seconds: float) -> Scale:
    """The same, and that nothing has been known of the load for so long: also where no decision depends on it yet."""
    message = f"{why}, for {seconds:.0f} s: replicas do not shrink"
    return replace(scale, metrics_available=False, metrics_reason="MetricsMissing", metrics_message=message)


def as_available_as(before: Scale, scale: Scale) -> Scale:
    """The same, with the availability that was told before: a missed reading or two are no news."""
    return replace(
        scale,
        metrics_available=before.metrics_available,
        metrics_reason=before.metrics_reason,
        metrics_message=before.metrics_message,
    )


def worth_telling(before: Scale | None, now: Scale, *, seconds: float) -> bool:
    """Whether to tell `now`, `seconds` after `before` was told."""
    if before is None or before.replicas != now.replicas:
        return True
    if (before.metrics_available, before.metrics_reason) != (now.metrics_available, now.metrics_reason):
        return True
    if before.curve_current is not now.curve_current:
        return True
    if seconds < QUIET_SECONDS:
        return False
    if before.cause != now.cause or before.memory != now.memory:
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
