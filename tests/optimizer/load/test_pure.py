"""Lengths, arrivals and summaries: the parts of a load that need no server."""

from __future__ import annotations

import itertools
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.resources.endpoint import Workload
from penstock_optimizer.load.generator import (
    LatencySummary,
    poisson_arrivals,
    quantile,
    quantile_interval,
    relative_spread,
)
from penstock_optimizer.load.workload import LengthMix, measured_lengths


def test_the_default_mix_is_the_documented_one() -> None:
    lengths = sorted(LengthMix(maximum=512).sample(2000, seed=1))

    assert statistics.median(lengths) == 44
    assert 180 <= lengths[1900] <= 190
    assert 62 <= statistics.mean(lengths) <= 68
    assert lengths[-1] == 512


def test_stated_lengths_are_as_likely_as_they_are_listed() -> None:
    mix = LengthMix.of(Workload(sequence_lengths=(128, 8, 8, 600)), maximum=512)
    lengths = mix.sample(400, seed=3)

    assert {length: lengths.count(length) for length in sorted(set(lengths))} == {8: 200, 128: 100, 512: 100}


@given(count=st.integers(1, 300), seeds=st.tuples(st.integers(), st.integers()), maximum=st.integers(1, 600))
def test_samples_of_one_size_have_the_same_lengths_in_another_order(
    count: int, seeds: tuple[int, int], maximum: int
) -> None:
    mix = LengthMix(maximum=maximum)
    first, second = (mix.sample(count, seed=seed) for seed in seeds)

    assert sorted(first) == sorted(second)
    assert all(1 <= length <= maximum for length in first)
    assert first == mix.sample(count, seed=seeds[0])


@pytest.mark.parametrize(
    ("maximum", "stated", "expected"),
    [
        (512, (), (8, 16, 32, 64, 128, 256, 384, 512)),
        (128, (), (8, 16, 32, 64, 128)),
        (5, (), (5,)),
        (64, (20, 20, 900), (8, 16, 20, 32, 64)),
    ],
)
def test_latency_is_measured_at_the_standard_lengths_that_fit(
    maximum: int, stated: tuple[int, ...], expected: tuple[int, ...]
) -> None:
    assert measured_lengths(maximum, LengthMix(maximum=maximum, lengths=stated)) == expected


def test_many_stated_lengths_add_at_most_four() -> None:
    mix = LengthMix(maximum=512, lengths=tuple(range(1, 200)))

    assert len(measured_lengths(512, mix)) <= 12


@given(rate=st.floats(0.1, 2000), seconds=st.floats(0.1, 5), seed=st.integers())
def test_arrivals_match_the_rate_are_in_order_and_repeatable(rate: float, seconds: float, seed: int) -> None:
    arrivals = poisson_arrivals(rate, seconds, seed=seed)

    assert len(arrivals) == max(1, round(rate * seconds))
    assert arrivals == sorted(arrivals)
    assert all(0 <= at < seconds for at in arrivals)
    assert arrivals == poisson_arrivals(rate, seconds, seed=seed)


def test_gaps_between_arrivals_are_exponential() -> None:
    arrivals = poisson_arrivals(1000, 20, seed=5)
    gaps = [later - earlier for earlier, later in itertools.pairwise(arrivals)]

    # Of an exponential distribution the standard deviation equals the mean.
    assert statistics.mean(gaps) == pytest.approx(1e-3, rel=0.02)
    assert statistics.stdev(gaps) == pytest.approx(1e-3, rel=0.05)


@pytest.mark.parametrize(("rate", "seconds"), [(0, 1), (-1, 1), (1, 0)])
def test_a_load_without_rate_or_time_is_an_error(rate: float, seconds: float) -> None:
    with pytest.raises(ValueError, match="must be positive"):
        poisson_arrivals(rate, seconds, seed=0)


@given(st.lists(st.floats(0, 1e3), min_size=1, max_size=200), st.floats(0, 1))
def test_quantiles_lie_within_the_data_and_their_interval(values: list[float], share: float) -> None:
    ordered = sorted(values)
    lower, upper = quantile_interval(ordered, share)

    assert ordered[0] <= quantile(ordered, share) <= ordered[-1]
    assert lower <= upper


def test_the_interval_covers_the_true_quantile_as_often_as_stated() -> None:
    hits = 0
    for seed in range(300):
        values = sorted(poisson_arrivals(200, 1.0, seed=seed))
        lower, upper = quantile_interval(values, 0.95)
        hits += lower <= 0.95 <= upper

    assert hits / 300 > 0.93


@given(st.lists(st.floats(1e-6, 10), min_size=1, max_size=300))
def test_a_summary_is_ordered(seconds: list[float]) -> None:
    summary = LatencySummary.of(seconds)

    assert summary is not None
    ordered = [summary.minimum, summary.p50, summary.p90, summary.p95, summary.p99, summary.maximum]
    assert ordered == sorted(ordered)
    assert summary.count == len(seconds)


def test_no_latencies_have_no_summary() -> None:
    assert LatencySummary.of([]) is None


@pytest.mark.parametrize(("values", "expected"), [([], 0.0), ([5.0], 0.0), ([1, 2, 3], 0.5), ([0, 0, 0], 0.0)])
def test_spread_is_the_interquartile_range_over_the_median(values: list[float], expected: float) -> None:
    assert relative_spread(values) == pytest.approx(expected)
