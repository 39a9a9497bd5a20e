"""The weights of the native engine's files, and the decoders that it refuses."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock_optimizer.export.transformer import Activation
from penstock_optimizer.quantise.decoder.native_file import why_not_native, write_native
from tests.optimizer.quantise.decoder.random_decoders import random_decoder, unpacked


def test_weights_of_llama_cpp_s_q4_1_keep_their_sixteen_levels() -> None:
    random = np.random.default_rng(0)
    scale = random.uniform(0.01, 0.1, (64, 3, 1)).astype(np.float16).astype(np.float32)
    minimum = (random.uniform(-16, 1, (64, 3, 1)).astype(np.float16) * scale).astype(np.float32)
    steps = random.integers(0, 16, (64, 3, 32))
    steps[:, :, 0], steps[:, :, 1] = 0, 15  # the format's own quantisation always uses both ends
    weight = (steps * scale + minimum).astype(np.float32).reshape(64, 96)

    # Levels are rounded to whole numbers, and steps to 16ths of these.
    limit = np.abs(weight).max(1, keepdims=True) / 127
    found = np.abs(unpacked(weight, 4) - weight)
    assert (found <= 1.1 * limit).all()
    assert (found / limit).mean() < 0.35


def test_weights_of_8_bits_are_off_by_half_a_step_of_their_output_at_most() -> None:
    random = np.random.default_rng(1)
    weight = (random.normal(0, 0.05, (96, 160)) * random.uniform(0.1, 3, (96, 1))).astype(np.float32)
    weight[0] = 0

    step = np.abs(weight).max(1, keepdims=True) / 127
    assert (np.abs(unpacked(weight, 8) - weight) <= step * 0.5001).all()


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), spread=st.sampled_from([0.0, 0.5, 2.0]), shift=st.sampled_from([0.0, 0.3, -1.0]))
def test_weights_of_4_bits_are_off_by_half_a_step_of_their_group_and_a_little_of_their_output(
    seed: int, spread: float, shift: float
) -> None:
    random = np.random.default_rng(seed)
    size = np.exp(random.normal(0, spread, (64, 5, 1)))
    weight = ((random.normal(0, 0.05, (64, 5, 32)) + 0.05 * shift) * size).astype(np.float32)
    weight[0, :2] = 0

    whole = unpacked(weight.reshape(64, 160), 4).reshape(64, 5, 32)

    largest, reach = np.abs(weight).max((1, 2)), (weight.max(2) - weight.min(2)).max(1)
    least = np.maximum(largest / 127, reach / 239)[:, None]  # a whole number
    limit = (weight.max(2) - weight.min(2)) / 15 * 0.5 + 1.1 * least
    assert (np.abs(whole - weight).max(2) <= limit).all()


@pytest.mark.parametrize(
    ("decoder", "reason"),
    [
        ({"hidden": 48}, "multiples of 32, not 48"),
        ({"heads": 3, "key_heads": 3}, "multiples of 32, not 64 and 48"),
        ({"activation": Activation.SIGMOID}, "the activation sigmoid"),
    ],
)
def test_a_decoder_that_is_not_computed_is_refused_with_the_reason(
    decoder: dict[str, object], reason: str, tmp_path: Path
) -> None:
    made = random_decoder(0, **decoder)  # type: ignore[arg-type]
    assert reason in str(why_not_native(made))
    with pytest.raises(ValueError, match=reason):
        write_native(made, 8, tmp_path / "model.native")


def test_the_file_of_a_decoder_is_always_the_same(tmp_path: Path) -> None:
    for name in ("one", "other"):
        write_native(random_decoder(2, biased=True, tied=False), 4, tmp_path / name)
    assert (tmp_path / "one").read_bytes() == (tmp_path / "other").read_bytes()
