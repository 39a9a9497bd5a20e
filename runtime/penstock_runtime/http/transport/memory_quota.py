"""What one connection keeps in memory, and all of them together."""

from __future__ import annotations

import asyncio


class Memory:
    """Bytes of all connections of a server."""

    __slots__ = ("bytes",)

    def __init__(self) -> None:
        self.bytes = 0


class Held:
    """Bytes of one: bodies that are read or answered, and answers that the client has not read yet."""

    __slots__ = ("_bytes", "_memory", "_unsent_bytes")

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self._bytes = 0
        self._unsent_bytes = 0

    def add(self, count: int) -> None:
        """Of bodies; negative for what is let go."""
        self._bytes += count
        self._memory.bytes += count

    def weigh_unsent(self, transport: asyncio.Transport | None) -> bool:
        """Look at what the client has still to read of its answers; true when that has become less."""
        before = self._unsent_bytes
        self._unsent_bytes = 0 if transport is None else transport.get_write_buffer_size()
        self.add(self._unsent_bytes - before)
        return self._unsent_bytes < before

    def clear(self) -> None:
        """The connection has ended."""
        self.add(-self._bytes)
        self._unsent_bytes = 0
