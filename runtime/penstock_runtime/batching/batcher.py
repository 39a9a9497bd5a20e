"""Makes batches of the rows that wait, and gives them to the engine's streams. Used from one thread; never blocks.

Nothing is made before it is needed, but for one batch: a stream that gets free takes it at once, instead of waiting
until the event loop has read that it is free. `run_here` and brief rows spare a lone row the way to a stream and back:
12 us where the core is awake, and up to 0.4 ms on virtual machines whose idle cores the host has to wake.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from time import perf_counter
from typing import Any, NamedTuple

from penstock.manifest import GraphIO
from penstock.recipe import Plan
from penstock_runtime.batching.bounds import QueueBounds
from penstock_runtime.batching.collate import run_rows, stack, unstack
from penstock_runtime.batching.observer import Observer
from penstock_runtime.batching.queue import Company, Taken, Waiting, WaitingRows
from penstock_runtime.batching.rate import DrainRate
from penstock_runtime.engines.base import Breadth, Engine, RunsRows
from penstock_runtime.engines.thread_streams import run_of
from penstock_runtime.errors import DeadlineExceeded, InferenceFailed, RequestError
from penstock_runtime.rows import Outputs, Row

logger = logging.getLogger("penstock.batching")

LONGEST_HERE_SECONDS = 0.01
"""Rows that are expected to take longer are left to a stream: so long their caller would be deaf."""

BRIEF_SECONDS = 0.001
"""A row that nobody is beside runs in the caller's thread, whoever may come, if it is expected to take no longer."""

ONE_CORE_SECONDS = 0.004
"""What waits runs there as well, on a process's only core, if all of it is expected to take no longer: a stream would
take the core from the caller, and have a batch of one row ahead where two have come."""

AHEAD = 1
"""Batches that are made while all streams are busy."""

LEAST_SHARED_TOKENS = 32
LEAST_SHARED_SECONDS = 0.002
"""So few tokens, which one stream is expected to run in so short a time, are left to it: to wake another takes a good
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


@dataclass(slots=True, eq=False)
class _Run:
    """A batch that a stream has, or will have."""

    entries: list[Waiting]
    breadth: Breadth = Breadth.NARROW
    may_wait: bool = True
    """Not known to have begun."""

    @property
    def rows(self) -> list[Row]:
        return [entry.row for entry in self.entries]

    @property
    def tokens(self) -> int:
        return sum(entry.row.length for entry in self.entries)


class Batcher:
    """The queue, and the batches under way."""

    def __init__(
        self,
        engine: Engine,
        io: GraphIO,
        plan: Plan,
        reduce: Reduce,
        *,
        bounds: QueueBounds,
        observer: Observer,
        one_core: bool = False,
    ) -> None:
        """`one_core`: the caller and the streams have one core together."""
        self._engine = engine
        self._run_row = engine.run_row if isinstance(engine, RunsRows) else None
        self._io = io
        self._reduce = reduce
        self._company = Company.of(plan, engine.facts)
        self._plan = plan.unrouted
        self._short_plan = plan.of_short_rows
        self._bounds = bounds
        self._observer = observer
        self._queue = WaitingRows(self._company)
        self._rate = DrainRate(plan.streams)
        self._count = plan.streams
        self._one_core = one_core and plan.streams == 1
        self._runs: dict[int, _Run] = {}
        """By their tickets, in the order in which they begin."""
        self._outcomes: list[Outcome] = []
        """Not handed over yet."""
        self.streams = engine.start_streams()
        """To be attended: `collect` is for when batches have ended. To be stopped once nothing waits any more."""

    @property
    def depth(self) -> tuple[int, int]:
        """Rows and tokens that wait."""
        rows, tokens = self._queue.rows, self._queue.tokens
        if len(self._runs) > self._count:
            ahead = list(islice(self._runs.values(), self._count, None))
            rows += sum(len(run.entries) for run in ahead)
            tokens += sum(run.tokens for run in ahead)
        return rows, tokens

    @property
    def tokens_per_second(self) -> float:
        """What all the streams serve together while busy, as measured lately."""
        return self._rate.tokens_per_second

    def check_room(self, rows: int, tokens: int) -> None:
        """Overloaded or InvalidInput when a request of this size would be refused."""
        self._bounds.check(rows, tokens, *self.depth, self._rate)

    def push(self, rows: Sequence[Row], owner: Any, *, arrived: float, deadline: float) -> list[Waiting]:
        """Let rows wait until `turn`. Each is in one outcome, once, unless discarded. Errors as `check_room`."""
        self.check_room(len(rows), sum(row.length for row in rows))
        return self._queue.push(
            rows, owner, arrived=arrived, deadline=deadline, tokens_per_second=self._rate.tokens_per_second
        )

    def turn(self) -> list[Outcome]:
        """Give streams what waits, when all that has come together was pushed. What has ended with that already."""
        if not self._runs and self._is_brief():
            while self._queue.rows:
                run = _Run(self._take(least=0).rows)
                if run.entries:
                    values, started, ended = self._here(run.rows)
                    self._ended(run, values, started, ended)
        self._dispatch()
        return self._handed_over()

    def collect(self) -> list[Outcome]:
        """What streams have ended. They have the next before that is looked at."""
        ended = [(self._runs.pop(one.ticket), one) for one in self.streams.collect()]
        for run, one in ended:
            self._ran(run.rows, run.breadth, one.ended - one.started)
        self._dispatch()
        for run, one in ended:
            self._ended(run, self._values(run.rows, one.result), one.started, one.ended)
        return self._handed_over()

    def run_here(self, row: Row) -> Outcome | None:
        """Run a row in the caller's thread; None when anything else runs or waits, or when it would take too long.

        Nobody else should want the caller's thread meanwhile. Its outcome names no row.
        """
        is_idle = not self._runs and not self._queue.rows
        if not is_idle or row.length > LONGEST_HERE_SECONDS * self._rate.tokens_per_second:
            return None
        values, started, ended = self._here([row])
        if isinstance(values, Exception):
            values = [_failure("the model failed on this input", values)]
        return Outcome([], values, started, ended)

    def discard(self, entries: Sequence[Waiting]) -> None:
        """Forget rows that do not run yet. Those that run go on, and have an outcome."""
        taken = {id(entry) for entry in entries if not self._queue.discard(entry)}
        if taken:
            self._take_back(lambda entry: id(entry) in taken)

    def expire(self, now: float) -> tuple[list[Waiting], float]:
        """Take out the rows whose deadline has passed; also the next deadline (infinite: none)."""
        late = self._queue.expire(now) + self._take_back(lambda entry: entry.deadline < now)
        ahead = [entry.deadline for run in self._runs.values() if run.may_wait for entry in run.entries]
        return late, min([self._queue.next_deadline(), *ahead])

    def warmed(self, tokens: int, seconds: float) -> None:
        """A run outside the queue tells how fast the engine is."""
        self._rate.ran(tokens, seconds)

    def _is_brief(self) -> bool:
        """Whether all that waits is run here."""
        tokens_per_second = self._rate.tokens_per_second if self._rate.is_measured else 0.0
        if self._one_core:
            return self._queue.tokens <= ONE_CORE_SECONDS * tokens_per_second
        return self._queue.rows == 1 and self._queue.tokens <= BRIEF_SECONDS * tokens_per_second

    def _handed_over(self) -> list[Outcome]:
        outcomes, self._outcomes = self._outcomes, []
        return outcomes

    def _take(self, least: int) -> Taken:
        """The next batch; what has expired before it has its outcome."""
        now = perf_counter()
        taken = self._queue.take(workers=self._count, now=now, least=least, idle=not self._runs)
        if taken.expired:
            self._outcomes.append(Outcome(taken.expired, [deadline_exceeded() for _ in taken.expired], now, now))
        return taken

    def _dispatch(self) -> None:
        while self._queue.rows and len(self._runs) < self._count + AHEAD:
            taken = self._take(self._least_tokens)
            if taken.rows:
                is_lone = not self._runs and not self._queue.rows
                run = _Run(taken.rows)
                run.breadth = Breadth.WIDE if taken.divided else self._breadth(run.rows, is_lone=is_lone)
                self._submit(run)

    def _submit(self, run: _Run) -> None:
        try:
            ticket = self.streams.submit(stack(run.rows), run.breadth)
        except Exception as error:  # such as no memory for its arrays
            now = perf_counter()
            self._fail(run, error, now, now)
        else:
            self._runs[ticket] = run

    def _fail(self, run: _Run, error: Exception, started: float, ended: float) -> None:
        """What an engine throws must not reach strangers: the rows of a batch have another run each."""
        if len(run.entries) == 1:
            failure = _failure("the model failed on this input", error)
            self._outcomes.append(Outcome(run.entries, [failure], started, ended))
            return
        logger.warning("a batch of %d rows failed (%s): running each alone", len(run.entries), error)
        for entry in run.entries:
            self._submit(_Run([entry]))

    def _take_back(self, is_unwanted: Callable[[Waiting], bool]) -> list[Waiting]:
        """Rows that are unwanted, out of batches that have not begun. Others of the same batch stay in one."""
        found: list[Waiting] = []
        for ticket, run in list(self._runs.items()):
            gone = [entry for entry in run.entries if run.may_wait and is_unwanted(entry)]
            if not gone:
                continue
            if not self.streams.retract(ticket):
                run.may_wait = False
                continue
            del self._runs[ticket]
            found += gone
            if kept := [entry for entry in run.entries if entry not in gone]:
                self._submit(_Run(kept))
        return found

    @property
    def _least_tokens(self) -> int:
        expected = self._rate.tokens_per_second / self._count * LEAST_SHARED_SECONDS
        return max(1, min(LEAST_SHARED_TOKENS, int(expected)))

    def _breadth(self, rows: Sequence[Row], *, is_lone: bool, is_only_caller: bool = False) -> Breadth:
        """`is_lone`: nothing else runs or waits; `is_only_caller`: nor is there another, who might come meanwhile."""
        if len(rows) > 1:
            return Breadth.NARROW
        tokens = rows[0].length
        is_own_side = self._company.side(tokens) is self._company
        plan = self._plan if is_own_side or self._short_plan is None else self._short_plan
        if not plan.is_wide(tokens, alone=is_only_caller):
            return Breadth.NARROW
        if is_lone:
            return Breadth.WIDE
        # Beside a graph of short rows the engine might not know of runs on the other one.
        return Breadth.WIDENING if self._short_plan is None else Breadth.NARROW

    def _here(self, rows: list[Row]) -> tuple[list[Any] | Exception, float, float]:
        breadth = self._breadth(rows, is_lone=True, is_only_caller=True)
        result: list[Outputs] | Exception
        started = perf_counter()
        try:
            result = self._run_here(rows, breadth)
        except Exception as error:  # it fails its rows, and nothing else
            result = error
        ended = perf_counter()
        self._ran(rows, breadth, ended - started)
        return result if isinstance(result, Exception) else self._all_reduced(rows, result), started, ended

    def _run_here(self, rows: list[Row], breadth: Breadth) -> list[Outputs]:
        if self._run_row is not None and len(rows) == 1:
            outputs = self._run_row(rows[0], breadth)
            if outputs is not None:
                return [outputs]
        return run_rows(run_of(self._engine, breadth), self._io, rows)

    def _ended(self, run: _Run, values: list[Any] | Exception, started: float, ended: float) -> None:
        if isinstance(values, Exception):
            self._fail(run, values, started, ended)
        else:
            self._outcomes.append(Outcome(run.entries, values, started, ended))

    def _ran(self, rows: Sequence[Row], breadth: Breadth, seconds: float) -> None:
        if len(rows) == 1:
            longest, tokens = rows[0], rows[0].length
        else:
            longest, tokens = max(rows, key=_length), sum(map(_length, rows))
        # A wide run has all the cores, as long as it lasts.
        self._rate.ran(tokens, seconds * (self._count if breadth is Breadth.WIDE else 1))
        self._observer.batch(len(rows), tokens, self._company.side(longest.length).length(longest) * len(rows))

    def _values(self, rows: Sequence[Row], result: Outputs | Exception) -> list[Any] | Exception:
        if isinstance(result, Exception):
            return result
        try:
            parts = unstack(result, rows, self._io)
        except Exception as error:  # whatever is wrong with it
            return error
        return self._all_reduced(rows, parts)

    def _all_reduced(self, rows: Sequence[Row], parts: Sequence[Outputs]) -> list[Any]:
        return [self._reduced(row, own) for row, own in zip(rows, parts, strict=True)]

    def _reduced(self, row: Row, outputs: Outputs) -> Any:
        try:
            return self._reduce(row, outputs)
        except Exception as error:  # it fails its row, and nothing else
            return _failure("the model's output cannot be used", error)


def _length(row: Row) -> int:
    return row.length


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
