"""What is kept beyond the demand. Pure arithmetic; all figures are requests per second.

Down to a headroom of 0.75 the reserve is a share of the demand: it takes noise and what the forecast does not know, and
these grow with it. Who asks for more wants to be safe from jumps, and a jump is not smaller because there was little
before: what goes beyond is the same for all fleets up to `SMALL_FLEET` replicas' worth, but never for a jump to more
than `JUMP` times the demand, since an endpoint that hardly anybody asks is to stay small. So the same replica-hours
meet jumps from a low demand with more replicas (docs/decisions/autoscaler.md has the figures).
"""

from __future__ import annotations

PROPORTIONAL = 0.75
"""The headroom down to which the reserve is a share of the demand."""
SMALL_FLEET = 7.0
"""Replicas' worth of demand."""
JUMP = 5.0
"""Times the demand."""


def with_reserve(demand: float, headroom: float, capacity: float) -> float:
    """The rate that replicas have to take for this demand; `capacity` is what one takes within the objective."""
    share = 1 / max(headroom, PROPORTIONAL) - 1
    further = 1 / min(headroom, PROPORTIONAL) - 1 / PROPORTIONAL
    return demand * (1 + share) + further * max(demand, min(JUMP * demand, SMALL_FLEET * capacity))


def without_reserve(rate: float, headroom: float, capacity: float) -> float:
    """The demand for which replicas that take this rate are just enough: `with_reserve`, inverted."""
    if headroom >= PROPORTIONAL:
        return rate * headroom
    low, high = 0.0, rate
    for _ in range(40):  # it rises with the demand, so halving finds the one solution
        middle = (low + high) / 2
        if with_reserve(middle, headroom, capacity) <= rate:
            low = middle
        else:
            high = middle
    return low
