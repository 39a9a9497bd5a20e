"""Requests and responses as values. Knows nothing of sockets, routes or models."""

from __future__ import annotations

from http import HTTPStatus
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penstock_runtime.errors import RequestError
    from penstock_runtime.http.routes import Route

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
