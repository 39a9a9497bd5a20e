"""The work queue: each key once at a time, urgent ones first, growing delays after failures. Virtual time."""

from __future__ import annotations

import asyncio

import pytest

from penstock_operator.cluster.errors import Backoff
from penstock_operator.control.queue import Priority, WorkQueue
from tests.operator.virtual_time import run


async def taken(queue: WorkQueue[str], within: float = 0.01) -> str | None:
    """The next key, or None when there is none within this (virtual) time."""
    try:
        async with asyncio.timeout(within):
            return await queue.get()
    except TimeoutError:
        return None


def test_a_key_that_is_added_often_is_worked_on_once() -> None:
    async def scenario() -> list[str | None]:
        queue: WorkQueue[str] = WorkQueue()
        for _ in range(5):
            queue.add("a")
        first = await taken(queue)
        queue.done("a")
        return [first, await taken(queue)]

    assert run(scenario()) == ["a", None]


def test_a_key_is_never_worked_on_twice_at_the_same_time_and_not_forgotten_either() -> None:
    async def scenario() -> list[str | None]:
        queue: WorkQueue[str] = WorkQueue()
        queue.add("a")
        seen = [await taken(queue)]
        queue.add("a")
        seen.append(await taken(queue))
        queue.done("a")
        seen.append(await taken(queue))
        return seen

    assert run(scenario()) == ["a", None, "a"]


def test_events_go_before_routine_work() -> None:
    async def scenario() -> list[str | None]:
        queue: WorkQueue[str] = WorkQueue()
        for key in ("r1", "r2", "r3"):
            queue.add(key, Priority.ROUTINE)
        queue.add("now")
        queue.add("r3")
        return [await taken(queue) for _ in range(4)]

    assert run(scenario()) == ["now", "r3", "r1", "r2"]


def test_failures_are_retried_with_a_growing_delay_until_a_success() -> None:
    async def scenario() -> list[float]:
        loop = asyncio.get_running_loop()
        queue: WorkQueue[str] = WorkQueue(backoff=Backoff(first_seconds=1.0, limit_seconds=8.0))
        queue.add("a")
        waits = []
        for failed in (True, True, True, True, True, True, False):
            begin = loop.time()
            assert await taken(queue, 100) == "a"
            waits.append(loop.time() - begin)
            queue.done("a", failed=failed, again_seconds=None if failed else 50.0)
        begin = loop.time()
        assert await taken(queue, 100) == "a"
        return [*waits, loop.time() - begin]

    waits = run(scenario())

    bounds = [(0, 0), (0.5, 1), (1, 2), (2, 4), (4, 8), (4, 8), (4, 8), (50, 50)]
    assert all(low - 0.01 <= wait <= high + 0.01 for wait, (low, high) in zip(waits, bounds, strict=True)), waits


def test_an_event_during_a_failing_attempt_does_not_cause_a_busy_loop() -> None:
    async def scenario() -> str | None:
        queue: WorkQueue[str] = WorkQueue(backoff=Backoff(first_seconds=10.0, limit_seconds=10.0))
        queue.add("a")
        await taken(queue)
        queue.add("a")
        queue.done("a", failed=True)
        return await taken(queue, 4.0)

    assert run(scenario()) is None


def test_an_event_after_a_failure_is_worked_on_at_once() -> None:
    async def scenario() -> str | None:
        queue: WorkQueue[str] = WorkQueue(backoff=Backoff(first_seconds=10.0, limit_seconds=10.0))
        queue.add("a")
        await taken(queue)
        queue.done("a", failed=True)
        queue.add("a")
        return await taken(queue)

    assert run(scenario()) == "a"


def test_the_earlier_of_two_delays_counts_and_earlier_work_cancels_it() -> None:
    async def scenario() -> tuple[float, str | None]:
        loop = asyncio.get_running_loop()
        queue: WorkQueue[str] = WorkQueue()
        queue.add_after("a", 30)
        queue.add_after("a", 10)
        queue.add_after("a", 20)
        await taken(queue, 100)
        at = loop.time()
        queue.done("a")
        return at, await taken(queue, 100)

    at, later = run(scenario())

    assert at == pytest.approx(10, abs=0.01)
    assert later is None


def test_a_forgotten_key_is_not_worked_on_later() -> None:
    async def scenario() -> str | None:
        queue: WorkQueue[str] = WorkQueue()
        queue.add_after("a", 5)
        queue.forget("a")
        return await taken(queue, 100)

    assert run(scenario()) is None


def test_many_workers_and_events_lose_no_key() -> None:
    async def scenario() -> tuple[set[str], int]:
        queue: WorkQueue[str] = WorkQueue()
        busy: set[str] = set()
        seen: set[str] = set()
        collisions = 0

        async def work() -> None:
            nonlocal collisions
            while True:
                key = await queue.get()
                collisions += key in busy
                busy.add(key)
                seen.add(key)
                await asyncio.sleep(0.1)
                busy.discard(key)
                queue.done(key)

        async def feed() -> None:
            for turn in range(3):
                for number in range(100):
                    queue.add(f"k{number}", Priority.ROUTINE if number % 2 else Priority.URGENT)
                    if number % 10 == turn:
                        await asyncio.sleep(0.05)

        workers = [asyncio.create_task(work()) for _ in range(7)]
        await feed()
        await asyncio.sleep(1000)
        for worker in workers:
            worker.cancel()
        await asyncio.gather(*workers, return_exceptions=True)
        return seen, collisions

    seen, collisions = run(scenario())

    assert seen == {f"k{number}" for number in range(100)}
    assert collisions == 0


def test_the_age_of_the_oldest_key_grows_while_the_queue_is_stuck() -> None:
    async def scenario() -> tuple[float, float]:
        queue: WorkQueue[str] = WorkQueue()
        empty = queue.oldest_seconds
        queue.add("a", Priority.ROUTINE)
        await asyncio.sleep(42)
        queue.add("b")
        return empty, queue.oldest_seconds

    assert run(scenario()) == (0.0, 42.0)
