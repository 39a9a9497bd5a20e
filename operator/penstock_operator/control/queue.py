"""The work queue, and time slices for long work in the event loop.

The queue holds each key at most once, however many events name it, and gives it to one worker at a time. Two
priorities: `URGENT` for changes, `ROUTINE` for start-up and resync, so that a change does not wait behind thousands of
routine reconciles.
"""

from __future__ import annotations

import asyncio
import heapq
import time
from collections.abc import Callable, Hashable
from enum import StrEnum
from typing import Generic, TypeVar

from penstock_operator.cluster.errors import Backoff
from penstock_operator.metrics import QUEUE_DEPTH, QUEUE_WAIT_SECONDS

Item = TypeVar("Item", bound=Hashable)
BACKOFF = Backoff(first_seconds=0.5, limit_seconds=120.0)


class Priority(StrEnum):
    """Which keys are taken first."""

    URGENT = "urgent"
    ROUTINE = "routine"


class WorkQueue(Generic[Item]):
    """Keys to work on. Each `get` must be followed by one `done` with the same key."""

    def __init__(self, *, backoff: Backoff = BACKOFF) -> None:
        self._backoff = backoff
        self._ready: dict[Priority, dict[Item, float]] = {priority: {} for priority in Priority}
        """Key to the time when it was added; a dict keeps the order."""
        self._working: set[Item] = set()
        self._again: dict[Item, tuple[Priority, float]] = {}
        """Keys that were added while a worker has them."""
        self._due: dict[Item, float] = {}
        self._heap: list[tuple[float, int, Item]] = []
        self._count = 0
        self._timer: asyncio.TimerHandle | None = None
        self._failures: dict[Item, int] = {}
        self._wake = asyncio.Event()

    def __len__(self) -> int:
        """Number of keys that are ready, without delayed ones."""
        return sum(map(len, self._ready.values()))

    @property
    def busy(self) -> bool:
        """Whether a key is ready or a worker has one; delayed keys do not count."""
        return bool(self._working) or len(self) > 0

    @property
    def oldest_seconds(self) -> float:
        """How long the oldest ready key has waited; 0 for none."""
        now = asyncio.get_running_loop().time()
        return max((now - next(iter(priority.values())) for priority in self._ready.values() if priority), default=0.0)

    def add(self, item: Item, priority: Priority = Priority.URGENT) -> None:
        """Add a key. If a worker has it, it is added again when the worker is done."""
        now = asyncio.get_running_loop().time()
        if item in self._working:
            earlier = self._again.get(item)
            self._again[item] = (Priority.URGENT if earlier and earlier[0] is Priority.URGENT else priority, now)
            return
        if item in self._ready[Priority.URGENT]:
            return
        waiting_since = self._ready[Priority.ROUTINE].get(item)
        if waiting_since is not None:
            if priority is Priority.ROUTINE:
                return
            del self._ready[Priority.ROUTINE][item]
        self._ready[priority][item] = now
        self._report()
        self._wake.set()

    def add_after(self, item: Item, seconds: float) -> None:
        """Add a key with routine priority after this time, unless it is already due earlier."""
        when = asyncio.get_running_loop().time() + seconds
        if self._due.get(item, float("inf")) <= when:
            return
        self._due[item] = when
        self._count += 1
        heapq.heappush(self._heap, (when, self._count, item))
        self._arm()

    def forget(self, item: Item) -> None:
        """Forget a deleted object: its delays and its failures."""
        self._due.pop(item, None)
        self._failures.pop(item, None)

    async def get(self) -> Item:
        """The next key; waits for one."""
        while True:
            for priority, ready in self._ready.items():
                if ready:
                    item = next(iter(ready))
                    added = ready.pop(item)
                    self._working.add(item)
                    # A delayed reconcile of the key is no longer needed.
                    self._due.pop(item, None)
                    QUEUE_WAIT_SECONDS.labels(priority.value).observe(asyncio.get_running_loop().time() - added)
                    self._report()
                    return item
            self._wake.clear()
            await self._wake.wait()

    def done(self, item: Item, *, failed: bool = False, again_seconds: float | None = None) -> None:
        """A worker is done with a key. `failed`: add it again after a growing back-off; else after `again_seconds`."""
        self._working.discard(item)
        again = self._again.pop(item, None)
        if failed:
            # An event does not shorten the back-off: an event for each failed attempt would cause a busy loop.
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
                self.add(item, Priority.ROUTINE)
        self._arm()

    def _report(self) -> None:
        for priority, ready in self._ready.items():
            QUEUE_DEPTH.labels(priority.value).set(len(ready))


SLICE_SECONDS = 0.02


class TimeSlices:
    """Limits the time that the tasks which share it take in one iteration of the event loop."""

    def __init__(self, seconds: float = SLICE_SECONDS) -> None:
        self._seconds = seconds
        self._begun: float | None = None
        """Start of the slice in this iteration of the loop; None: not started."""

    async def pause(self) -> None:
        """Return at once while the slice has time left, else in a later iteration of the loop."""
        while True:
            now = time.monotonic()
            if self._begun is None:
                self._begun = now
                asyncio.get_running_loop().call_soon(self._end)
            if now - self._begun < self._seconds:
                return
            await asyncio.sleep(0)

    def _end(self) -> None:
        self._begun = None


class WorkProgress:
    """Age of the last finished work while work is waiting."""

    def __init__(self, waiting_seconds: Callable[[], float]) -> None:
        self._waiting_seconds = waiting_seconds
        self._moved = time.monotonic()

    def moved(self) -> None:
        """Work was finished."""
        self._moved = time.monotonic()

    @property
    def age_seconds(self) -> float:
        """How long work has waited without any being finished."""
        return min(self._waiting_seconds(), time.monotonic() - self._moved)
