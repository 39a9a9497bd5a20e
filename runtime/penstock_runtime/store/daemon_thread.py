"""Work in threads that nobody waits for when the process ends: a store that hangs must not hold it up."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from typing import TypeVar, cast

T = TypeVar("T")

NAME = "penstock-daemon"


async def in_daemon_thread(action: Callable[[], T]) -> T:
    """Its result, or what it raises. When the waiter is cancelled it goes on, and nobody hears of it."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def settle(result: T | None, error: BaseException | None) -> None:
        if future.done():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(cast("T", result))

    def run() -> None:
        result: T | None = None
        error: BaseException | None = None
        try:
            result = action()
        except BaseException as raised:  # passed on to whoever awaits it
            error = raised
        with contextlib.suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(settle, result, error)

    threading.Thread(target=run, name=NAME, daemon=True).start()
    return await future


def any_left() -> bool:
    """Some have not ended yet. Then the interpreter's own end may crash beside their code: `os._exit` does not."""
    return any(thread.name == NAME for thread in threading.enumerate())
