"""One trace, one policy, one seed: what came of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from penstock_simulator.fleet import Fleet, FleetSettings
from penstock_simulator.policies import Endpoint, Policy, View
from penstock_simulator.scraper import Scraper
from penstock_simulator.traces import WARM_UP_SECONDS, Trace


@dataclass(frozen=True)
class RunResult:
    """The figures of one run, warm-up left out."""

    requests: int
    late: int
    """Answered after the objective, or not at all."""
    lost: int
    """Of these: refused with 429, or given up with 504."""
    replica_hours: float
    flips: int
    """How often the number of replicas turned from growing to shrinking or back."""
    replicas: tuple[int, ...]
    """Asked for, one figure a second."""


@dataclass(frozen=True)
class Traffic:
    """The requests of one trace and seed: the same for every policy."""

    trace: Trace
    arrivals: np.ndarray
    """Shape [requests], seconds, rising; the warm-up first."""
    services: np.ndarray
    """Shape [requests], seconds of one server."""

    @classmethod
    def of(cls, trace: Trace, endpoint: Endpoint, seed: int) -> Traffic:
        """Drawn with a seed."""
        random = np.random.default_rng(seed)
        arrivals = trace.arrivals(random)
        return cls(trace, arrivals, endpoint.model.service_seconds(random, len(arrivals)))


def simulate(
    traffic: Traffic,
    endpoint: Endpoint,
    policy: Policy,
    fleet_settings: FleetSettings,
    *,
    scrape_interval: int,
    on_answered: Callable[[Sequence[tuple[float, int, float]]], None] = lambda _: None,
) -> RunResult:
    """Run one policy through the traffic. Deterministic.

    `on_answered` gets, batch by batch, (when, pod, latency in seconds) of all requests but the refused ones; times
    count from the begin of the warm-up.
    """
    trace = traffic.trace
    fleet = Fleet(endpoint.model, fleet_settings)
    objective = endpoint.service.p95_objective_milliseconds / 1000
    scraper = Scraper(objective)
    # Where a planner with the curve would begin; during the warm-up every policy reaches its own number.
    begin = endpoint.limits.clamp(math.ceil(float(trace.rates[0]) / (0.75 * endpoint.service.rate)))
    fleet.resize(begin, -fleet_settings.start_up_seconds)
    fleet.activate(0.0)
    seconds = WARM_UP_SECONDS + trace.seconds
    edges = np.searchsorted(traffic.arrivals, np.arange(seconds + 1)).tolist()
    arrivals, services = traffic.arrivals.tolist(), traffic.services.tolist()
    replicas: list[int] = []
    concurrency: list[float] = []
    counter = _Counter(objective)
    area = 0.0
    unread: list[tuple[float, int, float]] = []
    for second in range(seconds):
        now = second + 1
        part = slice(edges[second], edges[now])
        refused = fleet.refused
        fleet.advance(arrivals[part], services[part], float(now))
        counter.refused(second, fleet.refused - refused)
        concurrency.append(fleet.area - area)
        area = fleet.area
        fleet.activate(float(now))
        if now % scrape_interval == 0:
            unread = fleet.take_log()
            counter.answered(unread)
            on_answered(unread)
            scraper.scrape(fleet, unread, float(now))
        if now % policy.interval == 0:
            wanted = policy.decide(View(float(now), fleet, scraper, concurrency))
            if wanted is not None and wanted != fleet.replicas:
                fleet.resize(wanted, float(now))
        replicas.append(fleet.replicas)
    # What is still in the replicas is answered, or not.
    fleet.advance([], [], math.inf)
    rest = fleet.take_log()
    counter.answered(rest)
    on_answered(rest)
    hours = fleet.replica_seconds(WARM_UP_SECONDS, seconds) / 3600
    requests = len(arrivals) - edges[WARM_UP_SECONDS]
    asked = replicas[WARM_UP_SECONDS:]
    return RunResult(
        requests=requests,
        late=counter.late,
        lost=counter.lost,
        replica_hours=hours,
        flips=flips(asked),
        replicas=tuple(asked),
    )


def flips(replicas: list[int]) -> int:
    """How often a series of numbers turned from growing to shrinking or back."""
    count, direction = 0, 0
    for before, after in pairwise(replicas):
        turn = (after > before) - (after < before)
        if turn and direction and turn != direction:
            count += 1
        direction = turn or direction
    return count


class _Counter:
    """Late and lost requests among those that came after the warm-up."""

    def __init__(self, objective: float) -> None:
        self._objective = objective
        self.late = 0
        self.lost = 0

    def answered(self, log: Sequence[tuple[float, int, float]]) -> None:
        for when, _, latency in log:
            if latency > self._objective:
                # One that was given up at its deadline came before that; the exact second does not matter.
                is_lost = latency == math.inf
                if (when if is_lost else when - latency) >= WARM_UP_SECONDS:
                    self.late += 1
                    self.lost += is_lost

    def refused(self, second: int, count: int) -> None:
        if second >= WARM_UP_SECONDS:
            self.late += count
            self.lost += count
