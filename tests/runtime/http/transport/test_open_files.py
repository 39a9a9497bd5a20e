"""Each connection is an open file, and a process may have a limited number of them."""

from __future__ import annotations

from contextlib import ExitStack
from socket import create_connection

import pytest

from tests.runtime.http.process import Process, process
from tests.runtime.http.serving import read_answer

ASK = b"GET /healthz HTTP/1.1\r\nhost: x\r\n\r\n"


def statuses(server: Process, connections: int) -> list[int]:
    """The statuses of the answers on this number of simultaneously open connections."""
    found = []
    with ExitStack() as stack:
        for _ in range(connections):
            client = stack.enter_context(create_connection(("127.0.0.1", server.port), timeout=60))
            client.sendall(ASK)
            found.append(int(read_answer(client).split(b" ", 2)[1]))
    return found


def test_the_limit_is_raised_to_what_connections_take(capfd: pytest.CaptureFixture[str]) -> None:
    with process(0.0, ulimit="-Sn 100", max_connections=150) as server:
        answered = statuses(server, 160)

    assert answered == [200] * 150 + [503] * 10
    assert capfd.readouterr().err == ""


def test_where_the_limit_cannot_be_raised_clients_get_an_error_response(capfd: pytest.CaptureFixture[str]) -> None:
    with process(0.0, ulimit="-n 100") as server:
        answered = statuses(server, 60)

    assert answered == [200] * 50 + [503] * 10
    assert capfd.readouterr().err == (
        "connections over 50 are answered with 503, instead of over --max-connections (4096): this process may "
        "not open more files. Raise the limit (ulimit -n)\n"
    )
