"""Tokenising: of short texts in the event loop, of long ones in a thread that clients share by characters."""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

from penstock_runtime.batching.queue import FairShares
from penstock_runtime.errors import RequestError
from penstock_runtime.serving.admission import Admission, Entry, Waiting
from penstock_runtime.settings import QueueSettings

T = TypeVar("T")

LONG_CHARACTERS = 4000
"""Requests with more text are tokenised in the thread: it takes 2 ms and more where the library does it, and the event
loop serves other requests meanwhile. For shorter ones the switch of threads (0.05 ms) would cost too much."""
CHARACTERS_PER_TOKEN = 4
"""About, so that texts have the limits of the queue."""


class _Job:
    """Texts to be tokenised."""

    def __init__(self, work: Callable[[], Any], entry: Entry, forget: Callable[[_Job], None]) -> None:
        """`forget` is called when it is refused."""
        self.work = work
        self.forget = forget
        self.entry = entry
        self.done: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.started = False

    def is_waiting(self) -> bool:
        return not self.started

    def refuse(self, error: RequestError) -> None:
        self.forget(self)
        if not self.done.done():
            self.done.set_exception(error)

    def end(self, ran: asyncio.Future[Any]) -> None:
        if self.done.done():  # its request was cancelled
            return
        error = ran.exception()
        if error is not None:
            self.done.set_exception(error)
        else:
            self.done.set_result(ran.result())


class TokenizerThread:
    """Runs one job after the other: of the client that has had the fewest characters tokenised. For one event loop."""

    def __init__(self, limits: QueueSettings) -> None:
        self._admission = Admission(limits)
        self._shares = FairShares()
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="penstock-tokens")
        self._waiting: dict[str, deque[_Job]] = {}
        self._is_busy = False
        self._jobs: dict[_Job, None] = {}
        self._tokens = 0

    async def run(self, work: Callable[[], T], characters: int, client: str = "") -> T:
        """The result of `work` on texts of `characters`, or its error. `client`: see `admission.client_of`.

        Overloaded if too many long texts wait, of which none of a client with more.
        """
        if characters <= LONG_CHARACTERS:
            return work()
        entry = Entry(client, 1, -(-characters // CHARACTERS_PER_TOKEN), math.inf)
        self._admission.admit(entry, lambda: Waiting(len(self._jobs), self._tokens), 0.0)
        entry.work = job = _Job(work, entry, self._forget)
        self._jobs[job] = None
        self._tokens += entry.tokens
        self._waiting.setdefault(client, deque()).append(job)
        self._start_next()
        try:
            result: T = await job.done
            return result
        finally:
            self._forget(job)

    def close(self) -> None:
        """End the thread. Nothing may run."""
        self._thread.shutdown()

    def _forget(self, job: _Job) -> None:
        if job not in self._jobs:
            return
        del self._jobs[job]
        self._tokens -= job.entry.tokens
        self._admission.release(job.entry)
        if not job.started:
            job.started = True
            jobs = self._waiting[job.entry.client]
            jobs.remove(job)
            if not jobs:
                del self._waiting[job.entry.client]

    def _start_next(self) -> None:
        if self._waiting and not self._is_busy:
            client = self._shares.next(self._waiting)
            jobs = self._waiting[client]
            job = jobs.popleft()
            if not jobs:
                del self._waiting[client]
            job.started = self._is_busy = True
            self._shares.charge(client, job.entry.tokens)
            ran = asyncio.get_running_loop().run_in_executor(self._thread, job.work)
            ran.add_done_callback(partial(self._ended, job))

    def _ended(self, job: _Job, ran: asyncio.Future[Any]) -> None:
        self._is_busy = False
        job.end(ran)
        self._start_next()
