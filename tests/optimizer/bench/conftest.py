"""Stub servers in processes of their own, ended with the test."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from penstock_optimizer.bench.client import Client
from penstock_optimizer.bench.server import Server, free_port

STUB = Path(__file__).with_name("stub_server.py")

StartStub = Callable[..., Server]


@pytest.fixture
def start_stub() -> Iterator[StartStub]:
    """`start_stub(delay_ms=0, status=200, habit="", cpus=(), name="stub")` gives a server that is ready."""
    with ExitStack() as stack:

        def start(
            delay_ms: float = 0, status: int = 200, habit: str = "", *, cpus: tuple[int, ...] = (), name: str = "stub"
        ) -> Server:
            port = free_port()
            command = [sys.executable, str(STUB), str(port), str(delay_ms), str(status), habit]
            server = Server.start(name, command, port=port, cpus=cpus)
            stack.callback(server.stop)
            server.wait_until_ready("/health", seconds=20)
            return server

        yield start


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    with Client() as one:
        yield one
