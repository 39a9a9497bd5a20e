"""Responses that are sent while they are made."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest

from penstock_runtime.http.transport.streaming import StreamWriter
from tests.runtime.generation.small_model import serving_generation, small_generation_model
from tests.runtime.http.serving import Endpoint, post, until

BODY = json.dumps({"inputs": "Once", "parameters": {"max_new_tokens": 5}}).encode()


class Transport:
    """Collects what is written."""

    def __init__(self) -> None:
        self.written = b""
        self.aborted = False

    def write(self, data: bytes) -> None:
        self.written += data

    def abort(self) -> None:
        self.aborted = True


class Pieces:
    """A stream of these pieces; an exception is raised, None waits for ever."""

    def __init__(self, *pieces: bytes | Exception | None) -> None:
        self.left = list(pieces)
        self.closed = 0

    async def read(self) -> bytes:
        piece = self.left.pop(0) if self.left else b""
        if isinstance(piece, Exception):
            raise piece
        if piece is None:
            await asyncio.Event().wait()
        return piece or b""

    def close(self) -> None:
        self.closed += 1


class Trial:
    """A writer with a reader that can be slow."""

    def __init__(self, *pieces: bytes | Exception | None, chunked: bool = True) -> None:
        self.transport, self.stream = Transport(), Pieces(*pieces)
        self.is_writable = True
        self.done = 0
        as_transport: Any = self.transport
        self.writer = StreamWriter(as_transport, self.stream, lambda: self.is_writable, chunked=chunked)

    def start(self) -> None:
        self.writer.start(asyncio.get_running_loop(), self._end)

    def _end(self) -> None:
        self.done += 1


async def turns() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


@pytest.mark.parametrize(("chunked", "expected"), [(True, b"2\r\nab\r\n1\r\nc\r\n0\r\n\r\n"), (False, b"abc")])
def test_pieces_are_written_as_they_come(chunked: bool, expected: bytes) -> None:
    async def run() -> None:
        trial = Trial(b"ab", b"c", chunked=chunked)
        trial.start()
        await turns()
        assert trial.transport.written == expected
        assert (trial.done, trial.stream.closed) == (1, 1)

    asyncio.run(run())


def test_a_reader_that_does_not_read_is_waited_for() -> None:
    async def run() -> None:
        trial = Trial(b"a", b"b", b"c")
        trial.is_writable = False
        trial.start()
        await turns()
        assert trial.stream.left == [b"b", b"c"]
        trial.is_writable = True
        trial.writer.resume()
        await turns()
        assert trial.done == 1

    asyncio.run(run())


def test_a_cancelled_stream_is_closed_once_also_before_it_has_started() -> None:
    async def run() -> None:
        for wait in (False, True):
            trial = Trial(b"a", None)
            trial.start()
            if wait:
                await turns()
            trial.writer.cancel()
            await turns()
            assert (trial.done, trial.stream.closed) == (0, 1)

    asyncio.run(run())


def test_a_defect_cuts_the_response_off() -> None:
    async def run() -> None:
        trial = Trial(b"a", ValueError("no"))
        trial.start()
        await turns()
        assert trial.transport.aborted
        assert not trial.transport.written.endswith(b"0\r\n\r\n")
        assert (trial.done, trial.stream.closed) == (0, 1)

    asyncio.run(run())


@pytest.fixture(scope="module")
def endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Endpoint]:
    with serving_generation(small_generation_model(tmp_path_factory.mktemp("model"))) as running:
        yield running


def read_all(endpoint: Endpoint, data: bytes) -> bytes:
    with endpoint.connect() as client:
        client.sendall(data)
        received = b""
        while piece := client.recv(65536):
            received += piece
    return received


def test_a_client_of_http_1_0_gets_the_stream_until_the_connection_closes(endpoint: Endpoint) -> None:
    request = post("/generate_stream", BODY).replace(b"HTTP/1.1", b"HTTP/1.0")
    head, _, body = read_all(endpoint, request).partition(b"\r\n\r\n")
    assert b"transfer-encoding" not in head
    assert b"connection: close" in head
    assert body.count(b"data:") == 5
    assert body.endswith(b"\n\n")


def test_requests_behind_a_stream_are_answered_after_it(endpoint: Endpoint) -> None:
    received = read_all(
        endpoint,
        post("/generate_stream", BODY) + post("/generate", BODY) + post("/generate_stream", BODY, "connection: close"),
    )
    parts = received.split(b"HTTP/1.1 200 OK\r\n")[1:]
    assert [b"text/event-stream" in part for part in parts] == [True, False, True]
    assert [part.count(b"data:") for part in parts] == [5, 0, 5]
    assert parts[0].endswith(b"\r\n0\r\n\r\n")
    assert received.endswith(b"\r\n0\r\n\r\n")


def test_a_stream_is_counted_when_it_ends(endpoint: Endpoint) -> None:
    key = ("/generate_stream", 200)
    before = endpoint.server.metrics.requests.get(key, 0)
    read_all(endpoint, post("/generate_stream", BODY, "connection: close"))
    until(lambda: endpoint.server.metrics.requests.get(key, 0) == before + 1)
    assert endpoint.server.metrics.in_flight == 0
