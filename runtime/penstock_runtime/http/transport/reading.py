"""How a connection is read: in pieces of limited size, and in turns with those of other client addresses."""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from enum import Enum
from typing import TYPE_CHECKING, cast

from penstock_runtime.http.transport.turns import PieceCredit, QueuedTurn

if TYPE_CHECKING:
    from penstock_runtime.http.transport.pool import (
        ClientShare,
        ConnectionMemory,
        ConnectionPool,
        Pipeline,
        PooledConnection,
    )

PIECE_BYTES = 1024
"""Parsed at a time, unless it belongs to a body of known length: up to thirty requests, some 1.5 ms."""


class ConnectionState(Enum):
    """What a connection waits for: decides what its deadline means."""

    IDLE = "idle"
    HEAD = "head"
    BODY = "body"
    ANSWER = "answer"
    LINGER = "linger"
    """The request was refused; further data is dropped."""


class ReadInTurns(asyncio.Protocol, ABC):
    """The reading half of a connection; the other half parses what `receive` is given."""

    __slots__ = ("_credit", "_memory", "_read_turn", "_unparsed", "client", "pipeline", "pool", "transport")

    pool: ConnectionPool
    client: ClientShare
    pipeline: Pipeline
    transport: asyncio.Transport | None
    _memory: ConnectionMemory

    def __init__(self) -> None:
        self._credit: PieceCredit | None = None
        """Of a request that has arrived in part."""
        self._unparsed = b""
        """Received, waits for its turn."""
        self._read_turn: QueuedTurn | None = None

    @abstractmethod
    def receive_request(self, data: bytes) -> bool:
        """Whether this is exactly one request that is known already, and is started without being parsed."""

    @abstractmethod
    def receive(self, data: bytes) -> None:
        """Parse data of the client."""

    @abstractmethod
    def missing_bytes(self) -> int:
        """Of a body of known length that is being received."""

    def data_received(self, data: bytes) -> None:
        """Bytes have arrived."""
        turns = self.pool.turns
        if turns.is_free() or not self._wait(data):
            begin = time.perf_counter()
            self._read(data)
            turns.spent_seconds += time.perf_counter() - begin

    def _read(self, data: bytes) -> None:
        while data and not self.receive_request(data):
            size = max(PIECE_BYTES, self.missing_bytes())
            self.receive(data[:size])
            data = data[size:]
            if data and not self.missing_bytes() and self._wait(data):
                return

    def _wait(self, data: bytes) -> bool:
        """Take a turn, and receive nothing more until then; false when there is no memory for the data."""
        self._memory.add(len(data))
        if not self.pool.make_room(cast("PooledConnection", self)):
            self._memory.add(-len(data))
            return False
        self._unparsed = data
        self._read_turn = self.pool.turns.add(self.client.key, self._read_unparsed)
        self.pause_reading()
        return True

    def _read_unparsed(self) -> None:
        data, self._unparsed = self._unparsed, b""
        self._memory.add(-len(data))
        self._read_turn = None
        self.resume_reading()
        self._read(data)

    def count_piece(self, size: int) -> None:
        """A piece did not complete its request: if such pieces are tiny, the connection is read in turns."""
        if self._credit is None:
            self._credit = PieceCredit()
        if not self._credit.pays(size):
            self.pool.read_turns.wait(self.client.key, self)

    def end_of_request(self) -> None:
        """A request is complete: read the next one without a delay."""
        if self._credit is not None:
            self._credit = None
            self.pool.read_turns.leave(self.client.key, self)

    def end_of_reading(self) -> None:
        """Drop what has not been parsed, and what is held in memory."""
        self._unparsed = b""
        self._memory.clear()
        if self._read_turn is not None:
            self._read_turn.cancel()
        self.pool.read_turns.leave(self.client.key, self)

    def pause_reading(self) -> None:
        """Leave further data in the kernel."""
        if self.transport is not None:
            self.transport.pause_reading()

    def resume_reading(self) -> None:
        """Read again, unless enough requests wait already."""
        if self.transport is not None and not self.pipeline.is_paused:
            self.transport.resume_reading()
