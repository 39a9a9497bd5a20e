"""Readings of the pods of one endpoint -> three-state metrics. Pure: time is an argument.

Rates are calculated as Prometheus does, without its extrapolation to the ends of a window: from the increases between
samples, where a counter that went down was reset and counts from zero. One sample gives no rate. Times are of the
samples, so that a late scrape does not lower a rate.
"""

from __future__ import annotations

import math
from array import array
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from penstock_operator.decide.measurement import (
    Buckets,
    Idle,
    Measurement,
    Metrics,
    PodReading,
    Unknown,
    Value,
    of_answers,
    quantile,
    share_within,
)

FAST_SECONDS = 30.0
"""The fast rate is of the last two readings, both no older than this."""
PAIRED = 0.75
"""Two readings give a rate if they are at least this share of the interval apart: scrapes are not exactly periodic."""
SLOW_SECONDS = 120.0
BUCKETS_SECONDS = 9.0
"""Minimum interval between kept histograms: two minutes need no more, and they use most of the memory."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One value of one pod's series."""

    at: float
    """Seconds since the epoch, by the scraping process' clock."""
    value: float


Series = Mapping[str, Sequence[Sample]]
"""Samples by pod, oldest first."""


def increase(samples: Sequence[Sample]) -> float:
    """Increase of a counter over its samples, resets taken into account."""
    total = 0.0
    for before, after in pairwise(samples):
        total += after.value if after.value < before.value else after.value - before.value
    return total


def within(samples: Sequence[Sample], window_seconds: float, now: float) -> list[Sample]:
    """The finite samples of the window, oldest first, one for each time; samples in the future are left out."""
    kept: list[Sample] = []
    for sample in samples:
        fresh = now - window_seconds <= sample.at <= now
        if fresh and math.isfinite(sample.value) and (not kept or sample.at > kept[-1].at):
            kept.append(sample)
    return kept


def lately(series: Series, least_seconds: float, most_seconds: float, now: float) -> Series:
    """For each pod the samples from the newest finite one back to the first that is at least `least_seconds` older.

    None is older than `most_seconds`. A fixed window for two scrapes would lose the rate whenever a scrape is late;
    this one reaches back as far as needed.
    """
    found: dict[str, list[Sample]] = {}
    for pod, samples in series.items():
        inside = within(samples, most_seconds, now)
        if inside:
            older = [at for at, sample in enumerate(inside) if inside[-1].at - sample.at >= least_seconds]
            found[pod] = inside[older[-1] if older else 0 :]
    return found


def span_seconds(series: Series) -> float:
    """The shortest time between the first and last sample of a pod; 0 if no pod has two."""
    return min((samples[-1].at - samples[0].at for samples in series.values() if len(samples) > 1), default=0.0)


def rate(series: Series, window_seconds: float, now: float) -> Measurement:
    """Requests/s over all pods; Idle if no counter changed; Unknown if no pod has two samples."""
    total, counted, oldest = 0.0, 0, 0.0
    for samples in series.values():
        inside = within(samples, window_seconds, now)
        if len(inside) >= 2:
            total += increase(inside) / (inside[-1].at - inside[0].at)
            counted += 1
            oldest = max(oldest, now - inside[-1].at)
    if not counted:
        return Unknown(f"no pod was scraped twice within {window_seconds:.0f} s")
    return Value(total, oldest) if total > 0 else Idle()


def latest(series: Series, freshest_seconds: float, now: float) -> Measurement:
    """The sum of a gauge's newest values; Unknown if no pod has a fresh one."""
    newest = [inside[-1] for samples in series.values() if (inside := within(samples, freshest_seconds, now))]
    if not newest:
        return Unknown(f"no pod was scraped within {freshest_seconds:.0f} s")
    return Value(sum(sample.value for sample in newest), now - min(sample.at for sample in newest))


def growth(series: Series, window_seconds: float, now: float) -> float:
    """Change of a gauge's sum per second, where a new pod started at 0. 0 without samples."""
    change, begin, end = 0.0, math.inf, -math.inf
    for samples in series.values():
        inside = within(samples, window_seconds, now)
        if inside:
            change += inside[-1].value - (inside[0].value if len(inside) > 1 else 0.0)
            begin, end = min(begin, inside[0].at), max(end, inside[-1].at)
    return change / (end - begin) if end > begin else 0.0


def coverage(series: Series, ready: Sequence[str], freshest_seconds: float, now: float) -> float:
    """Share of the ready pods with a fresh sample, 0 to 1; 1 when no pod is ready."""
    if not ready:
        return 1.0
    return sum(1 for pod in ready if within(series.get(pod, ()), freshest_seconds, now)) / len(ready)


class _Pod:
    """The samples of one pod, oldest first."""

    __slots__ = ("answered", "arrivals", "buckets", "in_flight", "tokens")

    def __init__(self) -> None:
        self.arrivals: deque[Sample] = deque()
        self.in_flight: deque[Sample] = deque()
        self.answered: deque[Sample] = deque()
        """Only of pods that count tokens, as the next."""
        self.tokens: deque[Sample] = deque()
        self.buckets: deque[tuple[float, tuple[float, ...], array[float]]] = deque()

    def put(self, at: float, reading: PodReading) -> None:
        if self.arrivals and at <= self.arrivals[-1].at:
            # The clock went back: samples from the future would stay until that time.
            for samples in (self.arrivals, self.in_flight, self.answered, self.tokens):
                samples.clear()
            self.buckets.clear()
        self.arrivals.append(Sample(at, reading.arrivals))
        self.in_flight.append(Sample(at, reading.in_flight))
        if reading.tokens is not None:
            self.answered.append(Sample(at, reading.answered))
            self.tokens.append(Sample(at, reading.tokens))
        if not self.buckets or at - self.buckets[-1][0] >= BUCKETS_SECONDS:
            self.buckets.append((at, reading.bounds, reading.counts))

    def forget(self, before: float) -> None:
        for samples in (self.arrivals, self.in_flight, self.answered, self.tokens):
            while samples and samples[0].at < before:
                samples.popleft()
        while self.buckets and self.buckets[0][0] < before:
            self.buckets.popleft()


class History:
    """The readings of one endpoint."""

    def __init__(self) -> None:
        self._pods: dict[str, _Pod] = {}

    def put(self, pod: str, at: float, reading: PodReading) -> None:
        """Add a reading at `at`, seconds since the epoch."""
        self._pods.setdefault(pod, _Pod()).put(at, reading)

    def metrics(
        self, ready: Sequence[str], now: float, *, objective_seconds: float, interval_seconds: float, problem: str = ""
    ) -> Metrics:
        """The metrics at `now`. `problem`: why pods could not be read, as a clause."""
        self._forget(now - SLOW_SECONDS - BUCKETS_SECONDS)
        freshest = max(3 * interval_seconds, FAST_SECONDS / 2)
        in_flight_series = {name: pod.in_flight for name, pod in self._pods.items()}
        covered = coverage(_lists(in_flight_series), ready, freshest, now)
        if not ready:
            return Metrics.unknown("no replica is ready")
        if covered == 0:
            return Metrics.unknown(problem or f"no replica was scraped within {freshest:.0f} s")
        in_flight = latest(_lists(in_flight_series), freshest, now)
        buckets = self._bucket_rates(now)
        arrivals = _lists({name: pod.arrivals for name, pod in self._pods.items()})
        newest = lately(arrivals, PAIRED * interval_seconds, FAST_SECONDS, now)
        growing = lately(_lists(in_flight_series), PAIRED * interval_seconds, FAST_SECONDS, now)
        fast = _arrivals(newest, growing, FAST_SECONDS, in_flight, now)
        slow = _arrivals(arrivals, _lists(in_flight_series), SLOW_SECONDS, in_flight, now)
        # The load is zero only if all pods report zero.
        quiet = isinstance(slow, Idle) and covered == 1
        return Metrics(
            arrivals_fast=fast,
            arrivals_slow=slow,
            in_flight=in_flight,
            good_share=of_answers(share_within(buckets, objective_seconds), quiet=quiet),
            p95_milliseconds=of_answers(quantile(buckets, 0.95), quiet=quiet, scale=1000),
            coverage=covered,
            # A rate over so short a time is uncertain.
            fast_seconds=span_seconds(newest) or FAST_SECONDS,
            slow_seconds=SLOW_SECONDS,
            tokens_per_request=self._tokens_per_request(now),
        )

    def _tokens_per_request(self, now: float) -> Measurement:
        """Tokens of an answered request, mean of the slow window."""
        tokens = rate(_lists({name: pod.tokens for name, pod in self._pods.items()}), SLOW_SECONDS, now)
        answered = rate(_lists({name: pod.answered for name, pod in self._pods.items()}), SLOW_SECONDS, now)
        if isinstance(tokens, Value) and isinstance(answered, Value):
            return Value(tokens.value / answered.value, max(tokens.age_seconds, answered.age_seconds))
        return Idle()

    def _forget(self, before: float) -> None:
        for name, pod in list(self._pods.items()):
            pod.forget(before)
            if not pod.arrivals:
                del self._pods[name]

    def _bucket_rates(self, now: float) -> Buckets | str:
        """Answers/s up to each bound, over all pods; only bounds that all of them have."""
        rates: list[dict[float, float]] = []
        for pod in self._pods.values():
            inside = [entry for entry in pod.buckets if now - SLOW_SECONDS - BUCKETS_SECONDS <= entry[0] <= now]
            # After a restart with another objective the bounds differ: use the newest bounds only.
            inside = [entry for entry in inside if entry[1] == inside[-1][1]]
            if len(inside) >= 2 and inside[-1][0] > inside[0][0]:
                seconds = inside[-1][0] - inside[0][0]
                rates.append(dict(zip(inside[-1][1], _increases(inside), strict=True)))
                rates[-1] = {bound: count / seconds for bound, count in rates[-1].items()}
        if not rates:
            return f"no pod's histogram was read twice within {SLOW_SECONDS:.0f} s"
        common = set(rates[0]).intersection(*rates[1:])
        return tuple((bound, sum(one[bound] for one in rates)) for bound in sorted(common))


def _arrivals(
    arrivals: Series, in_flight: Series, window: float, in_flight_now: Measurement, now: float
) -> Measurement:
    """Arriving requests/s: those that ended, plus the growth of requests in flight."""
    ended = rate(arrivals, window, now)
    if isinstance(ended, Unknown):
        return ended
    if isinstance(ended, Idle) and isinstance(in_flight_now, Value) and in_flight_now.value == 0:
        return ended
    grown = growth(in_flight, window, now)
    age = ended.age_seconds if isinstance(ended, Value) else 0.0
    return Value(max(0.0, (ended.value if isinstance(ended, Value) else 0.0) + grown), age)


def _lists(series: dict[str, deque[Sample]]) -> dict[str, Sequence[Sample]]:
    return {name: list(samples) for name, samples in series.items()}


def _increases(entries: Iterable[tuple[float, tuple[float, ...], array[float]]]) -> list[float]:
    """The increase of each bucket; a histogram was reset, and counts from zero, where its total decreased."""
    total: list[float] = []
    before: array[float] | None = None
    for _, _, counts in entries:
        if before is None:
            total = [0.0] * len(counts)
        else:
            start = before if counts[-1] >= before[-1] else array("d", bytes(8 * len(counts)))
            total = [sum_ + max(0.0, new - old) for sum_, new, old in zip(total, counts, start, strict=True)]
        before = counts
    return total
