"""Between connections and the application: what each asks of the other."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any, Protocol

from penstock_runtime.errors import BodyTooLarge, RequestError
from penstock_runtime.http.message import Request, Response


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


def too_large(limit: int) -> BodyTooLarge:
    """What a body over the limit is answered with."""
    return BodyTooLarge(f"the body is over {limit} bytes", remedy="Send fewer or shorter texts in one request")
