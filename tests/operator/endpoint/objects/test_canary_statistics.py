"""The rule of canaries: exact tails, what passes and what is rejected, and that equal pods are rejected rarely."""

from __future__ import annotations

import bisect
import itertools
import math
import random
from array import array
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock_operator.decide.measurement import PodReading
from penstock_operator.endpoint.objects import canary
from penstock_operator.endpoint.objects.canary import (
    EXACT_DEVIATION,
    LEAST_REQUESTS,
    LEVEL,
    LONGEST,
    LOOKS,
    CanaryTrial,
    PlanCounter,
    PlanCounts,
    compare,
    share_of_counts,
    slow_bound,
    tail,
)
from penstock_operator.facts.scaling import CanaryOutcome, CanaryReason
from tests.examples import examples

CONTINUE, PASS, REJECT = CanaryOutcome.CONTINUE, CanaryOutcome.PASS, CanaryOutcome.REJECT
SECONDS = 600.0


def plan(requests: int, errors: int = 0, slow: int = 0) -> PlanCounts:
    """Requests of which `slow` take between 20 and 50 ms, and the others up to 20 ms."""
    fast = float(requests - slow)
    return PlanCounts(requests, errors, {0.01: fast / 2, 0.02: fast, 0.05: float(requests), math.inf: float(requests)})


def reading(*counts: float, errors: float = 0.0, bounds: tuple[float, ...] = (0.01, 0.1, math.inf)) -> PodReading:
    return PodReading(counts[-1], 0.0, bounds, array("d", counts), errors)


def test_only_what_pods_answer_after_the_first_reading_counts_except_of_new_ones() -> None:
    present, new = PlanCounter(), PlanCounter()
    assert PlanCounter().counts is None

    present.put("a", reading(50, 90, 100, errors=7), new=False)
    present.put("a", reading(60, 110, 120, errors=9), new=False)
    new.put("x", reading(5, 9, 10, errors=1), new=True)

    assert present.counts is not None
    assert (present.counts.requests, present.counts.errors) == (20, 2)
    assert present.counts.buckets == {0.01: 10, 0.1: 20, math.inf: 20}
    assert new.counts is not None
    assert (new.counts.requests, new.counts.errors) == (10, 1)


def test_a_restarted_process_counts_from_zero_and_ended_pods_keep_their_counts() -> None:
    counter = PlanCounter()
    counter.put("a", reading(5, 9, 10), new=True)
    counter.put("a", reading(1, 2, 3), new=True)
    counter.put("b", reading(1, 1, 1), new=True)

    assert counter.counts is not None
    assert counter.counts.requests == 14


def test_bounds_that_some_pods_lack_are_left_out() -> None:
    counter = PlanCounter()
    counter.put("a", reading(5, 9, 10), new=True)
    counter.put("b", reading(3, 4, bounds=(0.1, math.inf)), new=True)

    assert counter.counts is not None
    assert counter.counts.buckets == {0.1: 12, math.inf: 14}


def exact_tail(hits: int, draws: int, all_hits: int, everything: int) -> Fraction:
    """By counting."""
    ways = sum(
        math.comb(all_hits, k) * math.comb(everything - all_hits, draws - k)
        for k in range(hits, min(draws, all_hits) + 1)
        if draws - k <= everything - all_hits
    )
    return Fraction(ways, math.comb(everything, draws))


@given(data=st.data())
@settings(max_examples=examples(400))
def test_the_tail_is_that_of_the_hypergeometric_distribution(data: st.DataObject) -> None:
    everything = data.draw(st.integers(1, 300))
    draws, all_hits = data.draw(st.integers(1, everything)), data.draw(st.integers(0, everything))
    hits = data.draw(st.integers(max(0, draws + all_hits - everything), min(draws, all_hits)))

    found = tail(hits, draws, all_hits, everything)

    if hits * everything <= draws * all_hits:
        assert found == 1.0
    else:
        assert found == pytest.approx(float(exact_tail(hits, draws, all_hits, everything)), rel=1e-8)


@pytest.mark.parametrize("deviations", [2.3, 3.1, 4.0])
def test_the_normal_distribution_replaces_a_long_sum(deviations: float, monkeypatch: pytest.MonkeyPatch) -> None:
    draws = 2_000_000
    deviation = math.sqrt(draws * 0.25 * 0.9)
    table = (round(draws / 2 + deviations * deviation), draws, 5 * draws, 10 * draws)
    approximated = tail(*table)
    monkeypatch.setattr(canary, "EXACT_DEVIATION", math.inf)

    exact = tail(*table)

    assert deviation > EXACT_DEVIATION
    assert approximated != exact
    assert approximated == pytest.approx(exact, rel=0.01)


def test_more_than_a_billion_requests_are_compared_as_a_billion_with_the_same_shares() -> None:
    old, new = PlanCounts(9 * 10**12, 9 * 10**9, {0.02: 9.0e11}), PlanCounts(10**12, 10**9, {0.02: 1.0e11})

    found = share_of_counts(old, new)

    assert found == (PlanCounts(900_000_000, 900_000, {0.02: 9.0e7}), PlanCounts(100_000_000, 100_000, {0.02: 1.0e7}))
    assert share_of_counts(*found) == found


@pytest.mark.parametrize("hits", [0, 1, 20, 500, 100_000])
def test_the_tail_of_millions_of_requests_is_a_probability(hits: int) -> None:
    assert 0 <= tail(hits, 1_000_000, 100_000 + hits, 10_000_000) <= 1


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        (plan(9_000, slow=450), plan(1_000, slow=50), None),
        (plan(9_000, errors=9), plan(1_000, errors=1), None),
        # One error, or two, may be chance.
        (plan(9_000), plan(1_000, errors=2), None),
        (plan(9_000), plan(1_000, errors=4), CanaryReason.MORE_ERRORS),
        (plan(9_000, errors=90), plan(1_000, errors=40), CanaryReason.MORE_ERRORS),
        (plan(9_000, slow=450), plan(1_000, slow=120), CanaryReason.SLOWER),
        # Significant, and too small to matter.
        (plan(900_000, slow=45_000), plan(100_000, slow=6_000), None),
        # Faster, and fewer errors.
        (plan(9_000, errors=300, slow=900), plan(1_000, slow=10), None),
        (plan(0), plan(1_000, errors=1_000), None),
        (plan(1_000), plan(0), None),
    ],
)
def test_a_look_rejects_more_errors_and_slower_answers(
    old: PlanCounts, new: PlanCounts, reason: CanaryReason | None
) -> None:
    found = compare(old, new, LEVEL / LOOKS)

    assert (found.reason, found.outcome) == (reason, CONTINUE if reason is None else REJECT)
    assert str(new.requests) in found.message
    assert str(old.requests) in found.message


def test_the_bound_is_next_to_the_p95_of_both_plans_together() -> None:
    assert slow_bound(plan(900, slow=40), plan(100, slow=10)) == 0.02
    assert slow_bound(plan(0), plan(0)) is None
    assert slow_bound(PlanCounts(5, 0, {0.01: 5.0}), PlanCounts(5, 0, {0.02: 5.0})) is None


def test_a_trial_passes_at_its_end_and_looks_ten_times() -> None:
    trial, looks = CanaryTrial(SECONDS), []
    for second in range(0, int(SECONDS) + 1, 2):
        found, after = trial.look(plan(9 * second, slow=second // 3), plan(second), float(second))
        if after != trial:
            looks.append(after.looks)
        trial = after
        if found.outcome is not CONTINUE:
            break

    assert looks == list(range(1, LOOKS + 1))
    assert (found.outcome, found.reason, second) == (PASS, CanaryReason.NOT_WORSE, SECONDS)


def test_a_worse_canary_is_rejected_before_its_end() -> None:
    found, _ = CanaryTrial(SECONDS).look(plan(900), plan(100, errors=20), SECONDS / LOOKS)

    assert (found.outcome, found.reason) == (REJECT, CanaryReason.MORE_ERRORS)


def test_nothing_is_judged_between_two_looks() -> None:
    trial = CanaryTrial(SECONDS, looks=1)

    found, after = trial.look(plan(900), plan(100, errors=20), 1.9 * SECONDS / LOOKS)

    assert (found.outcome, after) == (CONTINUE, trial)


def test_few_requests_prolong_a_trial_and_do_not_prevent_its_end() -> None:
    few = LEAST_REQUESTS - 1
    trial = CanaryTrial(SECONDS, looks=LOOKS - 1)

    waits, trial = trial.look(plan(9 * few), plan(few), 2 * SECONDS)
    ends, _ = trial.look(plan(9 * few), plan(few), LONGEST * SECONDS)

    assert waits.outcome is CONTINUE
    assert (ends.outcome, ends.reason) == (PASS, CanaryReason.FEW_REQUESTS)


@pytest.mark.parametrize(("old", "new"), [(None, plan(500)), (plan(500), None), (None, None)])
def test_pods_that_cannot_be_read_never_pass(old: PlanCounts | None, new: PlanCounts | None) -> None:
    waits, trial = CanaryTrial(SECONDS).look(old, new, 2 * SECONDS)
    ends, _ = trial.look(old, new, LONGEST * SECONDS)

    assert waits.outcome is CONTINUE
    assert (ends.outcome, ends.reason) == (REJECT, CanaryReason.NO_METRICS)


@given(
    seconds=st.floats(60, 86_400),
    steps=st.lists(st.tuples(st.floats(0, 3), st.integers(0, 400), st.integers(0, 5), st.integers(0, 40)), max_size=40),
)
@settings(max_examples=examples(200))
def test_whatever_comes_there_are_at_most_ten_looks_and_an_end(
    seconds: float, steps: list[tuple[float, int, int, int]]
) -> None:
    trial, elapsed, requests, errors, slow = CanaryTrial(seconds), 0.0, 0, 0, 0
    outcomes = []
    for wait, more, failed, late in [*steps, (float(LONGEST), 0, 0, 0)]:
        elapsed += wait * seconds
        requests, errors, slow = requests + more, errors + min(failed, more), slow + min(late, more)
        found, after = trial.look(plan(9 * requests), plan(requests, errors, slow), elapsed)
        assert trial.looks <= after.looks <= LOOKS
        trial = after
        outcomes.append(found.outcome)
        if found.outcome is not CONTINUE:
            break

    assert outcomes[-1] is not CONTINUE
    assert set(outcomes[:-1]) <= {CONTINUE}


BOUNDS = (0.001, 0.002, 0.004, 0.006, 0.008, 0.01, 0.015, 0.02, 0.03, 0.04, 0.06, 0.08, 0.1, 0.2, 0.5, math.inf)
"""Of a latency histogram, in seconds."""
MEDIAN_SECONDS, SPREAD = 0.010, 0.5


def counts_of(dice: random.Random, requests: int, *, errors: float, slow_by: float) -> PlanCounts:
    """The counts of this many requests of a plan. `errors`: their share; `slow_by`: factor of the latencies."""
    counts = [0] * len(BOUNDS)
    for _ in range(requests):
        seconds = slow_by * MEDIAN_SECONDS * math.exp(SPREAD * dice.gauss(0, 1))
        counts[bisect.bisect_left(BOUNDS, seconds)] += 1
    buckets = dict(zip(BOUNDS, map(float, itertools.accumulate(counts)), strict=True))
    return PlanCounts(requests, sum(dice.random() < errors for _ in range(requests)), buckets)


def _sum(one: PlanCounts, other: PlanCounts) -> PlanCounts:
    buckets = {bound: one.buckets.get(bound, 0.0) + count for bound, count in other.buckets.items()}
    return PlanCounts(one.requests + other.requests, one.errors + other.errors, buckets)


def rejected_share(
    dice: random.Random,
    *,
    trials: int,
    requests: int,
    percent: int,
    error_share: float,
    new_errors: float,
    slow_by: float,
) -> float:
    """Share of the canaries that are rejected, of which each has this number of requests in all."""
    rejected = 0
    for _ in range(trials):
        old, new, trial = PlanCounts(), PlanCounts(), CanaryTrial(SECONDS)
        for look in range(1, LOOKS + 1):
            part = requests * percent // 100 // LOOKS
            new = _sum(new, counts_of(dice, part, errors=new_errors, slow_by=slow_by))
            old = _sum(old, counts_of(dice, requests // LOOKS - part, errors=error_share, slow_by=1.0))
            found, trial = trial.look(old, new, look * SECONDS / LOOKS)
            if found.outcome is not CanaryOutcome.CONTINUE:
                rejected += found.outcome is CanaryOutcome.REJECT
                break
    return rejected / trials


def test_equal_pods_are_rejected_as_rarely_as_stated() -> None:
    dice = random.Random(1)

    share = rejected_share(
        dice, trials=400, requests=2_000, percent=10, error_share=0.002, slow_by=1.0, new_errors=0.002
    )

    # At most 2 % by the rule: more than 19 of 400 would have a probability below 1 in 1,000.
    assert share <= 19 / 400


@pytest.mark.parametrize("requests", [1_000, 10_000, 100_000_000])
def test_equal_pods_with_many_errors_are_rejected_in_at_most_2_of_100_canaries(requests: int) -> None:
    """At the level of a single look, without the correction for ten of them, it would be more than 4 of 100.
    `requests`: at each look."""
    dice, rejected = np.random.default_rng(1), 0
    for _ in range(1_000):
        errors, trial = [0, 0], CanaryTrial(SECONDS)
        for number in range(1, LOOKS + 1):
            errors = [
                before + int(dice.binomial(part * requests // 10, 0.05))
                for before, part in zip(errors, (9, 1), strict=True)
            ]
            old, new = (
                PlanCounts(number * part * requests // 10, count) for count, part in zip(errors, (9, 1), strict=True)
            )
            found, trial = trial.look(old, new, number * SECONDS / LOOKS)
            if found.outcome is not CONTINUE:
                rejected += found.outcome is REJECT
                break

    assert rejected <= 20


@pytest.mark.parametrize(("new_errors", "slow_by"), [(0.05, 1.0), (0.002, 1.6)])
def test_clearly_worse_pods_are_rejected(new_errors: float, slow_by: float) -> None:
    dice = random.Random(2)

    share = rejected_share(
        dice, trials=60, requests=5_000, percent=10, error_share=0.002, slow_by=slow_by, new_errors=new_errors
    )

    assert share >= 0.9


def test_the_histogram_of_the_simulation_counts_every_request() -> None:
    dice = random.Random(3)
    made = counts_of(dice, 500, errors=0.1, slow_by=1.0)

    assert made.requests == made.buckets[math.inf] == 500
    assert all(low <= high for low, high in itertools.pairwise(made.buckets[bound] for bound in BOUNDS))
