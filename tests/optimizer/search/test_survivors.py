"""Which candidates are measured at length, and which go on to the plan search."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.recipe import EngineName, Precision, Recipe
from penstock_optimizer.search.space import (
    FINALIST_WITHIN,
    MeasuredRecipe,
    expected_milliseconds,
    finalists,
    interpolate,
    is_dominated,
)
from tests.optimizer.search.cost_model import FP32, INT8, STATIC

OPENVINO_FP32 = Recipe(engine=EngineName.OPENVINO, precision=Precision.FP32)


@pytest.mark.parametrize(
    ("sample", "best", "expected"),
    [
        ({8: 4.0, 128: 40.0}, {8: 1.0, 128: 13.0}, True),
        ({8: 4.0, 128: 14.0}, {8: 1.0, 128: 13.0}, False),  # slower at 8 tokens only
        ({8: 1.2}, {8: 1.0}, False),
        ({8: 1.4}, {8: 1.0}, True),
        ({8: 1.4}, {}, False),
        ({8: 9.0}, {16: 1.0}, False),
    ],
)
def test_a_candidate_is_dominated_if_it_is_far_slower_at_every_common_length(
    sample: dict[int, float], best: dict[int, float], expected: bool
) -> None:
    assert is_dominated(sample, best) is expected


@pytest.mark.parametrize(
    ("tokens", "expected"), [(8, 1.0), (16, 2.0), (12, 1.5), (32, 4.0), (24, 3.0), (64, 8.0), (4, 0.5), (1, 0.125)]
)
def test_latency_is_interpolated_between_and_extrapolated_beyond_measured_lengths(tokens: int, expected: float) -> None:
    assert interpolate({8: 1.0, 16: 2.0, 32: 4.0}, tokens) == pytest.approx(expected)


def test_below_the_first_length_latency_stays_positive() -> None:
    assert interpolate({8: 1.0, 16: 8.0}, 2) > 0


def test_one_measured_length_is_used_for_all() -> None:
    assert interpolate({64: 3.0}, 500) == 3.0


def test_of_equally_fast_recipes_the_more_accurate_comes_first() -> None:
    plain, tuned = (
        Recipe(engine=EngineName.ONNXRUNTIME, precision=Precision.INT8_DYNAMIC, options=options)
        for options in (("per-channel",), ("compensated", "per-channel", "smooth"))
    )
    accepted = [MeasuredRecipe(plain, {8: 0.99, 32: 1.98}), MeasuredRecipe(tuned, {8: 1.0, 32: 2.0})]

    assert finalists(accepted, MeasuredRecipe(FP32, {8: 3.0, 32: 9.0}), [8, 32]) == [FP32, tuned, plain]


latencies = st.fixed_dictionaries({tokens: st.floats(0.01, 1e3) for tokens in (8, 32, 128)})


@given(measured=latencies, lengths=st.lists(st.integers(1, 512), min_size=1, max_size=20))
def test_expected_latency_is_positive_and_scales_with_the_measurements(
    measured: dict[int, float], lengths: list[int]
) -> None:
    once = expected_milliseconds(measured, lengths)
    doubled = expected_milliseconds({tokens: 2 * value for tokens, value in measured.items()}, lengths)

    assert once > 0
    assert doubled == pytest.approx(2 * once)


def test_the_reference_comes_first_and_fp32_before_int8() -> None:
    accepted = [
        MeasuredRecipe(INT8, {8: 1.0}),
        MeasuredRecipe(OPENVINO_FP32, {8: 1.1}),
        MeasuredRecipe(STATIC, {8: 0.9}),
    ]

    assert finalists(accepted, MeasuredRecipe(FP32, {8: 2.0}), [8]) == [FP32, OPENVINO_FP32, STATIC, INT8]


def test_recipes_far_from_the_best_do_not_go_on() -> None:
    accepted = [MeasuredRecipe(INT8, {8: 1.0}), MeasuredRecipe(STATIC, {8: FINALIST_WITHIN + 0.1})]

    assert finalists(accepted, MeasuredRecipe(FP32, {8: 2.0}), [8]) == [FP32, INT8]


def test_without_accepted_candidates_the_reference_is_the_only_finalist() -> None:
    assert finalists([], MeasuredRecipe(FP32, {8: 2.0}), [8]) == [FP32]


@given(values=st.dictionaries(st.sampled_from([INT8, STATIC, OPENVINO_FP32]), latencies), reference=latencies)
def test_finalists_were_all_accepted_and_include_the_fastest(
    values: dict[Recipe, dict[int, float]], reference: dict[int, float]
) -> None:
    chosen = finalists(
        [MeasuredRecipe(recipe, value) for recipe, value in values.items()],
        MeasuredRecipe(FP32, reference),
        [8, 40, 200],
    )

    assert chosen[0] == FP32
    assert set(chosen[1:]) <= set(values)
    expected = {recipe: expected_milliseconds(value, [8, 40, 200]) for recipe, value in values.items()}
    if expected and min(expected.values()) <= expected_milliseconds(reference, [8, 40, 200]):
        assert min(expected, key=lambda recipe: expected[recipe]) in chosen
