"""The head of a request that has come before. Who keeps a connection sends the same head with each request, but for the
length of its body: what was read and judged once holds for the next.

Only what is equal byte for byte is taken for the same, so that nothing is read otherwise than by the parser.
"""

from __future__ import annotations

from penstock_runtime.http.transport.message import Request

NAME = b"content-length"
MOST_DIGITS = 12
"""Of a length."""


class FamiliarHead:
    """One head, around the digits of its length."""

    __slots__ = ("_after", "_before", "_request")

    def __init__(self, before: bytes, after: bytes, request: Request) -> None:
        """Use `of`."""
        self._before = before
        self._after = after
        self._request = request

    @classmethod
    def of(cls, data: bytes, request: Request) -> FamiliarHead | None:
        """The head that `data` begins with, from which `request` was read and admitted.

        None where more than the length may differ from one request to the next, or what follows the head does not
        depend on that alone.
        """
        headers = request.headers
        length = headers.get(NAME, b"")
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
        # Of lines that end otherwise, this may be another end than the parser's.
        if not end or head.count(b"\n") != head.count(b"\r\n"):
            return None
        _, line, rest = head.lower().partition(b"\r\n%b:" % NAME)
        start = len(head) - len(rest) + rest.find(length)
        before, after = data[:start], data[start + len(length) : len(head) + len(end)]
        is_only_digits = line and length.isdigit() and after.startswith(b"\r\n") and not before.endswith(b"\n")
        # One without a body: the request's own may be large, and this stays as long as the connection.
        return cls(before, after, request.again(length)) if is_only_digits else None

    def read(self, data: bytes) -> tuple[Request, bytes] | None:
        """A request and its body, where `data` is this head and all of the body; None otherwise."""
        before, after = self._before, self._after
        if not data.startswith(before):
            return None
        start = len(before)
        end = data.find(b"\r", start, start + MOST_DIGITS + 1)
        if end < 0 or not data.startswith(after, end):
            return None
        length = data[start:end]
        body = data[end + len(after) :]
        if not body or not length.isdigit() or int(length) != len(body):
            return None
        return self._request.again(length), body


class LastHead:
    """What one connection remembers: the head of its last request, if that came in one piece."""

    __slots__ = ("_head", "_piece")

    def __init__(self) -> None:
        self._head: FamiliarHead | None = None
        self._piece = b""
        """Which is being parsed, if a request begins with it whose head has not been seen yet."""

    def read(self, data: bytes) -> tuple[Request, bytes] | None:
        """As `FamiliarHead.read`, of a piece that comes between two requests. None: it is to be parsed."""
        found = None if self._head is None else self._head.read(data)
        self._piece = data if found is None else b""
        return found

    def remember(self, request: Request | None) -> None:
        """A head was parsed: whose request was admitted, or None where that says nothing of the next one."""
        piece, self._piece = self._piece, b""
        self._head = None if request is None else FamiliarHead.of(piece, request)
