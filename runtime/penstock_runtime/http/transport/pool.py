"""What all connections of a server share: settings, limits, the memory in use, request identifiers, the pipelines.

The listener is the pool that accepts connections; a connection knows the pool only.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import random
import resource
import secrets
from collections import deque
from collections.abc import Coroutine
from typing import Any, Protocol

from penstock_runtime.errors import RequestError
from penstock_runtime.http.transport.message import Request, Response
from penstock_runtime.settings import HttpSettings

SPARE_OPEN_FILES = 128
"""Open files for other uses than connections: the model, the event loop, connections that are being refused, the
internal port."""
PIPELINE_BYTES = 32 * 2**10
"""How much is read ahead of the request that is being answered. Reading may not stop earlier: only a connection that is
read shows that its client has disconnected."""


class RequestHandler(Protocol):
    """The application, as a connection uses it."""

    def admit(self, request: Request, body_bytes: int | None) -> None:
        """Check a request by its headers (None: length unknown); raise RequestError to refuse it."""
        ...

    def answer(self, request: Request) -> Response | Coroutine[Any, Any, Response]:
        """The response. Never raises; a coroutine may be cancelled when the client disconnects."""
        ...

    def refuse(self, request: Request | None, error: RequestError) -> Response:
        """The response to a request that is not answered; None when it could not even be parsed."""
        ...

    @property
    def body_limit(self) -> int:
        """Bytes."""
        ...


class PooledConnection(Protocol):
    """A connection, as the pool uses it."""

    transport: asyncio.Transport | None

    def sweep(self, now: float) -> None:
        """Act on a deadline that has passed."""
        ...

    def close_if_idle(self) -> bool:
        """Close the connection if no request is in progress; false if one is."""
        ...


class ConnectionPool:
    """The open connections, their limits and their total memory."""

    def __init__(self, application: RequestHandler, settings: HttpSettings) -> None:
        self.application = application
        self.settings = settings
        self.loop = asyncio.get_running_loop()
        self.connections: set[PooledConnection] = set()
        self.max_connections = raise_open_file_limit(settings.max_connections)
        self.draining = False
        """From now on the server closes each connection with its next response."""
        self.held_bytes = 0
        """Bodies and unsent responses of all connections."""
        self.date = b""
        """For the `date` header, renewed twice a second."""
        self._identifier_prefix = secrets.token_hex(4).encode()
        self._identifiers = itertools.count(1)
        self._empty: asyncio.Event | None = None

    def add(self, connection: PooledConnection) -> bool:
        """Count a new connection; false when the limit is exceeded."""
        self.connections.add(connection)
        return len(self.connections) <= self.max_connections

    def remove(self, connection: PooledConnection) -> None:
        """A connection has ended."""
        self.connections.discard(connection)
        if not self.connections and self._empty is not None:
            self._empty.set()

    def expiry(self, now: float) -> float:
        """When a connection that is opened now expires: at the maximum age or up to a quarter earlier."""
        age = self.settings.connection_age_seconds
        return now + age * random.uniform(0.75, 1.0) if age else math.inf  # noqa: S311 - spreads reconnects

    def new_identifier(self) -> bytes:
        """For requests without an x-request-id header."""
        return b"%b-%x" % (self._identifier_prefix, next(self._identifiers))


class ConnectionMemory:
    """Bytes that one connection holds: request bodies, and responses that the client has not read yet."""

    __slots__ = ("_bytes", "_pool", "_unsent_bytes")

    def __init__(self, pool: ConnectionPool) -> None:
        self._pool = pool
        self._bytes = 0
        self._unsent_bytes = 0

    def add(self, count: int) -> None:
        """Count bytes of bodies; negative for bytes that are released."""
        self._bytes += count
        self._pool.held_bytes += count

    def update_unsent(self, transport: asyncio.Transport | None) -> bool:
        """Read how many bytes are still to be sent; true when there are fewer than at the last call."""
        before = self._unsent_bytes
        self._unsent_bytes = 0 if transport is None else transport.get_write_buffer_size()
        self.add(self._unsent_bytes - before)
        return self._unsent_bytes < before

    def clear(self) -> None:
        """The connection has ended."""
        self.add(-self._bytes)
        self._unsent_bytes = 0


class Pipeline(deque[Request]):
    """Complete requests of one client that wait for the responses to earlier ones, in order."""

    __slots__ = ("_is_paused", "read_bytes")

    def __init__(self) -> None:
        super().__init__()
        self.read_bytes = 0
        """Received since the first of them."""
        self._is_paused = False

    def add(self, request: Request, transport: asyncio.Transport | None) -> None:
        """Append a request; pause reading when the client has sent more than `PIPELINE_BYTES` ahead."""
        self.append(request)
        if self.read_bytes > PIPELINE_BYTES and not self._is_paused and transport is not None:
            self._is_paused = True
            transport.pause_reading()

    def take(self, transport: asyncio.Transport | None) -> Request:
        """Remove the next request; resume reading after the last one."""
        request = self.popleft()
        if not self:
            self.read_bytes = 0
            if self._is_paused and transport is not None:
                self._is_paused = False
                transport.resume_reading()
        return request


def raise_open_file_limit(connections: int) -> int:
    """How many of `connections` this process may have open at once.

    Raises the process's limit of open files as far as needed and allowed. Of a small limit, half is left for other
    files.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = connections + SPARE_OPEN_FILES
    if _is_less(soft, needed):
        soft = hard if _is_less(hard, needed) else needed
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        except (OSError, ValueError):  # a sandbox may forbid it
            soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return max(soft - SPARE_OPEN_FILES, soft // 2) if _is_less(soft, needed) else connections


def _is_less(limit: int, needed: int) -> bool:
    return limit != resource.RLIM_INFINITY and limit < needed
