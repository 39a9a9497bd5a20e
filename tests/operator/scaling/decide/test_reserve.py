"""What is kept beyond the demand."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock_operator.scaling.decide.reserve import (
    PROPORTIONAL,
    SMALL_FLEET,
    with_reserve,
    with_rest_of_reserve,
    without_reserve,
)

CAPACITY = 10.0
demands = st.floats(0, 1e4)
headrooms = st.floats(0.05, 1)


@pytest.mark.parametrize(
    ("demand", "headroom", "rate"),
    [
        (0, 0.3, 0),
        (60, 1, 60),
        (60, 0.75, 80),
        (15, 0.75, 20),
        # Half of the capacity of a large fleet is half; of a small one there is more to spare.
        (210, 0.5, 420),
        (20, 0.5, 70),
        (20, 0.65, (20 / 0.75 + 2 * 70) / 3),
        (60, 0.65, 60 / 0.65),
        # Nobody is prepared for a jump to more than five times as much.
        (2, 0.5, 5 * 2),
    ],
)
def test_a_share_of_the_demand_and_below_the_usual_headroom_more_for_small_fleets(
    demand: float, headroom: float, rate: float
) -> None:
    assert with_reserve(demand, headroom, CAPACITY) == pytest.approx(rate)


@given(demands, headrooms)
def test_never_less_than_the_headroom_says(demand: float, headroom: float) -> None:
    asked = with_reserve(demand, headroom, CAPACITY)

    assert asked >= demand / headroom * (1 - 1e-9)
    if demand >= SMALL_FLEET * CAPACITY or headroom >= PROPORTIONAL:
        assert asked == pytest.approx(demand / headroom)


@given(demands, demands, headrooms, headrooms)
def test_more_demand_and_less_headroom_ask_for_more(one: float, two: float, low: float, high: float) -> None:
    least, most = sorted((one, two))
    tight, loose = sorted((low, high), reverse=True)

    assert with_reserve(least, low, CAPACITY) <= with_reserve(most, low, CAPACITY)
    assert with_reserve(one, tight, CAPACITY) <= with_reserve(one, loose, CAPACITY) * (1 + 1e-9)


@given(demands, demands, headrooms)
def test_noise_takes_a_part_of_the_reserve_and_never_the_capacity_itself(
    one: float, two: float, headroom: float
) -> None:
    least, most = sorted((one, two))

    assert least <= with_rest_of_reserve(least, headroom, CAPACITY) <= with_reserve(least, headroom, CAPACITY)
    assert with_rest_of_reserve(least, headroom, CAPACITY) <= with_rest_of_reserve(most, headroom, CAPACITY)


@given(demands, headrooms)
def test_the_inverse_is_the_most_that_the_rate_is_enough_for(demand: float, headroom: float) -> None:
    rate = with_reserve(demand, headroom, CAPACITY)

    found = without_reserve(rate, headroom, CAPACITY)

    assert found >= demand * (1 - 1e-6) - 1e-6
    assert with_reserve(found, headroom, CAPACITY) == pytest.approx(rate, rel=1e-6, abs=1e-5)
