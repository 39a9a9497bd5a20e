"""Holds the lease in a separate thread with its own event loop and connections.

A renewal must be in time even while the operator's loop is busy with thousands of endpoints. A thread that renews while
the operator hangs would be as bad: it checks whether the operator's loop still runs, and releases the lease when it
has not for too long.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager
from types import TracebackType
from typing import Any, Self, TypeVar

from penstock.logs import log_event
from penstock_operator.leader.lease import Leadership

REPORT_SECONDS = 1.0
"""Interval at which the operator's loop reports that it runs."""

Result = TypeVar("Result")
logger = logging.getLogger(__name__)


class Election:
    """One replica's part in the election. An async context manager: at its end it hands over a held lease."""

    def __init__(
        self,
        leadership: Callable[[], AbstractAsyncContextManager[Leadership]],
        *,
        hung_seconds: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`leadership` is opened and closed in the thread. `hung_seconds`: the lease is released when the operator's
        loop has not reported for this time."""
        self._open = leadership
        self._hung_seconds = hung_seconds
        self._clock = clock
        self._seen_at = clock()
        self._began = self._seen_at
        self._opened: Future[tuple[asyncio.AbstractEventLoop, asyncio.Event, Leadership]] = Future()
        self._thread = threading.Thread(target=self._run, name="lease", daemon=True)
        self._leadership: Leadership | None = None
        self._holding: asyncio.Task[None] | None = None
        self._reporting: asyncio.Task[None] | None = None

    @property
    def held(self) -> bool:
        """Whether this process may write. Callable from any thread."""
        return self._leadership is not None and self._leadership.held

    @property
    def looked(self) -> bool:
        """Whether the API server has answered at all."""
        return self._leadership is not None and self._leadership.looked

    @property
    def silence_seconds(self) -> float:
        """Seconds since the API server last answered."""
        return self._clock() - self._began if self._leadership is None else self._leadership.silence_seconds

    async def __aenter__(self) -> Self:
        self._thread.start()
        opened = await asyncio.wrap_future(self._opened)
        self._leadership = opened[2]
        self._reporting = asyncio.create_task(self._report())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._reporting is not None:
            self._reporting.cancel()
        if self._leadership is not None:
            loop, end, _ = self._opened.result()
            try:
                await self._call(self._release())
            finally:
                loop.call_soon_threadsafe(end.set)
        await asyncio.to_thread(self._thread.join)

    async def acquire(self) -> None:
        """Wait until this replica leads."""
        assert self._leadership is not None  # noqa: S101 - it is open
        await self._call(self._leadership.acquire())

    async def hold(self) -> None:
        """Renew until the lease is lost or released; then the process must end, because it may not write any more."""
        await self._call(self._hold())

    async def _call(self, work: Coroutine[Any, Any, Result]) -> Result:
        loop, _, _ = self._opened.result()
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, loop))

    async def _report(self) -> None:
        while True:
            self._seen_at = self._clock()
            await asyncio.sleep(REPORT_SECONDS)

    # From here on: in the thread.

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except BaseException as error:
            if self._opened.done():
                raise
            self._opened.set_exception(error)

    async def _serve(self) -> None:
        end = asyncio.Event()
        async with self._open() as leadership:
            self._opened.set_result((asyncio.get_running_loop(), end, leadership))
            await end.wait()

    async def _hold(self) -> None:
        assert self._leadership is not None  # noqa: S101 - it is open
        self._holding = asyncio.create_task(self._leadership.hold())
        try:
            while not self._holding.done():
                await asyncio.wait({self._holding}, timeout=REPORT_SECONDS)
                seconds = self._clock() - self._seen_at
                if seconds > self._hung_seconds:
                    logger.error(
                        "the event loop has been blocked for %.0f s: releasing the lease",
                        seconds,
                        extra=log_event("EventLoopBlocked"),
                    )
                    await self._release()
                    return
            self._holding.result()
        finally:
            self._holding.cancel()

    async def _release(self) -> None:
        assert self._leadership is not None  # noqa: S101 - it is open
        if self._holding is not None:
            # A pending renewal would conflict with the release.
            self._holding.cancel()
            await asyncio.wait({self._holding})
        await self._leadership.release()
