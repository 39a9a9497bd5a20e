from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
import uvloop

from penstock_runtime.http.application import Suspended, run_eagerly


def on_the_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    @functools.wraps(test)
    def run(*arguments: Any, **named: Any) -> None:
        uvloop.run(test(*arguments, **named))

    return run


async def in_a_task(coroutine: Any) -> Any:
    """The use of a coroutine by a connection."""
    found = run_eagerly(coroutine)
    return await asyncio.create_task(waiting(found)) if isinstance(found, Suspended) else found


async def waiting(rest: Suspended[Any]) -> Any:
    return await rest


@on_the_loop
async def test_a_coroutine_that_does_not_wait_ends_at_once() -> None:
    async def nested() -> int:
        return 7

    async def answer() -> int:
        return await nested()

    assert run_eagerly(answer()) == 7


@on_the_loop
async def test_a_coroutine_that_waits_continues_in_a_task_with_the_result() -> None:
    loop = asyncio.get_running_loop()
    steps: list[Any] = []

    async def answer() -> str:
        first = loop.create_future()
        loop.call_soon(first.set_result, 1)
        steps.append(await first)
        await asyncio.sleep(0)
        steps.append(await asyncio.to_thread(lambda: 2))
        steps.append(asyncio.current_task() is not None)
        return "done"

    assert await in_a_task(answer()) == "done"
    assert steps == [1, 2, True]


@on_the_loop
async def test_a_future_that_is_done_before_the_task_begins_is_not_missed() -> None:
    future: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    async def answer() -> int:
        return await future

    rest = run_eagerly(answer())
    future.set_result(5)

    assert isinstance(rest, Suspended)
    assert await asyncio.create_task(waiting(rest)) == 5


@on_the_loop
async def test_errors_pass_on_both_sides_of_the_wait() -> None:
    async def at_once() -> None:
        raise ValueError("at once")

    async def later() -> None:
        await asyncio.sleep(0)
        raise ValueError("later")

    async def of_the_future() -> str:
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        asyncio.get_running_loop().call_soon(future.set_exception, KeyError("lost"))
        try:
            await future
        except KeyError:
            return "caught"
        return "missed"

    with pytest.raises(ValueError, match="at once"):
        run_eagerly(at_once())
    with pytest.raises(ValueError, match="later"):
        await in_a_task(later())
    assert await in_a_task(of_the_future()) == "caught"


@pytest.mark.parametrize("turns", [0, 1, 3])
@on_the_loop
async def test_a_cancelled_one_cleans_up_also_before_its_task_has_begun(turns: int) -> None:
    ended: list[str] = []
    answered: list[None] = []

    async def answer() -> None:
        try:
            await asyncio.get_running_loop().create_future()
        except (asyncio.CancelledError, GeneratorExit) as error:
            ended.append(type(error).__name__)
            raise

    rest = run_eagerly(answer())
    assert isinstance(rest, Suspended)
    rest.resume(asyncio.get_running_loop(), answered.append)
    for _ in range(turns):
        await asyncio.sleep(0)
    rest.cancel()
    for _ in range(3):
        await asyncio.sleep(0)

    assert ended == ["CancelledError" if turns else "GeneratorExit"]
    assert answered == []


@on_the_loop
async def test_a_finished_coroutine_gives_its_result_and_ignores_a_cancellation() -> None:
    loop = asyncio.get_running_loop()
    answered: asyncio.Future[int] = loop.create_future()

    async def answer() -> int:
        await asyncio.sleep(0)
        return 3

    rest = run_eagerly(answer())
    assert isinstance(rest, Suspended)
    rest.resume(loop, answered.set_result)
    assert await answered == 3
    rest.cancel()
    await asyncio.sleep(0)
