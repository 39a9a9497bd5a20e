"""Streams that never need the interpreter: threads of the library, each on a core of its own where there are enough.

The event loop makes a job, and reads from a file that jobs have ended. A thread of Python's needs the interpreter's
lock for both; on a machine that is shared it waits for a processor with the lock promised to it, and everybody else
waits behind it (docs/decisions/batching.md).
"""

from __future__ import annotations

import asyncio
import ctypes
from collections.abc import Callable

from penstock_runtime.engines.base import Breadth, Ended, Threads
from penstock_runtime.engines.native.job import NativeJob
from penstock_runtime.engines.native.library import load_library
from penstock_runtime.errors import InferenceFailed
from penstock_runtime.host import place_stream
from penstock_runtime.rows import Batch, Outputs

_NANOSECONDS = 1e9


class NativeStreams:
    """See `Streams`."""

    def __init__(self, job: Callable[[Batch, Breadth], NativeJob], threads: Threads) -> None:
        """`job` makes what a stream runs. MemoryError when no thread can be had."""
        self._library = load_library()
        self._job = job
        self._jobs: dict[int, NativeJob] = {}
        """By their tickets, which are the addresses of their records."""
        self._loop: asyncio.AbstractEventLoop | None = None
        numbers = (ctypes.c_int32 * threads.streams)()
        self._streams = self._library.penstock_streams_open(threads.streams, numbers)
        if self._streams is None:
            raise MemoryError("no thread can be started for the native engine")
        self._event = self._library.penstock_streams_event(self._streams)
        if threads.per_stream == 1:
            for stream, thread in enumerate(numbers):
                place_stream(thread, stream, threads.streams)

    def attend(self, loop: asyncio.AbstractEventLoop, ended: Callable[[], object]) -> None:
        """See `Streams`."""
        self._loop = loop
        loop.add_reader(self._event, ended)

    def leave(self) -> None:
        """See `Streams`."""
        if self._loop is not None:
            self._loop.remove_reader(self._event)

    def submit(self, batch: Batch, breadth: Breadth) -> int:
        """See `Streams`."""
        job = self._job(batch, breadth)
        ticket = ctypes.addressof(job.record)
        self._jobs[ticket] = job
        self._library.penstock_streams_submit(self._streams, job.record)
        return ticket

    def retract(self, ticket: int) -> bool:
        """See `Streams`."""
        if not self._library.penstock_streams_retract(self._streams, self._jobs[ticket].record):
            return False
        del self._jobs[ticket]
        return True

    def collect(self) -> list[Ended]:
        """See `Streams`."""
        ended = []
        ticket = self._library.penstock_streams_collect(self._streams)
        while ticket is not None:
            job = self._jobs.pop(ticket)
            record = job.record
            ended.append(Ended(ticket, _result(job), record.started / _NANOSECONDS, record.ended / _NANOSECONDS))
            ticket = record.next
        return ended

    def stop(self) -> None:
        """See `Streams`."""
        streams, self._streams = self._streams, None
        if streams is not None:
            self._library.penstock_streams_close(streams)


def _result(job: NativeJob) -> Outputs | Exception:
    try:
        return job.outputs
    except InferenceFailed as error:
        return error
