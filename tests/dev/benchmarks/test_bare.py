"""The bare server that benchmarks.tail compares with, on a real artefact."""

from __future__ import annotations

import http.client
import json
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.bare import bare_server
from penstock_bench.cell import MeasurementFailed
from penstock_bench.server import MeasuredServer


@pytest.fixture(scope="module")
def server(artefact: Path) -> Iterator[MeasuredServer]:
    with bare_server(artefact, [8, 32], ()) as one:
        yield one


def port(server: MeasuredServer) -> int:
    return int(server.url.rsplit(":", 1)[1])


@pytest.mark.slow
def test_each_length_is_answered_with_a_vector_on_one_connection(server: MeasuredServer) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", port(server), timeout=10)
    answers = []
    for tokens in (8, 32, 8):
        connection.request("POST", f"/{tokens}", body=b'{"inputs":"a"}')
        answer = connection.getresponse()
        answers.append((answer.status, json.loads(answer.read())))
    connection.close()

    assert [status for status, _ in answers] == [200, 200, 200]
    assert answers[0][1]
    assert all(isinstance(number, float) for number in answers[0][1])


@pytest.mark.slow
@pytest.mark.parametrize(("begin", "rest"), [(b"content-le", b"ngth:4"), (b"Content-Le", b"ngth: 4\r\nHost: a")])
def test_a_request_that_comes_in_parts_is_answered_once_it_is_there(
    server: MeasuredServer, begin: bytes, rest: bytes
) -> None:
    with socket.create_connection(("127.0.0.1", port(server)), timeout=10) as connection:
        connection.sendall(b"POST /8 HTTP/1.1\r\n" + begin)
        connection.sendall(rest + b"\r\n\r\nab")
        connection.settimeout(0.3)
        with pytest.raises(TimeoutError):
            connection.recv(1)
        connection.settimeout(10)
        connection.sendall(b"cd")

        assert connection.recv(15) == b"HTTP/1.1 200 OK"


@pytest.mark.slow
def test_an_artefact_that_does_not_load_is_an_error_with_a_message(tmp_path: Path) -> None:
    with (
        pytest.raises(MeasurementFailed, match=r"bare ended while starting \(1\): .*manifest\.json"),
        bare_server(tmp_path, [8], ()),
    ):
        pass
