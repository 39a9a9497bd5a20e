"""PromQL queries about one endpoint, and their answers -> three-state metrics. Pure.

No query has `or vector(0)`, and no missing value is filled in: an outage would become an idle service. Ages are
differences between two times of Prometheus' clock, so that a wrong clock of the operator does not matter.

| answer | result |
|---|---|
| a finite value, targets up and fresh | Value |
| 0, or 0/0, while every target is up and fresh and nothing is in flight | Idle |
| an error, an empty vector, NaN or infinity otherwise, a negative rate, targets down or stale | Unknown |
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from string import Template
from typing import Any

from penstock.resources.endpoint_parts.scaling import PrometheusQueries
from penstock_operator.decide.measurement import (
    Buckets,
    Idle,
    Measurement,
    Metrics,
    Unknown,
    Value,
    good_share,
    of_answers,
    quantile,
)
from penstock_operator.facts.findings import unprintable_as_spaces
from penstock_operator.scaling.read.scrape import (
    ANSWERED,
    BUCKET,
    FIRST_TOKEN_BUCKET,
    GENERATED,
    GENERATION_TOKENS,
    IN_FLIGHT,
    REQUESTS,
    TOKENS,
    UNANSWERED_CODES,
)

GOOD_SHARE = 0.95
"""p95 within the objective means that this share of the answers is."""
GENERATED_NAME_LIMIT = 58
"""Maximum length of a pod's name before its random part; a longer name is cut."""

STALE_INTERVALS = 3.0
"""A target that was not scraped for this many intervals is stale, long before Prometheus' look-back of 5 minutes."""
FUTURE_SECONDS = 5.0
"""Samples further in the future come from a wrong clock."""
MOST = 1e9
"""No endpoint has more requests in a second or in flight, or more tokens in a request."""


@dataclass(frozen=True)
class Windows:
    """Time windows of the queries in seconds. Each must contain several scrapes."""

    scrape_interval: float
    fast: float
    slow: float

    @classmethod
    def of(cls, scrape_interval_seconds: float) -> Windows:
        """For a Prometheus with this scrape interval: a rate needs at least four samples."""
        four = 4 * scrape_interval_seconds
        return cls(scrape_interval_seconds, max(30.0, four), max(120.0, four))


@dataclass(frozen=True)
class EndpointPods:
    """The pods that a query is about."""

    namespace: str
    endpoint: str
    ready: tuple[str, ...]
    """Names of the ready pods."""
    generates: bool = False
    """They generate text: the latency is the time to the first token."""


def selector(place: EndpointPods) -> str:
    """Label matchers of the pods of an endpoint: the Deployment's name, a hash and five random characters.

    By pattern instead of the present names, so that a pod that has just ended still counts.
    """
    base = f"{place.endpoint}-"
    pods = f"{_literal(place.endpoint)}-[a-z0-9]{{1,10}}-[a-z0-9]{{5}}"
    if len(base) + len("1234567890-") > GENERATED_NAME_LIMIT:
        # The name is cut at an unknown position: use the known names.
        pods = "|".join(map(_literal, place.ready)) or pods
    return f'namespace="{place.namespace}",pod=~"{pods}"'


def _literal(name: str) -> str:
    """A Kubernetes name as a regular expression inside PromQL quotes."""
    return name.replace(".", "[.]")


def queries(place: EndpointPods, windows: Windows, own: PrometheusQueries) -> dict[str, str]:
    """PromQL by the name of its answer: `scraped_at` (by pod, the time of its last scrape), those of `Metrics`, and
    `buckets` (answers/s up to each bound of the latency). Queries that `own` overrides are the user's."""
    pods, fast, slow = selector(place), f"{windows.fast:.0f}s", f"{windows.slow:.0f}s"
    codes = "|".join(sorted(UNANSWERED_CODES))
    # The scrape itself is in flight while it is counted.
    waiting = f"clamp_min({IN_FLIGHT}{{{pods}}} - 1, 0)"

    def arrivals(window: str) -> str:
        ended = f"sum by (pod) (rate({ANSWERED}{{{pods}}}[{window}]))"
        # Refused requests of pods that have refused any; growth of pods with two samples.
        others = f'sum by (pod) (rate({REQUESTS}{{{pods},code=~"{codes}"}}[{window}]))'
        grown = f"sum by (pod) (deriv({IN_FLIGHT}{{{pods}}}[{window}]))"
        return f"sum({ended} + ({others} or 0 * {ended}) + ({grown} or 0 * {ended}))"

    asked = {
        "scraped_at": f"timestamp(up{{{pods}}} == 1)",
        "arrivals_fast": arrivals(fast),
        "arrivals_slow": arrivals(slow),
        "in_flight": f"sum({waiting})",
        "buckets": f"sum by (le) (rate({FIRST_TOKEN_BUCKET if place.generates else BUCKET}{{{pods}}}[{slow}]))",
    }
    tokens = f"{GENERATION_TOKENS}{{{pods},{GENERATED}}}" if place.generates else f"{TOKENS}{{{pods}}}"
    asked["tokens_per_request"] = f"sum(rate({tokens}[{slow}])) / sum(rate({ANSWERED}{{{pods}}}[{slow}]))"
    if own.request_rate is not None:
        # The user's query defines the counted requests; there may be no scrape target of these pods.
        rate = _filled(own.request_rate, place)
        asked |= {"arrivals_fast": rate, "arrivals_slow": rate}
        del asked["scraped_at"]
    if own.in_flight is not None:
        asked["in_flight"] = _filled(own.in_flight, place)
    if own.good_latency_ratio is not None:
        asked["good_share"] = _filled(own.good_latency_ratio, place)
        del asked["buckets"]
    return asked


def _filled(query: str, place: EndpointPods) -> str:
    return Template(query).safe_substitute(namespace=place.namespace, endpoint=place.endpoint)


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


def metrics_of(
    answers: Mapping[str, Answer],
    place: EndpointPods,
    windows: Windows,
    own: PrometheusQueries,
    *,
    evaluated_at: float,
    objective_seconds: float,
) -> Metrics:
    """The metrics from the answers to `queries`, all evaluated at one time by Prometheus' clock."""
    fresh, problem, ready = set(place.ready), "", place.ready
    if "scraped_at" in answers:
        scraped = answers["scraped_at"]
        if isinstance(scraped, QueryFailure):
            return Metrics.unknown(scraped.reason)
        fresh, problem = _fresh(scraped, evaluated_at, windows)
    # Otherwise the targets of a user's query are unknown: its answer counts as complete.
    if not fresh and ready:
        return Metrics.unknown(problem)
    coverage = len(fresh & set(ready)) / len(ready) if ready else 1.0
    in_flight = _single(answers["in_flight"], "requests in flight")
    # A zero counts only if all targets have it.
    quiet = coverage == 1 and isinstance(in_flight, Value) and in_flight.value == 0
    slow = _rate(answers["arrivals_slow"], "request rate", quiet=quiet)
    if own.good_latency_ratio is not None:
        good = _share(answers["good_share"], quiet=isinstance(slow, Idle))
        p95 = _p95(good, objective_seconds * 1000)
    else:
        buckets = bucket_rates(answers["buckets"])
        good = of_answers(good_share(buckets, objective_seconds), quiet=quiet)
        p95 = of_answers(quantile(buckets, 0.95), quiet=quiet, scale=1000)
    # Idle where it is not known: a request then counts as one of the measured workload.
    tokens = _single(answers.get("tokens_per_request", Vector()), "tokens of a request")
    return Metrics(
        arrivals_fast=_rate(answers["arrivals_fast"], "request rate", quiet=quiet),
        arrivals_slow=slow,
        in_flight=in_flight,
        good_share=good,
        p95_milliseconds=p95,
        coverage=coverage,
        fast_seconds=windows.fast,
        slow_seconds=windows.slow,
        tokens_per_request=tokens if isinstance(tokens, Value) else Idle(),
    )


def _fresh(scraped: Vector, evaluated_at: float, windows: Windows) -> tuple[set[str], str]:
    """Names of the pods with a fresh scrape, and the reason if there are none."""
    stale = STALE_INTERVALS * windows.scrape_interval
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
            fresh.add(element.labels.get("pod", ""))
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
    """A rate. 0 and NaN are Idle if `quiet`; a fall of requests in flight may take it below 0, which counts as 0."""
    if isinstance(answer, Vector) and len(answer.elements) == 1:
        value = answer.elements[0].value
        if quiet and (value == 0 or math.isnan(value)):
            return Idle()
        if -math.inf < value < 0:
            return Value(0.0)
    return _single(answer, what)


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


def _share(answer: Answer, *, quiet: bool) -> Measurement:
    if isinstance(answer, QueryFailure):
        return Unknown(answer.reason)
    if len(answer.elements) != 1:
        return Unknown(f"goodLatencyRatio gave {len(answer.elements) or 'no'} series instead of one")
    value = answer.elements[0].value
    if quiet and math.isnan(value):
        return Idle()
    if not 0 <= value <= 1:
        return Unknown(f"goodLatencyRatio gave {value:g}, which is no share from 0 to 1")
    return Value(value)


def _p95(good: Measurement, objective_milliseconds: float) -> Measurement:
    """A share shows only on which side of the objective the p95 is: above it, the objective is a lower bound; below
    it, nothing is known."""
    if isinstance(good, Value):
        return Value(objective_milliseconds) if good.value < GOOD_SHARE else Idle()
    return good


NO_ANSWER = (ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError, OverflowError)
"""What reading another program's answer may raise: deep nesting and integers of hundreds of digits too."""


def read(body: bytes) -> Answer:
    """Parse an answer of /api/v1/query: a vector, or a scalar as a vector of one element without labels."""
    try:
        value: Any = json.loads(body)
        if value["status"] != "success":
            return QueryFailure(_error_of(value))
        data = value["data"]
        if data["resultType"] == "scalar":
            return Vector((Element({}, float(data["result"][1])),))
        if data["resultType"] != "vector":
            return QueryFailure(
                f"prometheus gave a {unprintable_as_spaces(str(data['resultType'])[:40])} instead of numbers"
            )
        return Vector(tuple(_element(entry) for entry in data["result"]))
    except NO_ANSWER:
        return QueryFailure("what answers is no prometheus")


def _error_of(value: Any) -> str:
    return f"prometheus answered {str(value.get('error') or 'error')[:200]!r}"


def _element(entry: Mapping[str, Any]) -> Element:
    sample: Sequence[Any] = entry["value"]
    return Element({str(key): str(label) for key, label in entry["metric"].items()}, float(sample[1]))
