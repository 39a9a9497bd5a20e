"""One keep-alive HTTP/1.1 connection that carries one request at a time: the protocol side of `exchanges`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, cast
from urllib.parse import urlsplit

import httptools

from penstock_optimizer.load.spec import RequestBody

FAILURE_BYTES = 300
"""How much of the body of a failed answer is kept, to show what went wrong."""


class Answered(Protocol):
    """Called when a request has its answer, or never will."""

    def __call__(self, connection: Connection, request: int, status: int, at: float) -> None:
        """`status` 0: the connection was lost first. `at`: seconds of `time.perf_counter()`."""
        ...


class Requests(Protocol):
    """What to send and what to look at in the answers: a LoadSpec, or a CellSpec of the bench."""

    @property
    def url(self) -> str:
        """Plain HTTP."""
        ...

    @property
    def bodies(self) -> Sequence[RequestBody]:
        """Sent in this order, over and over."""
        ...

    @property
    def headers(self) -> Mapping[str, str]:
        """Of each request, besides host and length."""
        ...

    @property
    def response_headers(self) -> Sequence[str]:
        """Names of numeric headers of the answers that are wanted."""
        ...

    @property
    def timeout_seconds(self) -> float:
        """For each request."""
        ...


def request_bytes(spec: Requests) -> list[bytes]:
    """The whole requests, heads included, one for each body of the spec."""
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


class Connection(asyncio.Protocol):
    """Sends a request, parses the answer, tells `answered`, and is free for the next one."""

    def __init__(
        self,
        answered: Answered,
        lost: Callable[[Connection], None],
        headers: Sequence[str] = (),
    ) -> None:
        self._answered = answered
        self._lost = lost
        self._wanted = {name.lower().encode() for name in headers}
        if self._wanted:
            # Set on the instance, so that the parser does not call for every header when none is wanted.
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
        """No request can be sent any more."""
        return self._transport is None or self._transport.is_closing()

    def send(self, request: int, payload: bytes) -> None:
        """Send; `request` is given back with the answer."""
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
        """A piece of the body: kept only when the answer is a failure."""
        if self._parser.get_status_code() >= 300 and len(self.failure) < FAILURE_BYTES:
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
