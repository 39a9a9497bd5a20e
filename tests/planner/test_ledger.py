"""The ledger of predictions and what was measured."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import SettingError
from penstock_planner.ledger import LedgerEntry, append_entry, error_text, parse_ledger, read_ledger
from tests.examples import examples


def entry(predicted: float, measured: float) -> LedgerEntry:
    return LedgerEntry(
        at="2026-11-27T00:00:00Z", model="hf://a/b", hardware_class="icelake", cores=1, plan="p", origin="estimated",
        url="http://x", requests_per_second=10, predicted_p95_milliseconds=predicted,
        measured_p95_milliseconds=measured, completed_per_second=10,
    )  # fmt: skip


def test_entries_are_kept_in_order_and_read_again(tmp_path: Path) -> None:
    path = tmp_path / "share" / "plans.jsonl"
    assert read_ledger(path) == ()

    append_entry(path, entry(10, 12))
    append_entry(path, entry(20, 15))

    assert [one.error for one in read_ledger(path)] == [pytest.approx(0.2), pytest.approx(-0.25)]


def test_the_past_error_is_a_sentence() -> None:
    assert error_text([]) == ""
    assert error_text([entry(10, 12)]).startswith("1 prediction measured so far: the p95 differed by 20% in the median")
    assert error_text([entry(10, 12), entry(20, 15), entry(10, 10)]) == (
        "3 predictions measured so far: the p95 differed by 20% in the median and 25% at most "
        "(measured over predicted: 0.75 to 1.20)"
    )


def test_a_line_that_was_cut_off_is_left_out() -> None:
    whole = entry(10, 12).model_dump_json()

    assert parse_ledger([whole, whole[:40], "", "[]", whole]) == (entry(10, 12), entry(10, 12))


@settings(max_examples=examples(100))
@given(st.lists(st.text(max_size=60), max_size=5))
def test_any_lines_are_read_without_an_error(lines: list[str]) -> None:
    assert parse_ledger(lines) == ()


def test_a_folder_is_no_ledger(tmp_path: Path) -> None:
    with pytest.raises(SettingError):
        append_entry(tmp_path, entry(1, 1))
    with pytest.raises(SettingError):
        read_ledger(tmp_path)
