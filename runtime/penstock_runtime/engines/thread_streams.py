"""Streams for engines of libraries: Python's threads, which call the engine and wait for it."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue
from time import perf_counter

from penstock_runtime.engines.base import Breadth, Ended, Engine
from penstock_runtime.rows import Batch, Outputs


def run_of(engine: Engine, breadth: Breadth) -> Callable[[Batch], Outputs]:
    """The way into the engine."""
    match breadth:
        case Breadth.NARROW:
            return engine.run
        case Breadth.WIDE:
            return engine.run_wide
        case Breadth.WIDENING:
            return engine.run_widening


class ThreadStreams:
    """See `Streams`."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._loop: asyncio.AbstractEventLoop | None = None
        self._on_ended: Callable[[], object] | None = None
        self._last_ticket = 0
        self._order: SimpleQueue[int | None] = SimpleQueue()
        """Tickets; None ends a thread."""
        self._waiting: dict[int, tuple[Batch, Breadth]] = {}
        """Whoever takes a batch out of it has it: a thread, or `retract`."""
        self._ended: deque[Ended] = deque()
        self._rung = False
        self._threads = [
            threading.Thread(target=self._work, name=f"penstock-stream-{stream}", daemon=True)
            for stream in range(engine.facts.threads.streams)
        ]
        for thread in self._threads:
            thread.start()

    def attend(self, loop: asyncio.AbstractEventLoop, ended: Callable[[], object]) -> None:
        """See `Streams`."""
        self._loop, self._on_ended = loop, ended

    def leave(self) -> None:
        """See `Streams`."""
        self._on_ended = None

    def submit(self, batch: Batch, breadth: Breadth) -> int:
        """See `Streams`."""
        self._last_ticket += 1
        self._waiting[self._last_ticket] = batch, breadth
        self._order.put(self._last_ticket)
        return self._last_ticket

    def retract(self, ticket: int) -> bool:
        """See `Streams`."""
        return self._waiting.pop(ticket, None) is not None

    def collect(self) -> list[Ended]:
        """See `Streams`."""
        # Before the box is emptied: what comes in between rings again, for nothing at worst.
        self._rung = False
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
            batch, breadth = taken
            result: Outputs | Exception
            started = perf_counter()
            try:
                result = run_of(self._engine, breadth)(batch)
            except Exception as error:  # whatever the engine throws must not end the thread
                result = error
            self._tell(Ended(ticket, result, started, perf_counter()))

    def _tell(self, ended: Ended) -> None:
        """Into the box; the loop is woken once for all that come until it looks."""
        self._ended.append(ended)
        if not self._rung and self._loop is not None:
            self._rung = True
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits for an answer any more
                self._loop.call_soon_threadsafe(self._ring)

    def _ring(self) -> None:
        if self._on_ended is not None:
            self._on_ended()
