"""Requests with the same content that are in progress at the same time are computed once, if answers are kept."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Coroutine
from typing import Any

import pytest

from penstock_runtime.errors import InferenceFailed, InvalidInput
from penstock_runtime.serving.predictor import Answer, Predictor
from penstock_runtime.settings import CacheSettings
from tests.runtime.batching.echo import POISON, EchoEngine
from tests.runtime.serving.small import SumTask, small_model
from tests.runtime.serving.test_predictor import Seen, begun, soon

CACHES = CacheSettings(answer_cache_bytes=100_000)


async def started(coroutine: Coroutine[Any, Any, Answer]) -> asyncio.Task[Answer]:
    """The request as a task that has run up to its first pause."""
    task = asyncio.create_task(coroutine)
    await asyncio.sleep(0)
    return task


def test_same_requests_at_the_same_time_are_computed_once() -> None:
    async def main() -> None:
        engine, seen = EchoEngine(), Seen()
        predictor = Predictor(small_model(engine), seen, caches=CACHES)
        engine.gate.clear()
        same = [await started(predictor.predict([5], {})) for _ in range(10)]
        other = await started(predictor.predict([5], {"a": 1}))
        await begun(engine)
        engine.gate.set()
        answers = await soon(asyncio.gather(*same))
        await soon(other)
        assert [answer.value["sums"] for answer in answers] == [[5.0]] * 10
        assert [answer.remembered for answer in answers] == [False] + [True] * 9
        assert sum(answer.computed_tokens for answer in answers) == 5
        assert sum(map(len, engine.batches)) == 2
        assert seen.caches == {("answers", False): 11, ("in-progress", True): 9}
        await predictor.drain()

    asyncio.run(main())


def test_without_a_cache_of_answers_each_request_is_computed() -> None:
    async def main() -> None:
        engine, seen = EchoEngine(), Seen()
        predictor = Predictor(small_model(engine), seen)
        await soon(asyncio.gather(*(predictor.predict([5], {}) for _ in range(10))))
        await predictor.drain()
        assert sum(map(len, engine.batches)) == 10
        assert seen.caches == Counter()

    asyncio.run(main())


def test_a_client_that_leaves_does_not_fail_those_who_wait_for_the_same_answer() -> None:
    async def main() -> None:
        engine = EchoEngine()
        predictor = Predictor(small_model(engine), caches=CACHES)
        engine.gate.clear()
        blocking = await started(predictor.predict([1], {}))
        await begun(engine)
        first, *others = [await started(predictor.predict([5], {})) for _ in range(5)]
        first.cancel()
        gone = others.pop(1)
        gone.cancel()
        engine.gate.set()
        answers = await soon(asyncio.gather(*others))
        await soon(blocking)
        assert first.cancelled()
        assert gone.cancelled()
        assert [answer.value["sums"] for answer in answers] == [[5.0]] * 3
        # One of them took the place of the first.
        assert [answer.remembered for answer in answers].count(False) == 1
        await predictor.drain()

    asyncio.run(main())


def test_a_failure_is_not_shared_and_not_kept() -> None:
    class Poisoned(SumTask):
        def parse(self, inputs: Any, parameters: Any) -> Any:
            self.token = POISON
            return inputs

    async def main() -> None:
        engine, task = EchoEngine(), Poisoned()
        predictor = Predictor(small_model(engine, task), caches=CACHES)
        found = await soon(asyncio.gather(*(predictor.predict([5], {}) for _ in range(3)), return_exceptions=True))
        assert [type(one) for one in found] == [InferenceFailed] * 3
        assert predictor.facts()["caches"]["answers"]["entries"] == 0
        with pytest.raises(InvalidInput):
            await Predictor(small_model(), caches=CACHES).predict({}, {})
        await predictor.drain()

    asyncio.run(main())


def test_a_request_that_must_start_earlier_does_not_wait_for_a_later_one() -> None:
    async def main() -> None:
        engine = EchoEngine()
        predictor = Predictor(small_model(engine), caches=CACHES)
        patient = await started(predictor.predict([5], {}, deadline_seconds=500))
        hurried = await started(predictor.predict([5], {}, deadline_seconds=400))
        waiting = await started(predictor.predict([5], {}, deadline_seconds=600))
        answers = await soon(asyncio.gather(patient, hurried, waiting))
        assert [answer.remembered for answer in answers] == [False, False, True]
        await predictor.drain()

    asyncio.run(main())


def test_no_answer_of_an_old_model_is_given_or_kept_after_a_swap() -> None:
    async def main() -> None:
        engine = EchoEngine()
        predictor = Predictor(small_model(engine, SumTask("old")), caches=CACHES)
        engine.gate.clear()
        old = [await started(predictor.predict([5], {})) for _ in range(3)]
        await begun(engine)
        new = small_model(task=SumTask("new"))
        new.which = "baseline"
        swap = asyncio.create_task(predictor.replace(new))
        while predictor.facts()["which"] == "chosen":
            await asyncio.wait([swap], timeout=0.01)
        # The same content, while the old model still computes it.
        assert (await soon(predictor.predict([5], {}))).value["mark"] == "new"
        engine.gate.set()
        assert {answer.value["mark"] for answer in await soon(asyncio.gather(*old))} == {"old"}
        await soon(swap)
        again = await soon(predictor.predict([5], {}))
        assert (again.value["mark"], again.remembered) == ("new", True)
        assert predictor.facts()["caches"]["answers"]["entries"] == 1
        await predictor.drain()

    asyncio.run(main())


def test_draining_answers_those_who_wait_for_the_same_answer() -> None:
    async def main() -> None:
        engine = EchoEngine()
        predictor = Predictor(small_model(engine), caches=CACHES)
        engine.gate.clear()
        same = [await started(predictor.predict([5], {})) for _ in range(4)]
        await begun(engine)
        drained = asyncio.create_task(predictor.drain())
        await asyncio.sleep(0)
        same[0].cancel()
        engine.gate.set()
        answers = await soon(asyncio.gather(*same[1:]))
        await soon(drained)
        assert [answer.value["sums"] for answer in answers] == [[5.0]] * 3

    asyncio.run(main())
