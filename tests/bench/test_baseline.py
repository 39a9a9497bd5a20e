"""The baseline answers what transformers' own pipelines answer, through FastAPI."""

from __future__ import annotations

import asyncio
import importlib.util
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import transformers

from penstock.tasks import TaskName
from penstock_bench import baseline
from penstock_bench.baseline import BaselineMissing, make_answer, make_application, require_baseline
from tests.runtime.tasks.families import BERT, NLI, Built, build_for

pytestmark = [
    pytest.mark.parity,
    pytest.mark.filterwarnings("ignore"),  # transformers warns about tiny models, and about versions of itself
]


def post(built: Built, task: TaskName, inputs: Any, **parameters: Any) -> Any:
    application = make_application(make_answer(built.folder(), task))

    async def ask() -> Any:
        transport = httpx.ASGITransport(app=application)
        async with httpx.AsyncClient(transport=transport, base_url="http://baseline") as client:
            health = await client.get(baseline.READY_PATH)
            assert health.status_code == 200
            answer = await client.post("/predict", json={"inputs": inputs, "parameters": parameters})
            assert answer.status_code == 200, answer.text
            return answer.json()

    return asyncio.run(ask())


@pytest.fixture
def build(tmp_path: Path) -> Any:
    def of(task: TaskName, **options: Any) -> Built:
        return build_for(task, BERT, tmp_path, **options)

    return of


TEXTS = ["the river is cold", "summer and winter", "a cat"]


@pytest.mark.parametrize(
    ("task", "inputs", "parameters"),
    [
        (TaskName.TEXT_CLASSIFICATION, TEXTS[0], {}),
        (TaskName.TEXT_CLASSIFICATION, TEXTS, {"top_k": 2}),
        (TaskName.TOKEN_CLASSIFICATION, TEXTS[0], {}),
        (TaskName.QUESTION_ANSWERING, {"question": "a cat?", "context": "the river is cold"}, {}),
        (TaskName.FILL_MASK, "the [MASK] is cold", {"top_k": 2}),
        (TaskName.ZERO_SHOT_CLASSIFICATION, TEXTS[0], {"candidate_labels": ["x", "y"]}),
    ],
)
def test_answers_are_those_of_the_pipeline(build: Any, task: TaskName, inputs: Any, parameters: dict[str, Any]) -> None:
    built = build(task, **({"labels": NLI} if task is TaskName.ZERO_SHOT_CLASSIFICATION else {}))
    judge = built.pipeline(task)

    answer = post(built, task, inputs, **parameters)

    assert flat(answer) == pytest.approx(flat(judge(inputs, **parameters)), abs=1e-5)


def flat(value: Any) -> list[Any]:
    """Numbers of a nested answer, in order."""
    if isinstance(value, dict):
        return [number for key in sorted(value) for number in flat(value[key])]
    if isinstance(value, list | tuple):
        return [number for item in value for number in flat(item)]
    return [] if isinstance(value, str) or value is None else [float(value)]


def test_embeddings_are_the_mean_over_tokens_whatever_the_batch(build: Any) -> None:
    built = build(TaskName.FEATURE_EXTRACTION)
    tokens = built.pipeline(TaskName.FEATURE_EXTRACTION)(TEXTS)
    expected = np.stack([np.asarray(one)[0].mean(axis=0) for one in tokens])

    assert np.asarray(post(built, TaskName.FEATURE_EXTRACTION, TEXTS)) == pytest.approx(expected, abs=1e-5)
    assert post(built, TaskName.FEATURE_EXTRACTION, TEXTS[2]) == pytest.approx(expected[2], abs=1e-5)


def test_similarities_are_cosines_of_the_embeddings(build: Any) -> None:
    built = build(TaskName.SENTENCE_SIMILARITY)
    vectors = np.asarray(post(built, TaskName.FEATURE_EXTRACTION, TEXTS))
    unit = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)

    answer = post(built, TaskName.SENTENCE_SIMILARITY, {"source_sentence": TEXTS[0], "sentences": TEXTS[1:]})

    assert answer == pytest.approx(list(unit[1:] @ unit[0]), abs=1e-5)


def test_texts_are_ranked_by_descending_score(build: Any) -> None:
    built = build(TaskName.TEXT_RANKING, labels=("relevance",))

    answer = post(built, TaskName.TEXT_RANKING, {"query": TEXTS[0], "texts": TEXTS})

    assert sorted(entry["index"] for entry in answer) == [0, 1, 2]
    scores = [entry["score"] for entry in answer]
    assert scores == sorted(scores, reverse=True)


def test_missing_libraries_are_named_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "torch" else find(name))

    with pytest.raises(BaselineMissing, match=r"needs torch, not installed here.*pip install 'penstock\[bench\]'"):
        require_baseline()


def test_threads_are_set_before_torch_is_loaded() -> None:
    assert baseline.environment(2)["OMP_NUM_THREADS"] == "2"


def test_a_pipeline_that_transformers_lacks_is_named(build: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    task = TaskName.QUESTION_ANSWERING
    built = build(task)
    monkeypatch.delitem(transformers.pipelines.SUPPORTED_TASKS, task.value, raising=False)

    with pytest.raises(BaselineMissing, match="has no pipeline for question-answering"):
        make_answer(built.folder(), task)
