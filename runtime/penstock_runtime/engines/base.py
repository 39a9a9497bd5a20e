"""What an engine is. Knows nothing of tasks, HTTP or queues."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import NamedTuple, Protocol, runtime_checkable

from penstock.manifest import GraphIO
from penstock.recipe import Recipe
from penstock_runtime.engines.grid import ShapeGrid
from penstock_runtime.rows import Batch, Outputs, Row


@dataclass(frozen=True)
class Threads:
    """How many runs may be under way at once, and how many threads each has. Set explicitly in every engine."""

    streams: int
    per_stream: int


@dataclass(frozen=True)
class EngineFacts:
    """What the engine really does, read back from it where it tells."""

    engine: str
    version: str
    threads: Threads
    precision: str
    """The arithmetic in use, such as `f32`, `bf16`, `i8`."""
    fused_nodes: dict[str, int] = field(default_factory=dict)
    """Counts by operator type of fused nodes in the optimised graph; empty where the engine does not tell."""
    divides_batches: bool = False
    """`run_wide` gives each core its part of a batch of any shape, of which it need not have seen one before."""
    weight_copies: int = 1
    """How many times the weights are in memory: 2 where `run_wide` needs a compiled model of its own."""
    grid: ShapeGrid | None = None
    """The lengths that `run` pads its batches to by itself; None: none. Rows that are padded to the same length keep
    each other company for nothing."""
    short: EngineFacts | None = None
    """Of the engine that runs the short rows, where there is one beside this (`engines.routed`)."""


class Breadth(Enum):
    """Which threads a batch has."""

    NARROW = "narrow"
    """`Engine.run`: those of one stream."""
    WIDE = "wide"
    """`Engine.run_wide`: all of them."""
    WIDENING = "widening"
    """`Engine.run_widening`: all of them once nothing else runs."""


class Ended(NamedTuple):
    """A batch that a stream has run."""

    ticket: int
    """What `Streams.submit` gave for it."""
    result: Outputs | Exception
    """As `Engine.run` returns or raises it."""
    started: float
    """Clock of `perf_counter`, seconds."""
    ended: float


class Streams(Protocol):
    """Threads that run batches, each one after the other; first come, first served. Used from one thread."""

    def attend(self, loop: asyncio.AbstractEventLoop, ended: Callable[[], object]) -> None:
        """From now on `ended` is called in the loop when batches have ended that were not collected. Called once, in
        the loop's thread and before the first `submit`."""
        ...

    def leave(self) -> None:
        """No more calls of `ended`. In the loop's thread, whether anybody attended or not."""
        ...

    def submit(self, batch: Batch, breadth: Breadth) -> int:
        """Let the next free stream run a batch; a ticket, by which it is known from now on.

        Raises what an engine does with a batch that cannot even be begun.
        """
        ...

    def retract(self, ticket: int) -> bool:
        """Take back a batch that has not begun: it never will. False when it has."""
        ...

    def collect(self) -> list[Ended]:
        """Those that have ended since, in that order."""
        ...

    def stop(self) -> None:
        """Run what was submitted, then end the threads. Blocks until they have; from any thread, after `leave`."""
        ...


class Engine(Protocol):
    """A loaded graph."""

    @property
    def facts(self) -> EngineFacts:
        """What it does."""
        ...

    def run(self, batch: Batch) -> Outputs:
        """Run the graph once; blocks, releases the GIL. Up to `threads.streams` threads may call it at once.

        Returns the graph's outputs for the whole padded batch, float32, each its own memory
        (not reused by the next run).
        Raises InferenceFailed when the library does.
        """
        ...

    def run_wide(self, batch: Batch) -> Outputs:
        """Like `run`, with all of streams x per_stream threads for this one batch; only one caller at a time."""
        ...

    def run_widening(self, batch: Batch) -> Outputs:
        """Like `run`, beside other runs; like `run_wide` from when they are over, where the engine can do that."""
        ...

    def start_streams(self) -> Streams:
        """Start as many streams as `threads` says. MemoryError when no thread can be had. Stopped before `close`."""
        ...

    def close(self) -> None:
        """Free the graph. No run may be under way."""
        ...


@runtime_checkable
class RunsRows(Protocol):
    """An engine that has a shorter way for a row which runs alone."""

    def run_row(self, row: Row, breadth: Breadth) -> Outputs | None:
        """What `run` or its like gives for a batch of this row, to the bit, without the batch's axis. One thread at a
        time. None for a row that has no shorter way."""
        ...


class EngineLoader(Protocol):
    """`penstock_runtime.engines.load.load_engine` has this signature."""

    def __call__(
        self,
        path: Path,
        io: GraphIO,
        recipe: Recipe,
        threads: Threads,
        *,
        wide: bool = False,
        max_tokens: int | None = None,
    ) -> Engine:
        """Load the graph at `path` (`.onnx` or `.xml`); `wide` prepares `run_wide`; no row is longer than `max_tokens`.

        ArtefactError when it does not load.
        """
        ...
