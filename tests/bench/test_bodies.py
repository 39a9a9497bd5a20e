"""Requests of the experiment: a given number of texts of a given number of tokens, in a shape that the task takes."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tokenizers import Tokenizer

from penstock.tasks import TaskName
from penstock_bench.subject import batch_bodies, everyday_tokenizer, fewest_tokens
from penstock_runtime.tasks import make_task
from tests.runtime.tasks.families import BERT, NLI, build_for
from tests.tasks import COMMON_TASKS


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return everyday_tokenizer()


def payloads(task: TaskName, tokenizer: Tokenizer, tokens: int, batch: int) -> list[Any]:
    return [
        json.loads(body.body) for body in batch_bodies(task, tokenizer, tokens, batch, count=3, mask_token="[MASK]")
    ]


@pytest.mark.parametrize("tokens", [3, 8, 128, 512])
def test_texts_have_exactly_the_requested_number_of_tokens(tokenizer: Tokenizer, tokens: int) -> None:
    for payload in payloads(TaskName.FEATURE_EXTRACTION, tokenizer, tokens, 4):
        assert [len(tokenizer.encode(text).ids) for text in payload["inputs"]] == [tokens] * 4


def test_requests_differ_from_each_other_and_repeat_with_the_seed(tokenizer: Tokenizer) -> None:
    one = batch_bodies(TaskName.FEATURE_EXTRACTION, tokenizer, 16, 2, count=5, seed=1)

    assert len({body.body for body in one}) == 5
    assert one == batch_bodies(TaskName.FEATURE_EXTRACTION, tokenizer, 16, 2, count=5, seed=1)
    assert {body.group for body in one} == {16}


def test_a_ranking_batch_is_many_texts_for_one_query(tokenizer: Tokenizer) -> None:
    for payload in payloads(TaskName.TEXT_RANKING, tokenizer, 32, 4):
        query, texts = payload["inputs"]["query"], payload["inputs"]["texts"]
        assert [len(tokenizer.encode(query, text).ids) for text in texts] == [32] * 4


@pytest.mark.parametrize(
    ("task", "fewest"),
    [
        (TaskName.TEXT_RANKING, 5),
        (TaskName.QUESTION_ANSWERING, 5),
        (TaskName.FILL_MASK, 4),
        (TaskName.SENTENCE_SIMILARITY, 3),
        (TaskName.TEXT_CLASSIFICATION, 3),
    ],
)
def test_the_shortest_input_of_a_task_has_exactly_the_stated_number_of_tokens(
    tokenizer: Tokenizer, task: TaskName, fewest: int
) -> None:
    def tokens(inputs: Any) -> int:
        match task:
            case TaskName.TEXT_RANKING:
                return len(tokenizer.encode(inputs["query"], inputs["texts"][0]).ids)
            case TaskName.QUESTION_ANSWERING:
                return len(tokenizer.encode(inputs["question"], inputs["context"]).ids)
            case TaskName.SENTENCE_SIMILARITY:
                return len(tokenizer.encode(inputs["sentences"][0]).ids)
            case _:
                return len(tokenizer.encode(inputs.replace("[MASK]", "the")).ids)

    assert fewest_tokens(task, tokenizer) == fewest
    for length in range(fewest, fewest + 8):
        assert {tokens(payload["inputs"]) for payload in payloads(task, tokenizer, length, 1)} == {length}


@pytest.mark.parity
@pytest.mark.parametrize("name", list(COMMON_TASKS))
@pytest.mark.parametrize("batch", [1, 3])
def test_every_task_takes_its_batches(name: TaskName, batch: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    labels = {TaskName.ZERO_SHOT_CLASSIFICATION: NLI, TaskName.TEXT_RANKING: ("relevance",)}.get(name, ("A", "B"))
    built = build_for(name, BERT, tmp_path_factory.mktemp("model"), labels=labels)
    task = make_task(name, built.folder())
    backend = Tokenizer.from_file(str(built.path / "tokenizer.json"))

    for body in batch_bodies(name, backend, 12, batch, count=2, mask_token="[MASK]"):
        payload = json.loads(body.body)
        prepared = task.prepare(task.parse(payload["inputs"], payload.get("parameters", {})))
        assert len(prepared.rows) >= batch
