"""The outcomes of the reference are read from disk as they were written."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock_optimizer.candidate.work_folder import load_observed, save_observed
from penstock_optimizer.guard.judge import ObservedAnswer


def same(one: Any, other: Any) -> bool:
    match one:
        case np.ndarray():
            return isinstance(other, np.ndarray) and one.dtype == other.dtype and np.array_equal(one, other)
        case list() | tuple():
            return len(one) == len(other) and all(same(a, b) for a, b in zip(one, other, strict=True))
        case dict():
            return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
        case _:
            return bool(one == other)


@pytest.mark.parametrize(
    "answer",
    [
        [np.arange(4, dtype=np.float32), np.ones((2, 3), dtype=np.float32)],
        [[{"label": "joy", "score": np.float32(0.25)}, {"label": "", "score": 1e-30}]],
        {"score": 0.5, "start": np.int64(3), "end": 7, "answer": "Paris \u2019 \U0001f600"},
        [0.1, True, None, 2**40, float("inf")],
        [],
    ],
)
def test_answers_of_every_form_are_stored_and_loaded(tmp_path: Path, answer: Any) -> None:
    path = tmp_path / "teacher.zip"
    save_observed([ObservedAnswer(answer), ObservedAnswer([1.0])], path)
    first, second = load_observed(path)

    assert same(answer, first.answer)
    assert second.answer == [1.0]


def test_embeddings_are_stored_and_outputs_that_the_guard_does_not_compare_are_not(tmp_path: Path) -> None:
    class WindowAnswers:
        pass

    vector = np.linspace(0, 1, 8, dtype=np.float32)
    path = tmp_path / "teacher.zip"
    save_observed([ObservedAnswer([vector], (vector,)), ObservedAnswer(0.5, (WindowAnswers(),))], path)
    embedded, other = load_observed(path)

    assert same([vector], list(embedded.reduced))
    assert other.reduced == ()


def test_an_answer_that_cannot_be_written_is_an_error_and_leaves_no_file(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="object is not part of an answer"):
        save_observed([ObservedAnswer(object())], tmp_path / "teacher.zip")

    assert not (tmp_path / "teacher.zip").exists()


def test_the_file_holds_no_pickles(tmp_path: Path) -> None:
    path = tmp_path / "teacher.zip"
    save_observed([ObservedAnswer([np.zeros(2, dtype=np.float32)])], path)
    with zipfile.ZipFile(path) as archive:
        assert archive.namelist() == ["observed.json", "0.npy"]
