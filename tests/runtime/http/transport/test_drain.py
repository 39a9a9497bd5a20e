"""The end of a serving process: no accepted request is lost."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import threading
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest

from penstock.errors import HostError
from penstock.tasks import TaskName
from penstock_runtime.app.server import Server
from penstock_runtime.serving.status import ServerStatus
from penstock_runtime.settings import Settings
from tests.runtime.http.process import Process, process
from tests.runtime.http.serving import Gate, make_model, post, read_answer, serving, wait_for_sample

GOOD = b'{"inputs": "a text"}'


@dataclass
class Tally:
    """The observations of the clients."""

    answered: int = 0
    refused: int = 0
    """Could not connect: the request was never accepted."""
    lost: list[str] = field(default_factory=list)
    """Accepted (the connection was made, the request sent) and not answered."""
    fifty: asyncio.Event = field(default_factory=asyncio.Event)


async def ask_forever(port: int, tally: Tally, *, keep: bool) -> None:
    """Send requests repeatedly, until no connection can be made."""
    while True:
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
        except OSError:
            tally.refused += 1
            return
        try:
            while True:
                writer.write(post("/predict", GOOD, "connection: keep-alive" if keep else "connection: close"))
                await writer.drain()
                head = await reader.readuntil(b"\r\n\r\n")
                body = await reader.readexactly(int(head.partition(b"content-length: ")[2].partition(b"\r")[0]))
                if not head.startswith(b"HTTP/1.1 200") or body != b"[[1.0]]":
                    tally.lost.append(head.decode())
                tally.answered += 1
                if tally.answered >= 50:
                    tally.fifty.set()
                if b"connection: close" in head:
                    break
        except (OSError, asyncio.IncompleteReadError) as error:
            tally.lost.append(repr(error))
        finally:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()


def test_nothing_accepted_is_lost_under_load() -> None:
    async def load(server: Process) -> Tally:
        tally = Tally()
        async with asyncio.timeout(120), asyncio.TaskGroup() as group:
            for number in range(32):
                group.create_task(ask_forever(server.port, tally, keep=number % 2 == 0))
            await tally.fifty.wait()
            server.terminate()
        return tally

    with process(0.05) as server:
        tally = asyncio.run(load(server))
        code = server.popen.wait(60)

    assert tally.lost == []
    assert tally.answered > 50
    assert tally.refused == 32
    assert code == 0


def test_readiness_is_false_and_requests_are_answered_during_the_delay() -> None:
    with process(0.0, drain_delay_seconds=4) as server, httpx.Client(base_url=server.url, timeout=30) as client:
        assert client.get("/readyz").status_code == 200
        server.terminate()
        while (not_ready := client.get("/readyz")).status_code == 200:
            pass

        answer = client.post("/predict", json="x")
        alive = client.get("/healthz")
        code = server.popen.wait(60)

    assert not_ready.status_code == 503
    assert not_ready.json()["error"] == "the server is draining"
    assert answer.status_code == 200
    assert answer.headers["connection"] == "close"
    assert alive.status_code == 200
    assert code == 0


def test_a_second_signal_ends_at_once() -> None:
    with process(60.0) as server, httpx.Client(base_url=server.url, timeout=60) as client:

        def ask() -> None:
            with pytest.raises(httpx.HTTPError):
                client.post("/predict", json="x")

        asking = threading.Thread(target=ask)
        asking.start()
        wait_for_sample(server.port, "penstock_in_flight_requests 2.0")
        server.terminate()
        with pytest.raises(httpx.ConnectError):  # noqa: PT012 - until it accepts no more
            while True:
                httpx.get(f"{server.url}/healthz")
        server.terminate()
        code = server.popen.wait(60)
        asking.join()

    assert code == -signal.SIGTERM


def test_requests_longer_than_the_drain_limit_are_cut_off() -> None:
    gate = Gate()
    with serving(gate, drain_limit_seconds=0.2) as endpoint, endpoint.connect() as client:
        client.sendall(post("/predict", GOOD))
        gate.wait_for("waiting", 1)
        endpoint.stop()
        endpoint.thread.join(60)

        assert endpoint.cut == [1]
        gate.wait_for("cancelled", 1)


def test_requests_sent_ahead_are_answered_before_the_connection_is_closed() -> None:
    gate = Gate()
    with serving(gate) as endpoint, endpoint.connect() as client:
        client.sendall(post("/predict", GOOD, "x-request-id: 1") + post("/predict", GOOD, "x-request-id: 2"))
        gate.wait_for("waiting", 1)
        endpoint.stop()
        gate.open()
        first, second = read_answer(client), read_answer(client)

        assert b"x-request-id: 1" in first
        assert b"connection: close" not in first
        assert b"x-request-id: 2" in second
        assert b"connection: close" in second
        assert client.recv(1) == b""


@pytest.mark.parametrize("first", ["/predict", "/nowhere"])
def test_requests_that_arrive_in_one_segment_are_answered_during_a_drain(tmp_path: Path, first: str) -> None:
    model = make_model(tmp_path, TaskName.FEATURE_EXTRACTION)
    good = b'{"inputs": "i like you"}'
    with serving(model, drain_idle_seconds=2.0) as endpoint, endpoint.connect() as client:
        client.sendall(post("/predict", good))
        read_answer(client)
        endpoint.stop()
        client.sendall(post(first, good) + post("/predict", good) * 2)
        answers = [read_answer(client) for _ in range(3)]

        assert client.recv(1) == b""
    assert [b"200 OK" in answer for answer in answers] == [first == "/predict", True, True]
    assert [b"connection: close" in answer for answer in answers] == [False, False, True]


def test_a_request_under_way_on_an_idle_connection_is_answered() -> None:
    gate = Gate()
    gate.open()
    with serving(gate, drain_idle_seconds=2.0) as endpoint, endpoint.connect() as client:
        client.sendall(post("/predict", GOOD))
        assert b"200 OK" in read_answer(client)
        endpoint.stop()
        client.sendall(post("/predict", GOOD))
        answer = read_answer(client)

    assert b"200 OK" in answer
    assert b"connection: close" in answer
    assert endpoint.cut == [0]


def test_a_port_that_is_taken_is_an_error_at_start() -> None:
    async def start(port: int) -> None:
        server = Server(ServerStatus("other", TaskName.FEATURE_EXTRACTION), Settings.load({}, {"port": port}))
        await server.start()

    with serving(Gate()) as endpoint, pytest.raises(HostError, match=r"cannot listen on 127\.0\.0\.1") as caught:
        asyncio.run(start(endpoint.server.port))

    assert caught.value.remedy == "Choose another --port or --host (PENSTOCK_PORT, PENSTOCK_HOST)"
