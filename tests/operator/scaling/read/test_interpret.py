"""Metrics from Prometheus' answers."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from penstock_operator.decide import Idle, Unknown, Value
from penstock_operator.decide.measurement import good_share, quantile
from penstock_operator.scaling.read.queries import (
    Answer,
    Answers,
    Element,
    QueryFailure,
    ScrapeTargets,
    Vector,
    bucket_rates,
    metrics_of,
)

NOW = 5000.0
TARGETS = ScrapeTargets(("a", "b"), 15, 0.02, 60, 120)


def single(value: float) -> Vector:
    return Vector((Element({}, value),))


def scraped(**ages: float) -> Vector:
    return Vector(tuple(Element({"pod": pod}, NOW - age) for pod, age in ages.items()))


def histogram(*cells: tuple[str, float]) -> Vector:
    return Vector(tuple(Element({"le": bound}, value) for bound, value in cells))


BUSY = Answers(
    NOW, scraped(a=3, b=11), single(42.5), single(40), single(3),
    histogram(("+Inf", 40), ("0.02", 38), ("0.01", 20), ("0.05", 40)),
)  # fmt: skip
QUIET = replace(
    BUSY,
    arrivals_fast=single(0),
    arrivals_slow=single(0),
    in_flight=single(0),
    buckets=histogram(("0.02", 0), ("+Inf", 0)),
)


def test_finite_values_of_current_targets_are_known() -> None:
    found = metrics_of(BUSY, TARGETS)

    assert (found.arrivals_fast, found.arrivals_slow, found.in_flight) == (Value(42.5), Value(40), Value(3))
    assert found.good_share == Value(0.95)
    assert isinstance(found.p95_milliseconds, Value)
    assert found.p95_milliseconds.value == pytest.approx(20)
    assert (found.coverage, found.fast_seconds, found.slow_seconds) == (1, 60, 120)


def test_zero_of_all_targets_is_idle() -> None:
    found = metrics_of(QUIET, TARGETS)

    assert found.arrivals_fast == found.arrivals_slow == found.good_share == found.p95_milliseconds == Idle()
    assert found.in_flight == Value(0)


def test_nan_is_idle_without_traffic_and_unknown_with_traffic() -> None:
    quiet = metrics_of(replace(QUIET, arrivals_fast=single(math.nan)), TARGETS)
    busy = metrics_of(replace(BUSY, arrivals_fast=single(math.nan)), TARGETS)

    assert quiet.arrivals_fast == Idle()
    assert busy.arrivals_fast == Unknown("prometheus gave nan for the request rate")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (QueryFailure("prometheus does not answer"), "prometheus does not answer"),
        (Vector(), "prometheus gave no series for the request rate instead of one"),
        (Vector((Element({}, 1), Element({}, 2))), "prometheus gave 2 series for the request rate instead of one"),
        (single(math.inf), "prometheus gave inf for the request rate"),
        (single(-math.inf), "prometheus gave -inf for the request rate"),
    ],
)
def test_an_answer_without_a_number_is_unknown_with_its_reason(change: Answer, reason: str) -> None:
    assert metrics_of(replace(BUSY, arrivals_fast=change), TARGETS).arrivals_fast == Unknown(reason)


def test_an_empty_vector_is_unknown_even_when_everything_else_is_quiet() -> None:
    assert isinstance(metrics_of(replace(QUIET, arrivals_fast=Vector()), TARGETS).arrivals_fast, Unknown)


def test_a_rate_that_falls_below_zero_with_the_queue_is_zero() -> None:
    assert metrics_of(replace(BUSY, arrivals_fast=single(-2)), TARGETS).arrivals_fast == Value(0)


@pytest.mark.parametrize(
    ("targets", "reason"),
    [
        (QueryFailure("prometheus answered 503"), "prometheus answered 503"),
        (Vector(), "prometheus knows no target of this endpoint that is up"),
        (scraped(a=200, b=200), "the newest samples are 200 s old"),
        (scraped(a=-40), "the newest samples are 40 s in the future: a clock is wrong"),
        (scraped(a=math.nan), "prometheus gave no time for its scrapes"),
    ],
)
def test_targets_that_are_down_or_stale_make_everything_unknown(targets: Answer, reason: str) -> None:
    found = metrics_of(replace(QUIET, scraped_at=targets), TARGETS)

    assert found.arrivals_fast == found.in_flight == found.p95_milliseconds == Unknown(reason)
    assert found.coverage == 0


def test_a_partial_scrape_shows_in_the_coverage_and_is_never_idle() -> None:
    found = metrics_of(replace(QUIET, scraped_at=scraped(a=3, b=100)), TARGETS)

    assert found.coverage == 0.5
    assert found.arrivals_fast == Value(0)
    assert isinstance(found.p95_milliseconds, Unknown)


def test_pods_that_are_not_ready_do_not_count_as_coverage() -> None:
    """Prometheus also scrapes surge pods and terminating pods."""
    assert metrics_of(replace(BUSY, scraped_at=scraped(a=1, old=1, older=1)), TARGETS).coverage == 0.5


def test_without_ready_pods_nothing_is_missing() -> None:
    """At zero replicas the gateway's figures alone count."""
    found = metrics_of(replace(BUSY, scraped_at=Vector()), replace(TARGETS, ready=()))

    assert found.arrivals_fast == Value(42.5)
    assert found.coverage == 1


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (QueryFailure("timed out"), "timed out"),
        (Vector(), "prometheus gave no latency histogram"),
        (histogram(("0.02", 3)), "prometheus gave no latency histogram"),
        (single(3), "the latency histogram has a series without a bound (le)"),
        (histogram(("x", 3)), "the latency histogram has a series without a bound (le)"),
        (histogram(("0.02", math.nan), ("+Inf", 1)), "prometheus gave nan for the latency histogram"),
    ],
)
def test_a_broken_histogram_is_an_error_message(answer: Answer, reason: str) -> None:
    assert bucket_rates(answer) == reason
    assert quantile(bucket_rates(answer), 0.95) == reason
    assert good_share(bucket_rates(answer), 0.02) == reason


def test_a_quantile_is_linear_within_its_bucket_and_stops_at_the_last_bound() -> None:
    buckets = bucket_rates(histogram(("0.1", 50), ("0.2", 90), ("+Inf", 100)))

    assert quantile(buckets, 0.5) == pytest.approx(0.1)
    assert quantile(buckets, 0.7) == pytest.approx(0.15)
    assert quantile(buckets, 0.95) == 0.2
    assert quantile(((math.inf, 5.0),), 0.5) == "no request was answered in the window"


def test_buckets_of_different_scrapes_are_made_monotonic() -> None:
    assert bucket_rates(histogram(("0.1", 50), ("0.2", 49.9), ("+Inf", 60))) == ((0.1, 50), (0.2, 50), (math.inf, 60))


def test_the_good_share_needs_a_bucket_bound_on_the_objective() -> None:
    buckets = bucket_rates(histogram(("0.1", 50), ("+Inf", 100)))

    assert good_share(buckets, 0.1) == 0.5
    assert good_share(buckets, 0.07) == "the latency histogram has no bound on the objective"
