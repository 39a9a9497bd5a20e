"""The time budget holds, and each stage has its share of it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock_optimizer.targets.target import MOST_CAPACITY_SECONDS, MOST_PLANS_SECONDS, Budget


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@given(seconds=st.floats(0.1, 1e5), spent=st.floats(0, 1e5))
def test_stages_end_in_order_within_the_budget(seconds: float, spent: float) -> None:
    clock = Clock()
    budget = Budget(seconds, clock)
    clock.now += spent

    ends = [budget.left_for_candidates(), budget.left_for_plans(), budget.left_for_capacity(), budget.left()]
    assert ends == sorted(ends)
    assert budget.left() == pytest.approx(seconds - spent, abs=1e-6)


def test_a_large_budget_reserves_no_more_than_the_last_stages_need() -> None:
    budget = Budget(3600)

    assert budget.capacity_seconds == MOST_CAPACITY_SECONDS
    assert budget.plans_seconds == MOST_PLANS_SECONDS


def test_a_small_budget_still_leaves_half_of_it_to_the_candidates() -> None:
    assert Budget(30).left_for_candidates() >= 15


def test_the_plan_search_may_not_use_the_time_that_candidates_saved() -> None:
    clock = Clock()
    budget = Budget(600, clock)
    goes_on = budget.plans_deadline()

    assert goes_on()
    clock.now += MOST_PLANS_SECONDS + 1
    assert not goes_on()


def test_a_late_plan_search_ends_when_the_capacity_curve_must_begin() -> None:
    clock = Clock()
    budget = Budget(100, clock)
    clock.now += 70
    goes_on = budget.plans_deadline()
    clock.now += budget.left_for_plans() + 0.1

    assert not goes_on()
