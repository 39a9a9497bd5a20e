"""Positions and ticks."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock_report.charts import linear_scale, linear_ticks, log_scale, log_ticks, short


@given(
    values=st.lists(st.floats(1e-3, 1e6), min_size=1, max_size=10), start=st.floats(0, 100), length=st.floats(10, 500)
)
def test_values_land_between_the_ends_in_their_order(values: list[float], start: float, length: float) -> None:
    for scale in (
        log_scale(values, start, start + length),
        linear_scale(min(values), max(values), start, start + length),
    ):
        positions = [scale(value) for value in sorted(values)]

        assert positions == sorted(positions)
        assert all(start - 1e-6 <= position <= start + length + 1e-6 for position in positions)


def test_an_axis_that_points_up_puts_large_values_at_small_positions() -> None:
    scale = log_scale([1, 100], 300, 0, margin=0)

    assert [round(scale(value)) for value in (1, 10, 100)] == [300, 150, 0]


def test_values_outside_stay_at_the_edge() -> None:
    scale = linear_scale(0, 10, 0, 100)

    assert (scale(-5), scale(50)) == (0, 100)


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0.9, 60, [1, 2, 5, 10, 20, 50]),
        (0.9, 600, [1, 3, 10, 30, 100, 300]),
        (0.001, 1e5, [0.001, 0.01, 0.1, 1, 10, 100, 1000, 1e4, 1e5]),
        (3, 4, [3]),
    ],
)
def test_logarithmic_ticks_are_round(low: float, high: float, expected: list[float]) -> None:
    assert log_ticks(low, high) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0, 1, [0, 0.2, 0.4, 0.6, 0.8, 1.0]),
        (0, 131, [0, 50, 100]),
        (0, 11, [0, 5, 10]),
        (0, 0.9, [0, 0.2, 0.4, 0.6, 0.8]),
        (0.8, 2.3, [1.0, 1.5, 2.0]),
        (5, 5, [5]),
    ],
)
def test_linear_ticks_are_round(low: float, high: float, expected: list[float]) -> None:
    assert linear_ticks(low, high) == pytest.approx(expected)


@given(low=st.floats(0, 1e4), span=st.floats(1e-2, 1e5))
def test_linear_ticks_are_few_and_inside(low: float, span: float) -> None:
    ticks = linear_ticks(low, low + span)

    assert 1 <= len(ticks) <= 7
    assert all(low - span * 1e-3 <= tick <= low + span * 1.001 for tick in ticks)


@pytest.mark.parametrize(
    ("value", "expected"),
    [(0, "0"), (0.944, "0.944"), (2.083, "2.08"), (12.35, "12.3"), (97.44, "97.4"), (100, "100"), (250.4, "250"),
     (12345.6, "12,346"), (0.05, "0.05"), (1.0, "1")],
)  # fmt: skip
def test_numbers_are_short(value: float, expected: str) -> None:
    assert short(value) == expected


@given(st.floats(1e-4, 1e9))
def test_short_numbers_keep_their_value(value: float) -> None:
    assert math.isclose(float(short(value).replace(",", "")), value, rel_tol=6e-3)
