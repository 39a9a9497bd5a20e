"""Confidence intervals of a share and of a mean."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock_optimizer.guard.agreement import bootstrap_lower, wilson_lower


@pytest.mark.parametrize(
    ("successes", "trials", "lower"),
    [(0, 0, 0.0), (0, 10, 0.0), (10, 10, 0.7225), (95, 100, 0.8882), (240, 240, 0.9842), (81, 263, 0.2553)],
)
def test_the_lower_bound_is_that_of_wilsons_interval(successes: int, trials: int, lower: float) -> None:
    assert wilson_lower(successes, trials) == pytest.approx(lower, abs=1e-4)


@given(st.integers(1, 500), st.data())
def test_the_interval_is_below_the_share_and_narrows_with_more_texts(trials: int, data: st.DataObject) -> None:
    successes = data.draw(st.integers(0, trials))

    lower = wilson_lower(successes, trials)

    assert 0 <= lower <= successes / trials
    assert lower <= wilson_lower(successes * 10, trials * 10) + 1e-12


def test_equal_values_have_an_interval_of_no_width() -> None:
    assert bootstrap_lower([0.9] * 20) == pytest.approx(0.9)


def test_without_values_the_lower_end_is_zero() -> None:
    assert bootstrap_lower([]) == 0.0


@given(st.lists(st.floats(0, 1), min_size=1, max_size=40))
def test_the_bootstrap_stays_within_the_values_and_below_their_mean(values: list[float]) -> None:
    lower = bootstrap_lower(values)

    assert min(values) - 1e-9 <= lower <= sum(values) / len(values) + 1e-9
    assert lower == bootstrap_lower(values), "seeded: the same answers give the same verdict"


def test_the_bootstrap_uses_the_weights() -> None:
    assert bootstrap_lower([1.0, 0.0] * 30, [99.0, 1.0] * 30) > 0.95
