"""The generator: replacement of a running model, metrics, facts, and loading from an artefact's folder."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import pytest

from penstock.errors import CorruptModel
from penstock.tasks import TaskName
from penstock_runtime.errors import InferenceFailed, NotReady, Overloaded, PromptTooLong
from penstock_runtime.generation.loop import FinishReason, JobRequest
from penstock_runtime.generation.sampling import SamplingParameters
from penstock_runtime.generation.scheduler import Step
from penstock_runtime.serving.generation_model import read_generation_model, warm_up
from penstock_runtime.serving.generation_request import Generation
from penstock_runtime.serving.generator import Generator, NullLoopObserver
from penstock_runtime.serving.metrics import ServerMetrics
from penstock_runtime.serving.status import ServerStatus
from penstock_runtime.settings import QueueSettings
from penstock_runtime.tasks.text_generation import Prompt
from tests.runtime.generation.paged_engine import PagedEngine
from tests.runtime.generation.small_model import small_engine, small_generation_model, write_generation_folder

GREEDY = SamplingParameters(temperature=0)
PROMPT = list(b"Once upon a time")


def job(max_tokens: int = 8) -> JobRequest:
    return JobRequest((), max_tokens, GREEDY)


def run(test: Callable[[], Awaitable[None]]) -> None:
    async def limited() -> None:
        async with asyncio.timeout(120):
            await test()

    asyncio.run(limited())


def is_closed(engine: PagedEngine) -> bool:
    return engine.closed


async def tokens(generation: Generation) -> list[int]:
    (one,) = await generation.read_all()
    return [sampled.token for sampled in one.tokens]


def test_a_stream_ends_on_its_model_while_another_one_takes_over(tmp_path: Path) -> None:
    async def test() -> None:
        first, second = small_engine(), small_engine(seed=1)
        first.gate = threading.Semaphore(0)
        generator = Generator(small_generation_model(tmp_path / "a", first))
        old = generator.generate([PROMPT], [job()])
        first.gate.release()
        await old.read()
        replacing = asyncio.create_task(generator.replace(small_generation_model(tmp_path / "b", second)))
        while generator.model.engine is first:  # noqa: ASYNC110 - the task runs until its first wait
            await asyncio.sleep(0)
        new = await tokens(generator.generate([PROMPT], [job()]))
        assert not replacing.done()
        assert not is_closed(first)
        for _ in range(20):
            first.gate.release()
        rest = await tokens(old)
        await replacing
        assert is_closed(first)
        assert new != rest
        alone = Generator(small_generation_model(tmp_path / "c", small_engine()))
        assert await tokens(alone.generate([PROMPT], [job()])) == rest
        await alone.drain()
        await generator.drain()
        assert is_closed(second)
        with pytest.raises(NotReady):
            generator.generate([PROMPT], [job()])

    run(test)


@pytest.mark.parametrize(("prompt", "max_tokens"), [(512, 1), (512, 0), (500, 13), (0, 1)])
def test_what_can_never_fit_is_refused_at_once(tmp_path: Path, prompt: int, max_tokens: int) -> None:
    async def test() -> None:
        generator = Generator(small_generation_model(tmp_path))
        with pytest.raises(PromptTooLong):
            generator.generate([[1] * prompt], [job(max_tokens)])
        assert generator.queue_depth() == (0, 0)
        await generator.drain()

    run(test)


def test_a_small_pool_limits_the_length_and_not_the_number_of_requests(tmp_path: Path) -> None:
    async def test() -> None:
        generator = Generator(small_generation_model(tmp_path, small_engine(blocks=4)))
        assert generator.longest == 64
        alone = await tokens(generator.generate([PROMPT], [job(40)]))
        together = [generator.generate([PROMPT], [job(40)]) for _ in range(6)]
        assert [await tokens(one) for one in together] == [alone] * 6
        assert generator.facts()["sequences"]["preemptions"] >= 1
        assert generator.facts()["cache"]["blocks_in_use"] == 0
        await generator.drain()

    run(test)


def test_several_answers_of_one_prompt_compute_it_once(tmp_path: Path) -> None:
    async def test() -> None:
        engine = small_engine()
        generator = Generator(small_generation_model(tmp_path, engine))
        prompt = [1] * 200
        generation = generator.generate([prompt], [job(3)] * 4)
        found = await generation.read_all()
        assert len({tuple(sampled.token for sampled in one.tokens) for one in found}) == 1
        assert [len(one.tokens) for one in found] == [3] * 4
        computed = sum(count for step in engine.steps for _, count in step)
        # The last block of the prompt is not whole, and each answer computes two tokens of its own.
        assert computed <= len(prompt) + 3 * engine.block_size + 4 * 2
        assert generation.reused_tokens == 0
        await generator.drain()

    run(test)


def test_a_closed_request_starts_no_further_answers(tmp_path: Path) -> None:
    async def test() -> None:
        engine = small_engine()
        engine.gate = threading.Semaphore(0)
        generator = Generator(small_generation_model(tmp_path, engine))
        generation = generator.generate([PROMPT], [job(3)] * 3)
        generation.close()
        for _ in range(10):
            engine.gate.release()
        await generator.drain()
        assert len(engine.steps) <= 1

    run(test)


def test_a_closed_request_frees_its_blocks(tmp_path: Path) -> None:
    async def test() -> None:
        engine = small_engine()
        engine.gate = threading.Semaphore(2)  # it computes no more before the request is closed
        generator = Generator(small_generation_model(tmp_path, engine))
        generation = generator.generate([PROMPT], [job(400)] * 3)
        await generation.read()
        assert generator.facts()["sequences"]["running"] >= 1
        generation.close()
        generation.close()
        engine.gate.release(1000)
        while generator.facts()["cache"]["blocks_in_use"]:  # noqa: ASYNC110 - set by the engine's thread
            await asyncio.sleep(0.01)
        await generator.drain()

    run(test)


def test_a_full_queue_refuses_the_newest_request_of_the_client_with_the_most(tmp_path: Path) -> None:
    async def test() -> None:
        engine = small_engine()
        engine.gate = threading.Semaphore(0)
        queue = QueueSettings(max_queue_rows=3)
        generator = Generator(small_generation_model(tmp_path, engine), queue=queue)
        many = [generator.generate([PROMPT], [replace(job(), client="many")]) for _ in range(3)]
        with pytest.raises(Overloaded):
            generator.generate([PROMPT], [replace(job(), client="many")])
        few = generator.generate([PROMPT], [replace(job(), client="few")])
        with pytest.raises(Overloaded, match="3 sequences"):
            await many[2].read_all()
        assert generator.queue_depth()[0] == 3
        engine.gate.release(1000)
        assert len(await tokens(few)) == 8
        for one in many[:2]:
            assert len(await tokens(one)) == 8
        await generator.drain()

    run(test)


def test_a_prompt_is_refused_before_it_is_tokenised_where_the_queue_has_no_room_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test() -> None:
        engine = small_engine()
        engine.gate = threading.Semaphore(0)
        generator = Generator(small_generation_model(tmp_path, engine), queue=QueueSettings(max_queue_tokens=40))
        waiting = generator.generate([PROMPT * 2], [replace(job(), client="heavy")])
        tokenised: list[str] = []

        def encode(text: str, *, with_special_tokens: bool, **_: int) -> list[int]:
            tokenised.append(text)
            return [int(with_special_tokens)]

        monkeypatch.setattr(generator.model, "encode_prompt", encode)
        with pytest.raises(Overloaded):
            await generator.tokens([Prompt("x" * 60, special=False)], "heavy")
        assert not tokenised
        assert await generator.tokens([Prompt("x" * 8, special=False)], "heavy") == [[0]]
        engine.gate.release(1000)
        await tokens(waiting)
        await generator.drain()

    run(test)


@pytest.mark.parametrize("closes", [False, True])
def test_a_request_that_gives_way_before_it_starts_does_not_start(tmp_path: Path, *, closes: bool) -> None:
    async def test() -> None:
        engine = small_engine()
        engine.gate = threading.Semaphore(0)
        generator = Generator(small_generation_model(tmp_path, engine), queue=QueueSettings(max_queue_rows=2))
        running = generator.generate([PROMPT], [replace(job(), client="many")])
        admitted = generator.admit([PROMPT], [replace(job(), client="many")])
        assert generator.queue_depth() == (2, 2 * len(PROMPT))
        if closes:
            admitted.close()
        few = generator.generate([PROMPT], [replace(job(), client="few")])
        admitted.start()
        if not closes:
            with pytest.raises(Overloaded):
                await admitted.read_all()
        assert generator.queue_depth()[0] == 2
        engine.gate.release(1000)
        assert [len(await tokens(one)) for one in (running, few)] == [8, 8]
        assert generator.queue_depth() == (0, 0)
        await generator.drain()

    run(test)


def test_a_request_with_several_prompts_gives_way_as_a_whole(tmp_path: Path) -> None:
    async def test() -> None:
        engine = small_engine()
        engine.gate = threading.Semaphore(0)
        queue = QueueSettings(max_queue_rows=4)
        generator = Generator(small_generation_model(tmp_path, engine), queue=queue)
        many = generator.generate([PROMPT] * 4, [replace(job(), client="many")])
        few = generator.generate([PROMPT], [replace(job(), client="few")])
        assert generator.queue_depth() == (1, len(PROMPT))
        with pytest.raises(Overloaded, match="4 sequences"):
            await many.read_all()
        engine.gate.release(1000)
        assert len(await tokens(few)) == 8
        assert generator.queue_depth() == (0, 0)
        await generator.drain()

    run(test)


def test_requests_in_the_pipelines_format_share_prompts_of_one_tenant_only(tmp_path: Path) -> None:
    async def test() -> None:
        engine = small_engine()
        generator = Generator(small_generation_model(tmp_path, engine))
        begins = []
        for tenant in ("a", "a", "b"):
            before = len(engine.steps)
            parameters = {"max_new_tokens": 1}
            await generator.predict("Once upon a time there was a king", parameters, tenant=tenant)
            begins.append(engine.steps[before][0][0])
        assert begins == [0, 32, 0]
        await generator.drain()

    run(test)


@pytest.mark.parametrize("text", ["ab " * 60, "ab " * 100_000, "." * 100_000, "a" * 500 + " b" * 40], ids=len)
def test_of_a_prompt_that_is_far_too_long_a_part_is_tokenised(text: str, tmp_path: Path) -> None:
    model = small_generation_model(tmp_path)
    whole = model.encode_prompt(text, with_special_tokens=False, most=10**6)
    for most in (8, 64, 400, 2000):
        found = model.encode_prompt(text, with_special_tokens=False, most=most)
        assert found == (whole if len(found) != most + 1 else whole[: most + 1])
        assert (len(found) > most) == (len(whole) > most)


def test_a_prompt_that_is_far_too_long_is_refused_with_the_limit(tmp_path: Path) -> None:
    async def test() -> None:
        generator = Generator(small_generation_model(tmp_path))
        with pytest.raises(PromptTooLong, match="the prompt has more than 512 tokens and 4 tokens to generate"):
            await generator.predict("a b " * 100_000, {"max_new_tokens": 4})
        await generator.drain()

    run(test)


def test_other_threads_run_while_a_long_prompt_is_tokenised(tmp_path: Path) -> None:
    model = small_generation_model(tmp_path)
    text, times = "a long prompt " * 100_000, []

    def encode() -> None:
        times.append(perf_counter())
        model.encode_prompt(text, with_special_tokens=False, most=10**6)
        times.append(perf_counter())

    thread = threading.Thread(target=encode)
    thread.start()
    ran = []
    while thread.is_alive():
        ran.append(perf_counter())
    thread.join()
    begin, end = times
    tenth = (end - begin) / 10
    assert any(begin + tenth < moment < end - tenth for moment in ran)


@pytest.mark.parametrize(("prompts", "in_loop"), [(3, True), (20, False)])
def test_many_prompts_of_a_request_are_tokenised_as_a_long_one(
    prompts: int, in_loop: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test() -> None:
        model = small_generation_model(tmp_path)
        encode, threads = model.encode_prompt, set()

        def watched(text: str, **given: Any) -> list[int]:
            threads.add(threading.get_ident())
            return encode(text, **given)

        monkeypatch.setattr(model, "encode_prompt", watched)
        generator = Generator(model)
        answer = await generator.predict([f"{'x' * 300} {one}" for one in range(prompts)], {"max_new_tokens": 1})
        assert len(answer.value) == prompts
        assert answer.tokens == sum(300 + len(f" {one}") + 1 for one in range(prompts))
        assert (threading.get_ident() in threads) is in_loop
        await generator.drain()

    run(test)


def test_the_metrics_count_tokens_and_times(tmp_path: Path) -> None:
    async def test() -> None:
        metrics = ServerMetrics(ServerStatus("smol", TaskName.TEXT_GENERATION))
        generator = Generator(small_generation_model(tmp_path), metrics.generation)
        metrics.generation.state = generator.state
        for _ in range(2):
            assert len(await tokens(generator.generate([PROMPT * 2], [job(5)]))) == 5
        text = metrics.exposition("")[0].decode()
        for line in (
            "penstock_first_token_seconds_count 2.0",
            "penstock_token_seconds_count 8.0",
            'penstock_generation_tokens_total{kind="generated"} 10.0',
            'penstock_generation_tokens_total{kind="cached"} 16.0',
            'penstock_cache_blocks{state="used"} 0.0',
            'penstock_sequences{state="waiting"} 0.0',
            "penstock_preemptions_total 0.0",
        ):
            assert line in text
        await generator.drain()

    run(test)


def test_the_defaults_of_the_models_files_apply(tmp_path: Path) -> None:
    async def test() -> None:
        model = small_generation_model(tmp_path, eos_token_id=[10, 257], do_sample=False, max_new_tokens=3)
        assert model.end_tokens == {10, 257}
        generator = Generator(model)
        first, second = [(await generator.predict("Once", {})).value for _ in range(2)]
        assert first == second
        await generator.drain()

    run(test)


def test_an_end_token_is_read_where_transformers_reads_it(tmp_path: Path) -> None:
    folder = write_generation_folder(tmp_path)
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": 258, "eos_token_id": 10}))
    assert read_generation_model(folder, small_engine()).end_tokens == {10, 257}
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 11}))
    assert read_generation_model(folder, small_engine()).end_tokens == {11, 257}


@pytest.mark.parametrize(
    ("config", "generation", "expected"),
    [
        ({"temperature": 0.5, "top_k": None}, None, {"temperature": 0.5}),
        ({"temperature": 0.5}, {}, {}),
        (
            {"task_specific_params": {"text-generation": {"do_sample": True, "temperature": 0.5}}},
            {"temperature": 0.25, "top_k": 3},
            {"do_sample": True, "temperature": 0.5, "top_k": 3},
        ),
        ({"task_specific_params": {"summarization": {"temperature": 0.5}}}, {"top_k": 3}, {"top_k": 3}),
        ({"task_specific_params": [1]}, None, {}),
    ],
)
def test_defaults_are_found_where_transformers_finds_them(
    config: dict[str, Any], generation: dict[str, Any] | None, expected: dict[str, Any], tmp_path: Path
) -> None:
    folder = write_generation_folder(tmp_path)
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": 258, **config}))
    (folder / "generation_config.json").unlink(missing_ok=True)
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    assert read_generation_model(folder, small_engine()).defaults == expected


def test_an_answer_ends_as_the_models_files_say(tmp_path: Path) -> None:
    async def texts(folder: str, **settings: Any) -> tuple[str, int]:
        model = small_generation_model(tmp_path / folder, **settings)
        generator = Generator(model)
        answer = await generator.predict("Once", {"do_sample": False, "max_new_tokens": 12, "return_full_text": False})
        await generator.drain()
        return answer.value[0]["generated_text"], answer.tokens - 4

    async def test() -> None:
        free, count = await texts("free")
        assert count == 12
        stopped, _ = await texts("stop", stop_strings=[free[2]])
        assert stopped == free[: free.index(free[2]) + 1]
        later, least = await texts("least", stop_strings=free[2], min_new_tokens=9)
        assert (later[:3], least >= 9) == (free[:3], True)

    run(test)


def test_an_end_token_outside_of_the_vocabulary_is_an_error_of_the_model(tmp_path: Path) -> None:
    with pytest.raises(CorruptModel, match="eos_token_id"):
        small_generation_model(tmp_path, eos_token_id=258)


def test_the_warm_up_runs_prompts_and_steps_and_finds_nan(tmp_path: Path) -> None:
    engine = small_engine(blocks=5)
    warm_up(engine)
    assert [len(step) for step in engine.steps] == [1, 1]
    engine = small_engine()
    warm_up(engine)
    assert [len(step) for step in engine.steps] == [1, 1, 8, 8]

    class Broken(PagedEngine):
        def step(self, rows: Any) -> Any:
            return super().step(rows) * np.float32("nan")

    with pytest.raises(CorruptModel, match="NaN"):
        warm_up(Broken())
    assert write_generation_folder(tmp_path).is_dir()


def test_a_stop_string_may_be_cut_from_the_last_tokens(tmp_path: Path) -> None:
    async def test() -> None:
        generator = Generator(small_generation_model(tmp_path))
        sampling = SamplingParameters(seed=4, temperature=1.5)
        (whole,) = await generator.generate([PROMPT], [JobRequest((), 20, sampling)]).read_all()
        stop = whole.text[4:7]
        (ended,) = await generator.generate(
            [PROMPT], [JobRequest((), 20, sampling, stop=(stop,))], field="prompt"
        ).read_all()
        assert ended.text == whole.text[: whole.text.index(stop)]
        assert ended.finish is FinishReason.STOP_STRING
        await generator.drain()

    run(test)


def test_a_token_without_text_ends_its_request_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        model = small_generation_model(tmp_path)
        decode = model.decode

        def fails_on_x(ids: Any) -> str:
            text = decode(ids)
            if "x" in text:
                raise ValueError("no text")
            return text

        monkeypatch.setattr(model, "decode", fails_on_x)
        generator = Generator(model)
        (x,) = b"x"
        to_x = SamplingParameters(temperature=0, logit_bias={model.tokenizer.backend.token_to_id(chr(x)): 100})
        failing = generator.generate([PROMPT], [JobRequest((), 5, to_x)])
        good = generator.generate([PROMPT], [job(5)])
        with pytest.raises(InferenceFailed):
            await failing.read_all()
        assert len(await tokens(good)) == 5
        await generator.drain()

    run(test)


def test_a_request_that_cannot_be_submitted_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        generator = Generator(small_generation_model(tmp_path))

        def fail(_: JobRequest) -> None:
            raise MemoryError

        with monkeypatch.context() as patched:
            patched.setattr(generator._served.loop, "submit", fail)
            with pytest.raises(MemoryError):
                generator.generate([PROMPT], [job()])
        assert generator.queue_depth() == (0, 0)
        assert len(await tokens(generator.generate([PROMPT], [job(3)]))) == 3
        await generator.drain()  # it would wait for the request

    run(test)


def test_a_defect_of_the_loop_fails_the_requests_in_progress_and_no_later_ones(tmp_path: Path) -> None:
    class Failing(NullLoopObserver):
        fails = True

        def step(self, step: Step, seconds: float) -> None:
            if self.fails:
                raise RuntimeError("a defect")

    async def test() -> None:
        observer = Failing()
        generator = Generator(small_generation_model(tmp_path), observer)
        with pytest.raises(InferenceFailed):
            await generator.generate([PROMPT], [job()]).read_all()
        observer.fails = False
        assert len(await tokens(generator.generate([PROMPT], [job(3)]))) == 3
        while generator.facts()["cache"]["blocks_in_use"]:  # noqa: ASYNC110 - set by the engine's thread
            await asyncio.sleep(0.01)
        await generator.drain()

    run(test)
