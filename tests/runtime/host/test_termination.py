"""The termination message of a process: it fits, can be parsed, and is written nowhere else."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import ArtefactError, Interrupted, ModelAccessDenied, OutOfDisk, StoreUnavailable, printable
from penstock_runtime.host.termination import LIMIT_BYTES, exit_code, failure_message, write_termination_message


@given(st.text(max_size=5000), st.text(max_size=5000))
def test_a_failure_of_any_length_fits(message: str, remedy: str) -> None:
    text = failure_message(ArtefactError(message, remedy=remedy))
    written = json.loads(text)

    assert len(text.encode()) <= LIMIT_BYTES
    assert written["reason"] == "ArtefactDamaged"
    assert written["message"][:100] == printable(message)[:100]
    assert written["remedy"][:50] == printable(remedy)[:50]


@pytest.mark.parametrize("character", ["\x00", "\U0001f40c", '"'])
def test_the_longest_of_the_widest_characters_fits(character: str) -> None:
    text = failure_message(ArtefactError(character * 5000, remedy=character * 5000))

    assert len(text.encode()) <= LIMIT_BYTES
    json.loads(text)


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ModelAccessDenied("x"), 1),
        (ArtefactError("x"), 1),
        (StoreUnavailable("x"), 75),
        (Interrupted("x"), 75),
        (OutOfDisk("x"), 75),
        (RuntimeError("a defect"), 75),
    ],
)
def test_the_exit_code_states_whether_to_try_again(error: Exception, code: int) -> None:
    assert exit_code(error) == code


def test_a_message_replaces_the_earlier_one(tmp_path: Path) -> None:
    log = tmp_path / "termination-log"
    log.write_text("x" * 9000)
    write_termination_message(log, "done")

    assert log.read_text() == "done"


def test_outside_of_a_pod_no_file_is_written(tmp_path: Path) -> None:
    write_termination_message(tmp_path / "termination-log", "done")

    assert list(tmp_path.iterdir()) == []
