"""The verdict of the guard on logits."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.manifest import Verdict
from penstock_optimizer.guard.agreement_of_logits import GenerationBudget, compare, judge_texts
from penstock_runtime.rows import Float

RANDOM = np.random.default_rng(0)


def logits(positions: int = 40, vocabulary: int = 50) -> Float:
    return (RANDOM.standard_normal((positions, vocabulary)) * 3).astype(np.float32)


def verdict(expected: Float, actual: Float, company: float = 1.0, budget: GenerationBudget | None = None) -> Verdict:
    tokens = expected.argmax(1).astype(np.int32)
    return judge_texts([compare(expected, actual, tokens)], company, budget or GenerationBudget())


def value(found: Verdict, name: str) -> float:
    return next(metric.value for metric in found.metrics if metric.name == name)


def test_equal_logits_pass_with_perfect_figures() -> None:
    expected = logits()
    found = verdict(expected, expected)
    assert found.passed
    assert (value(found, "mean_divergence"), value(found, "same_best_token")) == (0.0, 1.0)
    assert value(found, "perplexity_ratio") == pytest.approx(1.0)


def test_a_constant_added_to_all_logits_changes_nothing() -> None:
    expected = logits()
    assert value(verdict(expected, expected + np.float32(7)), "mean_divergence") < 1e-9


def test_the_divergence_is_that_of_the_definition() -> None:
    expected = np.log(np.array([[0.5, 0.25, 0.25]], np.float32))
    actual = np.log(np.array([[0.25, 0.5, 0.25]], np.float32))
    found = compare(expected, actual, np.array([0], np.int32))
    assert found.divergence[0] == pytest.approx(0.5 * np.log(2) - 0.25 * np.log(2))
    assert (found.surprise[0], found.reference_surprise[0]) == pytest.approx((np.log(4), np.log(2)))


@pytest.mark.parametrize(("noise", "named"), [(3.0, "mean_divergence"), (0.35, "same_best_token")])
def test_noise_is_rejected_with_the_name_of_the_first_metric_over_its_budget(noise: float, named: str) -> None:
    expected = logits(400)
    actual = expected + RANDOM.standard_normal(expected.shape).astype(np.float32) * np.float32(noise)
    budget = GenerationBudget() if noise > 1 else GenerationBudget(1.0, 10.0, 0.999, 10.0)
    found = verdict(expected, actual, budget=budget)
    assert not found.passed
    assert found.reason.startswith(named)


def test_a_few_broken_positions_are_found_by_the_percentile() -> None:
    expected = logits(400)
    actual = expected.copy()
    actual[:8] = -expected[:8]
    found = verdict(expected, actual, budget=GenerationBudget(mean_divergence=10, same_best=0.5, perplexity=100))
    assert not found.passed
    assert found.reason.startswith("p99_divergence")


def test_answers_that_depend_on_company_are_reported_and_not_rejected() -> None:
    expected = logits()
    found = verdict(expected, expected, company=0.6)
    assert found.passed
    assert value(found, "same_in_company") == 0.6


@given(st.integers(0, 2**32 - 1), st.floats(0, 50))
def test_divergences_are_finite_and_not_negative(seed: int, scale: float) -> None:
    random = np.random.default_rng(seed)
    pair = (random.standard_normal((2, 5, 9)) * scale).astype(np.float32)
    found = compare(pair[0], pair[1], np.zeros(5, np.int32))
    assert np.isfinite(found.divergence).all()
    assert (found.divergence >= 0).all()
