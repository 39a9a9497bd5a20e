"""Prometheus' answers to the autoscaler's queries -> three-state metrics. Pure.

Ages are differences between two times of Prometheus' clock, so that a wrong clock of the operator does not matter. No
missing value is filled in: `or vector(0)` would turn an outage into an idle service.

| answer | result |
|---|---|
| a finite value, targets up and fresh | Value |
| 0, or 0/0, while every target is up and fresh and nothing is in flight | Idle |
| an error, an empty vector, NaN or infinity otherwise, a negative rate, targets down or stale | Unknown |
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from penstock_operator.decide.measurement import Idle, Measurement, Metrics, Unknown, Value, of_answers

STALE_INTERVALS = 3.0
"""A target that was not scraped for this many intervals is stale, long before Prometheus' look-back of 5 minutes."""
FUTURE_SECONDS = 5.0
"""Samples further in the future come from a wrong clock."""
MOST = 1e9
"""No endpoint has more requests in a second or in flight, or more tokens in a request."""


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
class QueryFailure:
    """The query failed; `reason` is a clause such as `prometheus answered 503`."""

    reason: str


Answer = Vector | QueryFailure


@dataclass(frozen=True, slots=True)
class Answers:
    """The answers to one round of queries, all evaluated at the same time."""

    evaluated_at: float
    """Evaluation time by Prometheus' clock (`time()`), seconds since the epoch."""
    scraped_at: Answer
    """`timestamp(up{...} == 1)`: by pod, the time of its last successful scrape."""
    arrivals_fast: Answer
    """`sum(rate(requests_total[fast])) + sum(deriv(in_flight[fast]))`."""
    arrivals_slow: Answer
    in_flight: Answer
    """`sum(in_flight)`."""
    buckets: Answer
    """`sum by (le) (rate(request_seconds_bucket[slow]))`, of text generation that of the time to the first token."""
    tokens_per_request: Answer = Vector()
    """Tokens of an answered request, as `Metrics` has it; NaN without answers."""


@dataclass(frozen=True, slots=True)
class ScrapeTargets:
    """What the answers are interpreted against: the pods to expect, and the windows of the queries."""

    ready: tuple[str, ...]
    """Names of the ready pods, from the API server."""
    scrape_interval_seconds: float
    objective_seconds: float
    fast_seconds: float
    slow_seconds: float
    pod_label: str = "pod"


def metrics_of(answers: Answers, targets: ScrapeTargets) -> Metrics:
    """The metrics of one round of queries."""
    scraped = answers.scraped_at
    if isinstance(scraped, QueryFailure):
        return Metrics.unknown(scraped.reason)
    fresh, problem = _fresh(scraped, answers.evaluated_at, targets)
    if not fresh and targets.ready:
        return Metrics.unknown(problem)
    coverage = len(fresh & set(targets.ready)) / len(targets.ready) if targets.ready else 1.0
    in_flight = _single(answers.in_flight, "requests in flight")
    # A zero counts only if all targets have it.
    quiet = coverage == 1 and isinstance(in_flight, Value) and in_flight.value == 0
    buckets = bucket_rates(answers.buckets)
    return Metrics(
        arrivals_fast=_rate(answers.arrivals_fast, "request rate", quiet=quiet),
        arrivals_slow=_rate(answers.arrivals_slow, "request rate", quiet=quiet),
        in_flight=in_flight,
        good_share=of_answers(good_share(buckets, targets.objective_seconds), quiet=quiet),
        p95_milliseconds=of_answers(quantile(buckets, 0.95), quiet=quiet, scale=1000),
        coverage=coverage,
        fast_seconds=targets.fast_seconds,
        slow_seconds=targets.slow_seconds,
        tokens_per_request=_tokens_per_request(answers.tokens_per_request),
    )


def _tokens_per_request(answer: Answer) -> Measurement:
    """Idle where it is not known: a request then counts as one of the measured workload."""
    found = _single(answer, "tokens of a request")
    return found if isinstance(found, Value) else Idle()


def _fresh(scraped: Vector, evaluated_at: float, targets: ScrapeTargets) -> tuple[set[str], str]:
    """Names of the pods with a fresh scrape, and the reason if there are none."""
    stale = STALE_INTERVALS * targets.scrape_interval_seconds
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
            fresh.add(element.labels.get(targets.pod_label, ""))
    return fresh, problem


def _single(answer: Answer, what: str) -> Measurement:
    """The value of a vector with one element."""
    if isinstance(answer, QueryFailure):
        return Unknown(answer.reason)
    if len(answer.elements) != 1:
        count = len(answer.elements) or "no"
        return Unknown(f"prometheus gave {count} series for the {what} instead of one")
    value = answer.elements[0].value
    if not 0 <= value <= MOST:
        return Unknown(f"prometheus gave {value} for the {what}")
    return Value(value)


def _rate(answer: Answer, what: str, *, quiet: bool) -> Measurement:
    """A rate. 0 and NaN are Idle if `quiet`; a fall of what is in flight may take it below 0, which counts as 0."""
    if isinstance(answer, Vector) and len(answer.elements) == 1:
        value = answer.elements[0].value
        if quiet and (value == 0 or math.isnan(value)):
            return Idle()
        if -math.inf < value < 0:
            return Value(0.0)
    return _single(answer, what)


Buckets = tuple[tuple[float, float], ...]
"""(upper bound in seconds, answers per second up to it), sorted by bound, the last bound infinite."""


def bucket_rates(answer: Answer) -> Buckets | str:
    """The cumulative buckets of the classic histogram, or the reason why they are unusable.

    Rates of buckets that were scraped at different times may decrease from one bound to the next; they are made
    monotone, as `histogram_quantile` does.
    """
    if isinstance(answer, QueryFailure):
        return answer.reason
    found: list[tuple[float, float]] = []
    for element in answer.elements:
        try:
            bound = float(element.labels["le"])
        except (KeyError, ValueError):
            return "the latency histogram has a series without a bound (le)"
        if not 0 <= element.value <= MOST or math.isnan(bound):
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
    """A quantile in seconds, linear within its bucket; in the last bucket the highest finite bound, a lower limit.

    A reason instead if there were no answers (Prometheus' NaN).
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
    """The share of answers within the objective, which must be a bound; or the reason why there is none."""
    if isinstance(buckets, str):
        return buckets
    total = buckets[-1][1]
    if total <= 0:
        return "no request was answered in the window"
    for bound, value in buckets:
        if math.isclose(bound, objective_seconds, rel_tol=1e-9):
            return value / total
    return "the latency histogram has no bound on the objective"
