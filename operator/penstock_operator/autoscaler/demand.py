"""From measured rates to the demand that replicas have to meet when they are there. Pure arithmetic.

All rates are requests per second over the whole endpoint.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from penstock_operator.autoscaler.measurement import Metrics, known
from penstock_operator.autoscaler.settings import ScalingSettings
from penstock_operator.autoscaler.state import State, Surge

LEVEL_SECONDS = 30.0
"""Time constant of the smoothed demand: shorter than a start-up, longer than chance at a few requests a second."""
SURGE_SECONDS = 4.0
"""The same in a surge, where every second counts and chance is small beside the change."""
LEVELLED_SECONDS = 10.0
"""A surge is over when demand has set no new record for this long..."""
RECORD = 1.02
"""... by more than this factor."""
SURE = 2.0
"""Standard deviations of a Poisson count: what is beyond them is a change and not chance."""
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
) -> Demand | None:
    """The demand at `now` (seconds since the epoch), or None when no rate is known.

    `capacity` is what the replicas that are asked for take within the objective, without headroom: up to there chance
    is left to the headroom, and demand is smooth; what provably exceeds it counts at once.
    """
    fast = known(metrics.arrivals_fast)
    slow = known(metrics.arrivals_slow)
    rate = fast if fast is not None else slow
    if rate is None:
        return None
    scale = metrics.scale
    rate *= scale
    level, surge = _follow(rate, metrics.fast_seconds, state, now, capacity)
    if rate == 0 and level * LEVEL_SECONDS < 0.5:
        level = 0.0  # less than half a request: an average alone would never say that there is none
    ahead = min(settings.start_up_seconds, settings.furthest_seconds)
    slope = 0.0
    if surge is not None:
        slope = max(0.0, level - surge.from_rate) / max(now - surge.since, 1.0)
    elif slow is not None and not _recently(state.surged_at, now, metrics.slow_seconds + LEVEL_SECONDS):
        # For a while after a step the slow average lags behind it, and would make a slope of it.
        slope = _slope(min(level, rate), slow * scale, metrics.slow_seconds)
    most = 1 + MOST_GROWTH if surge is None else settings.surge_factor
    forecast = min(level + slope * ahead, level * most)
    in_flight = (known(metrics.in_flight) or 0.0) * scale
    # Little's law: a demand that is answered within the objective keeps at most this many in flight.
    backlog = max(0.0, in_flight - max(1.0, level * objective_seconds))
    return Demand(level, forecast, ahead, backlog, surge)


def _follow(
    rate: float, window_seconds: float, state: State, now: float, capacity: float
) -> tuple[float, Surge | None]:
    """The demand that follows the rate: slowly by itself, fast in a surge."""
    before, surge = state.level, state.surge
    if before is None or state.at is None:
        return rate, None
    elapsed = max(0.0, now - state.at)
    if proven(rate, window_seconds) > max(capacity, before):
        level = rate
        surge = surge or Surge(since=state.at, from_rate=before, highest=before, highest_at=now)
    else:
        constant = LEVEL_SECONDS if surge is None else SURGE_SECONDS
        level = before + (1 - math.exp(-elapsed / constant)) * (rate - before)
    if surge is None:
        return level, None
    if level > surge.highest * RECORD:
        return level, surge.model_copy(update={"highest": level, "highest_at": now})
    if now - surge.highest_at <= LEVELLED_SECONDS:
        return level, surge
    return before + (1 - math.exp(-elapsed / LEVEL_SECONDS)) * (rate - before), None


def _recently(when: float | None, now: float, seconds: float) -> bool:
    return when is not None and now - when < seconds


def proven(rate: float, window_seconds: float) -> float:
    """What of a rate counted over a window is no chance: the rate less two standard deviations of a Poisson count."""
    return max(0.0, rate - SURE * math.sqrt(rate / window_seconds))


def _slope(level: float, slow: float, slow_seconds: float) -> float:
    """Requests/s per second by which demand rises, as far as it is no chance; 0 where it falls."""
    between = slow_seconds / 2 - LEVEL_SECONDS  # from the middle of one average to that of the other
    if between <= 0:
        return 0.0
    chance = SURE * math.sqrt(level / (2 * LEVEL_SECONDS) + slow / slow_seconds)
    return max(0.0, level - slow - chance) / between
