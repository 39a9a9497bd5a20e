from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.tasks import TaskName
from tests.examples import examples
from tests.runtime.tasks.answers import assert_alike
from tests.runtime.tasks.conftest import Build
from tests.runtime.tasks.families import BERT, FAMILIES, ROBERTA, XLM_ROBERTA, Family, giving_up_the_left
from tests.runtime.tasks.texts import HARD, LONG, MORE

NAME = TaskName.TOKEN_CLASSIFICATION
STRATEGIES = ("none", "simple", "first", "average", "max")
pytestmark = [pytest.mark.parity, pytest.mark.usefixtures("judge")]


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("family", [*FAMILIES, XLM_ROBERTA], ids=lambda family: family.name)
def test_entities_are_those_of_the_pipeline(family: Family, strategy: str, built: Build) -> None:
    model = built(NAME, family)
    ours, theirs = model.task(NAME), model.pipeline(NAME)
    for text in [*HARD.values(), LONG]:
        for ignored in (["O"], [], ["PER", "B-PER", "MISC"]):
            options = {"aggregation_strategy": strategy, "ignore_labels": ignored}
            assert_alike(ours(text, **options), theirs(text, **options))


@pytest.mark.parametrize("labels", [(0, 1, 2), (None, "B-PER", None)], ids=str)
def test_labels_that_are_no_texts_are_answered_as_they_are(labels: Any, built: Build) -> None:
    model = built(NAME, BERT, labels=labels)
    options = {"aggregation_strategy": "none", "ignore_labels": []}
    assert_alike(model.task(NAME)(MORE[0], **options), model.pipeline(NAME)(MORE[0], **options))


@pytest.mark.parametrize("strategy", STRATEGIES[1:])
@pytest.mark.parametrize("stride", [0, 8, 40])
@pytest.mark.parametrize("family", [BERT, ROBERTA], ids=lambda family: family.name)
def test_entities_of_windows_are_those_of_the_pipeline(
    family: Family, stride: int, strategy: str, built: Build
) -> None:
    model = built(NAME, family)
    options = {"aggregation_strategy": strategy, "stride": stride}
    text = LONG[:1200]
    found = model.task(NAME)(text, **options)
    assert_alike(found, model.pipeline(NAME)(text, **options))
    assert max(entity["end"] for entity in found) > len(text) - 100


@pytest.mark.parametrize("strategy", STRATEGIES[1:])
@pytest.mark.parametrize("stride", [0, 5, 40])
@pytest.mark.parametrize("family", [BERT, ROBERTA], ids=lambda family: family.name)
def test_with_truncation_on_the_left_windows_begin_at_the_end(
    family: Family, stride: int, strategy: str, built: Build, tmp_path: Path
) -> None:
    model = giving_up_the_left(built(NAME, family), tmp_path)
    options = {"aggregation_strategy": strategy, "stride": stride}
    assert_alike(model.task(NAME)(LONG[:900], **options), model.pipeline(NAME)(LONG[:900], **options))


def test_entities_of_a_long_text_do_not_overlap(built: Build) -> None:
    found = built(NAME, BERT).task(NAME)(LONG, aggregation_strategy="first", stride=12, ignore_labels=[])
    ends = [entity["end"] for entity in found]
    assert all(end <= entity["start"] for end, entity in zip(ends, found[1:], strict=False))


@pytest.mark.parametrize("family", [BERT, ROBERTA], ids=lambda family: family.name)
@settings(max_examples=examples(50), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    text=st.one_of(
        st.text(st.characters(codec="utf-8"), min_size=1, max_size=80),
        st.lists(st.sampled_from([*HARD.values(), *MORE]), min_size=1, max_size=4).map(" ".join),
    ),
    strategy=st.sampled_from(STRATEGIES[1:]),
    stride=st.integers(0, 20),
)
def test_offsets_are_ordered_within_the_text_and_scores_are_between_0_and_1(
    family: Family, built: Build, *, text: str, strategy: str, stride: int
) -> None:
    found = built(NAME, family).task(NAME)(text, aggregation_strategy=strategy, stride=stride, ignore_labels=[])
    last = 0
    for entity in found:
        assert last <= entity["start"] <= entity["end"] <= len(text)
        assert 0 <= entity["score"] <= 1
        last = entity["start"]


def test_words_of_a_cased_tokenizer_are_the_text_itself(built: Build) -> None:
    text = "Ada Lovelace wrote a letter from Berkeley."
    found = built(NAME, ROBERTA).task(NAME)(text, ignore_labels=[])
    assert [text[entity["start"] : entity["end"]] for entity in found] == [
        entity["word"].removeprefix("Ġ") for entity in found
    ]


@pytest.mark.parametrize("options", [{}, {"aggregation_strategy": "first", "stride": 5}], ids=str)
def test_a_list_has_the_same_answers_as_its_entries_alone(options: dict[str, Any], built: Build) -> None:
    ask = built(NAME, BERT).task(NAME)
    entries = [MORE[0], LONG[:700], HARD["emoji"], "a"]
    assert ask(entries, **options) == [ask(entry, **options) for entry in entries]
    assert ask(entries[:1], **options) == [ask(entries[0], **options)]
