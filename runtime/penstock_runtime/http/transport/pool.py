"""What all connections of a server share: settings, limits, the memory in use, request identifiers, the pipelines.

The listener is the pool that accepts connections; a connection knows the pool only.

Connections and memory are shared between client addresses: one address may take `per_client_share` of them, and when
they run out, the address with the most gives way. So a client is served however much other clients hold.
"""

from __future__ import annotations

import asyncio
import ipaddress
import itertools
import math
import random
import resource
import secrets
from collections import OrderedDict, deque
from collections.abc import Callable
from enum import Enum
from typing import Protocol

from penstock_runtime.errors import RequestError
from penstock_runtime.http.transport.fair_reads import FairQueue, LimitedReads
from penstock_runtime.http.transport.message import Request, Response
from penstock_runtime.settings import HttpSettings

SPARE_OPEN_FILES = 256
"""Open files for other uses than connections: the model, the event loop, connections that are being refused, the
internal port."""
REFUSED_CONNECTIONS = 64
"""Connections over the limit that get an error response at the same time; further ones are cut off."""
UPLOAD_SECONDS = 10.0
"""Interval between two checks of the rate of a body: longer than a lost packet delays it."""
LEAST_UPLOAD_SECONDS = 0.05
"""A body that has just begun is not slow yet."""
MAX_LOOKS = 256
"""Connections of an address that are looked at to find the one to close. To look at all of some thousands would take
longer than to accept the new one."""
PIPELINE_BYTES = 32 * 2**10
"""How much is read ahead of the request that is being answered. Reading may not stop earlier: only a connection that is
read shows that its client has disconnected."""


class PendingResponse(Protocol):
    """A response that its handler has not made yet."""

    def resume(self, loop: asyncio.AbstractEventLoop, done: Callable[[Response], None]) -> None:
        """Continue the handler in a task, which calls `done` with the response."""
        ...

    def cancel(self) -> None:
        """The client has disconnected: end the handler."""
        ...


class RequestHandler(Protocol):
    """The application, as a connection uses it."""

    def admit(self, request: Request, body_bytes: int | None) -> None:
        """Check a request by its headers (None: length unknown); raise RequestError to refuse it."""
        ...

    def answer(self, request: Request) -> Response | PendingResponse:
        """The response. Never raises."""
        ...

    def refuse(self, request: Request | None, error: RequestError) -> Response:
        """The response to a request that is not answered; None when it could not even be parsed."""
        ...

    @property
    def body_limit(self) -> int:
        """Bytes."""
        ...

    @property
    def admission_version(self) -> int:
        """Changes when a request that was admitted before may be refused now."""
        ...


class ConnectionState(Enum):
    """The event that a connection waits for: decides the meaning of its deadline."""

    IDLE = "idle"
    HEAD = "head"
    BODY = "body"
    ANSWER = "answer"
    LINGER = "linger"
    """The request was refused; further data is dropped."""


class PooledConnection(Protocol):
    """A connection, as the pool uses it."""

    transport: asyncio.Transport | None
    client: ClientShare

    @property
    def is_idle(self) -> bool:
        """No request is being received or answered, and all answers are sent."""
        ...

    @property
    def waits_for_client(self) -> bool:
        """The server has nothing to do for it until its client sends or reads more."""
        ...

    def transfer_rate(self, now: float) -> float | None:
        """Bytes per second of the body that it receives, 0 if it holds answers that its client does not read; None
        while a request is answered. For a connection that holds bytes."""
        ...

    def evict(self) -> None:
        """Close it at once, to make room for another client."""
        ...

    def sweep(self, now: float) -> None:
        """Act on a deadline that has passed."""
        ...

    def close_if_idle(self) -> bool:
        """Close the connection if no request is in progress; false if one is."""
        ...


class ClientShare:
    """The share of the limits that the connections of one client address take."""

    __slots__ = ("connections", "held_bytes", "holders", "key")

    def __init__(self, key: str) -> None:
        self.key = key
        self.connections: OrderedDict[PooledConnection, None] = OrderedDict()
        """In the order in which they are checked: first by their opening, then by the last check."""
        self.holders: set[PooledConnection] = set()
        """Those that hold bytes."""
        self.held_bytes = 0

    def idle_connection(self) -> PooledConnection | None:
        """One without a request; see `_first`."""
        return self._first(lambda one: one.is_idle)

    def waiting_connection(self) -> PooledConnection | None:
        """One that waits for its client; see `_first`."""
        return self._first(lambda one: one.waits_for_client)

    def _first(self, fits: Callable[[PooledConnection], bool]) -> PooledConnection | None:
        """The first of the next `MAX_LOOKS` connections that fits. Those before it are looked at last the next time."""
        for _ in range(min(len(self.connections), MAX_LOOKS)):
            one = next(iter(self.connections))
            if fits(one):
                return one
            self.connections.move_to_end(one)
        return None

    def slowest_connection(self, now: float) -> PooledConnection | None:
        """Of `MAX_LOOKS` that hold bytes, the one that waits for its client and transfers the fewest per second."""
        some = itertools.islice(self.holders, MAX_LOOKS)
        rates = ((rate, one) for one in some if (rate := one.transfer_rate(now)) is not None)
        return min(rates, key=lambda pair: pair[0], default=(0.0, None))[1]


def client_key(address: str) -> str:
    """What connections are counted by: the address, or the /64 network of an IPv6 address, since one client may have
    all of such a network."""
    if ":" not in address:
        return address
    try:
        found = ipaddress.IPv6Address(address.partition("%")[0])
    except ValueError:
        return address
    if found.ipv4_mapped is not None:
        return str(found.ipv4_mapped)
    return str(ipaddress.IPv6Network((int(found) >> 64 << 64, 64)))


class ConnectionPool:
    """The open connections, their limits and their total memory."""

    def __init__(self, application: RequestHandler, settings: HttpSettings) -> None:
        self.application = application
        self.settings = settings
        self.loop = asyncio.get_running_loop()
        self.connections: set[PooledConnection] = set()
        self.max_connections = raise_open_file_limit(settings.max_connections)
        share = settings.per_client_share
        self._client_connections = max(1, int(share * self.max_connections))
        self._client_bytes = share * settings.max_held_bytes
        self._clients: dict[str, ClientShare] = {}
        self.queue = FairQueue(self.loop)
        self.limited_reads = LimitedReads(self.loop)
        self.draining = False
        """From now on the server closes each connection with its next response."""
        self.held_bytes = 0
        """Bodies and unsent responses of all connections."""
        self.date = b""
        """For the `date` header, renewed twice a second."""
        self._identifier_prefix = secrets.token_hex(4).encode()
        self._identifiers = itertools.count(1)
        self._empty: asyncio.Event | None = None

    def client(self, address: str) -> ClientShare:
        """The account of a client address."""
        key = client_key(address)
        found = self._clients.get(key)
        if found is None:
            found = self._clients[key] = ClientShare(key)
        return found

    def add(self, connection: PooledConnection) -> bool:
        """Count a new connection, and close another one if there are too many; false when that is not possible."""
        client = connection.client
        before = len(client.connections)
        client.connections[connection] = None
        self.connections.add(connection)
        if before >= self._client_connections:
            victim = client.idle_connection()
        elif len(self.connections) > self.max_connections:
            victim = self._connection_to_close(before)
        else:
            return True
        if victim is None or victim is connection:
            return False
        victim.evict()
        return True

    def _connection_to_close(self, newcomer_has: int) -> PooledConnection | None:
        """An idle connection of the address with the most; of an address with more than the newcomer will have, also
        one that waits for its client. None: all are busy, or their addresses have no more."""
        for other in sorted(self._clients.values(), key=lambda one: len(one.connections), reverse=True):
            if len(other.connections) <= newcomer_has:
                break
            found = other.idle_connection()
            if found is None and len(other.connections) > newcomer_has + 1:
                found = other.waiting_connection()
            if found is not None:
                return found
        return None

    @property
    def refuses_silently(self) -> bool:
        """Too many refused connections are open to answer another one."""
        return len(self.connections) > self.max_connections + REFUSED_CONNECTIONS

    def make_room(self, connection: PooledConnection) -> bool:
        """After bytes were added: whether the connection may keep its bytes. Closes slower connections of the
        address that holds the most, if there is too little memory."""
        own = connection.client
        limit = self.settings.max_held_bytes
        while own.held_bytes > self._client_bytes or self.held_bytes > limit:
            if own.held_bytes > self._client_bytes:
                candidates = [own]
            else:
                holders = (one for one in self._clients.values() if one.held_bytes >= own.held_bytes)
                candidates = sorted(holders, key=lambda one: one.held_bytes, reverse=True)
            now = self.loop.time()
            victim = next((found for one in candidates if (found := one.slowest_connection(now)) is not None), None)
            if victim is None or victim is connection:
                return False
            victim.evict()
        return True

    def remove(self, connection: PooledConnection) -> None:
        """A connection has ended."""
        self.connections.discard(connection)
        client = connection.client
        client.connections.pop(connection, None)
        if not client.connections:
            self._clients.pop(client.key, None)
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

    __slots__ = ("_client", "_connection", "_pool", "_unsent_bytes", "bytes")

    def __init__(self, pool: ConnectionPool, client: ClientShare, connection: PooledConnection) -> None:
        self._pool = pool
        self._client = client
        self._connection = connection
        self.bytes = 0
        """All of them."""
        self._unsent_bytes = 0

    def add(self, count: int) -> None:
        """Count bytes of bodies; negative for bytes that are released."""
        if not count:
            return
        self.bytes += count
        self._client.held_bytes += count
        if not self.bytes:
            self._client.holders.discard(self._connection)
        elif self.bytes == count:
            self._client.holders.add(self._connection)
        self._pool.held_bytes += count

    def update_unsent(self, transport: asyncio.Transport | None) -> bool:
        """Read how many bytes are still to be sent; true when there are fewer than at the last call."""
        before = self._unsent_bytes
        self._unsent_bytes = 0 if transport is None else transport.get_write_buffer_size()
        self.add(self._unsent_bytes - before)
        return self._unsent_bytes < before

    def clear(self) -> None:
        """The connection has ended."""
        self.add(-self.bytes)
        self._unsent_bytes = 0


class UploadRate:
    """How fast the body of one request arrives. Times in the loop's seconds; `body_bytes`: received until then."""

    __slots__ = ("_marked", "_marked_bytes")

    def __init__(self) -> None:
        self.mark(0.0, 0)

    def mark(self, now: float, body_bytes: int) -> None:
        """Measure from here on."""
        self._marked = now
        self._marked_bytes = body_bytes

    def rate(self, now: float, body_bytes: int) -> float:
        """Bytes per second since the mark."""
        return (body_bytes - self._marked_bytes) / max(now - self._marked, LEAST_UPLOAD_SECONDS)

    def is_enough(self, now: float, body_bytes: int, least: float) -> bool:
        """False when less than `least` bytes a second arrived in the last `UPLOAD_SECONDS`."""
        if now - self._marked < UPLOAD_SECONDS:
            return True
        enough = self.rate(now, body_bytes) >= least
        self.mark(now, body_bytes)
        return enough


class Pipeline(deque[Request]):
    """Complete requests of one client that wait for the responses to earlier ones, in order."""

    __slots__ = ("is_paused", "read_bytes")

    def __init__(self) -> None:
        super().__init__()
        self.read_bytes = 0
        """Received since the first of them."""
        self.is_paused = False
        """So much of them that the connection is not read."""

    def add(self, request: Request, transport: asyncio.Transport | None) -> None:
        """Append a request; pause reading when the client has sent more than `PIPELINE_BYTES` ahead."""
        self.append(request)
        if self.read_bytes > PIPELINE_BYTES and not self.is_paused and transport is not None:
            self.is_paused = True
            transport.pause_reading()

    def take(self, transport: asyncio.Transport | None) -> Request:
        """Remove the next request; resume reading after the last one."""
        request = self.popleft()
        if not self:
            self.read_bytes = 0
            if self.is_paused and transport is not None:
                self.is_paused = False
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
