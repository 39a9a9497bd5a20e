from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock_runtime.engines.grid import ShapeGrid


@pytest.mark.parametrize(
    ("tokens", "padded"),
    [(1, 8), (8, 8), (9, 16), (44, 48), (128, 128), (129, 144), (256, 256), (257, 288), (500, 512), (513, 576)],
)
def test_lengths_are_rounded_up(tokens: int, padded: int) -> None:
    assert ShapeGrid().length(tokens) == padded


@given(tokens=st.integers(1, 100_000))
def test_a_grid_length_is_at_most_an_eighth_longer_than_the_row(tokens: int) -> None:
    padded = ShapeGrid().length(tokens)

    assert tokens <= padded <= max(tokens * 1.125, tokens + 7)
    assert ShapeGrid().length(padded) == padded


@given(tokens=st.integers(1, 300), longest=st.integers(1, 300))
def test_nothing_is_padded_beyond_the_longest(tokens: int, longest: int) -> None:
    padded = ShapeGrid(longest).length(tokens)

    assert tokens <= padded <= max(tokens, longest)


@given(one=st.integers(1, 5000), other=st.integers(1, 5000))
def test_the_grid_keeps_order(one: int, other: int) -> None:
    grid = ShapeGrid()

    assert (grid.length(one) <= grid.length(other)) or one > other


@pytest.mark.parametrize(("count", "together"), [(1, 1), (2, 2), (3, 2), (4, 4), (7, 4), (8, 8), (33, 32)])
def test_rows_run_in_powers_of_two(count: int, together: int) -> None:
    assert ShapeGrid().rows(count) == together


def test_there_are_few_lengths() -> None:
    assert len(ShapeGrid().lengths(512)) == 32
    assert ShapeGrid(100).lengths(100) == (8, 16, 24, 32, 40, 48, 56, 64, 72, 80, 88, 96, 100)
