from __future__ import annotations

import asyncio
import json
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import replace
from time import perf_counter
from typing import Any, TypeVar

import pytest

from penstock_runtime.errors import DeadlineExceeded, InferenceFailed, InvalidInput, NotReady, Overloaded
from penstock_runtime.rows import Batch, Outputs
from penstock_runtime.serving.cache import memory_size
from penstock_runtime.serving.predictor import LARGE_BYTES, MANY_ROWS, Answer, Predictor, characters
from penstock_runtime.serving.tokenizing import LONG_CHARACTERS
from penstock_runtime.settings import CacheSettings, QueueSettings
from penstock_runtime.tasks.base import HeadInAssemble, Prepared
from tests.runtime.batching.echo import POISON, EchoEngine
from tests.runtime.serving.small import SumTask, small_model

T = TypeVar("T")


async def soon(awaitable: Awaitable[T]) -> T:
    return await asyncio.wait_for(awaitable, 60)


async def begun(engine: EchoEngine) -> None:
    assert await asyncio.to_thread(engine.began.acquire, timeout=60)


def is_closed(engine: EchoEngine) -> bool:
    return engine.closed


def penstock_threads() -> set[threading.Thread]:
    """Those of the product; the event loop has threads of its own."""
    return {thread for thread in threading.enumerate() if thread.name.startswith("penstock-")}


class Seen:
    """An observer."""

    def __init__(self) -> None:
        self.batches: list[tuple[int, int, int]] = []
        self.caches: Counter[tuple[str, bool]] = Counter()

    def batch(self, rows: int, real_tokens: int, padded_tokens: int) -> None:
        self.batches.append((rows, real_tokens, padded_tokens))

    def cache(self, name: str, *, hit: bool) -> None:
        self.caches[name, hit] += 1


def test_an_answer_comes_with_its_timings() -> None:
    async def main() -> tuple[Answer, float]:
        predictor = Predictor(small_model())
        before = perf_counter()
        answer = await soon(predictor.predict([3, 4], {}))
        passed = (perf_counter() - before) * 1e3
        await predictor.drain()
        return answer, passed

    answer, passed = asyncio.run(main())

    assert answer.value == {"mark": "first", "sums": [3.0, 4.0], "of": [3, 4]}
    assert (answer.tokens, answer.truncated) == (7, 1)
    timings = answer.timings
    parts = timings.tokenization_milliseconds + timings.inference_milliseconds
    assert 0 < parts <= timings.compute_milliseconds <= passed
    assert timings.compute_milliseconds + timings.queue_milliseconds <= passed


class SlowHead(SumTask):
    """A task that computes a part of the model in 20 ms."""

    head_in_assemble = True

    def assemble(self, prepared: Prepared, reduced: Sequence[Any]) -> Any:
        time.sleep(0.02)
        return super().assemble(prepared, reduced)


def test_the_time_of_a_head_that_the_task_computes_counts_as_inference() -> None:
    async def main() -> Answer:
        predictor = Predictor(small_model(task=SlowHead()))
        answer = await soon(predictor.predict([3], {}))
        await predictor.drain()
        return answer

    timings = asyncio.run(main()).timings

    assert isinstance(SlowHead(), HeadInAssemble)
    assert not isinstance(SumTask(), HeadInAssemble)
    assert timings.inference_milliseconds >= 20
    assert timings.tokenization_milliseconds + timings.inference_milliseconds <= timings.compute_milliseconds


def test_an_input_that_the_task_refuses_is_an_error() -> None:
    async def main() -> None:
        predictor = Predictor(small_model())
        with pytest.raises(InvalidInput):
            await predictor.predict({}, {})
        await predictor.drain()

    asyncio.run(main())


def test_a_poisoned_request_fails_alone_among_many() -> None:
    class Poisoned(SumTask):
        def parse(self, inputs: Any, parameters: Any) -> Any:
            self.token = POISON if parameters.get("poison") else 1
            return inputs

    async def main() -> list[Answer | BaseException]:
        predictor = Predictor(small_model(task=Poisoned()))
        answers = await soon(
            asyncio.gather(
                *(predictor.predict([8], {"poison": number == 40}) for number in range(100)), return_exceptions=True
            )
        )
        await predictor.drain()
        return answers

    answers = asyncio.run(main())

    failed = [index for index, answer in enumerate(answers) if isinstance(answer, InferenceFailed)]
    assert failed == [40]
    assert sum(isinstance(answer, Answer) for answer in answers) == 99


@pytest.mark.parametrize("lengths", [[5], [5, 6]])
def test_a_full_queue_answers_single_and_batch_alike(lengths: list[int]) -> None:
    async def main() -> None:
        engine = EchoEngine()
        predictor = Predictor(small_model(engine), queue=QueueSettings(max_queue_rows=3))
        engine.gate.clear()
        running = asyncio.create_task(predictor.predict([1], {}))
        await begun(engine)
        waiting = asyncio.create_task(predictor.predict([2, 3, 4], {}))
        await asyncio.sleep(0)
        assert predictor.queue_depth() == (3, 9)
        with pytest.raises(Overloaded) as caught:
            await predictor.predict(lengths, {})
        assert caught.value.retry_after_seconds >= 1
        engine.gate.set()
        await soon(asyncio.gather(running, waiting))
        assert (await soon(predictor.predict(lengths, {}))).tokens == sum(lengths)
        await predictor.drain()

    asyncio.run(main())


def test_a_full_queue_refuses_before_the_text_is_tokenised() -> None:
    async def main() -> None:
        engine, task = EchoEngine(), SumTask()
        predictor = Predictor(small_model(engine, task), queue=QueueSettings(max_queue_rows=1))
        engine.gate.clear()
        running = asyncio.create_task(predictor.predict([1], {}))
        await begun(engine)
        waiting = asyncio.create_task(predictor.predict([2], {}))
        await asyncio.sleep(0)
        before = len(task.prepared_in)
        with pytest.raises(Overloaded):
            await predictor.predict("x" * 100, {})
        assert len(task.prepared_in) == before
        engine.gate.set()
        await soon(asyncio.gather(running, waiting))
        await predictor.drain()

    asyncio.run(main())


def test_a_long_text_is_refused_before_it_is_tokenised_where_the_queue_has_no_room_for_it() -> None:
    async def main() -> None:
        engine, task = EchoEngine(), SumTask()
        predictor = Predictor(small_model(engine, task), queue=QueueSettings(max_queue_tokens=40))
        engine.gate.clear()
        running = asyncio.create_task(predictor.predict([1], {}, client="heavy"))
        await begun(engine)
        waiting = asyncio.create_task(predictor.predict([20], {}, client="heavy"))
        await asyncio.sleep(0)
        before = len(task.prepared_in)
        long = ["x" * LONG_CHARACTERS] * 8
        for _ in range(3):
            with pytest.raises(Overloaded):
                await predictor.predict(long, {}, client="heavy")
        assert len(task.prepared_in) == before
        engine.gate.set()
        await soon(asyncio.gather(running, waiting))
        await predictor.drain()

    asyncio.run(main())


def test_a_request_larger_than_the_queue_is_refused_permanently() -> None:
    async def main() -> None:
        predictor = Predictor(small_model(), queue=QueueSettings(max_queue_rows=3))
        with pytest.raises(InvalidInput, match="at most 3 may wait"):
            await predictor.predict([1, 2, 3, 4], {})
        await predictor.drain()

    asyncio.run(main())


@pytest.mark.parametrize(("own", "default"), [(0.05, 30.0), (None, 0.05)])
def test_a_request_is_dropped_at_its_own_or_the_default_deadline(own: float | None, default: float) -> None:
    async def main() -> None:
        engine = EchoEngine()
        predictor = Predictor(small_model(engine), queue=QueueSettings(deadline_seconds=default))
        engine.gate.clear()
        running = asyncio.create_task(predictor.predict([1], {}, deadline_seconds=20))
        await begun(engine)
        with pytest.raises(DeadlineExceeded):
            await soon(predictor.predict([2], {}, deadline_seconds=own))
        engine.gate.set()
        await soon(running)
        await predictor.drain()
        assert engine.batches == [[1]]

    asyncio.run(main())


def test_a_swap_under_load_fails_no_request_and_closes_the_old_model_after_its_last() -> None:
    async def main() -> None:
        models = [small_model(EchoEngine(streams=2), SumTask(f"model {number}")) for number in range(4)]
        predictor = Predictor(models[0])
        marks: list[str] = []
        stop = asyncio.Event()

        async def client(number: int) -> None:
            while not stop.is_set():
                answer = await predictor.predict([1 + number % 7] * (1 + number % 3), {})
                assert answer.value["sums"] == [float(1 + number % 7)] * (1 + number % 3)
                marks.append(answer.value["mark"])

        clients = [asyncio.create_task(client(number)) for number in range(20)]
        for model in models[1:]:
            await asyncio.sleep(0.05)  # lets the clients use the present model
            await soon(predictor.replace(model))
            counted = len(marks)
            while len(marks) < counted + 50:
                await asyncio.wait(clients, timeout=0.01)
        stop.set()
        await soon(asyncio.gather(*clients))
        await predictor.drain()

        assert set(marks) == {f"model {number}" for number in range(4)}
        assert all(isinstance(model.engine, EchoEngine) and model.engine.closed for model in models)

    asyncio.run(main())


def test_a_replaced_model_finishes_its_accepted_requests() -> None:
    async def main() -> None:
        engine = EchoEngine()
        predictor = Predictor(small_model(engine, SumTask("old")))
        engine.gate.clear()
        accepted = [asyncio.create_task(predictor.predict([5], {})) for _ in range(10)]
        await begun(engine)
        new = small_model(task=SumTask("new"))
        new.which = "baseline"
        swap = asyncio.create_task(predictor.replace(new))
        while predictor.facts()["which"] == "chosen":
            await asyncio.wait([swap], timeout=0.01)
        # New requests are answered by the new model while the old one still runs.
        assert (await soon(predictor.predict([5], {}))).value["mark"] == "new"
        assert not swap.done()
        assert not is_closed(engine)
        engine.gate.set()
        assert {answer.value["mark"] for answer in await soon(asyncio.gather(*accepted))} == {"old"}
        await soon(swap)
        assert is_closed(engine)
        await predictor.drain()

    asyncio.run(main())


def test_a_model_that_does_not_run_leaves_nothing_behind_and_the_old_one_in_service() -> None:
    class Broken(EchoEngine):
        def run(self, batch: Batch) -> Outputs:
            raise InferenceFailed("does not run")

    async def main() -> None:
        predictor = Predictor(small_model(task=SumTask("old")))
        before = penstock_threads()
        engine = Broken(streams=3)
        with pytest.raises(InferenceFailed):
            await soon(predictor.replace(small_model(engine)))
        assert engine.closed
        async with asyncio.timeout(60):
            # Threads need a moment to end.
            while penstock_threads() - before:  # noqa: ASYNC110 - a thread has no event
                await asyncio.sleep(0.01)
        assert (await soon(predictor.predict([5], {}))).value["mark"] == "old"
        await predictor.drain()

    asyncio.run(main())


def test_draining_answers_everything_accepted_and_refuses_the_rest() -> None:
    before = penstock_threads()

    async def main() -> None:
        engine = EchoEngine(streams=2)
        predictor = Predictor(small_model(engine))
        engine.gate.clear()
        accepted = [asyncio.create_task(predictor.predict([1 + number % 9], {})) for number in range(50)]
        long = asyncio.create_task(predictor.predict("x" * (LONG_CHARACTERS + 1), {}))
        await begun(engine)
        drains = [asyncio.create_task(predictor.drain()) for _ in range(2)]
        await asyncio.sleep(0)
        with pytest.raises(NotReady):
            await predictor.predict([1], {})
        assert not any(drain.done() for drain in drains)
        engine.gate.set()
        answers = await soon(asyncio.gather(*accepted))
        assert [answer.value["sums"] for answer in answers] == [[1.0 + number % 9] for number in range(50)]
        assert (await soon(long)).tokens > 0
        await soon(asyncio.gather(*drains))
        assert engine.closed
        late = EchoEngine()
        with pytest.raises(NotReady):
            await predictor.replace(small_model(late))
        assert late.closed

    asyncio.run(main())
    assert not penstock_threads() - before


def test_long_texts_are_tokenised_in_another_thread() -> None:
    async def main() -> SumTask:
        task = SumTask()
        predictor = Predictor(small_model(task=task))
        await predictor.predict("x" * LONG_CHARACTERS, {})
        await predictor.predict("x" * (LONG_CHARACTERS + 1), {})
        await predictor.predict("x", {"labels": ["y" * LONG_CHARACTERS]})
        await predictor.drain()
        return task

    names = asyncio.run(main()).prepared_in

    assert names[0] == threading.main_thread().name
    assert all(name.startswith("penstock-tokens") for name in names[1:])


def test_texts_that_wait_to_be_tokenised_are_bounded() -> None:
    class Slow(SumTask):
        gate = threading.Event()

        def prepare(self, request: Any) -> Any:
            assert self.gate.wait(60)
            return super().prepare(request)

    async def main() -> None:
        task = Slow()
        predictor = Predictor(small_model(task=task), queue=QueueSettings(max_queue_tokens=2 * LONG_CHARACTERS // 4))
        accepted = [asyncio.create_task(predictor.predict("x" * (LONG_CHARACTERS + 1), {})) for _ in range(2)]
        await asyncio.sleep(0)
        with pytest.raises(Overloaded, match="1 requests wait for the tokenizer"):
            await predictor.predict("x" * (LONG_CHARACTERS + 1), {})
        task.gate.set()
        assert all(answer.tokens > 0 for answer in await soon(asyncio.gather(*accepted)))
        await predictor.drain()

    asyncio.run(main())


def test_large_answers_are_assembled_in_another_thread() -> None:
    class Where(SumTask):
        def assemble(self, prepared: Any, reduced: Any) -> Any:
            return threading.current_thread() is threading.main_thread()

    async def main() -> list[Any]:
        predictor = Predictor(small_model(task=Where()))
        answers = [await soon(predictor.predict([1] * count, {})) for count in (MANY_ROWS, MANY_ROWS + 1)]
        await predictor.drain()
        return [answer.value for answer in answers]

    assert asyncio.run(main()) == [True, False]


def test_long_answers_are_assembled_and_measured_in_another_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[bool] = []

    def measure(answer: Answer) -> int:
        measured.append(threading.current_thread() is threading.main_thread())
        return memory_size(answer)

    class Where(SumTask):
        def parse(self, inputs: Any, parameters: Mapping[str, Any]) -> Any:
            self.answer_bytes = parameters["bytes"]
            return super().parse(inputs, parameters)

        def prepare(self, request: Any) -> Any:
            return replace(super().prepare(request), answer_bytes=self.answer_bytes)

        def assemble(self, prepared: Any, reduced: Any) -> Any:
            return threading.current_thread() is threading.main_thread()

    async def main() -> list[Any]:
        predictor = Predictor(small_model(task=Where()), caches=CacheSettings(answer_cache_bytes=2**20))
        answers = [await soon(predictor.predict([1], {"bytes": size})) for size in (LARGE_BYTES, LARGE_BYTES + 1)]
        await predictor.drain()
        return [answer.value for answer in answers]

    monkeypatch.setattr("penstock_runtime.serving.predictor.memory_size", measure)

    assert asyncio.run(main()) == [True, False]
    assert measured == [True, False]


def test_caches_are_off_by_default() -> None:
    async def main() -> Seen:
        engine, seen = EchoEngine(), Seen()
        predictor = Predictor(small_model(engine), observer=seen)
        for _ in range(3):
            await predictor.predict([4], {})
        await predictor.drain()
        assert len(engine.batches) == 3
        assert predictor.facts()["caches"] == {}
        return seen

    seen = asyncio.run(main())

    assert seen.caches == Counter()
    assert seen.batches == [(1, 4, 4)] * 3


def test_cached_answers_need_no_run_and_depend_on_the_parameters() -> None:
    async def main() -> None:
        engine, seen = EchoEngine(), Seen()
        predictor = Predictor(small_model(engine), seen, caches=CacheSettings(answer_cache_bytes=10_000))
        asked = [([4], {}), ([4], {}), ([4], {"a": 1}), ([5], {}), ([4], {"a": 1})]
        answers = [await predictor.predict(inputs, parameters) for inputs, parameters in asked]
        assert [answer.value["sums"] for answer in answers] == [[4.0], [4.0], [4.0], [5.0], [4.0]]
        assert [answer.remembered for answer in answers] == [False, True, False, False, True]
        assert [answer.computed_tokens for answer in answers] == [4, 0, 4, 5, 0]
        # The token counts of the texts stay correct: bills and warnings depend on them.
        assert [(answer.tokens, answer.truncated) for answer in answers] == [(4, 1), (4, 1), (4, 1), (5, 1), (4, 1)]
        assert all(answer.timings.inference_milliseconds == 0 for answer in answers if answer.remembered)
        assert seen.caches == {("answers", True): 2, ("answers", False): 3}
        assert predictor.facts()["caches"]["answers"]["hits"] == 2
        assert len(engine.batches) == 3

        await predictor.replace(small_model(task=SumTask("new")))
        assert (await predictor.predict([4], {})).value["mark"] == "new"
        await predictor.drain()

    asyncio.run(main())


def test_cached_tokens_are_not_tokenised_again() -> None:
    async def main() -> None:
        task, seen = SumTask(), Seen()
        predictor = Predictor(small_model(task=task), seen, caches=CacheSettings(token_cache_bytes=10_000))
        answers = [await predictor.predict([4, 6], {}) for _ in range(3)]
        assert [answer.value["sums"] for answer in answers] == [[4.0, 6.0]] * 3
        assert len(task.prepared_in) == 1
        assert seen.caches == {("tokens", True): 2, ("tokens", False): 1}
        await predictor.drain()

    asyncio.run(main())


@pytest.mark.parametrize("settings", [{"answer_cache_bytes": 10_000}, {"token_cache_bytes": 10_000}])
def test_caches_and_computations_are_shared_by_requests_of_one_token_only(settings: dict[str, int]) -> None:
    """A client could tell from the answer's time and headers what another one has asked."""

    async def main() -> None:
        task, seen, engine = SumTask(), Seen(), EchoEngine()
        predictor = Predictor(small_model(engine, task=task), seen, caches=CacheSettings(**settings))
        for tenant in ("a", "b", "a", "b"):
            await predictor.predict([4], {}, tenant=tenant)
        assert [found for (_, found), count in seen.caches.items() for _ in range(count)] == [False] * 2 + [True] * 2
        assert len(task.prepared_in) == 2
        # Of the same request in progress, too.
        engine.gate.clear()
        both = [asyncio.create_task(predictor.predict([9], {}, tenant=tenant)) for tenant in ("a", "b")]
        await begun(engine)
        engine.gate.set()
        assert [answer.remembered for answer in await asyncio.gather(*both)] == [False, False]
        await predictor.drain()

    asyncio.run(main())


def test_a_cancelled_client_is_skipped() -> None:
    async def main() -> None:
        engine = EchoEngine()
        predictor = Predictor(small_model(engine))
        engine.gate.clear()
        running = asyncio.create_task(predictor.predict([1], {}))
        await begun(engine)
        gone = asyncio.create_task(predictor.predict([2], {}))
        await asyncio.sleep(0)
        gone.cancel()
        with pytest.raises(asyncio.CancelledError):
            await gone
        engine.gate.set()
        await soon(running)
        await predictor.drain()
        assert engine.batches == [[1]]

    asyncio.run(main())


def test_the_warm_up_uses_every_stream_and_measures_the_rate() -> None:
    async def main() -> None:
        engine = EchoEngine(streams=2)
        predictor = Predictor(small_model(engine))
        before = predictor.facts()["queue"]["tokens_per_second"]
        await predictor.warm_up()
        assert len(engine.threads) == 2
        assert predictor.facts()["queue"]["tokens_per_second"] != before
        await predictor.drain()

    asyncio.run(main())


def test_facts_are_json_and_describe_what_is_served() -> None:
    async def main() -> dict[str, Any]:
        predictor = Predictor(small_model())
        facts = predictor.facts()
        await predictor.drain()
        return facts

    facts = asyncio.run(main())

    assert json.loads(json.dumps(facts)) == facts
    assert facts["engine"]["name"] == "echo"
    assert facts["engine"]["weight_copies"] == 1
    assert facts["plan"]["streams"] == 2


@pytest.mark.parametrize(
    ("value", "count"),
    [("a" * 99, 99), (["ab", {"x": "c", "y": ["d" * 70]}], 190), (7, 0), (None, 0), ({}, 0), (("a", "b"), 120)],
)
def test_characters_are_counted_in_every_field_and_short_texts_as_sixty(value: Any, count: int) -> None:
    assert characters(value) == count
