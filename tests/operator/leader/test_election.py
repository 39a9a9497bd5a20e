"""The lease is renewed while the operator's loop is busy, and released when the loop hangs. Real time, real HTTP."""

from __future__ import annotations

import asyncio
import itertools
import json
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from kubernetes.aio.client import Configuration

from penstock_operator.cluster.kubernetes import NO_RETRIES, KubernetesPort
from penstock_operator.leader.election import Election
from penstock_operator.leader.lease import Leadership, LeaseTimes

TIMES = LeaseTimes(duration_seconds=6.0, deadline_seconds=5.0, interval_seconds=0.1)


class LeaseServer(ThreadingHTTPServer):
    """An API server of one lease."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.value: dict[str, Any] | None = None
        self.version = 0
        self.writes: list[tuple[float, str]] = []
        self.lock = threading.Lock()

    @property
    def holder(self) -> str:
        return "" if self.value is None else str(self.value["spec"]["holderIdentity"])

    @property
    def longest_gap_seconds(self) -> float:
        """Between two renewals."""
        times = [moment for moment, _ in self.writes]
        return max(after - before for before, after in itertools.pairwise(times))

    def election(self, name: str, *, hung_seconds: float = 60.0) -> Election:
        return Election(lambda: self._leadership(name), hung_seconds=hung_seconds)

    @asynccontextmanager
    async def _leadership(self, name: str) -> AsyncIterator[Leadership]:
        configuration = Configuration(host=f"http://127.0.0.1:{self.server_port}")
        async with KubernetesPort(configuration, timeout_seconds=3.0, retries=NO_RETRIES) as port:
            yield Leadership(port, namespace="a", name="l", identity=name, times=TIMES)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: LeaseServer

    def do_GET(self) -> None:
        with self.server.lock:
            self._answer(404 if self.server.value is None else 200)

    def do_POST(self) -> None:
        self._write(lambda _: self.server.value is None)

    def do_PUT(self) -> None:
        self._write(lambda value: value["metadata"]["resourceVersion"] == str(self.server.version))

    def _write(self, allowed: Any) -> None:
        value = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.server.lock:
            if not allowed(value):
                self._answer(409)
                return
            self.server.version += 1
            value["metadata"]["resourceVersion"] = str(self.server.version)
            self.server.value = value
            self.server.writes.append((time.monotonic(), value["spec"]["holderIdentity"]))
            self._answer(200)

    def _answer(self, status: int) -> None:
        body = json.dumps(self.server.value or {}).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the base class's name
        """Quietly."""


@pytest.fixture
def server() -> Iterator[LeaseServer]:
    with LeaseServer() as found:
        thread = threading.Thread(target=found.serve_forever)
        thread.start()
        try:
            yield found
        finally:
            found.shutdown()
            thread.join()


def block(seconds: float, *, until: Callable[[], bool] = lambda: True) -> None:
    """Block this thread's event loop, as a long piece of Python does: for `seconds`, then until `until` holds (one
    minute at most)."""
    begin = time.monotonic()
    while (passed := time.monotonic() - begin) < seconds or (passed < 60.0 and not until()):
        json.dumps(list(range(1000)))


def test_a_leader_whose_event_loop_is_blocked_longer_than_the_deadline_still_leads(server: LeaseServer) -> None:
    async def body() -> tuple[bool, bool]:
        async with server.election("a") as election:
            await election.acquire()
            hold = asyncio.create_task(election.hold())
            await asyncio.sleep(0)
            block(TIMES.duration_seconds + 1.0)
            held = election.held
            await asyncio.sleep(0.1)
            still = not hold.done()
            hold.cancel()
            await asyncio.wait({hold})
            return held, still

    assert asyncio.run(body()) == (True, True)
    assert server.longest_gap_seconds < TIMES.deadline_seconds


def test_a_hung_leader_releases_the_lease_and_may_not_write_afterwards(server: LeaseServer) -> None:
    async def body() -> tuple[str, bool]:
        async with server.election("a", hung_seconds=1.5) as election:
            await election.acquire()
            hold = asyncio.create_task(election.hold())
            await asyncio.sleep(0)
            block(1.5, until=lambda: server.holder == "")
            holder, held = server.holder, election.held
            await asyncio.wait_for(hold, 60.0)  # `hold` returns, so the caller can end
            return holder, held

    assert asyncio.run(body()) == ("", False)


def test_a_leader_that_ends_releases_the_lease(server: LeaseServer) -> None:
    async def body() -> None:
        async with server.election("a") as election:
            await election.acquire()
            hold = asyncio.create_task(election.hold())
            await asyncio.sleep(0.5)
            hold.cancel()
            await asyncio.wait({hold})

    asyncio.run(body())

    assert server.holder == ""
    assert [holder for _, holder in server.writes[:-1]] == ["a"] * (len(server.writes) - 1)


def test_a_follower_ends_without_changing_the_lease_of_the_leader(server: LeaseServer) -> None:
    async def body() -> bool:
        async with server.election("a") as first:
            await first.acquire()
            hold = asyncio.create_task(first.hold())
            async with server.election("b") as second:
                with pytest.raises(TimeoutError):
                    await asyncio.wait_for(second.acquire(), TIMES.duration_seconds + 1.0)
                looked = second.looked and not second.held
            still = first.held and server.holder == "a"
            hold.cancel()
            await asyncio.wait({hold})
            return looked and still

    assert asyncio.run(body())


def test_an_error_at_the_start_of_the_thread_is_raised_in_the_caller() -> None:
    class Broken(AbstractAsyncContextManager[Leadership]):
        async def __aenter__(self) -> Leadership:
            raise OSError("no way in")

        async def __aexit__(self, *_: object) -> None:
            """It was never entered."""

    async def body() -> None:
        async with Election(Broken, hung_seconds=60.0):
            raise AssertionError("it began")

    with pytest.raises(OSError, match="no way in"):
        asyncio.run(body())
