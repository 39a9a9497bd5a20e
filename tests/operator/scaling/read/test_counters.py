"""Rates from scraped counters."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock_operator.decide import Idle, Unknown, Value
from penstock_operator.scaling.read.history import Sample, coverage, growth, increase, latest, rate, within


def samples(*pairs: tuple[float, float]) -> list[Sample]:
    return [Sample(at, value) for at, value in pairs]


def test_a_rate_is_the_increase_over_the_time_between_the_samples_themselves() -> None:
    series = {"a": samples((0, 100), (4, 140), (10, 200)), "b": samples((0, 0), (10, 50))}

    assert rate(series, 30, 12) == Value(15, age_seconds=2)


def test_a_counter_that_fell_was_reset_to_zero() -> None:
    assert increase(samples((0, 100), (5, 110), (10, 20), (15, 25))) == 10 + 20 + 5
    assert rate({"a": samples((0, 1000), (10, 30))}, 30, 10) == Value(3)


@given(st.lists(st.floats(0, 1e6), max_size=20))
def test_an_increase_is_never_negative(values: list[float]) -> None:
    assert increase([Sample(at, value) for at, value in enumerate(values)]) >= 0


def test_one_sample_makes_no_rate() -> None:
    assert rate({"a": samples((10, 5))}, 30, 12) == Unknown("no pod was scraped twice within 30 s")
    assert rate({}, 30, 12) == Unknown("no pod was scraped twice within 30 s")


def test_unchanged_counters_are_idle() -> None:
    assert rate({"a": samples((0, 7), (10, 7))}, 30, 10) == Idle()


def test_old_future_repeated_and_broken_samples_are_left_out() -> None:
    readings = samples((1, 1), (50, 2), (50, 3), (55, math.nan), (58, 4), (99, 5))

    assert within(readings, 20, 60) == samples((50, 2), (58, 4))


def test_a_new_pod_does_not_lower_the_rate_of_the_others() -> None:
    assert rate({"old": samples((0, 0), (10, 100)), "young": samples((9, 40))}, 30, 10) == Value(10)


def test_a_gauge_counts_its_newest_fresh_value() -> None:
    series = {"a": samples((0, 9), (8, 3)), "b": samples((9, 4)), "gone": samples((-50, 99))}

    assert latest(series, 10, 10) == Value(7, age_seconds=2)
    assert latest(series, 10, 100) == Unknown("no pod was scraped within 10 s")


def test_growth_is_the_change_of_the_sum_in_a_second() -> None:
    series = {"a": samples((0, 2), (10, 32)), "young": samples((10, 20))}

    assert growth(series, 30, 10) == pytest.approx(5)
    assert growth({}, 30, 10) == 0
    assert growth({"a": samples((1, 5))}, 30, 10) == 0


def test_coverage_is_the_share_of_ready_pods_with_a_fresh_sample() -> None:
    series = {"a": samples((9, 1)), "b": samples((-60, 1))}

    assert coverage(series, ["a", "b", "c", "a"], 10, 10) == 0.5
    assert coverage(series, [], 10, 10) == 1
