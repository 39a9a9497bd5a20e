"""Short requests that ask for gigabytes: refused before they cost anything, by an estimate of the answer's size."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from penstock.tasks import TaskName
from penstock_runtime.errors import InvalidInput
from penstock_runtime.tasks import RequestLimits
from tests.runtime.tasks.conftest import Build
from tests.runtime.tasks.families import BERT
from tests.runtime.tasks.texts import LONG, MORE

FEATURES = TaskName.FEATURE_EXTRACTION
CLASSES = TaskName.TEXT_CLASSIFICATION
TOKENS = TaskName.TOKEN_CLASSIFICATION
ANSWERS = TaskName.QUESTION_ANSWERING
MASKS = TaskName.FILL_MASK
pytestmark = [pytest.mark.parity, pytest.mark.usefixtures("judge")]


@pytest.mark.parametrize(
    ("name", "inputs", "parameters", "field"),
    [
        (FEATURES, [LONG] * 8, {"pooling": "none"}, "inputs"),
        (FEATURES, [LONG] * 8, {"pooling": "mean"}, "inputs"),
        (FEATURES, [LONG] * 8, {"pooling": "mean", "dimensions": 7}, "inputs"),
        (CLASSES, list(MORE) * 3, {}, "inputs"),
        (CLASSES, list(MORE) * 3, {"top_k": 2}, "inputs"),
        (ANSWERS, {"question": "Who?", "context": LONG}, {"top_k": 20, "max_answer_len": 500}, "parameters.top_k"),
        (MASKS, "a [MASK] day", {"top_k": 10_000}, "parameters.top_k"),
        (MASKS, ["a [MASK] day for a [MASK]"] * 3, {"top_k": 300}, "parameters.top_k"),
        (MASKS, "a [MASK] day", {"top_k": 300, "targets": ["the", "is"]}, "parameters.top_k"),
    ],
)
def test_an_answer_over_the_size_limit_is_refused_before_it_is_computed(
    name: TaskName, inputs: Any, parameters: dict[str, Any], field: str, built: Build
) -> None:
    model = built(name, BERT)
    answer = model.task(name)(inputs, **parameters)
    size_bytes = len(orjson.dumps(answer, option=orjson.OPT_SERIALIZE_NUMPY))

    # The longest spans that a context could give are mostly not those that it gives.
    model.task(name, limits=RequestLimits(answer_bytes=(6 if name is ANSWERS else 2) * size_bytes))(
        inputs, **parameters
    )
    task = model.task(name, limits=RequestLimits(answer_bytes=size_bytes // 2)).task
    with pytest.raises(InvalidInput, match="asks for an answer of some") as refused:
        task.prepare(task.parse(inputs, parameters))

    assert refused.value.field == field
    assert "ewer" in refused.value.remedy


@pytest.mark.parametrize(
    ("name", "inputs", "parameters"),
    [
        (CLASSES, list(MORE), {}),
        (TOKENS, list(MORE), {"ignore_labels": []}),
        (ANSWERS, {"question": "Who?", "context": LONG}, {"top_k": 20, "max_answer_len": 500}),
        (MASKS, "a [MASK] day for a [MASK]", {"top_k": 300}),
    ],
)
def test_the_size_of_an_answer_of_many_objects_is_estimated_in_advance(
    name: TaskName, inputs: Any, parameters: dict[str, Any], built: Build
) -> None:
    model = built(name, BERT).task(name)
    prepared = model.task.prepare(model.task.parse(inputs, parameters))
    size_bytes = len(orjson.dumps(model(inputs, **parameters)))

    assert size_bytes / 2 < prepared.answer_bytes < (6 if name is ANSWERS else 2) * size_bytes


@pytest.mark.parametrize(
    ("limit", "size", "message"),
    [
        (5_000, 6_144, "of some 6144 bytes; the limit is 5000 bytes"),
        (20_000, 1_500_000, "of some 1,500 kB; the limit is 20 kB"),
        (67_108_864, 1_234_567_890, "of some 1,235 MB; the limit is 67 MB"),
    ],
)
def test_a_refusal_has_units_that_fit(limit: int, size: int, message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        RequestLimits(answer_bytes=limit).check_answer(size, "inputs", "Ask for less")


def test_thousands_of_words_for_each_of_a_thousand_masks_are_refused_by_default(built: Build) -> None:
    model = built(MASKS, BERT)

    with pytest.raises(InvalidInput, match="the limit is 67 MB") as refused:
        model.task(MASKS)([" ".join(["[MASK]"] * 40)] * 100, top_k=600)

    assert refused.value.field == "parameters.top_k"
