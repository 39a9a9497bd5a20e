"""Tasks that compute yield to the event loop after a time slice that they share, however many they are."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator

import pytest

from penstock_operator.control.queue import TimeSlices

WORK_SECONDS = 0.002


def work(left: Iterator[int], done: list[int]) -> None:
    end = time.thread_time() + WORK_SECONDS
    while time.thread_time() < end:
        pass
    done.append(next(left))


async def longest_turn(tasks: int, pieces: int) -> float:
    """The longest iteration of the loop, in CPU seconds, while `tasks` tasks do `pieces` pieces of work."""
    slices, left, done = TimeSlices(), iter(range(pieces)), list[int]()
    gaps: list[float] = []

    async def some() -> None:
        while len(done) < pieces:
            await slices.pause()
            if len(done) < pieces:
                work(left, done)

    async def watch() -> None:
        last = time.thread_time()
        while True:
            await asyncio.sleep(0)
            now = time.thread_time()
            gaps.append(now - last)
            last = now

    watcher = asyncio.create_task(watch())
    await asyncio.gather(*(some() for _ in range(tasks)))
    watcher.cancel()
    assert done == list(range(pieces))
    return max(gaps)


@pytest.mark.parametrize("tasks", [1, 100])
def test_an_iteration_of_the_loop_has_one_slice_for_all_tasks(tasks: int) -> None:
    # 0.8 s of work. Other processes do not count in this clock, but a pause of the virtual machine does. Code that
    # never yields has a long iteration at every try.
    assert any(asyncio.run(longest_turn(tasks, pieces=400)) < 0.1 for _ in range(3))


def test_the_rest_of_a_slice_is_used_without_yielding() -> None:
    async def body() -> bool:
        slices, turned = TimeSlices(seconds=60.0), False

        def note() -> None:
            nonlocal turned
            turned = True

        asyncio.get_running_loop().call_soon(note)
        for _ in range(100):
            await slices.pause()
        return turned

    assert asyncio.run(body()) is False
