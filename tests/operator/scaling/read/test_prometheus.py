"""A real Prometheus with TLS and a password, which is killed."""

from __future__ import annotations

import asyncio
import base64
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from ipaddress import ip_network
from pathlib import Path

import pytest

from penstock.resources.endpoint_parts.scaling import PrometheusQueries
from penstock_operator.decide import Metrics, Unknown, Value, known
from penstock_operator.scaling.read.prometheus import (
    MAX_TRUST,
    OwnPrometheus,
    PrometheusAccess,
    PrometheusClient,
    PrometheusSource,
)
from penstock_operator.scaling.read.queries import EndpointPods, Windows
from testbed.build import binary
from testbed.tools import PROMETHEUS
from tests.operator.scaling.pods import Fleet, ServingPod, fleet
from tests.operator.scaling.prometheus_server import Server
from tests.operator.scaling.recording_server import RecordingServer, recording

PODS = {"emotion-5f7d9c6b8-abcde": "127.0.0.2", "emotion-5f7d9c6b8-fghij": "127.0.0.3"}
PLACE = EndpointPods("team-a", "emotion", tuple(PODS))
WINDOWS = Windows(scrape_interval=1, fast=10, slow=20)
STARTS_SECONDS = 120.0


@pytest.fixture(scope="module")
def prometheus() -> Path:
    """The binary."""
    return binary(PROMETHEUS)


def client_for_loopback(seconds: float = 60) -> PrometheusClient:
    return PrometheusClient(timeout_seconds=seconds, concurrency=4, networks=(ip_network("127.0.0.0/8"),))


@asynccontextmanager
async def serving(program: Path, folder: Path) -> AsyncIterator[tuple[Server, Fleet, PrometheusClient]]:
    async with fleet() as pods, client_for_loopback() as client:
        for address in PODS.values():
            await pods.add(address)
        targets = [
            {"targets": [f"{address}:{pods.port}"], "labels": {"namespace": "team-a", "pod": name}}
            for name, address in PODS.items()
        ]
        server = Server(program, folder, [{"job_name": "pods", "static_configs": targets}])
        try:
            yield server, pods, client
        finally:
            server.kill()


class Busy:
    """Ten requests in each second of the metrics' own time, one in ten late."""

    def __init__(self, pods: list[ServingPod]) -> None:
        self._pods = pods
        self._begin = time.monotonic()
        self._tens = 0

    def catch_up(self) -> None:
        tens = round(time.monotonic() - self._begin)
        for pod in self._pods:
            pod.answer(10 * (tens - self._tens), late=tens - self._tens)
        self._tens = tens


@pytest.mark.slow
def test_the_load_comes_from_a_real_prometheus_and_is_unknown_without_it(prometheus: Path, tmp_path: Path) -> None:
    async def ask(client: PrometheusClient, source: PrometheusSource) -> Metrics:
        return await client.metrics(source, PLACE, WINDOWS, objective_seconds=0.02)

    async def scenario() -> None:
        async with serving(prometheus, tmp_path) as (server, pods, client):
            deadline = time.monotonic() + STARTS_SECONDS
            busy = Busy(list(pods.pods.values()))
            while True:
                # The pods are scraped once a second: requests come as time passes.
                await asyncio.sleep(1)
                busy.catch_up()
                found = await ask(client, server.source)
                # After a pause of the machine the rate differs for some seconds.
                fast, slow = known(found.arrivals_fast), known(found.arrivals_slow) or 0.0
                if found.coverage == 1 and slow > 15 and fast == pytest.approx(20, rel=0.35):
                    break
                assert time.monotonic() < deadline, f"{found}\n{(tmp_path / 'log').read_text()[-2000:]}"
            assert found.in_flight == Value(0.0), "the scrape itself is not counted"
            assert isinstance(found.good_share, Value)
            assert found.good_share.value == pytest.approx(0.9, abs=0.02)
            assert isinstance(found.p95_milliseconds, Value)
            assert found.p95_milliseconds.value > 20

            refused = [
                (PrometheusSource(server.source.url, PrometheusAccess(ca=server.source.access.ca)), "answered 401"),
                (PrometheusSource(server.source.url), "cannot be reached"),
                (PrometheusSource(server.source.url.replace("https", "http")), "answered 400"),
            ]
            for source, why in refused:
                unknown = (await ask(client, source)).arrivals_fast
                assert isinstance(unknown, Unknown)
                assert why in unknown.reason
                assert "opensesame" not in unknown.reason

            own = PrometheusQueries(
                request_rate="sum(penstock:requests:rate2m)", in_flight="penstock:in_flight_requests:sum"
            )
            recorded = await ask(client, replace(server.source, queries=own))
            assert isinstance(recorded.arrivals_fast, Value), "the chart's recording rules are evaluated"
            assert recorded.arrivals_fast.value > 0
            assert recorded.in_flight == Value(0.0)

            server.kill()
            gone = (await ask(client, server.source)).arrivals_fast
            assert isinstance(gone, Unknown)
            assert "cannot be reached" in gone.reason

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("data", "why"),
    [
        ({}, "none of the keys"),
        ({"username": "dQ=="}, "it takes both"),
        ({"token": "%%"}, "no text"),
    ],
)
def test_a_secret_without_usable_credentials_is_refused_with_the_reason(data: dict[str, str], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        PrometheusAccess.from_secret(data)


def test_invalid_certificates_are_refused() -> None:
    access = PrometheusAccess.from_secret({"ca.crt": base64.b64encode(b"x").decode()})
    with pytest.raises(ValueError, match="no certificate"):
        access.trust()


def test_certificates_that_a_user_changes_all_the_time_do_not_fill_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PrometheusAccess, "trust", lambda _: True)
    client = client_for_loopback()
    for number in range(3 * MAX_TRUST):
        client._trusted(PrometheusAccess(ca=str(number)))

    assert len(client._trust) <= MAX_TRUST


def test_secrets_do_not_appear_in_repr() -> None:
    assert "secret" not in repr(
        PrometheusSource("http://x", PrometheusAccess(token="secret", username="u", password="secret"))
    )


def test_the_operators_own_token_is_read_again_each_time(tmp_path: Path) -> None:
    file = tmp_path / "token"
    own = OwnPrometheus("http://prometheus:9090", token_file=str(file))
    missing = own.source()
    assert isinstance(missing, str)
    assert str(tmp_path) not in missing
    assert "cannot be read" in missing
    for token in ("one", "two"):
        file.write_text(f"{token}\n")
        source = own.source()
        assert isinstance(source, PrometheusSource)
        assert source.access.headers() == {"Authorization": f"Bearer {token}"}


async def reason_of(client: PrometheusClient, url: str) -> str:
    """Why the load is unknown; empty: it is known, or idle."""
    source = PrometheusSource(url, PrometheusAccess(token="secret"))
    found = (await client.metrics(source, PLACE, WINDOWS, objective_seconds=0.02)).arrivals_fast
    return found.reason if isinstance(found, Unknown) else ""


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "localhost", "127.1", "2130706433", "0x7f000001", "0", "[::ffff:127.0.0.1]", "[::1]"]
)
def test_no_spelling_of_a_loopback_address_is_connected_to(host: str) -> None:
    async def scenario() -> tuple[str, list[str]]:
        async with (
            recording(RecordingServer()) as server,
            PrometheusClient(timeout_seconds=20, concurrency=4) as client,
        ):
            return await reason_of(client, f"http://{host}:{server.port}"), server.paths

    reason, paths = asyncio.run(scenario())
    assert paths == []
    assert "cannot be reached" in reason


def test_a_name_that_resolves_to_another_address_at_each_look_up_does_not_reach_loopback(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """DNS rebinding: a check of the first answer would allow the connection to the second."""
    answers: list[str] = []

    def look_up(host: str, port: int, *_: object, **__: object) -> list[tuple[object, ...]]:
        # 198.51.100.0/24 is for documents: nothing is there.
        answers.append("127.0.0.1" if answers else "198.51.100.7")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (answers[-1], port))]

    async def scenario() -> tuple[list[str], list[str]]:
        async with recording(RecordingServer()) as server, PrometheusClient(timeout_seconds=1, concurrency=4) as client:
            monkeypatch.setattr(socket, "getaddrinfo", look_up)
            url = f"http://prometheus.example:{server.port}"
            return [await reason_of(client, url) for _ in range(3)], server.paths

    reasons, paths = asyncio.run(scenario())
    assert "127.0.0.1" in answers
    assert paths == []
    assert all("cannot be reached" in reason for reason in reasons)


def test_failures_do_not_show_what_a_server_answered_or_whether_there_is_one(
    caplog: pytest.LogCaptureFixture,
) -> None:
    hidden = '{"status": "error", "error": "password=hunter2"}'

    async def scenario() -> set[str]:
        reasons: set[str] = set()
        async with client_for_loopback(5) as client:
            for status, body in ((200, hidden), (200, "<html>"), (404, hidden), (500, hidden), (503, hidden)):
                async with recording(RecordingServer(status, body)) as server:
                    url = f"http://127.0.0.1:{server.port}"
                    reasons.add((await reason_of(client, url)).replace(url, "URL"))
            # The server is gone.
            reasons.add((await reason_of(client, url)).replace(url, "URL"))
            async with recording(RecordingServer(422, hidden)) as server:
                url = f"http://127.0.0.1:{server.port}"
                assert await reason_of(client, url) == f"prometheus at {url} answered 422: check the queries"
        return reasons

    (reason,) = asyncio.run(scenario())
    assert reason == (
        "prometheus at URL cannot be reached, or does not answer as a Prometheus: the operator's log has the reason"
    )
    assert "hunter2" in caplog.text
    assert all("secret" not in record.getMessage() for record in caplog.records)


def test_a_redirect_is_not_followed() -> None:
    async def scenario() -> tuple[list[str], list[str]]:
        async with recording(RecordingServer()) as target, client_for_loopback() as client:
            redirecting = RecordingServer(307, location=f"http://127.0.0.1:{target.port}/")
            async with recording(redirecting) as server:
                await reason_of(client, f"http://127.0.0.1:{server.port}")
            return server.paths, target.paths

    asked, redirected = asyncio.run(scenario())
    assert asked == ["/api/v1/query"]
    assert redirected == []
