"""Plans of Inferentia: the published choices, the rules of pipelines, and estimates within their stated bounds."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.hardware import NeuronGeneration
from penstock.prices import shipped_prices
from penstock.prices.pod_costs import per_million
from penstock_optimizer.neuron.plans import (
    FITTED_TOKENS,
    INF1_DATA_PARALLEL,
    INF2_INTERCEPT,
    INF2_LEFT_OUT_ERROR,
    INF2_PER_OPERATION,
    INF2_PER_WEIGHT,
    INF2_TIMES,
    Basis,
    LinearTime,
    NeuronCandidate,
    NeuronGoal,
    buckets,
    candidates,
    estimated_figures,
    figures_for,
    pipeline_cores,
    published_figures,
    rank,
)
from penstock_optimizer.neuron.published import SHAPES, Mode, published_rows, shape_of
from penstock_runtime.engines.neuron.shapes import CONSTANT_TOKENS
from tests.examples import examples
from tools.plan_tables import inf2_errors, inf2_fit

BERT = SHAPES["bert-base"]
BLOG = [row for row in published_rows() if row.source_kind == "aws-blog-2021"]
"""The rows of the publication whose choices are reproduced."""
PIPELINE, PARALLEL = Mode.PIPELINE, Mode.DATA_PARALLEL


@pytest.mark.parametrize(
    ("cores", "goal", "candidate", "figures"),
    [
        (4, NeuronGoal.LATENCY, NeuronCandidate(PIPELINE, 4, 1), (291, 13.8)),
        (16, NeuronGoal.LATENCY, NeuronCandidate(PIPELINE, 16, 1), (1793, 6.9)),
        (4, NeuronGoal.THROUGHPUT, NeuronCandidate(PARALLEL, 1, 6), (985, 24.9)),
        (16, NeuronGoal.THROUGHPUT, NeuronCandidate(PARALLEL, 1, 6), (3880, 25.8)),
        (4, NeuronGoal.COST, NeuronCandidate(PARALLEL, 1, 6), (985, 24.9)),
        (16, NeuronGoal.COST, NeuronCandidate(PARALLEL, 1, 6), (3880, 25.8)),
    ],
)
def test_published_choices_are_reproduced(
    cores: int, goal: NeuronGoal, candidate: NeuronCandidate, figures: tuple[float, float]
) -> None:
    best = rank(published_figures(BLOG, NeuronGeneration.INF1, cores, BERT, 128), goal)[0]

    assert best.candidate == candidate
    assert (best.per_second, best.latency_milliseconds) == figures


def test_the_cheapest_million_is_on_inf1_xlarge() -> None:
    prices = shipped_prices().classes["inf1"]
    costs = {}
    for instance, cores in (("inf1.xlarge", 4), ("inf1.6xlarge", 16)):
        best = rank(published_figures(BLOG, NeuronGeneration.INF1, cores, BERT, 128), NeuronGoal.COST)[0]
        costs[instance] = per_million(prices[instance].per_hour, best.per_second)

    assert min(costs, key=lambda name: costs[name]) == "inf1.xlarge"
    assert costs["inf1.xlarge"] == pytest.approx(0.0643, abs=1e-4)


@pytest.mark.parametrize("cores", [4, 16])
def test_rows_of_all_years_lead_to_the_same_modes(cores: int) -> None:
    figures = figures_for(published_rows(), NeuronGeneration.INF1, cores, BERT, 128)

    assert rank(figures, NeuronGoal.LATENCY)[0].candidate == NeuronCandidate(PIPELINE, cores, 1)
    assert rank(figures, NeuronGoal.THROUGHPUT)[0].candidate.mode is PARALLEL


@pytest.mark.parametrize(
    ("weights", "granted", "cores"),
    [
        (0, 64, 1),
        (9_999_999, 64, 1),
        (10_000_000, 64, 1),  # 4 * round(0.5): halves go to the even neighbour, 0, and at least one core is used
        (10_000_001, 64, 4),
        (22_700_000, 64, 4),
        (30_000_000, 64, 8),
        (50_000_000, 64, 8),
        (66_000_000, 64, 12),
        (86_000_000, 64, 16),
        (110_000_000, 64, 24),
        (110_000_000, 16, 16),
        (110_000_000, 4, 4),
        (335_000_000, 64, 64),
        (335_000_000, 16, 16),
        (10**12, 10**6, 64),
    ],
)
def test_pipeline_cores_follow_the_formula_and_its_limits(weights: int, granted: int, cores: int) -> None:
    assert pipeline_cores(weights, granted) == cores


@settings(max_examples=examples(200))
@given(st.integers(0, 10**12), st.integers(1, 64).map(lambda chips: 4 * chips))
def test_a_pipeline_has_one_core_or_whole_devices_within_the_grant(weights: int, granted: int) -> None:
    cores = pipeline_cores(weights, granted)

    assert 1 <= cores <= min(granted, 64)
    assert cores == 1 or cores % 4 == 0


@settings(max_examples=examples(200))
@given(st.integers(0, 10**10), st.integers(1, 16))
def test_candidates_are_different_and_fit_into_the_grant(weights: int, devices: int) -> None:
    for generation in NeuronGeneration:
        granted = devices * generation.cores_per_device
        found = candidates(generation, granted, weights)

        assert len(set(found)) == len(found)
        assert all(one.cores_per_model <= granted for one in found)
        assert found[0].mode is PARALLEL
        assert generation is NeuronGeneration.INF1 or all(one.mode is PARALLEL for one in found)


def test_neighbours_of_the_formula_are_candidates() -> None:
    counts = [one.cores_per_model for one in candidates(NeuronGeneration.INF1, 24, 86_000_000, batches=(1,))]

    assert counts == [1, 16, 12, 20, 24]


@pytest.mark.parametrize(
    ("generation", "cores"), [(NeuronGeneration.INF1, 3), (NeuronGeneration.INF2, 1), (NeuronGeneration.INF1, 0)]
)
def test_parts_of_devices_are_refused(generation: NeuronGeneration, cores: int) -> None:
    with pytest.raises(ValueError, match="not whole devices"):
        candidates(generation, cores, 10**8)


@pytest.mark.parametrize("family", ["bert-base", "distilbert", "bert-large"])
def test_estimates_of_inf2_agree_with_published_rows(family: str) -> None:
    shape = SHAPES[family]
    estimated = {one.candidate: one for one in estimated_figures(NeuronGeneration.INF2, 2, shape, 128)}
    published = published_figures(published_rows(), NeuronGeneration.INF2, 2, shape, 128)
    both = [(estimated[one.candidate], one) for one in published if one.candidate in estimated]

    assert len(both) >= 2
    for estimate, figure in both:
        assert estimate.per_second == pytest.approx(figure.per_second, rel=0.15)


@pytest.mark.parametrize("cores", [4, 16])
def test_estimates_of_inf1_agree_with_the_published_table(cores: int) -> None:
    estimated = {one.candidate: one for one in estimated_figures(NeuronGeneration.INF1, cores, BERT, 128)}

    for figure in published_figures(BLOG, NeuronGeneration.INF1, cores, BERT, 128):
        estimate = estimated[figure.candidate]
        assert estimate.per_second == pytest.approx(figure.per_second, rel=0.15)
        assert estimate.latency_milliseconds == pytest.approx(figure.latency_milliseconds, rel=0.15)


@settings(max_examples=examples(60))
@given(st.sampled_from(sorted(SHAPES)), st.integers(16, 256))
def test_longer_texts_are_never_estimated_faster(family: str, tokens: int) -> None:
    shape = SHAPES[family]
    for generation, cores in ((NeuronGeneration.INF1, 16), (NeuronGeneration.INF2, 2)):
        short = estimated_figures(generation, cores, shape, tokens)
        long = estimated_figures(generation, cores, shape, 2 * tokens)
        assert [one.candidate for one in short] == [one.candidate for one in long]
        assert all(a.per_second > b.per_second for a, b in zip(short, long, strict=True))


def test_each_figure_states_its_basis() -> None:
    figures = figures_for(published_rows(), NeuronGeneration.INF2, 2, BERT, 128)

    assert {one.basis for one in figures} == {Basis.PUBLISHED, Basis.ESTIMATED}
    assert all(one.evidence for one in figures)
    # Nothing is published at 64 tokens.
    assert {one.basis for one in figures_for(published_rows(), NeuronGeneration.INF2, 2, BERT, 64)} == {Basis.ESTIMATED}


def test_buckets_are_the_powers_of_two_in_use_and_the_longest_input() -> None:
    assert buckets([5, 31, 33, 120], longest=512) == (32, 64, 128, 512)
    assert buckets([300], longest=384) == (384,)
    assert buckets([], longest=128) == (128,)


@pytest.mark.parametrize(
    ("generation", "time"),
    [(NeuronGeneration.INF1, INF1_DATA_PARALLEL), (NeuronGeneration.INF2, INF2_TIMES["bert-base"])],
)
def test_the_engine_divides_batches_by_the_fitted_times(generation: NeuronGeneration, time: LinearTime) -> None:
    assert CONSTANT_TOKENS[generation] == time.constant / time.each * FITTED_TOKENS


def test_the_time_of_unpublished_models_is_fitted_to_the_published_rows() -> None:
    assert inf2_fit() == pytest.approx((INF2_INTERCEPT, INF2_PER_WEIGHT, INF2_PER_OPERATION), rel=0.01)
    worst = max(abs(error) for errors in inf2_errors().values() for error in errors)
    assert worst == pytest.approx(INF2_LEFT_OUT_ERROR, abs=0.005)


def test_a_smaller_model_is_not_faster_than_the_intercept() -> None:
    (mini,) = [
        one for one in estimated_figures(NeuronGeneration.INF2, 2, SHAPES["minilm-l6"], 128) if one.candidate.batch == 1
    ]

    # Two cores, each with batches of a + b * weights + c * operations.
    assert INF2_INTERCEPT < mini.latency_milliseconds < 2 * INF2_INTERCEPT
    assert mini.per_second == pytest.approx(2 / mini.latency_milliseconds * 1000)


def test_of_several_publications_the_newest_counts() -> None:
    figures = published_figures(published_rows(), NeuronGeneration.INF2, 2, SHAPES["bert-base"], 128)
    by_batch = {one.candidate.batch: one for one in figures}
    rows = [row for row in published_rows() if row.hardware_class == "inf2" and row.tokens == 128]

    for batch, figure in by_batch.items():
        same = [
            row for row in rows
            if row.batch == batch and row.instance_cores == 2 and (found := shape_of(row.model)) is not None
            and found.family == "bert-base"
        ]  # fmt: skip
        newest = max(row.release for row in same)
        assert figure.per_second in {row.per_second for row in same if row.release == newest}
