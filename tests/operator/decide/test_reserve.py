"""The reserve beyond the demand."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock_operator.decide.demand import (
    PROPORTIONAL,
    SMALL_FLEET,
    demand_for_rate,
    with_part_of_reserve,
    with_reserve,
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
        # The reserve is for a jump to at most five times the demand.
        (2, 0.5, 5 * 2),
    ],
)
def test_the_reserve_is_a_share_of_the_demand_and_larger_for_small_fleets_with_a_low_headroom(
    demand: float, headroom: float, rate: float
) -> None:
    assert with_reserve(demand, headroom, CAPACITY) == pytest.approx(rate)


@given(demands, headrooms)
def test_the_rate_is_at_least_the_demand_over_the_headroom(demand: float, headroom: float) -> None:
    asked = with_reserve(demand, headroom, CAPACITY)

    assert asked >= demand / headroom * (1 - 1e-9)
    if demand >= SMALL_FLEET * CAPACITY or headroom >= PROPORTIONAL:
        assert asked == pytest.approx(demand / headroom)


@given(demands, demands, headrooms, headrooms)
def test_more_demand_or_a_lower_headroom_never_lowers_the_rate(one: float, two: float, low: float, high: float) -> None:
    least, most = sorted((one, two))
    tight, loose = sorted((low, high), reverse=True)

    assert with_reserve(least, low, CAPACITY) <= with_reserve(most, low, CAPACITY)
    assert with_reserve(one, tight, CAPACITY) <= with_reserve(one, loose, CAPACITY) * (1 + 1e-9)


@given(demands, demands, headrooms)
def test_a_part_of_the_reserve_is_between_the_demand_and_the_whole_reserve(
    one: float, two: float, headroom: float
) -> None:
    least, most = sorted((one, two))

    assert least <= with_part_of_reserve(least, headroom, CAPACITY) <= with_reserve(least, headroom, CAPACITY)
    assert with_part_of_reserve(least, headroom, CAPACITY) <= with_part_of_reserve(most, headroom, CAPACITY)


@given(demands, headrooms)
def test_demand_for_rate_is_the_largest_demand_that_the_rate_suffices_for(demand: float, headroom: float) -> None:
    rate = with_reserve(demand, headroom, CAPACITY)

    found = demand_for_rate(rate, headroom, CAPACITY)

    assert found >= demand * (1 - 1e-6) - 1e-6
    assert with_reserve(found, headroom, CAPACITY) == pytest.approx(rate, rel=1e-6, abs=1e-5)
