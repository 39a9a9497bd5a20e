from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from time import perf_counter
from typing import TypeVar

import pytest

from penstock.recipe import Batching, Plan
from penstock_runtime.batching.batcher import NullObserver
from penstock_runtime.batching.dispatcher import SINGLE_CLIENT_REQUESTS, STREAM_EVERY, Dispatcher, RequestResult
from penstock_runtime.errors import DeadlineExceeded, InferenceFailed
from penstock_runtime.rows import Batch, Outputs, Row
from tests.runtime.batching.echo import IO, POISON, EchoEngine, SleepyEngine, plan, row, rows, total

T = TypeVar("T")


@asynccontextmanager
async def lane_of(engine: EchoEngine, served: Plan, *, tokens_per_second: int = 100) -> AsyncIterator[Dispatcher]:
    """`tokens_per_second`: of each stream, as the warm-up has measured; so slow that no row is brief."""
    dispatcher = Dispatcher(engine, IO, served, total, observer=NullObserver())
    # So long that the test's own runs change little.
    dispatcher.batcher.add_measurement(100 * tokens_per_second, 100.0)
    try:
        yield dispatcher
    finally:
        engine.gate.set()
        await dispatcher.close()


async def run(
    dispatcher: Dispatcher, wanted: list[Row], *, seconds: float = math.inf, caller: int = 0
) -> RequestResult:
    now = perf_counter()
    inline = dispatcher.run_inline(wanted, arrived=now, deadline=now + seconds, caller=caller)
    return inline or await dispatcher.result(dispatcher.start(wanted, arrived=now, deadline=now + seconds))


async def begun(engine: EchoEngine) -> None:
    assert await asyncio.to_thread(engine.began.acquire, timeout=60)


async def soon(awaitable: Awaitable[T]) -> T:
    return await asyncio.wait_for(awaitable, 60)


def test_a_request_gets_its_rows_back_in_order() -> None:
    async def main() -> RequestResult:
        async with lane_of(EchoEngine(streams=3), plan(Batching.EQUAL_LENGTH, streams=3)) as dispatcher:
            return await soon(run(dispatcher, [Row([length] * length) for length in (9, 3, 9, 1, 30, 9)]))

    ran = asyncio.run(main())

    assert ran.reduced == [81.0, 9.0, 81.0, 1.0, 900.0, 81.0]
    assert ran.queue_milliseconds >= 0
    assert ran.inference_milliseconds > 0


def test_a_request_without_rows_ends_at_once() -> None:
    async def main() -> RequestResult:
        async with lane_of(EchoEngine(), plan()) as dispatcher:
            return await soon(run(dispatcher, []))

    assert asyncio.run(main()) == RequestResult([], 0.0, 0.0)


def test_queue_and_inference_make_up_the_time_until_the_last_row() -> None:
    async def main() -> tuple[RequestResult, float]:
        engine = EchoEngine(streams=2)
        async with lane_of(engine, plan(streams=2)) as dispatcher:
            engine.gate.clear()
            busy = [asyncio.create_task(run(dispatcher, [row(1)])) for _ in range(2)]
            for _ in range(2):
                await begun(engine)
            before = perf_counter()
            asked = asyncio.create_task(run(dispatcher, rows([5, 6, 7])))
            await asyncio.sleep(0)  # lets it come into the queue
            assert dispatcher.batcher.depth[0] == 3
            await asyncio.sleep(0.05)  # counts as time in the queue
            engine.gate.set()
            ran = await soon(asked)
            await soon(asyncio.gather(*busy))
            return ran, (perf_counter() - before) * 1e3

    ran, passed = asyncio.run(main())

    assert ran.queue_milliseconds >= 45
    assert ran.queue_milliseconds + ran.inference_milliseconds <= passed + 0.01


def test_one_failing_row_fails_its_request_and_no_other() -> None:
    async def main() -> list[RequestResult | BaseException]:
        engine = EchoEngine()
        async with lane_of(engine, plan(Batching.EQUAL_LENGTH)) as dispatcher:
            wanted = [rows([4, 4]), [row(4), row(4, POISON), row(9)], rows([4])]
            return await soon(asyncio.gather(*(run(dispatcher, one) for one in wanted), return_exceptions=True))

    first, second, third = asyncio.run(main())

    assert isinstance(first, RequestResult)
    assert isinstance(second, InferenceFailed)
    assert isinstance(third, RequestResult)
    assert (first.reduced, third.reduced) == ([28.0, 28.0], [28.0])


def test_a_request_is_dropped_at_its_deadline_while_the_worker_is_busy() -> None:
    async def main() -> float:
        engine = EchoEngine()
        async with lane_of(engine, plan()) as dispatcher:
            engine.gate.clear()
            busy = asyncio.create_task(run(dispatcher, [row(1)]))
            await begun(engine)
            later = asyncio.create_task(run(dispatcher, [row(3)], seconds=600))
            before = perf_counter()
            with pytest.raises(DeadlineExceeded):
                await soon(run(dispatcher, [row(2)], seconds=0.05))
            waited = perf_counter() - before
            assert not busy.done()
            assert not later.done()
            engine.gate.set()
            await soon(asyncio.gather(busy, later))
            assert engine.batches == [[1], [3]]
            return waited

    assert 0.05 <= asyncio.run(main()) < 60


def test_a_request_that_was_run_in_part_gets_that_error_at_its_deadline() -> None:
    class Stuck(EchoEngine):
        def run(self, batch: Batch) -> Outputs:
            if self.batches:
                self.gate.clear()
            return super().run(batch)

    async def main() -> DeadlineExceeded:
        engine = Stuck()
        async with lane_of(engine, plan()) as dispatcher:
            with pytest.raises(DeadlineExceeded, match="not all of the request had started") as caught:
                await soon(run(dispatcher, rows([1, 2, 3]), seconds=2))
            assert engine.batches == [[1], [2]]
            return caught.value

    assert asyncio.run(main()).remedy == "Send fewer texts in one request, or allow more time"


def test_a_request_whose_deadline_has_already_passed_gets_a_deadline_error() -> None:
    async def main() -> None:
        async with lane_of(EchoEngine(), plan()) as dispatcher:
            with pytest.raises(DeadlineExceeded):
                await soon(run(dispatcher, [row(2)], seconds=-1))
            assert (await soon(run(dispatcher, [row(2)]))).reduced == [14.0]

    asyncio.run(main())


def test_a_cancelled_request_is_not_run() -> None:
    async def main() -> None:
        engine = EchoEngine()
        async with lane_of(engine, plan()) as dispatcher:
            engine.gate.clear()
            busy = asyncio.create_task(run(dispatcher, [row(1)]))
            await begun(engine)
            gone = asyncio.create_task(run(dispatcher, rows([2, 2])))
            stays = asyncio.create_task(run(dispatcher, [row(3)]))
            await asyncio.sleep(0)  # lets both tasks begin
            assert dispatcher.batcher.depth == (3, 7)
            gone.cancel()
            with pytest.raises(asyncio.CancelledError):
                await gone
            assert dispatcher.batcher.depth == (1, 3)
            engine.gate.set()
            await soon(asyncio.gather(busy, stays))
            assert engine.batches == [[1], [3]]

    asyncio.run(main())


@pytest.mark.parametrize("streams", [1, 2])
def test_requests_behind_clients_that_leave_before_a_stream_wakes_are_run(streams: int) -> None:
    async def main() -> None:
        engine = SleepyEngine(streams=streams)
        async with lane_of(engine, plan(streams=streams)) as dispatcher:
            ahead = [asyncio.create_task(run(dispatcher, [row(2)])) for _ in range(streams + 1)]
            stays = asyncio.create_task(run(dispatcher, [row(3)]))
            await asyncio.sleep(0.01)
            assert dispatcher.batcher.depth == (2, 5)  # one batch is prepared ahead; the other rows wait in the queue
            for gone in ahead:
                gone.cancel()
            await asyncio.gather(*ahead, return_exceptions=True)
            engine.awake.set()
            assert (await soon(stays)).reduced == [21.0]
            assert engine.batches == [[3]]

    asyncio.run(main())


def test_requests_behind_others_that_expire_before_a_stream_wakes_are_run() -> None:
    async def main() -> None:
        engine = SleepyEngine()
        async with lane_of(engine, plan()) as dispatcher:
            ahead = [asyncio.create_task(run(dispatcher, [row(2)], seconds=0.05)) for _ in range(2)]
            stays = asyncio.create_task(run(dispatcher, [row(3)], seconds=600))
            expired = await asyncio.gather(*ahead, return_exceptions=True)
            assert [type(error) for error in expired] == [DeadlineExceeded] * 2
            engine.awake.set()
            assert (await soon(stays)).reduced == [21.0]
            assert engine.batches == [[3]]

    asyncio.run(main())


def test_a_request_cancelled_while_it_runs_disturbs_no_other() -> None:
    async def main() -> None:
        engine = EchoEngine()
        async with lane_of(engine, plan()) as dispatcher:
            engine.gate.clear()
            gone = asyncio.create_task(run(dispatcher, [row(1)]))
            await begun(engine)
            gone.cancel()
            with pytest.raises(asyncio.CancelledError):
                await gone
            engine.gate.set()
            assert (await soon(run(dispatcher, [row(2)]))).reduced == [14.0]

    asyncio.run(main())


def test_thousands_of_requests_get_their_own_answers() -> None:
    async def main() -> None:
        engine = EchoEngine(streams=4)
        async with lane_of(engine, plan(Batching.PADDED, streams=4, padding=0.2)) as dispatcher:

            async def one(number: int) -> None:
                wanted = [Row([number % 50 + part + 1] * (1 + (number * 7 + part) % 40)) for part in range(number % 4)]
                ran = await run(dispatcher, wanted)
                assert ran.reduced == [float(sum(part.ids)) for part in wanted]

            await asyncio.wait_for(asyncio.gather(*(one(number) for number in range(600))), 60)
            assert max(map(len, engine.batches)) > 1
            assert dispatcher.batcher.depth == (0, 0)

    asyncio.run(main())


async def threads_of(
    engine: EchoEngine, dispatcher: Dispatcher, count: int, length: int = 3, *, caller: int = 0
) -> list[str]:
    """Where each of the requests ran, one after the other."""
    where: list[str] = []
    for _ in range(count):
        engine.threads.clear()
        await soon(run(dispatcher, [row(length)], caller=caller))
        where += engine.threads
    return where


HERE = threading.current_thread().name


BETWEEN = 600
"""Tokens a second of each of two streams: 3 tokens take 2.5 ms, too long to be brief, and not too long for the loop."""


def test_sequential_requests_run_in_the_loops_thread_except_every_nth() -> None:
    async def main() -> list[str]:
        engine = EchoEngine(streams=2)
        async with lane_of(engine, plan(streams=2), tokens_per_second=BETWEEN) as dispatcher:
            return await threads_of(engine, dispatcher, 4 * STREAM_EVERY)

    where = asyncio.run(main())

    listened = {STREAM_EVERY * turn - 1 for turn in range(1, 5)}
    assert [thread == HERE for thread in where] == [
        index >= SINGLE_CLIENT_REQUESTS and index not in listened for index in range(len(where))
    ]


def test_concurrent_requests_end_the_runs_in_the_loops_thread() -> None:
    async def main() -> list[str]:
        engine = EchoEngine(streams=2)
        async with lane_of(engine, plan(streams=2), tokens_per_second=BETWEEN) as dispatcher:
            before = await threads_of(engine, dispatcher, STREAM_EVERY - 1)
            # The loop accepts requests now: of three simultaneous requests the second finds the first one waiting.
            await soon(asyncio.gather(*(run(dispatcher, [row(3)]) for _ in range(3))))
            after = await threads_of(engine, dispatcher, SINGLE_CLIENT_REQUESTS)
            return before[-2:] + after

    where = asyncio.run(main())

    assert where[:2] == [HERE, HERE]
    assert HERE not in where[2:]


def test_another_waiting_caller_ends_the_runs_in_the_loops_thread() -> None:
    async def main() -> list[str]:
        engine = EchoEngine(streams=2)
        async with lane_of(engine, plan(streams=2), tokens_per_second=BETWEEN) as dispatcher:
            await threads_of(engine, dispatcher, SINGLE_CLIENT_REQUESTS)
            same = await threads_of(engine, dispatcher, 1)
            # No request overlaps with another: each is sent when the previous one is answered.
            return same + await threads_of(engine, dispatcher, 2, caller=1)

    same, *others = asyncio.run(main())

    assert same == HERE
    assert HERE not in others


def test_long_rows_and_requests_of_several_rows_are_left_to_the_streams() -> None:
    async def main() -> set[str]:
        engine = EchoEngine()
        async with lane_of(engine, plan(), tokens_per_second=500) as dispatcher:  # 6 tokens are 12 ms
            for length in (6, 6, 30):
                await threads_of(engine, dispatcher, SINGLE_CLIENT_REQUESTS, length)
            engine.threads.clear()
            for _ in range(SINGLE_CLIENT_REQUESTS + 2):
                await soon(run(dispatcher, rows([1, 1])))
            return set(await threads_of(engine, dispatcher, SINGLE_CLIENT_REQUESTS + 2, 6))

    assert HERE not in asyncio.run(main())


def test_a_row_that_fails_in_the_loops_thread_fails_alone() -> None:
    async def main() -> list[str]:
        engine = EchoEngine()
        async with lane_of(engine, plan(), tokens_per_second=2 * BETWEEN) as dispatcher:
            await threads_of(engine, dispatcher, SINGLE_CLIENT_REQUESTS)
            engine.threads.clear()
            with pytest.raises(InferenceFailed, match="poison"):
                await soon(run(dispatcher, [Row([POISON])]))
            assert engine.threads == {HERE}
            with pytest.raises(DeadlineExceeded):
                await soon(run(dispatcher, [row(3)], seconds=-1.0))
            return await threads_of(engine, dispatcher, 2)

    assert asyncio.run(main()) == [HERE, HERE]


def test_a_row_that_runs_in_the_loops_thread_has_all_cores_and_its_time_is_reported() -> None:
    async def main() -> tuple[list[int], RequestResult, float]:
        engine = EchoEngine(streams=2)
        async with lane_of(engine, plan(streams=2, wide_from=3), tokens_per_second=BETWEEN) as dispatcher:
            await threads_of(engine, dispatcher, SINGLE_CLIENT_REQUESTS)
            engine.wide.clear()
            ran = await soon(run(dispatcher, [row(3)]))
            return engine.wide, ran, dispatcher.batcher.tokens_per_second

    wide, ran, rate = asyncio.run(main())

    assert wide == [3]
    assert ran.reduced == [21.0]
    assert ran.inference_milliseconds > 0
    assert 0 <= ran.queue_milliseconds < 30_000
    assert rate > 2 * BETWEEN  # its rows took less than they were expected to
