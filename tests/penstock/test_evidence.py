"""The bounds hold with the stated error, at any number of looks."""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.evidence import BETS, CAPITAL_LIMIT, MeanEvidence, log_evidence, lower_bound, upper_bound
from tests.examples import THOROUGH, examples

OUTCOMES = st.lists(st.floats(0, 1), max_size=60)


def alarms(limit: float, outcomes: Any, alpha: float, *, restarts: bool) -> Any:
    """The number of each stream's outcome at which its evidence reaches 1/alpha, looked at after each; -1: never.
    `outcomes` are [time, streams]."""
    one = MeanEvidence.with_restarts(limit) if restarts else MeanEvidence.without_restarts(limit)
    first = np.full(outcomes.shape[1], -1)
    for time, row in enumerate(outcomes):
        share = one.share_from_reserve()
        one.reserve -= share
        one.capital = [np.minimum(CAPITAL_LIMIT, each) for each in one.grown(share, row)]
        one.count += 1
        first[(first < 0) & (np.asarray(one.value) >= 1 / alpha)] = time + 1
    return first


@pytest.mark.parametrize("restarts", [True, False])
@pytest.mark.parametrize(("limit", "alpha"), [(0.005, 0.01), (0.02, 0.05)])
def test_false_alarms_at_the_limit_with_a_look_at_each_outcome(limit: float, alpha: float, restarts: bool) -> None:
    streams, length = (10_000, 10_000) if THOROUGH else (2_000, 2_000)
    random = np.random.default_rng(7)
    outcomes = (random.random((length, streams), dtype=np.float32) < limit).astype(np.float32)
    share = np.mean(alarms(limit, outcomes, alpha, restarts=restarts) > 0)
    assert share <= alpha


def test_damage_is_found_soon_also_after_a_long_quiet_time() -> None:
    random = np.random.default_rng(8)
    quiet, damaged = (random.random((5_000, 300)) < 0.001), (random.random((3_000, 300)) < 0.021)
    at_start = alarms(0.003, damaged * 1.0, 0.01, restarts=True)
    later = alarms(0.003, np.concatenate([quiet, damaged]) * 1.0, 0.01, restarts=True) - len(quiet)
    never_stopped = alarms(0.003, np.concatenate([quiet, damaged]) * 1.0, 0.01, restarts=False) - len(quiet)
    assert np.median(at_start) <= 500
    assert np.median(later) <= 600
    assert np.median(later) < np.median(never_stopped) / 2


@pytest.mark.parametrize("loss", ["rare", "common"])
@pytest.mark.parametrize("count", [50, 300, 1_000])
def test_the_bound_is_above_the_mean_in_at_most_alpha_of_all_samples(count: int, loss: str) -> None:
    random = np.random.default_rng(count)
    above = 0
    for _ in range(trials := 2_000 if THOROUGH else 300):
        if loss == "rare":  # a bootstrap's bound is above the mean in a fifth of such samples
            outcomes, mean = 1 - 0.5 * (random.random(count) < 0.02), 0.99
        else:
            outcomes, mean = random.beta(9.5, 0.5, count), 0.95
        above += log_evidence(outcomes.tolist(), mean) >= math.log(20)
    assert above / trials <= 0.05


@pytest.mark.parametrize(("limit", "least"), [(0.99, 355), (0.98, 179)])
def test_the_least_number_of_outcomes_that_proves_a_limit(limit: float, least: int) -> None:
    proven = [log_evidence([1.0] * count, limit) >= math.log(20) for count in (least - 1, least)]
    assert proven == [False, True]


@given(OUTCOMES, st.floats(0.01, 0.99), st.sampled_from([0.01, 0.05]))
@settings(max_examples=examples(200))
def test_bounds_agree_with_the_evidence(outcomes: list[float], limit: float, alpha: float) -> None:
    low, high = lower_bound(outcomes, alpha), upper_bound(outcomes, alpha)
    mean = sum(outcomes) / len(outcomes) if outcomes else 0.5
    assert 0 <= low <= mean + 1e-9
    assert mean - 1e-9 <= high <= 1
    assert log_evidence(outcomes, low + 1e-6) < -math.log(alpha)
    assert low == 0 or log_evidence(outcomes, low) >= -math.log(alpha)
    one = MeanEvidence.without_restarts(limit)
    for outcome in outcomes:
        one.add(outcome)
    assert math.log(one.value) == pytest.approx(log_evidence(outcomes, limit), abs=1e-9)
    assert log_evidence(sorted(outcomes), limit) == pytest.approx(log_evidence(outcomes, limit), abs=1e-9)


@given(OUTCOMES, st.floats(0.001, 0.1), st.booleans())
@settings(max_examples=examples(200))
def test_evidence_is_positive_bounded_and_continues_from_its_fields(
    outcomes: list[float], limit: float, restarts: bool
) -> None:
    one = MeanEvidence.with_restarts(limit) if restarts else MeanEvidence.without_restarts(limit, BETS)
    assert one.value == 1
    for outcome in outcomes * 4:
        other = MeanEvidence(**json.loads(json.dumps(dataclasses.asdict(one))))
        assert one.add(outcome) == other.add(outcome)
        assert 0 <= one.value <= CAPITAL_LIMIT * len(one.bets) + 1
        assert one.reserve >= 0
        # An outcome at the limit is no gain and no loss.
        assert sum(one.grown(0.0, limit)) == pytest.approx(sum(one.capital))
