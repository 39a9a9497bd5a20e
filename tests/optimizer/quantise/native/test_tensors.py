"""Constants in the native engine's forms."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock_optimizer.export.families.bert import distance_bias
from penstock_optimizer.quantise.native.values import by_distance, narrow
from penstock_runtime.engines.native.graph_file import DISTANCES_SPARE


@given(heads=st.integers(1, 3), length=st.integers(1, 300))
def test_every_pair_of_positions_finds_its_bias_by_distance(heads: int, length: int) -> None:
    buckets = np.random.default_rng(length).normal(0, 1, (32, heads)).astype(np.float32)
    bias = distance_bias(buckets, length)

    line = by_distance(bias)

    assert line is not None
    assert line.shape == (heads, 2 * length - 1 + DISTANCES_SPARE)
    query, key = np.mgrid[:length, :length]
    np.testing.assert_array_equal(line[:, key - query + length - 1], bias[0])


@pytest.mark.parametrize("shape", [(1, 2, 4, 5), (2, 2, 4, 4), (2, 4, 4)])
def test_what_is_no_bias_of_pairs_has_no_distances(shape: tuple[int, ...]) -> None:
    assert by_distance(np.zeros(shape, np.float32)) is None


def test_a_bias_that_is_not_the_same_for_all_pairs_of_a_distance_has_no_distances() -> None:
    bias = np.zeros((1, 2, 4, 4), np.float32)
    bias[0, 1, 3, 2] = 1

    assert by_distance(bias) is None


@given(words=st.integers(1, 20), level=st.sampled_from([0.0, 1e-20, 1.0, 1e4]))
def test_16_bit_word_embeddings_are_within_half_a_step(words: int, level: float) -> None:
    vectors = (level * np.random.default_rng(words).normal(0, 1, (words, 32))).astype(np.float32)

    stored, scale = narrow(vectors)

    assert [str(one.dtype) for one in (stored, scale)] == ["int16", "float32"]
    assert (np.abs(stored * scale[:, np.newaxis] - vectors) <= 0.51 * scale[:, np.newaxis]).all()
