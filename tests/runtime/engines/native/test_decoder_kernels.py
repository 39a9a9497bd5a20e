"""The steps of decoders and of sparse models, with each instruction set, against numpy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock_runtime.engines.native.graph_file import GraphStep
from penstock_runtime.engines.native.library import Kernels
from penstock_runtime.rows import Batch, Float
from tests.runtime.engines.native.programs import AVAILABLE, engine, needs_library, run, source
from tests.runtime.engines.native.test_kernels import LINES, SEEDS, WIDTHS, product

pytestmark = needs_library
KERNELS = pytest.mark.parametrize("kernels", AVAILABLE, ids=lambda kernels: kernels.name.lower())
NEAR = 0.012
"""Of the size of the values: attention in 16 bits, as `test_kernels` bounds it number by number."""


def root_mean_square(x: Float, weight: Float, epsilon: float) -> Float:
    wide = x.astype(np.float64)
    return np.asarray(wide / np.sqrt((wide**2).mean(axis=-1, keepdims=True) + epsilon) * weight, np.float32)


@KERNELS
@settings(max_examples=20)
@given(lines=LINES, width=WIDTHS, seed=SEEDS, residual=st.booleans())
def test_root_mean_square_normalisation_equals_numpys(
    *, kernels: Kernels, lines: int, width: int, seed: int, residual: bool
) -> None:
    rng = np.random.default_rng(seed)
    x = rng.normal(0.5, 2, (lines, width)).astype(np.float32)
    tensors = {"g": rng.normal(1, 0.1, width).astype(np.float32)}
    step = GraphStep(
        operator="norm", source=0, target=1, outputs=width, epsilon=1e-6, residual=0 if residual else -1,
        tensors={"weights": "g"},
    )  # fmt: skip

    y = run([step], tensors, x, kernels=kernels, threads=2)

    expected = root_mean_square(x, tensors["g"], 1e-6) + (x if residual else 0)
    np.testing.assert_allclose(y, expected, atol=2e-5)


@KERNELS
def test_heads_are_normalised_one_by_one_and_the_rest_of_a_line_stays(kernels: Kernels) -> None:
    rng = np.random.default_rng(1)
    x = rng.normal(0, 2, (9, 320)).astype(np.float32)
    tensors: dict[str, Any] = {
        "g": rng.normal(1, 0.1, 64).astype(np.float32),
        "w": np.eye(320, dtype=np.float32),
        "b": np.zeros(320, np.float32),
    }
    norm = GraphStep(
        operator="head-norm", source=0, target=0, inputs=64, outputs=192, heads=3, epsilon=1e-6,
        tensors={"weights": "g"},
    )  # fmt: skip
    copy = GraphStep(
        operator="linear32", source=0, target=1, inputs=320, outputs=320, tensors={"weights": "w", "bias": "b"}
    )

    y = run([norm, copy], tensors, x, kernels=kernels)

    expected = x.copy()
    expected[:, 64:256] = root_mean_square(x[:, 64:256].reshape(9, 3, 64), tensors["g"], 1e-6).reshape(9, 192)
    np.testing.assert_allclose(y, expected, atol=2e-5)


def expected_attention(x: Float, allowed: Any, *, heads: int, key_heads: int, width: int, real: int) -> Float:
    """[tokens, heads * width] of x [tokens, (heads + 2 * key_heads) * width]; `allowed`: [tokens, tokens]."""
    tokens = len(x)
    parts = np.split(x.astype(np.float64), [heads * width, (heads + key_heads) * width], axis=1)
    q, k, v = (part.reshape(tokens, -1, width) for part in parts)
    k, v = (np.repeat(part, heads // key_heads, axis=1) for part in (k, v))
    scores = np.einsum("ihd,jhd->hij", q, k) * width**-0.5
    kept = allowed & (np.arange(tokens) < real)
    scores = np.where(kept, scores, -np.inf)
    powers = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return np.asarray(np.einsum("hij,jhd->ihd", powers / powers.sum(-1, keepdims=True), v).reshape(tokens, -1))


@KERNELS
@settings(max_examples=25)
@given(
    tokens=st.sampled_from([1, 2, 15, 16, 17, 31, 32, 33, 63, 65, 130, 300]),
    group=st.sampled_from([1, 2, 3]),
    key_heads=st.integers(1, 2),
    width=st.sampled_from([32, 64, 128, 256]),
    before=st.sampled_from([-1, 0, 1, 5, 16, 40, 130]),
    after=st.sampled_from([-1, 0, 1, 5, 16, 40, 130]),
    padding=st.integers(0, 20),
    seed=SEEDS,
)
def test_queries_attend_to_the_keys_in_their_range_and_share_heads_of_keys(
    *, kernels: Kernels, tokens: int, group: int, key_heads: int, width: int, before: int, after: int, padding: int,
    seed: int,
) -> None:  # fmt: skip
    rng = np.random.default_rng(seed)
    heads, real = group * key_heads, max(1, tokens - padding)
    x = rng.normal(0, 1, (tokens, (heads + 2 * key_heads) * width)).astype(np.float32)
    step = GraphStep(
        operator="attention", source=0, keys=0, values=0, target=1, outputs=heads * width, heads=heads,
        key_heads=key_heads, before=before, after=after, epsilon=width**-0.5,
    )  # fmt: skip

    y = run([step], {}, x, kernels=kernels, threads=2, real=real)

    ahead = np.arange(tokens)[None, :] - np.arange(tokens)[:, None]
    allowed = (ahead >= (-tokens if before < 0 else -before)) & (ahead <= (tokens if after < 0 else after))
    with np.errstate(invalid="ignore"):  # of padding whose range has padding alone
        expected = expected_attention(x, allowed, heads=heads, key_heads=key_heads, width=width, real=real)
    assert np.isfinite(y).all()
    difference = (y - expected)[:real]
    assert np.linalg.norm(difference) <= NEAR * np.linalg.norm(expected[:real])


@KERNELS
@pytest.mark.parametrize("tokens", [1, 16, 512])
def test_the_largest_sums_of_the_widest_heads_do_not_overflow(kernels: Kernels, tokens: int) -> None:
    x = np.full((tokens, 3 * 256), -5.0, np.float32)
    step = GraphStep(operator="attention", source=0, keys=0, values=0, target=1, outputs=256, heads=1, epsilon=1.0)

    y = run([step], {}, x, kernels=kernels)

    np.testing.assert_allclose(y, np.full((tokens, 256), -5.0), rtol=1e-5)


@KERNELS
@pytest.mark.parametrize(("token_id", "other", "places"), [(-1, False, [4, 2]), (3, True, [2, 1]), (3, False, [4, 2])])
def test_the_last_token_of_each_row_is_taken(
    kernels: Kernels, token_id: int, other: bool, places: list[int]
) -> None:  # fmt: skip
    tokens = np.arange(6 * 32, dtype=np.float32).reshape(6, 32)
    first, tensors = source(tokens)
    first = first.model_copy(update={"inputs": 4})
    tensors |= {"words": np.zeros((4, 32), np.int16), "scale": np.ones(4, np.float32)}
    step = GraphStep(operator="last", source=0, target=1, outputs=32, padding=token_id, gated=other)
    ids = np.array([[1, 2, 0, 3, 3, 0], [1, 2, 3, 1, 1, 1]], np.int64)
    mask = np.array([[1, 1, 1, 1, 1, 0], [1, 1, 1, 0, 0, 0]], np.int64)
    made = engine([first, step], tensors, kernels=kernels, per_row=True)
    try:
        found = made.run(Batch(ids, mask, np.zeros_like(ids)))["y"]
    finally:
        made.close()

    np.testing.assert_array_equal(found, tokens[places])


@KERNELS
@pytest.mark.parametrize("bits", [8, 6])
@pytest.mark.parametrize("tokens", [1, 5, 40, 300])
def test_the_largest_result_of_each_row_counts_as_its_logarithm(kernels: Kernels, tokens: int, bits: int) -> None:
    rng = np.random.default_rng(tokens)
    x = rng.normal(0, 1, (tokens, 128)).astype(np.float32)
    step, tensors = product(128, 352, rng, bits=bits)
    real = max(1, tokens - 3)

    each = run([step], tensors, x, kernels=kernels)
    largest = step.model_copy(update={"operator": "largest", "types": 2})
    found = run([largest], tensors, x, kernels=kernels, threads=2, real=real, per_row=True)

    expected = np.log1p(np.log1p(np.maximum(each[:real].max(axis=0), 0)))
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


@KERNELS
@pytest.mark.parametrize("sums", [False, True])
@pytest.mark.parametrize("place", [0, 11, 37])
def test_the_largest_result_of_a_row_with_a_number_that_is_not_finite_is_none(
    kernels: Kernels, sums: bool, place: int
) -> None:
    rng = np.random.default_rng(3)
    x = rng.normal(0, 1, (40, 128)).astype(np.float32)
    x[place, 5] = np.nan
    step, tensors = product(128, 352, rng)
    largest = step.model_copy(update={"operator": "largest", "types": 1, "gated": sums})

    assert np.isnan(run([largest], tensors, x, kernels=kernels, threads=2, real=38, per_row=True)).all()
