"""Makes batches of the waiting rows and gives them to the engine's streams. Used from one thread; never blocks.

A batch is made when a stream is free, except for one that is prepared ahead: a stream that finishes takes it at once,
before the event loop has noticed. Short rows can run in the calling thread (`run_inline`). That avoids waking a stream
and being woken by it: 12 us where the core is awake, and up to 0.4 ms on virtual machines where the host has to wake
idle cores.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from time import perf_counter
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from penstock.logs import log_event
from penstock.manifest import GraphIO
from penstock.recipe import Plan
from penstock_runtime.batching.queue import BatchPolicy, QueuedRow, RowQueue, TakenBatch, TokenRate
from penstock_runtime.engines.base import Engine, Parallelism, RunsRows, run_of
from penstock_runtime.errors import InferenceFailed, RequestError, deadline_exceeded
from penstock_runtime.rows import Outputs, Row, collate, run_rows, split

if TYPE_CHECKING:  # servers of one model do not load it
    from penstock_runtime.batching.shared_cores import CoreShare

logger = logging.getLogger("penstock.batching")

MAX_INLINE_SECONDS = 0.01
"""Rows that are expected to take longer run on a stream: the event loop is blocked while a row runs in its thread."""

BRIEF_SECONDS = 0.001
"""A single waiting row that is expected to take no longer runs in the loop's thread, whichever client it is from."""

ONE_CORE_SECONDS = 0.004
"""On a process's only core all waiting rows run in the loop's thread if they are expected to take no longer in total: a
stream would take the core from the loop, and would run a batch of one row where two have arrived."""

PREPARED_BATCHES = 1
"""Batches that are made while all streams are busy."""

BRIEF_RUN_SECONDS = 0.005
BRIEF_RUN_TOKENS = 64
"""While there are requests of several clients, batches have no more tokens than a stream is expected to run in this
time (at least the second value: smaller batches cost too much), and none is prepared."""

OVERTAKEN_LENGTHS = 4
OVERTAKING_SECONDS = 0.002
OVERTAKING_TOKENS = 16
"""A request that is expected to take no longer than the second value, or of no more tokens than the third, runs in the
loop's thread while all streams run rows of other clients that are `OVERTAKEN_LENGTHS` times as long: it could not share
a batch with these, and would wait for the end of one."""

MIN_SHARED_TOKENS = 32
MIN_SHARED_SECONDS = 0.002
"""Waiting rows of no more tokens than this, or than one stream is expected to run in this time, are not shared among
streams: waking another stream takes a good part of that, and each batch reads all weights."""

Reduce = Callable[[Row, Outputs], Any]
"""`Task.reduce`."""


class BatchObserver(Protocol):
    """Receives events from batching and caches. Called in the event loop: must be fast."""

    def batch(self, rows: int, real_tokens: int, padded_tokens: int) -> None:
        """A batch has run: `real_tokens` of its rows, padded to `padded_tokens`."""
        ...

    def cache(self, name: str, *, hit: bool) -> None:
        """A cache was queried; `name` is `answers` or `tokens`. `in-progress`, always a hit: a request waited
        for the answer of another one with the same content."""
        ...


class NullObserver:
    """Ignores all events."""

    def batch(self, rows: int, real_tokens: int, padded_tokens: int) -> None:
        """See `BatchObserver`."""

    def cache(self, name: str, *, hit: bool) -> None:
        """See `BatchObserver`."""


class BatchResult(NamedTuple):
    """The results of rows. A value that is a RequestError is the row's failure."""

    rows: list[QueuedRow]
    values: list[Any]
    started: float
    """Clock of `perf_counter`, seconds."""
    ended: float


@dataclass(slots=True, eq=False)
class _Batch:
    """A batch that was submitted to the streams."""

    entries: list[QueuedRow]
    parallelism: Parallelism = Parallelism.NARROW
    may_wait: bool = True
    """Not known to have started."""
    run: int | None = None
    """Its number for the cores that several models share."""
    cores: int = 0
    """That it has of these."""
    expected: float = 0.0
    """Seconds on them."""

    @property
    def rows(self) -> list[Row]:
        return [entry.row for entry in self.entries]

    @property
    def tokens(self) -> int:
        return sum(entry.row.length for entry in self.entries)


class Batcher:
    """The queue, and the batches in progress. Used from one thread."""

    def __init__(
        self,
        engine: Engine,
        io: GraphIO,
        plan: Plan,
        reduce: Reduce,
        *,
        observer: BatchObserver,
        one_core: bool = False,
        share: CoreShare | None = None,
    ) -> None:
        """`one_core`: the calling thread and the streams share one core. `share`: of the cores, if other models have
        them, too."""
        self._engine = engine
        self._run_row = engine.run_row if isinstance(engine, RunsRows) else None
        self._io = io
        self._reduce = reduce
        self._policy = BatchPolicy.of(plan, engine.facts)
        self._plan = plan.unrouted
        self._short_plan = plan.of_short_rows
        self._observer = observer
        self._queue = RowQueue(self._policy)
        self._rate = TokenRate(engine.facts.in_flight or plan.streams)
        self._stream_count = plan.streams
        # A device may take more runs at once than it has copies of the model, and uses no core of this process.
        device = engine.facts.in_flight
        self._in_flight = plan.streams if device is None else device
        self._share = share
        self._runs_inline = device is None and share is None
        parts = (engine.facts, engine.facts.short or engine.facts)
        self._runs_next_to_streams = share is None and all(facts.runs_next_to_streams for facts in parts)
        self._one_core = one_core and plan.streams == 1
        self._batches: dict[int, _Batch] = {}
        """By ticket, in the order in which they start."""
        self._results: list[BatchResult] = []
        """Not yet returned to the caller."""
        self.streams = engine.start_streams()
        """The caller attends to them (`collect` when batches have ended), and stops them once no row waits."""

    @property
    def depth(self) -> tuple[int, int]:
        """Waiting rows and tokens, with the rows of prepared batches."""
        rows, tokens = self._queue.rows, self._queue.tokens
        if len(self._batches) > self._in_flight:
            ahead = list(self._prepared())
            rows += sum(len(batch.entries) for batch in ahead)
            tokens += sum(batch.tokens for batch in ahead)
        return rows, tokens

    @property
    def bulk_depth(self) -> tuple[int, int]:
        """Of these, those of the bulk lane."""
        rows, tokens = self._queue.bulk
        if len(self._batches) > self._in_flight:
            ahead = [entry.row.length for batch in self._prepared() for entry in batch.entries if entry.is_bulk]
            rows, tokens = rows + len(ahead), tokens + sum(ahead)
        return rows, tokens

    def _prepared(self) -> Iterator[_Batch]:
        """The batches that wait for a stream."""
        return islice(self._batches.values(), self._in_flight, None)

    def has_waiting(self, entries: Sequence[QueuedRow]) -> bool:
        """Whether a row of these counts to `depth`."""
        if not all(entry.removed for entry in entries):
            return True
        prepared = {id(entry) for batch in self._prepared() for entry in batch.entries}
        return any(id(entry) in prepared for entry in entries)

    @property
    def tokens_per_second(self) -> float:
        """Throughput of all streams while busy, as measured recently."""
        return self._rate.tokens_per_second

    def push(
        self,
        rows: Sequence[Row],
        owner: Any,
        *,
        arrived: float,
        deadline: float,
        client: str = "",
        is_bulk: bool = False,
    ) -> list[QueuedRow]:
        """Queue rows until `dispatch`. Each is in exactly one result, unless discarded."""
        return self._queue.push(
            rows,
            owner,
            arrived=arrived,
            deadline=deadline,
            tokens_per_second=self._rate.tokens_per_second,
            client=client,
            is_bulk=is_bulk,
        )

    def dispatch(self) -> list[BatchResult]:
        """Give waiting rows to the streams, after all rows that arrived together were pushed. Results so far."""
        if not self._batches and self._is_brief():
            while self._queue.rows:
                self._run_next_inline(self._brief_run_tokens)
        while self._overtakes():
            self._run_next_inline(1)
        self._dispatch()
        return self.take_results()

    def collect(self) -> list[BatchResult]:
        """Results of the batches that have ended. The streams get the next batches before these are processed."""
        ended = [(self._batches.pop(one.ticket), one) for one in self.streams.collect()]
        for batch, one in ended:
            self._measure(batch.rows, batch.parallelism, one.ended - one.started)
            if self._share is not None and batch.run is not None:
                self._share.cost.observe(batch.expected, one.ended - one.started)
                self._give_back(batch)
        self._dispatch()
        for batch, one in ended:
            self._finish(batch, self._values(batch.rows, one.result), one.started, one.ended)
        return self.take_results()

    def run_inline(self, row: Row) -> BatchResult | None:
        """Run a row in the calling thread; None if anything else runs or waits, or if it would take too long.

        For callers whose thread has nothing else to do meanwhile. `rows` of the result is empty.
        """
        is_idle = not self._batches and not self._queue.rows and self._runs_inline
        if not is_idle or row.length > MAX_INLINE_SECONDS * self._rate.tokens_per_second:
            return None
        values, started, ended = self._run_inline([row])
        if isinstance(values, Exception):
            values = [_failure("the model failed on this input", values)]
        return BatchResult([], values, started, ended)

    def discard(self, entries: Sequence[QueuedRow]) -> None:
        """Drop rows that have not started. Rows that run continue, and have a result."""
        taken = {id(entry) for entry in entries if not self._queue.discard(entry)}
        if taken:
            self._retract(lambda entry: id(entry) in taken)

    def expire(self, now: float) -> tuple[list[QueuedRow], float]:
        """Remove the rows that are past their deadline; also the next deadline (infinite: none)."""
        late = self._queue.expire(now) + self._retract(lambda entry: entry.deadline < now)
        ahead = [entry.deadline for batch in self._batches.values() if batch.may_wait for entry in batch.entries]
        return late, min([self._queue.next_deadline(), *ahead])

    def add_measurement(self, tokens: int, seconds: float) -> None:
        """Count a run outside the queue, such as a warm-up, towards the throughput."""
        self._rate.add(tokens, seconds)

    # Of a model that shares its cores

    def core_seconds(self, rows: Sequence[Row]) -> tuple[float, float]:
        """The time of rows on one core, and that of the longest one from its start to its end."""
        assert self._share is not None  # noqa: S101 - called for a share only
        rate = self._rate.tokens_per_second / self._plan.streams / self._plan.threads_per_stream
        each = [self._share.cost.seconds(row.length, rate) for row in rows]
        return sum(each), max(each, default=0.0) / self._plan.threads_per_stream

    def next_head(self) -> tuple[QueuedRow, float, int] | None:
        """The row that is next, its seconds on one core, and the cores that it needs; None if nothing waits, or if all
        streams are busy."""
        if len(self._batches) >= self._in_flight:
            return None
        row = self._queue.next_row()
        return None if row is None else (row, self.core_seconds([row.row])[0], self._plan.threads_per_stream)

    def run_next(self, *, seconds: float, is_alone: bool) -> tuple[list[QueuedRow], int, float]:
        """Submit the next batch, of no more than about `seconds` if that leaves it a row: its rows, the cores that it
        takes, and for how long. `is_alone`: nothing else runs or waits. Rows that expired have results."""
        assert self._share is not None  # noqa: S101 - called for a share only
        most = max(1, int(self._rate.tokens_per_second / self._stream_count * seconds))
        taken = self._take(self._min_shared_tokens, most, always_brief=True)
        if not taken.rows:
            return [], 0, 0.0
        batch = _Batch(taken.rows)
        is_alone = is_alone and not self._queue.rows
        is_wide = taken.divided or self._parallelism(batch.rows, is_alone=is_alone) is Parallelism.WIDE
        batch.cores = self._plan.threads_per_stream
        if is_alone and is_wide:
            batch.parallelism, batch.cores = Parallelism.WIDE, self._share.cores.cores
        batch.expected = self.core_seconds(batch.rows)[0] / batch.cores
        batch.run = self._share.cores.started(batch.cores, batch.expected)
        self._submit(batch)
        return taken.rows, batch.cores, batch.expected

    def _give_back(self, batch: _Batch) -> None:
        if batch.run is not None and self._share is not None:
            self._share.cores.ended(batch.run)
            batch.run = None

    def _is_brief(self) -> bool:
        """True if all waiting rows are run in the calling thread."""
        tokens_per_second = self._rate.tokens_per_second if self._rate.is_measured else 0.0
        if not self._runs_inline:
            return False
        if self._one_core:
            return self._queue.tokens <= ONE_CORE_SECONDS * tokens_per_second
        return self._queue.rows == 1 and self._queue.tokens <= BRIEF_SECONDS * tokens_per_second

    def _overtakes(self) -> bool:
        """Whether the next row runs in the calling thread, next to the streams. See `OVERTAKEN_LENGTHS`."""
        if (
            not self._runs_next_to_streams
            or len(self._batches) < self._in_flight
            or not self._queue.is_shared(perf_counter())
        ):
            return False
        row = self._queue.next_row()
        brief = OVERTAKING_SECONDS * self._rate.tokens_per_second / self._stream_count
        if row is None or row.request_tokens > max(brief, OVERTAKING_TOKENS):
            return False
        running = (entry for batch in self._batches.values() for entry in batch.entries)
        return all(entry.row.length >= OVERTAKEN_LENGTHS * row.row.length for entry in running)

    def _run_next_inline(self, brief: int | None) -> None:
        batch = _Batch(self._take(0, brief).rows)
        if batch.entries:
            values, started, ended = self._run_inline(batch.rows)
            self._finish(batch, values, started, ended)

    def take_results(self) -> list[BatchResult]:
        """Results that no call has returned yet."""
        results, self._results = self._results, []
        return results

    def _take(self, least: int, brief: int | None, *, always_brief: bool = False) -> TakenBatch:
        """The next batch. Rows that expired before it get their results."""
        now = perf_counter()
        taken = self._queue.take(
            streams=self._stream_count,
            now=now,
            least=least,
            brief=brief,
            always_brief=always_brief,
            idle=not self._batches,
        )
        if taken.expired:
            self._results.append(BatchResult(taken.expired, [deadline_exceeded() for _ in taken.expired], now, now))
        return taken

    def _dispatch(self) -> None:
        if self._share is not None:
            self._share.cores.fill()
            return
        prepared = 0 if self._runs_inline and self._queue.is_shared(perf_counter()) else PREPARED_BATCHES
        while self._queue.rows and len(self._batches) < self._in_flight + prepared:
            taken = self._take(self._min_shared_tokens, self._brief_run_tokens)
            if taken.rows:
                is_alone = not self._batches and not self._queue.rows
                batch = _Batch(taken.rows)
                batch.parallelism = (
                    Parallelism.WIDE if taken.divided else self._parallelism(batch.rows, is_alone=is_alone)
                )
                self._submit(batch)

    def _submit(self, batch: _Batch) -> None:
        try:
            ticket = self.streams.submit(collate(batch.rows), batch.parallelism)
        except Exception as error:  # such as no memory for its arrays
            self._give_back(batch)
            now = perf_counter()
            self._fail(batch, error, now, now)
        else:
            self._batches[ticket] = batch

    def _fail(self, batch: _Batch, error: Exception, started: float, ended: float) -> None:
        """Run each row of a failed batch again separately, so that one request cannot fail another."""
        if len(batch.entries) == 1:
            failure = _failure("the model failed on this input", error)
            self._results.append(BatchResult(batch.entries, [failure], started, ended))
            return
        logger.warning(
            "a batch of %d rows failed (%s): running each row separately",
            len(batch.entries),
            error,
            extra=log_event("BatchFailed", reason=error),
        )
        for entry in batch.entries:
            self._submit(_Batch([entry]))

    def _retract(self, is_unwanted: Callable[[QueuedRow], bool]) -> list[QueuedRow]:
        """Remove rows from batches that have not started. The other rows of such a batch are submitted again."""
        found: list[QueuedRow] = []
        for ticket, batch in list(self._batches.items()):
            gone = [entry for entry in batch.entries if batch.may_wait and is_unwanted(entry)]
            if not gone:
                continue
            if not self.streams.retract(ticket):
                batch.may_wait = False
                continue
            del self._batches[ticket]
            found += gone
            if kept := [entry for entry in batch.entries if entry not in gone]:
                batch.entries = kept
                self._submit(batch)
            else:
                self._give_back(batch)
        return found

    @property
    def _brief_run_tokens(self) -> int | None:
        if not self._runs_inline:  # a device takes as long for a row as for a batch of its shape
            return None
        return max(BRIEF_RUN_TOKENS, int(self._rate.tokens_per_second / self._stream_count * BRIEF_RUN_SECONDS))

    @property
    def _min_shared_tokens(self) -> int:
        expected = self._rate.tokens_per_second / self._stream_count * MIN_SHARED_SECONDS
        return max(1, min(MIN_SHARED_TOKENS, int(expected)))

    def _parallelism(self, rows: Sequence[Row], *, is_alone: bool, is_only_caller: bool = False) -> Parallelism:
        """`is_alone`: nothing else runs or waits; `is_only_caller`: and no other request can arrive meanwhile."""
        if len(rows) > 1:
            return Parallelism.NARROW
        tokens = rows[0].length
        is_own_policy = self._policy.for_tokens(tokens) is self._policy
        plan = self._plan if is_own_policy or self._short_plan is None else self._short_plan
        if not plan.is_wide(tokens, alone=is_only_caller):
            return Parallelism.NARROW
        if is_alone:
            return Parallelism.WIDE
        # With a second graph for short rows, the engine does not see the runs on the other graph.
        return Parallelism.WIDENING if self._short_plan is None else Parallelism.NARROW

    def _run_inline(self, rows: list[Row]) -> tuple[list[Any] | Exception, float, float]:
        parallelism = self._parallelism(rows, is_alone=True, is_only_caller=True)
        result: list[Outputs] | Exception
        started = perf_counter()
        try:
            result = self._run_rows_inline(rows, parallelism)
        except Exception as error:  # fails these rows only
            result = error
        ended = perf_counter()
        self._measure(rows, parallelism, ended - started)
        return result if isinstance(result, Exception) else self._all_reduced(rows, result), started, ended

    def _run_rows_inline(self, rows: list[Row], parallelism: Parallelism) -> list[Outputs]:
        if self._run_row is not None and len(rows) == 1:
            outputs = self._run_row(rows[0], parallelism)
            if outputs is not None:
                return [outputs]
        return run_rows(run_of(self._engine, parallelism), self._io, rows)

    def _finish(self, batch: _Batch, values: list[Any] | Exception, started: float, ended: float) -> None:
        if isinstance(values, Exception):
            self._fail(batch, values, started, ended)
        else:
            self._results.append(BatchResult(batch.entries, values, started, ended))

    def _measure(self, rows: Sequence[Row], parallelism: Parallelism, seconds: float) -> None:
        if len(rows) == 1:
            longest, tokens = rows[0], rows[0].length
        else:
            longest, tokens = max(rows, key=_length), sum(map(_length, rows))
        # A wide run uses all streams.
        self._rate.add(tokens, seconds * (self._stream_count if parallelism is Parallelism.WIDE else 1))
        self._observer.batch(len(rows), tokens, self._policy.for_tokens(longest.length).length(longest) * len(rows))

    def _values(self, rows: Sequence[Row], result: Outputs | Exception) -> list[Any] | Exception:
        if isinstance(result, Exception):
            return result
        try:
            parts = split(result, rows, self._io)
        except Exception as error:  # such as unexpected shapes
            return error
        return self._all_reduced(rows, parts)

    def _all_reduced(self, rows: Sequence[Row], parts: Sequence[Outputs]) -> list[Any]:
        return [self._reduced(row, own) for row, own in zip(rows, parts, strict=True)]

    def _reduced(self, row: Row, outputs: Outputs) -> Any:
        try:
            return self._reduce(row, outputs)
        except Exception as error:  # fails this row only
            return _failure("the model's output cannot be used", error)


def _length(row: Row) -> int:
    return row.length


def _failure(what: str, error: Exception) -> RequestError:
    if isinstance(error, RequestError):
        return error
    logger.error("a row failed: %s", what, exc_info=error, extra=log_event("RowFailed", reason=error))
    return InferenceFailed(f"{what}: {type(error).__name__}", remedy="The server's log has the details")
