"""The first step of a coroutine at once, instead of in the event loop's next turn: a task only for one that waits.

A lone client's request is answered without waiting for anything. Its task and the turn of the loop that would start it
cost about as much as reading the request. (From Python 3.12 on asyncio has eager tasks of its own.)
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Generator
from functools import partial
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class Rest(Generic[T]):
    """A coroutine from its first wait on, to be gone on with in a task. One that has not begun is not for here: ended
    before its task begins, it could not clean up."""

    def __init__(self, coroutine: Coroutine[Any, Any, T], waits_for: Any) -> None:
        self._coroutine = coroutine
        self._waits_for = waits_for
        self._task: asyncio.Task[None] | None = None

    def go_on(self, loop: asyncio.AbstractEventLoop, done: Callable[[T], None]) -> None:
        """In a task, which gives `done` the result."""
        self._task = loop.create_task(self._run(done))

    async def _run(self, done: Callable[[T], None]) -> None:
        done(await self)

    def cancel(self) -> None:
        """Let the coroutine clean up where it has not ended: with CancelledError, or with GeneratorExit where its task
        has not begun."""
        if self._task is None:
            self._coroutine.close()
        else:
            self._task.cancel()
            # A task that is cancelled before it begins leaves the coroutine as it is.
            self._task.add_done_callback(self._close)

    def _close(self, _task: object) -> None:
        self._coroutine.close()

    def __await__(self) -> Generator[Any, Any, T]:
        """Go on as if the task had run the coroutine from its beginning."""
        step: Callable[[], Any]
        while True:
            try:
                sent = yield self._waits_for
            except BaseException as error:  # the coroutine decides, also about being cancelled
                step = partial(self._coroutine.throw, error)
            else:
                step = partial(self._coroutine.send, sent)
            try:
                self._waits_for = step()
            except StopIteration as done:
                result: T = done.value
                return result


def begin(coroutine: Coroutine[Any, Any, T]) -> T | Rest[T]:
    """Run a coroutine until it waits: its result where it never does, else what is left of it.

    Raises what the coroutine raises by then.
    """
    try:
        waits_for = coroutine.send(None)
    except StopIteration as done:
        result: T = done.value
        return result
    return Rest(coroutine, waits_for)
