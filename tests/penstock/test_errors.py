"""The exception tree: it matches the drawing in the docstring; messages have remedies; which errors are temporary."""

from __future__ import annotations

import inspect
import re

import pytest

from penstock import errors
from penstock.errors import Interrupted, ModelUnavailable, OutOfDisk, PenstockError, SpecError, StoreUnavailable

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
    assert {kind for kind in CLASSES if kind.temporary} == {ModelUnavailable, StoreUnavailable, OutOfDisk, Interrupted}
    assert ModelUnavailable("x", retry_after_seconds=3).retry_after_seconds == 3


def test_an_error_with_one_problem_lists_itself() -> None:
    error = SpecError("a", field="spec.a")
    assert error.problems == (error,)
