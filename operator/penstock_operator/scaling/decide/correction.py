"""The curve held against what is observed: how much slower replicas are, and whether answers are late unexpectedly.

Only in steady state: while a backlog drains or replicas come and go, p95 tells of the past and not of a replica.
"""

from __future__ import annotations

import math

from penstock_operator.scaling.decide.measurement import Idle, Measurement, Metrics, Value, known
from penstock_operator.scaling.decide.service import FASTEST, Service
from penstock_operator.scaling.decide.settings import ScalingSettings
from penstock_operator.scaling.decide.state import State

FEWEST_ANSWERS = 100
"""A p95 of fewer answers in the slow window is chance."""


def steady(state: State, settings: ScalingSettings, now: float) -> bool:
    """True when nothing has changed for long enough."""
    return state.unsettled_at is None or now - state.unsettled_at >= settings.settle_seconds


def corrected(
    state: State, settings: ScalingSettings, service: Service, metrics: Metrics, *, replicas: int, now: float
) -> State:
    """The state with the slow-down that the observed p95 tells of."""
    rate = known(metrics.arrivals_slow)
    p95 = metrics.p95_milliseconds
    enough = rate is not None and rate * metrics.slow_seconds >= FEWEST_ANSWERS
    if rate is None or not enough or not isinstance(p95, Value) or metrics.coverage < settings.coverage_least:
        return state
    if replicas == 0 or not steady(state, settings, now):
        return state
    observed = service.slowdown_of(rate * metrics.scale, replicas, p95.value)
    share = 1 - math.exp(-(now - (state.at or now)) / settings.slowdown_memory_seconds)
    slowdown = state.slowdown + share * (min(observed, settings.slowdown_most) - state.slowdown)
    return state.model_copy(update={"slowdown": min(max(slowdown, FASTEST), settings.slowdown_most)})


def is_late(good_share: Measurement, settings: ScalingSettings) -> bool:
    """Whether more answers are late than a p95 within the objective allows."""
    return isinstance(good_share, Value) and good_share.value < settings.good_share_target - settings.good_share_slack


def watched(state: State, settings: ScalingSettings, metrics: Metrics, now: float) -> State:
    """The state with the time since when answers have been late in steady state."""
    good = metrics.good_share
    if not is_late(good, settings) or not steady(state, settings, now):
        # An unknown share says nothing: it neither accuses nor acquits.
        unknown = not isinstance(good, Value | Idle)
        return state if unknown or state.late_since is None else state.model_copy(update={"late_since": None})
    return state if state.late_since is not None else state.model_copy(update={"late_since": now})


def guard_acts(state: State, settings: ScalingSettings, now: float) -> bool:
    """True when answers have been late for long enough, although demand is within the planned capacity."""
    return state.late_since is not None and now - state.late_since >= settings.guard_seconds
