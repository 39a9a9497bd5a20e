"""The statistics of an activation that calibration collects."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock_optimizer.quantise.linear import Watch, together
from penstock_runtime.rows import Float


def texts(lengths: list[int], channels: int = 5, seed: int = 0) -> list[Float]:
    generator = np.random.default_rng(seed)
    return [generator.standard_normal((1, length, channels)).astype(np.float32) for length in lengths]


@given(st.lists(st.integers(1, 30), min_size=1, max_size=8), st.integers(1, 64))
def test_range_and_mean_are_those_of_all_tokens_with_each_text_counting_the_same(
    lengths: list[int], tokens: int
) -> None:
    watch = Watch(texts=len(lengths), tokens=tokens)
    activations = texts(lengths)
    for activation in activations:
        watch.add(activation)

    seen = watch.seen()

    everything = np.concatenate(activations, axis=1)[0]
    np.testing.assert_array_equal(seen.low, everything.min(axis=0))
    np.testing.assert_array_equal(seen.high, everything.max(axis=0))
    np.testing.assert_allclose(seen.mean, np.mean([a[0].mean(axis=0) for a in activations], axis=0), atol=1e-6)
    assert len(seen.samples) <= max(tokens, len(lengths))


def test_with_room_for_all_tokens_samples_give_the_second_moments() -> None:
    activations = texts([3, 7])
    watch = Watch(texts=2, tokens=100)
    for activation in activations:
        watch.add(activation)

    moments = watch.seen().samples.T @ watch.seen().samples

    expected = sum(a[0].T @ a[0] / len(a[0]) for a in activations)
    np.testing.assert_allclose(moments, expected, rtol=1e-5)


def test_first_and_last_token_are_always_among_the_samples() -> None:
    """Special tokens are at both ends, and have the largest values."""
    activation = np.zeros((1, 50, 1), np.float32)
    activation[0, 0], activation[0, -1] = 100, 200
    watch = Watch(texts=1, tokens=4)
    watch.add(activation)

    assert watch.seen().samples[[0, -1], 0].tolist() == [50, 100]


def test_activations_of_a_shared_weight_are_merged() -> None:
    one, other = Watch(texts=1, tokens=9), Watch(texts=1, tokens=9)
    one.add(np.array([[1.0, -2.0]], np.float32))
    other.add(np.array([[3.0, 0.0]], np.float32))

    both = together([one.seen(), other.seen()])

    assert (both.low.tolist(), both.high.tolist()) == ([1, -2], [3, 0])
    assert both.mean.tolist() == [2, -1]
    assert both.magnitude.tolist() == pytest.approx([3, 2])
    assert both.samples.shape == (2, 2)
