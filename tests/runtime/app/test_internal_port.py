"""The internal port: probes and monitoring, apart from the port for requests."""

from __future__ import annotations

import asyncio
import socket
import threading
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

from penstock.errors import DeviceUnavailable, HostError
from penstock.tasks import TaskName
from penstock_runtime.app.server import Server
from penstock_runtime.serving.status import ServerStatus
from penstock_runtime.settings import Settings
from tests.runtime.http.browser import CHROMIUM, browser
from tests.runtime.http.serving import Endpoint, Gate, make_model, serving, until

PROBES = ("/healthz", "/readyz", "/health")
MONITORING = ("/metrics", "/info")
TEI_INFO = {
    "model_id", "model_sha", "model_dtype", "model_type", "max_concurrent_requests", "max_input_length",
    "max_batch_tokens", "max_batch_requests", "max_client_batch_size", "auto_truncate", "tokenization_workers",
    "version", "sha", "docker_label",
}  # fmt: skip
"""The fields of `/info` of text-embeddings-inference 1.9."""


def internal_url(endpoint: Endpoint) -> str:
    return f"http://127.0.0.1:{endpoint.server.internal_port}"


def statuses(url: str, paths: tuple[str, ...]) -> list[int]:
    return [httpx.get(url + path, timeout=60).status_code for path in paths]


def test_monitoring_is_on_the_internal_port_only_and_probes_are_on_both() -> None:
    with serving(Gate(), internal_port=0) as endpoint:
        public, internal = endpoint.url, internal_url(endpoint)

        assert statuses(public, PROBES) == [200, 200, 200]
        assert statuses(public, ("/metrics",)) == [404]
        facts, public_facts = (httpx.get(f"{url}/info").json() for url in (internal, public))
        assert statuses(internal, (*PROBES, *MONITORING)) == [200] * 5
        refused = httpx.get(f"{public}/metrics").json()

    # Clients of text-embeddings-inference read it; the rest of the internal port's is not theirs.
    assert public_facts == {name: facts[name] for name in public_facts}
    assert set(public_facts) == {*TEI_INFO, "vector_space"}
    assert {"host", "artefact", "access", "limits"} <= facts.keys()
    assert refused["error"] == "/metrics is served on the internal port only"
    assert "--internal-port" in refused["remedy"]


def test_after_a_failure_of_the_device_the_reason_is_on_the_readiness_probe_until_the_end() -> None:
    gate = Gate()
    with serving(gate, internal_port=0) as endpoint, ExitStack() as stack:
        asked = threading.Thread(target=lambda: httpx.post(f"{endpoint.url}/predict", json={"inputs": "a"}, timeout=60))
        asked.start()
        stack.callback(asked.join, 60)
        stack.callback(gate.open)
        gate.wait_for("waiting", 1)
        endpoint.loop.call_soon_threadsafe(endpoint.server.fail, DeviceUnavailable("no NeuronCore is left"))
        until(lambda: endpoint.server.failure is not None)

        ready = httpx.get(f"{internal_url(endpoint)}/readyz", timeout=60)
        alive = httpx.get(f"{internal_url(endpoint)}/healthz", timeout=60)

    assert (ready.status_code, ready.json()["error"]) == (503, "no NeuronCore is left")
    assert alive.status_code == 200


def test_without_an_internal_port_everything_is_on_one_port() -> None:
    with serving(Gate()) as endpoint:
        assert statuses(endpoint.url, (*PROBES, *MONITORING)) == [200] * 5
        assert endpoint.server.internal_port == 0


def test_the_internal_port_takes_no_requests() -> None:
    with serving(Gate(), internal_port=0) as endpoint:
        answer = httpx.post(f"{internal_url(endpoint)}/predict", json={"inputs": "text"})

    assert answer.status_code == 404
    assert answer.json()["remedy"] == "GET one of /healthz, /readyz, /health, /metrics, /info"


def test_the_internal_port_wants_no_token() -> None:
    with serving(Gate(), internal_port=0, auth_token="secret") as endpoint:
        assert statuses(internal_url(endpoint), MONITORING) == [200, 200]
        assert httpx.post(f"{endpoint.url}/predict", json={"inputs": "text"}).status_code == 401


def test_the_openapi_document_has_the_routes_of_the_public_port() -> None:
    with serving(Gate(), internal_port=0) as endpoint:
        paths = httpx.get(f"{endpoint.url}/openapi.json").json()["paths"]

    assert {"/healthz", "/predict", "/info"} <= paths.keys()
    assert "/metrics" not in paths
    assert paths["/info"]["get"]["tags"] == ["text-embeddings-inference"]


def test_the_metrics_count_the_requests_of_the_public_port() -> None:
    gate = Gate()
    gate.open()
    with serving(gate, internal_port=0) as endpoint:
        httpx.post(f"{endpoint.url}/predict", json={"inputs": "text"})
        text = httpx.get(f"{internal_url(endpoint)}/metrics").text

    assert 'penstock_requests_total{code="200",route="/predict"} 1.0' in text


def test_probes_are_answered_while_clients_take_every_public_connection() -> None:
    """All connections that the server takes, and more, are open and idle: the internal port has its own."""
    with serving(Gate(), internal_port=0, max_connections=40, per_client_share=1) as endpoint, ExitStack() as stack:
        for _ in range(60):
            stack.enter_context(endpoint.connect())
        listener = endpoint.server._listener
        assert listener is not None
        until(lambda: len(listener.connections) >= 40)
        answered = [statuses(internal_url(endpoint), ("/healthz", "/readyz")) for _ in range(20)]

    assert answered == [[200, 200]] * 20


def test_the_internal_port_answers_until_the_last_request_is_answered() -> None:
    gate = Gate()
    with serving(gate, internal_port=0) as endpoint:
        url, found = endpoint.url, []
        asking = threading.Thread(
            target=lambda: found.append(httpx.post(f"{url}/predict", json={"inputs": "text"}, timeout=60).status_code)
        )
        asking.start()
        gate.wait_for("waiting", 1)
        endpoint.stop()
        during = statuses(internal_url(endpoint), ("/healthz", "/readyz"))
        gate.open()
        asking.join(60)
        endpoint.thread.join(60)

        assert during == [200, 503]
        assert found == [200]
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{internal_url(endpoint)}/healthz")


def test_an_internal_port_that_is_in_use_is_refused_at_start() -> None:
    async def start(port: int) -> None:
        settings = Settings.load({}, {"port": 0, "internal_port": port})
        await Server(ServerStatus("emotion", TaskName.FEATURE_EXTRACTION), settings, Gate()).start()

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(HostError, match=f"cannot listen on 127.0.0.1:{port}") as caught:
            asyncio.run(start(port))

    assert "--internal-port" in caught.value.remedy


@pytest.mark.skipif(not CHROMIUM, reason="no Chromium here: make system")
def test_the_playground_works_without_info(tmp_path: Path) -> None:
    task = TaskName.TEXT_CLASSIFICATION
    model = make_model(tmp_path / "model", task)
    with serving(model, task, internal_port=0) as endpoint, browser(tmp_path / "profile") as tab:
        tab.open(endpoint.url)
        tab.wait_for("document.querySelector('#fields textarea') !== null")

        assert tab.run("document.querySelector('#task').textContent") == task.value
        assert tab.run("document.querySelector('a[href=\"/metrics\"]').hidden") is True
        tab.open("about:blank")
