"""The same request gets the same answer whatever it was batched with: hundreds of requests to the real MiniLM, with
`make test-all` thousands."""

from __future__ import annotations

import asyncio
import random
from functools import cache

import numpy as np
import pytest

from penstock.recipe import Batching, Plan, Recipe, ShortRoute
from penstock_runtime.engines.base import Threads
from penstock_runtime.engines.load import load_engine
from penstock_runtime.rows import Float, run_rows
from penstock_runtime.serving.loaded_model import load_graph
from penstock_runtime.serving.predictor import Predictor
from tests.examples import examples
from tests.runtime.minilm import OPENVINO_FP32, OPENVINO_STATIC, ORT_DYNAMIC, ORT_FP32, graph, task, texts

AT_ONCE = 64


class Batches:
    """An observer that counts how many rows shared a batch."""

    def __init__(self) -> None:
        self.rows = 0
        self.in_batches = 0

    def batch(self, rows: int, real_tokens: int, padded_tokens: int) -> None:
        assert real_tokens <= padded_tokens
        self.rows += rows
        self.in_batches += rows if rows > 1 else 0

    def cache(self, name: str, *, hit: bool) -> None:
        raise AssertionError((name, hit))


@cache
def distinct() -> list[str]:
    return texts(300, seed=11, median=8, longest=40)


@cache
def alone(recipe: Recipe, *, longer_than: int = 0) -> dict[str, Float]:
    """The vector of each text of more tokens than that when nothing else runs."""
    path, io = graph(recipe)
    engine = load_engine(path, io, recipe, Threads(1, 1), max_tokens=256)
    vectors = {}
    for text in distinct():
        prepared = task().prepare(task().parse(text, {}))
        if prepared.rows[0].length <= longer_than:
            continue
        reduced = [task().reduce(row, run_rows(engine.run, io, [row])[0]) for row in prepared.rows]
        vectors[text] = task().assemble(prepared, reduced)[0]
    engine.close()
    return vectors


def served(
    recipe: Recipe, batching: Batching, requests: int, *, short: ShortRoute | None = None, **options: float
) -> tuple[list[tuple[str, Float]], Batches]:
    """The answer to each text of `count` requests, of one to three texts each and many at once."""
    path, io = graph(recipe)
    plan = Plan.model_validate(
        {
            "recipe": recipe,
            "streams": 2,
            "threads_per_stream": 1,
            "batching": batching,
            "max_batch_rows": 1 if batching is Batching.SINGLE else 8,
            "wide_from_tokens": 16,
            "short": short,
            **options,
        }
    )
    seen = Batches()

    async def main() -> list[tuple[str, Float]]:
        short_graph = graph(short.recipe) if short is not None else None
        model = load_graph(task(), path, io, plan, short=short_graph, max_tokens=256)
        predictor = Predictor(model, seen)
        chance = random.Random(5)
        answers: list[tuple[str, Float]] = []
        todo = [[chance.choice(distinct()) for _ in range(chance.choice([1, 1, 1, 2, 3]))] for _ in range(requests)]

        async def client() -> None:
            while todo:
                asked = todo.pop()
                answer = await predictor.predict(asked if len(asked) > 1 else asked[0], {})
                answers.extend(zip(asked, answer.value, strict=True))

        await asyncio.gather(*(client() for _ in range(AT_ONCE)))
        await client()
        await predictor.drain()
        return answers

    return asyncio.run(main()), seen


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "batching", "padding", "tolerance", "requests"),
    [
        pytest.param(ORT_FP32, Batching.SINGLE, 0.0, 0.0, 800, id="onnxruntime-fp32, single"),
        pytest.param(ORT_FP32, Batching.PADDED, 0.2, 1e-5, 2000, id="onnxruntime-fp32, padded"),
        pytest.param(OPENVINO_FP32, Batching.PADDED, 0.2, 1e-5, 800, id="openvino-fp32, padded"),
        pytest.param(OPENVINO_STATIC, Batching.EQUAL_LENGTH, 0.0, 1e-5, 2000, id="openvino int8 static, equal length"),
        pytest.param(ORT_DYNAMIC, Batching.SINGLE, 0.0, 0.0, 800, id="onnxruntime int8 dynamic, single"),
    ],
)
def test_answers_do_not_depend_on_other_requests(
    recipe: Recipe, batching: Batching, padding: float, tolerance: float, requests: int
) -> None:
    expected = alone(recipe)

    requests = examples(requests)
    answers, seen = served(recipe, batching, requests, max_padding_share=padding)

    assert len(answers) > requests
    assert max(float(np.abs(vector - expected[text]).max()) for text, vector in answers) <= tolerance
    assert seen.rows == len(answers)
    if batching is Batching.SINGLE:
        assert seen.in_batches == 0
    else:
        assert seen.in_batches > seen.rows / 2, "most rows share a batch, otherwise the test proves nothing"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "batching", "padding", "short"),
    [
        pytest.param(
            OPENVINO_STATIC,
            Batching.EQUAL_LENGTH,
            0.0,
            ShortRoute(
                longest_tokens=16, recipe=ORT_FP32, batching=Batching.PADDED, max_batch_rows=8, max_padding_share=0.2
            ),
            id="short rows in company on onnxruntime, the others on openvino",
        ),
        pytest.param(
            ORT_FP32,
            Batching.PADDED,
            0.2,
            ShortRoute(longest_tokens=12, recipe=ORT_DYNAMIC, wide_from_tokens=8),
            id="short rows alone in dynamic int8, the others padded",
        ),
    ],
)
def test_answers_do_not_depend_on_other_requests_where_short_rows_have_a_separate_graph(
    recipe: Recipe, batching: Batching, padding: float, short: ShortRoute
) -> None:
    expected = {**alone(short.recipe), **alone(recipe, longer_than=short.longest_tokens)}
    other = alone(recipe)

    answers, seen = served(recipe, batching, examples(1600), short=short, max_padding_share=padding)

    assert max(float(np.abs(vector - expected[text]).max()) for text, vector in answers) <= 1e-5
    assert seen.in_batches > seen.rows / 4, "many rows share a batch, otherwise the test proves nothing"
    differing = sum(float(np.abs(vector - other[text]).max()) > 1e-4 for text, vector in answers)
    assert len(answers) / 10 < differing < len(answers) * 9 / 10, "both graphs answered"


@pytest.mark.slow
def test_dynamic_int8_depends_on_other_rows_and_may_only_run_alone() -> None:
    """Its activations are scaled over the whole batch: why the guard holds it to `Batching.SINGLE`."""
    expected = alone(ORT_DYNAMIC)

    answers, _ = served(ORT_DYNAMIC, Batching.EQUAL_LENGTH, 300)

    assert max(float(np.abs(vector - expected[text]).max()) for text, vector in answers) > 1e-3
