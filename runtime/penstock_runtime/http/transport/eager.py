"""Eager coroutines: run a coroutine up to its first wait without a task, and continue it in a task only if it waits.

The request of a single client is often answered without waiting. A task and the iteration of the event loop that starts
it would cost about as much as reading the request. (asyncio has eager tasks from Python 3.12 on.)
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Generator
from functools import partial
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class Suspended(Generic[T]):
    """A coroutine at its first wait, to be continued in a task."""

    def __init__(self, coroutine: Coroutine[Any, Any, T], waits_for: Any) -> None:
        """`coroutine` must have run up to a wait: one that has not started could not clean up if it is cancelled before
        its task starts."""
        self._coroutine = coroutine
        self._waits_for = waits_for
        self._task: asyncio.Task[None] | None = None

    def resume(self, loop: asyncio.AbstractEventLoop, done: Callable[[T], None]) -> None:
        """Continue in a task, which calls `done` with the result."""
        self._task = loop.create_task(self._run(done))

    async def _run(self, done: Callable[[T], None]) -> None:
        done(await self)

    def cancel(self) -> None:
        """Let the coroutine clean up if it has not ended: with CancelledError, or with GeneratorExit if its task has
        not started."""
        if self._task is None:
            self._coroutine.close()
        else:
            self._task.cancel()
            # A task that is cancelled before it starts does not close the coroutine.
            self._task.add_done_callback(self._close)

    def _close(self, _task: object) -> None:
        self._coroutine.close()

    def __await__(self) -> Generator[Any, Any, T]:
        """Continue as if the task had run the coroutine from the start."""
        step: Callable[[], Any]
        while True:
            try:
                sent = yield self._waits_for
            except BaseException as error:  # passed on to the coroutine, also a cancellation
                step = partial(self._coroutine.throw, error)
            else:
                step = partial(self._coroutine.send, sent)
            try:
                self._waits_for = step()
            except StopIteration as done:
                result: T = done.value
                return result


def run_eagerly(coroutine: Coroutine[Any, Any, T]) -> T | Suspended[T]:
    """Run a coroutine until its first wait: its result if it never waits, else the suspended coroutine.

    Raises what the coroutine raises until then.
    """
    try:
        waits_for = coroutine.send(None)
    except StopIteration as done:
        result: T = done.value
        return result
    return Suspended(coroutine, waits_for)
