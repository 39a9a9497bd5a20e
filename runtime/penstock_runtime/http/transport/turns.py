"""Turns of client addresses: for what arrives together, and for requests that arrive in tiny pieces.

The event loop runs callbacks in the order of their events. A client with hundreds of connections would get hundreds of
them between two of another client. So the work that one address can cause within one iteration of the loop is limited,
and what is over the limit waits until other addresses have had their turn.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from typing import Protocol

TURN_SECONDS = 0.0003
"""How long one iteration of the event loop parses and starts requests as they come, and how long it takes turns. A
request takes 0.03 to 0.2 ms."""
TINY_BYTES = 512
"""A smaller piece of a request costs more than it brings. A full segment of a network has some 1,400 bytes."""
MOST_CREDIT = 4
READS = 4
"""Connections of one address that are read at a time while their requests arrive in tiny pieces."""
READ_SECONDS = 0.02
"""Between two reads of such a connection; what has arrived meanwhile is read at once."""


class QueuedTurn:
    """Data or a request that waits for its turn."""

    __slots__ = ("start",)

    def __init__(self, start: Callable[[], None]) -> None:
        self.start: Callable[[], None] | None = start

    def cancel(self) -> None:
        """Do not start it."""
        self.start = None


class ClientTurns:
    """What waits to be parsed or answered, one of each client address in turn."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._time = loop.time
        self._iteration = 0.0
        self.spent_seconds = 0.0
        """On data that was parsed without a turn, in this iteration of the loop (or in one within the same
        millisecond)."""
        self._waiting: dict[str, deque[QueuedTurn]] = {}
        """By address, in the order of their turns."""

    def is_free(self) -> bool:
        """Nothing waits, and this iteration of the loop has time for more: no turn is needed."""
        if self._waiting:
            return False
        iteration = self._time()  # uvloop's changes between iterations only
        if iteration != self._iteration:
            self._iteration = iteration
            self.spent_seconds = 0.0
        return self.spent_seconds < TURN_SECONDS

    def add(self, client: str, start: Callable[[], None]) -> QueuedTurn:
        """Call `start` in turn, in another iteration of the loop. It may add requests."""
        turn = QueuedTurn(start)
        queue = self._waiting.get(client)
        if queue is None:
            queue = self._waiting[client] = deque()
            if len(self._waiting) == 1:
                self._loop.call_soon(self._run)
        queue.append(turn)
        return turn

    def _run(self) -> None:
        end = time.perf_counter() + TURN_SECONDS
        for _ in range(sum(map(len, self._waiting.values()))):
            client, queue = next(iter(self._waiting.items()))
            start = queue.popleft().start
            if start is not None:
                start()
            del self._waiting[client]
            if queue:
                self._waiting[client] = queue
            if time.perf_counter() >= end:
                break
        if self._waiting:
            self._loop.call_soon(self._run)


class PieceCredit:
    """How many more tiny pieces a connection may receive before it is read in turns.

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


class ReadConnection(Protocol):
    """A connection, as it is read in turns."""

    def pause_reading(self) -> None:
        """Leave further data in the kernel."""
        ...

    def resume_reading(self) -> None:
        """Read again."""
        ...


class ReadTurns:
    """Connections whose requests arrive in tiny pieces: of each client address, at most `READS` are read at a time, and
    each of them once in `READ_SECONDS`. So the cost does not grow with the number of connections and pieces."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._clients: dict[str, _Readers] = {}
        self._timer: asyncio.TimerHandle | None = None

    def wait(self, client: str, connection: ReadConnection) -> None:
        """Stop reading a connection until its turn."""
        readers = self._clients.setdefault(client, _Readers())
        readers.reading.pop(connection, None)
        readers.waiting[connection] = None
        connection.pause_reading()
        if self._timer is None:
            self._timer = self._loop.call_later(READ_SECONDS, self._turn)

    def leave(self, client: str, connection: ReadConnection) -> None:
        """The request is complete, or the connection has ended."""
        readers = self._clients.get(client)
        if readers is None:
            return
        readers.reading.pop(connection, None)
        if connection in readers.waiting:
            del readers.waiting[connection]
            connection.resume_reading()
        if not readers.reading and not readers.waiting:
            del self._clients[client]

    def _turn(self) -> None:
        self._timer = None
        for readers in self._clients.values():
            readers.turn()
        if any(readers.waiting for readers in self._clients.values()):
            self._timer = self._loop.call_later(READ_SECONDS, self._turn)


class _Readers:
    """The connections of one address that are read in turns, each in the order of time."""

    __slots__ = ("reading", "waiting")

    def __init__(self) -> None:
        self.reading: dict[ReadConnection, None] = {}
        self.waiting: dict[ReadConnection, None] = {}

    def turn(self) -> None:
        """Read those that have waited longest, in place of those from which nothing came."""
        chosen = tuple(self.waiting)[:READS]
        for connection in tuple(self.reading)[: max(0, len(self.reading) + len(chosen) - READS)]:
            del self.reading[connection]
            self.waiting[connection] = None
            connection.pause_reading()
        for connection in chosen:
            del self.waiting[connection]
            self.reading[connection] = None
            connection.resume_reading()
