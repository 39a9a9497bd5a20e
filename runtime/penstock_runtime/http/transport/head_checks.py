"""Between connections and the application: what each asks of the other."""

from __future__ import annotations

from collections.abc import Coroutine, Mapping
from typing import Any, Protocol

import httptools

from penstock_runtime.errors import BodyTooLarge, HeadersTooLarge, MalformedRequest, RequestError
from penstock_runtime.http.transport.message import Request, Response

IDENTIFIER_LIMIT = 128
"""Bytes."""
VERSIONS = frozenset({"1.0", "1.1"})


class Answers(Protocol):
    """The application, as a connection sees it."""

    def admit(self, request: Request, body_bytes: int | None) -> None:
        """Judge a request by its headers (None: length unknown); raise RequestError to refuse it."""
        ...

    def answer(self, request: Request) -> Response | Coroutine[Any, Any, Response]:
        """The response. Never raises; a coroutine may be cancelled when the client goes."""
        ...

    def refuse(self, request: Request | None, error: RequestError) -> Response:
        """The response to a request that is not answered; None when it could not even be read."""
        ...

    @property
    def body_limit(self) -> int:
        """Bytes."""
        ...


def read_head(request: Request, parser: httptools.HttpRequestParser, version: str, url: bytes) -> None:
    """Set what the head of a request says; its identifier stays empty where the client gave none that is fit."""
    request.method = parser.get_method().decode("ascii")
    request.keep_alive = parser.should_keep_alive()
    request.aim(url)
    headers = request.headers
    if version == "1.0":
        request.keep_alive_by_header = request.keep_alive
        headers.pop(b"expect", None)  # such a client knows no interim answer
    identifier = headers.get(b"x-request-id", b"")
    if len(identifier) <= IDENTIFIER_LIMIT and identifier.isascii():
        request.identifier = identifier


def check_head(headers: Mapping[bytes, bytes], version: str) -> None:
    """MalformedRequest for what RFC 9112 has refused and the parser lets pass: other versions than 1.0 and 1.1, no
    host or two, a body that is coded in other ways than in chunks, or in chunks of HTTP/1.0."""
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


def not_http(piece: bytes, error: Exception) -> MalformedRequest:
    """What the parser does not take is answered with; `piece`: where it came."""
    is_tls = piece.startswith(b"\x16")
    return MalformedRequest(
        f"this is not HTTP/1.1: {error}", remedy="Speak HTTP/1.1, not TLS" if is_tls else "Speak HTTP/1.1"
    )


def headers_too_large(limit: int) -> HeadersTooLarge:
    """What headers over the limit are answered with."""
    return HeadersTooLarge(f"the headers are over {limit} bytes", remedy="Send the texts in the body")


def too_large(limit: int) -> BodyTooLarge:
    """What a body over the limit is answered with."""
    return BodyTooLarge(f"the body is over {limit} bytes", remedy="Send fewer or shorter texts in one request")
