"""A replica as a queue: servers, service times and a fixed delay, fitted to the endpoint's own capacity curve.

One replica is c servers in front of one queue. Service times are log-normal; what an answer takes besides (network,
tokenisation in other threads) is a constant that occupies no server. The fit has no knob: at the lowest measured rate
hardly anything waits, so p50 and p95 there are those of a lone request; the number of servers and the saturation are
those whose simulated p95 is nearest to the measured one over the other rates.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from penstock.capacity import CapacityCurve, CapacityPoint
from penstock.errors import SettingError

P95_SIGMAS = 1.6449
"""Standard normal quantile of 0.95."""
MOST_SERVERS = 16
SATURATIONS = (1.0, 1.04, 1.1, 1.2, 1.35)
"""The saturation is looked for at these multiples of the highest rate that was answered."""
FIT_REQUESTS = 1500
"""Simulated for each point and candidate."""
FIT_POINTS = 8


@dataclass(frozen=True)
class ReplicaModel:
    """The queue that stands for a replica. Times are seconds."""

    servers: int
    mean_service_seconds: float
    sigma: float
    """Of the logarithm of the service time."""
    fixed_seconds: float = 0.0

    @property
    def saturation(self) -> float:
        """Requests/s that it answers when it never idles."""
        return self.servers / self.mean_service_seconds

    @classmethod
    def from_curve(cls, curve: CapacityCurve) -> ReplicaModel:
        """Fit to a measured curve; SettingError when it has no points."""
        points = sorted(curve.points, key=lambda point: point.arrivals_per_second)
        if not points:
            raise SettingError(
                "the capacity curve has no points",
                field="--curve",
                remedy="Give an artefact whose optimisation measured its capacity, or leave --curve out",
            )
        candidates = [*_candidates(points)]
        chosen = [points[index] for index in sorted({*np.linspace(0, len(points) - 1, FIT_POINTS).round().astype(int)})]
        return min(candidates, key=lambda model: _misfit(model, chosen))

    def service_seconds(self, random: np.random.Generator, count: int) -> np.ndarray:
        """Service times drawn at random; shape [count], float64."""
        location = math.log(self.mean_service_seconds) - self.sigma * self.sigma / 2
        return random.lognormal(location, self.sigma, count)


def _candidates(points: list[CapacityPoint]) -> Iterator[ReplicaModel]:
    """Queues that a lone request cannot tell from the measured replica."""
    first = points[0]
    answered = max(point.completed_per_second for point in points)
    median = max(first.p50_milliseconds, 1e-3) / 1000
    sigma = math.log(max(first.p95_milliseconds / 1000 / median, 1.0)) / P95_SIGMAS
    alone = median * math.exp(sigma * sigma / 2)
    for factor in SATURATIONS:
        saturation = answered * factor
        for servers in range(1, MOST_SERVERS + 1):
            service = servers / saturation
            # More servers than that would each be slower than a lone request is answered.
            if servers > 1 and service > alone * 1.1:
                break
            yield ReplicaModel(servers, service, sigma, max(0.0, alone - service))


def _misfit(model: ReplicaModel, points: list[CapacityPoint]) -> float:
    """Mean squared logarithm of simulated over measured p95."""
    rates = [point.arrivals_per_second for point in points]
    curve = measured(model, rates, p95_objective_milliseconds=1.0, requests=FIT_REQUESTS)
    pairs = zip(curve.points, points, strict=True)
    return sum(
        math.log(max(ours.p95_milliseconds, 1e-3) / max(theirs.p95_milliseconds, 1e-3)) ** 2 for ours, theirs in pairs
    ) / len(points)


def measured(
    model: ReplicaModel, rates: list[float], *, p95_objective_milliseconds: float, requests: int = 6000, seed: int = 1
) -> CapacityCurve:
    """The capacity curve of one modelled replica, as the optimiser would measure it: Poisson arrivals, one replica."""
    from penstock_simulator.choices import Dispatch
    from penstock_simulator.fleet import Fleet, FleetSettings

    points = []
    for rate in rates:
        random = np.random.default_rng(seed)
        count = requests
        arrivals = np.cumsum(random.exponential(1 / rate, count))
        fleet = Fleet(
            model,
            FleetSettings(
                dispatch=Dispatch.LEAST_OUTSTANDING, start_up_seconds=0, deadline_seconds=1e9, queue_rows=requests + 1
            ),
        )
        fleet.resize(1, 0.0)
        fleet.activate(0.0)
        end = float(arrivals[-1])
        fleet.advance(arrivals.tolist(), model.service_seconds(random, count).tolist(), end)
        fleet.advance([], [], math.inf)
        latency = np.array([latency for _, _, latency in fleet.take_log()]) * 1000
        done = len(latency) / max(end, fleet.last_departure)
        p50, p95, p99 = np.percentile(latency, [50, 95, 99])
        points.append(
            CapacityPoint(
                arrivals_per_second=round(rate, 3), completed_per_second=round(done, 3), p50_milliseconds=round(p50, 2),
                p95_milliseconds=round(p95, 2), p99_milliseconds=round(p99, 2), samples=count,
            )
        )  # fmt: skip
    return CapacityCurve(points=tuple(points), p95_objective_milliseconds=p95_objective_milliseconds)
