"""Spans of requests, as a collector receives them from a real server."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import httpx
import numpy as np
import pytest

from penstock.errors import MissingPackage, SettingError
from penstock.tasks import TaskName
from penstock_runtime.http.tracing import RequestTraces
from penstock_runtime.settings import Settings, TraceSettings
from tests.gateway.rig import running_rig
from tests.runtime.http.collector import attributes, running_collector
from tests.runtime.http.serving import TIMINGS, Gate, make_model, serving

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
SAMPLED = {"traceparent": f"00-{TRACE}-{PARENT}-01", "tracestate": "vendor=1"}
NOT_SAMPLED = {"traceparent": f"00-{TRACE}-{PARENT}-00"}
STEPS = ["tokenise", "queue", "infer", "respond"]


def test_a_request_with_a_traceparent_is_a_span_of_that_trace_with_its_steps_as_children(tmp_path: Path) -> None:
    model = make_model(tmp_path, TaskName.FEATURE_EXTRACTION)
    with running_collector() as collector:
        with serving(model, trace_endpoint=collector.url, trace_share=0.0) as endpoint:
            headers = {**SAMPLED, "x-request-id": "request-1"}
            answer = httpx.post(f"{endpoint.url}/predict", json={"inputs": "i like you"}, headers=headers)
            httpx.post(f"{endpoint.url}/predict", json={"inputs": "i like you"}, headers=NOT_SAMPLED)
            httpx.post(f"{endpoint.url}/predict", json={"inputs": "i like you"})
        # The server has sent all spans before it ended.
        *children, request = collector.spans

    assert set(collector.services) == {"emotion"}
    assert {span.trace_id.hex() for span in collector.spans} == {TRACE}
    assert (request.name, request.parent_span_id.hex(), request.trace_state) == ("POST /predict", PARENT, "vendor=1")
    assert attributes(request) == {
        "http.request.method": "POST",
        "url.path": "/predict",
        "http.route": "/predict",
        "http.response.status_code": 200,
        "penstock.request_id": "request-1",
        "penstock.tokens": int(answer.headers["x-compute-tokens"]),
    }
    assert [span.name for span in children] == STEPS
    assert {span.parent_span_id for span in children} == {request.span_id}
    # One after the other, from the arrival of the request to its answer.
    edges = [request.start_time_unix_nano, *(span.end_time_unix_nano for span in children)]
    assert [span.start_time_unix_nano for span in children] == edges[:-1]
    assert edges[-1] == request.end_time_unix_nano
    seconds = (request.end_time_unix_nano - request.start_time_unix_nano) / 1e9
    measured = {
        "tokenise": TIMINGS.tokenization_milliseconds,
        "queue": TIMINGS.queue_milliseconds,
        "infer": TIMINGS.inference_milliseconds,
    }
    for span in children[:-1]:
        # This model reports fixed times, which may be longer than the request took.
        took = (span.end_time_unix_nano - span.start_time_unix_nano) / 1e6
        assert took == pytest.approx(measured[span.name]) or span.end_time_unix_nano == request.end_time_unix_nano
    assert seconds < 60


def test_calls_of_grpc_are_traced_by_their_traceparent(tmp_path: Path) -> None:
    triton = pytest.importorskip("tritonclient.grpc")
    model = make_model(tmp_path, TaskName.FEATURE_EXTRACTION)
    text = triton.InferInput("text", [1], "BYTES")
    text.set_data_from_numpy(np.array([b"i like you"], dtype=object))
    with running_collector() as collector:
        with (
            serving(model, grpc_port=0, trace_endpoint=collector.url, trace_share=0.0) as endpoint,
            triton.InferenceServerClient(f"127.0.0.1:{endpoint.server.grpc_port}") as client,
        ):
            for headers in (SAMPLED, NOT_SAMPLED, {}):
                client.infer("emotion", [text], headers=headers)
        *children, request = collector.spans

    assert {span.trace_id.hex() for span in collector.spans} == {TRACE}
    assert (request.name, request.parent_span_id.hex()) == ("POST /v2/models/{name}/infer", PARENT)
    assert request.trace_state == "vendor=1"
    assert [span.name for span in children] == STEPS


def test_requests_without_a_traceparent_are_traced_by_the_share_of_the_setting() -> None:
    gate = Gate()
    gate.open()
    with running_collector() as collector:
        with serving(gate, trace_endpoint=collector.url, trace_share=1.0) as endpoint:
            httpx.post(f"{endpoint.url}/predict", json="x", headers={"traceparent": "nonsense"})
            httpx.get(f"{endpoint.url}/unknown")
        requests = [span for span in collector.spans if not span.parent_span_id]

    assert [span.name for span in requests] == ["POST /predict", "GET"]
    assert [attributes(span)["http.response.status_code"] for span in requests] == [200, 404]
    assert len({span.trace_id for span in requests}) == 2


def test_a_failure_of_the_server_is_an_error_and_has_no_steps_of_the_model() -> None:
    gate = Gate()
    gate.error = RuntimeError("a defect")
    gate.open()
    with running_collector() as collector:
        with serving(gate, trace_endpoint=collector.url) as endpoint:
            httpx.post(f"{endpoint.url}/predict", json="x", headers=SAMPLED)
        respond, request = collector.spans

    assert (respond.name, request.name) == ("respond", "POST /predict")
    assert request.status.code == request.status.STATUS_CODE_ERROR


def test_a_gateway_passes_the_trace_on_to_the_replica() -> None:
    with running_collector() as collector, running_rig() as rig:
        rig.start("replica", trace_endpoint=collector.url, trace_share=0.0)
        gateway = rig.gateway()
        httpx.post(f"{gateway.url}/predict", json={"inputs": "i like you"}, headers=SAMPLED, trust_env=False)
        spans = collector.wait(5)

    assert {span.trace_id.hex() for span in spans} == {TRACE}
    assert [(span.parent_span_id.hex(), span.trace_state) for span in spans if span.name == "POST /predict"] == [
        (PARENT, "vendor=1")
    ]


def test_a_collector_that_is_gone_delays_no_request_and_not_the_end_of_the_server() -> None:
    gate = Gate()
    gate.open()
    with running_collector() as gone:
        url = gone.url
    with serving(gate, trace_endpoint=url, trace_share=1.0) as endpoint:
        for _ in range(5):
            assert httpx.post(f"{endpoint.url}/predict", json="x").status_code == 200
    # `serving` waits for the end of the server, and fails if connections were cut off.


@pytest.mark.parametrize("url", ["collector:4318", "ftp://collector", "http://a b"])
def test_an_address_that_is_none_is_refused_at_the_start(url: str) -> None:
    with pytest.raises(SettingError, match=r"--trace-endpoint is .*it is not a URL: write it like http"):
        Settings.load({}, {"trace_endpoint": url})


def test_without_the_extra_the_error_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(MissingPackage, match=r"--trace-endpoint needs OpenTelemetry.*penstock\[tracing\]"):
        RequestTraces("emotion", TraceSettings(trace_endpoint="http://collector:4318/v1/traces"))


def test_a_server_that_traces_nothing_does_not_import_opentelemetry() -> None:
    program = (
        "import sys, penstock_runtime.app.server\n"
        "assert not [name for name in sys.modules if name.partition('.')[0] == 'opentelemetry']"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)
