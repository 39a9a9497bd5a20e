"""The capacity of replicas: the measured curve of one replica, corrected by the slow-down that is observed.

A replica that is slower by a factor g is the measured one with every duration multiplied by g. At an arrival rate r it
behaves as the measured one does at g*r, with durations g times as long:

    p95_now(r) = g * p95(g * r)            rate_within_now(limit) = rate_within(limit / g) / g

Several replicas behind a dispatcher that sends each request to the least busy one take more than the sum of their
rates: the spare capacity that keeps waiting rare grows with the square root of the number of servers (square-root
staffing; Halfin and Whitt, 1981). With s the saturation of one replica and r its rate within the objective,

    total(n) = n * s - (s - r) * sqrt(n)        total(1) = r

Without such a dispatcher (kube-proxy chooses at random) each replica is a queue by itself, and total(n) = n * r.

The left equation, solved for g, gives the slow-down from one observed p95, for any shape of the curve and any point on
it; the right one gives the resulting capacity. Both are exact for any queue in which all service times grow by the same
factor (less cache, a lower clock, a noisy neighbour).

Requests may differ from the measured workload. Texts of another length take another time: the factor is the
ratio of the times of one run, which the optimisation measured for several lengths, and every duration of the curve is
multiplied by it (`CapacityCurve.faster`). Only the mean length is observed: the time of a run is nearly linear in the
tokens, so that the time at the mean is nearly the mean of the times, and the error cancels where the lengths vary
alike.

For text generation two loads are compared, and the higher one counts. A request with twice the output tokens of a
measured one counts as two: right while replicas keep up. And as many requests in progress as a replica has at its
capacity mean the capacity, by Little's law: this shows an overload by clients that wait for an answer before they send
the next request, because their arrivals fall with the speed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from penstock.capacity import CapacityCurve, TokenCurve
from penstock_operator.decide.measurement import Idle, Measurement, Metrics, Value, known

SLOWEST = 4.0
FASTEST = 0.25
"""Slow-downs are searched between these two."""
IN_FLIGHT_MARGIN = 1.5
"""Requests in flight beyond this many times those that the demand keeps in flight on average are a backlog: the number
of busy clients varies."""
SIGMAS = 1.645
"""Standard normal quantile of 0.95."""


SHORTEST, LONGEST = 0.1, 8.0
"""Limits of the factor: one odd reading must neither remove a fleet nor request one."""
AROUND_MILLISECONDS = 0.3
"""Of each request, before and after its run (HTTP, tokenising, answer): docs/reference/figures.md."""
LEAST_WEIGHT, MOST_WEIGHT = 0.5, 8.0
"""Limits of the weight of a request: a short answer has a prompt, too, and one odd reading must not request a fleet."""
SIGNIFICANT = 2.0
"""Standard deviations of the requests in progress that may be chance."""


@dataclass(frozen=True)
class MeasuredTexts:
    """The texts that a curve was measured with, and the time of texts of other lengths."""

    tokens: float
    """Computed for a request, mean."""
    lengths: tuple[float, ...]
    """In tokens, rising; at least two."""
    milliseconds: tuple[float, ...]
    """Of one run of one text of each length."""

    @classmethod
    def of(cls, tokens: float | None, times: Sequence[tuple[float, float]]) -> MeasuredTexts | None:
        """From pairs of tokens and milliseconds; None where these do not show how the time depends on the length."""
        rising = sorted(dict(times).items())
        if tokens is None or len(rising) < 2 or any(time <= 0 for _, time in rising):
            return None
        return cls(tokens, tuple(length for length, _ in rising), tuple(time for _, time in rising))

    def factor(self, observed: Measurement) -> float | None:
        """How many times as long a request takes as one of the measured workload; None: its tokens are not known."""
        if not isinstance(observed, Value) or observed.value <= 0:
            return None
        factor = self._time(observed.value) / self._time(self.tokens)
        return min(max(factor, SHORTEST), LONGEST)

    def _time(self, tokens: float) -> float:
        """Milliseconds of a request: linear between the measured lengths, the first time below them, and beyond them
        with the slope of the last two. Several texts of one request count as one that is as long as all of them."""
        lengths, times = self.lengths, self.milliseconds
        if tokens <= lengths[0]:
            return times[0] + AROUND_MILLISECONDS
        last = next((index for index in range(1, len(lengths)) if tokens <= lengths[index]), len(lengths) - 1)
        slope = (times[last] - times[last - 1]) / (lengths[last] - lengths[last - 1])
        return max(times[last - 1] + slope * (tokens - lengths[last - 1]), times[0]) + AROUND_MILLISECONDS


@dataclass(frozen=True)
class Service:
    """The capacity of one replica for one objective."""

    rate: float
    """The highest arrival rate within the objective, requests/s."""
    p95_objective_milliseconds: float
    rates: tuple[float, ...]
    """Measured arrival rates in increasing order, requests/s."""
    p95_milliseconds: tuple[float, ...]
    """p95 at these rates, made monotone: a busier replica is not faster, except by noise."""
    saturation: float
    """The highest rate that was answered at any latency, requests/s; at least `rate`."""
    pooled: bool = False
    """Requests go to the least busy replica, not to a random one."""
    within_objective: bool = True
    """False: even a nearly idle replica misses the objective; `rate` is then the rate that it keeps up with."""
    seconds_in_flight: float | None = None
    """Only of text generation: how long a request takes on average, from its arrival to its last token, at `rate`."""
    tokens_per_request: float | None = None
    """Only of text generation: output tokens of an answer of the workload that the curve was measured with, mean."""
    curve: CapacityCurve | None = None
    """Its source; None: of text generation."""
    texts: MeasuredTexts | None = None
    """How the time of a request depends on its length; None: not known, and of text generation."""

    @property
    def longest_in_flight_seconds(self) -> float:
        """A request that takes longer counts as waiting: the objective, or what text generation takes, with a
        margin."""
        if self.seconds_in_flight is None:
            return self.p95_objective_milliseconds / 1000
        return IN_FLIGHT_MARGIN * self.seconds_in_flight

    @classmethod
    def from_curve(
        cls,
        curve: CapacityCurve,
        *,
        p95_objective_milliseconds: float | None = None,
        pooled: bool = False,
        texts: MeasuredTexts | None = None,
    ) -> Service | None:
        """From the artefact's curve, for the objective of the endpoint or, without one, of the curve.

        None if the curve has no point at which the replica kept up: its capacity is then unknown.
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
        # Where the objective is out of reach, the rate that it keeps up with still gives a number of replicas.
        keeps_up = rate if rate is not None else curve.rate_within(math.inf)
        if keeps_up is None:
            return None
        saturation = max(keeps_up, *(point.completed_per_second for point in points))
        return cls(
            keeps_up,
            objective,
            tuple(rates),
            tuple(p95s),
            saturation,
            pooled=pooled,
            within_objective=rate is not None,
            curve=curve,
            texts=texts,
        )

    def for_texts(self, factor: float) -> Service:
        """The capacity for texts that take this many times as long as the measured ones."""
        if self.curve is None or factor == 1:
            return self
        objective = self.p95_objective_milliseconds
        found = Service.from_curve(
            self.curve.faster(1 / factor), p95_objective_milliseconds=objective, pooled=self.pooled, texts=self.texts
        )
        return found or self

    @classmethod
    def from_tokens(cls, curve: TokenCurve, *, pooled: bool = False) -> Service | None:
        """From the curve of text generation: at each point, n clients send one request after another.

        Requests that arrive at random, at a rate r, keep L = r * W of them in flight on average (Little's law), and a
        number that varies as a Poisson count does: 95 % of the arrivals find at most n in flight where
        L + 1.645 * sqrt(L) = n. So a point of n clients becomes the rate at which L clients are served, with its p95
        of the time to the first token. Rates between the measured numbers of clients are interpolated.

        None without points.
        """
        objective = curve.first_token_objective_milliseconds
        if objective is None or not curve.points:
            return None
        clients = [0.0, *(float(point.clients) for point in curve.points)]
        served = [0.0, *(point.requests_per_second for point in curve.points)]
        rates: list[float] = []
        p95s: list[float] = []
        for point in curve.points:
            rate = _interpolated(mean_in_flight(point.clients), clients, served)
            if not rates or rate > rates[-1]:
                rates.append(rate)
                p95s.append(max(point.first_token_p95_milliseconds, p95s[-1] if p95s else 1e-3))
        within = curve.within
        most = within or max(curve.points, key=lambda point: point.tokens_per_second)
        in_flight = mean_in_flight(most.clients)
        rate = _interpolated(in_flight, clients, served)
        return cls(
            rate,
            objective,
            tuple(rates),
            tuple(p95s),
            max(served),
            pooled=pooled,
            within_objective=within is not None,
            seconds_in_flight=in_flight / rate,
            tokens_per_request=most.tokens_per_second / most.requests_per_second,
        )

    def slower(self, factor: float) -> Service:
        """The service of replicas that are slower by this factor (at least 1) for a known reason, such as fewer cores
        than the measured ones had."""
        rate, p95s = self.capacity(factor), tuple(factor * p95 for p95 in self.p95_milliseconds)
        return replace(
            self,
            rate=rate,
            rates=tuple(one / factor for one in self.rates),
            p95_milliseconds=p95s,
            saturation=max(rate, self.saturation / factor),
            within_objective=self.within_objective and p95s[0] <= self.p95_objective_milliseconds,
            seconds_in_flight=None if self.seconds_in_flight is None else factor * self.seconds_in_flight,
            curve=None if self.curve is None else self.curve.faster(1 / factor),
        )

    def total(self, replicas: int, *, slowdown: float = 1.0) -> float:
        """Arrival rate (requests/s) that this many replicas take together within the objective."""
        one = self.capacity(slowdown)
        if not self.pooled:
            return replicas * one
        saturation = max(one, self.saturation / max(slowdown, 1.0))
        return replicas * saturation - (saturation - one) * math.sqrt(replicas)

    def replicas_for(self, rate: float, *, slowdown: float = 1.0) -> float:
        """Replicas that take an arrival rate (requests/s) within the objective: the inverse of `total`; not rounded."""
        one = self.capacity(slowdown)
        if not self.pooled:
            return rate / one
        saturation = max(one, self.saturation / max(slowdown, 1.0))
        spare = saturation - one
        return ((spare + math.sqrt(spare * spare + 4 * saturation * rate)) / (2 * saturation)) ** 2 if rate > 0 else 0.0

    def p95_of(self, rate: float, replicas: int, *, slowdown: float = 1.0) -> float:
        """Predicted p95 in milliseconds if this many replicas share an arrival rate (requests/s)."""
        each = rate / replicas
        if not self.pooled:
            return self.p95_at(each, slowdown=slowdown)
        # As a single replica with the same spare capacity in relation to the square root of its size.
        saturation = self.saturation / slowdown
        alike = saturation - (saturation - each) * math.sqrt(replicas)
        return self.p95_at(max(alike, 0.0), slowdown=slowdown)

    def p95_at(self, rate: float, *, slowdown: float = 1.0) -> float:
        """Predicted p95 in milliseconds of a single replica at an arrival rate (requests/s).

        Linear between points; the first value below the first point; beyond the last point with the slope of the last
        segment, and at least proportional to the rate.
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
        """Factor by which replicas that share this rate (requests/s) are slower than the curve, from their p95."""
        low, high = FASTEST, SLOWEST
        for _ in range(30):  # p95 increases with the slow-down, so bisection finds the solution
            middle = (low + high) / 2
            if self.p95_of(rate, replicas, slowdown=middle) < p95_milliseconds:
                low = middle
            else:
                high = middle
        return (low + high) / 2

    def capacity(self, slowdown: float = 1.0) -> float:
        """Arrival rate (requests/s) that a replica slower by this factor (at least 1) takes within the objective.

        At least a tenth of the measured rate: a correction must not request ever more replicas.
        """
        slowdown = max(slowdown, 1.0)
        reach = self.rate
        if self.within_objective:
            reach = self._reach(self.p95_objective_milliseconds / slowdown)
        return max(min(reach, self.rate) / slowdown, self.rate / 10)

    def _reach(self, limit: float) -> float:
        """The highest rate on the curve with a p95 within a limit in milliseconds; 0 if there is none."""
        reach = 0.0
        for index, (rate, p95) in enumerate(zip(self.rates, self.p95_milliseconds, strict=True)):
            if p95 > limit:
                if index:
                    low = self.p95_milliseconds[index - 1]
                    reach += (rate - reach) * (limit - low) / (p95 - low)
                break
            reach = rate
        return reach


def mean_in_flight(clients: float) -> float:
    """The mean of a Poisson count of which 95 % are at most `clients`, by the normal approximation."""
    return ((math.sqrt(SIGMAS * SIGMAS + 4 * clients) - SIGMAS) / 2) ** 2


def _interpolated(at: float, points: Sequence[float], values: Sequence[float]) -> float:
    """Linear between points, which rise; `at` is between the first and the last."""
    for index in range(1, len(points)):
        if at <= points[index]:
            share = (at - points[index - 1]) / (points[index] - points[index - 1])
            return values[index - 1] + share * (values[index] - values[index - 1])
    return values[-1]


def in_measured_requests(metrics: Metrics, service: Service | None) -> Metrics:
    """The metrics with arrivals in requests of the measured workload, requests/s; unchanged of other tasks."""
    if service is None or service.tokens_per_request is None or service.seconds_in_flight is None:
        return metrics
    weight = weight_of(metrics.tokens_per_request, service.tokens_per_request)
    least = proven_rate(known(metrics.in_flight) or 0.0, service.seconds_in_flight)
    return replace(
        metrics,
        arrivals_fast=_at_least(metrics.arrivals_fast, weight, least),
        arrivals_slow=_times(metrics.arrivals_slow, weight),
    )


def weight_of(observed: Measurement, measured: float) -> float:
    """Requests of `measured` output tokens that an observed one counts as; 1 where its tokens are not known."""
    if not isinstance(observed, Value) or observed.value <= 0:
        return 1.0
    return min(max(observed.value / measured, LEAST_WEIGHT), MOST_WEIGHT)


def proven_rate(in_flight: float, seconds: float) -> float:
    """The arrival rate (requests/s) that keeps this number in progress when a request takes `seconds`, less what may be
    chance."""
    return max(0.0, in_flight - SIGNIFICANT * math.sqrt(in_flight)) / seconds


def _times(arrivals: Measurement, weight: float) -> Measurement:
    return replace(arrivals, value=arrivals.value * weight) if isinstance(arrivals, Value) else arrivals


def _at_least(arrivals: Measurement, weight: float, least: float) -> Measurement:
    if isinstance(arrivals, Value):
        return replace(arrivals, value=max(arrivals.value * weight, least))
    return Value(least) if isinstance(arrivals, Idle) and least > 0 else arrivals
