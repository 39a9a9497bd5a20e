"""What Prometheus would answer about a simulated fleet: counters scraped at an interval, rates over windows of samples.

Rates follow Prometheus' own rule (`extrapolatedRate` in promql/functions.go): at least two samples in the window,
extrapolation to its ends where samples are near, half an interval where they are not, never below a counter's zero. So
a young replica has no rate until its second scrape and too low a one until it fills the window, a removed one takes its
counts with it, and everything is as old as the last scrape.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from penstock_simulator.fleet import GATEWAY, Fleet

BOUNDS = (
    0.0005, 0.001, 0.0015, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5,
    0.75, 1.0, 1.5, 2.0, 3.0, 5.0, 10.0, 30.0,
)  # fmt: skip
"""Bucket bounds of the runtime's `penstock_request_seconds`, seconds; the objective is added."""
KEPT_SECONDS = 310.0
"""Samples older than this answer no query."""


@dataclass(frozen=True)
class _Scrape:
    at: float
    pods: tuple[int, ...]
    """Pods that answered."""
    buckets: np.ndarray
    """Shape [pods so far, bounds + 1]: answers by pod and bucket, not cumulative over buckets."""
    in_flight: tuple[int, ...]
    """By pod in `pods`."""
    waiting: int
    """In the gateway."""
    refused: int


class Scraper:
    """Scrapes a fleet and answers queries. Only answered requests are counted, as the runtime does."""

    def __init__(self, objective_seconds: float) -> None:
        self.bounds = np.array(sorted({*BOUNDS, objective_seconds}))
        self._good_buckets = int(np.searchsorted(self.bounds, objective_seconds, side="left")) + 1
        self._counts = np.zeros((0, len(self.bounds) + 1))
        self._scrapes: list[_Scrape] = []
        self._times: list[float] = []
        """When each of them was."""
        self._first: dict[int, float] = {}
        self._rates: dict[tuple[float, float], np.ndarray | None] = {}
        """(window, now) -> rates, until the next scrape: a policy reads the same ones several times."""

    def scrape(self, fleet: Fleet, log: Sequence[tuple[float, int, float]], now: float) -> None:
        """Read every pod that takes traffic or drains; `log` has the answers since the last scrape."""
        width = len(self.bounds) + 1
        missing = len(fleet.pods) - len(self._counts)
        if missing:
            self._counts = np.concatenate([self._counts, np.zeros((missing, width))])
        log = [item for item in log if item[1] != GATEWAY]
        if log:
            pods = np.fromiter((item[1] for item in log), dtype=np.int64, count=len(log))
            latency = np.fromiter((item[2] for item in log), dtype=np.float64, count=len(log))
            cells = pods * width + np.searchsorted(self.bounds, latency, side="left")
            self._counts = self._counts + np.bincount(cells, minlength=self._counts.size).reshape(-1, width)
        up = tuple(
            index
            for index, pod in enumerate(fleet.pods)
            if pod.ready_at <= now and (pod.gone_at is None or pod.gone_at > now)
        )
        for index in up:
            self._first.setdefault(index, now)
        in_flight = tuple(fleet.pods[index].outstanding for index in up)
        waiting = fleet.in_flight - sum(in_flight)
        self._scrapes.append(_Scrape(now, up, self._counts, in_flight, waiting, fleet.refused + fleet.given_up))
        self._times.append(now)
        self._rates.clear()
        if self._times[0] < now - 2 * KEPT_SECONDS:
            old = bisect_right(self._times, now - KEPT_SECONDS)
            del self._scrapes[:old], self._times[:old]

    @property
    def last(self) -> _Scrape | None:
        """The newest scrape."""
        return self._scrapes[-1] if self._scrapes else None

    def in_flight(self) -> dict[int, int] | None:
        """Requests in flight by pod, at the last scrape; what waits in a gateway is not in it."""
        return None if self.last is None else dict(zip(self.last.pods, self.last.in_flight, strict=True))

    def in_flight_total(self) -> float | None:
        """Requests in flight at the last scrape, with those that wait in a gateway."""
        return None if self.last is None else float(sum(self.last.in_flight) + self.last.waiting)

    def bucket_rates(self, window: float, now: float) -> np.ndarray | None:
        """`sum by (le) (rate(bucket[window]))`, not cumulative; shape [bounds + 1], 1/s. None: an empty vector."""
        key = (window, now)
        if key not in self._rates:
            self._rates[key] = self._bucket_rates(window, now)
        return self._rates[key]

    def _inside(self, window: float, now: float) -> list[_Scrape]:
        """The scrapes in the window, oldest first."""
        return self._scrapes[bisect_right(self._times, now - window) :]

    def _bucket_rates(self, window: float, now: float) -> np.ndarray | None:
        inside = self._inside(window, now)
        if len(inside) < 2:
            return None
        last = inside[-1]
        total = None
        for begin, pods in self._by_first_sample(inside).items():
            first = inside[begin]
            number = len(inside) - begin
            if number < 2:
                continue
            rows = list(pods)
            deltas = last.buckets[rows] - first.buckets[rows]
            at_first = first.buckets[rows].sum(axis=1)
            factors = _factors(
                deltas.sum(axis=1), at_first, first=first.at, last=last.at, number=number, window=window, now=now
            )
            part = (deltas * factors[:, None]).sum(axis=0) / window
            total = part if total is None else total + part
        return total

    def _by_first_sample(self, inside: Sequence[_Scrape]) -> dict[int, list[int]]:
        """Index of the first sample in the window -> the pods that have it so."""
        groups: dict[int, list[int]] = {}
        for pod in inside[-1].pods:
            born = self._first[pod]
            begin = 0
            while inside[begin].at < born:
                begin += 1
            groups.setdefault(begin, []).append(pod)
        return groups

    def answers_per_second(self, window: float, now: float) -> float | None:
        """`sum(rate(count[window]))`."""
        rates = self.bucket_rates(window, now)
        return None if rates is None else float(rates.sum())

    def refused_per_second(self, window: float, now: float) -> float:
        """`sum(rate(requests_total{code="429"}[window]))`, and requests that a gateway gave up."""
        return self._slope(window, now, lambda scrape: scrape.refused)

    def in_flight_growth(self, window: float, now: float) -> float:
        """`deriv` of the requests in flight over the window, 1/s, from its first and last sample."""
        return self._slope(window, now, lambda scrape: sum(scrape.in_flight) + scrape.waiting)

    def _slope(self, window: float, now: float, of: Callable[[_Scrape], float]) -> float:
        inside = self._inside(window, now)
        if len(inside) < 2:
            return 0.0
        return (of(inside[-1]) - of(inside[0])) / (inside[-1].at - inside[0].at)

    def quantile(self, rates: np.ndarray, quantile: float) -> float | None:
        """`histogram_quantile`: linear within the bucket, the highest bound at most; None for its NaN. Seconds."""
        total = float(rates.sum())
        if total <= 0:
            return None
        rank = quantile * total
        cumulative = np.cumsum(rates)
        index = int(np.searchsorted(cumulative, rank, side="left"))
        if index >= len(self.bounds):
            return float(self.bounds[-1])
        low = float(self.bounds[index - 1]) if index else 0.0
        before = float(cumulative[index - 1]) if index else 0.0
        return low + (float(self.bounds[index]) - low) * (rank - before) / float(rates[index])

    def good_share(self, rates: np.ndarray) -> float | None:
        """Share within the objective, exactly: it is a bucket bound. None for 0/0."""
        total = float(rates.sum())
        return float(rates[: self._good_buckets].sum()) / total if total > 0 else None


def _factors(
    deltas: np.ndarray, at_first: np.ndarray, *, first: float, last: float, number: int, window: float, now: float
) -> np.ndarray:
    """What Prometheus multiplies increases by to fill the window; shape [pods]."""
    sampled = last - first
    interval = sampled / (number - 1)
    to_start = first - (now - window)
    to_end = now - last
    start = np.full(len(deltas), interval / 2 if to_start >= interval * 1.1 else to_start)
    to_zero = np.divide(sampled * at_first, deltas, out=np.full(len(deltas), np.inf), where=deltas > 0)
    start = np.minimum(start, to_zero)
    end = interval / 2 if to_end >= interval * 1.1 else to_end
    factors: np.ndarray = (sampled + start + end) / sampled
    return factors
