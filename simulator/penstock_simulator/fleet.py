"""Replicas as queues, and a fleet of them: a discrete-event simulation of every single request.

One replica is c servers in front of one queue. Service times are log-normal; the rest of an answer's time (network,
tokenisation in other threads) is a constant that occupies no server. The fit to an endpoint's capacity curve has no
knob: at the lowest measured rate hardly anything waits, so p50 and p95 there are of a lone request; the number of
servers and the saturation are the ones with the simulated p95 nearest to the measured one over the other rates.

Requests arrive at given times with given service times, so that every policy meets the same traffic. What a replica
does with a request is known when it is dispatched (first come, first served), except behind a gateway that holds the
queue itself. Replicas take traffic after their start-up, stop taking it when removed, and finish what they have.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from heapq import heapify, heappop, heappush, heapreplace
from random import Random

import numpy as np

from penstock.capacity import CapacityCurve, CapacityPoint, TokenCurve
from penstock.errors import SettingError
from penstock_simulator.choices import Dispatch

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
    """The queue that models a replica. Times are seconds."""

    servers: int
    mean_service_seconds: float
    sigma: float
    """Of the logarithm of the service time."""
    fixed_seconds: float = 0.0
    first_token_seconds: float | None = None
    """Only of text generation: a request is late by its first token, which comes this long after it was begun. The
    simulated metrics count it when the answer is complete, which is later than the runtime does."""
    output_tokens: tuple[int, ...] = ()
    """Only of text generation: tokens of answers, each as likely as it is listed; empty: log-normal. The service time
    is proportional to them."""

    @property
    def saturation(self) -> float:
        """Requests/s that it answers when it never idles."""
        return self.servers / self.mean_service_seconds

    @classmethod
    def from_curve(cls, curve: CapacityCurve) -> ReplicaModel:
        """Fit to a measured curve; SettingError when it has no points."""
        points = sorted(curve.points, key=lambda point: point.arrivals_per_second)
        if not points:
            raise _no_points()
        chosen = [points[index] for index in sorted({*np.linspace(0, len(points) - 1, FIT_POINTS).round().astype(int)})]
        return min(_candidates(points), key=lambda model: _misfit(model, chosen))

    @classmethod
    def from_tokens(cls, curve: TokenCurve) -> ReplicaModel:
        """The queue of a replica of text generation: a server for each of the clients that it serves within its
        objective, each as fast as with all of them. SettingError when the curve has no points."""
        best = curve.within or curve.saturated
        if best is None:
            raise _no_points()
        return cls(
            servers=best.clients,
            mean_service_seconds=best.clients / best.requests_per_second,
            sigma=0.5,
            first_token_seconds=curve.points[0].first_token_p95_milliseconds / 1000,
            output_tokens=tuple(output for _, output in curve.lengths),
        )

    def service_seconds(self, random: np.random.Generator, count: int) -> np.ndarray:
        """Service times drawn at random; shape [count], float64."""
        if self.output_tokens:
            tokens = random.choice(np.array(self.output_tokens, dtype=np.float64), count)
            return tokens * (self.mean_service_seconds / float(np.mean(self.output_tokens)))
        location = math.log(self.mean_service_seconds) - self.sigma * self.sigma / 2
        return random.lognormal(location, self.sigma, count)


def _no_points() -> SettingError:
    return SettingError(
        "the capacity curve has no points",
        field="--curve",
        remedy="Give an artefact whose optimisation measured its capacity, or leave --curve out",
    )


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
    points = []
    for rate in rates:
        random = np.random.default_rng(seed)
        arrivals = np.cumsum(random.exponential(1 / rate, requests))
        fleet = Fleet(
            model,
            FleetSettings(
                dispatch=Dispatch.LEAST_OUTSTANDING, start_up_seconds=0, deadline_seconds=1e9, queue_rows=requests + 1
            ),
        )
        fleet.resize(1, 0.0)
        fleet.activate(0.0)
        end = float(arrivals[-1])
        fleet.advance(arrivals.tolist(), model.service_seconds(random, requests).tolist(), end)
        fleet.advance([], [], math.inf)
        latency = np.array([latency for _, _, latency in fleet.take_log()]) * 1000
        done = len(latency) / max(end, fleet.last_departure)
        p50, p95, p99 = np.percentile(latency, [50, 95, 99])
        points.append(
            CapacityPoint(
                arrivals_per_second=round(rate, 3), completed_per_second=round(done, 3), p50_milliseconds=round(p50, 2),
                p95_milliseconds=round(p95, 2), p99_milliseconds=round(p99, 2), samples=requests,
            )
        )  # fmt: skip
    return CapacityCurve(points=tuple(points), p95_objective_milliseconds=p95_objective_milliseconds)


LOST = float("inf")
"""The latency of a request that was refused or given up."""
GATEWAY = -1
"""Instead of a pod: the request never got to one."""


@dataclass(frozen=True)
class FleetSettings:
    """How replicas behave besides their service times. Times are seconds."""

    dispatch: Dispatch = Dispatch.LEAST_OUTSTANDING
    start_up_seconds: float = 40.0
    drain_seconds: float = 5.0
    """A removed replica lives (and costs) at least this long."""
    deadline_seconds: float = 30.0
    """A request that has not begun by then is answered with 504, as the runtime's --deadline-seconds."""
    queue_rows: int = 1024
    """More outstanding requests on one replica are answered with 429, as the runtime's --max-queue-rows."""


@dataclass
class SimulatedPod:
    """One replica's life."""

    created: float
    ready_at: float
    free: list[float] = field(default_factory=list)
    """When each server gets free: a heap."""
    outstanding: int = 0
    removed_at: float | None = None
    gone_at: float | None = None


class Fleet:
    """All replicas of one endpoint, and the requests in them."""

    def __init__(self, model: ReplicaModel, settings: FleetSettings) -> None:
        self.model = model
        self.settings = settings
        self.pods: list[SimulatedPod] = []
        self.active: list[int] = []
        """Indices of pods that take traffic."""
        self.refused = 0
        """Requests answered with 429 so far."""
        self.given_up = 0
        """Requests that a gateway has answered with 504 so far."""
        self.last_departure = 0.0
        self.area = 0.0
        """Integral of the requests in flight over time so far, request seconds."""
        self._starting: list[int] = []
        self._departures: list[tuple[float, int, float]] = []
        self._log: list[tuple[float, int, float]] = []
        self._queue: deque[tuple[float, float]] = deque()
        self._free: list[tuple[float, int]] = []
        self._random = Random(0)  # noqa: S311 - lots of a simulation, the same each time
        self._now = 0.0

    # Replicas

    @property
    def replicas(self) -> int:
        """The requested number: ready and starting ones."""
        return len(self.active) + len(self._starting)

    @property
    def ready(self) -> int:
        """How many take traffic."""
        return len(self.active)

    def resize(self, replicas: int, now: float) -> None:
        """Request another number. Starting ones are removed first, then the youngest, as a ReplicaSet does."""
        while self.replicas < replicas:
            self.pods.append(SimulatedPod(now, now + self.settings.start_up_seconds, [0.0] * self.model.servers))
            self._starting.append(len(self.pods) - 1)
        while self.replicas > replicas:
            if self._starting:
                index = self._starting.pop()
                self.pods[index].removed_at = self.pods[index].gone_at = now
                continue
            index = self.active.pop()
            pod = self.pods[index]
            pod.removed_at = now
            if self.settings.dispatch is Dispatch.GATEWAY_QUEUE:
                pod.free = [when for when, owner in self._free if owner == index]
                self._free = [entry for entry in self._free if entry[1] != index]
                heapify(self._free)
            pod.gone_at = max(now + self.settings.drain_seconds, *pod.free)

    def activate(self, now: float) -> None:
        """Let those take traffic that have started by now."""
        started = [index for index in self._starting if self.pods[index].ready_at <= now]
        if not started:
            return
        self._starting = [index for index in self._starting if index not in started]
        self.active += started
        if self.settings.dispatch is Dispatch.GATEWAY_QUEUE:
            for index in started:
                for _ in range(self.model.servers):
                    heappush(self._free, (now, index))

    def replica_seconds(self, begin: float, end: float) -> float:
        """Replica-seconds between two times: from the request for a replica until it is gone."""
        return sum(
            max(0.0, min(end, end if pod.gone_at is None else pod.gone_at) - max(begin, pod.created))
            for pod in self.pods
        )

    # Requests

    @property
    def in_flight(self) -> int:
        """Requests that came and are not answered."""
        return len(self._departures) + len(self._queue)

    def take_log(self) -> list[tuple[float, int, float]]:
        """(when, pod, latency in seconds) of the answers since the last call, without refused requests."""
        log, self._log = self._log, []
        return log

    def advance(self, arrivals: Sequence[float], services: Sequence[float], until: float) -> None:
        """Let requests arrive (times rising, all before `until`) and time pass until then."""
        begin, logged = self._now, len(self._log)
        carried = self.in_flight
        if self.settings.dispatch is Dispatch.GATEWAY_QUEUE:
            accepted = self._advance_queue(arrivals, services, until)
        else:
            accepted = self._advance_direct(arrivals, services, until)
        if until != LOST:
            came = sum(accepted)
            left = sum(item[0] for item in self._log[logged:])
            count_in, count_out = len(accepted), len(self._log) - logged
            self.area += carried * (until - begin) + (count_in * until - came) - (count_out * until - left)
            self._now = until

    def _depart(self, until: float) -> None:
        departures, log, pods = self._departures, self._log, self.pods
        while departures and departures[0][0] <= until:
            item = heappop(departures)
            if item[1] != GATEWAY:
                pods[item[1]].outstanding -= 1
            log.append(item)
            self.last_departure = item[0]

    def _advance_direct(self, arrivals: Sequence[float], services: Sequence[float], until: float) -> list[float]:
        pods, active, departures, log = self.pods, self.active, self._departures, self._log
        limit, deadline, fixed = self.settings.queue_rows, self.settings.deadline_seconds, self.model.fixed_seconds
        first = self.model.first_token_seconds
        draw = self._random.random if self.settings.dispatch is Dispatch.RANDOM else None
        live = [pods[index] for index in active]
        accepted: list[float] = []
        for t, s in zip(arrivals, services, strict=True):
            while departures and departures[0][0] <= t:
                item = heappop(departures)
                pods[item[1]].outstanding -= 1
                log.append(item)
            if not live:
                self.refused += 1
                continue
            if draw is not None:
                position = int(draw() * len(live))
            else:
                position, fewest = 0, live[0].outstanding
                if fewest:
                    for other, pod in enumerate(live):
                        if pod.outstanding < fewest:
                            position, fewest = other, pod.outstanding
                            if not fewest:
                                break
            pod = live[position]
            if pod.outstanding >= limit:
                self.refused += 1
                continue
            free = pod.free
            start = max(free[0], t)
            pod.outstanding += 1
            accepted.append(t)
            if start - t > deadline:
                heappush(departures, (t + deadline, active[position], LOST))
                continue
            heapreplace(free, start + s)
            end = start + s + fixed
            latency = end - t if first is None else start + first - t
            heappush(departures, (end, active[position], latency))
        self._depart(until)
        return accepted

    def _advance_queue(self, arrivals: Sequence[float], services: Sequence[float], until: float) -> list[float]:
        limit = self.settings.queue_rows * max(1, len(self.active))
        accepted: list[float] = []
        for t, s in zip(arrivals, services, strict=True):
            self._hand_out(t)
            if len(self._queue) >= limit:
                self.refused += 1
                continue
            self._queue.append((t, s))
            accepted.append(t)
        self._hand_out(until)
        self._depart(until)
        return accepted

    def _hand_out(self, until: float) -> None:
        queue, free, pods = self._queue, self._free, self.pods
        deadline, fixed = self.settings.deadline_seconds, self.model.fixed_seconds
        first = self.model.first_token_seconds
        while queue:
            t, s = queue[0]
            start = max(t, free[0][0]) if free else LOST
            if start - t > deadline:
                if t + deadline > until:
                    return
                queue.popleft()
                self.given_up += 1
                heappush(self._departures, (t + deadline, GATEWAY, LOST))
                continue
            if start > until:
                return
            queue.popleft()
            owner = free[0][1]
            heapreplace(free, (start + s, owner))
            end = start + s + fixed
            pods[owner].outstanding += 1
            heappush(self._departures, (end, owner, end - t if first is None else start + first - t))


# The endpoint that is simulated when none is given: invented, of a common shape, and slow enough to simulate quickly.
# 150 ms for a text on average, the longest twentieth over 300 ms. Built-in traces are in multiples of what a replica
# takes, so that only the ratio of service time to start-up time matters.
MODEL = ReplicaModel(servers=2, mean_service_seconds=0.15, sigma=0.5, fixed_seconds=0.005)
P95_OBJECTIVE_MILLISECONDS = 600.0
RATES = [1.0, 2.5, 4.0, 5.5, 7.0, 8.5, 9.5, 10.5, 11.5, 12.5, 13.2, 14.5]
"""Requests/s; the last is over its saturation, as a measurement would go."""


@lru_cache(maxsize=1)
def reference_curve() -> CapacityCurve:
    """The capacity curve of MODEL, measured on the modelled queue."""
    return measured(MODEL, RATES, p95_objective_milliseconds=P95_OBJECTIVE_MILLISECONDS)
