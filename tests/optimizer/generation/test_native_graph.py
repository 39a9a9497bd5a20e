"""The weights of the native engine's files, and the decoders that it refuses."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from penstock_optimizer.export.encoder import Activation
from penstock_optimizer.generation.native_graph import why_not_native, write_native
from tests.optimizer.generation.random_decoders import random_decoder, unpacked


def test_weights_of_llama_cpp_s_q4_1_are_kept_exactly() -> None:
    random = np.random.default_rng(0)
    scale = random.uniform(0.001, 0.1, (64, 3, 1)).astype(np.float16).astype(np.float32)
    minimum = random.normal(0, 0.5, (64, 3, 1)).astype(np.float16).astype(np.float32)
    steps = random.integers(0, 16, (64, 3, 32))
    steps[:, :, 0], steps[:, :, 1] = 0, 15  # the format's own quantisation always uses both ends
    weight = (steps * scale + minimum).astype(np.float32).reshape(64, 96)

    np.testing.assert_allclose(unpacked(weight, 4), weight, rtol=0, atol=1e-6)


@pytest.mark.parametrize(("bits", "steps"), [(8, 254), (4, 15)])
def test_other_weights_are_off_by_half_a_step_of_their_group_at_most(bits: int, steps: int) -> None:
    random = np.random.default_rng(1)
    weight = (random.normal(0, 0.05, (96, 160)) * random.uniform(0.1, 3, (96, 1))).astype(np.float32)
    weight[0, :32] = 0

    grouped = weight.reshape(96, 5, 32)
    reach = 2 * np.abs(grouped).max(2) if bits == 8 else grouped.max(2) - grouped.min(2)
    # The scale itself is rounded to float16.
    limit = reach / steps * 0.5 + np.abs(grouped).max(2) * 2.0**-10
    assert (np.abs(unpacked(weight, bits) - weight).reshape(96, 5, 32).max(2) <= limit).all()


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
