"""Slots for work that few requests may do at a time. Clients that wait for one are served round robin."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from penstock_runtime.errors import Overloaded


class ClientSlots:
    """For one event loop."""

    def __init__(self, slots: int, *, most_waiting: int) -> None:
        """`most_waiting`: of further callers, the newest one of the client with the most gets Overloaded."""
        self._free = slots
        self._most_waiting = most_waiting
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}
        """By client, in the order in which clients are served."""

    @asynccontextmanager
    async def slot(self, client: str) -> AsyncIterator[None]:
        """Wait for a slot, and have it for the block."""
        if self._free:
            self._free -= 1
        else:
            await self._wait(client)
        try:
            yield
        finally:
            self._release()

    async def _wait(self, client: str) -> None:
        self._make_room(client)
        waiting = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(client, deque()).append(waiting)
        try:
            await waiting
        except asyncio.CancelledError:
            if waiting.done() and not waiting.cancelled():
                self._release()  # it was given the slot, and is cancelled at the same time
            else:
                self._remove(client, waiting)
            raise

    def _make_room(self, client: str) -> None:
        if sum(map(len, self._waiting.values())) < self._most_waiting:
            return
        error = Overloaded(f"{self._most_waiting} requests wait for this already")
        busiest = max(self._waiting, key=lambda one: len(self._waiting[one]), default=client)
        if len(self._waiting.get(busiest, ())) <= len(self._waiting.get(client, ())) + 1:
            raise error
        newest = self._waiting[busiest][-1]
        self._remove(busiest, newest)
        newest.set_exception(error)

    def _remove(self, client: str, waiting: asyncio.Future[None]) -> None:
        futures = self._waiting.get(client)
        if futures is not None and waiting in futures:
            futures.remove(waiting)
            if not futures:
                del self._waiting[client]

    def _release(self) -> None:
        """Give the slot to the next client."""
        if not self._waiting:
            self._free += 1
            return
        client = next(iter(self._waiting))
        futures = self._waiting.pop(client)
        futures.popleft().set_result(None)
        if futures:
            self._waiting[client] = futures
