"""Which endpoints to look at, and when: each at most once at a time, however many events say so.

Two lanes: `URGENT` for what has just happened, `ROUTINE` for start-up and the slow resync, so that a change made while
five thousand endpoints are being looked at again is not the five-thousand-and-first in line.
"""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Hashable
from enum import StrEnum
from typing import Generic, TypeVar

from penstock_operator.cluster.backoff import Backoff
from penstock_operator.metrics import QUEUE_DEPTH, QUEUE_WAIT_SECONDS

Item = TypeVar("Item", bound=Hashable)

BACKOFF = Backoff(first_seconds=0.5, limit_seconds=120.0)


class Lane(StrEnum):
    """Who goes first."""

    URGENT = "urgent"
    ROUTINE = "routine"


class WorkQueue(Generic[Item]):
    """Keys to work on. Every `get` is followed by one `done` of the same key."""

    def __init__(self, *, backoff: Backoff = BACKOFF) -> None:
        self._backoff = backoff
        self._ready: dict[Lane, dict[Item, float]] = {lane: {} for lane in Lane}
        """Key to the time when it was added; a dict keeps the order."""
        self._working: set[Item] = set()
        self._again: dict[Item, tuple[Lane, float]] = {}
        """Added while being worked on."""
        self._due: dict[Item, float] = {}
        self._heap: list[tuple[float, int, Item]] = []
        self._count = 0
        self._timer: asyncio.TimerHandle | None = None
        self._failures: dict[Item, int] = {}
        self._wake = asyncio.Event()

    def __len__(self) -> int:
        """How many are ready; not those that wait for their time."""
        return sum(map(len, self._ready.values()))

    @property
    def busy(self) -> bool:
        """Whether anything is ready or being worked on; what waits for its time does not count."""
        return bool(self._working) or len(self) > 0

    @property
    def oldest_seconds(self) -> float:
        """How long the first in line has been ready; 0 for none."""
        now = asyncio.get_running_loop().time()
        return max((now - next(iter(lane.values())) for lane in self._ready.values() if lane), default=0.0)

    def add(self, item: Item, lane: Lane = Lane.URGENT) -> None:
        """Work on it as soon as possible, once, and again if it is being worked on."""
        now = asyncio.get_running_loop().time()
        if item in self._working:
            earlier = self._again.get(item)
            self._again[item] = (Lane.URGENT if earlier and earlier[0] is Lane.URGENT else lane, now)
            return
        if item in self._ready[Lane.URGENT]:
            return
        waiting_since = self._ready[Lane.ROUTINE].get(item)
        if waiting_since is not None:
            if lane is Lane.ROUTINE:
                return
            del self._ready[Lane.ROUTINE][item]
        self._ready[lane][item] = now
        self._report()
        self._wake.set()

    def add_after(self, item: Item, seconds: float) -> None:
        """Work on it in the routine lane after this time; an earlier appointment stands."""
        when = asyncio.get_running_loop().time() + seconds
        if self._due.get(item, float("inf")) <= when:
            return
        self._due[item] = when
        self._count += 1
        heapq.heappush(self._heap, (when, self._count, item))
        self._arm()

    def forget(self, item: Item) -> None:
        """It is gone: no appointments, no memory of failures."""
        self._due.pop(item, None)
        self._failures.pop(item, None)

    async def get(self) -> Item:
        """The next key; waits for one."""
        while True:
            for lane, ready in self._ready.items():
                if ready:
                    item = next(iter(ready))
                    added = ready.pop(item)
                    self._working.add(item)
                    # Whatever was to be looked at later is looked at now.
                    self._due.pop(item, None)
                    QUEUE_WAIT_SECONDS.labels(lane.value).observe(asyncio.get_running_loop().time() - added)
                    self._report()
                    return item
            self._wake.clear()
            await self._wake.wait()

    def done(self, item: Item, *, failed: bool = False, again_seconds: float | None = None) -> None:
        """Its work is over. Failed: again, after a back-off that grows. Else: again after `again_seconds`."""
        self._working.discard(item)
        again = self._again.pop(item, None)
        if failed:
            # An event does not cut the back-off short: one that comes with every try would make it a busy loop.
            self._failures[item] = self._failures.get(item, 0) + 1
            self.add_after(item, self._backoff.seconds(self._failures[item]))
            return
        self._failures.pop(item, None)
        if again is not None:
            self.add(item, again[0])
        elif again_seconds is not None:
            self.add_after(item, again_seconds)

    def _arm(self) -> None:
        loop = asyncio.get_running_loop()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        while self._heap and self._due.get(self._heap[0][2]) != self._heap[0][0]:
            heapq.heappop(self._heap)
        if self._heap:
            self._timer = loop.call_at(self._heap[0][0], self._ring)

    def _ring(self) -> None:
        # A timer may ring a clock tick early.
        now = asyncio.get_running_loop().time() + 0.001
        while self._heap and self._heap[0][0] <= now:
            when, _, item = heapq.heappop(self._heap)
            if self._due.get(item) == when:
                del self._due[item]
                self.add(item, Lane.ROUTINE)
        self._arm()

    def _report(self) -> None:
        for lane, ready in self._ready.items():
            QUEUE_DEPTH.labels(lane.value).set(len(ready))
