"""From measured rates to the demand that replicas must meet once they have started, and the reserve beyond it. Pure.

All rates are requests per second over the whole endpoint; times are seconds since the epoch.

The demand is an average of the arrival rate over half a minute. A difference to its longer average counts only where it
is more than noise: a Poisson count's, and `NOISE` of the rate beyond it, since real traffic varies more than that. A
demand within a band of noise around its longer average is stationary. A sudden rise beyond the capacity is followed at
once instead (`Surge`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from penstock_operator.decide.measurement import Metrics, known
from penstock_operator.decide.memory import State, Surge
from penstock_operator.decide.settings import ScalingSettings

LEVEL_SECONDS = 30.0
"""Time constant of the average demand: shorter than a start-up, longer than chance at a few requests a second."""
BASE_SECONDS = 150.0
"""Time constant of the longer average, which a rise is compared with: long enough to see a slow rise."""
SURGE_SECONDS = 4.0
"""Time constant of the average demand in a surge, where a delay costs more than chance."""
LEVELLED_SECONDS = 10.0
"""A surge is over once demand has not exceeded its maximum for this long..."""
RECORD = 1.02
"""... by more than this factor."""
SIGNIFICANT = 2.0
"""Standard deviations: a larger difference is a change and not chance."""
FALLING = 1.5
"""The load is falling once it is this many times the significant difference below its longer average..."""
FALLING_SHARE = 0.12
"""... and this share of that average."""
MOST_GROWTH = 0.5
"""Outside a surge a forecast is at most this share over the demand: a straight line does not hold for ever."""
NOISE = 0.025
"""Standard deviation of the average demand beyond a Poisson count, as a share of it: of a rate which is off by up to a
tenth from one scrape to the next."""
STATIONARY = 3.0
"""A demand that exceeds its longer average by at most this many deviations of their difference is stationary."""
STEADY = 3.5
"""Standard deviations that replicas are kept for: an hour of noise rarely exceeds them."""
AVERAGED = 0.6
"""The deviation of the longer average, as a share of the demand's deviation."""
NOISE_SHARE = 0.2
"""Share of the reserve that noise of a stationary demand may use..."""
NO_NOISE_HEADROOM = 0.82
"""... decreasing to none at this headroom: noise alone exceeds its reserve."""
PROPORTIONAL = 0.75
"""Down to this headroom the reserve is a share of the demand."""
WHOLE = 0.6
"""At this headroom and below the reserve is for the whole of a jump."""
SMALL_FLEET = 7.0
"""A jump goes to this many replicas' worth of demand..."""
JUMP = 5.0
"""... but to no more than this many times the demand."""


@dataclass(frozen=True, slots=True)
class Capacity:
    """What replicas take within the objective, without headroom, in requests/s; and how fast more of them come."""

    one: float
    """One replica."""
    requested: float
    """All replicas that are requested. Below this the headroom absorbs chance, and demand is an average; a rate that is
    significantly above it counts at once."""
    in_flight_seconds: float
    """A request that is answered within the objective is in flight for no longer."""
    start_up_seconds: float


@dataclass(frozen=True, slots=True)
class Demand:
    """The load of the endpoint."""

    now: float
    """Current requests/s: an average over `LEVEL_SECONDS`, except in a surge."""
    forecast: float
    """Requests/s at the time when a replica that is requested now takes traffic; never under `now`."""
    ahead_seconds: float
    """From now until that time."""
    backlog: float
    """Requests in flight beyond those that this demand keeps in flight within the objective."""
    base: float = 0.0
    """Requests/s averaged over `BASE_SECONDS`."""
    planned: float = 0.0
    """Requests/s that get the whole reserve: the forecast; of a stationary demand its longer average, if less."""
    stationary: bool = False
    """It is over its longer average by no more than noise; False before that average has settled."""
    falling: bool = False
    """The load has been falling for a while: it is not expected to come back at once."""
    fallen: bool = False
    """It is falling by its longer average, and has reached its new level: noise may raise it again."""
    to_keep: float = 0.0
    """Requests/s that a scale-down must leave replicas for: the higher average; of a stationary demand the longer
    average, of a falling one its straight line, of a fallen one its level."""
    surge: Surge | None = None
    """Demand has suddenly exceeded the capacity of the replicas, and still rises."""


def demand_of(
    metrics: Metrics, settings: ScalingSettings, capacity: Capacity, state: State, now: float
) -> Demand | None:
    """The demand at `now`, or None if no rate is known."""
    fast = known(metrics.arrivals_fast)
    slow = known(metrics.arrivals_slow)
    rate = fast if fast is not None else slow
    if rate is None:
        return None
    rate *= metrics.scale
    significant = proven(rate, metrics.fast_seconds if fast is not None else metrics.slow_seconds)
    level, surge = _follow(rate, significant, capacity, state, now)
    if state.level is None:
        # The first reading of a new leader counts a few seconds: chance in it must not scale the endpoint up.
        level = min(level, max(significant, demand_for_rate(capacity.requested, settings.headroom, capacity.one)))
    if rate == 0 and level * LEVEL_SECONDS < 0.5:
        level = 0.0  # less than half a request: an average alone never reaches zero
    if state.base is None:
        base = max(level, rate)
    else:
        # A step has no slope: after a surge the longer average starts again at its end.
        base = level if surge is not None else _average(state.base, level, BASE_SECONDS, state, now)
    ahead = min(capacity.start_up_seconds, settings.furthest_seconds)
    chance = SIGNIFICANT * math.hypot(deviation(level), math.sqrt(base / (2 * BASE_SECONDS)))
    falling = surge is None and base - level > max(FALLING * chance, FALLING_SHARE * base)
    # The longer average lags for minutes after the end of a fall, the mean of the slow window for a minute.
    fallen = falling and slow is not None and slow * metrics.scale <= level
    # The longer average of a new leader starts at a reading of a few seconds, which may be off by chance.
    settled = state.began_at is not None and now - state.began_at >= 2 * BASE_SECONDS
    noise_only = settled and level - base <= STATIONARY / SIGNIFICANT * chance
    stationary = noise_only and surge is None and not falling and settings.headroom < NO_NOISE_HEADROOM
    if surge is not None:
        slope = max(0.0, level - surge.from_rate) / max(now - surge.since, 1.0)
        forecast = min(level + slope * ahead, level * settings.surge_factor)
        to_keep = level
    else:
        slope = max(0.0, min(level, rate) - base - chance) / (BASE_SECONDS - LEVEL_SECONDS)
        # An average of a straight line lags by its time constant, the difference of two by the difference.
        forecast = min(level + slope * (LEVEL_SECONDS + ahead), level * (1 + MOST_GROWTH))
        fall = max(0.0, base - level - chance) / (BASE_SECONDS - LEVEL_SECONDS)
        to_keep = base if stationary else max(level, base)
        if falling:
            to_keep = level if fallen else min(level, max(rate, level - LEVEL_SECONDS * fall))
    in_flight = (known(metrics.in_flight) or 0.0) * metrics.scale
    # Little's law: a demand that is answered within the objective keeps at most this many in flight.
    backlog = max(0.0, in_flight - max(1.0, level * capacity.in_flight_seconds))
    return Demand(
        now=level,
        forecast=forecast,
        ahead_seconds=ahead,
        backlog=backlog,
        base=base,
        planned=min(forecast, base) if stationary else forecast,
        stationary=stationary,
        falling=falling,
        fallen=fallen,
        to_keep=to_keep,
        surge=surge,
    )


def _follow(
    rate: float, significant: float, capacity: Capacity, state: State, now: float
) -> tuple[float, Surge | None]:
    """The average demand, updated with the current rate: slowly, but fast in a surge."""
    before, surge = state.level, state.surge
    if before is None or state.at is None:
        return rate, None
    if significant > max(capacity.requested, before):
        level = rate
        surge = surge or Surge(since=state.at, from_rate=before, highest=before, highest_at=now)
    else:
        level = _average(before, rate, LEVEL_SECONDS if surge is None else SURGE_SECONDS, state, now)
    if surge is None:
        return level, None
    if level > surge.highest * RECORD:
        return level, surge.model_copy(update={"highest": level, "highest_at": now})
    if now - surge.highest_at <= LEVELLED_SECONDS:
        return level, surge
    return _average(before, rate, LEVEL_SECONDS, state, now), None


def _average(before: float, value: float, constant_seconds: float, state: State, now: float) -> float:
    """Exponential average over the time since the last decision."""
    elapsed = max(0.0, now - (state.at if state.at is not None else now))
    return before + (1 - math.exp(-elapsed / constant_seconds)) * (value - before)


def proven(rate: float, window_seconds: float) -> float:
    """The lower limit of a rate counted over a window: less two standard deviations of a Poisson count."""
    return max(0.0, rate - SIGNIFICANT * math.sqrt(rate / window_seconds))


def deviation(level: float) -> float:
    """The standard deviation of the average demand, requests/s: of a Poisson count, and of the noise beyond it."""
    # An exponential average with constant T is as precise as a count over 2 T.
    return math.sqrt(level / (2 * LEVEL_SECONDS) + (NOISE * level) ** 2)


def with_reserve(demand: float, headroom: float, capacity: float) -> float:
    """The rate that replicas should take for a demand, reserve included; `capacity` is the rate of one replica.

    Down to a headroom of `PROPORTIONAL` the reserve is a share of the demand: for noise and what the forecast does not
    know, which grow with it. A smaller headroom is for safety from jumps. A jump goes to a level: the more replicas
    there are, the less it adds. So the rest of the reserve is for a jump to `SMALL_FLEET` replicas' worth, in part, and
    from a headroom of `WHOLE` on entirely; but to at most `JUMP` times the demand, so that an endpoint with few
    requests stays small, and never less than the headroom requires (figures: docs/decisions/autoscaler.md).
    """
    usual = demand / max(headroom, PROPORTIONAL)
    jump = min(JUMP * demand, SMALL_FLEET * capacity)
    share = min(1.0, max(0.0, PROPORTIONAL - headroom) / (PROPORTIONAL - WHOLE))
    return max(demand / headroom, (1 - share) * usual + share * jump)


def with_part_of_reserve(demand: float, headroom: float, capacity: float) -> float:
    """The same for a demand that is this high because of noise, which may use `NOISE_SHARE` of the reserve."""
    share = NOISE_SHARE * min(1.0, max(0.0, NO_NOISE_HEADROOM - headroom) / (NO_NOISE_HEADROOM - PROPORTIONAL))
    return demand + (1 - share) * (with_reserve(demand, headroom, capacity) - demand)


def rate_to_plan(average: float, highest: float, headroom: float, capacity: float) -> float:
    """The rate that replicas should take: the whole reserve for `average`, a part of it for the `highest` demand."""
    return max(with_reserve(average, headroom, capacity), with_part_of_reserve(highest, headroom, capacity))


def rate_to_keep(rate: float, demand: Demand, headroom: float, capacity: float) -> float:
    """The rate that a scale-down must leave replicas for: with a margin over scaling up, until the load has fallen."""
    if demand.falling and not demand.fallen:
        return with_reserve(rate, headroom, capacity)
    noise = STEADY * deviation(rate)
    if demand.stationary:
        return rate_to_plan(rate + AVERAGED * noise, rate + noise, headroom, capacity)
    return with_reserve(rate + noise, headroom, capacity)


def demand_for_rate(rate: float, headroom: float, capacity: float) -> float:
    """The highest demand for which replicas that take this rate are enough: the inverse of `with_reserve`."""
    if headroom >= PROPORTIONAL:
        return rate * headroom
    low, high = 0.0, rate
    for _ in range(40):  # it increases with demand, so bisection finds the end
        middle = (low + high) / 2
        if with_reserve(middle, headroom, capacity) <= rate:
            low = middle
        else:
            high = middle
    return low
