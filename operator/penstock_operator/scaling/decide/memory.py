"""What the past forbids: the shrink window with its peaks, holds, and shrinks that had to be taken back. Pure."""

from __future__ import annotations

import math

from penstock_operator.scaling.decide.settings import ScalingSettings
from penstock_operator.scaling.decide.state import Peak, State

SLICES = 10
"""The window is remembered in so many slices: a status of some hundred bytes, and a window that is a tenth too long."""
LONGEST_GAP_SECONDS = 60.0
"""Without a decision for longer than this, nobody saw what was wanted: the window begins again."""
CLOCK_SLACK_SECONDS = 2.0
"""Leaders' clocks differ by so much without anybody's noticing."""
BEYOND = 1.1
"""A window that has just become long enough is made longer by this factor."""
FORGET_SECONDS = 3600.0
"""After so long without a shrink that had to be taken back, the window halves again."""


def window_seconds(state: State, settings: ScalingSettings) -> float:
    """The shrink window in force."""
    if settings.strict_window:
        return settings.shrink_window_seconds
    return settings.shrink_window_seconds * min(state.window_factor, settings.longest_window_factor)


def recalled(state: State, settings: ScalingSettings, now: float) -> State:
    """The state as far as it still holds: after a start, a gap or a clock that jumped, shrinking waits a window."""
    why = ""
    if state.at is None:
        why = "the autoscaler has just begun to watch"
    elif now < state.at - CLOCK_SLACK_SECONDS:
        why = f"the clock went back by {state.at - now:.0f} s"
    elif now - state.at > LONGEST_GAP_SECONDS:
        why = f"nobody watched for {now - state.at:.0f} s"
    if not why:
        return state
    return State(
        at=now,
        replicas=state.replicas,
        began_at=now,
        level=None,
        unrest=state.unrest,
        lasting=state.lasting,
        hold_until=now + window_seconds(state, settings),
        hold_reason=why,
        # Growing back into what was taken away before is no less regrettable for the interruption.
        shrunk_from=state.shrunk_from,
        shrinking_since=state.shrinking_since,
        window_factor=state.window_factor,
        factor_at=state.factor_at,
        unsettled_at=now,
        slowdown=state.slowdown,
        unknown_since=None if state.unknown_since is None else min(state.unknown_since, now),
        started=state.started,
    )


def watched_for_a_window(state: State, settings: ScalingSettings, now: float) -> bool:
    """Whether everything that was wanted within the shrink window has been seen."""
    return state.began_at is not None and now - state.began_at >= window_seconds(state, settings)


def with_peak(state: State, settings: ScalingSettings, now: float, replicas: int) -> State:
    """The state with what is wanted now, and without slices that ended before the window began."""
    width = window_seconds(state, settings) / SLICES
    begin = now - SLICES * width
    ends = [*(peak.since for peak in state.peaks), math.inf][1:]
    peaks = [peak for peak, end in zip(state.peaks, ends, strict=False) if end > begin]
    if peaks and now - peaks[-1].since < width:
        peaks[-1] = Peak(since=peaks[-1].since, replicas=max(peaks[-1].replicas, replicas))
    else:
        peaks.append(Peak(since=now, replicas=replicas))
    return state.model_copy(update={"peaks": tuple(peaks)})


def highest(state: State, *, since: float = -math.inf) -> int:
    """The most replicas that were wanted during the window, or after a time in it; 0 when nothing was."""
    ends = [*(peak.since for peak in state.peaks), math.inf][1:]
    return max((peak.replicas for peak, end in zip(state.peaks, ends, strict=False) if end > since), default=0)


def held(state: State, until: float, reason: str) -> State:
    """The state with a hold; an existing longer one stays."""
    if until <= state.hold_until:
        return state
    return state.model_copy(update={"hold_until": until, "hold_reason": reason})


def grown(state: State, settings: ScalingSettings, now: float, *, above: int) -> State:
    """The state after growing from `above`: growing back into what was taken away makes the window longer.

    As long as would have kept what was there, unless the longest window would not have; at least twice as long, and
    four times without a surge: then the load has no other level, and chance is what has to be waited out. Waking from
    zero is no growing back: an endpoint that may sleep is meant to, and to wake for whoever comes.
    """
    update: dict[str, object] = {"grown_at": now, "unsettled_at": now, "late_since": None}
    if state.shrinking_since is not None and state.shrunk_from is not None and 0 < above < state.shrunk_from:
        window = window_seconds(state, settings)
        enough = (now - state.shrinking_since + window) * BEYOND
        longest = settings.shrink_window_seconds * settings.longest_window_factor
        if settings.shrink_window_seconds and not settings.strict_window and enough <= longest * BEYOND:
            step = 4 if state.surge is None else 2
            factor = max(step * state.window_factor, enough / settings.shrink_window_seconds)
            update |= {"window_factor": min(factor, settings.longest_window_factor), "factor_at": now}
    # One shrink is regretted once, in however many steps it is taken back.
    return state.model_copy(update=update | {"shrunk_from": None, "shrinking_since": None})


def shrunk(state: State, now: float, *, below: int, served: bool) -> State:
    """The state after shrinking from `below`; `served` False: what was taken away had not started yet."""
    update: dict[str, object] = {"shrunk_at": now, "unsettled_at": now}
    if served and state.shrunk_from is None:
        update |= {"shrunk_from": below, "shrinking_since": now}
    return state.model_copy(update=update)


def forgiven(state: State, now: float) -> State:
    """The state with a window that shortens when no shrink had to be taken back for long."""
    if state.window_factor == 1 or state.factor_at is None or now - state.factor_at < FORGET_SECONDS:
        return state
    return state.model_copy(update={"window_factor": max(1.0, state.window_factor / 2), "factor_at": now})
