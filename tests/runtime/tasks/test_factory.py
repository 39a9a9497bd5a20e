from __future__ import annotations

import pytest

from penstock.errors import SpecError, UnsupportedModel
from penstock.tasks import HEAD_OF_TASK, Head, TaskName
from penstock_runtime.tasks import make_task
from tests.runtime.tasks.conftest import Build
from tests.runtime.tasks.families import BERT, POSITIONS
from tests.tasks import COMMON_TASKS

MADE_FOR = {
    Head.ENCODER: TaskName.FEATURE_EXTRACTION,
    Head.SEQUENCE: TaskName.TEXT_CLASSIFICATION,
    Head.TOKEN: TaskName.TOKEN_CLASSIFICATION,
    Head.SPAN: TaskName.QUESTION_ANSWERING,
    Head.MASKED_LM: TaskName.FILL_MASK,
}


@pytest.mark.parametrize("head", MADE_FOR)
@pytest.mark.parametrize("name", COMMON_TASKS)
def test_a_task_is_made_for_models_with_its_head_only(name: TaskName, head: Head, built: Build) -> None:
    folder = built(MADE_FOR[head], BERT).folder()
    if HEAD_OF_TASK[name] in {head, Head.ENCODER}:
        # These two need labels of their own as well: see the next test.
        if name not in {TaskName.TEXT_RANKING, TaskName.ZERO_SHOT_CLASSIFICATION}:
            assert make_task(name, folder).name is name
        return
    with pytest.raises(UnsupportedModel, match="which has no head for") as refused:
        make_task(name, folder)
    assert MADE_FOR[head].value in refused.value.remedy
    assert name.value in refused.value.remedy


@pytest.mark.parametrize("name", [TaskName.TEXT_RANKING, TaskName.ZERO_SHOT_CLASSIFICATION])
def test_tasks_with_labels_of_their_own_are_made(name: TaskName, built: Build) -> None:
    assert make_task(name, built(name, BERT).folder()).name is name


def test_a_limit_below_the_models_own_is_kept(built: Build) -> None:
    name = TaskName.FEATURE_EXTRACTION
    task = make_task(name, built(name, BERT).folder(), max_tokens=7)
    assert task.prepare(task.parse("a " * 50, {})).rows[0].length == 7


@pytest.mark.parametrize("name", [TaskName.FEATURE_EXTRACTION, TaskName.QUESTION_ANSWERING])
def test_a_limit_over_the_models_own_is_refused(name: TaskName, built: Build) -> None:
    with pytest.raises(SpecError, match=f"this model takes up to {POSITIONS} tokens") as refused:
        make_task(name, built(name, BERT).folder(), max_tokens=POSITIONS + 1)
    assert refused.value.field == "spec.serving.maxInputTokens"


@pytest.mark.parametrize(
    ("name", "specials"), [(TaskName.FEATURE_EXTRACTION, 2), (TaskName.FILL_MASK, 2), (TaskName.QUESTION_ANSWERING, 3)]
)
def test_a_limit_without_room_for_text_is_refused(name: TaskName, specials: int, built: Build) -> None:
    folder = built(name, BERT).folder()
    with pytest.raises(
        UnsupportedModel, match=f"{specials} tokens leave no room besides the {specials} special tokens"
    ):
        make_task(name, folder, max_tokens=specials)
    make_task(name, folder, max_tokens=specials + 1)
