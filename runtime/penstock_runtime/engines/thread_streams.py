"""Streams for library engines: Python threads that call the engine."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue
from time import perf_counter

from penstock_runtime.engines.base import Ended, Engine, Parallelism, run_of
from penstock_runtime.rows import Batch, Outputs


class ThreadStreams:
    """See `Streams`."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._loop: asyncio.AbstractEventLoop | None = None
        self._on_ended: Callable[[], object] | None = None
        self._last_ticket = 0
        self._order: SimpleQueue[int | None] = SimpleQueue()
        """Tickets; None ends a thread."""
        self._waiting: dict[int, tuple[Batch, Parallelism]] = {}
        """Batches that have not started; removed by a thread or by `retract`."""
        self._ended: deque[Ended] = deque()
        self._notified = False
        self._threads = [
            threading.Thread(target=self._work, name=f"penstock-stream-{stream}", daemon=True)
            for stream in range(engine.facts.in_flight or engine.facts.threads.streams)
        ]
        for thread in self._threads:
            thread.start()

    def attend(self, loop: asyncio.AbstractEventLoop, ended: Callable[[], object]) -> None:
        """See `Streams`."""
        self._loop, self._on_ended = loop, ended

    def leave(self) -> None:
        """See `Streams`."""
        self._on_ended = None

    def submit(self, batch: Batch, parallelism: Parallelism) -> int:
        """See `Streams`."""
        self._last_ticket += 1
        self._waiting[self._last_ticket] = batch, parallelism
        self._order.put(self._last_ticket)
        return self._last_ticket

    def retract(self, ticket: int) -> bool:
        """See `Streams`."""
        return self._waiting.pop(ticket, None) is not None

    def collect(self) -> list[Ended]:
        """See `Streams`."""
        # Before the queue is emptied: a batch that ends in between notifies again, at worst without need.
        self._notified = False
        ended = []
        while self._ended:
            ended.append(self._ended.popleft())
        return ended

    def stop(self) -> None:
        """See `Streams`."""
        for _ in self._threads:
            self._order.put(None)
        for thread in self._threads:
            thread.join()

    def _work(self) -> None:
        while (ticket := self._order.get()) is not None:
            taken = self._waiting.pop(ticket, None)
            if taken is None:
                continue
            batch, parallelism = taken
            result: Outputs | Exception
            started = perf_counter()
            try:
                result = run_of(self._engine, parallelism)(batch)
            except Exception as error:  # an error of the engine must not end the thread
                result = error
            self._add(Ended(ticket, result, started, perf_counter()))

    def _add(self, ended: Ended) -> None:
        """Store a result; the loop is woken once for all results until the next `collect`."""
        self._ended.append(ended)
        if not self._notified and self._loop is not None:
            self._notified = True
            with contextlib.suppress(RuntimeError):  # the loop is closed: no caller is left
                self._loop.call_soon_threadsafe(self._notify)

    def _notify(self) -> None:
        if self._on_ended is not None:
            self._on_ended()
