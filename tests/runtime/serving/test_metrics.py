"""Metrics: names, boundaries, and that each number counts the right events."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import Histogram
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_open
from prometheus_client.parser import text_string_to_metric_families as parse

from penstock.manifest import LiveLimits
from penstock.tasks import TaskName
from penstock_runtime.errors import InferenceFailed, NotReady, Overloaded, RequestError
from penstock_runtime.generation.loop import LoopState
from penstock_runtime.host import read_host
from penstock_runtime.serving.metrics import SECONDS, ServerMetrics, Tally, with_objective
from penstock_runtime.serving.predictor import Answer
from penstock_runtime.serving.shadow import LiveEvidence, ShadowState
from penstock_runtime.serving.status import ServerStatus
from tests.runtime.http.serving import TIMINGS, Gate, make_model, serving


def scrape(url: str) -> dict[str, float]:
    """Samples by name and labels."""
    return {
        f"{sample.name}{sorted(sample.labels.items())}": sample.value
        for family in parse(httpx.get(f"{url}/metrics").text)
        for sample in family.samples
    }


@given(st.lists(st.floats(min_value=0, max_value=100), max_size=50), st.sets(st.floats(min_value=0.001, max_value=50)))
def test_a_tally_counts_like_the_client_librarys_histogram(values: list[float], bounds: set[float]) -> None:
    ours = Tally(tuple(bounds) or (1.0,))
    theirs = Histogram("x", "y", buckets=sorted(bounds) or (1.0,), registry=None)
    for value in values:
        ours.observe(value)
        theirs.observe(value)

    expected = {
        sample.labels["le"]: sample.value
        for family in theirs.collect()
        for sample in family.samples
        if sample.name == "x_bucket"
    }
    assert {float(bound): count for bound, count in ours.buckets()} == {
        float(bound): count for bound, count in expected.items()
    }


@pytest.mark.parametrize(("objective", "added"), [(20.0, False), (17.5, True), (None, False)])
def test_a_boundary_lies_exactly_on_the_objective(objective: float | None, added: bool) -> None:
    bounds = with_objective(SECONDS, objective)

    assert len(bounds) == len(SECONDS) + added
    assert objective is None or objective / 1000 in bounds


def test_a_request_is_counted_once_everywhere(tmp_path: Path) -> None:
    task = TaskName.FEATURE_EXTRACTION
    with serving(make_model(tmp_path, task), task, objective_p95_milliseconds=17.5) as endpoint:
        for _ in range(3):
            httpx.post(f"{endpoint.url}/predict", json={"inputs": ["a text", "a " * 100]})
        httpx.post(f"{endpoint.url}/predict", json={"inputs": ""})
        httpx.get(f"{endpoint.url}/some/path/of/an/attacker")
        samples = scrape(endpoint.url)

    assert samples["penstock_requests_total[('code', '200'), ('route', '/predict')]"] == 3
    assert samples["penstock_requests_total[('code', '422'), ('route', '/predict')]"] == 1
    assert samples["penstock_requests_total[('code', '404'), ('route', '(unknown)')]"] == 1
    assert samples["penstock_rejected_total[('reason', 'validation')]"] == 1
    assert samples["penstock_request_seconds_count[]"] == 3
    assert samples["penstock_request_seconds_bucket[('le', '0.0175')]"] <= 3
    assert samples["penstock_queue_seconds_sum[]"] == pytest.approx(3 * 0.000125)
    assert samples["penstock_tokenization_seconds_sum[]"] == pytest.approx(3 * 0.00025)
    assert samples["penstock_inference_seconds_sum[]"] == pytest.approx(3 * 0.0005)
    assert samples["penstock_tokens_total[]"] == 3 * (4 + 64)
    assert samples["penstock_truncated_inputs_total[]"] == 3
    assert samples["penstock_in_flight_requests[]"] == 1  # the scrape itself
    assert samples["penstock_ready[]"] == 1
    assert not any("attacker" in name for name in samples)


@pytest.mark.parametrize(
    ("error", "reason", "counted"),
    [
        (Overloaded("the queue is full"), "overloaded", 0),
        (NotReady("the server is shutting down"), "not_ready", 0),
        (InferenceFailed("the engine failed"), "inference", 1),
    ],
)
def test_refusals_are_not_good_latencies(error: RequestError, reason: str, counted: int) -> None:
    gate = Gate()
    gate.error = error
    gate.open()
    with serving(gate) as endpoint:
        httpx.post(f"{endpoint.url}/predict", json="x")
        samples = scrape(endpoint.url)

    assert samples[f"penstock_rejected_total[('reason', '{reason}')]"] == 1
    assert samples["penstock_request_seconds_count[]"] == counted


def test_cached_answers_count_no_tokens() -> None:
    metrics = full_metrics()
    before = metrics.tokens
    metrics.answered(Answer(None, TIMINGS, tokens=7, truncated=1, remembered=True))

    assert (metrics.tokens, metrics.truncated) == (before, 1)


def test_the_openmetrics_format_is_used_if_the_client_accepts_it() -> None:
    gate = Gate()
    with serving(gate) as endpoint:
        answer = httpx.get(f"{endpoint.url}/metrics", headers={"accept": "application/openmetrics-text; version=1.0.0"})

    assert answer.headers["content-type"].startswith("application/openmetrics-text")
    families: list[Any] = list(parse_open(answer.text))  # type: ignore[no-untyped-call]  # has no types
    assert len(families) > 10


@pytest.mark.parametrize("version", ["abc", "1.x", "-", "1..0"])
@pytest.mark.parametrize("media_type", ["application/openmetrics-text", "text/plain"])
def test_a_version_that_cannot_be_read_gets_the_plain_format(media_type: str, version: str) -> None:
    text, content_type = full_metrics().exposition(f"{media_type}; version={version}")

    assert content_type.startswith(b"text/plain; version=0.0.4")
    assert len(list(parse(text.decode()))) > 10


def full_metrics() -> ServerMetrics:
    """With something in every family."""
    status = ServerStatus("emotion", TaskName.TEXT_CLASSIFICATION, host=read_host())
    assert status.host is not None
    status.grant = status.host.usable_cores()
    metrics = ServerMetrics(status, objective_p95_milliseconds=20)
    metrics.finished("/predict", 200, 0.01, inference=True)
    metrics.refused("validation")
    metrics.guard.classified("", 200)
    metrics.guard.verdict("pass")
    metrics.answered(Answer(None, TIMINGS, tokens=7, truncated=0))
    metrics.batch(rows=3, real_tokens=30, padded_tokens=33)
    metrics.cache("tokens", hit=True)
    metrics.generation.state = lambda: (LoopState(), 8)
    metrics.live_guard = lambda: ShadowState(LiveEvidence(LiveLimits(texts=1, divergence=0.1, severe=0.1)))
    return metrics


def test_batches_caches_and_the_machine_are_reported() -> None:
    metrics = full_metrics()
    metrics.queue_depth = lambda: (5, 70)
    text = metrics.exposition("")[0].decode()

    assert 'penstock_batch_tokens_total{kind="real"} 30.0' in text
    assert 'penstock_batch_tokens_total{kind="padding"} 3.0' in text
    assert 'penstock_cache_total{cache="tokens",result="hit"} 1.0' in text
    assert "penstock_queue_rows 5.0" in text
    assert "penstock_queue_tokens 70.0" in text
    assert 'penstock_cores{kind="granted"}' in text
    assert re.search(r'penstock_served_info\{endpoint="emotion",.*task="text-classification"', text)
