"""The texts as requests of every task."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.tasks import TaskName
from penstock_optimizer.guard.gate import (
    CALIBRATION_ROWS,
    JUDGING_SAMPLES,
    STRATA,
    _by_length,
    calibration_rows,
    judging_samples,
    own_corpus,
    prepare,
    samples,
    split,
)
from penstock_runtime.models.folder import ModelFolder
from penstock_runtime.tasks import Task, make_task
from tests.golden.models import Sizes, write_model
from tests.tasks import COMMON_TASKS

TaskOf = Callable[[TaskName], Task]


@pytest.fixture(scope="module")
def task_of(tmp_path_factory: pytest.TempPathFactory) -> TaskOf:
    @cache
    def make(name: TaskName) -> Task:
        folder = write_model(tmp_path_factory.mktemp(name.value), name, sizes=Sizes(positions=512))
        return make_task(name, ModelFolder.open(folder))

    return make


@pytest.mark.parametrize("name", COMMON_TASKS)
def test_every_task_takes_every_request(name: TaskName, task_of: TaskOf) -> None:
    for corpus in split(own_corpus()):
        requests = samples(name, corpus)

        assert len(prepare(task_of(name), requests)) == len(requests) > 30


@pytest.mark.parametrize("name", COMMON_TASKS)
def test_calibration_has_rows_of_all_lengths_within_its_limit(name: TaskName, task_of: TaskOf) -> None:
    rows = calibration_rows(task_of(name), samples(name, split(own_corpus())[0]))

    lengths = [row.length for row in rows]
    assert 60 < len(rows) <= CALIBRATION_ROWS
    assert min(lengths) <= 24
    assert max(lengths) > 100
    assert sum(length > 128 for length in lengths) <= 0.4 * len(rows), "long rows cost much"


@pytest.mark.parametrize("name", COMMON_TASKS)
def test_judging_has_enough_requests_of_all_lengths(name: TaskName, task_of: TaskOf) -> None:
    chosen = judging_samples(task_of(name), samples(name, split(own_corpus())[1]))

    assert 60 < len(chosen) <= JUDGING_SAMPLES
    lengths = [row.length for one in prepare(task_of(name), chosen) for row in one.rows]
    assert min(lengths) <= 24
    assert max(lengths) > 100


@pytest.mark.parametrize("name", COMMON_TASKS)
def test_the_choice_is_the_same_every_time(name: TaskName, task_of: TaskOf) -> None:
    requests = samples(name, split(own_corpus())[0])

    first, second = (calibration_rows(task_of(name), requests) for _ in range(2))

    assert [row.ids for row in first] == [row.ids for row in second]


def test_masks_are_the_tokenizers_own() -> None:
    corpus = split(own_corpus())[0]

    texts = [request.inputs for request in samples(TaskName.FILL_MASK, corpus, mask="<mask>")]

    assert all("<mask>" in text for text in texts)


def test_ranking_is_judged_by_logits_because_scores_near_one_hide_the_order() -> None:
    corpus = split(own_corpus())[0]

    assert all(request.parameters == {"raw_scores": True} for request in samples(TaskName.TEXT_RANKING, corpus))


def test_questions_have_their_answer_in_the_context() -> None:
    theme = own_corpus().themes[0]
    contexts = [
        request.inputs["context"]
        for request in samples(TaskName.QUESTION_ANSWERING, own_corpus())
        if request.inputs["question"] == theme.questions[0]
    ]

    assert len(contexts) == 3
    assert all(theme.sentences[0] in context for context in contexts)


@given(st.lists(st.integers(1, 600), max_size=300), st.integers(1, 200))
def test_as_many_as_wanted_are_chosen_each_once_in_their_order(lengths: list[int], at_most: int) -> None:
    chosen = _by_length(list(enumerate(lengths)), lengths, at_most)

    assert len(chosen) == min(at_most, len(lengths))
    assert chosen == sorted(set(chosen))


def test_shares_of_the_length_classes_are_kept_where_there_are_enough() -> None:
    lengths = [4, 20, 100, 400] * 100

    chosen = _by_length(lengths, lengths, 100)

    assert [chosen.count(length) for length in (4, 20, 100, 400)] == [round(100 * share) for _, share in STRATA]


def test_a_class_with_too_few_items_is_filled_from_the_others() -> None:
    lengths = [20] * 50 + [400] * 2

    assert len(_by_length(lengths, lengths, 40)) == 40
