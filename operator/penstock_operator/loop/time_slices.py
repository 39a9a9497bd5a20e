"""Long work in slices, between which the event loop gets to everything else."""

from __future__ import annotations

import asyncio
import time

SLICE_SECONDS = 0.02


class Slices:
    """Shared by all who do the work, however many tasks they are: a loop's turn has room for one slice."""

    def __init__(self, seconds: float = SLICE_SECONDS) -> None:
        self._seconds = seconds
        self._begun: float | None = None
        """In this turn of the loop; None: nobody has asked yet."""

    async def give_way(self) -> None:
        """Go on at once while there is something left of the slice, else in a later turn of the loop."""
        while True:
            now = time.monotonic()
            if self._begun is None:
                self._begun = now
                asyncio.get_running_loop().call_soon(self._end)
            if now - self._begun < self._seconds:
                return
            await asyncio.sleep(0)

    def _end(self) -> None:
        self._begun = None
