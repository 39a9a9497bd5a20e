"""What Prometheus answered -> three-state metrics. Pure: whoever asks hands in the answers and their time.

Every age is a difference of two times of Prometheus' own clock, so that the operator's clock may be wrong. Nothing is
filled in: `or vector(0)` is what turns an outage into an idle service, and no query of ours has it.

| answer | means |
|---|---|
| a finite value, targets up and fresh | Value |
| 0, or 0/0, while every target is up and fresh and nothing is in flight | Idle |
| an error, an empty vector, NaN or infinity otherwise, a negative rate, targets down or stale | Unknown |
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from penstock_operator.scaling.decide.measurement import Idle, Measurement, Metrics, Unknown, Value

STALE_INTERVALS = 3.0
"""A target not scraped for so many intervals is stale, long before Prometheus' own look-back of 5 minutes."""
FUTURE_SECONDS = 5.0
"""Samples from further in the future come from a broken clock."""


@dataclass(frozen=True, slots=True)
class Element:
    """One element of an instant vector."""

    labels: Mapping[str, str]
    value: float


@dataclass(frozen=True, slots=True)
class Vector:
    """An instant vector; empty when nothing matched."""

    elements: tuple[Element, ...] = ()


@dataclass(frozen=True, slots=True)
class Failure:
    """The query was not answered, or with an error; `reason` is a clause such as `prometheus answered 503`."""

    reason: str


Answer = Vector | Failure


@dataclass(frozen=True, slots=True)
class Answers:
    """The answers to one round of queries, all evaluated at one time."""

    evaluated_at: float
    """The evaluation time, seconds, by Prometheus' clock (`time()`)."""
    scraped_at: Answer
    """`timestamp(up{...} == 1)`: by pod, when it was last scraped with success."""
    arrivals_fast: Answer
    """`sum(rate(requests_total[fast])) + sum(deriv(in_flight[fast]))`."""
    arrivals_slow: Answer
    in_flight: Answer
    """`sum(in_flight)`."""
    buckets: Answer
    """`sum by (le) (rate(request_seconds_bucket[slow]))`."""


@dataclass(frozen=True, slots=True)
class Setting:
    """What the answers are read against."""

    ready: tuple[str, ...]
    """Names of the ready pods, as the API server tells."""
    scrape_interval_seconds: float
    objective_seconds: float
    fast_seconds: float
    slow_seconds: float
    pod_label: str = "pod"


def metrics_of(answers: Answers, setting: Setting) -> Metrics:
    """The metrics of one round."""
    scraped = answers.scraped_at
    if isinstance(scraped, Failure):
        return Metrics.unknown(scraped.reason)
    fresh, problem = _fresh(scraped, answers.evaluated_at, setting)
    if not fresh and setting.ready:
        return Metrics.unknown(problem)
    coverage = len(fresh & set(setting.ready)) / len(setting.ready) if setting.ready else 1.0
    in_flight = _single(answers.in_flight, "requests in flight")
    # Only a zero of all targets is a zero.
    quiet = coverage == 1 and isinstance(in_flight, Value) and in_flight.value == 0
    buckets = bucket_rates(answers.buckets)
    return Metrics(
        arrivals_fast=_rate(answers.arrivals_fast, "request rate", quiet=quiet),
        arrivals_slow=_rate(answers.arrivals_slow, "request rate", quiet=quiet),
        in_flight=in_flight,
        good_share=_of_answers(good_share(buckets, setting.objective_seconds), quiet=quiet),
        p95_milliseconds=_of_answers(quantile(buckets, 0.95), quiet=quiet, scale=1000),
        coverage=coverage,
        fast_seconds=setting.fast_seconds,
        slow_seconds=setting.slow_seconds,
    )


def _fresh(scraped: Vector, evaluated_at: float, setting: Setting) -> tuple[set[str], str]:
    """Pods that were scraped lately, and what is wrong when there are none."""
    stale = STALE_INTERVALS * setting.scrape_interval_seconds
    fresh: set[str] = set()
    problem = "prometheus knows no target of this endpoint that is up"
    for element in scraped.elements:
        age = evaluated_at - element.value
        if not math.isfinite(age):
            problem = "prometheus gave no time for its scrapes"
        elif age < -FUTURE_SECONDS:
            problem = f"the newest samples are {-age:.0f} s in the future: a clock is wrong"
        elif age > stale:
            problem = f"the newest samples are {age:.0f} s old"
        else:
            fresh.add(element.labels.get(setting.pod_label, ""))
    return fresh, problem


def _single(answer: Answer, what: str) -> Measurement:
    """The value of a vector of one element."""
    if isinstance(answer, Failure):
        return Unknown(answer.reason)
    if len(answer.elements) != 1:
        count = len(answer.elements) or "no"
        return Unknown(f"prometheus gave {count} series for the {what} instead of one")
    value = answer.elements[0].value
    if not math.isfinite(value) or value < 0:
        return Unknown(f"prometheus gave {value} for the {what}")
    return Value(value)


def _rate(answer: Answer, what: str, *, quiet: bool) -> Measurement:
    """A rate. 0 and NaN are idle where everything else says so too; a fall of in-flight may take it below 0."""
    if isinstance(answer, Vector) and len(answer.elements) == 1:
        value = answer.elements[0].value
        if quiet and (value == 0 or math.isnan(value)):
            return Idle()
        if -math.inf < value < 0:
            return Value(0.0)
    return _single(answer, what)


def _of_answers(value: float | str, *, quiet: bool, scale: float = 1.0) -> Measurement:
    if isinstance(value, str):
        return Idle() if quiet else Unknown(value)
    return Value(value * scale)


Buckets = tuple[tuple[float, float], ...]
"""(upper bound in seconds, answers per second up to it), by rising bound, the last one infinite."""


def bucket_rates(answer: Answer) -> Buckets | str:
    """The classic histogram's cumulative buckets, or what is wrong with it.

    Rates of buckets that were not scraped in the same instant may fall a little from one bound to the next; they are
    made monotone, as `histogram_quantile` does.
    """
    if isinstance(answer, Failure):
        return answer.reason
    found: list[tuple[float, float]] = []
    for element in answer.elements:
        try:
            bound = float(element.labels["le"])
        except (KeyError, ValueError):
            return "the latency histogram has a series without a bound (le)"
        if not math.isfinite(element.value) or element.value < 0 or math.isnan(bound):
            return f"prometheus gave {element.value} for the latency histogram"
        found.append((bound, element.value))
    found.sort()
    if not found or found[-1][0] != math.inf:
        return "prometheus gave no latency histogram"
    highest = 0.0
    buckets: list[tuple[float, float]] = []
    for bound, value in found:
        highest = max(highest, value)
        buckets.append((bound, highest))
    return tuple(buckets)


def quantile(buckets: Buckets | str, share: float) -> float | str:
    """A quantile in seconds, linear within its bucket; in the last one the highest finite bound, a lower limit.

    A clause instead when there were no answers (Prometheus' NaN).
    """
    if isinstance(buckets, str):
        return buckets
    total = buckets[-1][1]
    if total <= 0 or len(buckets) < 2:
        return "no request was answered in the window"
    rank, low, before = share * total, 0.0, 0.0
    for bound, value in buckets:
        if value >= rank:
            if bound == math.inf:
                return low
            return low + (bound - low) * (rank - before) / (value - before) if value > before else bound
        low, before = bound, value
    return low


def good_share(buckets: Buckets | str, objective_seconds: float) -> float | str:
    """The share of answers within the objective, exact where it is a bound; or why there is none."""
    if isinstance(buckets, str):
        return buckets
    total = buckets[-1][1]
    if total <= 0:
        return "no request was answered in the window"
    for bound, value in buckets:
        if math.isclose(bound, objective_seconds, rel_tol=1e-9):
            return value / total
    return "the latency histogram has no bound on the objective"


def pods_of(answer: Answer, pod_label: str = "pod") -> Sequence[str]:
    """The pods that an answer by pod speaks of."""
    return [] if isinstance(answer, Failure) else [element.labels.get(pod_label, "") for element in answer.elements]
