from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from penstock.tasks import TaskName
from penstock_runtime.errors import InferenceFailed
from tests.runtime.tasks.answers import assert_alike
from tests.runtime.tasks.conftest import Build
from tests.runtime.tasks.families import BERT, FAMILIES, NER, OFFSET_SIZES, Family, bert_tokenizer, build_for
from tests.runtime.tasks.texts import HARD, LONG, MORE

NAME = TaskName.TEXT_CLASSIFICATION
pytestmark = [pytest.mark.parity, pytest.mark.usefixtures("judge")]


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_texts_and_pairs_are_answered_as_by_the_pipeline(family: Family, built: Build) -> None:
    model = built(NAME, family)
    ours, theirs = model.task(NAME), model.pipeline(NAME)
    for text in [*HARD.values(), LONG]:
        pair = {"text": text, "text_pair": MORE[0]}
        assert_alike(ours(text), [theirs(text, top_k=None, truncation=True)])
        assert_alike(ours(pair), [theirs(pair, top_k=None, truncation=True)])
        assert_alike(ours(pair, top_k=2), [theirs(pair, top_k=2, truncation=True)])


@pytest.mark.parametrize("file", ["tokenizer_config.json", "config.json"])
def test_the_second_text_of_a_pair_has_its_token_type_where_the_class_gives_it(file: str, tmp_path: Path) -> None:
    """A RoBERTa with two types and a tokenizer of another class than its own, wherever that is named."""
    kind = Family("roberta", "Roberta", bert_tokenizer, OFFSET_SIZES | {"type_vocab_size": 2})
    model = build_for(NAME, kind, tmp_path)
    settings = json.loads((tmp_path / "tokenizer_config.json").read_bytes())
    del settings["tokenizer_class"]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    stated = json.loads((tmp_path / file).read_bytes()) | {"tokenizer_class": "PreTrainedTokenizerFast"}
    (tmp_path / file).write_text(json.dumps(stated))
    judge = replace(model, tokenizer=AutoTokenizer.from_pretrained(tmp_path)).pipeline(NAME)
    pair = {"text": MORE[0], "text_pair": MORE[1]}
    assert_alike(model.task(NAME)(pair), [judge(pair, top_k=None)])


@pytest.mark.parametrize("function", ["sigmoid", "softmax", "none"])
def test_the_requested_function_is_applied(function: str, built: Build) -> None:
    model = built(NAME, BERT)
    expected = model.pipeline(NAME)(MORE[1], top_k=None, function_to_apply=function)
    assert_alike(model.task(NAME)(MORE[1], function_to_apply=function), [expected])


@pytest.mark.parametrize(
    "config",
    [
        {"labels": ("only",)},
        {"problem_type": "regression", "labels": ("grade",)},
        {"problem_type": "regression"},
        {"problem_type": "multi_label_classification"},
        {"problem_type": "single_label_classification"},
    ],
    ids=str,
)
def test_the_function_is_chosen_by_the_kind_of_problem(config: dict[str, Any], built: Build) -> None:
    model = built(NAME, BERT, **config)
    assert_alike(model.task(NAME)(MORE[0]), [model.pipeline(NAME)(MORE[0], top_k=None)])


@pytest.mark.parametrize("labels", [(0, 1, 2), (1.5, 2.5, 3), (None, "good", None)], ids=str)
def test_labels_that_are_no_texts_are_answered_as_they_are(labels: Any, built: Build) -> None:
    model = built(NAME, BERT, labels=labels)
    assert_alike(model.task(NAME)(MORE[0]), [model.pipeline(NAME)(MORE[0], top_k=None)])
    assert {type(one["label"]) for one in model.task(NAME)(MORE[0])[0]} == set(map(type, labels))


def test_a_list_has_the_same_answers_as_its_entries_alone(built: Build) -> None:
    ask = built(NAME, BERT).task(NAME)
    entries = [MORE[0], {"text": MORE[1], "text_pair": LONG}, {"text": MORE[2]}, MORE[3], HARD["emoji"]]
    assert ask(entries) == [ask(entry)[0] for entry in entries]


def test_labels_are_sorted_by_descending_score_and_sum_to_one(built: Build) -> None:
    for labels in built(NAME, BERT).task(NAME)(list(MORE)):
        scores = [label["score"] for label in labels]
        assert sorted(scores, reverse=True) == scores
        assert sum(scores) == pytest.approx(1)
        assert {label["label"] for label in labels} == set(NER)


def test_truncated_texts_are_counted(built: Build) -> None:
    task = built(NAME, BERT).task(NAME).task
    request = task.parse([LONG, MORE[0], {"text": LONG, "text_pair": "short"}], {})
    assert task.prepare(request).truncated == 2


def test_a_text_is_truncated_on_the_left_if_requested(built: Build) -> None:
    model = built(NAME, BERT)
    row = model.task(NAME).task
    prepared = row.prepare(row.parse(LONG, {"truncation_direction": "Left"}))
    assert prepared.rows[0].ids[1:-1] == model.tokenizer(LONG, add_special_tokens=False)["input_ids"][-46:]


def test_nan_logits_fail_the_request(built: Build) -> None:
    task = built(NAME, BERT).task(NAME).task
    row = task.prepare(task.parse("text", {})).rows[0]
    logits = built(NAME, BERT).forward(row)["logits"] * float("nan")
    with pytest.raises(InferenceFailed, match="not a number"):
        task.reduce(row, {"logits": logits})
