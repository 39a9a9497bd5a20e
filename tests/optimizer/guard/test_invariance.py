"""How far rows may be batched: on forwards that depend on their company in known ways."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.recipe import Batching
from penstock_optimizer.guard import measure_invariance
from penstock_optimizer.guard.invariance import (
    GROUPS,
    NEAR_TOKENS,
    ROWS_PER_GROUP,
    SPREAD,
    equal_length_groups,
    padded_groups,
    relative_difference,
)
from penstock_runtime.rows import Outputs, Row


def rows(lengths: Sequence[int]) -> list[Row]:
    return [Row([index % 90 + 1, *range(1, length)]) for index, length in enumerate(lengths)]


LENGTHS = [3, 3, 3, 5, 5, 6, 8, 8, 8, 9, 12, 12, 15, 40, 40, 41, 44]


def alone(some: Sequence[Row]) -> list[Outputs]:
    """Every row by itself."""
    return [{"y": np.array([row.ids], np.float32)} for row in some]


def scaled_by_the_batch(some: Sequence[Row]) -> list[Outputs]:
    """As dynamic int8: a grid over the whole batch."""
    step = np.float32(max(max(row.ids) for row in some) / 15)
    return [{"y": np.round(np.array([row.ids], np.float32) / step) * step} for row in some]


def leaking_padding(some: Sequence[Row]) -> list[Outputs]:
    """A mask that was forgotten: the width of the batch is in the outputs."""
    width = max(row.length for row in some)
    return [{"y": np.array([row.ids], np.float32) + 0.5 * (width - row.length)} for row in some]


def broken_in_company(some: Sequence[Row]) -> list[Outputs]:
    return [{"y": np.full((1, row.length), np.nan if len(some) > 1 else 1, np.float32)} for row in some]


@pytest.mark.parametrize(
    ("forward", "widest"),
    [
        (alone, Batching.PADDED),
        (leaking_padding, Batching.EQUAL_LENGTH),
        (scaled_by_the_batch, Batching.SINGLE),
        (broken_in_company, Batching.SINGLE),
    ],
)
def test_the_widest_batching_is_the_one_that_changes_nothing(forward: object, widest: Batching) -> None:
    found = measure_invariance(forward, rows(LENGTHS))  # type: ignore[arg-type]  # parametrised

    assert found.batching is widest


def test_the_evidence_is_kept() -> None:
    found = measure_invariance(leaking_padding, rows(LENGTHS))

    assert [(one.name, one.passed) for one in found.metrics] == [
        ("batch_invariance_equal-length", True),
        ("batch_invariance_padded", False),
    ]


def test_what_the_rows_cannot_show_is_not_taken_as_proved() -> None:
    assert measure_invariance(alone, rows([3, 9, 27])).batching is Batching.SINGLE
    assert measure_invariance(alone, rows([7, 7, 7, 7])).batching is Batching.EQUAL_LENGTH
    assert measure_invariance(alone, []).batching is Batching.SINGLE


def test_rounding_in_the_last_bits_is_allowed_and_a_step_of_a_grid_is_not() -> None:
    def slightly(some: Sequence[Row], size: float) -> list[Outputs]:
        return [{"y": np.array([row.ids], np.float32) * (1 + size * (len(some) > 1))} for row in some]

    assert measure_invariance(lambda some: slightly(some, 1e-5), rows(LENGTHS)).batching is Batching.PADDED
    assert measure_invariance(lambda some: slightly(some, 0.05), rows(LENGTHS)).batching is Batching.SINGLE


lengths = st.lists(st.integers(1, 60), max_size=80)


@given(lengths)
def test_equal_length_groups_hold_rows_of_one_length(some: list[int]) -> None:
    groups = equal_length_groups(rows(some))

    assert all(len({row.length for row in group}) == 1 for group in groups)
    assert all(2 <= len(group) <= ROWS_PER_GROUP for group in groups)
    assert len(groups) <= GROUPS


@given(lengths)
def test_padded_groups_hold_rows_of_near_but_different_lengths(some: list[int]) -> None:
    for group in padded_groups(rows(some)):
        shortest, longest = group[0].length, group[-1].length
        assert shortest < longest <= max(shortest * (1 + SPREAD), shortest + NEAR_TOKENS)
        assert len(group) <= ROWS_PER_GROUP


def test_groups_reach_from_the_shortest_to_the_longest_rows() -> None:
    groups = equal_length_groups(rows([length for length in range(1, 101) for _ in range(2)]))

    assert len(groups) == GROUPS
    assert (groups[0][0].length, groups[-1][0].length) == (1, 100)


@pytest.mark.parametrize(
    ("one", "other", "difference"),
    [([3, 4], [3, 4], 0), ([3, 4], [3, 9], 1), ([3, 4], [3, float("nan")], float("inf")), ([3, 4], [3], float("inf"))],
)
def test_differences_are_relative_to_the_row_alone(one: list[float], other: list[float], difference: float) -> None:
    found = relative_difference({"y": np.array(one, np.float32)}, {"y": np.array(other, np.float32)})

    assert found == pytest.approx(difference)


def test_all_outputs_of_a_row_count() -> None:
    before = {"start": np.array([3.0], np.float32), "end": np.array([4.0], np.float32)}
    after = {"start": np.array([3.0], np.float32), "end": np.array([9.0], np.float32)}

    assert relative_difference(before, after) == pytest.approx(1)
