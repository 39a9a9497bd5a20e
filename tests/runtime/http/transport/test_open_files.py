"""Each connection is an open file, and a process may have a limited number of them."""

from __future__ import annotations

import select
from contextlib import ExitStack
from socket import create_connection

import pytest

from tests.runtime.http.process import Process, process
from tests.runtime.http.serving import read_answer

ASK = b"GET /healthz HTTP/1.1\r\nhost: x\r\n\r\n"


def open_after(server: Process, connections: int) -> tuple[list[int], int]:
    """The statuses of an answer on each of this number of connections, and how many of them are open at the end."""
    found = []
    with ExitStack() as stack:
        clients = [
            stack.enter_context(create_connection(("127.0.0.1", server.port), timeout=60)) for _ in range(connections)
        ]
        for client in clients:
            client.sendall(ASK)
            found.append(int(read_answer(client).split(b" ", 2)[1]))
        ends, _, _ = select.select(clients, [], [], 1.0)
        return found, connections - len(ends)


def test_the_limit_is_raised_to_what_connections_take(capfd: pytest.CaptureFixture[str]) -> None:
    with process(0.0, ulimit="-Sn 100", max_connections=150, per_client_share=1) as server:
        answered, still_open = open_after(server, 150)

    assert answered == [200] * 150
    assert still_open == 150
    assert capfd.readouterr().err == ""


def test_where_the_limit_cannot_be_raised_the_oldest_idle_connections_are_closed(
    capfd: pytest.CaptureFixture[str],
) -> None:
    with process(0.0, ulimit="-n 100", per_client_share=1) as server, ExitStack() as stack:
        clients = []
        for _ in range(60):
            clients.append(stack.enter_context(create_connection(("127.0.0.1", server.port), timeout=60)))
            clients[-1].sendall(ASK)
            assert read_answer(clients[-1]).startswith(b"HTTP/1.1 200")
        closed = [client.recv(1) for client in clients[:10]]
        ends, _, _ = select.select(clients[10:], [], [], 0.0)

    assert closed == [b""] * 10
    assert ends == []
    assert capfd.readouterr().err == (
        "connections over 50 are refused, or replace idle ones, instead of over --max-connections (4096): this "
        "process may not open more files. Raise the limit (ulimit -n)\n"
    )
