"""Weights and ranges on their grids."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from penstock_optimizer.quantise.rounding import LARGEST, PAIR, Int8, grid, quantise_weight
from penstock_runtime.rows import Float

weights = hnp.arrays(
    np.float32, hnp.array_shapes(min_dims=2, max_dims=2, min_side=1, max_side=9), elements=st.floats(-8, 8, width=32)
)


@given(weights, st.booleans())
def test_rounding_to_nearest_is_off_by_half_a_step_at_most(weight: Float, per_channel: bool) -> None:
    quantised = quantise_weight(weight, per_channel=per_channel)

    assert np.all(np.abs(quantised.float() - weight) <= quantised.scale * 0.5001)
    assert np.abs(quantised.values).max() <= LARGEST


def assert_limited(stored: Int8) -> None:
    even = len(stored) // 2 * 2
    first, second = stored[:even:2].astype(int), stored[1:even:2].astype(int)
    assert np.all(np.maximum(first, 0) + np.maximum(second, 0) <= PAIR)
    assert np.all(np.maximum(-first, 0) + np.maximum(-second, 0) <= PAIR)


@given(weights, st.booleans(), st.booleans())
def test_limited_pairs_never_go_beyond_sixteen_bits(weight: Float, per_channel: bool, compensated: bool) -> None:
    samples = np.random.default_rng(0).standard_normal((20, len(weight))).astype(np.float32) if compensated else None

    assert_limited(quantise_weight(weight, per_channel=per_channel, limit_pairs=True, samples=samples).values)
    assert np.iinfo(np.int16).max >= 255 * PAIR


@pytest.mark.parametrize("inputs", [64, 384, 1536])
@pytest.mark.parametrize("compensated", [False, True])
def test_pairs_of_a_matrix_as_large_as_a_models_are_limited(inputs: int, compensated: bool) -> None:
    """In small matrices there is always a grid on which no pair goes over the limit; here there is none."""
    generator = np.random.default_rng(inputs)
    weight = generator.standard_normal((inputs, 64)).astype(np.float32)
    samples = generator.standard_normal((20, inputs)).astype(np.float32) if compensated else None

    assert_limited(quantise_weight(weight, per_channel=True, limit_pairs=True, samples=samples).values)


def test_pairs_that_fit_are_rounded_as_without_a_limit() -> None:
    weight = np.array([[127, 60], [-127, 60], [1, 127], [2, -3]], np.float32)

    assert np.array_equal(
        quantise_weight(weight, per_channel=True, limit_pairs=True).values,
        quantise_weight(weight, per_channel=True).values,
    )


def test_limiting_pairs_does_less_damage_than_seven_bits() -> None:
    generator = np.random.default_rng(1)
    weight = (generator.standard_normal((256, 64)) * np.exp(generator.standard_normal((256, 1)))).astype(np.float32)
    step = np.abs(weight).max(axis=0) / 63
    seven_bits = np.rint(weight / step) * step

    limited = quantise_weight(weight, per_channel=True, limit_pairs=True).float()

    assert np.sum((limited - weight) ** 2) < 0.7 * np.sum((seven_bits - weight) ** 2)


def test_compensated_rounding_changes_the_product_less_where_inputs_are_correlated() -> None:
    generator = np.random.default_rng(2)
    mixing = generator.standard_normal((32, 128)).astype(np.float32)
    samples = (generator.standard_normal((600, 32)) @ mixing).astype(np.float32)
    weight = generator.standard_normal((128, 48)).astype(np.float32)
    held_out = (generator.standard_normal((200, 32)) @ mixing).astype(np.float32)

    def damage(values: Float) -> float:
        return float(np.sum((held_out @ (values - weight)) ** 2))

    nearest = damage(quantise_weight(weight, per_channel=True).float())
    assert damage(quantise_weight(weight, per_channel=True, samples=samples).float()) < 0.25 * nearest


def test_more_inputs_than_a_block_are_compensated_as_one_matrix() -> None:
    """The triangular inverse by halves and the blocks leave no seam: a diagonal moment matrix means no compensation."""
    size = 700
    weight = np.random.default_rng(3).standard_normal((size, 3)).astype(np.float32)

    compensated = quantise_weight(weight, per_channel=True, samples=np.eye(size, dtype=np.float32))

    assert np.array_equal(compensated.values, quantise_weight(weight, per_channel=True).values)


def test_a_channel_of_zeros_stays_zero() -> None:
    weight = np.array([[0, 1], [0, -2]], np.float32)

    quantised = quantise_weight(weight, per_channel=True)

    assert quantised.values[:, 0].tolist() == [0, 0]
    assert np.all(np.isfinite(quantised.scale))
    assert np.all(quantised.scale > 0)


@given(st.floats(-1e4, 1e4), st.floats(-1e4, 1e4))
def test_a_grid_covers_its_range_and_has_an_exact_zero(one: float, other: float) -> None:
    low, high = min(one, other), max(one, other)

    cells = grid(low, high)

    assert 0 <= cells.zero <= 255
    assert cells.step > 0
    assert -cells.zero * cells.step <= low + cells.step
    assert (255 - cells.zero) * cells.step >= high - cells.step


@pytest.mark.parametrize(("low", "high", "zero"), [(0.0, 255.0, 0), (-255.0, 0.0, 255), (-128.0, 127.0, 128)])
def test_the_zero_of_a_grid_is_where_the_range_puts_it(low: float, high: float, zero: int) -> None:
    assert (grid(low, high).zero, grid(low, high).step) == (zero, 1.0)


def test_an_empty_range_has_a_valid_grid() -> None:
    assert grid(0.0, 0.0).step == 1.0


@given(weights, st.integers(4, 7), st.booleans())
def test_weights_of_fewer_bits_are_the_upper_ones_of_eight(weight: Float, bits: int, compensated: bool) -> None:
    samples = np.random.default_rng(0).standard_normal((20, len(weight))).astype(np.float32) if compensated else None

    values = quantise_weight(weight, per_channel=True, bits=bits, samples=samples).values.astype(int)

    below = 2 ** (8 - bits)
    assert not np.any(values % below)
    assert np.abs(values).max() <= (2 ** (bits - 1) - 1) * below


@pytest.mark.parametrize(("bits", "relative"), [(7, 0.022), (6, 0.04), (5, 0.075), (4, 0.14)])
def test_the_error_of_fewer_bits_is_within_its_limit(bits: int, relative: float) -> None:
    weight = np.random.default_rng(4).standard_normal((768, 64)).astype(np.float32)

    error = quantise_weight(weight, per_channel=True, bits=bits).float() - weight

    assert 0.4 * relative < np.sqrt(np.mean(error**2)) < relative


def test_with_fewer_bits_the_largest_weight_is_clipped_for_a_finer_step() -> None:
    weight = np.random.default_rng(5).standard_normal((768, 64)).astype(np.float32)
    weight[0] = 12.0

    quantised = quantise_weight(weight, per_channel=True, bits=4)

    assert np.all(quantised.scale * 112 < 0.9 * np.abs(weight).max(axis=0))
