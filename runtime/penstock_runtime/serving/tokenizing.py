"""Tokenising: of short texts in the event loop, of long ones in a thread that clients share by characters."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from penstock_runtime.admission import FairLine
from penstock_runtime.host import lower_priority
from penstock_runtime.settings import QueueSettings

T = TypeVar("T")

LONG_CHARACTERS = 4000
"""Requests with more text are tokenised in the thread: it takes 2 ms and more where the library does it, and the event
loop serves other requests meanwhile. For shorter ones the switch of threads (0.05 ms) would cost too much."""
LEAST_CHARACTERS = 60
"""A shorter text costs as much as one of this length."""
CHARACTERS_PER_TOKEN = 4
"""About, so that texts have the limits of the queue."""


def about_tokens(value: Any, longest: int) -> int:
    """The tokens of all texts in a JSON value, of which each is cut after `longest`, before they are counted."""
    if isinstance(value, str):
        return min(-(-len(value) // CHARACTERS_PER_TOKEN), longest)
    if isinstance(value, Mapping):
        value = value.values()
    elif not isinstance(value, list | tuple):
        return 0
    return sum(about_tokens(one, longest) for one in value)


class TokenizerThread:
    """Runs one job after the other: of the client that has had the fewest characters tokenised. For one event loop."""

    def __init__(self, limits: QueueSettings) -> None:
        self._line = FairLine(1, limits, "the tokenizer")
        self._thread = ThreadPoolExecutor(
            max_workers=1, thread_name_prefix="penstock-tokens", initializer=lower_priority
        )

    async def run(self, work: Callable[[], T], characters: int, client: str = "") -> T:
        """The result of `work` on texts of `characters`, or its error. Errors as `FairLine.wait`."""
        if characters <= LONG_CHARACTERS:
            return work()
        slot = await self._line.wait(client, -(-characters // CHARACTERS_PER_TOKEN))
        ran = asyncio.get_running_loop().run_in_executor(self._thread, work)

        def end(done: asyncio.Future[T]) -> None:
            self._line.release(slot)
            done.exception()  # of a caller that has left: asyncio would log it

        # Not when this caller is cancelled: the thread goes on.
        ran.add_done_callback(end)
        return await asyncio.shield(ran)

    def close(self) -> None:
        """End the thread. Nothing may run."""
        self._thread.shutdown()
