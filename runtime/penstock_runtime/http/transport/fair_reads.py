"""Fair reads: no client address delays another one by sending much at once, or by sending requests in tiny pieces.

The event loop runs callbacks in the order of their events. A client with hundreds of connections would get hundreds of
them between two of another client. So the work that one address can cause within one iteration of the loop is limited,
and the rest waits in a queue in which addresses have equal shares of the time of the loop.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Protocol

from penstock_runtime.admission import FairShares

if TYPE_CHECKING:
    from penstock_runtime.http.transport.connection import Connection
    from penstock_runtime.http.transport.pool import ConnectionPool

SLICE_SECONDS = 0.0003
"""How long one iteration of the event loop parses and starts requests as they arrive, and how long it works on the
queue. A request takes 0.03 to 0.2 ms."""
SECONDS_PER_BYTE = 1e-8
"""About: to parse data, and the JSON of a body."""
PIECE_BYTES = 1024
"""Parsed at a time, unless it belongs to a body of known length: up to thirty requests, some 1.5 ms."""
TINY_BYTES = 512
"""A smaller piece of a request costs more than it brings. A full segment of a network has some 1,400 bytes."""
MOST_CREDIT = 4
READS = 4
"""Connections of one address that are read at a time while their requests arrive in tiny pieces."""
READ_SECONDS = 0.02
"""Between two reads of such a connection; everything that has arrived in between is read at once."""


class QueuedCall:
    """A call that waits in a `FairQueue`."""

    __slots__ = ("seconds", "start")

    def __init__(self, start: Callable[[], None], seconds: float) -> None:
        """`seconds`: about how long it takes."""
        self.start: Callable[[], None] | None = start
        self.seconds = seconds

    def cancel(self) -> None:
        """Do not start it."""
        self.start = None


class FairQueue:
    """Data to parse and requests to start, by client address. Next is the address that has had the least time."""

    def __init__(self, loop: asyncio.AbstractEventLoop, clock: Callable[[], float] = time.perf_counter) -> None:
        """`clock`: seconds, to measure the calls."""
        self._loop = loop
        self._clock = clock
        self._shares = FairShares()
        self._spent_seconds = 0.0
        """On data that was parsed without waiting, in this iteration of the loop."""
        self._waiting: dict[str, deque[QueuedCall]] = {}
        """By address. Of those with the same time the first is served next."""

    def is_free(self) -> bool:
        """Nothing waits, and this iteration of the loop has time for more: data may be parsed at once."""
        return not self._waiting and self._spent_seconds < SLICE_SECONDS

    def run_now(self, client: str, call: Callable[[], None]) -> None:
        """Make the call of an address while the queue is free, and count its time."""
        begin = self._clock()
        call()
        seconds = self._clock() - begin
        if not self._spent_seconds:
            self._loop.call_soon(self._begin_iteration)
        self._spent_seconds += seconds
        self._shares.charge(self._shares.next({client: 0.0}), seconds)

    def _begin_iteration(self) -> None:
        self._spent_seconds = 0.0

    def add(self, client: str, start: Callable[[], None], size: int = 0) -> QueuedCall:
        """Call `start` in another iteration of the loop. It may add calls. `size`: bytes that it parses."""
        call = QueuedCall(start, size * SECONDS_PER_BYTE)
        queue = self._waiting.get(client)
        if queue is None:
            queue = self._waiting[client] = deque()
            if len(self._waiting) == 1:
                self._loop.call_soon(self._run)
        queue.append(call)
        return call

    def _run(self) -> None:
        now = self._clock()
        end = now + SLICE_SECONDS
        for _ in range(sum(map(len, self._waiting.values()))):
            client = self._shares.next({client: queue[0].seconds for client, queue in self._waiting.items()})
            queue = self._waiting[client]
            start = queue.popleft().start
            if start is not None:
                start()
            del self._waiting[client]
            if queue:
                self._waiting[client] = queue
            begin, now = now, self._clock()
            self._shares.charge(client, now - begin)
            if now >= end:
                break
        if self._waiting:
            self._loop.call_soon(self._run)


class PieceCredit:
    """How many more tiny pieces a connection may receive before its reads are limited.

    The first piece of a request is free, since many clients send headers and body in two. Pieces of some size earn
    credit for a few tiny ones, such as the lines between chunks.
    """

    __slots__ = ("_left",)

    def __init__(self) -> None:
        self._left = 1

    def pays(self, piece_bytes: int) -> bool:
        """Count a piece that did not complete its request; false if it is one too many."""
        self._left = min(self._left + piece_bytes // TINY_BYTES, MOST_CREDIT) - 1
        if self._left >= 0:
            return True
        self._left = 0
        return False


class PausableReader(Protocol):
    """A connection, as its reads are limited."""

    def pause_reading(self) -> None:
        """Leave further data in the kernel."""
        ...

    def resume_reading(self) -> None:
        """Read again."""
        ...


class LimitedReads:
    """Connections that receive requests in tiny pieces: of each client address, at most `READS` are read at a time, and
    each of them once in `READ_SECONDS`. So the cost does not grow with the number of connections and pieces."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._clients: dict[str, _Readers] = {}
        self._timer: asyncio.TimerHandle | None = None

    def wait(self, client: str, reader: PausableReader) -> None:
        """Stop reading a connection until the next interval."""
        readers = self._clients.setdefault(client, _Readers())
        readers.reading.pop(reader, None)
        readers.waiting[reader] = None
        reader.pause_reading()
        if self._timer is None:
            self._timer = self._loop.call_later(READ_SECONDS, self._read_next)

    def leave(self, client: str, reader: PausableReader) -> None:
        """The request is complete, or the connection has ended."""
        readers = self._clients.get(client)
        if readers is None:
            return
        readers.reading.pop(reader, None)
        if reader in readers.waiting:
            del readers.waiting[reader]
            reader.resume_reading()
        if not readers.reading and not readers.waiting:
            del self._clients[client]

    def _read_next(self) -> None:
        self._timer = None
        for readers in self._clients.values():
            readers.read_next()
        if any(readers.waiting for readers in self._clients.values()):
            self._timer = self._loop.call_later(READ_SECONDS, self._read_next)


class _Readers:
    """The connections of one address with limited reads, each group in the order of time."""

    __slots__ = ("reading", "waiting")

    def __init__(self) -> None:
        self.reading: dict[PausableReader, None] = {}
        self.waiting: dict[PausableReader, None] = {}

    def read_next(self) -> None:
        """Read the ones that have waited longest, instead of the ones from which nothing came."""
        chosen = tuple(self.waiting)[:READS]
        for reader in tuple(self.reading)[: max(0, len(self.reading) + len(chosen) - READS)]:
            del self.reading[reader]
            self.waiting[reader] = None
            reader.pause_reading()
        for reader in chosen:
            del self.waiting[reader]
            self.reading[reader] = None
            reader.resume_reading()


class FairReader:
    """Gives a connection the data that its socket has received: in pieces of limited size, through the fair queue."""

    __slots__ = ("_connection", "_credit", "_pool", "_queued", "unparsed")

    def __init__(self, connection: Connection, pool: ConnectionPool) -> None:
        self._connection = connection
        self._pool = pool
        self._credit: PieceCredit | None = None
        """Of a request that has arrived in part."""
        self.unparsed = b""
        """Received; waits in the queue."""
        self._queued: QueuedCall | None = None

    @property
    def is_waiting(self) -> bool:
        """Data waits in the queue."""
        return self._queued is not None

    def receive(self, data: bytes) -> None:
        """Bytes have arrived."""
        queue = self._pool.queue
        if queue.is_free() or not self._wait(data):
            queue.run_now(self._connection.client.key, partial(self._read, data))

    def _read(self, data: bytes) -> None:
        connection = self._connection
        while data and not connection.receive_request(data):
            size = max(PIECE_BYTES, connection.missing_bytes())
            connection.receive(data[:size])
            data = data[size:]
            if data and not connection.missing_bytes() and self._wait(data):
                return

    def _wait(self, data: bytes) -> bool:
        """Queue the data, and receive nothing more until it is parsed; false when there is no memory for it."""
        connection = self._connection
        connection.memory.add(len(data))
        if not self._pool.make_room(connection):
            connection.memory.add(-len(data))
            return False
        self.unparsed = data
        self._queued = self._pool.queue.add(connection.client.key, self._read_unparsed, connection.memory.bytes)
        self.pause_reading()
        return True

    def _read_unparsed(self) -> None:
        data, self.unparsed = self.unparsed, b""
        self._connection.memory.add(-len(data))
        self._queued = None
        self.resume_reading()
        self._read(data)

    def count_piece(self, size: int) -> None:
        """A piece did not complete its request: if such pieces are tiny, the reads of the connection are limited."""
        if self._credit is None:
            self._credit = PieceCredit()
        if not self._credit.pays(size):
            self._pool.limited_reads.wait(self._connection.client.key, self)

    def end_request(self) -> None:
        """A request is complete: read the next one without a delay."""
        if self._credit is not None:
            self._credit = None
            self._pool.limited_reads.leave(self._connection.client.key, self)

    def end(self) -> None:
        """Drop everything that has not been parsed, and release the memory of the connection."""
        self.unparsed = b""
        self._connection.memory.clear()
        if self._queued is not None:
            self._queued.cancel()
        self._pool.limited_reads.leave(self._connection.client.key, self)

    def pause_reading(self) -> None:
        """Leave further data in the kernel."""
        if self._connection.transport is not None:
            self._connection.transport.pause_reading()

    def resume_reading(self) -> None:
        """Read again, unless enough requests wait already."""
        if self._connection.transport is not None and not self._connection.pipeline.is_paused:
            self._connection.transport.resume_reading()
