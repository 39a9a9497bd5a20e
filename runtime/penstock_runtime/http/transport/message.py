"""Requests, responses and routes as values, and their form on the wire; no input or output.

A client that keeps its connection sends the same head with each request, except for the length of the body: a head that
was parsed and checked once need not be parsed again (`HeadCache`). The cache compares byte for byte, so that it never
interprets a request in another way than the parser.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from http import HTTPStatus
from typing import Any

import httptools

from penstock.tasks import TaskName
from penstock_runtime.errors import BodyTooLarge, HeadersTooLarge, MalformedRequest, RequestError
from penstock_runtime.http.transport.streaming import ByteStream

STATUS_LINES = {status.value: f"HTTP/1.1 {status.value} {status.phrase}\r\n".encode() for status in HTTPStatus}
JSON = b"application/json"
IDENTIFIER_LIMIT = 128
"""Bytes of an x-request-id header that is accepted."""
VERSIONS = frozenset({"1.0", "1.1"})
CONTENT_LENGTH = b"content-length"
MAX_LENGTH_DIGITS = 12
"""Digits of a content-length in a cached head."""


class Request:
    """One request. `headers` has lower-case names; a repeated header's values are joined with a comma."""

    __slots__ = (
        "address",
        "asks_for_bulk",
        "body",
        "caller",
        "chunked",
        "client",
        "coverage",
        "headers",
        "identifier",
        "is_bulk",
        "keep_alive",
        "keep_alive_by_header",
        "method",
        "model",
        "parameters",
        "path",
        "query",
        "received",
        "refusal",
        "route",
        "tier",
        "token",
    )

    def __init__(self, method: str = "GET", target: str = "/", headers: dict[bytes, bytes] | None = None) -> None:
        path, _, query = target.partition("?")
        self.method = method
        self.path = path
        self.query = query
        self.headers: dict[bytes, bytes] = {} if headers is None else headers
        self.body = b""
        self.identifier = b""
        """x-request-id: the client's, or a generated one."""
        self.keep_alive = True
        """The connection stays open after the response."""
        self.keep_alive_by_header = False
        """HTTP/1.0 with a keep-alive header: the response then has one, too."""
        self.caller = 0
        """Number of its connection."""
        self.chunked = True
        """The response may be sent in chunks: the client does not speak HTTP/1.0."""
        self.client = ""
        """The key of its share of the limits: the client's address, or its network."""
        self.address = ""
        """The client's address, for the access log."""
        self.token = ""
        """Name of its bearer token; empty if it needs none, or has none that is accepted."""
        self.received = 0.0
        """When the last byte arrived, `time.perf_counter` seconds."""
        self.coverage = ""
        """What became of a request to a route that classifies, if its status does not tell."""
        self.route: Route | None = None
        self.parameters: dict[str, str] = {}
        """Of the path, such as `name` in /v2/models/{name}."""
        self.model = ""
        """The model that the path names, on a server of several."""
        self.tier = ""
        """`service_tier` of the body."""
        self.asks_for_bulk = False
        """The body asks for the bulk lane."""
        self.is_bulk = False
        """It runs in the bulk lane: see `ModelService.is_bulk`."""
        self.refusal: RequestError | None = None
        """Set when the headers were refused: the body is skipped and this error is the response."""

    def copy_head(self, length: bytes) -> Request:
        """A request with the same checked head and another content-length, without body and identifier."""
        request = Request(self.method, "")
        request.path = self.path
        request.query = self.query
        request.headers = {**self.headers, b"content-length": length}
        request.keep_alive = self.keep_alive
        request.keep_alive_by_header = self.keep_alive_by_header
        request.caller = self.caller
        request.chunked = self.chunked
        request.client = self.client
        request.address = self.address
        request.token = self.token
        request.route = self.route
        request.parameters = self.parameters
        request.model = self.model
        return request

    @property
    def expects_body(self) -> bool:
        """According to the headers."""
        return b"transfer-encoding" in self.headers or self.headers.get(b"content-length", b"0") != b"0"

    def set_target(self, target: bytes) -> None:
        """Set path and query from the request target: `/path?query`, or a complete URL."""
        text = target.decode("latin-1")
        if not text.startswith("/") and "://" in text:
            text = "/" + text.split("://", 1)[1].partition("/")[2]
        self.path, _, self.query = text.partition("#")[0].partition("?")


class Response:
    """One response. `headers` are complete lines, without those that the connection adds (length, date, connection)."""

    __slots__ = ("body", "content_type", "headers", "status")

    def __init__(
        self, body: bytes = b"", *, status: int = 200, content_type: bytes = JSON, headers: bytes = b""
    ) -> None:
        self.status = status
        self.body = body
        self.content_type = content_type
        self.headers = headers
        """Header lines, such as b"allow: GET\\r\\nx: y\\r\\n"."""


def read_head(request: Request, parser: httptools.HttpRequestParser, version: str, url: bytes) -> None:
    """Set method, target and connection options from a parsed head.

    The identifier stays empty where the client sent none that is acceptable.
    """
    request.method = parser.get_method().decode("ascii")
    request.keep_alive = parser.should_keep_alive()
    request.set_target(url)
    headers = request.headers
    if version == "1.0":
        request.keep_alive_by_header = request.keep_alive
        request.chunked = False
        headers.pop(b"expect", None)  # HTTP/1.0 has no interim response
    request.identifier = identifier_of(headers)


def identifier_of(headers: Mapping[bytes, bytes]) -> bytes:
    """The client's x-request-id; empty where it sent none that is acceptable."""
    identifier = headers.get(b"x-request-id", b"")
    return identifier if len(identifier) <= IDENTIFIER_LIMIT and identifier.isascii() else b""


def check_head(headers: Mapping[bytes, bytes], version: str) -> None:
    """MalformedRequest for what RFC 9112 forbids and the parser accepts: versions other than 1.0 and 1.1, no host or
    two, transfer codings other than chunked, or chunked with HTTP/1.0."""
    if version not in VERSIONS:
        raise MalformedRequest(f"this is HTTP/{version}", remedy="Speak HTTP/1.1")
    host = headers.get(b"host")
    if host is None and version == "1.1":
        raise MalformedRequest("the request has no host header", remedy="Send a host header")
    if host is not None and b"," in host:
        raise MalformedRequest("the request has more than one host", remedy="Send one host header")
    coding = headers.get(b"transfer-encoding")
    if coding is not None and coding.strip().lower() != b"chunked":
        raise MalformedRequest(
            f"the transfer-encoding is {coding.decode('latin-1')!r}",
            remedy="Send the body in chunks, or with its length",
        )
    if coding is not None and version == "1.0":
        raise MalformedRequest("HTTP/1.0 has no transfer-encoding", remedy="Send the body with its length")


def not_http(data: bytes, error: Exception) -> MalformedRequest:
    """The error for data that the parser rejects; `data`: the piece that was received with it."""
    is_tls = data.startswith(b"\x16")
    return MalformedRequest(
        f"this is not HTTP/1.1: {error}", remedy="Speak HTTP/1.1, not TLS" if is_tls else "Speak HTTP/1.1"
    )


def headers_too_large(limit: int) -> HeadersTooLarge:
    """The error for headers over the limit of `limit` bytes."""
    return HeadersTooLarge(f"the headers are over {limit} bytes", remedy="Send the texts in the body")


def body_too_large(limit: int) -> BodyTooLarge:
    """The error for a body over the limit of `limit` bytes."""
    return BodyTooLarge(f"the body is over {limit} bytes", remedy="Send fewer or shorter texts in one request")


class CachedHead:
    """One head, split at the digits of its content-length."""

    __slots__ = ("_after", "_before", "_request")

    def __init__(self, before: bytes, after: bytes, request: Request) -> None:
        """Use `of`."""
        self._before = before
        self._after = after
        self._request = request

    @classmethod
    def of(cls, data: bytes, request: Request) -> CachedHead | None:
        """The head that `data` begins with, from which `request` was parsed and admitted.

        None where requests with this head may differ in more than the length, or where the end of the request does not
        follow from the length alone.
        """
        headers = request.headers
        length = headers.get(CONTENT_LENGTH, b"")
        if (
            request.route is None
            or not request.keep_alive
            or b"transfer-encoding" in headers
            or b"expect" in headers
            or b"x-request-id" in headers
            or b"upgrade" in headers
        ):
            return None
        head, end, _ = data.partition(b"\r\n\r\n")
        # With other line ends the parser may find another end of the head.
        if not end or head.count(b"\n") != head.count(b"\r\n"):
            return None
        _, line, rest = head.lower().partition(b"\r\n%b:" % CONTENT_LENGTH)
        start = len(head) - len(rest) + rest.find(length)
        before, after = data[:start], data[start + len(length) : len(head) + len(end)]
        is_only_digits = line and length.isdigit() and after.startswith(b"\r\n") and not before.endswith(b"\n")
        # A copy without the body, which may be large: the cached head lives as long as the connection.
        return cls(before, after, request.copy_head(length)) if is_only_digits else None

    def read(self, data: bytes) -> tuple[Request, bytes] | None:
        """The request and its body, if `data` is this head and a complete body; else None."""
        before, after = self._before, self._after
        if not data.startswith(before):
            return None
        start = len(before)
        end = data.find(b"\r", start, start + MAX_LENGTH_DIGITS + 1)
        if end < 0 or not data.startswith(after, end):
            return None
        length = data[start:end]
        body = data[end + len(after) :]
        if not body or not length.isdigit() or int(length) != len(body):
            return None
        return self._request.copy_head(length), body


class HeadCache:
    """The head of the last request of one connection, if it was received in one piece."""

    __slots__ = ("_data", "_head", "_version")

    def __init__(self) -> None:
        self._head: CachedHead | None = None
        self._data = b""
        """The piece being parsed, if a request begins with it and its head is not complete yet."""
        self._version = 0

    def read(self, data: bytes, version: int = 0) -> tuple[Request, bytes] | None:
        """As `CachedHead.read`, for data that arrives between two requests. None: the data is to be parsed.

        `version`: of the rules of admission; a head that another version admitted is not used.
        """
        if version != self._version:
            self._version = version
            self._head = None
        found = None if self._head is None else self._head.read(data)
        self._data = data if found is None else b""
        return found

    def store(self, request: Request | None) -> None:
        """Cache the head of a parsed and admitted request; None: the head may not be cached."""
        data, self._data = self._data, b""
        self._head = None if request is None else CachedHead.of(data, request)


EVENT_STREAM = b"text/event-stream"


class StreamingResponse(Response):
    """A response with a body that is made while it is sent: server-sent events, or lines."""

    __slots__ = ("stream",)

    def __init__(self, stream: ByteStream, content_type: bytes = EVENT_STREAM) -> None:
        # Proxies such as nginx would otherwise collect the events.
        super().__init__(content_type=content_type, headers=b"cache-control: no-cache\r\nx-accel-buffering: no\r\n")
        self.stream = stream


def encode(response: Response, request: Request, date: bytes, *, close: bool) -> bytes:
    """The bytes on the wire; of a streaming response its head.

    The response to HEAD has the length of the body but not the body. `close`: the connection is closed after it.
    """
    status = response.status
    parts = [STATUS_LINES[status]]
    has_body = status not in {204, 304}
    if isinstance(response, StreamingResponse):
        has_body = False
        framing = b"transfer-encoding: chunked\r\n" if request.chunked else b""
        parts.append(b"content-type: %b\r\n%b" % (response.content_type, framing))
        close = close or not request.chunked
    elif has_body:
        parts.append(b"content-type: %b\r\ncontent-length: %d\r\n" % (response.content_type, len(response.body)))
    parts.append(response.headers)
    if request.identifier:
        parts.append(b"x-request-id: %b\r\n" % request.identifier)
    if close:
        parts.append(b"connection: close\r\n")
    elif request.keep_alive_by_header:
        parts.append(b"connection: keep-alive\r\n")
    parts.append(b"date: %b\r\n\r\n" % date)
    if has_body and request.method != "HEAD":
        parts.append(response.body)
    return b"".join(parts)


Handler = Callable[[Request], Response] | Callable[[Request], Awaitable[Response]]


class ErrorFormat(StrEnum):
    """The format of a route's errors."""

    PENSTOCK = "penstock"
    """{"error", "error_type", "field"?, "remedy"?}; clients of TEI and v2 read it as well."""
    OPENAI = "openai"
    """{"error": {"message", "type", "param", "code"}}"""
    ANTHROPIC = "anthropic"
    """{"type": "error", "error": {"type", "message"}}"""


class Internal(StrEnum):
    """Whether the internal port serves a route, if the server has one."""

    NO = "no"
    TOO = "too"
    """Both ports do."""
    ONLY = "only"


@dataclass(frozen=True, slots=True, eq=False)
class Route:
    """One method on one path, with its entry in the OpenAPI document."""

    method: str
    path: str
    """Such as `/v2/models/{name}`."""
    handler: Handler
    summary: str
    tag: str
    tasks: frozenset[TaskName] | None = None
    """The tasks that have this route; None: all."""
    inference: bool = False
    """Runs the model: its duration counts towards the objective."""
    classifies: bool = False
    """For gateways of language models: counted by what became of the request."""
    guards: bool = False
    """Answers with verdicts: errors as by `errors.for_gateway`; the token may also be in x-api-key."""
    public: bool = False
    """Needs no token."""
    internal: Internal = Internal.NO
    error_format: ErrorFormat = ErrorFormat.PENSTOCK
    request: Mapping[str, Any] | None = None
    """JSON schema of the body; None: there is no body."""
    example: Any = None
    response: Mapping[str, Any] = field(default_factory=dict)
    """JSON schema of the 200 answer."""
    content_type: str = "application/json"
    streams: bool = False
    """Its 200 response is a stream if the request wants it."""
    stream_type: str = EVENT_STREAM.decode()
    """The content type of that."""
    binary: bool = False
    """Its 200 response is application/octet-stream if the request wants it."""
    errors: tuple[type[RequestError], ...] = ()
    """Errors that its handler may raise, in addition to the errors of all routes."""

    @property
    def label(self) -> str:
        """In metrics and logs."""
        return self.path
