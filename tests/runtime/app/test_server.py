"""The server as a whole: listening, logs, /info."""

from __future__ import annotations

import logging
import re
import socket
import struct
from typing import Any

import httpx
import pytest

from penstock.capacity import CapacityCurve, CapacityPoint
from penstock.manifest import CandidateFacts, GraphIO, Manifest, Metric, ModelFacts, Outcome, ServedModel, Verdict
from penstock.recipe import EngineName, Plan, Precision, Recipe
from penstock.tasks import Head, TaskName
from penstock_runtime.host import read_host
from penstock_runtime.serving.status import OptimizationProgress
from tests.runtime.http.serving import Endpoint, Gate, serving

RECIPE = Recipe(engine=EngineName.ONNXRUNTIME, precision=Precision.INT8_ROWWISE)
PLAN = Plan(recipe=RECIPE, streams=2, threads_per_stream=1)


def manifest() -> Manifest:
    served = ServedModel(path="model/x/model.onnx", io=GraphIO(inputs=("input_ids",), outputs={}), plan=PLAN)
    verdict = Verdict(
        passed=True, reason="fine", metrics=(Metric(name="min_cosine", value=0.99, budget=0.98, passed=True),)
    )
    return Manifest(
        key="abc123",
        created="2026-11-21T12:00:00+00:00",
        toolchain={},
        model=ModelFacts(
            source="pkg://a/model", digest="d", architecture="BertModel", head=Head.ENCODER, parameters=1, max_tokens=64
        ),
        task=TaskName.FEATURE_EXTRACTION,
        cpu=read_host().cpu,
        cores=2,
        objective="p95 within 20 ms",
        chosen=served,
        baseline=served,
        candidates=(CandidateFacts(recipe=RECIPE, outcome=Outcome.CHOSEN, reason="fastest", verdict=verdict),),
        capacity=CapacityCurve(
            points=(
                CapacityPoint(
                    arrivals_per_second=10, completed_per_second=10, p50_milliseconds=1, p95_milliseconds=2,
                    p99_milliseconds=3, samples=100,
                ),
            )
        ),
        speed_up={8: 2.5},
        files={},
    )  # fmt: skip


def in_loop(endpoint: Endpoint, function: Any, *arguments: Any) -> None:
    """Call a function in the server's loop, and wait for its end."""
    endpoint.loop.call_soon_threadsafe(function, *arguments)
    httpx.get(f"{endpoint.url}/healthz")


def test_info_has_the_served_plan_and_its_verdict() -> None:
    gate = Gate()
    with serving(gate) as endpoint:
        endpoint.server.status.host = read_host()
        endpoint.server.status.grant = read_host().usable_cores(1)
        endpoint.server.status.limits = {"max_input_tokens": 64}
        in_loop(endpoint, endpoint.server.serve_with, gate, PLAN, manifest())
        info = httpx.get(f"{endpoint.url}/info").json()
        metrics = httpx.get(f"{endpoint.url}/metrics").text

    assert info["plan"]["summary"] == "onnxruntime-int8-rowwise, 2x1 threads"
    assert info["verdict"]["outcome"] == "chosen"
    assert info["verdict"]["metrics"][0]["name"] == "min_cosine"
    assert info["artefact"]["speed_up"] == {"8": 2.5}
    assert info["artefact"]["capacity"][0]["p95_milliseconds"] == 2
    assert info["limits"]["max_input_tokens"] == 64
    assert info["host"]["cores"]["granted"] == 1
    assert info["host"]["cpu"]["isa"]
    assert re.search(
        r'penstock_served_info\{.*key="abc123",recipe="onnxruntime-int8-rowwise".*verdict="chosen"', metrics
    )


def test_info_shows_a_running_optimisation_and_its_failure() -> None:
    with serving(Gate()) as endpoint:
        endpoint.server.status.optimization = OptimizationProgress("candidates", 7, 23, "openvino-int8")
        running = httpx.get(f"{endpoint.url}/info").json()
        endpoint.server.status.optimization = None
        endpoint.server.status.optimization_error = "no candidate may be served"
        failed = httpx.get(f"{endpoint.url}/info").json()

    assert running["optimization"].pop("seconds") >= 0
    assert running["optimization"] == {
        "stage": "candidates", "done": 7, "total": 23, "message": "openvino-int8",
    }  # fmt: skip
    assert failed["optimization"] is None
    assert failed["optimization_error"] == "no candidate may be served"


@pytest.mark.parametrize(("host", "url"), [("127.0.0.1", "http://127.0.0.1:"), ("::1", "http://[::1]:")])
def test_the_server_listens_on_ipv4_and_ipv6(host: str, url: str) -> None:
    with serving(Gate(), host=host) as endpoint:
        assert endpoint.url.startswith(url)
        assert httpx.get(f"{endpoint.url}/healthz").text == "ok\n"


def test_the_kernel_holds_as_many_connections_as_are_configured() -> None:
    with serving(Gate(), backlog=173) as endpoint:
        listening = endpoint.server._listener._socket  # type: ignore[union-attr]
        assert listening is not None
        # Of a listening socket, where Linux counts segments otherwise: `tcpi_sacked` is its backlog.
        (backlog,) = struct.unpack_from("I", listening.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 104), 28)

    assert backlog == 173


def test_the_log_has_the_loading_of_the_model_before_its_readiness(caplog: pytest.LogCaptureFixture) -> None:
    gate = Gate()
    with caplog.at_level(logging.INFO, "penstock.server"), serving(None) as endpoint:
        in_loop(endpoint, endpoint.server.serve_with, gate, PLAN)
        in_loop(endpoint, endpoint.server.serve_with, gate, PLAN)

    assert [record.getMessage() for record in caplog.records] == [
        f"listening on {endpoint.url}: the model is loading; /readyz reports readiness",
        "ready: requests are answered",
        "drained",
    ]


def test_a_server_that_starts_with_its_model_only_logs_where_it_listens(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "penstock.server"), serving(Gate()) as endpoint:
        pass

    assert caplog.records[0].getMessage() == f"listening on {endpoint.url}"


def test_the_access_log_has_a_line_for_each_request(capfd: pytest.CaptureFixture[str]) -> None:
    gate = Gate()
    gate.open()
    with serving(gate, access_log=True) as endpoint:
        httpx.post(f"{endpoint.url}/predict", json="x", headers={"x-request-id": "id-1"})
        httpx.get(f"{endpoint.url}/nowhere", headers={"x-request-id": "id-2"})
    lines = capfd.readouterr().err.splitlines()

    assert re.fullmatch(r"POST /predict 200 \d+\.\d{3}ms 3B>7B id-1 127\.0\.0\.1 -", lines[0])
    assert re.fullmatch(r"GET /nowhere 404 \d+\.\d{3}ms 0B>\d+B id-2 127\.0\.0\.1 -", lines[1])
    assert len(lines) == 2
