"""Which arrival rates to measure for the capacity curve, one after the other. Pure: the measuring is elsewhere.

Rates rise geometrically until the objective is missed; then the knee between the last good and the first bad rate is
halved. A miss is believed only when most of up to three measurements miss: one burst of foreign work on the machine
must not end the curve.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from penstock.capacity import CapacityCurve, CapacityPoint

FIRST_SHARE = 0.15
"""The first rate, as a share of the throughput at saturation: low enough to be idle."""
GROWTH = 1.6
REFINEMENTS = 4
CLOSE = 1.06
"""Good and bad rates this near each other need no further halving."""
VOTES = 3
LOWEST_SHARE = 0.02
"""Below this share of saturation an objective is out of reach: it is tighter than a lone request takes."""
UNSTATED_FACTOR = 3.0
"""Without a latency objective, the knee is where p95 is this many times that of a nearly idle replica."""


@dataclass
class CapacitySteps:
    """The state of one curve."""

    saturation: float
    """Requests a second that a closed loop of many clients got."""
    p95_objective: float | None
    """Milliseconds; None: set by the first point."""
    measured: dict[float, list[CapacityPoint]] = field(default_factory=dict)
    refinements: int = 0

    @property
    def limit(self) -> float | None:
        """The p95 in milliseconds that a good point keeps; None before the first point where none is stated."""
        if self.p95_objective is not None:
            return self.p95_objective
        if not self.measured:
            return None
        idle = self.measured[min(self.measured)]
        return UNSTATED_FACTOR * _middle(idle).p95_milliseconds

    def record(self, point: CapacityPoint) -> None:
        """Take in a measurement at the rate that `next_rate` gave."""
        self.measured.setdefault(point.arrivals_per_second, []).append(point)

    def next_rate(self) -> float | None:
        """The rate to measure next, requests/s; None when the knee is known well enough."""
        if not self.measured:
            return self.saturation * FIRST_SHARE
        for rate, points in self.measured.items():
            if self._undecided(points):
                return rate
        good = [rate for rate, points in self.measured.items() if self._keeps(points)]
        bad = [rate for rate, points in self.measured.items() if not self._keeps(points)]
        if not bad:
            return max(good) * GROWTH
        below = [rate for rate in good if rate < min(bad)]
        if not below:
            lower = min(bad) / (GROWTH * GROWTH)
            return lower if lower >= self.saturation * LOWEST_SHARE else None
        if self.refinements >= REFINEMENTS or min(bad) / max(below) <= CLOSE:
            return None
        self.refinements += 1
        return math.sqrt(min(bad) * max(below))

    def curve(self) -> CapacityCurve:
        """The points by rising rate, one for each rate."""
        points = tuple(_middle(self.measured[rate]) for rate in sorted(self.measured))
        return CapacityCurve(points=points, p95_objective_milliseconds=self.limit)

    def _meets(self, point: CapacityPoint) -> bool:
        # Before the first point there is no limit, and the first point is what sets it.
        return point.meets(self.limit if self.limit is not None else math.inf)

    def _undecided(self, points: Sequence[CapacityPoint]) -> bool:
        """A first miss asks for a second opinion, and a split vote for a third."""
        votes = [self._meets(point) for point in points]
        if votes == [True]:
            return False
        return len(votes) < VOTES and abs(sum(votes) * 2 - len(votes)) < 2

    def _keeps(self, points: Sequence[CapacityPoint]) -> bool:
        votes = sum(self._meets(point) for point in points)
        return votes * 2 > len(points)


def _middle(points: Sequence[CapacityPoint]) -> CapacityPoint:
    """The point with the median p95 (the better one of two)."""
    ordered = sorted(points, key=lambda point: (point.refused_share, point.p95_milliseconds))
    return ordered[(len(ordered) - 1) // 2]
