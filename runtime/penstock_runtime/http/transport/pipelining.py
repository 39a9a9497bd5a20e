"""What a pipelining client has sent ahead: requests that wait for the answers before theirs."""

from __future__ import annotations

import asyncio
from collections import deque

from penstock_runtime.http.transport.message import Request

MOST_BYTES = 32 * 2**10
"""A client is read so far ahead of the request that is being answered. Not less: only who reads sees that a client has
gone."""


class Ahead(deque[Request]):
    """Whole requests of one client, in order."""

    __slots__ = ("_is_paused", "read_bytes")

    def __init__(self) -> None:
        super().__init__()
        self.read_bytes = 0
        """Came since the first of them."""
        self._is_paused = False

    def add(self, request: Request, transport: asyncio.Transport | None) -> None:
        """One more; the client is not read any more where it has sent enough."""
        self.append(request)
        if self.read_bytes > MOST_BYTES and not self._is_paused and transport is not None:
            self._is_paused = True
            transport.pause_reading()

    def take(self, transport: asyncio.Transport | None) -> Request:
        """The next; the client is read again with the last."""
        request = self.popleft()
        if not self:
            self.read_bytes = 0
            if self._is_paused and transport is not None:
                self._is_paused = False
                transport.resume_reading()
        return request
