"""From measured rates to the demand that replicas have to meet when they are there. Pure arithmetic.

All rates are requests per second over the whole endpoint.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from penstock_operator.scaling.decide.measurement import Metrics, known
from penstock_operator.scaling.decide.noise import (
    BAND,
    BASE_SECONDS,
    LASTING_SECONDS,
    LEVEL_SECONDS,
    UNREST_SECONDS,
    UNSEEN,
    deviation,
    unrest_of,
)
from penstock_operator.scaling.decide.reserve import BARE
from penstock_operator.scaling.decide.settings import ScalingSettings
from penstock_operator.scaling.decide.state import State, Surge

SURGE_SECONDS = 4.0
"""Time constant of the smoothed demand in a surge, where every second counts and chance is small beside the change."""
LEVELLED_SECONDS = 10.0
"""A surge is over when demand has set no new record for this long..."""
RECORD = 1.02
"""... by more than this factor."""
SURE = 2.0
"""Standard deviations of a Poisson count: what is beyond them is a change and not chance."""
RISE = 1.25
"""A surge as well: provably so many times the demand of before, beyond what the replicas that have started take."""
FALLING = 1.5
"""A demand that is off its longer average by so many times what noise may be is on its way, and does not just dip..."""
FALLING_SHARE = 0.12
"""... where that is over this share of it: noise of a tenth, in bouts of whatever length, stays under it."""
MOST_GROWTH = 0.5
"""A forecast is at most this share over today's demand, but in a surge: lines do not go on for ever."""


@dataclass(frozen=True, slots=True)
class Demand:
    """What is asked of the endpoint."""

    now: float
    """Requests/s that come now: smooth, except in a surge."""
    forecast: float
    """Requests/s when a replica that is asked for now would take traffic; never under `now`."""
    ahead_seconds: float
    backlog: float
    """Requests in flight beyond those that the demand itself keeps in flight within the objective."""
    base: float = 0.0
    """The demand smoothed for longer, for the next time."""
    twice: float = 0.0
    thrice: float = 0.0
    """The demand smoothed so often, for the next time."""
    unrest: float = UNSEEN
    """How much it moves about, as a share of it squared, beyond a Poisson count's."""
    lasting: float = UNSEEN
    """The same, forgotten slowly: how much it may move about again."""
    standing: bool = False
    """It goes nowhere, as far as can be told: what it is over its longer average is noise."""
    mean: float = 0.0
    """Requests/s that get the whole reserve: the forecast; of a demand that stands its longer average, if less."""
    falling: bool = False
    """It has been going down for a while: to plan for its coming back at once would be a waste."""
    staying: float = 0.0
    """Requests/s that replicas are kept for: of a demand that stands the longer average, of a falling one the line,
    which its average is behind."""
    surge: Surge | None = None
    """Demand has suddenly exceeded what the replicas take, and still rises."""


def demand_of(
    metrics: Metrics,
    settings: ScalingSettings,
    state: State,
    now: float,
    *,
    objective_seconds: float,
    capacity: float,
    started: float,
    planned: float,
    start_up_seconds: float,
) -> Demand | None:
    """The demand at `now` (seconds since the epoch), or None when no rate is known.

    `start_up_seconds` is how long a replica takes to serve. `capacity` is what the replicas that are asked for take
    within the objective, without headroom: up to there chance is left to the headroom, and demand is smooth; what
    provably exceeds it counts at once. `started` is what those of them take that have started; `planned` is the demand
    that all are just enough for, with the headroom.
    """
    fast = known(metrics.arrivals_fast)
    slow = known(metrics.arrivals_slow)
    rate = fast if fast is not None else slow
    if rate is None:
        return None
    scale = metrics.scale
    rate *= scale
    window = metrics.fast_seconds if fast is not None else metrics.slow_seconds
    level, surge = _follow(rate, proven(rate, window), state, now, (capacity, started))
    if state.level is None:
        # A first reading is a few seconds' count: what of it may be chance must not make a new leader grow.
        level = min(level, max(proven(rate, window), planned))
    if rate == 0 and level * LEVEL_SECONDS < 0.5:
        level = 0.0  # less than half a request: an average alone would never say that there is none
    ahead = min(start_up_seconds, settings.furthest_seconds)
    if state.base is None:
        base = max(level, rate)
    else:
        # A step has no slope: after it, the rise is told from where it ended.
        base = level if surge is not None else _smooth(state.base, level, BASE_SECONDS, state, now)
    unrest = UNSEEN if state.unrest is None else state.unrest
    if surge is not None:
        slope = max(0.0, level - surge.from_rate) / max(now - surge.since, 1.0)
    else:
        slope = _slope(min(level, rate), base, unrest)
    most = 1 + MOST_GROWTH if surge is None else settings.surge_factor
    # On a line an average is as far behind as its constant; in a surge it is hardly one.
    behind = LEVEL_SECONDS if surge is None else 0.0
    forecast = min(level + slope * (behind + ahead), level * most)
    in_flight = (known(metrics.in_flight) or 0.0) * scale
    # Little's law: a demand that is answered within the objective keeps at most this many in flight.
    backlog = max(0.0, in_flight - max(1.0, level * objective_seconds))
    on_its_way = max(FALLING * _chance(level, base, unrest), FALLING_SHARE * base)
    falling = surge is None and base - level > on_its_way
    twice = thrice = level
    if surge is None and state.twice is not None and state.thrice is not None:
        twice = _smooth(state.twice, level, LEVEL_SECONDS, state, now)
        thrice = _smooth(state.thrice, twice, LEVEL_SECONDS, state, now)
        # Of less than a request there is nothing to see.
        if level * LEVEL_SECONDS > 1 and abs(level - base) <= on_its_way:
            seen = unrest_of(level, twice, thrice, _elapsed(state, now))
            unrest = _smooth(unrest, seen, UNREST_SECONDS, state, now)
    lasting = (
        unrest if state.lasting is None else max(unrest, _smooth(state.lasting, unrest, LASTING_SECONDS, state, now))
    )
    noise = level - base <= BAND / SURE * _chance(level, base, unrest)
    # A reserve that noise alone exceeds has nothing to give it.
    standing = noise and surge is None and not falling and settings.headroom < BARE
    mean = min(forecast, base) if standing else forecast
    staying = base if standing else max(level, base)
    if surge is not None:
        staying = level
    elif falling:
        down = max(0.0, base - level - _chance(level, base, unrest)) / (BASE_SECONDS - LEVEL_SECONDS)
        staying = min(level, max(rate, level - LEVEL_SECONDS * down))
    return Demand(
        level, forecast, ahead, backlog, base, twice, thrice, unrest, lasting, standing, mean, falling, staying, surge
    )


def _follow(
    rate: float, sure: float, state: State, now: float, capacities: tuple[float, float]
) -> tuple[float, Surge | None]:
    """The demand that follows the rate: slowly by itself, fast in a surge.

    `sure` is what of the rate is no chance; `capacities` are of the replicas that are asked for, and of those that have
    started.
    """
    capacity, started = capacities
    before, surge = state.level, state.surge
    if before is None or state.at is None:
        return rate, None
    # By what is asked for alone, a smooth demand that grows into a jump would stay ahead of its detection.
    if sure > max(capacity, before) or sure > max(started, RISE * before):
        level = rate
        surge = surge or Surge(since=state.at, from_rate=before, highest=before, highest_at=now)
    else:
        level = _smooth(before, rate, LEVEL_SECONDS if surge is None else SURGE_SECONDS, state, now)
    if surge is None:
        return level, None
    if level > surge.highest * RECORD:
        return level, surge.model_copy(update={"highest": level, "highest_at": now})
    if now - surge.highest_at <= LEVELLED_SECONDS:
        return level, surge
    return _smooth(before, rate, LEVEL_SECONDS, state, now), None


def _smooth(before: float, value: float, constant_seconds: float, state: State, now: float) -> float:
    """Exponential smoothing over the time since the last decision."""
    return before + (1 - math.exp(-_elapsed(state, now) / constant_seconds)) * (value - before)


def _elapsed(state: State, now: float) -> float:
    return max(0.0, now - (state.at if state.at is not None else now))


def proven(rate: float, window_seconds: float) -> float:
    """What of a rate counted over a window is no chance: the rate less two standard deviations of a Poisson count."""
    return max(0.0, rate - SURE * math.sqrt(rate / window_seconds))


def _slope(level: float, base: float, unrest: float) -> float:
    """Requests/s per second by which demand rises, as far as it is no chance; 0 where it falls."""
    # An average over an exponential of constant T lags by T.
    return max(0.0, level - base - _chance(level, base, unrest)) / (BASE_SECONDS - LEVEL_SECONDS)


def _chance(level: float, base: float, unrest: float) -> float:
    """By how much the two averages may differ at a demand that goes nowhere, requests/s."""
    return SURE * math.sqrt(deviation(level, unrest) ** 2 + base / (2 * BASE_SECONDS))
