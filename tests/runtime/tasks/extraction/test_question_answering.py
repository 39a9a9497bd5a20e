from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.tasks import TaskName
from penstock_runtime.errors import InvalidInput
from tests.examples import examples
from tests.runtime.tasks.answers import assert_alike
from tests.runtime.tasks.conftest import Build
from tests.runtime.tasks.families import (
    BERT,
    FAMILIES,
    POSITIONS,
    ROBERTA,
    SMALL,
    XLM_ROBERTA,
    Family,
    giving_up_the_left,
)
from tests.runtime.tasks.texts import HARD, LONG, MORE

NAME = TaskName.QUESTION_ANSWERING
pytestmark = [pytest.mark.parity, pytest.mark.usefixtures("judge")]

EVERYWHERE: tuple[dict[str, Any], ...] = (
    {"top_k": 3},
    {"align_to_words": False, "top_k": 4, "max_seq_len": 24, "doc_stride": 3},
)
"""Judged with every kind of model; the others with one kind of tokenizer each."""

ONCE: tuple[dict[str, Any], ...] = (
    {},
    {"top_k": 20},
    {"handle_impossible_answer": True},
    {"handle_impossible_answer": True, "top_k": 2},
    {"max_answer_len": 1},
    {"max_answer_len": 500},
    {"doc_stride": 0},
    {"doc_stride": 7, "top_k": 2},
)


def judged(pipeline: Any, question: str, context: str, options: dict[str, Any]) -> Any:
    """The pipeline's answer without those of score zero.

    Where fewer spans exist than are asked for, transformers fills up with impossible ones (ending before they start,
    or of the first token); their score is exactly zero.
    """
    answer = pipeline(question=question, context=context, **options)
    if not pipeline.tokenizer(context, add_special_tokens=False)["input_ids"]:
        return answer  # no span at all: the empty answer has score zero
    answers = answer if isinstance(answer, list) else [answer]
    possible = [one for one in answers if one["score"] > 0] or answers
    return possible[0] if len(possible) == 1 else possible


@pytest.mark.parametrize(
    ("family", "options"),
    [
        *((family, options) for family in (*FAMILIES, XLM_ROBERTA) for options in EVERYWHERE),
        *((family, options) for family in (BERT, ROBERTA) for options in ONCE),
    ],
    ids=lambda value: getattr(value, "name", str(value)),
)
def test_answers_are_those_of_the_pipeline(family: Family, options: dict[str, Any], built: Build) -> None:
    model = built(NAME, family)
    ours, theirs = model.task(NAME), model.pipeline(NAME)
    for question in ("What is my name?", "😀 Où?"):
        for context in [*HARD.values(), LONG]:
            if not context.strip() and family is ROBERTA:
                continue  # its spaces are tokens without characters: every answer is empty, in any order
            expected = judged(theirs, question, context, options)
            assert_alike(ours({"question": question, "context": context}, **options), expected)


@pytest.mark.parametrize("options", [{}, {"top_k": 5}, {"doc_stride": 3, "top_k": 5}, {"doc_stride": 0}], ids=str)
@pytest.mark.parametrize("family", [BERT, ROBERTA], ids=lambda family: family.name)
def test_with_truncation_on_the_left_windows_begin_at_the_end(
    family: Family, options: dict[str, Any], built: Build, tmp_path: Path
) -> None:
    model = giving_up_the_left(built(NAME, family), tmp_path)
    ours, theirs = model.task(NAME), model.pipeline(NAME)
    for context in (LONG[:900], LONG[:300], MORE[0]):
        expected = judged(theirs, "Who lives in New York?", context, options)
        assert_alike(ours({"question": "Who lives in New York?", "context": context}, **options), expected)


@pytest.mark.parametrize("family", [BERT, ROBERTA], ids=lambda family: family.name)
@settings(max_examples=examples(60), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    context=st.one_of(
        st.text(st.characters(codec="utf-8"), min_size=1, max_size=80),
        st.lists(st.sampled_from([*HARD.values(), *MORE]), min_size=1, max_size=8).map(" ".join),
    ),
    top_k=st.integers(1, 8),
    align=st.booleans(),
    impossible=st.booleans(),
)
def test_answers_are_parts_of_the_context_sorted_by_descending_score(
    family: Family, built: Build, *, context: str, top_k: int, align: bool, impossible: bool
) -> None:
    ask = built(NAME, family).task(NAME)
    answer = ask(
        {"question": "Who?", "context": context}, top_k=top_k, align_to_words=align, handle_impossible_answer=impossible
    )
    answers = answer if isinstance(answer, list) else [answer]
    assert 1 <= len(answers) <= top_k
    for one in answers:
        assert context[one["start"] : one["end"]] == one["answer"]
        assert one["score"] >= 0
    scores = [one["score"] for one in answers]
    assert sorted(scores, reverse=True) == scores


def test_a_list_has_the_same_answers_as_its_entries_alone(built: Build) -> None:
    ask = built(NAME, BERT).task(NAME)
    entries = [{"question": "Who?", "context": context} for context in (MORE[0], LONG, HARD["emoji"])]
    assert ask(entries, top_k=2) == [ask(entry, top_k=2) for entry in entries]
    assert ask(entries[:1]) == [ask(entries[0])]


def test_a_question_is_truncated_if_requested(built: Build) -> None:
    task = built(NAME, BERT).task(NAME).task
    given = {"question": LONG, "context": "Ada lives in Berkeley."}
    prepared = task.prepare(task.parse(given, {"max_question_len": 5}))
    assert [row.type_ids for row in prepared.rows] == [[0] * 7 + [1] * (prepared.rows[0].length - 7)]
    assert prepared.truncated == 1


@pytest.mark.parametrize(
    ("question", "options", "field", "message"),
    [
        ("Who? " * 60, {"max_question_len": 60}, "inputs.question", "has 60 tokens, which leaves no room"),
        (LONG, {"max_question_len": 45}, "inputs.question", "leaves no room"),
        ("Who?", {"doc_stride": 42}, "parameters.doc_stride", "a window has 42 tokens of context"),
        ("Who?", {"doc_stride": 41}, "inputs.context", "over the limit of 256 windows"),
        ("Who?", {"max_seq_len": POSITIONS + 1}, "parameters.max_seq_len", "this model takes 48 tokens"),
    ],
)
def test_a_request_without_room_for_the_context_is_refused(
    question: str, options: dict[str, Any], field: str, message: str, built: Build
) -> None:
    ask = built(NAME, BERT).task(NAME, limits=SMALL)
    with pytest.raises(InvalidInput, match=message) as refused:
        ask({"question": question, "context": LONG}, **options)
    assert refused.value.field == field
    assert refused.value.remedy


@pytest.mark.parametrize(("words", "cut"), [(30, False), (60, True)])
def test_a_long_question_leaves_room_for_the_context(words: int, *, cut: bool, built: Build) -> None:
    task = built(NAME, BERT).task(NAME).task
    prepared = task.prepare(task.parse({"question": " ".join(["is"] * words), "context": LONG}, {}))
    assert prepared.truncated == cut
    assert len(prepared.rows) < 100
    assert max(row.length for row in prepared.rows) == POSITIONS


def test_a_long_question_is_refused_if_truncation_is_off(built: Build) -> None:
    ask = built(NAME, BERT).task(NAME, truncate=False)
    with pytest.raises(InvalidInput, match="leaves no room for context in 48"):
        ask({"question": " ".join(["is"] * 60), "context": LONG})
