"""Requests, responses and routes as values. Imports no sockets and no handlers."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from http import HTTPStatus
from typing import Any

from penstock.tasks import TaskName
from penstock_runtime.errors import RequestError

STATUS_LINES = {status.value: f"HTTP/1.1 {status.value} {status.phrase}\r\n".encode() for status in HTTPStatus}
JSON = b"application/json"


class Request:
    """One request. `headers` has lower-case names; a repeated header's values are joined with a comma."""

    __slots__ = (
        "body",
        "caller",
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
    )

    def __init__(self, method: str = "GET", target: str = "/", headers: dict[bytes, bytes] | None = None) -> None:
        path, _, query = target.partition("?")
        self.method = method
        self.path = path
        self.query = query
        self.headers: dict[bytes, bytes] = {} if headers is None else headers
        self.body = b""
        self.identifier = b""
        """x-request-id: the client's, or one of ours."""
        self.keep_alive = True
        """The connection may be used again."""
        self.keep_alive_by_header = False
        """HTTP/1.0 and a header that asks for it: the answer says so, too."""
        self.caller = 0
        """A number of the connection it came over."""
        self.received = 0.0
        """When the last byte arrived, `time.perf_counter` seconds."""
        self.route: Route | None = None
        self.parameters: dict[str, str] = {}
        """Of the path, such as `name` in /v2/models/{name}."""
        self.refusal: RequestError | None = None
        """Set while the headers were judged: the body is skipped and this is the answer."""

    def again(self, length: bytes) -> Request:
        """One with the same head, but for the length of its body: judged as this one was, and without identifier."""
        request = Request(self.method, "")
        request.path = self.path
        request.query = self.query
        request.headers = {**self.headers, b"content-length": length}
        request.keep_alive = self.keep_alive
        request.keep_alive_by_header = self.keep_alive_by_header
        request.caller = self.caller
        request.route = self.route
        request.parameters = self.parameters
        return request

    @property
    def expects_body(self) -> bool:
        """By its headers."""
        return b"transfer-encoding" in self.headers or self.headers.get(b"content-length", b"0") != b"0"

    def aim(self, target: bytes) -> None:
        """Set path and query from the target as it was sent: `/path?query`, or a whole URL."""
        text = target.decode("latin-1")
        if not text.startswith("/") and "://" in text:
            text = "/" + text.split("://", 1)[1].partition("/")[2]
        self.path, _, self.query = text.partition("#")[0].partition("?")


class Response:
    """One answer. `headers` are complete lines without those that the connection adds (length, date, connection)."""

    __slots__ = ("body", "content_type", "headers", "status")

    def __init__(
        self, body: bytes = b"", *, status: int = 200, content_type: bytes = JSON, headers: bytes = b""
    ) -> None:
        self.status = status
        self.body = body
        self.content_type = content_type
        self.headers = headers
        """Ready to send, such as b"allow: GET\\r\\nx: y\\r\\n"."""


def encode(
    response: Response, *, identifier: bytes = b"", date: bytes = b"", head_only: bool = False, connection: bytes = b""
) -> bytes:
    """The bytes on the wire.

    `head_only`: what HEAD asks for, the length of the body without the body. `connection`: `close`, `keep-alive` or
    nothing, which means to keep it.
    """
    status = response.status
    parts = [STATUS_LINES[status]]
    if status not in {204, 304}:
        parts.append(b"content-type: %b\r\ncontent-length: %d\r\n" % (response.content_type, len(response.body)))
    parts.append(response.headers)
    if identifier:
        parts.append(b"x-request-id: %b\r\n" % identifier)
    if connection:
        parts.append(b"connection: %b\r\n" % connection)
    parts.append(b"date: %b\r\n\r\n" % date)
    if not head_only and status not in {204, 304}:
        parts.append(response.body)
    return b"".join(parts)


Handler = Callable[[Request], Response] | Callable[[Request], Awaitable[Response]]


class Dialect(StrEnum):
    """Whose shape the errors of a route have."""

    PENSTOCK = "penstock"
    """{"error", "error_type", "field"?, "remedy"?}; also what TEI's and v2's clients read."""
    OPENAI = "openai"
    """{"error": {"message", "type", "param", "code"}}"""


@dataclass(frozen=True, slots=True, eq=False)
class Route:
    """One method on one path, with what the OpenAPI document says of it."""

    method: str
    path: str
    """Such as `/v2/models/{name}`."""
    handler: Handler
    summary: str
    tag: str
    tasks: frozenset[TaskName] | None = None
    """The tasks that have it; None: all."""
    inference: bool = False
    """It asks the model: its duration counts towards the objective."""
    public: bool = False
    """Answered without a token."""
    dialect: Dialect = Dialect.PENSTOCK
    request: Mapping[str, Any] | None = None
    """JSON schema of the body; None: there is no body."""
    example: Any = None
    response: Mapping[str, Any] = field(default_factory=dict)
    """JSON schema of the 200 answer."""
    content_type: str = "application/json"
    binary: bool = False
    """Its 200 answer may be application/octet-stream as well, where the request asks for it."""
    errors: tuple[type[RequestError], ...] = ()
    """What its handler may raise on top of what every request may meet."""

    @property
    def label(self) -> str:
        """In metrics and logs."""
        return self.path
