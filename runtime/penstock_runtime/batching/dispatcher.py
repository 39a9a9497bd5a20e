"""One loaded model at work: requests of an event loop on one side, the batcher and its streams on the other.

What comes in one turn of the loop is pushed first, and batches are made of it afterwards. All of it happens in the
loop's thread.

While one client asks after the other, rows run there as well: nobody else wants it, and waking a stream and being woken
by it takes up to 0.4 ms where idle cores have to be woken by a host. A loop that computes is deaf: others are heard
when it is done, and have waited. So another caller than the last ends it, and every so often a row takes the long way,
during which one would be heard in time. (A brief row that a turn has brought alone runs there whoever asks.)
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, NamedTuple

from penstock_runtime.batching.batcher import Batcher, Outcome, deadline_exceeded
from penstock_runtime.batching.queue import Waiting
from penstock_runtime.errors import DeadlineExceeded, RequestError
from penstock_runtime.rows import Row

ALONE = 16
"""Requests of one caller without another beside them, until the loop runs rows itself."""
LISTEN = 128
"""Of these one still takes the long way: under one in a hundred, so that it is not the 99th percentile."""


class Ran(NamedTuple):
    """A request's rows, run. Milliseconds of wall time; together they make up the time from arrival to the last row."""

    reduced: list[Any]
    """In the order of the rows."""
    queue_milliseconds: float
    """While none of its rows ran."""
    inference_milliseconds: float
    """While at least one did."""


@dataclass(slots=True, eq=False)
class _Call:
    """One request's rows on their way."""

    done: asyncio.Future[None]
    arrived: float
    reduced: list[Any]
    missing: int
    entries: list[Waiting] = field(default_factory=list)
    spans: list[tuple[float, float]] = field(default_factory=list)


class Lane:
    """Runs rows. Made anywhere; used from one event loop; closed once."""

    def __init__(self, batcher: Batcher) -> None:
        self.batcher = batcher
        self._loop: asyncio.AbstractEventLoop | None = None
        self._has_turn = False
        """It is the loop's to do: whatever comes until then is of the same turn."""
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = math.inf
        self._inside = 0
        self._alone = 0
        """Requests of the last caller that nobody came in beside, in a row."""
        self._caller = 0

    async def run(self, rows: Sequence[Row], *, arrived: float, deadline: float, caller: int = 0) -> Ran:
        """Run rows, together with whoever else waits as far as the plan allows.

        `arrived` and `deadline` (infinite: none) are on the clock of `perf_counter`. `caller`: who asks; nobody asks
        anew before the answer. A request whose waiter is cancelled costs nothing any more, but for rows that run
        already.
        Overloaded, InvalidInput (too big for the queue), DeadlineExceeded, InferenceFailed; whatever `reduce` raises.
        """
        loop = self._loop
        if loop is None:
            loop = self._loop = asyncio.get_running_loop()
            self.batcher.streams.attend(loop, self._collect)
        if not rows:
            return Ran([], 0.0, 0.0)
        self._alone = 0 if self._inside or caller != self._caller else self._alone + 1
        self._caller = caller
        if len(rows) == 1 and self._alone > ALONE and self._alone % LISTEN and deadline > perf_counter():
            outcome = self.batcher.run_here(rows[0])
            if outcome is not None:
                return _ran_here(outcome, arrived)
        self._inside += 1
        try:
            return await self._run(loop, rows, arrived, deadline)
        finally:
            self._inside -= 1

    async def _run(self, loop: asyncio.AbstractEventLoop, rows: Sequence[Row], arrived: float, deadline: float) -> Ran:
        call = _Call(loop.create_future(), arrived, [None] * len(rows), len(rows))
        call.entries = self.batcher.push(rows, call, arrived=arrived, deadline=deadline)
        self._call_turn(loop)
        if deadline < self._timer_at:
            self._set_timer(deadline)
        try:
            await call.done
        except BaseException:
            self.batcher.discard(call.entries)
            if not loop.is_closed():
                self._call_turn(loop)
            raise
        ended = max(end for _, end in call.spans)
        inference = _covered(call.spans)
        return Ran(call.reduced, max(0.0, ended - arrived - inference) * 1e3, inference * 1e3)

    async def close(self) -> None:
        """End the streams once they have run what they have. No `run` may be under way or follow."""
        if self._timer is not None:
            self._timer.cancel()
        self.batcher.streams.leave()
        await asyncio.to_thread(self.batcher.streams.stop)

    def _call_turn(self, loop: asyncio.AbstractEventLoop) -> None:
        """For rows that have come, or that others have left the streams to: no batch's end may be there to see them."""
        if not self._has_turn:
            self._has_turn = True
            loop.call_soon(self._turn)

    def _turn(self) -> None:
        self._has_turn = False
        self._settle_all(self.batcher.turn())

    def _collect(self) -> None:
        self._settle_all(self.batcher.collect())

    def _settle_all(self, outcomes: Sequence[Outcome]) -> None:
        for outcome in outcomes:
            for entry, value in zip(outcome.rows, outcome.values, strict=True):
                self._settle(entry, value, outcome)

    def _settle(self, entry: Waiting, value: Any, outcome: Outcome) -> None:
        call: _Call = entry.owner
        if call.done.done():
            return  # cancelled, or another of its rows has failed
        if isinstance(value, RequestError):
            in_part = isinstance(value, DeadlineExceeded) and call.spans
            call.done.set_exception(_ran_in_part() if in_part else value)
            return
        call.reduced[entry.index] = value
        call.spans.append((outcome.started, outcome.ended))
        call.missing -= 1
        if call.missing == 0:
            call.done.set_result(None)

    def _set_timer(self, deadline: float) -> None:
        """What has expired is dropped when its turn comes; by the timer while all streams are busy with long rows."""
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
            self._settle(entry, deadline_exceeded(), Outcome([], [], now, now))
        assert self._loop is not None  # noqa: S101 - run() has set it
        self._call_turn(self._loop)
        self._set_timer(next_deadline)


def _ran_here(outcome: Outcome, arrived: float) -> Ran:
    value = outcome.values[0]
    if isinstance(value, RequestError):
        raise value
    queue, inference = outcome.started - arrived, outcome.ended - outcome.started
    return Ran([value], max(0.0, queue) * 1e3, inference * 1e3)


def _ran_in_part() -> DeadlineExceeded:
    """For a request that others need not have been in the way of."""
    return DeadlineExceeded(
        "not all of the request had started to run by its deadline",
        remedy="Send fewer texts in one request, or allow more time",
    )


def _covered(spans: list[tuple[float, float]]) -> float:
    """Seconds that at least one of the spans covers."""
    if len(spans) == 1:
        return spans[0][1] - spans[0][0]
    total = 0.0
    reached = -math.inf
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total
