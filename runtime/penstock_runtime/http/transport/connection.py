"""HTTP/1.1 on one socket: requests in, responses out, in order. Knows nothing of routes or models.

llhttp (through httptools) parses. This class keeps the limits and the deadlines, answers one request at a time (further
ones of a pipelining client wait), and tells the application when the client has gone. Deadlines are checked by the
acceptor's sweep, so that a request costs no timer.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from functools import partial
from typing import TYPE_CHECKING, cast

import httptools

from penstock_runtime.errors import (
    BodyTooLarge,
    MalformedRequest,
    NotReady,
    Overloaded,
    RequestError,
    RequestTimeout,
)
from penstock_runtime.http.transport.eager import Rest, begin
from penstock_runtime.http.transport.head_cache import MOST_DIGITS, LastHead
from penstock_runtime.http.transport.head_checks import check_head, headers_too_large, not_http, read_head, too_large
from penstock_runtime.http.transport.memory_quota import Held
from penstock_runtime.http.transport.message import Request, Response, encode
from penstock_runtime.http.transport.phase import Phase
from penstock_runtime.http.transport.pipelining import Ahead

if TYPE_CHECKING:
    from penstock_runtime.http.transport.listener import Acceptor

LINGER_SECONDS = 2.0
"""After an early refusal the rest of a body is read and dropped for so long: closing at once would reset the
connection, and the client would lose the answer that explains it."""
LINGER_BYTES = 64 * 2**20
NUMBERS = itertools.count(1)


class Connection(asyncio.Protocol):
    """One client."""

    __slots__ = (
        "_body", "_body_bytes", "_first", "_head_bytes", "_headers", "_held", "_last_head",
        "_lingered", "_replay", "_taking", "_turn", "_unread_bytes", "_url", "acceptor", "active", "aged",
        "deadline", "expires", "number", "parser", "pending", "phase", "request", "rest", "transport", "writable",
    )  # fmt: skip

    def __init__(self, acceptor: Acceptor) -> None:
        self.acceptor = acceptor
        self.number = next(NUMBERS)
        self.transport: asyncio.Transport | None = None
        self.parser: httptools.HttpRequestParser | None = None
        self.phase = Phase.IDLE
        self.deadline = 0.0
        """When the phase must be over, in the loop's time."""
        self.expires = 0.0
        """When the connection is to end with an answer, in the loop's time."""
        self.aged = False
        """That time has come: the sweep says so, and a request need not ask the clock."""
        self.request: Request | None = None
        """Being read."""
        self.active: Request | None = None
        """Being answered."""
        self.rest: Rest[Response] | None = None
        """Of its answer, where that has to wait."""
        self.pending = Ahead()
        self.writable = True
        self._last_head = LastHead()
        self._url = b""
        self._headers: dict[bytes, bytes] | None = None
        """Of the request being read; None while headers do not count: trailers, a replayed head."""
        self._head_bytes = 0
        """Of its target and headers."""
        self._unread_bytes = 0
        """Since a body last grew or a message ended: of a head or of trailers that are not through yet."""
        self._body: list[bytes] = []
        self._body_bytes = 0
        self._held = Held(acceptor.memory)
        self._first = False
        """No request of what has just been read is being answered yet."""
        self._turn: asyncio.Handle | None = None
        """In which a request that came with others is begun."""
        self._taking = False
        self._replay = False
        self._lingered = 0

    # The socket's side

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """A client has connected."""
        self.transport = cast(
            "asyncio.Transport", transport
        )  # what stream protocols are given; uvloop's is its own class
        self.parser = httptools.HttpRequestParser(self)
        now = self.acceptor.loop.time()
        self.deadline = now + self.acceptor.settings.idle_timeout_seconds
        self.expires = self.acceptor.expiry(now)
        if not self.acceptor.admit(self):
            error = NotReady(f"{self.acceptor.max_connections} connections are open already")
            self._refuse_and_close(None, error)

    def data_received(self, data: bytes) -> None:
        """Bytes have arrived."""
        if self.phase is Phase.LINGER:
            self._lingered += len(data)
            if self._lingered > LINGER_BYTES and self.transport is not None:
                self.transport.abort()
            return
        self._first = True
        if self.phase is Phase.IDLE and self.request is None:
            again = self._last_head.read(data)
            if again is not None:
                self._read_again(*again)
                return
        self._unread_bytes += len(data)
        if self.pending:
            self.pending.read_bytes += len(data)
        self._feed(data)
        # Headers are counted when they are whole, trailers not at all; this bounds what never ends.
        if self._unread_bytes > self.acceptor.settings.max_header_bytes and self.parser is not None:
            self._refuse_headers()

    def _read_again(self, request: Request, body: bytes) -> None:
        """A request whose head the parser need not see: it is between two requests before and after."""
        request.identifier = self.acceptor.new_identifier()
        self.request = request
        self._body_bytes = 0
        self.on_body(body)
        self.on_message_complete()

    def _feed(self, data: bytes) -> None:
        parser = self.parser
        if parser is None:
            return
        try:
            parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            self._ignore_upgrade(data[upgrade.args[0] :])
        except httptools.HttpParserError as error:
            if self.phase is not Phase.LINGER:
                self._refuse_and_close(self.request, not_http(data, error))

    def eof_received(self) -> bool:
        """The client has closed its side. A cancellation looks the same, the request ends (docs/reference/http.md)."""
        self._cancel()
        if self.transport is not None:
            self._close(self.transport)
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        """The socket is closed: whatever is under way is not waited for any more."""
        _ = exc
        self.acceptor.forget(self)
        self._cancel()
        self._held.clear()
        self.pending.clear()
        self.parser = None
        self.request = None
        self.transport = None

    def _cancel(self) -> None:
        if self.rest is not None:
            self.rest.cancel()
        if self._turn is not None:
            self._turn.cancel()
        self.rest = self._turn = None

    def pause_writing(self) -> None:
        """The client does not read as fast as it is answered."""
        self.writable = False
        self.deadline = self.acceptor.loop.time() + self.acceptor.settings.write_timeout_seconds
        self._held.weigh_unsent(self.transport)

    def resume_writing(self) -> None:
        """It does again."""
        self.writable = True
        self._held.weigh_unsent(self.transport)
        if self.active is None and self.phase is not Phase.LINGER:
            self._next()

    # The parser's side

    def on_message_begin(self) -> None:
        """A request starts."""
        if self._replay or self.phase is Phase.LINGER or self.parser is None:
            return
        self.request = Request()
        self.request.caller = self.number
        self._headers = self.request.headers
        self._url = b""
        self._head_bytes = 0
        if self.active is None and self.writable:
            self._enter(Phase.HEAD, self.acceptor.settings.header_timeout_seconds)

    def on_url(self, url: bytes) -> None:
        """A piece of the request's target."""
        if not self._replay:
            self._url += url
            self._head_bytes += len(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """One header (also trailers of a chunked body, which are ignored)."""
        headers = self._headers
        if headers is None:
            return
        self._head_bytes += len(name) + len(value) + 4
        name = name.lower()
        headers[name] = value if name not in headers else headers[name] + b", " + value

    def on_headers_complete(self) -> None:
        """The headers are whole: judge them before the body is read."""
        request, parser = self.request, self.parser
        self._headers = None
        if request is None or parser is None or self._replay or self.phase is Phase.LINGER:
            return
        if self._head_bytes > self.acceptor.settings.max_header_bytes:
            self._refuse_headers()
            return
        version = parser.get_http_version()
        read_head(request, parser, version, self._url)
        request.identifier = request.identifier or self.acceptor.new_identifier()
        headers = request.headers
        self._body = []
        self._body_bytes = 0
        expected = None if b"transfer-encoding" in headers else int(headers.get(b"content-length") or 0)
        try:
            check_head(headers, version)
            self.acceptor.application.admit(request, expected)
        except RequestError as error:
            request.refusal = error
            if isinstance(error, BodyTooLarge | MalformedRequest) or b"expect" in headers:
                self._refuse_and_close(request, error)
                return
        is_short = self._head_bytes + MOST_DIGITS <= self.acceptor.settings.max_header_bytes
        self._last_head.remember(request if is_short and request.refusal is None else None)
        if expected != 0 and self.active is None and self.writable:
            self._await_body(request)

    def _await_body(self, request: Request) -> None:
        self._enter(Phase.BODY, self.acceptor.settings.body_timeout_seconds)
        if request.headers.get(b"expect", b"").lower() == b"100-continue" and self.transport is not None:
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def on_body(self, body: bytes) -> None:
        """A piece of the body."""
        request = self.request
        if request is None:
            return
        self._unread_bytes = 0
        self._body_bytes += len(body)
        limit = self.acceptor.application.body_limit
        if self._body_bytes > limit:
            self._refuse_and_close(request, too_large(limit))
        elif request.refusal is None:
            self._body.append(body)
            self._held.add(len(body))
            if self.acceptor.memory.bytes > self.acceptor.settings.max_held_bytes:
                self._refuse_and_close(request, Overloaded("other requests and answers fill the memory for them"))

    def on_message_complete(self) -> None:
        """The request is whole."""
        request, parser = self.request, self.parser
        if request is None or parser is None or self.phase is Phase.LINGER:
            return
        if not self._replay and parser.should_upgrade() and (request.expects_body or request.method == "CONNECT"):
            return  # its body follows: see _ignore_upgrade
        self._replay = False
        self._unread_bytes = 0
        self.request = None
        body = self._body
        request.body = body[0] if len(body) == 1 else b"".join(body)
        self._body = []
        request.received = time.perf_counter()
        if self.active is not None or not self.writable:
            self.pending.add(request, self.transport)
        else:
            self._start(request)

    def _ignore_upgrade(self, rest: bytes) -> None:
        """Answer a request that offers an upgrade (Java's client offers h2c with every request) as if it had not.

        llhttp stops at the headers of such a request; a second parser, given the same framing, reads the body.
        """
        if self.phase is Phase.LINGER or self.parser is None:
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
        self._replay = True
        self._feed(b"POST / HTTP/1.1\r\n%b: %b\r\n\r\n%b" % (framing, request.headers[framing], rest))

    # The application's side

    def _start(self, request: Request) -> None:
        if request.refusal is not None and self.parser is None and not self.pending:
            self._refuse_and_close(request, request.refusal)
            return
        self.active = request
        self.phase = Phase.ANSWER
        # Of what came in one piece the first at once: who sends many ahead must not have the loop for all of them.
        # Where its answer may be the last, none before all of it is read: what else it holds is to be answered too.
        if (self._first or request.refusal is not None) and not self._is_ending():
            self._first = False
            self._answer(request)
        else:
            self._turn = self.acceptor.loop.call_soon(self._answer, request)

    def _is_ending(self) -> bool:
        return self.aged or self.acceptor.draining

    def _answer(self, request: Request) -> None:
        self._turn = None
        application, refusal = self.acceptor.application, request.refusal
        answer = application.answer(request) if refusal is None else application.refuse(request, refusal)
        response = answer if isinstance(answer, Response) else begin(answer)
        if isinstance(response, Rest):
            self.rest = response
            response.go_on(self.acceptor.loop, partial(self._respond, request))
        else:
            self._respond(request, response)

    def _respond(self, request: Request, response: Response) -> None:
        self.active = None
        self.rest = None
        self._held.add(-len(request.body))
        transport = self.transport
        if transport is None or transport.is_closing():
            return
        # While draining, and on an old connection, what the client has already sent is answered too.
        close = not request.keep_alive or (self._is_ending() and not self.pending and self.request is None)
        transport.write(
            encode(
                response,
                identifier=request.identifier,
                date=self.acceptor.date,
                head_only=request.method == "HEAD",
                connection=b"close" if close else b"keep-alive" if request.keep_alive_by_header else b"",
            )
        )
        if close:
            self._close(transport)
        elif self.writable:
            self._next()

    def _next(self) -> None:
        """Take the next waiting request, or wait for one."""
        if self._taking:
            return  # one of those below was answered at once
        self._taking = True
        while self.pending and self.active is None and self.writable and not self._is_closing():
            self._start(self.pending.take(self.transport))
        self._taking = False
        if self.active is None and self.writable and self.phase is not Phase.LINGER and not self._is_closing():
            self._expect()

    def _is_closing(self) -> bool:
        return self.transport is None or self.transport.is_closing()

    def _enter(self, phase: Phase, seconds: float) -> None:
        self.phase = phase
        self.deadline = self.acceptor.loop.time() + seconds

    def _expect(self) -> None:
        if self.request is None:
            self._enter(Phase.IDLE, self.acceptor.settings.idle_timeout_seconds)
        elif self._headers is None:
            self._await_body(self.request)
        else:
            self._enter(Phase.HEAD, self.acceptor.settings.header_timeout_seconds)

    def _close(self, transport: asyncio.Transport) -> None:
        """Read no more, and close once the client has what is still to be sent, for which it has its time."""
        self.pending.clear()
        self.parser = None
        self._enter(Phase.LINGER, self.acceptor.settings.write_timeout_seconds)
        transport.close()

    def _refuse_headers(self) -> None:
        self._refuse_and_close(self.request, headers_too_large(self.acceptor.settings.max_header_bytes))

    def _refuse_and_close(self, request: Request | None, error: RequestError) -> None:
        """Answer without reading on; the client may still be sending."""
        transport = self.transport
        self.request = None
        self._held.add(-sum(map(len, self._body)))
        self._body = []
        self._unread_bytes = 0
        if self.active is not None or self.pending:
            # What came before it is whole: this is answered after all of that, and is the last.
            if self.parser is None:
                return  # there is a last one already: the parser goes on to the end of the piece
            self.parser = None
            request = request or Request()
            request.refusal = error
            self.pending.append(request)
            return
        self._enter(Phase.LINGER, LINGER_SECONDS)
        if transport is None or transport.is_closing():
            return
        response = self.acceptor.application.refuse(request, error)
        asked = request or Request()
        date, head_only = self.acceptor.date, asked.method == "HEAD"
        transport.write(
            encode(response, identifier=asked.identifier, date=date, head_only=head_only, connection=b"close")
        )
        transport.write_eof()

    def sweep(self, now: float) -> None:
        """Act on a deadline that has passed."""
        # Not closed here: a request may be on its way already, and would be lost.
        self.aged = now >= self.expires
        transport = self.transport
        if transport is None:
            return
        has_read = self._held.weigh_unsent(transport)
        is_to_read = not self.writable or self.phase is Phase.LINGER
        if is_to_read and has_read:
            self.deadline = now + self.acceptor.settings.write_timeout_seconds
        if now < self.deadline:
            return
        if is_to_read:
            transport.abort()
        elif self.phase is Phase.IDLE:
            self._close(transport)
        elif self.phase is Phase.HEAD or self.phase is Phase.BODY:
            what = "headers" if self.phase is Phase.HEAD else "body"
            self._refuse_and_close(self.request, RequestTimeout(f"the {what} did not arrive in time"))

    def close_if_idle(self) -> bool:
        """Close when no request is under way or being read; false when one is."""
        if self.phase is Phase.IDLE and self.transport is not None:
            self._close(self.transport)
            return True
        return self.transport is None
