"""Runs blocking calls in daemon threads: a store that hangs does not delay the end of the process."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from typing import TypeVar, cast

T = TypeVar("T")

NAME = "penstock-daemon"


async def in_daemon_thread(action: Callable[[], T]) -> T:
    """The result of `action`, or its error. If the awaiting task is cancelled, the thread still continues."""
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
        except BaseException as raised:  # passed on to the awaiting task
            error = raised
        with contextlib.suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(settle, result, error)

    threading.Thread(target=run, name=NAME, daemon=True).start()
    return await future


def any_daemon_running() -> bool:
    """True if a daemon thread still runs. The interpreter's finalisation may then crash: end with `os._exit`."""
    return any(thread.name == NAME for thread in threading.enumerate())
