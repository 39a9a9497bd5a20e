"""The first replica and the last: what `decide` leaves open about zero. Pure.

To zero only while it is proven that nothing is asked: a request that waits at the gateway keeps the replica that starts
for it, however long that takes. From zero as soon as anything waits, without the two readings that a rate would take.
Neither needs a capacity curve, so that an endpoint of which nobody measured any goes to sleep and wakes as well.
"""

from __future__ import annotations

from dataclasses import replace

from penstock_operator.scaling.decide import memory
from penstock_operator.scaling.decide.decision import Cause, Decision, Observation
from penstock_operator.scaling.decide.explain import number
from penstock_operator.scaling.decide.measurement import known
from penstock_operator.scaling.decide.replicas import decide
from penstock_operator.scaling.decide.service import Service
from penstock_operator.scaling.decide.settings import ScalingSettings
from penstock_operator.scaling.decide.state import State


def decide_from_zero(
    settings: ScalingSettings, service: Service | None, seen: Observation, state: State, now: float
) -> tuple[Decision, State]:
    """As `decide`; also where `min_replicas` is 0."""
    decision, after = decide(settings, service, seen, state, now)
    if settings.min_replicas > 0:
        return decision, after
    waiting = known(seen.metrics.in_flight) or 0.0
    if seen.replicas == 0:
        return _from_zero(decision, after, settings, waiting, now)
    if service is None:
        after = memory.with_peak(after, settings, now, 0 if seen.metrics.quiet else seen.replicas)
        return _without_curve(decision, after, settings, seen, now)
    if decision.replicas == 0 and not seen.metrics.quiet:
        why = f"{number(waiting)} requests are under way" if waiting else "nobody knows whether anything is asked"
        return _with(decision, after, 1, Cause.HELD, f"1 replica: none would do, but {why}")
    return decision, after


def _from_zero(
    decision: Decision, state: State, settings: ScalingSettings, waiting: float, now: float
) -> tuple[Decision, State]:
    asked = decision.replicas > 0
    if not waiting and not asked:
        return decision, state
    # Whoever wakes it is followed by nobody, as often as not: the window begins with this one.
    state = memory.with_peak(state, settings, now, max(1, decision.replicas))
    if asked:
        return decision, state
    verb = "request waits" if waiting == 1 else "requests wait"
    reason = f"1 replica, up from 0: {number(waiting)} {verb} at the gateway"
    return _with(decision, memory.grown(state, settings, now, above=0), 1, Cause.WOKEN, reason)


def _without_curve(
    decision: Decision, state: State, settings: ScalingSettings, seen: Observation, now: float
) -> tuple[Decision, State]:
    idle = memory.watched_for_a_window(state, settings, now) and memory.highest(state) == 0
    if not idle or seen.rolling_out or now < state.hold_until:
        return decision, state
    window = memory.window_seconds(state, settings)
    reason = f"0 replicas, down from {seen.replicas}: nobody has asked for {window:.0f} s"
    state = memory.shrunk(state, now, below=seen.replicas, served=True)
    return _with(decision, state, 0, Cause.IDLE, reason)


def _with(decision: Decision, state: State, replicas: int, cause: Cause, reason: str) -> tuple[Decision, State]:
    decided = replace(decision, replicas=replicas, cause=cause, reason=reason)
    return decided, state.model_copy(update={"replicas": replicas})
