"""HTTP/1.1 on one socket: reads requests and writes responses, in order. Independent of routes and models.

llhttp (through httptools) parses. A connection enforces limits and deadlines, answers one request at a time (further
pipelined requests wait), and cancels the request when the client disconnects. The listener's sweep checks the
deadlines, so that a request needs no timer.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from functools import partial
from typing import cast

import httptools

from penstock_runtime.errors import BodyTooLarge, MalformedRequest, NotReady, Overloaded, RequestError, RequestTimeout
from penstock_runtime.http.transport.fair_reads import FairReader, QueuedCall
from penstock_runtime.http.transport.message import (
    MAX_LENGTH_DIGITS,
    HeadCache,
    Request,
    Response,
    StreamingResponse,
    body_too_large,
    check_head,
    encode,
    headers_too_large,
    not_http,
    read_head,
)
from penstock_runtime.http.transport.pool import (
    ClientShare,
    ConnectionMemory,
    ConnectionPool,
    ConnectionState,
    PendingResponse,
    Pipeline,
    UploadRate,
)
from penstock_runtime.http.transport.streaming import StreamWriter

LINGER_SECONDS = 2.0
"""How long the rest of a body is read and dropped after an early refusal. Closing at once would reset the connection,
and the client would lose the response that explains the refusal."""
LINGER_BYTES = 64 * 2**20
NUMBERS = itertools.count(1)


class Connection(asyncio.Protocol):
    """One client."""

    __slots__ = (
        "_body", "_body_bytes", "_dropped_bytes", "_expected_bytes", "_head_bytes", "_head_cache", "_headers",
        "_is_advancing", "_is_first", "_queued", "_reader", "_skips_head", "_unread_bytes", "_upload", "_url", "active",
        "address", "client", "deadline", "expired", "expires", "memory", "number", "parser", "pipeline", "pool",
        "request", "state", "suspended", "transport", "writable",
    )  # fmt: skip

    def __init__(self, pool: ConnectionPool) -> None:
        self.pool = pool
        self.number = next(NUMBERS)
        self.transport: asyncio.Transport | None = None
        self.parser: httptools.HttpRequestParser | None = None
        self.state = ConnectionState.IDLE
        self.deadline = 0.0
        """When the state must have changed, in the loop's time."""
        self.expires = 0.0
        """When the connection reaches its maximum age, in the loop's time."""
        self.expired = False
        """After that time; set by the sweep."""
        self.request: Request | None = None
        """Being read."""
        self.active: Request | None = None
        """Being answered."""
        self.suspended: PendingResponse | StreamWriter | None = None
        """The response to the active request, while it is made or streamed."""
        self.pipeline = Pipeline()
        self.writable = True
        self._head_cache = HeadCache()
        self._url = b""
        self._headers: dict[bytes, bytes] | None = None
        """Of the request being read; None while headers are ignored: trailers, a head that is parsed twice."""
        self._head_bytes = 0  # of target and headers
        self._unread_bytes = 0
        """Received since the last piece of a body or end of a message: an incomplete head or incomplete trailers."""
        self._body: list[bytes] = []
        self._body_bytes = 0
        self._expected_bytes = 0
        """Length of the body being received, if its head has it."""
        self._upload = UploadRate()
        self.address = ""
        self.client = ClientShare("")
        """Set with address and memory when the socket is known."""
        self.memory = ConnectionMemory(pool, self.client, self)
        self._is_first = False
        """No request of the data just received has been started yet."""
        self._reader = FairReader(self, pool)
        self._queued: QueuedCall | None = None
        """Starts a request that was received together with other ones."""
        self._is_advancing = False
        self._skips_head = False
        self._dropped_bytes = 0

    # Called by the event loop

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """A client has connected."""
        self.transport = cast("asyncio.Transport", transport)  # uvloop's is another class with the same methods
        self.parser = httptools.HttpRequestParser(self)
        peer = transport.get_extra_info("peername")
        self.address = str(peer[0]) if isinstance(peer, tuple) else ""
        self.client = self.pool.client(self.address)
        self.memory = ConnectionMemory(self.pool, self.client, self)
        now = self.pool.loop.time()
        self.deadline = now + self.pool.settings.idle_timeout_seconds
        self.expires = self.pool.expiry(now)
        if self.pool.add(self):
            return
        if self.pool.refuses_silently:
            self.transport.abort()
        else:
            self._refuse_and_close(None, NotReady("clients have too many connections open, and all of them are in use"))

    def data_received(self, data: bytes) -> None:
        """Bytes have arrived."""
        self._reader.receive(data)

    # Called by the reader

    def missing_bytes(self) -> int:
        """Of a body of known length that is being received."""
        return self._expected_bytes - self._body_bytes if self.state is ConnectionState.BODY else 0

    def receive_request(self, data: bytes) -> bool:
        """Start a request with a known head, without parsing it; false if the data is not exactly one such request."""
        self._is_first = True
        if self.state is not ConnectionState.IDLE or self.request is not None:
            return False
        cached = self._head_cache.read(data, self.pool.application.admission_version)
        if cached is None:
            return False
        # The parser is between two requests before and after this one.
        self.request, body = cached
        self.request.identifier = self.pool.new_identifier()
        self._body_bytes = 0
        self.on_body(body)
        self.on_message_complete()
        return True

    def receive(self, data: bytes) -> None:
        """Parse data of the client."""
        if self.state is ConnectionState.LINGER:
            self._dropped_bytes += len(data)
            if self._dropped_bytes > LINGER_BYTES and self.transport is not None:
                self.transport.abort()
            return
        self._unread_bytes += len(data)
        if self.pipeline:
            self.pipeline.read_bytes += len(data)
        self._feed(data)
        if self.request is not None:
            self._reader.count_piece(len(data))
        # Complete headers are counted elsewhere, trailers not at all: this limits heads and trailers that never end.
        if self._unread_bytes > self.pool.settings.max_header_bytes and self.parser is not None:
            self._refuse_and_close(self.request, headers_too_large(self.pool.settings.max_header_bytes))

    def _feed(self, data: bytes) -> None:
        parser = self.parser
        if parser is None:
            return
        try:
            parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            self._ignore_upgrade(data[upgrade.args[0] :])
        except httptools.HttpParserError as error:
            if self.state is not ConnectionState.LINGER:
                self._refuse_and_close(self.request, not_http(data, error))

    def eof_received(self) -> bool:
        """The client has closed its side, as one that cancels does: the request ends (docs/reference/http.md)."""
        self._cancel()
        if self.transport is not None:
            self._close(self.transport)
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        """The socket is closed: cancel the request in progress."""
        _ = exc
        self.pool.remove(self)
        self._reader.end()
        self._cancel()
        self.pipeline.clear()
        self.parser = None
        self.request = None
        self.transport = None

    def _cancel(self) -> None:
        if self.suspended is not None:
            self.suspended.cancel()
        if self._queued is not None:
            self._queued.cancel()
        self.suspended = self._queued = None

    def pause_writing(self) -> None:
        """The client reads more slowly than the responses are written."""
        self.writable = False
        self.deadline = self.pool.loop.time() + self.pool.settings.write_timeout_seconds
        self.memory.update_unsent(self.transport)

    def resume_writing(self) -> None:
        """The client has read enough of the responses."""
        self.writable = True
        self.memory.update_unsent(self.transport)
        if isinstance(self.suspended, StreamWriter):
            self.suspended.resume()
        if self.active is None and self.state is not ConnectionState.LINGER:
            self._advance()

    # Called by the parser

    def on_message_begin(self) -> None:
        """A request starts."""
        if self._skips_head or self.state is ConnectionState.LINGER or self.parser is None:
            return
        self.request = Request()
        self.request.caller = self.number
        self.request.client = self.client.key
        self.request.address = self.address
        self._headers = self.request.headers
        self._url = b""
        self._head_bytes = 0
        if self.active is None and self.writable:
            self._enter(ConnectionState.HEAD, self.pool.settings.header_timeout_seconds)

    def on_url(self, url: bytes) -> None:
        """A piece of the request's target."""
        if not self._skips_head:
            self._url += url
            self._head_bytes += len(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """One header, or a trailer of a chunked body, which is ignored."""
        headers = self._headers
        if headers is None:
            return
        self._head_bytes += len(name) + len(value) + 4
        name = name.lower()
        headers[name] = value if name not in headers else headers[name] + b", " + value

    def on_headers_complete(self) -> None:
        """The headers are complete: check them before the body is read."""
        request, parser = self.request, self.parser
        self._headers = None
        if request is None or parser is None or self._skips_head or self.state is ConnectionState.LINGER:
            return
        if self._head_bytes > self.pool.settings.max_header_bytes:
            self._refuse_and_close(request, headers_too_large(self.pool.settings.max_header_bytes))
            return
        version = parser.get_http_version()
        read_head(request, parser, version, self._url)
        request.identifier = request.identifier or self.pool.new_identifier()
        headers = request.headers
        self._body = []
        self._body_bytes = 0
        expected = None if b"transfer-encoding" in headers else int(headers.get(b"content-length") or 0)
        self._expected_bytes = expected or 0
        try:
            check_head(headers, version)
            self.pool.application.admit(request, expected)
        except RequestError as error:
            request.refusal = error.with_traceback(None)  # no cycle of references for the garbage collector
            if isinstance(error, BodyTooLarge | MalformedRequest) or b"expect" in headers:
                self._refuse_and_close(request, error)
                return
        is_short = self._head_bytes + MAX_LENGTH_DIGITS <= self.pool.settings.max_header_bytes
        self._head_cache.store(request if is_short and request.refusal is None else None)
        if expected != 0 and self.active is None and self.writable:
            self._await_body(request)

    def _await_body(self, request: Request) -> None:
        self._enter(ConnectionState.BODY, self.pool.settings.body_timeout_seconds)
        self._upload.mark(self.pool.loop.time(), self._body_bytes)
        if request.headers.get(b"expect", b"").lower() == b"100-continue" and self.transport is not None:
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def on_body(self, body: bytes) -> None:
        """A piece of the body."""
        request = self.request
        if request is None:
            return
        self._unread_bytes = 0
        self._body_bytes += len(body)
        limit = self.pool.application.body_limit
        if self._body_bytes > limit:
            self._refuse_and_close(request, body_too_large(limit))
        elif request.refusal is None:
            self._body.append(body)
            self.memory.add(len(body))
            if not self.pool.make_room(self):
                self._refuse_and_close(request, Overloaded("other requests and answers fill the memory for them"))

    def on_message_complete(self) -> None:
        """The request is complete."""
        request, parser = self.request, self.parser
        if request is None or parser is None or self.state is ConnectionState.LINGER:
            return
        if not self._skips_head and parser.should_upgrade() and (request.expects_body or request.method == "CONNECT"):
            return  # its body follows: see _ignore_upgrade
        self._skips_head = False
        self._unread_bytes = 0
        self.request = None
        self._reader.end_request()
        request.body = b"".join(self._body)  # of one piece that piece itself, not a copy
        self._body = []
        request.received = time.perf_counter()
        if self.active is not None or not self.writable:
            self.pipeline.add(request, self.transport)
        else:
            self._start(request)

    def _ignore_upgrade(self, rest: bytes) -> None:
        """Answer a request that offers an upgrade as one without (Java's client offers h2c with every request).

        llhttp stops after the headers of such a request; a second parser with the same framing reads the body.
        """
        if self.state is ConnectionState.LINGER or self.parser is None:
            return
        request = self.request
        self.parser = httptools.HttpRequestParser(self)
        if request is None or request.method == "CONNECT":
            if request is not None:
                self._refuse_and_close(request, MalformedRequest("this is not a proxy"))
            elif rest:
                self._feed(rest)
            return
        framing = b"transfer-encoding" if b"transfer-encoding" in request.headers else b"content-length"
        self._skips_head = True
        self._feed(b"POST / HTTP/1.1\r\n%b: %b\r\n\r\n%b" % (framing, request.headers[framing], rest))

    # Requests and responses

    def _start(self, request: Request) -> None:
        if request.refusal is not None and self.parser is None and not self.pipeline:
            self._refuse_and_close(request, request.refusal)
            return
        self.active = request
        self.state = ConnectionState.ANSWER
        # Of pipelined requests only the first starts at once: one client must not block the loop with all of them.
        # If the response may close the connection, it waits until the parser has read the requests that follow.
        if self._is_first and not (self.expired or self.pool.draining):
            self._is_first = False
            self._answer(request)
        else:
            self._queued = self.pool.queue.add(self.client.key, partial(self._answer, request))

    def _answer(self, request: Request) -> None:
        self._queued = None
        application, refusal = self.pool.application, request.refusal
        response = application.answer(request) if refusal is None else application.refuse(request, refusal)
        if isinstance(response, Response):
            self._respond(request, response)
        else:
            self.suspended = response
            response.resume(self.pool.loop, partial(self._respond, request))

    def _respond(self, request: Request, response: Response) -> None:
        self.active = self.suspended = None
        self.memory.add(-len(request.body))
        transport = self.transport
        stream = response.stream if isinstance(response, StreamingResponse) else None
        if transport is None or transport.is_closing():
            if stream is not None:
                stream.close()
            return
        # While draining, and on an expired connection, requests that were already received are answered too.
        waits = self.pipeline or self._reader.unparsed or self.request is not None
        close = not request.keep_alive or ((self.expired or self.pool.draining) and not waits)
        transport.write(encode(response, request, self.pool.date, close=close))
        if stream is None:
            self._end_response(close=close)
            return
        self.active = request
        self.suspended = StreamWriter(transport, stream, lambda: self.writable, chunked=request.chunked)
        self.suspended.start(self.pool.loop, partial(self._end_response, close=close or not request.chunked))

    def _end_response(self, *, close: bool) -> None:
        self.active = self.suspended = None
        if close and self.transport is not None:
            self._close(self.transport)
        elif self.writable:
            self._advance()

    def _advance(self) -> None:
        """Start the next pipelined request, or wait for one."""
        if self._is_advancing:
            return  # called by a request that the loop below has started and that was answered at once
        self._is_advancing = True
        while self.pipeline and self.active is None and self.writable and not self._is_closing():
            self._start(self.pipeline.take(self.transport))
        self._is_advancing = False
        is_free = self.active is None and self.writable and not self._is_closing()
        if is_free and self.state is not ConnectionState.LINGER:
            self._await_request()

    def _is_closing(self) -> bool:
        return self.transport is None or self.transport.is_closing()

    def _enter(self, state: ConnectionState, seconds: float) -> None:
        self.state = state
        self.deadline = self.pool.loop.time() + seconds

    def _await_request(self) -> None:
        if self.request is None:
            self._enter(ConnectionState.IDLE, self.pool.settings.idle_timeout_seconds)
        elif self._headers is None:
            self._await_body(self.request)
        else:
            self._enter(ConnectionState.HEAD, self.pool.settings.header_timeout_seconds)

    def _close(self, transport: asyncio.Transport) -> None:
        """Stop reading, and close once the rest of the response is sent, within the write timeout."""
        self.pipeline.clear()
        self.parser = None
        self._enter(ConnectionState.LINGER, self.pool.settings.write_timeout_seconds)
        transport.close()

    def _refuse_and_close(self, request: Request | None, error: RequestError) -> None:
        """Answer with an error and stop reading; the client may still be sending."""
        transport = self.transport
        self.request = None
        self.memory.add(-sum(map(len, self._body)))
        self._body = []
        self._unread_bytes = 0
        if self.active is not None or self.pipeline:
            # Earlier requests are complete and are answered first; this one is the last.
            if self.parser is None:
                return  # another one was refused before: the parser continues to the end of the data
            self.parser = None
            request = request or Request()
            request.refusal = error
            self.pipeline.append(request)
            return
        self._enter(ConnectionState.LINGER, LINGER_SECONDS)
        if transport is None or transport.is_closing():
            return
        refusal = encode(self.pool.application.refuse(request, error), request or Request(), self.pool.date, close=True)
        transport.write(refusal)
        transport.write_eof()

    def sweep(self, now: float) -> None:
        """Act on a deadline that has passed."""
        # Not closed here: a request may have been sent already, and would be lost.
        self.expired = now >= self.expires
        transport = self.transport
        if transport is None:
            return
        client_has_read = self.memory.update_unsent(transport)
        waits_for_reader = not self.writable or self.state is ConnectionState.LINGER
        if waits_for_reader and client_has_read:
            self.deadline = now + self.pool.settings.write_timeout_seconds
        if now < self.deadline:
            least = self.pool.settings.min_upload_bytes_per_second
            if self.state is ConnectionState.BODY and not self._upload.is_enough(now, self._body_bytes, least):
                error = RequestTimeout(f"the body arrived at less than {least:g} bytes a second")
                self._refuse_and_close(self.request, error)
            return
        if waits_for_reader:
            transport.abort()
        elif self.state is ConnectionState.IDLE:
            self._close(transport)
        elif self.state is ConnectionState.HEAD or self.state is ConnectionState.BODY:
            what = "headers" if self.state is ConnectionState.HEAD else "body"
            self._refuse_and_close(self.request, RequestTimeout(f"the {what} did not arrive in time"))

    # For the pool, to make room for other connections

    @property
    def is_idle(self) -> bool:
        """See `PooledConnection`."""
        transport = self.transport
        is_waiting = self.state is ConnectionState.IDLE and self.request is None and not self._reader.unparsed
        return is_waiting and transport is not None and not transport.get_write_buffer_size()

    @property
    def waits_for_client(self) -> bool:
        """See `PooledConnection`."""
        return self.active is None and self.transport is not None

    def transfer_rate(self, now: float) -> float | None:
        """See `PooledConnection`."""
        if self.active is not None or self.transport is None:
            return None
        return self._upload.rate(now, self._body_bytes) if self._body else 0.0

    def evict(self) -> None:
        """See `PooledConnection`."""
        transport = self.transport
        if transport is None:
            return
        is_blocked = bool(transport.get_write_buffer_size())
        is_incomplete = self.state is ConnectionState.HEAD or self.state is ConnectionState.BODY
        if is_incomplete and not is_blocked:
            self._refuse_and_close(self.request, Overloaded("other clients need what this one holds"))
        self._body = []
        self._reader.end()
        self._close(transport)
        if is_blocked:
            transport.abort()
        else:  # the answer fits into the socket's buffer, unless the client has filled that
            self.pool.loop.call_later(LINGER_SECONDS, transport.abort)
        self.pool.remove(self)

    def close_if_idle(self) -> bool:
        """Close if no request is being answered or read; false if one is."""
        if self.state is ConnectionState.IDLE and self.transport is not None and not self._reader.unparsed:
            self._close(self.transport)
            return True
        return self.transport is None
