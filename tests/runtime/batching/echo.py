"""A small engine that records its batches: outputs are the token ids. Tests can hold it and make it fail."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from penstock.manifest import Axes, GraphIO
from penstock.recipe import Batching, EngineName, Plan, Precision, Recipe, ShortRoute
from penstock_runtime.engines.base import EngineFacts, Parallelism, Streams, Threads
from penstock_runtime.engines.grid import ShapeGrid
from penstock_runtime.engines.thread_streams import ThreadStreams
from penstock_runtime.errors import InferenceFailed
from penstock_runtime.rows import Batch, Outputs, Row

IO = GraphIO(inputs=("input_ids", "attention_mask"), outputs={"ids": Axes.TOKENS, "sum": Axes.ROW})
POISON = 666
"""A batch with this token fails."""


@dataclass(eq=False)
class EchoEngine:
    """Runs wait while `gate` is closed."""

    streams: int = 1
    poison: bool = True
    grid: ShapeGrid | None = None
    divides_batches: bool = False
    next_to_streams: bool = False
    """Runs may be called while all streams are busy."""
    in_flight: int | None = None
    """As of a device other than the CPU."""
    gate: threading.Event = field(default_factory=threading.Event)
    batches: list[list[int]] = field(default_factory=list)
    """Lengths of the rows of every run, in the order in which the runs began."""
    wide: list[int] = field(default_factory=list)
    """Lengths of the rows that ran wide."""
    widening: list[int] = field(default_factory=list)
    """Lengths of the rows that ran together with others, and might have run wide once those were gone."""
    threads: set[str] = field(default_factory=set)
    """Names of those that ran it."""
    closed: bool = False
    most_at_once: int = 0
    _running: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)
    began: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    """Released by every run that begins."""

    def __post_init__(self) -> None:
        self.gate.set()

    @property
    def facts(self) -> EngineFacts:
        threads = Threads(self.streams, 1)
        return EngineFacts(
            "echo", "1", threads, "f32", grid=self.grid, divides_batches=self.divides_batches, in_flight=self.in_flight,
            runs_next_to_streams=self.next_to_streams,
        )  # fmt: skip

    def run(self, batch: Batch) -> Outputs:
        assert not self.closed
        with self._lock:
            self._running += 1
            self.most_at_once = max(self.most_at_once, self._running)
            self.threads.add(threading.current_thread().name)
            self.batches.append(batch.attention_mask.sum(axis=1).tolist())
        self.began.release()
        try:
            assert self.gate.wait(30)
            if self.poison and (batch.input_ids == POISON).any():
                raise InferenceFailed("poison")
            return {
                "ids": batch.input_ids.astype(np.float32)[:, :, np.newaxis],
                "sum": (batch.input_ids * batch.attention_mask).sum(axis=1).astype(np.float32),
            }
        finally:
            with self._lock:
                self._running -= 1

    def run_wide(self, batch: Batch) -> Outputs:
        self.wide.append(int(batch.attention_mask.sum()))
        return self.run(batch)

    def run_widening(self, batch: Batch) -> Outputs:
        self.widening.append(int(batch.attention_mask.sum()))
        return self.run(batch)

    def start_streams(self) -> Streams:
        return ThreadStreams(self)

    def close(self) -> None:
        assert self._running == 0
        self.closed = True


@dataclass(eq=False)
class RowEchoEngine(EchoEngine):
    """Has a single-row run."""

    longest_alone: int = 100
    """Of the rows that have it, tokens."""
    alone: list[tuple[int, Parallelism]] = field(default_factory=list)
    """Lengths of the rows that used the single-row run."""

    def run_row(self, row: Row, parallelism: Parallelism) -> Outputs | None:
        if row.length > self.longest_alone:
            return None
        self.alone.append((row.length, parallelism))
        if self.poison and POISON in row.ids:
            raise InferenceFailed("poison")
        ids = np.array(row.ids, np.float32)
        return {"ids": ids[:, np.newaxis], "sum": ids.sum()}


@dataclass(eq=False)
class SleepyEngine(EchoEngine):
    """Its streams take no batch until they are `awake`, as on a machine whose cores are busy."""

    awake: threading.Event = field(default_factory=threading.Event)

    def start_streams(self) -> Streams:
        return _SleepyStreams(self)


class _SleepyStreams(ThreadStreams):
    _engine: SleepyEngine

    def _work(self) -> None:
        assert self._engine.awake.wait(60)
        super()._work()


def plan(
    batching: Batching = Batching.SINGLE,
    *,
    streams: int = 1,
    rows: int = 8,
    tokens: int = 512,
    padding: float = 0.0,
    wide_from: int | None = None,
    wide_alone: int | None = None,
) -> Plan:
    return Plan(
        recipe=Recipe(engine=EngineName.ONNXRUNTIME, precision=Precision.FP32),
        streams=streams,
        threads_per_stream=1,
        batching=batching,
        max_batch_rows=1 if batching is Batching.SINGLE else rows,
        max_batch_tokens=tokens,
        max_padding_share=padding,
        wide_from_tokens=wide_from,
        wide_alone_from_tokens=wide_alone,
    )


def route(longest: int, batching: Batching = Batching.SINGLE, *, wide_from: int | None = None) -> ShortRoute:
    return ShortRoute(
        longest_tokens=longest,
        recipe=Recipe(engine=EngineName.OPENVINO, precision=Precision.FP32),
        batching=batching,
        max_batch_rows=1 if batching is Batching.SINGLE else 8,
        wide_from_tokens=wide_from,
    )


def row(length: int, token: int = 7) -> Row:
    return Row([token] * length)


def total(one: Row, outputs: Outputs) -> float:
    """A task's `reduce`."""
    assert outputs["ids"][:, 0].tolist() == one.ids
    return float(outputs["sum"])


def rows(lengths: Sequence[int]) -> list[Row]:
    return [row(length) for length in lengths]
