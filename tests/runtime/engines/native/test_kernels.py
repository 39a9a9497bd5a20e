"""The arithmetic of each instruction set against numpy, over shapes with all kinds of tails."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import ArtefactError
from penstock_runtime.engines.native.graph_file import DISTANCES_SPARE, Activation, GraphStep
from penstock_runtime.engines.native.library import Kernels
from penstock_runtime.rows import Float
from tests.runtime.engines.native.programs import AVAILABLE, needs_library, run

pytestmark = needs_library
KERNELS = pytest.mark.parametrize("kernels", AVAILABLE, ids=lambda kernels: kernels.name.lower())
LINES = st.sampled_from([*range(1, 26), 31, 32, 33, 48, 63, 64, 65, 100])
WIDTHS = st.sampled_from([32, 64, 96, 128, 160, 384])
BITS = st.sampled_from([8, 8, 7, 6, 5, 4])
SEEDS = st.integers(0, 2**32 - 1)
_erf = np.vectorize(math.erf)


def activated(x: Float, activation: Activation) -> Float:
    wide = x.astype(np.float64)
    match activation:
        case "gelu":
            return np.asarray(wide * 0.5 * (1 + _erf(wide / math.sqrt(2))), np.float32)
        case "relu":
            return np.maximum(x, 0)
        case "gelu-tanh":
            return np.asarray(
                wide / 2 * (1 + np.tanh(math.sqrt(2 / math.pi) * (wide + 0.044715 * wide**3))), np.float32
            )
        case "silu":
            return np.asarray(wide / (1 + np.exp(-wide)), np.float32)
        case "tanh":
            return np.asarray(np.tanh(wide), np.float32)
    return x


def product(
    inputs: int, outputs: int, rng: np.random.Generator, *, activation: Activation = "none", residual: bool = False,
    bits: int = 8,
) -> tuple[GraphStep, dict[str, Any]]:  # fmt: skip
    """An 8-bit product from buffer 0 to buffer 1, whose weights need `bits` bits."""
    tensors: dict[str, Any] = {
        "w": (rng.integers(-128 >> 8 - bits, 128 >> 8 - bits, (inputs, outputs)) << 8 - bits).astype(np.int8),
        "s": rng.uniform(0.001, 0.01, outputs).astype(np.float32),
        "b": rng.normal(0, 1, outputs).astype(np.float32),
        "f": rng.uniform(0.5, 2, inputs).astype(np.float32),
    }
    step = GraphStep(
        operator="linear8", source=0, target=1, inputs=inputs, outputs=outputs, activation=activation,
        residual=0 if residual else -1, tensors={"weights": "w", "scales": "s", "bias": "b"},
    )  # fmt: skip
    return step, tensors


@KERNELS
@settings(max_examples=40)
@given(lines=LINES, inputs=WIDTHS, outputs=WIDTHS, seed=SEEDS, threads=st.integers(1, 4), bits=BITS)
def test_an_8_bit_product_of_numbers_on_the_grid_is_exact_however_few_bits_weights_need(
    *, kernels: Kernels, lines: int, inputs: int, outputs: int, seed: int, threads: int, bits: int
) -> None:
    rng = np.random.default_rng(seed)
    stored, zero = rng.integers(0, 256, (lines, inputs)), rng.integers(0, 256, (lines, 1))
    stored[:, 0], stored[:, -1] = 0, 255  # so that the grid of the row is this one
    x = ((stored - zero) * 2.0**-5).astype(np.float32)
    step, tensors = product(inputs, outputs, rng, bits=bits)

    y = run([step], tensors, x, kernels=kernels, threads=threads)

    whole = (stored - zero) @ tensors["w"].astype(np.int64)
    expected = whole * (2.0**-5 * tensors["s"].astype(np.float64)) + tensors["b"]
    np.testing.assert_allclose(y, expected, rtol=1e-6, atol=2e-5)


@KERNELS
@pytest.mark.parametrize("bits", [8, 6])
@pytest.mark.parametrize(
    ("lines", "inputs"), [(33, 576), (256, 1536), (257, 1024), (300, 512), (523, 640)]
)  # with this number some are summed in parts, and 256 lines at a time
def test_a_product_of_many_inputs_and_lines_is_exact(kernels: Kernels, lines: int, inputs: int, bits: int) -> None:
    rng = np.random.default_rng(lines)
    stored = rng.integers(0, 256, (lines, inputs))
    stored[:, 0], stored[:, -1] = 0, 255
    step, tensors = product(inputs, 96, rng, bits=bits)

    y = run([step], tensors, (stored * 2.0**-5).astype(np.float32), kernels=kernels)

    expected = stored @ tensors["w"].astype(np.int64) * (2.0**-5 * tensors["s"].astype(np.float64)) + tensors["b"]
    np.testing.assert_allclose(y, expected, rtol=1e-6, atol=1e-3)


@KERNELS
@pytest.mark.parametrize("share", [0.0, 0.25, 0.75])
def test_the_zero_point_of_a_line_is_rounded_to_the_nearest(kernels: Kernels, share: float) -> None:
    lowest, highest = -100 - share, 155 - share  # a step of 1
    x = np.full((3, 32), lowest, np.float32)
    x[:, 1:] = np.linspace(lowest, highest, 31, dtype=np.float32)
    tensors = {"w": np.eye(32, dtype=np.int8), "s": np.ones(32, np.float32), "b": np.zeros(32, np.float32)}
    step, _ = product(32, 32, np.random.default_rng(0))

    y = run([step], tensors, x, kernels=kernels)

    assert np.abs(y - x).max() <= 0.5001
    assert y[0, 0] == -np.rint(100 + share)


@KERNELS
@settings(max_examples=25)
@given(lines=LINES, inputs=WIDTHS, outputs=WIDTHS, seed=SEEDS)
def test_an_8_bit_product_is_off_by_half_a_step_for_each_input_at_most(
    kernels: Kernels, lines: int, inputs: int, outputs: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    x = (rng.normal(0, 1, (lines, inputs)) * rng.uniform(0.1, 10, (lines, 1))).astype(np.float32)
    step, tensors = product(inputs, outputs, rng)
    step = step.model_copy(update={"tensors": {**step.tensors, "factors": "f"}})

    y = run([step], tensors, x, kernels=kernels)

    scaled, weight = x * tensors["f"], tensors["w"] * tensors["s"]
    span = np.maximum(scaled.max(axis=1), 0) - np.minimum(scaled.min(axis=1), 0)
    allowed = 0.51 * (span / 255)[:, None] * np.abs(weight).sum(axis=0) + 1e-3
    assert (np.abs(y - (scaled @ weight + tensors["b"])) <= allowed).all()


@KERNELS
@pytest.mark.parametrize("activation", ["gelu", "relu", "tanh", "gelu-tanh", "silu"])
def test_activations_and_the_residual_sum_follow_the_product(kernels: Kernels, activation: Activation) -> None:
    rng = np.random.default_rng(3)
    x = rng.normal(0, 1, (9, 96)).astype(np.float32)
    plain, tensors = product(96, 96, rng)
    step = plain.model_copy(update={"activation": activation, "residual": 0})

    before = run([plain], tensors, x, kernels=kernels)
    after = run([step], tensors, x, kernels=kernels)

    atol = 4e-5 if activation == "gelu" else 1e-5
    np.testing.assert_allclose(after, activated(before, activation) + x, atol=atol, rtol=1e-6)


@KERNELS
def test_a_gated_product_is_multiplied_with_the_residual(kernels: Kernels) -> None:
    rng = np.random.default_rng(4)
    x = rng.normal(0, 1, (9, 96)).astype(np.float32)
    plain, tensors = product(96, 96, rng)
    step = plain.model_copy(update={"gated": True, "residual": 0})

    before = run([plain], tensors, x, kernels=kernels)
    after = run([step], tensors, x, kernels=kernels)

    np.testing.assert_allclose(after, before * x, atol=1e-5, rtol=1e-6)


@KERNELS
@pytest.mark.parametrize("threads", [1, 3])
def test_products_of_one_source_quantise_it_once_and_answer_the_same(kernels: Kernels, threads: int) -> None:
    rng = np.random.default_rng(5)
    x = rng.normal(0, 1, (70, 96)).astype(np.float32)
    first, tensors = product(96, 64, rng)
    other, more = product(96, 64, rng)
    names = {part: f"{name} of the other" for part, name in other.tensors.items()}
    tensors |= {f"{name} of the other": array for name, array in more.items()}
    other = other.model_copy(update={"target": 2, "tensors": names})

    together = run([first, other], tensors, x, kernels=kernels, threads=threads)

    np.testing.assert_array_equal(together, run([other], tensors, x, kernels=kernels))


@KERNELS
@pytest.mark.parametrize(("heads", "half"), [(1, 16), (2, 8), (3, 32), (4, 20), (1, 64), (8, 2)])
def test_rotary_positions_turn_pairs_of_numbers(kernels: Kernels, heads: int, half: int) -> None:
    rng = np.random.default_rng(half)
    tokens, width = 37, heads * 2 * half
    x = rng.normal(0, 1, (tokens, -(-width // 32) * 64)).astype(np.float32)  # the rest of a line stays as it is
    angles = rng.uniform(0, 6, (50, half)).astype(np.float32)
    step = GraphStep(
        operator="rotate", source=0, target=0, outputs=width, heads=heads, positions=50,
        tensors={"cosines": "c", "sines": "s"},
    )  # fmt: skip
    tensors = {"c": np.cos(angles), "s": np.sin(angles)}
    weights = {"w": np.eye(x.shape[1], dtype=np.float32), "b": np.zeros(x.shape[1], np.float32)}
    every = GraphStep(
        operator="linear32", source=0, target=1, inputs=x.shape[1], outputs=x.shape[1],
        tensors={"weights": "w", "bias": "b"},
    )  # fmt: skip

    y = run([step, every], {**tensors, **weights}, x, kernels=kernels)

    pairs = x[:, :width].reshape(tokens, heads, 2, half)
    turned = (pairs[:, :, 0] + 1j * pairs[:, :, 1]) * np.exp(1j * angles[:tokens])[:, np.newaxis]
    expected = np.concatenate([turned.real, turned.imag], axis=2).reshape(tokens, width)
    np.testing.assert_allclose(y[:, :width], expected, atol=2e-6)
    np.testing.assert_array_equal(y[:, width:], x[:, width:])


@KERNELS
@pytest.mark.parametrize(("activation", "bound"), [("gelu", 3e-5), ("tanh", 5e-7), ("gelu-tanh", 5e-7), ("silu", 5e-7)])
def test_activations_are_within_their_stated_error(kernels: Kernels, activation: Activation, bound: float) -> None:
    x = np.linspace(-12, 12, 32 * 500, dtype=np.float32).reshape(500, 32)
    tensors = {"w": np.eye(32, dtype=np.float32), "b": np.zeros(32, np.float32)}
    step = GraphStep(
        operator="linear32", source=0, target=1, inputs=32, outputs=32, activation=activation,
        tensors={"weights": "w", "bias": "b"},
    )  # fmt: skip

    y = run([step], tensors, x, kernels=kernels)

    assert (np.abs(y - activated(x, activation)) <= bound * (1 + np.abs(x))).all()


def in_16_bits(x: Float) -> Float:
    """Rounded to the nearest bfloat16, halves to even."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    return np.asarray((bits + 0x7FFF + (bits >> 16 & 1) & np.uint32(0xFFFF0000)).view(np.float32))


def in_whole_numbers(x: Float, largest: Float) -> Float:
    """Rounded to the nearest of 4,095 steps from 0 to the largest magnitude."""
    most = np.float32(4095)
    return np.asarray(np.rint(x * (most / largest)) * (largest / most), np.float32)


def as_multiplied(kernels: Kernels, x: Float, axes: tuple[int, ...], real: int | None = None) -> Float:
    """What the attention of the kernels multiplies instead of `x`, whose last axis is a head. `axes`: those whose
    numbers have one scale; `real`: the number of first lines that decide the scale."""
    if x.shape[-1] % 32:
        return x  # floats of 32 bits
    if kernels is Kernels.AVX512_VNNI:
        return in_whole_numbers(x, np.abs(x[:real]).max(axis=axes, keepdims=True))
    return in_16_bits(x) if kernels >= Kernels.AVX512_BF16 else x


def attention(
    kernels: Kernels, x: Float, *, heads: int, width: int, real: int, bias: Float | None = None
) -> tuple[Float, Float]:
    """[tokens, heads * width] as numpy has it, of what the kernels multiply; and how far off they may be, since each
    share is rounded too. `x` is [tokens, 3 * heads * width]; `bias` [heads, tokens, real] is added to scores."""
    tokens = len(x)
    q, k, v = (part.reshape(tokens, heads, width) for part in np.split(x, 3, axis=1))
    q = as_multiplied(kernels, q, (2,))
    k, v = (as_multiplied(kernels, part, (0, 2), real) for part in (k, v))
    if width % 32:
        kernels = Kernels.AVX2
    scores = np.einsum("ihd,jhd->hij", q.astype(np.float64), k[:real].astype(np.float64)) * width**-0.5
    scores += 0.0 if bias is None else bias
    powers = np.exp(scores - scores.max(axis=-1, keepdims=True))
    total = powers.sum(axis=-1, keepdims=True)
    answer = np.einsum("hij,jhd->ihd", powers / total, v[:real])
    size = np.einsum("hij,jhd->ihd", powers / total, np.abs(v[:real]))
    relative, steps = 0.0, np.zeros(1)
    if kernels is Kernels.AVX512_VNNI:
        # Half a step of each share, and of their sum as much again.
        relative = 4e-4
        steps = np.swapaxes(1 / np.minimum(32_767 * total, 500_000), 0, 1) * np.abs(v[:real]).sum(axis=0)
    elif kernels >= Kernels.AVX512_BF16:
        relative = 2.0**-8 + 4e-4
    allowed = 2e-5 + relative * size + steps
    return answer.reshape(tokens, heads * width), np.asarray(allowed).reshape(tokens, heads * width)


@KERNELS
@settings(max_examples=25)
@given(
    tokens=st.sampled_from([1, 2, 3, 4, 5, 8, 15, 16, 17, 31, 33, 64, 65, 130, 270]),
    heads=st.integers(1, 5),
    width=st.sampled_from([32, 48, 64]),
    seed=SEEDS,
    threads=st.integers(1, 4),
    padding=st.integers(0, 40),
)
def test_attention_is_softmax_over_the_kept_tokens(
    *, kernels: Kernels, tokens: int, heads: int, width: int, seed: int, threads: int, padding: int
) -> None:
    rng = np.random.default_rng(seed)
    heads += heads * width % 32 > 0
    hidden, real = heads * width, max(1, tokens - padding)
    x = rng.normal(0, 2, (tokens, 3 * hidden)).astype(np.float32)
    step = GraphStep(
        operator="attention", source=0, keys=0, values=0, target=1, outputs=hidden, heads=heads, epsilon=width**-0.5
    )

    y = run([step], {}, x, kernels=kernels, threads=threads, real=real)

    expected, allowed = attention(kernels, x, heads=heads, width=width, real=real)
    assert (np.abs(y - expected) <= allowed).all()


@KERNELS
@settings(max_examples=25)
@given(
    tokens=st.sampled_from([1, 2, 7, 15, 16, 17, 32, 33, 65, 130, 270]),
    positions=st.sampled_from([270, 271, 512]),
    heads=st.integers(1, 3),
    width=st.sampled_from([32, 48, 64]),
    seed=SEEDS,
    padding=st.integers(0, 40),
)
def test_the_bias_of_a_score_depends_on_the_distance_of_key_and_query(
    *, kernels: Kernels, tokens: int, positions: int, heads: int, width: int, seed: int, padding: int
) -> None:
    rng = np.random.default_rng(seed)
    heads += heads * width % 32 > 0
    hidden, real = heads * width, max(1, tokens - padding)
    x = rng.normal(0, 1, (tokens, 3 * hidden)).astype(np.float32)
    bias = rng.normal(0, 3, (heads, 2 * positions - 1 + DISTANCES_SPARE)).astype(np.float32)
    bias[:, 2 * positions - 1 :] = 1e20  # never used
    step = GraphStep(
        operator="attention", source=0, keys=0, values=0, target=1, outputs=hidden, heads=heads, epsilon=width**-0.5,
        positions=positions, tensors={"distances": "bias"},
    )  # fmt: skip

    y = run([step], {"bias": bias}, x, kernels=kernels, threads=2, real=real)

    behind = np.arange(real)[None, :] - np.arange(tokens)[:, None]
    added = bias[:, behind + positions - 1]
    expected, allowed = attention(kernels, x, heads=heads, width=width, real=real, bias=added)
    assert (np.abs(y - expected) <= allowed).all()


@KERNELS
@settings(max_examples=25)
@given(
    tokens=st.sampled_from([1, 2, 7, 15, 16, 17, 32, 33, 65, 130, 270]),
    positions=st.sampled_from([270, 288, 300]),
    heads=st.integers(1, 3),
    width=st.sampled_from([32, 48, 64, 96]),
    kinds=st.sampled_from([("distance_keys",), ("distance_queries",), ("distance_keys", "distance_queries")]),
    seed=SEEDS,
    padding=st.integers(0, 40),
)
def test_products_with_the_vectors_of_distances_are_added_to_scores(
    *, kernels: Kernels, tokens: int, positions: int, heads: int, width: int, kinds: tuple[str, ...], seed: int,
    padding: int,
) -> None:  # fmt: skip
    rng = np.random.default_rng(seed)
    heads += heads * width % 32 > 0
    hidden, real = heads * width, max(1, tokens - padding)
    x = rng.normal(0, 1, (tokens, 3 * hidden)).astype(np.float32)
    rows = rng.permutation(np.arange(2 * positions - 1) % 50).astype(np.int16)
    tensors = {kind: rng.normal(0, 0.2, (heads, 50, width)).astype(np.float32) for kind in kinds}
    step = GraphStep(
        operator="attention", source=0, keys=0, values=0, target=1, inputs=50, outputs=hidden, heads=heads,
        epsilon=width**-0.5, positions=positions,
        tensors={**{kind: kind for kind in kinds}, "distance_rows": "numbers"},
    )  # fmt: skip

    y = run([step], {**tensors, "numbers": rows}, x, kernels=kernels, threads=2, real=real)

    q, k = (part.reshape(tokens, heads, width) for part in np.split(x, 3, axis=1)[:2])
    q, k = as_multiplied(kernels, q, (2,)), as_multiplied(kernels, k, (0, 2), real)[:real]
    number = np.arange(real)[None, :] - np.arange(tokens)[:, None] + positions - 1
    added = np.zeros((heads, tokens, real), np.float32)
    for kind, vectors in tensors.items():
        of_distances = as_multiplied(kernels, vectors, (1, 2)).astype(np.float64)[:, rows]
        if kind == "distance_keys":
            added += np.take_along_axis(np.einsum("ihd,htd->hit", q, of_distances), number[None], axis=2)
        else:
            products = np.take_along_axis(np.einsum("jhd,htd->hjt", k, of_distances), number.T[None], axis=2)
            added += products.transpose(0, 2, 1)
    expected, allowed = attention(kernels, x, heads=heads, width=width, real=real, bias=added)
    assert (np.abs(y - expected) <= allowed).all()


@KERNELS
@pytest.mark.parametrize("wrong", [{"number": 3}, {"number": -1}, {"before": 4}])
def test_distances_without_a_vector_and_windows_with_vectors_are_refused(
    kernels: Kernels, wrong: dict[str, int]
) -> None:
    numbers = np.array([0, 1, wrong.get("number", 2)], np.int16)
    step = GraphStep(
        operator="attention", source=0, keys=0, values=0, target=1, inputs=3, outputs=32, heads=1, epsilon=1.0,
        positions=2, before=wrong.get("before", -1), tensors={"distance_keys": "v", "distance_rows": "n"},
    )  # fmt: skip

    with pytest.raises(ArtefactError, match="do not fit together"):
        run(
            [step],
            {"v": np.zeros((1, 3, 32), np.float32), "n": numbers},
            np.zeros((2, 96), np.float32),
            kernels=kernels,
        )


@KERNELS
def test_scores_far_apart_neither_overflow_nor_lose_their_sum(kernels: Kernels) -> None:
    x = np.zeros((40, 96), np.float32)
    x[:, 0], x[:, 32] = 300, np.linspace(-300, 300, 40)
    x[:, 64:] = np.arange(40)[:, None]
    step = GraphStep(operator="attention", source=0, keys=0, values=0, target=1, outputs=32, heads=1, epsilon=1.0)

    y = run([step], {}, x, kernels=kernels)

    np.testing.assert_allclose(y, np.full((40, 32), 39.0), rtol=1e-6)


@KERNELS
@pytest.mark.parametrize("tokens", [1, 15, 16, 512, 3000])
@pytest.mark.parametrize("number", [5.0, -5.0])
def test_the_largest_sums_that_attention_can_have_do_not_overflow(kernels: Kernels, tokens: int, number: float) -> None:
    x = np.full((tokens, 3 * 128), number, np.float32)
    step = GraphStep(operator="attention", source=0, keys=0, values=0, target=1, outputs=128, heads=1, epsilon=1.0)

    y = run([step], {}, x, kernels=kernels)

    np.testing.assert_allclose(y, np.full((tokens, 128), number), rtol=1e-5)


@KERNELS
def test_attention_to_nothing_but_zeros_is_zero(kernels: Kernels) -> None:
    step = GraphStep(operator="attention", source=0, keys=0, values=0, target=1, outputs=64, heads=2, epsilon=1.0)

    y = run([step], {}, np.zeros((20, 3 * 64), np.float32), kernels=kernels)

    np.testing.assert_array_equal(y, 0.0)


@KERNELS
@settings(max_examples=25)
@given(lines=LINES, width=WIDTHS, seed=SEEDS, level=st.sampled_from([0.0, 1.0, 100.0]))
def test_layer_normalisation_equals_numpys(kernels: Kernels, lines: int, width: int, seed: int, level: float) -> None:
    rng = np.random.default_rng(seed)
    x = (rng.normal(0, 1, (lines, width)) + level).astype(np.float32)
    tensors = {"g": rng.normal(1, 0.1, width).astype(np.float32), "b": rng.normal(0, 1, width).astype(np.float32)}
    step = GraphStep(
        operator="norm", source=0, target=1, outputs=width, epsilon=1e-12, tensors={"weights": "g", "bias": "b"}
    )

    y = run([step], tensors, x, kernels=kernels)

    wide = x.astype(np.float64)
    expected = (wide - wide.mean(axis=1, keepdims=True)) / wide.std(axis=1, keepdims=True) * tensors["g"] + tensors["b"]
    np.testing.assert_allclose(y, expected, atol=2e-5 * (1 + level))


@KERNELS
@settings(max_examples=25)
@given(lines=LINES, inputs=WIDTHS, outputs=st.integers(1, 40), seed=SEEDS)
def test_a_small_product_stays_in_float(kernels: Kernels, lines: int, inputs: int, outputs: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    x = rng.normal(0, 1, (lines, inputs)).astype(np.float32)
    tensors = {
        "w": rng.normal(0, 0.1, (outputs, inputs)).astype(np.float32),
        "b": rng.normal(0, 1, outputs).astype(np.float32),
    }
    step = GraphStep(
        operator="linear32", source=0, target=1, inputs=inputs, outputs=outputs,
        tensors={"weights": "w", "bias": "b"},
    )  # fmt: skip

    y = run([step], tensors, x, kernels=kernels)

    np.testing.assert_allclose(y, x @ tensors["w"].T + tensors["b"], atol=2e-5)


@KERNELS
def test_a_row_of_equal_numbers_and_one_of_zeros_are_no_division_by_zero(kernels: Kernels) -> None:
    rng = np.random.default_rng(5)
    step, tensors = product(64, 64, rng)
    x = np.zeros((3, 64), np.float32)
    x[1], x[2] = 5.0, -5.0

    y = run([step], tensors, x, kernels=kernels)

    weight = (tensors["w"] * tensors["s"]).astype(np.float64)
    np.testing.assert_allclose(y, x @ weight + tensors["b"], rtol=1e-4, atol=1e-3)


NOT_FINITE = pytest.mark.parametrize("number", [math.nan, -math.nan, math.inf, -math.inf])


@KERNELS
@NOT_FINITE
@pytest.mark.parametrize("activation", ["none", "gelu", "relu", "gelu-tanh", "silu", "tanh"])
def test_a_line_with_a_number_that_is_not_finite_has_no_results(
    kernels: Kernels, number: float, activation: Activation
) -> None:
    rng = np.random.default_rng(6)
    step, tensors = product(96, 64, rng, activation=activation)
    if activation == "gelu":  # a model has factors of inputs or none
        step = step.model_copy(update={"tensors": {**step.tensors, "factors": "f"}})
    x = rng.normal(0, 1, (9, 96)).astype(np.float32)
    expected = run([step], tensors, x, kernels=kernels, threads=2)
    for place in (0, 17, 95):
        broken = x.copy()
        broken[4, place] = number

        y = run([step], tensors, broken, kernels=kernels, threads=2)

        assert np.isnan(y[4]).all()
        np.testing.assert_array_equal(np.delete(y, 4, axis=0), np.delete(expected, 4, axis=0))


@KERNELS
@NOT_FINITE
@pytest.mark.parametrize("width", [32, 48])
@pytest.mark.parametrize("part", ["query", "key", "value"])
def test_attention_to_a_number_that_is_not_finite_is_not_finite(
    kernels: Kernels, number: float, width: int, part: str
) -> None:
    x = np.random.default_rng(7).normal(0, 1, (40, 3 * 2 * width)).astype(np.float32)
    x[37, {"query": 3, "key": 2 * width + 3, "value": 4 * width + 3}[part]] = number
    step = GraphStep(
        operator="attention", source=0, keys=0, values=0, target=1, outputs=2 * width, heads=2, epsilon=width**-0.5
    )

    y = run([step], {}, x, kernels=kernels, threads=2, real=38)

    with np.errstate(invalid="ignore"):
        # A key whose score is minus infinity is one that is not attended to.
        lines = [37] if part == "query" else np.flatnonzero((part == "value") | ~(x[:38, 3] * number < 0))
    assert len(lines)
    for line in lines:
        assert not np.isfinite(y[line, :width]).all(), line
    if part == "query":
        assert np.isfinite(y[:37]).all()


@pytest.mark.parametrize("bits", [8, 6, 4])
@pytest.mark.parametrize("inputs", [32, 96, 320, 512])
def test_every_instruction_set_gives_the_bits_of_the_exact_sums_of_a_product(bits: int, inputs: int) -> None:
    """Scales are powers of two, so that only the last addition rounds: no instruction set may differ by a bit."""
    rng = np.random.default_rng(inputs)
    step, tensors = product(inputs, 160, rng, bits=bits)
    tensors["s"], tensors["b"] = np.full(160, 2.0**-9, np.float32), np.zeros(160, np.float32)
    for lines in (1, 2, 3, 4, 5, 7, 8, 9, 16, 17, 33, 40):
        stored, zero = rng.integers(0, 256, (lines, inputs)), rng.integers(0, 256, (lines, 1))
        stored[:, 0], stored[:, -1] = 0, 255  # so that the grid of the row is this one
        x = ((stored - zero) * 2.0**-5).astype(np.float32)
        expected = ((stored - zero) @ tensors["w"].astype(np.int64)).astype(np.float32) * np.float32(2.0**-14)
        for kernels in AVAILABLE:
            y = run([step], tensors, x, kernels=kernels)
            np.testing.assert_array_equal(y, expected, err_msg=f"{kernels.name}, {lines} lines")


def test_every_instruction_set_gives_the_same_8_bit_sums() -> None:
    rng = np.random.default_rng(11)
    x = rng.normal(0, 1, (37, 384)).astype(np.float32)
    step, tensors = product(384, 160, rng)

    results = [run([step], tensors, x, kernels=kernels) for kernels in AVAILABLE]

    for result in results[1:]:
        np.testing.assert_allclose(result, results[0], atol=2e-5, rtol=1e-6)


def test_a_product_whose_sums_may_not_fit_into_32_bits_is_refused() -> None:
    step, tensors = product(2**16, 32, np.random.default_rng(1))

    with pytest.raises(ArtefactError, match="do not fit together"):
        run([step], tensors, np.zeros((1, 2**16), np.float32), kernels=Kernels.PLAIN)
