"""What one replica can take, now: its measured curve, and how much slower than that it turned out to be.

A replica that is slower by a factor g is the measured one with every duration stretched by g. Time is then the only
thing that changed, so at an arrival rate r it behaves as the measured one does at g*r, with times g times as long:

    p95_now(r) = g * p95(g * r)            rate_within_now(limit) = rate_within(limit / g) / g

Several replicas behind a dispatcher that sends each request to the least busy one are more than their sum: the spare
capacity that keeps waiting rare grows with the root of the number of servers (square-root staffing; Halfin and Whitt,
1981). With s the saturation of one replica and r its rate within the objective,

    total(n) = n * s - (s - r) * sqrt(n)        total(1) = r

Without such a dispatcher (kube-proxy draws lots) replicas are single queues, and total(n) = n * r.

The left equation, solved for g, tells from one observed p95 how much slower the replica is, whatever the shape of the
curve and wherever on it the replica was; the right one gives the capacity that follows. Both are exact for any queue
whose service times all stretch alike (less cache, a lower clock, a noisy neighbour, longer texts).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from penstock.capacity import CapacityCurve

SLOWEST = 4.0
FASTEST = 0.25
"""Slow-downs are looked for between these."""


@dataclass(frozen=True)
class Service:
    """The capacity of one replica for one objective."""

    rate: float
    """`r_slo`: the highest arrival rate within the objective, requests/s."""
    p95_objective_milliseconds: float
    rates: tuple[float, ...]
    """Measured arrival rates, rising, requests/s."""
    p95_milliseconds: tuple[float, ...]
    """p95 at these rates, made monotone: noise does not make a busier replica faster."""
    saturation: float
    """The highest rate that was answered, whatever the latency, requests/s; at least `rate`."""
    pooled: bool = False
    """Requests go to the least busy replica, instead of any."""
    within_objective: bool = True
    """False: not even a nearly idle replica keeps the objective; `rate` is then what it keeps up with."""

    @classmethod
    def from_curve(
        cls, curve: CapacityCurve, *, p95_objective_milliseconds: float | None = None, pooled: bool = False
    ) -> Service | None:
        """From the artefact's curve, for the endpoint's objective or, without one, the curve's own.

        None when the curve has no points, or none at which the replica kept up: then nothing is known about it.
        """
        objective = p95_objective_milliseconds or curve.p95_objective_milliseconds
        points = sorted(curve.points, key=lambda point: point.arrivals_per_second)
        if objective is None or not points:
            return None
        rates: list[float] = []
        p95s: list[float] = []
        for point in points:
            if rates and point.arrivals_per_second <= rates[-1]:
                continue
            rates.append(point.arrivals_per_second)
            p95s.append(max(point.p95_milliseconds, p95s[-1] if p95s else 1e-3))
        rate = curve.rate_within(objective)
        # The objective is out of reach; the rate that it keeps up with still tells how many replicas are enough.
        keeps_up = rate if rate is not None else curve.rate_within(math.inf)
        if keeps_up is None:
            return None
        saturation = max(keeps_up, *(point.completed_per_second for point in points))
        return cls(
            keeps_up, objective, tuple(rates), tuple(p95s), saturation, pooled=pooled, within_objective=rate is not None
        )

    def total(self, replicas: int, *, slowdown: float = 1.0) -> float:
        """Arrival rate (requests/s) that so many replicas take together within the objective."""
        one = self.capacity(slowdown)
        if not self.pooled:
            return replicas * one
        saturation = max(one, self.saturation / max(slowdown, 1.0))
        return replicas * saturation - (saturation - one) * math.sqrt(replicas)

    def replicas_for(self, rate: float, *, slowdown: float = 1.0) -> float:
        """How many replicas take an arrival rate (requests/s) within the objective: `total`, inverted; not whole."""
        one = self.capacity(slowdown)
        if not self.pooled:
            return rate / one
        saturation = max(one, self.saturation / max(slowdown, 1.0))
        spare = saturation - one
        return ((spare + math.sqrt(spare * spare + 4 * saturation * rate)) / (2 * saturation)) ** 2 if rate > 0 else 0.0

    def p95_of(self, rate: float, replicas: int, *, slowdown: float = 1.0) -> float:
        """Predicted p95 in milliseconds when so many replicas share an arrival rate (requests/s)."""
        each = rate / replicas
        if not self.pooled:
            return self.p95_at(each, slowdown=slowdown)
        # The single replica that has as much to spare, measured by the root of its size.
        saturation = self.saturation / slowdown
        alike = saturation - (saturation - each) * math.sqrt(replicas)
        return self.p95_at(max(alike, 0.0), slowdown=slowdown)

    def p95_at(self, rate: float, *, slowdown: float = 1.0) -> float:
        """Predicted p95 in milliseconds of a single replica at an arrival rate (requests/s).

        Between points linear; under the first point its value; beyond the last one as steep as the last stretch, and at
        least in proportion.
        """
        scaled = rate * slowdown
        rates, p95s = self.rates, self.p95_milliseconds
        if scaled <= rates[0]:
            return slowdown * p95s[0]
        for index in range(1, len(rates)):
            if scaled <= rates[index]:
                share = (scaled - rates[index - 1]) / (rates[index] - rates[index - 1])
                return slowdown * (p95s[index - 1] + share * (p95s[index] - p95s[index - 1]))
        slope = p95s[-1] / rates[-1]
        if len(rates) > 1:
            slope = max(slope, (p95s[-1] - p95s[-2]) / (rates[-1] - rates[-2]))
        return slowdown * (p95s[-1] + slope * (scaled - rates[-1]))

    def slowdown_of(self, rate: float, replicas: int, p95_milliseconds: float) -> float:
        """The factor by which replicas that share this rate (requests/s) are slower than the curve, given their p95."""
        low, high = FASTEST, SLOWEST
        for _ in range(30):  # p95 rises with the slow-down, so halving finds the one solution
            middle = (low + high) / 2
            if self.p95_of(rate, replicas, slowdown=middle) < p95_milliseconds:
                low = middle
            else:
                high = middle
        return (low + high) / 2

    def capacity(self, slowdown: float = 1.0) -> float:
        """Arrival rate (requests/s) that a replica slower by this factor (at least 1) takes within the objective.

        At least a tenth of the measured rate: a correction must not ask for replicas without end.
        """
        slowdown = max(slowdown, 1.0)
        reach = self.rate
        if self.within_objective:
            reach = self._reach(self.p95_objective_milliseconds / slowdown)
        return max(min(reach, self.rate) / slowdown, self.rate / 10)

    def _reach(self, limit: float) -> float:
        """The highest measured rate whose p95 is within a limit in milliseconds; 0 when there is none."""
        reach = 0.0
        for index, (rate, p95) in enumerate(zip(self.rates, self.p95_milliseconds, strict=True)):
            if p95 > limit:
                if index:
                    low = self.p95_milliseconds[index - 1]
                    reach += (rate - reach) * (limit - low) / (p95 - low)
                break
            reach = rate
        return reach
