"""Heads of requests: the checks that the parser leaves out, and a cache of the last head of a connection.

A client that keeps its connection sends the same head with each request, except for the length of the body: a head that
was parsed and checked once need not be parsed again. The cache compares byte for byte, so that no request is
interpreted differently from what the parser would make of it.
"""

from __future__ import annotations

from collections.abc import Mapping

import httptools

from penstock_runtime.errors import BodyTooLarge, HeadersTooLarge, MalformedRequest
from penstock_runtime.http.transport.message import Request

IDENTIFIER_LIMIT = 128
"""Bytes of an x-request-id header that is accepted."""
VERSIONS = frozenset({"1.0", "1.1"})
CONTENT_LENGTH = b"content-length"
MAX_LENGTH_DIGITS = 12
"""Digits of a content-length in a cached head."""


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
    request.identifier = accepted_identifier(headers)


def accepted_identifier(headers: Mapping[bytes, bytes]) -> bytes:
    """The client's name of the request; empty if it has none, or one that is too long for logs and headers."""
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

        `version`: of what the request was admitted by; a head of another one is not used.
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
