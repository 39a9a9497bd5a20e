"""Requests under way over a pool of connections, and what became of each: what every load has in common.

When to send is the business of whoever drives it: `generator` for a load of minutes, `bench.sender` for cells of a
second. Connections are taken last in, first out, so that a low rate uses few of them.
"""

from __future__ import annotations

import asyncio
import math
import sys
import time
from array import array
from collections import deque
from collections.abc import Callable, Mapping
from urllib.parse import urlsplit

from penstock_optimizer.load.connection import Connection, Requests, request_bytes

SWEEP_SECONDS = 0.1
"""How often requests are checked against their time limit."""

PENDING = -1
LOST = 0
TIMED_OUT = -2
UNREACHABLE = -3
_WITHOUT_STATUS = {LOST: "disconnected", TIMED_OUT: "timeout", UNREACHABLE: "unreachable"}

Settled = Callable[[int, int, float, Mapping[str, float]], None]
"""Called with a request's number, its status (or one of those above), when (`time.perf_counter()`), and the wanted
headers of its answer."""


def is_good(status: int) -> bool:
    """The request was answered with 2xx."""
    return 200 <= status < 300


def status_name(status: int) -> str:
    """As results have it: the number, or in a word why there is none."""
    return _WITHOUT_STATUS.get(status, str(status))


class Exchanges:
    """Sends requests by number and records them. Times are seconds of `time.perf_counter()`."""

    def __init__(
        self,
        requests: Requests,
        on_settled: Settled,
        *,
        max_connections: int = sys.maxsize,
        idle_seconds: float = math.inf,
    ) -> None:
        """`max_connections`: a request that finds all of them busy waits. `idle_seconds`: a connection idle for longer
        is not used again, as the server may be about to close it."""
        self.due = array("d")
        self.sent = array("d")
        """0 for a request that never was."""
        self.done = array("d")
        self.status = array("h")
        self.first_failure = ""
        self._requests = requests
        self._payloads = request_bytes(requests)
        parts = urlsplit(requests.url)
        self._address = (parts.hostname or "", parts.port or 80)
        self._on_settled = on_settled
        self._max_connections = max_connections
        self._idle_seconds = idle_seconds
        self._idle: list[Connection] = []
        self._busy: dict[Connection, int] = {}
        self._waiting: deque[int] = deque()
        self._open = 0
        self._connecting = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._sweeper: asyncio.Task[None] | None = None
        self._quiet = asyncio.Event()

    async def start(self, connections: int) -> None:
        """Open so many connections; OSError when not one could be."""
        self._sweeper = asyncio.get_running_loop().create_task(self._sweep())
        count = min(connections, self._max_connections)
        outcomes = await asyncio.gather(*(self._connect() for _ in range(count)), return_exceptions=True)
        for outcome in outcomes:
            if isinstance(outcome, BaseException) and not self._open:
                await self.close()
                raise outcome

    def launch(self, due: float) -> int:
        """Send one more request on an idle connection; else on a new one; else as soon as one is free. Its number."""
        request = len(self.due)
        self.due.append(due)
        self.sent.append(0.0)
        self.done.append(0.0)
        self.status.append(PENDING)
        now = time.perf_counter()
        while self._idle:
            connection = self._idle.pop()
            if not connection.closed and now - connection.idle_since < self._idle_seconds:
                self._send(connection, request)
                return request
            connection.abort()
        self._waiting.append(request)
        self._connect_if_allowed()
        return request

    async def drain(self) -> None:
        """Wait for the answers that are still out; those that take too long are ended by their time limit."""
        while self._busy or self._waiting:
            self._quiet.clear()
            await self._quiet.wait()

    async def close(self) -> None:
        """Close all connections, whatever is under way on them."""
        tasks = [*self._tasks, *([self._sweeper] if self._sweeper is not None else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for connection in [*self._idle, *self._busy]:
            connection.abort()

    # connections

    def _connect_if_allowed(self) -> None:
        if self._open + self._connecting < self._max_connections:
            task = asyncio.get_running_loop().create_task(self._connect_for_waiting())
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _connect_for_waiting(self) -> None:
        try:
            await self._connect()
        except OSError:
            # Nobody listens: the request that wanted this connection has failed.
            if self._waiting:
                self._settle(self._waiting.popleft(), UNREACHABLE, time.perf_counter(), {})

    async def _connect(self) -> None:
        """Open a connection and give it the longest waiting request, or keep it for the next. OSError."""
        self._connecting += 1
        try:
            _, connection = await asyncio.get_running_loop().create_connection(
                lambda: Connection(self._answered, self._lost, self._requests.response_headers), *self._address
            )
        finally:
            self._connecting -= 1
        self._open += 1
        self._offer(connection)

    def _offer(self, connection: Connection) -> None:
        if self._waiting:
            self._send(connection, self._waiting.popleft())
        else:
            self._idle.append(connection)

    def _lost(self, connection: Connection) -> None:
        self._open -= 1
        self._busy.pop(connection, None)
        if connection in self._idle:
            self._idle.remove(connection)
        if self._waiting:
            self._connect_if_allowed()

    # requests

    def _send(self, connection: Connection, request: int) -> None:
        self._busy[connection] = request
        connection.send(request, self._payloads[request % len(self._payloads)])
        self.sent[request] = connection.sent_at

    def _answered(self, connection: Connection, request: int, status: int, at: float) -> None:
        self._busy.pop(connection, None)
        if status >= 300 and not self.first_failure:
            self.first_failure = f"{status} {connection.failure.decode(errors='replace')}".strip()
        if not connection.closed:
            self._offer(connection)
        self._settle(request, status, at, connection.numbers)

    def _settle(self, request: int, status: int, at: float, numbers: Mapping[str, float]) -> None:
        self.done[request] = at
        self.status[request] = status
        try:
            self._on_settled(request, status, at, numbers)
        finally:
            if not self._busy and not self._waiting:
                self._quiet.set()

    async def _sweep(self) -> None:
        """Give up on requests over their time limit."""
        limit = self._requests.timeout_seconds
        while True:
            await asyncio.sleep(SWEEP_SECONDS)
            now = time.perf_counter()
            for connection, request in list(self._busy.items()):
                if now - self.due[request] > limit:
                    self._busy.pop(connection, None)
                    connection.abort()
                    self._settle(request, TIMED_OUT, now, {})
            while self._waiting and now - self.due[self._waiting[0]] > limit:
                self._settle(self._waiting.popleft(), TIMED_OUT, now, {})
