"""Requests, responses and routes as values; no input or output."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from http import HTTPStatus
from typing import Any

from penstock.tasks import TaskName
from penstock_runtime.errors import RequestError
from penstock_runtime.http.transport.streaming import ByteStream

STATUS_LINES = {status.value: f"HTTP/1.1 {status.value} {status.phrase}\r\n".encode() for status in HTTPStatus}
JSON = b"application/json"


class Request:
    """One request. `headers` has lower-case names; a repeated header's values are joined with a comma."""

    __slots__ = (
        "address",
        "body",
        "caller",
        "chunked",
        "client",
        "headers",
        "identifier",
        "keep_alive",
        "keep_alive_by_header",
        "method",
        "parameters",
        "path",
        "query",
        "received",
        "refusal",
        "route",
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
        """Whose share of the limits it counts to: the client's address, or its network."""
        self.address = ""
        """The client's address, for the access log."""
        self.token = ""
        """Name of its bearer token; empty if it needs none, or has none that is accepted."""
        self.received = 0.0
        """When the last byte arrived, `time.perf_counter` seconds."""
        self.route: Route | None = None
        self.parameters: dict[str, str] = {}
        """Of the path, such as `name` in /v2/models/{name}."""
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


EVENT_STREAM = b"text/event-stream"


class StreamingResponse(Response):
    """A response whose body is made while it is sent: server-sent events."""

    __slots__ = ("stream",)

    def __init__(self, stream: ByteStream) -> None:
        # Proxies such as nginx would otherwise collect the events.
        super().__init__(content_type=EVENT_STREAM, headers=b"cache-control: no-cache\r\nx-accel-buffering: no\r\n")
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
    """Its 200 response is text/event-stream if the request asks for it."""
    binary: bool = False
    """Its 200 response is application/octet-stream if the request asks for it."""
    errors: tuple[type[RequestError], ...] = ()
    """Errors that its handler may raise, in addition to those of all routes."""

    @property
    def label(self) -> str:
        """In metrics and logs."""
        return self.path
