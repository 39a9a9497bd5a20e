"""The exception tree: it matches the drawing in the docstring; messages have remedies; which errors are temporary."""

from __future__ import annotations

import inspect
import re
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock import errors
from penstock.errors import (
    DeviceUnavailable,
    Interrupted,
    ModelUnavailable,
    OutOfDisk,
    PenstockError,
    SpecError,
    StoreUnavailable,
    TextsChanged,
    printable,
)

CLASSES = [kind for _, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, PenstockError)]


def test_the_tree_in_the_docstring_is_the_tree_of_the_classes() -> None:
    parents: list[str] = []
    drawn = {}
    for line in (errors.__doc__ or "").splitlines():
        match = re.match(r"    ([│├└─ ]*)(\w+) {2,}\S", line)
        if match is None:
            continue
        depth = len(match[1]) // 4
        parents[depth:] = [match[2]]
        drawn[match[2]] = parents[depth - 1] if depth else "Exception"
    assert drawn == {kind.__name__: kind.__bases__[0].__name__ for kind in CLASSES}


@pytest.mark.parametrize("kind", CLASSES)
def test_each_error_reads_as_message_and_remedy(kind: type[PenstockError]) -> None:
    assert str(kind("x is wrong", remedy="Write y")) == "x is wrong. Write y"
    assert str(kind("x is wrong")) == "x is wrong"
    assert kind.__doc__


def test_temporary_errors_are_those_that_a_retry_can_fix() -> None:
    assert {kind for kind in CLASSES if kind.temporary} == {
        DeviceUnavailable,
        ModelUnavailable,
        StoreUnavailable,
        OutOfDisk,
        Interrupted,
        TextsChanged,
    }
    assert ModelUnavailable("x", retry_after_seconds=3).retry_after_seconds == 3


def test_an_error_with_one_problem_lists_itself() -> None:
    error = SpecError("a", field="spec.a")
    assert error.problems == (error,)


@given(st.text())
def test_no_error_has_control_characters_or_line_breaks(text: str) -> None:
    for error in (PenstockError(text, remedy=text), SpecError(text, field="spec.model", remedy=text)):
        shown = str(error)
        assert len(shown.splitlines()) <= 1
        assert not any(unicodedata.category(character) in {"Cc", "Cs", "Zl", "Zp"} for character in shown)


def test_ordinary_texts_stay_as_they_are() -> None:
    text = 'the model "é 漢字 👩\u200d💻" of /srv/models costs 3 €'
    assert printable(text) == str(PenstockError(text)) == text
    assert printable("a\nb\x1b[31m\u2028") == r"a\nb\x1b[31m\u2028"


def test_an_error_of_several_problems_has_a_line_for_each() -> None:
    problems = [SpecError("a\nb", field="spec.a"), SpecError("c", field="spec.c")]
    error = SpecError(f"x.yaml has 2 problems:\n  {problems[0]}\n  {problems[1]}", problems=problems)
    assert str(error).split("\n") == ["x.yaml has 2 problems:", r"  a\nb", "  c"]


@pytest.mark.parametrize(
    ("message", "shown"),
    [
        ("the port is in use", "the port is in use. Choose another"),
        ("the answer was: refused.", "the answer was: refused. Choose another"),
        ("did you specify the right port?", "did you specify the right port? Choose another"),
    ],
)
def test_a_message_that_ends_as_a_sentence_gets_no_second_stop(message: str, shown: str) -> None:
    assert str(PenstockError(message, remedy="Choose another")) == shown
