"""Queries for Prometheus, and the meaning of its answers. test_prometheus.py uses a real one."""

from __future__ import annotations

import json
import math
import re

import pytest

from penstock.resources.endpoint_parts.scaling import PrometheusQueries
from penstock_operator.decide import Idle, Metrics, Unknown, Value
from penstock_operator.decide.measurement import good_share, quantile
from penstock_operator.scaling.read.queries import (
    Answer,
    Element,
    EndpointPods,
    QueryFailure,
    Vector,
    Windows,
    bucket_rates,
    metrics_of,
    queries,
    read,
    selector,
)

PLACE = EndpointPods("team-a", "emotion", ("emotion-5f7d9c6b8-abcde", "emotion-5f7d9c6b8-fghij"))
WINDOWS = Windows.of(15)
NOW = 1_700_000_000.0
OWN = PrometheusQueries()


def one(value: float) -> Vector:
    return Vector((Element({}, value),))


def scraped(*ages: float) -> Vector:
    return Vector(tuple(Element({"pod": pod}, NOW - age) for pod, age in zip(PLACE.ready, ages, strict=False)))


def buckets(good: float, all_: float) -> Vector:
    return Vector((Element({"le": "0.02"}, good), Element({"le": "+Inf"}, all_)))


def histogram(*cells: tuple[str, float]) -> Vector:
    return Vector(tuple(Element({"le": bound}, value) for bound, value in cells))


def answers(**changed: Answer) -> dict[str, Answer]:
    everything: dict[str, Answer] = {
        "scraped_at": scraped(3, 9),
        "arrivals_fast": one(120.0),
        "arrivals_slow": one(110.0),
        "in_flight": one(2.0),
        "buckets": buckets(97.0, 100.0),
    }
    return {**everything, **changed}


def found(**changed: Answer) -> Metrics:
    return metrics_of(answers(**changed), PLACE, WINDOWS, OWN, evaluated_at=NOW, objective_seconds=0.02)


def matches(place: EndpointPods, pod: str) -> bool:
    pattern = re.search(r'pod=~"(.*)"', selector(place))
    assert pattern is not None
    return re.fullmatch(pattern.group(1), pod) is not None


@pytest.mark.parametrize(
    ("pod", "expected"),
    [
        ("emotion-5f7d9c6b8-abcde", True),
        ("emotion-7c9d-xz2kq", True),
        ("emotion-large-5f7d9c6b8-abcde", False),
        ("emotions-5f7d9c6b8-abcde", False),
        ("emotion-0", False),
        ("emotion", False),
    ],
)
def test_the_pods_of_an_endpoint_are_selected_by_their_names(pod: str, expected: bool) -> None:
    assert matches(PLACE, pod) is expected


def test_a_dot_in_a_name_is_escaped() -> None:
    assert matches(EndpointPods("a", "v1.2", ()), "v1.2-5f7d9c6b8-abcde")
    assert not matches(EndpointPods("a", "v1.2", ()), "v1x2-5f7d9c6b8-abcde")


def test_pods_whose_generated_names_are_cut_are_named_one_by_one() -> None:
    place = EndpointPods("a", "e" * 60, ("e" * 58 + "abcde",))
    assert matches(place, "e" * 58 + "abcde")
    assert not matches(place, "e" * 58 + "fghij")


def test_no_query_replaces_a_missing_series_by_zero() -> None:
    for query in queries(PLACE, WINDOWS, OWN).values():
        assert "vector(" not in query
        assert 'namespace="team-a"' in query


def test_text_generation_is_asked_for_first_tokens_and_tokens_of_an_answer() -> None:
    place = EndpointPods("team-a", "chat", (), generates=True)
    asked = queries(place, WINDOWS, OWN)
    assert "penstock_first_token_seconds_bucket" in asked["buckets"]
    assert 'kind="generated"' in asked["tokens_per_request"]
    others = queries(PLACE, WINDOWS, OWN)["tokens_per_request"]
    assert "penstock_tokens_total" in others
    assert "generation" not in others


@pytest.mark.parametrize(("answer", "expected"), [(one(44), Value(44)), (one(math.nan), Idle()), (Vector(), Idle())])
def test_tokens_of_an_answer_are_known_or_idle(answer: Answer, expected: object) -> None:
    assert found(tokens_per_request=answer).tokens_per_request == expected


def test_windows_hold_several_scrapes() -> None:
    assert (Windows.of(5).fast, Windows.of(5).slow) == (30, 120)
    assert (Windows.of(30).fast, Windows.of(30).slow) == (120, 120)


def test_custom_queries_replace_the_built_in_ones_with_the_endpoints_name_filled_in() -> None:
    own = PrometheusQueries(
        request_rate='sum(rate(envoy_requests{cluster="$endpoint",ns="${namespace}"}[1m]))',
        good_latency_ratio="my:good:ratio",
        in_flight="my:in_flight",
    )
    asked = queries(PLACE, WINDOWS, own)
    # The length of the texts is not what the user's queries are about.
    assert asked.pop("tokens_per_request") == queries(PLACE, WINDOWS, OWN)["tokens_per_request"]
    assert asked == {
        "arrivals_fast": 'sum(rate(envoy_requests{cluster="emotion",ns="team-a"}[1m]))',
        "arrivals_slow": 'sum(rate(envoy_requests{cluster="emotion",ns="team-a"}[1m]))',
        "in_flight": "my:in_flight",
        "good_share": "my:good:ratio",
    }


def test_a_dollar_in_a_custom_regular_expression_is_kept() -> None:
    own = PrometheusQueries(request_rate='sum(x{pod=~"emotion-.*$"})')
    assert queries(PLACE, WINDOWS, own)["arrivals_fast"] == 'sum(x{pod=~"emotion-.*$"})'


QUIET = {"arrivals_fast": one(0), "arrivals_slow": one(0), "in_flight": one(0), "buckets": buckets(0, 0)}


def test_finite_values_of_current_targets_are_known() -> None:
    metrics = found(buckets=histogram(("+Inf", 40), ("0.02", 38), ("0.01", 20), ("0.05", 40)))

    assert (metrics.arrivals_fast, metrics.arrivals_slow, metrics.in_flight) == (Value(120), Value(110), Value(2))
    assert metrics.good_share == Value(0.95)
    assert isinstance(metrics.p95_milliseconds, Value)
    assert metrics.p95_milliseconds.value == pytest.approx(20)
    assert (metrics.coverage, metrics.fast_seconds, metrics.slow_seconds) == (1, 60, 120)


@pytest.mark.parametrize("rate", [0, math.nan])
def test_zero_of_all_targets_is_idle(rate: float) -> None:
    metrics = found(**{**QUIET, "arrivals_fast": one(rate)})

    assert metrics.arrivals_fast == metrics.arrivals_slow == metrics.good_share == metrics.p95_milliseconds == Idle()
    assert metrics.in_flight == Value(0)


@pytest.mark.parametrize("others", [{}, QUIET])
@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (QueryFailure("prometheus answered 503"), "prometheus answered 503"),
        (Vector(), "prometheus gave no series for the request rate instead of one"),
        (Vector((Element({}, 1), Element({}, 2))), "prometheus gave 2 series for the request rate instead of one"),
        (one(math.inf), "prometheus gave inf for the request rate"),
        (one(-math.inf), "prometheus gave -inf for the request rate"),
    ],
)
def test_an_answer_without_a_number_is_unknown_with_its_reason(
    others: dict[str, Answer], answer: Answer, reason: str
) -> None:
    assert found(**{**others, "arrivals_fast": answer}).arrivals_fast == Unknown(reason)


def test_a_rate_that_is_no_number_is_unknown_with_traffic_and_one_below_zero_is_zero() -> None:
    assert found(arrivals_fast=one(math.nan)).arrivals_fast == Unknown("prometheus gave nan for the request rate")
    assert found(arrivals_fast=one(-2)).arrivals_fast == Value(0)


@pytest.mark.parametrize(
    ("targets", "reason"),
    [
        (QueryFailure("prometheus answered 503"), "prometheus answered 503"),
        (Vector(), "prometheus knows no target of this endpoint that is up"),
        (scraped(200, 200), "the newest samples are 200 s old"),
        (scraped(-40), "the newest samples are 40 s in the future: a clock is wrong"),
        (scraped(math.nan), "prometheus gave no time for its scrapes"),
    ],
)
def test_targets_that_are_down_or_stale_make_everything_unknown(targets: Answer, reason: str) -> None:
    metrics = found(**{**QUIET, "scraped_at": targets})

    assert metrics.arrivals_fast == metrics.in_flight == metrics.p95_milliseconds == Unknown(reason)
    assert metrics.coverage == 0


def test_a_partial_scrape_shows_in_the_coverage_and_is_never_idle() -> None:
    metrics = found(**{**QUIET, "scraped_at": scraped(3, 100)})

    assert metrics.coverage == 0.5
    assert metrics.arrivals_fast == Value(0)
    assert isinstance(metrics.p95_milliseconds, Unknown)


def test_only_ready_pods_count_as_coverage_and_without_any_nothing_is_missing() -> None:
    """Prometheus also scrapes surge pods and terminating pods; at zero replicas the gateway's figures alone count."""
    surge = Vector((*scraped(1).elements, Element({"pod": "surge"}, NOW - 1)))
    assert found(scraped_at=surge).coverage == 0.5
    place = EndpointPods("team-a", "emotion", ())
    given = answers(scraped_at=Vector())
    metrics = metrics_of(given, place, WINDOWS, OWN, evaluated_at=NOW, objective_seconds=0.02)
    assert (metrics.arrivals_fast, metrics.coverage) == (Value(120), 1)


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (QueryFailure("timed out"), "timed out"),
        (Vector(), "prometheus gave no latency histogram"),
        (histogram(("0.02", 3)), "prometheus gave no latency histogram"),
        (one(3), "the latency histogram has a series without a bound (le)"),
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


@pytest.mark.parametrize(
    ("answer", "share", "p95"),
    [
        (one(0.98), Value(0.98), Idle()),
        (one(0.90), Value(0.90), Value(20.0)),
        (one(1.7), Unknown("goodLatencyRatio gave 1.7, which is no share from 0 to 1"), None),
        (Vector(), Unknown("goodLatencyRatio gave no series instead of one"), None),
        (QueryFailure("no answer"), Unknown("no answer"), None),
    ],
)
def test_a_users_share_query_gives_the_side_of_the_objective_of_the_p95(
    answer: Answer, share: object, p95: object
) -> None:
    own = PrometheusQueries(good_latency_ratio="x")
    given = answers(good_share=answer)
    del given["buckets"]
    metrics = metrics_of(given, PLACE, WINDOWS, own, evaluated_at=NOW, objective_seconds=0.02)
    assert metrics.good_share == share
    assert metrics.p95_milliseconds == (p95 if p95 is not None else share)


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (
            {
                "status": "success",
                "data": {"resultType": "vector", "result": [{"metric": {"pod": "a"}, "value": [1, "2.5"]}]},
            },
            Vector((Element({"pod": "a"}, 2.5),)),
        ),
        ({"status": "success", "data": {"resultType": "scalar", "result": [1, "7"]}}, one(7.0)),
        ({"status": "success", "data": {"resultType": "vector", "result": []}}, Vector()),
        (
            {"status": "success", "data": {"resultType": "matrix", "result": []}},
            QueryFailure("prometheus gave a matrix instead of numbers"),
        ),
        ({"status": "error", "error": "parse error"}, QueryFailure("prometheus answered 'parse error'")),
        ([], QueryFailure("what answers is no prometheus")),
        (
            {"status": "success", "data": {"resultType": "vector", "result": [{}]}},
            QueryFailure("what answers is no prometheus"),
        ),
    ],
)
def test_answers_of_prometheus_are_parsed(body: object, expected: Answer) -> None:
    assert read(json.dumps(body).encode()) == expected


def test_an_html_answer_is_refused() -> None:
    assert read(b"<html>") == QueryFailure("what answers is no prometheus")
