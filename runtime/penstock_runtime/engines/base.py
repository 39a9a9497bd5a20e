"""The interfaces of engines: loaded graphs with streams that run batches, and graphs that compute steps of text
generation. Independent of tasks, HTTP and queues."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from penstock.errors import PenstockError
from penstock_runtime.engines.grid import ShapeGrid
from penstock_runtime.rows import Batch, Outputs, Row, StepRow

BLOCK_SIZE = 32
"""Tokens in a block of the cache of text generation, in every engine: the only size that OpenVINO's CPU plugin has."""


@dataclass(frozen=True)
class Threads:
    """Concurrent runs, and the threads of each. Set explicitly in every engine."""

    streams: int
    per_stream: int
    placed: bool = True
    """Each stream may be kept on a core of its own, where threads of one model have the cores."""


@dataclass(frozen=True)
class EngineFacts:
    """Properties of a loaded engine, read back from the library where it reports them."""

    engine: str
    version: str
    threads: Threads
    precision: str
    """The arithmetic in use, such as `f32`, `bf16`, `i8`."""
    fused_nodes: dict[str, int] = field(default_factory=dict)
    """Fused nodes in the optimised graph by operator type; empty if the engine does not report them."""
    divides_batches: bool = False
    """`run_wide` divides a batch of any shape among the cores, also of a shape that it has not run before."""
    runs_next_to_streams: bool = False
    """`run` and `run_row` may also be called while every stream runs a batch."""
    weight_copies: int = 1
    """Copies of the weights in memory: 2 if `run_wide` needs a separate compiled model."""
    grid: ShapeGrid | None = None
    """The lengths that the engine itself pads batches to; None: none. Batching rows with the same padded length costs
    nothing."""
    in_flight: int | None = None
    """Runs that a device takes at once. They need no core of this process: rows never run in the calling thread. None:
    runs use the threads of this process, one run for each stream."""
    short: EngineFacts | None = None
    """Properties of the separate engine for short rows, if there is one (`engines.routed`)."""

    def as_json(self) -> dict[str, Any]:
        """As `/info` shows it."""
        return {
            "name": self.engine,
            "version": self.version,
            "precision": self.precision,
            "streams": self.threads.streams,
            "threads_per_stream": self.threads.per_stream,
            "fused_nodes": self.fused_nodes,
            "weight_copies": self.weight_copies,
        }


@dataclass(frozen=True)
class DeviceState:
    """A device other than the CPU, at the moment."""

    cores: int
    """Cores of the device that are granted."""
    copies: int
    """Copies of the model on them."""
    out_of_service: Mapping[int, str]
    """Copies that take no runs any more, with the reason."""
    runs: int
    """Runs that have ended well."""
    errors: Mapping[str, int]
    """Failed runs by kind."""
    real_tokens: int
    """Tokens of the batches that have run."""
    padded_tokens: int
    """Tokens of the shapes in which they ran."""
    facts: Mapping[str, Any]
    """What else to show, as JSON values."""

    @property
    def cores_in_service(self) -> int:
        """Cores of the copies that take runs."""
        return self.cores - len(self.out_of_service) * self.cores // self.copies

    def as_json(self) -> dict[str, Any]:
        """As `/info` shows it."""
        return {
            **self.facts,
            "copies": self.copies,
            "cores": self.cores,
            "cores_in_service": self.cores_in_service,
            "out_of_service": {str(copy): reason for copy, reason in self.out_of_service.items()},
        }


class Parallelism(Enum):
    """Which threads run a batch."""

    NARROW = "narrow"
    """`Engine.run`: the threads of one stream."""
    WIDE = "wide"
    """`Engine.run_wide`: all threads."""
    WIDENING = "widening"
    """`Engine.run_widening`: all threads as soon as nothing else runs."""


class Ended(NamedTuple):
    """A batch that a stream has run."""

    ticket: int
    """As returned by `Streams.submit`."""
    result: Outputs | Exception
    """As `Engine.run` returns or raises it."""
    started: float
    """Clock of `perf_counter`, seconds."""
    ended: float


class Streams(Protocol):
    """Threads that run batches in the order of `submit`. Used from one thread."""

    def attend(self, loop: asyncio.AbstractEventLoop, ended: Callable[[], object]) -> None:
        """Call `ended` in the loop whenever batches have ended that were not collected. To be called once, in the
        loop's thread and before the first `submit`."""
        ...

    def leave(self) -> None:
        """Stop calling `ended`. To be called in the loop's thread, also without `attend`."""
        ...

    def submit(self, batch: Batch, parallelism: Parallelism) -> int:
        """Queue a batch for the next free stream; returns its ticket.

        Raises the engine's error for a batch that cannot be started.
        """
        ...

    def retract(self, ticket: int) -> bool:
        """Withdraw a batch that has not started. False if it has."""
        ...

    def collect(self) -> list[Ended]:
        """The batches that have ended since the last call, in that order."""
        ...

    def stop(self) -> None:
        """Run all submitted batches, then end the threads. Blocks until then; from any thread, after `leave`."""
        ...


class Engine(Protocol):
    """A loaded graph."""

    @property
    def facts(self) -> EngineFacts:
        """Its properties."""
        ...

    def run(self, batch: Batch) -> Outputs:
        """Run the graph once; blocks, releases the GIL. Up to `threads.streams` threads may call it at once.

        Returns the graph's outputs for the whole padded batch, float32, each its own memory
        (not reused by the next run).
        InferenceFailed if the library fails.
        """
        ...

    def run_wide(self, batch: Batch) -> Outputs:
        """Like `run`, with all streams x per_stream threads for this batch; only one caller at a time."""
        ...

    def run_widening(self, batch: Batch) -> Outputs:
        """Like `run` while other runs are in progress; like `run_wide` once they have ended, if the engine can."""
        ...

    def start_streams(self) -> Streams:
        """Start `threads.streams` streams. MemoryError if no thread can be started. To be stopped before `close`."""
        ...

    def close(self) -> None:
        """Free the graph. No run may be in progress."""
        ...


@runtime_checkable
class RunsRows(Protocol):
    """An engine with a faster method for a single row."""

    def run_row(self, row: Row, parallelism: Parallelism) -> Outputs | None:
        """The same outputs, bit for bit, as for a batch of this row, without the batch axis. One thread at a time. None
        for a row that must run as a batch."""
        ...


@runtime_checkable
class HasDevice(Protocol):
    """An engine that computes on a device other than the CPU."""

    def device(self) -> DeviceState:
        """Its state. From any thread."""
        ...

    def when_lost(self, call: Callable[[PenstockError], None]) -> None:
        """Call this, in any thread, once no copy of the model is in service; at once if that is so already."""
        ...


@runtime_checkable
class SharesStreams(Protocol):
    """An engine with streams that can also run batches on a second engine of the same kind."""

    def start_shared_streams(self, short: Engine, is_short: Callable[[Batch], bool]) -> Streams | None:
        """As `Engine.start_streams`; batches for which `is_short` is true run on `short`. None if `short` is of another
        kind."""
        ...


class StepEngine(Protocol):
    """An engine that computes steps of text generation. Called by one thread at a time.

    It owns the weights, the threads and the pool of cache blocks. Its caller owns the sequences, and decides which
    blocks each of them uses.
    """

    vocabulary: int
    """The number of logits for each token."""
    context: int
    """The largest number of tokens of a sequence."""
    block_size: int
    """Tokens in a block of the cache."""
    blocks: int
    """Blocks in the pool."""

    def step(self, rows: Sequence[StepRow]) -> NDArray[np.float32]:
        """Compute one step. Returns float32 [sum of row.logits, vocabulary], in the order of the rows."""
        ...

    def close(self) -> None:
        """Release the weights and the pool."""
        ...


def run_of(engine: Engine, parallelism: Parallelism) -> Callable[[Batch], Outputs]:
    """The engine's method for this parallelism."""
    match parallelism:
        case Parallelism.NARROW:
            return engine.run
        case Parallelism.WIDE:
            return engine.run_wide
        case Parallelism.WIDENING:
            return engine.run_widening
