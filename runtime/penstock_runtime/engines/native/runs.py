"""Runs of the native library: a batch, a single row in the calling thread, and streams of batches.

Streams are threads of the library that never take the interpreter's lock, each pinned to a core where there are enough.
The event loop submits a run and is notified through a file descriptor when runs have ended. A Python thread would need
the lock for both; on a shared machine it may be granted the lock while it waits for a processor, and every other thread
then waits for it (docs/decisions/batching.md).
"""

from __future__ import annotations

import asyncio
import ctypes
from array import array
from collections.abc import Callable
from typing import Any

import numpy as np

from penstock_runtime.engines.base import Ended, Parallelism, Threads
from penstock_runtime.engines.native.graph_file import GraphOutput
from penstock_runtime.engines.native.library import CJob, PoolingKind, RunStatus, load_library
from penstock_runtime.errors import InferenceFailed
from penstock_runtime.host import lower_priority, place_stream
from penstock_runtime.rows import POOLED, AnyPooling, Batch, Float, Int, Outputs, Pooling, Row

MAX_SINGLE_ROW_TOKENS = 4096
"""Longer rows run as a batch."""
_INT64 = "q"
"""Type code of `array`."""
_NANOSECONDS = 1e9
_POOLINGS = {
    Pooling.MEAN: PoolingKind.MEAN, Pooling.CLS: PoolingKind.CLS, Pooling.LAST: PoolingKind.LAST_TOKEN
}  # fmt: skip
"""Poolings that the library computes."""
_Start = ctypes.c_char * 0
"""For the address of an array of any size, also an empty one."""


class NativeRun:
    """One batch and all memory that its run needs. Keep it until it has run: the library reads and writes it."""

    __slots__ = ("_inputs", "_output", "_pooling", "_values", "record")

    def __init__(
        self, model: int, batch: Batch, output: GraphOutput, width: int, *, threads: int, when_idle: bool
    ) -> None:
        """`width`: floats in a line of the output's buffer; `threads` and `when_idle` as in native.h."""
        ids, mask, types = map(_numbers, (batch.input_ids, batch.attention_mask, batch.token_type_ids))
        rows, tokens = ids.shape
        pooling = pooling_of(batch.pooling, output)
        lines = (rows,) if pooling or output.per_row else (rows, tokens)
        if output.chosen_id >= 0:
            lines = (int(np.count_nonzero(ids == output.chosen_id)),)
        self._inputs = ids, mask, types
        self._output = output
        self._pooling = pooling
        self._values: Float = np.empty((*lines, width), np.float32)
        self.record = CJob(
            model=model,
            ids=_address(ids),
            mask=_address(mask),
            types=_address(types),
            result=_address(self._values),
            floats=self._values.size,
            rows=rows,
            tokens=tokens,
            threads=threads,
            when_idle=when_idle,
            pooling=pooling,
        )

    @property
    def outputs(self) -> Outputs:
        """The outputs after the run, each in its own memory; InferenceFailed if the run failed."""
        status = self.record.status
        if status != RunStatus.OK:
            raise run_failure(status, f"{self.record.rows} x {self.record.tokens} tokens", self._output.name)
        values, output = self._values, self._output
        if self._pooling:
            return {POOLED: values[:, : output.width]}
        if output.columns:
            return {name: np.ascontiguousarray(values[..., at]) for at, name in enumerate(output.columns)}
        return {output.name: values[..., : output.width]}


class SingleRow:
    """Runs a single row in the calling thread, without making a batch. For one thread at a time.

    A batch of one row makes six arrays and needs the address of four, in code that is no longer in the caches after the
    weights of the last run (docs/decisions/http-front-end.md). Here these are made once.
    """

    def __init__(self, library: Any, model: int, output: GraphOutput, width: int) -> None:
        """`width`: floats in a line of the output's buffer."""
        self._run_function = library.penstock_run
        self._output = output
        self._is_line = output.per_row and not output.columns and output.chosen_id < 0
        self._mask = array(_INT64, [1]) * MAX_SINGLE_ROW_TOKENS
        self._values: Float = np.empty(width, np.float32)
        self._line: Float = self._values[: output.width]
        self._record = CJob(
            model=model, mask=self._mask.buffer_info()[0], result=self._values.ctypes.data, floats=width, rows=1
        )
        self._reference = ctypes.byref(self._record)

    def run(self, row: Row, *, threads: int, when_idle: bool) -> Outputs | None:
        """The row's outputs, without the batch axis, each in its own memory. None for a row that must run as a batch.

        InferenceFailed if the run failed.
        """
        tokens = len(row.ids)
        pooling = pooling_of(row.pooling, self._output)
        if tokens > MAX_SINGLE_ROW_TOKENS or not (pooling or self._is_line):
            return None
        ids = array(_INT64, row.ids)
        types = None if row.type_ids is None else array(_INT64, row.type_ids)
        record = self._record
        record.ids = ids.buffer_info()[0]
        record.types = None if types is None else types.buffer_info()[0]
        record.tokens = tokens
        record.threads = threads
        record.when_idle = when_idle
        record.pooling = pooling
        self._run_function(self._reference)
        status = record.status
        if status != RunStatus.OK:
            raise run_failure(status, f"1 x {tokens} tokens", self._output.name)
        return {POOLED if pooling else self._output.name: self._line.copy()}


class NativeStreams:
    """See `Streams`."""

    def __init__(self, new_run: Callable[[Batch, Parallelism], NativeRun], threads: Threads) -> None:
        """`new_run` prepares a batch. MemoryError if no thread can be started."""
        self._library = load_library()
        self._new_run = new_run
        self._runs: dict[int, NativeRun] = {}
        """By ticket, which is the address of the run's record."""
        self._loop: asyncio.AbstractEventLoop | None = None
        numbers = (ctypes.c_int32 * threads.streams)()
        self._streams = self._library.penstock_streams_open(threads.streams, numbers)
        if self._streams is None:
            raise MemoryError("no thread can be started for the native engine")
        self._event = self._library.penstock_streams_event(self._streams)
        for stream, thread in enumerate(numbers) if threads.per_stream == 1 else ():
            if threads.placed:
                place_stream(thread, stream, threads.streams)
            else:
                lower_priority(thread)

    def attend(self, loop: asyncio.AbstractEventLoop, ended: Callable[[], object]) -> None:
        """See `Streams`."""
        self._loop = loop
        loop.add_reader(self._event, ended)

    def leave(self) -> None:
        """See `Streams`."""
        if self._loop is not None:
            self._loop.remove_reader(self._event)

    def submit(self, batch: Batch, parallelism: Parallelism) -> int:
        """See `Streams`."""
        run = self._new_run(batch, parallelism)
        ticket = ctypes.addressof(run.record)
        self._runs[ticket] = run
        self._library.penstock_streams_submit(self._streams, run.record)
        return ticket

    def retract(self, ticket: int) -> bool:
        """See `Streams`."""
        if not self._library.penstock_streams_retract(self._streams, self._runs[ticket].record):
            return False
        del self._runs[ticket]
        return True

    def collect(self) -> list[Ended]:
        """See `Streams`."""
        ended = []
        ticket = self._library.penstock_streams_collect(self._streams)
        while ticket is not None:
            run = self._runs.pop(ticket)
            record = run.record
            ended.append(Ended(ticket, _result(run), record.started / _NANOSECONDS, record.ended / _NANOSECONDS))
            ticket = record.next
        return ended

    def stop(self) -> None:
        """See `Streams`."""
        streams, self._streams = self._streams, None
        if streams is not None:
            self._library.penstock_streams_close(streams)


def _result(run: NativeRun) -> Outputs | Exception:
    try:
        return run.outputs
    except InferenceFailed as error:
        return error


def run_failure(status: int, size: str, output: str) -> InferenceFailed:
    """The error of a run of this size; `output`: name of the graph's output."""
    match status:
        case RunStatus.NO_MEMORY:
            return InferenceFailed(f"native: no memory for {size}", remedy="Allow the pod more memory")
        case RunStatus.BAD_MODEL:
            return InferenceFailed(
                f"native: the graph's output {output} does not have the number of lines in its file",
                remedy="Run penstock optimize again",
            )
        case _:
            return InferenceFailed(
                f"native: {size} hold an id that the model has no vector for, or are too many",
                remedy="Send ids of the model's own tokenizer, and rows within its length",
            )


def pooling_of(wanted: AnyPooling | None, output: GraphOutput) -> PoolingKind:
    """The pooling for the library; `EVERY`, which is none, if it does not have the wanted one or none is wanted."""
    if not isinstance(wanted, Pooling) or output.per_row or output.columns or output.chosen_id >= 0:
        return PoolingKind.EVERY
    return _POOLINGS.get(wanted, PoolingKind.EVERY)


def _numbers(values: Int) -> Int:
    # A copy, since `_address` needs writable memory, and shared arrays are read-only.
    return np.array(values, np.int64, order="C")


def _address(array: Int | Float) -> int:
    # Not `array.ctypes`, which is Python code: a tenth of the time around the run of a short row.
    return ctypes.addressof(_Start.from_buffer(array.data))
