"""The runtime's metrics are parsed without the client library."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from penstock_operator.endpoint.objects.canary import PlanCounter
from penstock_operator.scaling.read.scrape import UnreadableMetrics, parse_metrics
from penstock_runtime.errors import InferenceFailed, Overloaded, for_gateway
from tests.operator.scaling.pods import ServingPod

GOOD = """\
penstock_requests_total{route="/predict",code="200"} 7.0
penstock_requests_total{route="/predict",code="429"} 3.0
penstock_in_flight_requests 3.0
penstock_request_seconds_bucket{le="0.02"} 5.0
penstock_request_seconds_bucket{le="+Inf"} 7.0
penstock_request_seconds_count 7.0
"""


def test_the_metrics_of_a_runtime_are_parsed() -> None:
    pod = ServingPod(objective_milliseconds=17.5)
    pod.answer(10, seconds=0.0175)
    pod.answer(4, seconds=0.018)
    pod.refuse(3)
    pod.metrics.finished("/healthz", 200, 0.001, inference=False)
    pod.metrics.in_flight = 5

    found = parse_metrics(pod.text())

    assert (found.arrivals, found.in_flight) == (17, 5)
    assert found.counts[found.bounds.index(0.0175)] == 10, "on the objective is within it"
    assert (found.bounds[-1], found.counts[-1]) == (math.inf, 14)


def test_the_client_library_reads_the_same() -> None:
    pod = ServingPod()
    pod.answer(25, seconds=0.013, late=3)
    text = pod.text()

    families = {family.name: family for family in text_string_to_metric_families(text)}
    buckets = {
        float(sample.labels["le"]): sample.value
        for sample in families["penstock_request_seconds"].samples
        if sample.name.endswith("_bucket")
    }

    found = parse_metrics(text)
    assert dict(zip(found.bounds, found.counts, strict=True)) == buckets


def test_of_text_generation_the_latency_is_the_time_to_the_first_token() -> None:
    pod = ServingPod(objective_milliseconds=250)
    for _ in range(3):
        pod.generate(20, first_token_seconds=0.25)
    pod.generate(40, first_token_seconds=0.3)

    found = parse_metrics(pod.text())

    assert (found.arrivals, found.answered, found.tokens) == (4, 4, 100)
    assert found.counts[found.bounds.index(0.25)] == 3
    assert parse_metrics(ServingPod().text()).tokens == 0


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        ("penstock_in_flight_requests 3.0\n", "", "lacks one of"),
        ("penstock_request_seconds_count 7.0\n", "", "lacks one of"),
        ('penstock_request_seconds_bucket{le="+Inf"} 7.0\n', "", "no infinite bound"),
        ('le="0.02"', 'lower="0.02"', "without a bound"),
        ("count 7.0", "count NaN", "is not a count"),
        ("count 7.0", "count -1", "is not a count"),
        ("requests 3.0", "requests +Inf", "is not a count"),
        ("count 7.0", "count seven", "is not a number"),
    ],
)
def test_metrics_that_are_not_a_runtimes_are_refused(old: str, new: str, why: str) -> None:
    parse_metrics(GOOD)
    with pytest.raises(UnreadableMetrics, match=why):
        parse_metrics(GOOD.replace(old, new))


def test_timestamps_and_brackets_in_labels_are_accepted() -> None:
    odd = GOOD.replace("} 3.0", ',x="a} b{"} 3.0 1700000000000')
    assert parse_metrics(odd) == parse_metrics(GOOD)


@given(st.text())
def test_any_text_is_parsed_or_refused(text: str) -> None:
    with pytest.raises(UnreadableMetrics):
        parse_metrics(text)


def test_answers_with_500_are_errors_and_those_of_a_server_that_is_not_ready_are_not() -> None:
    pod = ServingPod()
    pod.answer(10)
    for code in (500, 504, 503, 429, 422):
        pod.metrics.finished("/predict", code, 0.01, inference=True)

    assert parse_metrics(pod.text()).errors == 2


def test_requests_of_gateways_that_get_503_are_demand_and_failed_ones_are_errors() -> None:
    pod = ServingPod()
    pod.answer(10)
    for error in (for_gateway(Overloaded("the queue is full")), for_gateway(InferenceFailed("no number"))):
        pod.metrics.finished("/request", error.status, 0.01, inference=True)
        pod.metrics.refused(error.error_type)
    pod.metrics.refused("not_ready")

    found = parse_metrics(pod.text())

    assert (found.arrivals, found.errors) == (12, 1)


def test_requests_of_text_generation_count_with_their_first_token_or_their_failure() -> None:
    failing, streaming = ServingPod(), ServingPod()
    failing.generate(5)
    failing.metrics.finished("/v1/chat/completions", 500, 0.01, inference=True)
    streaming.generate(5)
    streaming.metrics.generation.first_token(0.2)
    counters = PlanCounter(), PlanCounter()
    for counter, pod in zip(counters, (failing, streaming), strict=True):
        counter.put("a", parse_metrics(pod.text()), new=True)

    assert [(one.counts.requests, one.counts.errors) for one in counters if one.counts] == [(2, 1), (2, 0)]
