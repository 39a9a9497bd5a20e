"""Queries for Prometheus, and the meaning of its answers. test_prometheus.py uses a real one."""

from __future__ import annotations

import json
import math
import re

import pytest

from penstock.resources.endpoint_parts.scaling import PrometheusQueries
from penstock_operator.decide import Idle, Metrics, Unknown, Value
from penstock_operator.scaling.read.queries import (
    Answer,
    Element,
    EndpointPods,
    QueryFailure,
    Vector,
    Windows,
    judged,
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
    return judged(answers(**changed), PLACE, WINDOWS, OWN, evaluated_at=NOW, objective_seconds=0.02)


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
    assert (Windows.of(30).fast, Windows.of(30).slow) == (120, 240)


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


def test_answers_with_values_become_known_metrics() -> None:
    metrics = found()
    assert (metrics.arrivals_fast, metrics.arrivals_slow) == (Value(120.0), Value(110.0))
    assert (metrics.good_share, metrics.coverage) == (Value(0.97), 1.0)


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"arrivals_fast": QueryFailure("prometheus answered 503")}, "answered 503"),
        ({"arrivals_fast": Vector()}, "no series"),
        ({"arrivals_fast": one(float("nan"))}, ""),
        ({"scraped_at": Vector()}, "knows no target"),
        ({"scraped_at": scraped(300, 300)}, "300 s old"),
    ],
)
def test_an_outage_is_unknown_and_not_zero(changed: dict[str, Answer], why: str) -> None:
    fast = found(**changed).arrivals_fast
    assert isinstance(fast, Unknown)
    assert why in fast.reason


def test_zero_rates_are_idle() -> None:
    metrics = found(arrivals_fast=one(0.0), arrivals_slow=one(0.0), in_flight=one(0.0), buckets=buckets(0.0, 0.0))
    assert isinstance(metrics.arrivals_fast, Idle)
    assert isinstance(metrics.p95_milliseconds, Idle)


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
    metrics = judged(given, PLACE, WINDOWS, own, evaluated_at=NOW, objective_seconds=0.02)
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
