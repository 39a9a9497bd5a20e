"""From measured rates to the demand that replicas have to meet when they are there. Pure arithmetic.

All rates are requests per second over the whole endpoint.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from penstock_operator.autoscaler.measurement import Metrics, known
from penstock_operator.autoscaler.settings import ScalingSettings

LEVEL_SECONDS = 30.0
"""Time constant of the smoothed demand: shorter than a start-up, longer than chance at a few requests a second."""
SURE = 2.0
"""Standard deviations of a Poisson count: what is beyond them is a change and not chance."""
MOST_GROWTH = 0.5
"""A forecast adds at most this share of today's demand: lines do not go on for ever."""


@dataclass(frozen=True, slots=True)
class Demand:
    """What is asked of the endpoint."""

    now: float
    """Requests/s that come now: smooth, except for what a sudden change proves."""
    forecast: float
    """Requests/s when a replica that is asked for now would take traffic; never under `now`."""
    ahead_seconds: float
    backlog: float
    """Requests in flight beyond those that the demand itself keeps in flight within the objective."""
    burst: bool = False
    """Demand has suddenly exceeded what the replicas take."""


def demand_of(
    metrics: Metrics,
    settings: ScalingSettings,
    *,
    level: float | None,
    elapsed_seconds: float,
    objective_seconds: float,
    capacity: float,
) -> Demand | None:
    """The demand, or None when no rate is known.

    `level` is the smoothed demand of the last decision, `elapsed_seconds` ago; None: there is none. `capacity` is what
    the replicas that are asked for take within the objective, without headroom: up to there chance is left to the
    headroom, and demand is smooth; what provably exceeds it counts at once.
    """
    fast = known(metrics.arrivals_fast)
    slow = known(metrics.arrivals_slow)
    rate = fast if fast is not None else slow
    if rate is None:
        return None
    # Of a part of the pods we know the rate: the others are taken to get as much.
    scale = 1 / metrics.coverage if 0 < metrics.coverage < 1 else 1.0
    rate *= scale
    share = 1.0 if level is None else 1 - math.exp(-elapsed_seconds / LEVEL_SECONDS)
    level = rate if level is None else level + share * (rate - level)
    sure = proven(rate, metrics.fast_seconds)
    burst = sure > max(capacity, level)
    level = sure if burst else level
    ahead = min(settings.start_up_seconds, settings.furthest_seconds)
    # A step has no slope, however steep it looks.
    slope = 0.0 if burst or slow is None else _slope(level, slow * scale, metrics.slow_seconds)
    forecast = min(level + slope * ahead, level * (1 + MOST_GROWTH))
    in_flight = (known(metrics.in_flight) or 0.0) * scale
    # Little's law: a demand that is answered within the objective keeps at most this many in flight.
    backlog = max(0.0, in_flight - max(1.0, level * objective_seconds))
    return Demand(level, forecast, ahead, backlog, burst=burst)


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
