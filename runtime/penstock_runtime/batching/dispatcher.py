"""Connects the batcher to an event loop: runs the rows of requests and returns their results.

All rows that arrive in one iteration of the loop are queued first, and batches are made afterwards. Everything happens
in the thread of the loop.

While requests come from one client, one after the other, their rows run in the loop's thread as well, to avoid the time
for waking a stream (see `batcher`). Meanwhile the loop reads no other request. Therefore a request of another client
ends this, and one of every `STREAM_EVERY` requests uses a stream, so that a second client is noticed.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import TYPE_CHECKING, Any, NamedTuple

from penstock.manifest import GraphIO
from penstock.recipe import Plan
from penstock_runtime.batching.batcher import Batcher, BatchObserver, BatchResult, Reduce
from penstock_runtime.batching.queue import QueuedRow, partly_run
from penstock_runtime.engines.base import Engine
from penstock_runtime.errors import DeadlineExceeded, RequestError, deadline_exceeded
from penstock_runtime.rows import Row

if TYPE_CHECKING:  # servers of one model do not load it
    from penstock_runtime.batching.shared_cores import CoreClaim, CoreShare, NextWork

SINGLE_CLIENT_REQUESTS = 16
"""Consecutive requests of one client, with no other in between, before rows run in the loop's thread."""
STREAM_EVERY = 128
"""One of this many requests still uses a stream: fewer than one in a hundred, so that it is not the 99th percentile."""


class RequestResult(NamedTuple):
    """Results of a request's rows. Milliseconds of wall time; both together are the time from arrival to the last
    row."""

    reduced: list[Any]
    """In the order of the rows."""
    queue_milliseconds: float
    """While none of its rows ran."""
    inference_milliseconds: float
    """While at least one ran."""


@dataclass(slots=True, eq=False)
class Call:
    """A request with queued or running rows."""

    batcher: Batcher
    done: asyncio.Future[None]
    arrived: float
    reduced: list[Any]
    missing: int
    entries: list[QueuedRow] = field(default_factory=list)
    spans: list[tuple[float, float]] = field(default_factory=list)
    claim: CoreClaim | None = None
    """On the cores, if several models share them."""

    def is_waiting(self) -> bool:
        """Whether a row of it counts to the batcher's `depth`."""
        return self.batcher.has_waiting(self.entries)

    def refuse(self, error: RequestError) -> None:
        """End it with an error; the rows that wait are dropped at once."""
        self.batcher.discard(self.entries)
        if not self.done.done():
            self.done.set_exception(error)


class Dispatcher:
    """Runs the rows of requests. Used from one event loop; closed once."""

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
        self.batcher = Batcher(engine, io, plan, reduce, observer=observer, one_core=one_core, share=share)
        self.share = share
        if share is not None:
            share.queues.append(self)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._dispatch_scheduled = False
        """The loop will call `_on_dispatch`, for all rows that arrive until then."""
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = math.inf
        self._waiting_requests = 0
        self._consecutive = 0
        """Consecutive requests of the last caller without another request in between."""
        self._last_caller = 0

    def run_inline(self, rows: Sequence[Row], *, arrived: float, deadline: float, caller: int) -> RequestResult | None:
        """Run a request in the loop's thread if it is one of many of a single client; else None: `start` it.

        `arrived` and `deadline` (infinite: none) are on the clock of `perf_counter`. `caller`: number of the
        connection, which has one request at a time. InferenceFailed, and what `reduce` raises.
        """
        if not rows:
            return RequestResult([], 0.0, 0.0)
        self._consecutive = 0 if self._waiting_requests or caller != self._last_caller else self._consecutive + 1
        self._last_caller = caller
        consecutive = self._consecutive
        is_single = len(rows) == 1 and consecutive > SINGLE_CLIENT_REQUESTS and consecutive % STREAM_EVERY
        if not is_single or deadline <= perf_counter():
            return None
        result = self.batcher.run_inline(rows[0])
        return None if result is None else _inline_result(result, arrived)

    def start(
        self,
        rows: Sequence[Row],
        *,
        arrived: float,
        deadline: float,
        client: str = "",
        is_bulk: bool = False,
        claim: CoreClaim | None = None,
    ) -> Call:
        """Queue the rows of a request, to run in batches with the rows of other requests as far as the plan allows.

        `result` is to be awaited next. `arrived` and `deadline` as for `run_inline`. `client`: clients have equal
        shares of what the streams compute. `is_bulk`: the rows run in the bulk lane (see `queue`). `claim`: of the
        request, if several models share the cores.
        """
        loop = self._loop
        if loop is None:
            loop = self._loop = asyncio.get_running_loop()
            self.batcher.streams.attend(loop, self._on_batches_ended)
        self._waiting_requests += 1
        call = Call(self.batcher, loop.create_future(), arrived, [None] * len(rows), len(rows), claim=claim)
        if claim is not None:
            claim.work = call
        call.entries = self.batcher.push(rows, call, arrived=arrived, deadline=deadline, client=client, is_bulk=is_bulk)
        self._schedule_dispatch(loop)
        if deadline < self._timer_at:
            self._set_timer(deadline)
        return call

    async def result(self, call: Call) -> RequestResult:
        """The results of a request. Cancelling this drops its rows, except for those that run already.

        DeadlineExceeded, InferenceFailed, the error of `Call.refuse`, and what `reduce` raises.
        """
        try:
            await call.done
        except BaseException:
            self.batcher.discard(call.entries)
            if self._loop is not None and not self._loop.is_closed():
                self._schedule_dispatch(self._loop)
            raise
        finally:
            self._waiting_requests -= 1
        ended = max(end for _, end in call.spans)
        inference = _covered_seconds(call.spans)
        return RequestResult(call.reduced, max(0.0, ended - call.arrived - inference) * 1e3, inference * 1e3)

    async def close(self) -> None:
        """Stop the streams after their batches. No `run` may be in progress or follow."""
        if self._timer is not None:
            self._timer.cancel()
        if self.share is not None:
            self.share.queues.remove(self)
        self.batcher.streams.leave()
        await asyncio.to_thread(self.batcher.streams.stop)

    # Of a model that shares its cores: see `SharedQueue`

    def head(self) -> NextWork | None:
        """Its next work; None if nothing waits."""
        found = self.batcher.next_head()
        if found is None or self.share is None:
            return None
        entry, seconds, cores = found
        return self.share.head(entry, seconds, cores)

    def run_next(self, *, seconds: float, is_alone: bool) -> tuple[int, float]:
        """Start its next batch."""
        started, cores, expected = self.batcher.run_next(seconds=seconds, is_alone=is_alone)
        for entry in started:
            claim = entry.owner.claim
            if claim is not None:
                claim.seconds = max(0.0, claim.seconds - self.batcher.core_seconds([entry.row])[0])
        self._deliver_all(self.batcher.take_results())
        return cores, expected

    @staticmethod
    def load(now: float) -> float:
        """None: all its work has claims."""
        _ = now
        return 0.0

    def _schedule_dispatch(self, loop: asyncio.AbstractEventLoop) -> None:
        """After rows were added or dropped: without a running batch nothing else would start the next one."""
        if not self._dispatch_scheduled:
            self._dispatch_scheduled = True
            loop.call_soon(self._on_dispatch)

    def _on_dispatch(self) -> None:
        self._dispatch_scheduled = False
        self._deliver_all(self.batcher.dispatch())

    def _on_batches_ended(self) -> None:
        self._deliver_all(self.batcher.collect())

    def _deliver_all(self, results: Sequence[BatchResult]) -> None:
        for result in results:
            for entry, value in zip(result.rows, result.values, strict=True):
                self._deliver(entry, value, result)

    def _deliver(self, entry: QueuedRow, value: Any, result: BatchResult) -> None:
        call: Call = entry.owner
        if call.done.done():
            return  # cancelled, or another of its rows has failed
        if isinstance(value, RequestError):
            in_part = isinstance(value, DeadlineExceeded) and call.spans
            call.done.set_exception(partly_run() if in_part else value)
            return
        call.reduced[entry.index] = value
        call.spans.append((result.started, result.ended))
        call.missing -= 1
        if call.missing == 0:
            call.done.set_result(None)

    def _set_timer(self, deadline: float) -> None:
        """Drop expired rows in time while all streams are busy; otherwise `dispatch` drops them."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None
        self._timer_at = deadline
        if deadline < math.inf:
            assert self._loop is not None  # noqa: S101 - run() has set it
            self._timer = self._loop.call_later(max(0.0, deadline - perf_counter()) + 0.001, self._expire)

    def _expire(self) -> None:
        late, next_deadline = self.batcher.expire(perf_counter())
        now = perf_counter()
        for entry in late:
            self._deliver(entry, deadline_exceeded(), BatchResult([], [], now, now))
        assert self._loop is not None  # noqa: S101 - run() has set it
        self._schedule_dispatch(self._loop)
        self._set_timer(next_deadline)


def _inline_result(result: BatchResult, arrived: float) -> RequestResult:
    value = result.values[0]
    if isinstance(value, RequestError):
        raise value
    queue, inference = result.started - arrived, result.ended - result.started
    return RequestResult([value], max(0.0, queue) * 1e3, inference * 1e3)


def _covered_seconds(spans: list[tuple[float, float]]) -> float:
    """Seconds that at least one of the spans covers."""
    if len(spans) == 1:
        return spans[0][1] - spans[0][0]
    total = 0.0
    reached = -math.inf
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total
