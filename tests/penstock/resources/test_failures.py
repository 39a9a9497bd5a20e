"""Errors as a job reports them."""

from __future__ import annotations

import errno
import inspect

import pytest

from penstock import errors
from penstock.resources.job_summary import INTERNAL, Failure

OURS = [kind for _, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, errors.PenstockError)]


@pytest.mark.parametrize("kind", OURS)
def test_a_failure_has_the_message_remedy_and_retryability_of_its_error(kind: type[errors.PenstockError]) -> None:
    failure = Failure.of(kind("x is wrong", remedy="Write y"))
    assert (failure.message, failure.remedy, failure.retryable) == ("x is wrong", "Write y", kind.temporary)


def test_errors_of_different_kinds_have_different_reasons() -> None:
    reasons = {kind: Failure.of(kind("x")).reason for kind in OURS}
    # Base classes have the reason of their default kind; all other classes have different reasons.
    assert len(set(reasons.values())) == len(OURS) - 1
    assert reasons[errors.PenstockError] == reasons[errors.OptimizationError] == "OptimizationFailed"
    assert not [reason for reason in reasons.values() if reason.endswith("Error")]


@pytest.mark.parametrize(
    ("error", "reason", "retryable"),
    [
        (MemoryError(), "OutOfMemory", False),
        (OSError(errno.ENOSPC, "No space left on device", "/disk/x"), "OutOfDisk", True),
        (OSError(errno.EDQUOT, "Disk quota exceeded"), "OutOfDisk", True),
        (ZeroDivisionError("division by zero"), INTERNAL, True),
        (KeyError("x"), INTERNAL, True),
        (Exception(), INTERNAL, True),
    ],
)
def test_other_errors_have_a_reason_and_their_message(error: BaseException, reason: str, *, retryable: bool) -> None:
    failure = Failure.of(error)
    assert (failure.reason, failure.retryable) == (reason, retryable)
    assert failure.message
    assert failure.remedy


def test_long_messages_and_remedies_are_cut() -> None:
    failure = Failure.of(errors.CorruptModel("x" * 10_000, remedy="y" * 10_000))
    assert (len(failure.message), len(failure.remedy)) == (2048, 1024)
