"""The ledger of predictions and what was measured."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import SettingError
from penstock_planner.evidence import Origin
from penstock_planner.ledger import (
    MOST_WIDENED,
    LedgerEntry,
    append_entry,
    error_text,
    parse_ledger,
    read_ledger,
    remove_entries,
    widened,
)
from tests.examples import examples
from tests.planner.cases import evidence


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


def test_the_past_errors_are_stated_by_class_and_origin_of_one_model() -> None:
    other = entry(10, 50).model_copy(update={"model": "hf://other"})
    measured = entry(10, 9).model_copy(update={"origin": "measured here"})

    assert error_text([], "hf://a/b") == error_text([other], "hf://a/b") == ""
    assert error_text([entry(10, 12), entry(20, 15), measured, other], "hf://a/b") == (
        "past predictions of this model, within the intervals above: "
        "icelake (estimated): 2 measured, p95 off by 22% in the median (measured over predicted: 0.75 to 1.20); "
        "icelake (measured here): 1 measured, p95 off by 10% in the median (measured over predicted: 0.90 to 0.90)"
    )


def test_an_entry_is_removed_by_its_key(tmp_path: Path) -> None:
    path = tmp_path / "plans.jsonl"
    append_entry(path, entry(10, 12))
    append_entry(path, entry(20, 15))
    with path.open("a") as file:
        file.write("of a later release\n")

    assert remove_entries(path, [entry(10, 12).key]) == 1

    assert read_ledger(path) == (entry(20, 15),)
    assert path.read_text().endswith("of a later release\n")
    with pytest.raises(SettingError):
        remove_entries(tmp_path, ["x"])


positive = st.floats(0.01, 1e5)


@settings(max_examples=examples(200))
@given(st.lists(st.tuples(positive, positive), max_size=5), st.floats(0, 0.9))
def test_errors_widen_the_intervals_of_the_same_class_model_and_origin_only(
    pairs: list[tuple[float, float]], error: float
) -> None:
    known = evidence("icelake", origin=Origin.ESTIMATED, error=error)
    entries = [entry(*pair) for pair in pairs]

    found = widened(known, entries, "hf://a/b").interval

    assert found.low <= known.interval.low
    assert found.high >= known.interval.high
    for one in entries:
        speed = one.predicted_p95_milliseconds / one.measured_p95_milliseconds
        assert found.low <= max(speed, 1 / MOST_WIDENED) * 1.0001
        assert found.high >= min(speed, MOST_WIDENED) / 1.0001
    # More entries never narrow it.
    fewer = widened(known, entries[:-1], "hf://a/b").interval
    assert found.low <= fewer.low
    assert found.high >= fewer.high
    for unrelated in (evidence("zen4", origin=Origin.ESTIMATED), evidence("icelake", origin=Origin.GIVEN)):
        assert widened(unrelated, entries, "hf://a/b") is unrelated
    assert widened(known, entries, "hf://other") is known


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
