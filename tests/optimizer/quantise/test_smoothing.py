"""The divisors of SmoothQuant."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from penstock_optimizer.quantise.quantiser import factors
from penstock_runtime.rows import Float

CHANNELS = 6
positive = hnp.arrays(np.float32, (CHANNELS,), elements=st.floats(0, 1000, width=32))
matrices = hnp.arrays(np.float32, (CHANNELS, 4), elements=st.floats(-10, 10, width=32))


@given(positive, matrices, st.floats(0, 1))
def test_divisors_are_positive_with_a_geometric_mean_of_one(magnitudes: Float, weight: Float, alpha: float) -> None:
    by = factors(magnitudes, [weight], alpha)

    assert np.all(np.isfinite(by))
    assert np.all(by > 0)
    assert np.log(by.astype(np.float64)).mean() == pytest.approx(0, abs=1e-3)


@given(positive, matrices, st.floats(0, 1))
def test_the_product_stays_the_same(magnitudes: Float, weight: Float, alpha: float) -> None:
    by = factors(magnitudes, [weight], alpha).astype(np.float64)
    x = magnitudes.astype(np.float64)

    np.testing.assert_allclose((x / by) @ (weight * by[:, np.newaxis]), x @ weight, rtol=1e-9, atol=1e-9)


def test_alpha_one_makes_all_channels_reach_the_same_magnitude() -> None:
    magnitudes = np.array([1, 10, 100], np.float32)

    reached = magnitudes / factors(magnitudes, [np.ones((3, 2), np.float32)], 1.0)

    assert reached == pytest.approx([10, 10, 10], rel=1e-4)


def test_alpha_zero_evens_out_the_weights_instead() -> None:
    weight = np.array([[1.0], [10.0], [100.0]], np.float32)

    by = factors(np.ones(3, np.float32), [weight], 0.0)

    assert (weight[:, 0] * by).tolist() == pytest.approx([10, 10, 10], rel=1e-4)


def test_the_largest_weight_of_all_products_of_an_input_counts() -> None:
    small, large = np.full((2, 3), 0.1, np.float32), np.array([[5.0], [0.1]], np.float32)

    by = factors(np.ones(2, np.float32), [small, large], 0.0)

    assert by[1] / by[0] == pytest.approx(50, rel=1e-4)
