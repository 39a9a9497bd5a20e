"""text-classification of long texts in windows: nothing is left out, and the scores are those of the windows."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.tasks import TaskName
from penstock_runtime.errors import InvalidInput
from penstock_runtime.models.folder import ModelFolder
from penstock_runtime.rows import Float, Row
from penstock_runtime.tasks.classification.text_classification import TextClassification
from penstock_runtime.tasks.factory import make_task
from penstock_runtime.tasks.scores import sigmoid, softmax
from tests.examples import examples
from tests.runtime.http.serving import LABELS, WORDS, write_folder

NAMES = LABELS[TaskName.TEXT_CLASSIFICATION]
ROOM = 62
WORD = st.sampled_from(sorted(set(WORDS.split()) - set(",.?!")))


@pytest.fixture(scope="module", params=["single_label_classification", "multi_label_classification"])
def task(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> TextClassification:
    folder = write_folder(tmp_path_factory.mktemp("model"), TaskName.TEXT_CLASSIFICATION)
    config = json.loads((folder / "config.json").read_bytes())
    (folder / "config.json").write_text(json.dumps(config | {"problem_type": request.param}))
    made = make_task(TaskName.TEXT_CLASSIFICATION, ModelFolder.open(folder, weights=False))
    assert isinstance(made, TextClassification)
    return made


def logits(row: Row) -> Float:
    """Of a model that is made of arithmetic."""
    ids = np.asarray(row.ids, np.float32)[:, None]
    found: Float = np.sin(ids * np.arange(1, len(NAMES) + 1, dtype=np.float32)).sum(axis=0)
    return found


def answer(task: TextClassification, texts: list[str], **parameters: Any) -> tuple[list[dict[str, float]], Any]:
    """Scores by label for each text, and what was prepared."""
    prepared = task.prepare(task.parse(texts, parameters))
    reduced = [task.reduce(row, {"logits": logits(row)}) for row in prepared.rows]
    found = [{one["label"]: one["score"] for one in scores} for scores in task.assemble(prepared, reduced)]
    return found, prepared


@settings(max_examples=examples(60))
@given(st.lists(st.lists(WORD, min_size=1, max_size=300), min_size=1, max_size=3), st.integers(0, ROOM - 1))
def test_the_scores_are_the_highest_of_all_windows(
    task: TextClassification, drawn: list[list[str]], stride: int
) -> None:
    found, prepared = answer(task, [" ".join(one) for one in drawn], stride=stride)

    assert prepared.truncated == 0
    assert set(prepared.cut_at) == {None}
    function = softmax if task._function == "softmax" else sigmoid
    for words, scores in zip(drawn, found, strict=True):
        ids = [task.tokenizer.id_of(one) for one in words]
        starts = [0]
        while starts[-1] + ROOM < len(ids):
            starts.append(starts[-1] + ROOM - stride)
        alone = [function(logits(Row([2, *ids[at : at + ROOM], 3]))) for at in starts]  # type: ignore[list-item]
        expected = np.max(alone, axis=0)
        assert [scores[name] for name in NAMES] == pytest.approx(expected.tolist(), abs=1e-6)


@pytest.mark.parametrize("most", [1, 2, 7])
def test_what_is_not_read_is_stated(task: TextClassification, most: int) -> None:
    text = "happy dog " * 400

    _, prepared = answer(task, [text, "a text"], stride=12, max_windows=most)

    read = ROOM + (most - 1) * (ROOM - 12)
    assert len(prepared.rows) == most + 1
    assert prepared.truncated == 1
    (cut, other) = prepared.cut_at
    assert other is None
    assert len(text[:cut].split()) == read


def test_shares_of_the_worst_window_add_up_to_one(task: TextClassification) -> None:
    text = " ".join(["happy dog"] * 100 + ["urgent problem"] * 20 + ["cheese"] * 100)

    (highest,), _ = answer(task, [text], stride=8)
    (of_one,), _ = answer(task, [text], stride=8, window_labels=["anger"])

    assert of_one["anger"] == highest["anger"]
    if task._function == "softmax":
        assert sum(of_one.values()) == pytest.approx(1, abs=1e-6)
        assert sum(highest.values()) > 1.001
    else:
        assert of_one == highest


@pytest.mark.parametrize(
    ("inputs", "parameters", "message"),
    [
        ("x", {"stride": ROOM}, "windows of this model have 62 tokens"),
        ("x", {"max_windows": 3}, "there is no stride"),
        ([["x", "y"]], {"stride": 3}, "the request has a pair"),
        ("x", {"stride": 3, "window_labels": ["angr"]}, "has no label 'angr'"),
        ("happy " * 66_000, {"stride": 3}, "over the limit of 1024 windows"),
        (["x", "happy " * 70_000], {"stride": 3}, r"inputs\[1\] has 420000 characters; at most 400000"),
    ],
)
def test_windows_that_cannot_be_are_refused(
    task: TextClassification, inputs: Any, parameters: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidInput, match=message):
        task.prepare(task.parse(inputs, parameters))


def test_a_short_text_is_answered_as_without_windows(task: TextClassification) -> None:
    assert answer(task, ["i like you"], stride=16)[0] == answer(task, ["i like you"])[0]
