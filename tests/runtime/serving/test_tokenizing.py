from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

import pytest

from penstock_runtime.errors import Overloaded
from penstock_runtime.serving.tokenizing import LONG_CHARACTERS, TokenizerThread
from penstock_runtime.settings import QueueSettings

LONG = LONG_CHARACTERS + 4


class Bench:
    """A thread that works on one text until the gate opens, and what it has worked on."""

    def __init__(self, **limits: int) -> None:
        self.thread = TokenizerThread(QueueSettings(**limits))
        self.gate = threading.Event()
        self.worked: list[str] = []

    def job(self, name: str) -> Callable[[], str]:
        def work() -> str:
            assert self.gate.wait(60)
            self.worked.append(name)
            return name

        return work

    def start(self, client: str, characters: int = LONG) -> asyncio.Task[str]:
        return asyncio.create_task(self.thread.run(self.job(client), characters, client))


def test_clients_share_the_thread_by_characters() -> None:
    async def main() -> list[str]:
        bench = Bench()
        tasks = [bench.start("heavy", 10 * LONG) for _ in range(3)] + [bench.start("light") for _ in range(3)]
        await asyncio.sleep(0)
        bench.gate.set()
        await asyncio.wait_for(asyncio.gather(*tasks), 60)
        bench.thread.close()
        return bench.worked

    assert asyncio.run(main()) == ["heavy", "light", "light", "light", "heavy", "heavy"]


def test_texts_of_a_request_that_was_cancelled_are_not_tokenised() -> None:
    async def main() -> list[str]:
        bench = Bench()
        first, cancelled, last = (bench.start(name) for name in ("first", "cancelled", "last"))
        await asyncio.sleep(0)
        cancelled.cancel()
        await asyncio.sleep(0)
        bench.gate.set()
        await asyncio.wait_for(asyncio.gather(first, last), 60)
        bench.thread.close()
        return bench.worked

    assert asyncio.run(main()) == ["first", "last"]


def test_a_request_that_is_cancelled_while_the_thread_works_on_it_keeps_the_thread_until_then() -> None:
    async def main() -> list[str]:
        bench = Bench()
        cancelled = bench.start("cancelled")
        await asyncio.sleep(0)
        cancelled.cancel()
        await asyncio.gather(cancelled, return_exceptions=True)
        heavy, light = bench.start("heavy", 10 * LONG), bench.start("light")
        await asyncio.sleep(0)
        later = bench.start("light")
        bench.gate.set()
        await asyncio.wait_for(asyncio.gather(heavy, light, later), 60)
        bench.thread.close()
        return bench.worked

    assert asyncio.run(main()) == ["cancelled", "light", "light", "heavy"]


def test_when_too_much_waits_the_client_with_the_most_gives_way() -> None:
    async def main() -> list[str | BaseException]:
        bench = Bench(max_queue_rows=3)
        many = [bench.start("many") for _ in range(4)]
        await asyncio.sleep(0)
        few = bench.start("few")
        await asyncio.sleep(0)
        with pytest.raises(Overloaded):
            await bench.start("many")
        bench.gate.set()
        found = await asyncio.wait_for(asyncio.gather(*many, few, return_exceptions=True), 60)
        bench.thread.close()
        return found

    found = asyncio.run(main())

    assert [isinstance(one, Overloaded) for one in found] == [False, False, False, True, False]


def test_an_error_is_that_of_its_job_and_a_short_text_needs_no_thread() -> None:
    def fails() -> None:
        raise ValueError("no text")

    async def main() -> str:
        bench = Bench()
        bench.gate.set()
        with pytest.raises(ValueError, match="no text"):
            await bench.thread.run(fails, LONG)
        name = await bench.thread.run(lambda: threading.current_thread().name, LONG_CHARACTERS)
        assert await bench.start("next") == "next"
        bench.thread.close()
        return name

    assert asyncio.run(main()) == threading.main_thread().name
