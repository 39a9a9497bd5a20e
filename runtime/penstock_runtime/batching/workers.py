"""The threads that run the engine, one for each stream, and the queue that they take from. Knows no event loop.

A worker that gets free takes its next batch itself: between two runs there is nothing but a lock. One that finds
nothing sleeps on a lock of its own, which the next arrival releases: that of the first of those that sleep, so that
at low load one thread does all the runs, and stays where it is, while the event loop has another core. Waking it costs
12 us where the core is awake, and up to 0.4 ms on virtual machines whose idle cores the host has to wake: `run_here`
spares a lone row the way.
"""

from __future__ import annotations

import logging
import threading
from bisect import insort
from collections.abc import Callable, Sequence
from operator import neg
from time import perf_counter
from typing import Any, NamedTuple

from penstock.manifest import GraphIO
from penstock.recipe import Plan
from penstock_runtime.batching.bounds import QueueBounds
from penstock_runtime.batching.observer import Observer
from penstock_runtime.batching.rate import DrainRate
from penstock_runtime.batching.rectangle import run_rows
from penstock_runtime.batching.waiting import Company, Waiting, WaitingRows
from penstock_runtime.engines.base import Engine
from penstock_runtime.errors import DeadlineExceeded, InferenceFailed, RequestError
from penstock_runtime.host import place_stream
from penstock_runtime.rows import Batch, Outputs, Row

logger = logging.getLogger("penstock.batching")

LONGEST_HERE_SECONDS = 0.01
"""Rows that are expected to take longer are left to a worker: so long their caller would be deaf."""

LEAST_SHARED_TOKENS = 32
LEAST_SHARED_SECONDS = 0.002
"""So few tokens, which one worker is expected to run in so short a time, are left to it: to wake another takes a good
part of that, and each batch reads all weights."""

Reduce = Callable[[Row, Outputs], Any]
"""`Task.reduce`."""


class Outcome(NamedTuple):
    """What became of some rows. A value that is a RequestError is the row's failure."""

    rows: list[Waiting]
    values: list[Any]
    started: float
    """Clock of `perf_counter`, seconds."""
    ended: float


class _Work(NamedTuple):
    """What a run took."""

    rows: int
    tokens: int
    """Real ones."""
    padded_tokens: int
    seconds: float
    """Of one thread."""


class Workers:
    """The threads and their queue. All methods may be called from any thread."""

    def __init__(
        self,
        engine: Engine,
        io: GraphIO,
        plan: Plan,
        reduce: Reduce,
        *,
        bounds: QueueBounds,
        observer: Observer,
        deliver: Callable[[Outcome], None],
    ) -> None:
        """`deliver` is called from the workers' threads."""
        self._engine = engine
        self._io = io
        self._reduce = reduce
        self._company = Company.of(plan, engine.facts)
        self._plan = plan.unrouted
        self._short_plan = plan.of_short_rows
        self._bounds = bounds
        self._observer = observer
        self._deliver = deliver
        self._lock = threading.Lock()
        self._queue = WaitingRows(self._company)
        self._rate = DrainRate(plan.streams)
        self._wakes = [threading.Lock() for _ in range(plan.streams)]
        self._idle: list[int] = []
        """Streams that sleep, the first one last."""
        self._coming: set[int] = set()
        """Streams that were woken and have not looked at the queue yet."""
        self._busy = 0
        self._stopping = False
        self._threads = [
            threading.Thread(target=self._work, args=(stream,), name=f"penstock-stream-{stream}", daemon=True)
            for stream in range(plan.streams)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def depth(self) -> tuple[int, int]:
        """Rows and tokens that wait."""
        return self._queue.rows, self._queue.tokens

    @property
    def tokens_per_second(self) -> float:
        """What all the workers serve together while busy, as measured lately."""
        return self._rate.tokens_per_second

    def check_room(self, rows: int, tokens: int) -> None:
        """Overloaded or InvalidInput when a request of this size would be refused."""
        with self._lock:
            self._check_room(rows, tokens)

    def push(self, rows: Sequence[Row], owner: Any, *, arrived: float, deadline: float) -> list[Waiting]:
        """Let rows wait; they come back through `deliver`, each once, unless discarded. Errors as `check_room`."""
        tokens = sum(row.length for row in rows)
        with self._lock:
            self._check_room(len(rows), tokens)
            entries = self._queue.push(
                rows, owner, arrived=arrived, deadline=deadline, tokens_per_second=self._rate.tokens_per_second
            )
            woken = self._wake(self._batches_of(rows, tokens))
        for stream in woken:
            self._wakes[stream].release()
        return entries

    def run_here(self, row: Row) -> Outcome | None:
        """Run a row in the caller's thread; None when anything else runs or waits, or when it would take too long.

        Not delivered. Nobody else should want the caller's thread meanwhile.
        """
        with self._lock:
            idle = not self._busy and not self._queue.rows
            if not idle or row.length > LONGEST_HERE_SECONDS * self._rate.tokens_per_second:
                return None
            self._busy += 1
        outcome, work = self._run([row], lone=True, alone=True)
        self._free(work)
        self._observe(work)
        return outcome

    def discard(self, entries: Sequence[Waiting]) -> None:
        """Forget rows that have not been taken yet. Those that run go on, and are delivered."""
        with self._lock:
            for entry in entries:
                self._queue.discard(entry)

    def expire(self, now: float) -> tuple[list[Waiting], float]:
        """Take out the rows whose deadline has passed; also the next deadline (infinite: none)."""
        with self._lock:
            return self._queue.expire(now), self._queue.next_deadline()

    def warmed(self, tokens: int, seconds: float) -> None:
        """A run outside the queue tells how fast the engine is."""
        with self._lock:
            self._rate.ran(tokens, seconds)

    def stop(self) -> None:
        """Run what waits, then end the threads. Blocks until they have. Nothing may be pushed any more."""
        with self._lock:
            self._stopping = True
            woken, self._idle = self._idle, []
        for stream in woken:
            self._wakes[stream].release()
        for thread in self._threads:
            thread.join()

    def _check_room(self, rows: int, tokens: int) -> None:
        self._bounds.check(rows, tokens, self._queue.rows, self._queue.tokens, self._rate)

    def _work(self, stream: int) -> None:
        if self._engine.facts.in_callers_thread and self._plan.threads_per_stream == 1:
            place_stream(stream, self._plan.streams)
        wake = self._wakes[stream]
        wake.acquire()
        while True:
            with self._lock:
                self._coming.discard(stream)
                taken = self._queue.take(
                    workers=len(self._threads), now=perf_counter(), least=self._least_tokens, idle=self._busy == 0
                )
                if taken.rows:
                    self._busy += 1
                elif not taken.expired:
                    if self._stopping:
                        return
                    insort(self._idle, stream, key=neg)
                lone = self._busy == 1 and self._queue.rows == 0
                # What we did not take, though it was thought to be for one: of other lengths, or more than a batch.
                woken = self._wake(1) if self._queue.rows and not self._coming else []
            for other in woken:
                self._wakes[other].release()
            if taken.expired:
                self._deliver_expired(taken.expired)
            if taken.rows:
                rows = [entry.row for entry in taken.rows]
                outcome, work = self._run(rows, lone=lone, divided=taken.divided)
                self._free(work)
                self._deliver(outcome._replace(rows=taken.rows))
                self._observe(work)
            elif not taken.expired:
                wake.acquire()

    def _batches_of(self, rows: Sequence[Row], tokens: int) -> int:
        """So many a request is worth running as."""
        if self._busy == 0 and self._company.divides(rows[0], len(rows), len(self._threads)):
            return 1
        return min(len(rows), -(-tokens // self._least_tokens))

    @property
    def _least_tokens(self) -> int:
        expected = self._rate.tokens_per_second / len(self._threads) * LEAST_SHARED_SECONDS
        return max(1, min(LEAST_SHARED_TOKENS, int(expected)))

    def _wake(self, most: int) -> list[int]:
        """Streams to be woken once the lock is free, the first one first."""
        woken = [self._idle.pop() for _ in range(min(most, len(self._idle)))]
        self._coming.update(woken)
        return woken

    def _deliver_expired(self, entries: list[Waiting]) -> None:
        now = perf_counter()
        self._deliver(Outcome(entries, [deadline_exceeded() for _ in entries], now, now))

    def _run(self, rows: list[Row], *, lone: bool, alone: bool = False, divided: bool = False) -> tuple[Outcome, _Work]:
        """`lone`: nothing else runs or waits; `alone`: nor is there another client, who might come meanwhile;
        `divided`: see `Taken`."""
        longest = max(row.length for row in rows)
        side = self._company.side(longest)
        plan = self._plan if side is self._company or self._short_plan is None else self._short_plan
        may_be_wide = len(rows) == 1 and plan.is_wide(longest, alone=alone)
        wide = divided or (may_be_wide and lone)
        if wide:
            run = self._engine.run_wide
        elif may_be_wide and self._short_plan is None:  # else the engine might not know of runs on the other one
            run = self._engine.run_widening
        else:
            run = self._engine.run
        started = perf_counter()
        values = self._forward(run, rows)
        ended = perf_counter()
        work = _Work(
            rows=len(rows),
            tokens=sum(row.length for row in rows),
            padded_tokens=max(map(side.length, rows)) * len(rows),
            # A wide run has all the cores, as long as it lasts.
            seconds=(ended - started) * (len(self._threads) if wide else 1),
        )
        return Outcome([], values, started, ended), work

    def _free(self, work: _Work) -> None:
        with self._lock:
            self._busy -= 1
            self._rate.ran(work.tokens, work.seconds)

    def _observe(self, work: _Work) -> None:
        self._observer.batch(work.rows, work.tokens, work.padded_tokens)

    def _forward(self, run: Callable[[Batch], Outputs], rows: list[Row]) -> list[Any]:
        try:
            outputs = run_rows(run, self._io, rows)
        except Exception as error:  # whatever the engine throws must not end the thread, nor reach strangers
            if len(rows) == 1:
                return [_failure("the model failed on this input", error)]
            logger.warning("a batch of %d rows failed (%s): running each alone", len(rows), error)
            return [self._forward(run, [row])[0] for row in rows]
        return [self._reduced(row, own) for row, own in zip(rows, outputs, strict=True)]

    def _reduced(self, row: Row, outputs: Outputs) -> Any:
        try:
            return self._reduce(row, outputs)
        except Exception as error:  # as above
            return _failure("the model's output cannot be used", error)


def deadline_exceeded() -> DeadlineExceeded:
    """For a row that was not run in time."""
    return DeadlineExceeded(
        "the request waited longer than its deadline and was not run",
        remedy="Try again later, allow more time, or add replicas",
    )


def _failure(what: str, error: Exception) -> RequestError:
    if isinstance(error, RequestError):
        return error
    logger.error("%s", what, exc_info=error)
    return InferenceFailed(f"{what}: {type(error).__name__}", remedy="The server's log has the details")
