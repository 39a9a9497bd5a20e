"""Sends HTTP/1.1 requests over a pool of keep-alive connections, and records the time and status of each.

The caller decides when to send: `generator` for a load of seconds, `penstock_bench.cell` for cells of a
second. Connections are used last in, first out, so that a low rate uses few of them.
"""

from __future__ import annotations

import asyncio
import math
import sys
import time
from array import array
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import cast
from urllib.parse import urlsplit

import httptools
from pydantic import Field

from penstock.manifest import Frozen

FAILURE_BYTES = 300
"""How much of the body of a failed answer is kept for the report."""


class RequestBody(Frozen):
    """One body, ready to send."""

    body: str
    group: int = 0
    """Results are also reported by group, such as the length in tokens."""


OnAnswer = Callable[["ClientConnection", int, int, float], None]
"""Called with the number of a request when it is answered or never will be, its status (0: the connection was lost
first), and the time (`time.perf_counter()`)."""

OnPiece = Callable[[int, bytes], None]
"""Called with the number of a request and a piece of the body of its 2xx answer."""


class RequestSource(Frozen):
    """What to send; a LoadSpec and a CellSpec of the bench state the rest."""

    url: str = Field(pattern=r"^http://")
    """Plain HTTP: measurements go to a server on this machine or in this network."""
    bodies: tuple[RequestBody, ...] = Field(min_length=1)
    """Sent in this order, repeatedly."""
    headers: dict[str, str] = Field(default_factory=lambda: {"content-type": "application/json"})
    """Of each request, besides host and length."""
    timeout_seconds: float = Field(default=10.0, gt=0)
    """For each request."""


def request_bytes(spec: RequestSource) -> list[bytes]:
    """The complete requests, heads included, one for each body of the spec."""
    parts = urlsplit(spec.url)
    path = parts.path or "/"
    if parts.query:
        path += f"?{parts.query}"
    lines = [f"POST {path} HTTP/1.1", f"host: {parts.netloc}"]
    lines += [f"{name}: {value}" for name, value in spec.headers.items()]
    head = "\r\n".join(lines)
    requests = []
    for item in spec.bodies:
        body = item.body.encode()
        requests.append(f"{head}\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body)
    return requests


class ClientConnection(asyncio.Protocol):
    """A connection with one request at a time. Calls `answered` for each answer."""

    def __init__(
        self,
        answered: OnAnswer,
        lost: Callable[[ClientConnection], None],
        headers: Sequence[str] = (),
        on_piece: OnPiece | None = None,
    ) -> None:
        self._answered = answered
        self._on_piece = on_piece
        self._lost = lost
        self._wanted = {name.lower().encode() for name in headers}
        if self._wanted:
            # Set on the instance, so that the parser does not call it for every header when none is wanted.
            self.on_header = self._read_header
        self._parser = httptools.HttpResponseParser(self)
        self._transport: asyncio.Transport | None = None
        self._request: int | None = None
        self.sent_at = 0.0
        self.idle_since = time.perf_counter()
        self.numbers: dict[str, float] = {}
        """The wanted headers of the last answer."""
        self.failure = b""
        """The start of the body of the last answer, when that was not 2xx."""

    @property
    def closed(self) -> bool:
        """True when no request can be sent any more."""
        return self._transport is None or self._transport.is_closing()

    def send(self, request: int, payload: bytes) -> None:
        """Send a request; `request` is passed to `answered`."""
        assert self._transport is not None  # noqa: S101 - only open connections are handed out
        self._request = request
        self.numbers = {}
        self.failure = b""
        self.sent_at = time.perf_counter()
        self._transport.write(payload)

    def abort(self) -> None:
        """Close at once, without an answer."""
        self._request = None
        if self._transport is not None:
            self._transport.abort()

    # asyncio's callbacks

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The connection is open."""
        # uvloop's transports have the methods but not the base class.
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        """Bytes of an answer."""
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            # Not HTTP: the request counts as lost, and so does the connection.
            if self._transport is not None:
                self._transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - asyncio's signature
        """The connection is gone, with or without an answer."""
        self._transport = None
        if self._request is not None:
            request, self._request = self._request, None
            self._answered(self, request, 0, time.perf_counter())
        self._lost(self)

    # httptools' callbacks

    def on_body(self, body: bytes) -> None:
        """A piece of the body: kept only for a failed answer."""
        if self._parser.get_status_code() < 300:
            if self._on_piece is not None and self._request is not None:
                self._on_piece(self._request, body)
        elif len(self.failure) < FAILURE_BYTES:
            self.failure += body[:FAILURE_BYTES]

    def on_message_complete(self) -> None:
        """The answer is complete."""
        at = time.perf_counter()
        if self._request is None:
            return
        request, self._request = self._request, None
        status = self._parser.get_status_code()
        self.idle_since = at
        if not self._parser.should_keep_alive() and self._transport is not None:
            self._transport.close()
        self._answered(self, request, status, at)

    def _read_header(self, name: bytes, value: bytes) -> None:
        if name.lower() in self._wanted:
            try:
                self.numbers[name.decode().lower()] = float(value)
            except ValueError:
                return


SWEEP_SECONDS = 0.1
"""How often requests are checked against their time limit."""

PENDING = -1
LOST = 0
TIMED_OUT = -2
UNREACHABLE = -3
_WITHOUT_STATUS = {LOST: "disconnected", TIMED_OUT: "timeout", UNREACHABLE: "unreachable"}

OnSettled = Callable[[int, int, float, Mapping[str, float]], None]
"""Called with a request's number, its status (or one of those above), the time (`time.perf_counter()`), and the wanted
headers of its answer."""


def is_good(status: int) -> bool:
    """True for a 2xx answer."""
    return 200 <= status < 300


def status_name(status: int) -> str:
    """The status in results: the number, or a word for the reason why there is none."""
    return _WITHOUT_STATUS.get(status, str(status))


class LoadClient:
    """Sends requests by number and records them. Times are seconds of `time.perf_counter()`."""

    def __init__(
        self,
        requests: RequestSource,
        on_settled: OnSettled,
        *,
        response_headers: Sequence[str] = (),
        on_piece: OnPiece | None = None,
        max_connections: int = sys.maxsize,
        idle_seconds: float = math.inf,
    ) -> None:
        """`response_headers`: names of numeric headers of the answers to read. `max_connections`: a request that finds
        all of them busy waits. `idle_seconds`: a connection idle for longer is not used again, as the server may be
        about to close it."""
        self.due = array("d")
        self.sent = array("d")
        """0 for a request that was never sent."""
        self.done = array("d")
        self.status = array("h")
        self.first_failure = ""
        self._requests = requests
        self._payloads = request_bytes(requests)
        parts = urlsplit(requests.url)
        self._address = (parts.hostname or "", parts.port or 80)
        self._on_settled = on_settled
        self._response_headers = response_headers
        self._on_piece = on_piece
        self._max_connections = max_connections
        self._idle_seconds = idle_seconds
        self._idle: list[ClientConnection] = []
        self._busy: dict[ClientConnection, int] = {}
        self._waiting: deque[int] = deque()
        self._open = 0
        self._connecting = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._sweeper: asyncio.Task[None] | None = None
        self._quiet = asyncio.Event()

    async def start(self, connections: int) -> None:
        """Open connections; OSError when none could be opened."""
        self._sweeper = asyncio.get_running_loop().create_task(self._sweep())
        count = min(connections, self._max_connections)
        outcomes = await asyncio.gather(*(self._connect() for _ in range(count)), return_exceptions=True)
        for outcome in outcomes:
            if isinstance(outcome, BaseException) and not self._open:
                await self.close()
                raise outcome

    def launch(self, due: float) -> int:
        """Send a request on an idle connection, else on a new one, else when one is free. Returns its number."""
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
        """Wait for the outstanding answers, each up to its time limit."""
        while self._busy or self._waiting:
            self._quiet.clear()
            await self._quiet.wait()

    async def close(self) -> None:
        """Close all connections, with or without requests in progress."""
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
            # The server does not listen: the request that waited for this connection has failed.
            if self._waiting:
                self._settle(self._waiting.popleft(), UNREACHABLE, time.perf_counter(), {})

    async def _connect(self) -> None:
        """Open a connection, and use it for the longest waiting request, or keep it. OSError."""
        self._connecting += 1
        try:
            _, connection = await asyncio.get_running_loop().create_connection(
                lambda: ClientConnection(self._answered, self._lost, self._response_headers, self._on_piece),
                *self._address,
            )
        finally:
            self._connecting -= 1
        self._open += 1
        self._offer(connection)

    def _offer(self, connection: ClientConnection) -> None:
        if self._waiting:
            self._send(connection, self._waiting.popleft())
        else:
            self._idle.append(connection)

    def _lost(self, connection: ClientConnection) -> None:
        self._open -= 1
        self._busy.pop(connection, None)
        if connection in self._idle:
            self._idle.remove(connection)
        if self._waiting:
            self._connect_if_allowed()

    # requests

    def _send(self, connection: ClientConnection, request: int) -> None:
        self._busy[connection] = request
        connection.send(request, self._payloads[request % len(self._payloads)])
        self.sent[request] = connection.sent_at

    def _answered(self, connection: ClientConnection, request: int, status: int, at: float) -> None:
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
