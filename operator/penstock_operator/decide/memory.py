"""The autoscaler's state between two decisions, and its updates from observations: shrink window and holds,
start-up times, slow-down, late answers. Pure.

`State` lives in the memory of the leading operator: small and frozen. Each function takes a `State` and returns a new
one, or answers a question about one. Times are seconds since the epoch.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic.alias_generators import to_camel

from penstock_operator.decide.measurement import Idle, Measurement, Metrics, Value, known
from penstock_operator.decide.service import FASTEST, Service
from penstock_operator.decide.settings import ScalingSettings

KEPT_START_UPS = 7
"""The newest start-up times that count: a new node image or a larger model is believed after four of them."""
SLICES = 10
"""The number of slices of the shrink window: a state of some hundred bytes, and a window a tenth too long at most."""
LONGEST_GAP_SECONDS = 60.0
"""After a longer time without a decision the shrink window starts again: demand in between is unknown."""
CLOCK_SLACK_SECONDS = 2.0
"""The clocks of two leaders may differ by this much."""
BEYOND = 1.1
"""A window that would just have been long enough is made longer by this factor."""
ENOUGH = 1.25
"""Up to this many times the replicas before a scale-down, noise may be the reason that more are needed after it."""
FORGET_SECONDS = 3600.0
"""After this long without a scale-down that was too early, the learnt window factor halves."""
LONGEST_START_UP_SECONDS = 900.0
"""A pod that took longer was waiting for something that cannot be planned for."""
FEWEST_ANSWERS = 100
"""A p95 of fewer answers in the slow window is not significant."""


class _Record(BaseModel):
    """Unknown fields, of another version, are ignored."""

    model_config = ConfigDict(
        frozen=True, extra="ignore", alias_generator=to_camel, populate_by_name=True, allow_inf_nan=False
    )


class Peak(_Record):
    """The most replicas that were needed during one slice of the shrink window."""

    since: float
    """Start of the slice, seconds since the epoch."""
    replicas: int


class Surge(_Record):
    """A rise that started with more demand than the replicas take, and has not levelled off yet. Rates: requests/s."""

    since: float
    """Time of the last decision before it, seconds since the epoch."""
    from_rate: float
    """Demand at that time."""
    highest: float
    """The highest demand since then."""
    highest_at: float


class Started(_Record):
    """A replica that became ready."""

    at: float
    """Time at which it became ready, seconds since the epoch."""
    seconds: float = Field(ge=0)
    """From its creation until then."""


class State(_Record):
    """Times are seconds since the epoch; None means never."""

    at: float | None = None
    """Time of the last decision. None: there was none, and nothing is known about the time before."""
    replicas: int | None = None
    """The number of replicas that it requested."""
    began_at: float | None = None
    """Start of uninterrupted observation. `peaks` has nothing from before this time."""
    level: float | None = None
    """Demand averaged over `demand.LEVEL_SECONDS`, requests/s."""
    base: float | None = None
    """Demand averaged over `demand.BASE_SECONDS`, requests/s: a level above it is a rise."""
    surge: Surge | None = None
    peaks: tuple[Peak, ...] = ()
    """One for each slice of the shrink window, oldest first."""
    hold_until: float = 0.0
    """No scale-down before this time..."""
    hold_reason: str = ""
    """... and the reason, a clause for the decision's sentence."""
    grown_at: float | None = None
    shrunk_at: float | None = None
    shrunk_from: int | None = None
    """The number of replicas before the last series of steps down..."""
    shrinking_since: float | None = None
    """... and the time of its first step. None: no step down since the last step up."""
    window_factor: float = Field(default=1.0, ge=1)
    """Factor by which the shrink window is longer than its setting, learnt from scale-downs that were too early."""
    factor_at: float | None = None
    """Time at which `window_factor` last changed."""
    calm_since: float | None = None
    """Since then: no backlog, no surge, and demand under the capacity of the ready replicas."""
    unsettled_at: float | None = None
    """Last time at which the number of replicas changed or demand was over capacity."""
    late_since: float | None = None
    """Since then too many answers have been late, in steady state."""
    slowdown: float = Field(default=1.0, gt=0)
    """Factor by which a replica is slower than its measured curve."""
    texts: float = Field(default=1.0, gt=0)
    """Factor by which requests take longer than measured ones, by the length of their texts, as
    last seen."""
    unknown_since: float | None = None
    """Since then the demand has been unknown."""
    started: tuple[Started, ...] = ()
    """Start-up times, oldest first; at most `KEPT_START_UPS`."""


# The shrink window


def window_seconds(state: State, settings: ScalingSettings) -> float:
    """The current length of the shrink window."""
    if settings.strict_window:
        return settings.shrink_window_seconds
    return settings.shrink_window_seconds * min(state.window_factor, settings.longest_window_factor)


def reset_after_gap(state: State, settings: ScalingSettings, now: float) -> State:
    """The part of the state that is still valid: after a start, a gap or a clock jump a new shrink window begins."""
    why = ""
    if state.at is None:
        why = "the autoscaler has just begun to watch"
    elif now < state.at - CLOCK_SLACK_SECONDS:
        why = f"the clock went back by {state.at - now:.0f} s"
    elif now - state.at > LONGEST_GAP_SECONDS:
        why = f"the load was not observed for {now - state.at:.0f} s"
    if not why:
        return state
    return State(
        at=now,
        replicas=state.replicas,
        began_at=now,
        hold_until=now + window_seconds(state, settings),
        hold_reason=why,
        # The gap does not make an earlier scale-down right: growing back still counts against it.
        shrunk_from=state.shrunk_from,
        shrinking_since=state.shrinking_since,
        window_factor=state.window_factor,
        factor_at=state.factor_at,
        unsettled_at=now,
        slowdown=state.slowdown,
        texts=state.texts,
        unknown_since=None if state.unknown_since is None else min(state.unknown_since, now),
        started=state.started,
    )


def observed_for_a_window(state: State, settings: ScalingSettings, now: float) -> bool:
    """Whether observation has been uninterrupted for the whole shrink window."""
    return state.began_at is not None and now - state.began_at >= window_seconds(state, settings)


def with_peak(state: State, settings: ScalingSettings, now: float, replicas: int) -> State:
    """The state with the number of replicas needed now, and without slices that ended before the window began."""
    width = window_seconds(state, settings) / SLICES
    begin = now - SLICES * width
    ends = [*(peak.since for peak in state.peaks), math.inf][1:]
    peaks = [peak for peak, end in zip(state.peaks, ends, strict=False) if end > begin]
    if peaks and now - peaks[-1].since < width:
        peaks[-1] = Peak(since=peaks[-1].since, replicas=max(peaks[-1].replicas, replicas))
    else:
        peaks.append(Peak(since=now, replicas=replicas))
    return state.model_copy(update={"peaks": tuple(peaks)})


def highest_peak(state: State, *, since: float = -math.inf) -> int:
    """The most replicas that were needed during the window, or after `since`; 0 without any slice."""
    ends = [*(peak.since for peak in state.peaks), math.inf][1:]
    return max((peak.replicas for peak, end in zip(state.peaks, ends, strict=False) if end > since), default=0)


def with_hold(state: State, until: float, reason: str) -> State:
    """The state with a hold on scaling down; a longer existing hold stays."""
    if until <= state.hold_until:
        return state
    return state.model_copy(update={"hold_until": until, "hold_reason": reason})


def scaled_up(state: State, settings: ScalingSettings, now: float, *, above: int, needed: int = 0) -> State:
    """The state after a step up from `above` replicas: growing back makes the window longer. `needed`: for the demand
    at this moment. If the number before the scale-down would not have been enough, the load has a new level: the
    scale-down was not too early.

    The new window is as long as would have kept these replicas, unless the longest window is too short for that; at
    least twice as long as before, and four times outside a surge: without a change of level, noise caused the step.
    A step up from zero never counts: an endpoint that may go to zero is meant to, and to come back for any request.
    """
    update: dict[str, object] = {"grown_at": now, "unsettled_at": now, "late_since": None}
    before = state.shrunk_from or 0
    if state.shrinking_since is not None and 0 < above < before and needed <= math.ceil(ENOUGH * before):
        window = window_seconds(state, settings)
        enough = (now - state.shrinking_since + window) * BEYOND
        longest = settings.shrink_window_seconds * settings.longest_window_factor
        if settings.shrink_window_seconds and not settings.strict_window and enough <= longest * BEYOND:
            step = 4 if state.surge is None else 2
            factor = max(step * state.window_factor, enough / settings.shrink_window_seconds)
            update |= {"window_factor": min(factor, settings.longest_window_factor), "factor_at": now}
    # One scale-down counts once, even if several steps take it back.
    return state.model_copy(update=update | {"shrunk_from": None, "shrinking_since": None})


def scaled_down(state: State, now: float, *, below: int, served: bool) -> State:
    """The state after a step down from `below` replicas; `served` False: the removed replicas had not started yet."""
    update: dict[str, object] = {"shrunk_at": now, "unsettled_at": now}
    if served and state.shrunk_from is None:
        update |= {"shrunk_from": below, "shrinking_since": now}
    return state.model_copy(update=update)


def with_shorter_window(state: State, now: float) -> State:
    """The state with half the learnt window factor once no scale-down was too early for `FORGET_SECONDS`."""
    if state.window_factor == 1 or state.factor_at is None or now - state.factor_at < FORGET_SECONDS:
        return state
    return state.model_copy(update={"window_factor": max(1.0, state.window_factor / 2), "factor_at": now})


# Start-up times. A pod's own timestamps give them, so no observation is needed while it starts.


def with_start_ups(state: State, seen: Iterable[Started], now: float) -> State:
    """The state with the start-ups in `seen` after all known ones; the newest `KEPT_START_UPS` stay.

    Times in the future come from another clock, and are ignored.
    """
    newest = state.started[-1].at if state.started else float("-inf")
    fresh = sorted(
        (one for one in seen if newest < one.at <= now and one.seconds <= LONGEST_START_UP_SECONDS),
        key=lambda one: (one.at, one.seconds),
    )
    return state.model_copy(update={"started": (*state.started, *fresh)[-KEPT_START_UPS:]}) if fresh else state


def expected_start_up_seconds(started: Iterable[Started], setting_seconds: float) -> float:
    """The expected start-up time of the next replica: the upper median of the observations and the setting.

    The setting counts as one observation, so that a single odd pod changes little. The upper median, because a replica
    that comes early costs seconds and one that comes late costs requests.
    """
    times = sorted([*(one.seconds for one in started), setting_seconds])
    return times[len(times) // 2]


# The observed p95 against the measured curve. Only in steady state: while a backlog drains or replicas come and go, p95
# describes the past, not a replica.


def is_steady(state: State, settings: ScalingSettings, now: float) -> bool:
    """Whether nothing has changed for `settle_seconds`."""
    return state.unsettled_at is None or now - state.unsettled_at >= settings.settle_seconds


def with_slowdown(
    state: State, settings: ScalingSettings, service: Service, metrics: Metrics, *, replicas: int, now: float
) -> State:
    """The state with the average slow-down updated from the observed p95; unchanged where that is not significant."""
    rate = known(metrics.arrivals_slow)
    p95 = metrics.p95_milliseconds
    enough = rate is not None and rate * metrics.slow_seconds >= FEWEST_ANSWERS
    if rate is None or not enough or not isinstance(p95, Value) or metrics.coverage < settings.coverage_least:
        return state
    if replicas == 0 or not is_steady(state, settings, now):
        return state
    observed = service.slowdown_of(rate * metrics.scale, replicas, p95.value)
    share = 1 - math.exp(-(now - (state.at or now)) / settings.slowdown_memory_seconds)
    slowdown = state.slowdown + share * (min(observed, settings.slowdown_most) - state.slowdown)
    return state.model_copy(update={"slowdown": min(max(slowdown, FASTEST), settings.slowdown_most)})


def is_late(good_share: Measurement, settings: ScalingSettings) -> bool:
    """Whether more answers are late than a p95 within the objective allows."""
    return isinstance(good_share, Value) and good_share.value < settings.good_share_target - settings.good_share_slack


def with_late_since(state: State, settings: ScalingSettings, metrics: Metrics, now: float) -> State:
    """The state with the time since when answers have been late in steady state."""
    good = metrics.good_share
    if not is_late(good, settings) or not is_steady(state, settings, now):
        # An unknown share changes nothing.
        unknown = not isinstance(good, Value | Idle)
        return state if unknown or state.late_since is None else state.model_copy(update={"late_since": None})
    return state if state.late_since is not None else state.model_copy(update={"late_since": now})


def guard_is_due(state: State, settings: ScalingSettings, now: float) -> bool:
    """Whether answers have been late for `guard_seconds`, although demand is within the planned capacity."""
    return state.late_since is not None and now - state.late_since >= settings.guard_seconds


# The change of leader. A new leader scales nothing down for a whole shrink window, and reads start-up times from the
# pods. It cannot observe again how long a window has to be (docs/decisions/autoscaler.md).


class _Learnt(_Record):
    """The JSON in the status field `scaling.memory`."""

    window_factor: float = Field(default=1.0, ge=1)


def dump_handover(state: State) -> str:
    """The learnt window factor for a new leader, as JSON."""
    # Rounded up: a window that is a little too long is on the safe side.
    return _Learnt(window_factor=math.ceil(state.window_factor * 100) / 100).model_dump_json(by_alias=True)


def restore_handover(text: str, settings: ScalingSettings, now: float, *, slowdown: float | None = None) -> State:
    """The state of a new leader at `now` (seconds since the epoch); `slowdown` is the value in the endpoint's status.

    `State.at` is None: this leader has not observed anything yet, and scales nothing down for a window. Any other text
    than one of `dump_handover` counts as a window that was not lengthened.
    """
    try:
        factor = _Learnt.model_validate_json(text).window_factor
    except ValidationError:
        factor = 1.0
    return State(
        slowdown=min(max(slowdown or 1.0, 1 / settings.slowdown_most), settings.slowdown_most),
        window_factor=min(factor, settings.longest_window_factor),
        factor_at=now,
    )
