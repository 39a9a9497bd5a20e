"""What is kept beyond the demand. Pure arithmetic; all figures are requests per second.

Down to a headroom of 0.75 the reserve is a share of the demand: it takes noise and what the forecast does not know,
and these grow with it. Who asks for more wants to be safe from jumps. A jump goes to a level: what it takes beyond
what is there is the less the more there is. So what goes beyond is for a jump to `SMALL_FLEET` replicas' worth, in
part, and from a headroom of `WHOLE` on for all of it; but never to more than `JUMP` times the demand, since an
endpoint that hardly anybody asks is to stay small, and never less than the headroom says
(docs/decisions/autoscaler.md has the figures).
"""

from __future__ import annotations

PROPORTIONAL = 0.75
"""The headroom down to which the reserve is a share of the demand."""
WHOLE = 0.6
"""The headroom at which the whole of a jump is met."""
SMALL_FLEET = 7.0
"""Replicas' worth of demand."""
JUMP = 5.0
"""Times the demand."""
NOISE = 0.2
"""Of the reserve, what noise may take: that is what a reserve is for..."""
BARE = 0.82
"""... but of that of a headroom from here on, which noise alone exceeds."""


def with_reserve(demand: float, headroom: float, capacity: float) -> float:
    """The rate that replicas have to take for this demand; `capacity` is what one takes within the objective."""
    usual = demand / max(headroom, PROPORTIONAL)
    jump = min(JUMP * demand, SMALL_FLEET * capacity)
    share = min(1.0, max(0.0, PROPORTIONAL - headroom) / (PROPORTIONAL - WHOLE))
    return max(demand / headroom, (1 - share) * usual + share * jump)


def with_rest_of_reserve(demand: float, headroom: float, capacity: float) -> float:
    """The same for a demand that is as high as it is by noise alone."""
    share = NOISE * min(1.0, max(0.0, BARE - headroom) / (BARE - PROPORTIONAL))
    return demand + (1 - share) * (with_reserve(demand, headroom, capacity) - demand)


def planned(mean: float, highest: float, headroom: float, capacity: float) -> float:
    """The rate to plan for: the whole reserve for `mean`, the rest of it for what noise makes of that."""
    return max(with_reserve(mean, headroom, capacity), with_rest_of_reserve(highest, headroom, capacity))


def without_reserve(rate: float, headroom: float, capacity: float) -> float:
    """The highest demand for which replicas that take this rate are enough: `with_reserve`, inverted."""
    if headroom >= PROPORTIONAL:
        return rate * headroom
    low, high = 0.0, rate
    for _ in range(40):  # it never falls as demand rises, so halving finds the end
        middle = (low + high) / 2
        if with_reserve(middle, headroom, capacity) <= rate:
            low = middle
        else:
            high = middle
    return low
