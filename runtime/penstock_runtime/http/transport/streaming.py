"""Writes a response that is made piece by piece: in chunks, as fast as the client reads, until it ends or goes away."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Protocol

from penstock.logs import log_event

logger = logging.getLogger("penstock.http")

LAST_CHUNK = b"0\r\n\r\n"


class ByteStream(Protocol):
    """The body of a response that is still being made."""

    async def read(self) -> bytes:
        """The next piece, with all that has been made since the last one; empty at the end. May be cancelled."""
        ...

    def close(self) -> None:
        """No more is read. Called once for each stream, also for one that was read to its end."""
        ...


class StreamWriter:
    """One body in progress. A client that does not read is waited for; the connection's write timeout ends that."""

    def __init__(
        self, transport: asyncio.Transport, stream: ByteStream, is_writable: Callable[[], bool], *, chunked: bool
    ) -> None:
        """`chunked`: as HTTP/1.1 sends a body of unknown length; HTTP/1.0 ends it with the connection."""
        self._transport = transport
        self._stream = stream
        self._is_writable = is_writable
        self._chunked = chunked
        self._writable = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def start(self, loop: asyncio.AbstractEventLoop, done: Callable[[], None]) -> None:
        """Write in a task, which calls `done` at the end of the body."""
        self._task = loop.create_task(self._run(done))
        self._task.add_done_callback(self._close)

    def resume(self) -> None:
        """The client has read enough."""
        self._writable.set()

    def cancel(self) -> None:
        """The client has disconnected."""
        if self._task is not None:
            self._task.cancel()

    def _close(self, _task: object) -> None:
        # Not in the task: one that is cancelled before it starts runs no clean-up itself.
        self._stream.close()

    async def _run(self, done: Callable[[], None]) -> None:
        try:
            while piece := await self._stream.read():
                self._transport.write(b"%x\r\n%b\r\n" % (len(piece), piece) if self._chunked else piece)
                while not self._is_writable():
                    self._writable.clear()
                    await self._writable.wait()
        except Exception as error:
            # Without the last chunk the client knows that the body is not complete.
            logger.exception("a response was cut off", extra=log_event("StreamDefect", reason=error))
            self._transport.abort()
            return
        if self._chunked:
            self._transport.write(LAST_CHUNK)
        done()
