"""Operations of one forward pass, from configurations of every family."""

from __future__ import annotations

from typing import Any

import pytest

from penstock_optimizer.operations import EncoderShape

MINILM = {"hidden_size": 384, "num_hidden_layers": 6, "intermediate_size": 1536}
DISTILBERT = {"dim": 768, "n_layers": 6, "hidden_dim": 3072}


@pytest.mark.parametrize(
    ("config", "shape"),
    [
        (MINILM, EncoderShape(384, 6, 1536)),
        (DISTILBERT, EncoderShape(768, 6, 3072)),
        ({"d_model": 512, "num_layers": 6, "d_ff": 2048}, EncoderShape(512, 6, 2048)),
        ({"hidden_size": 384}, None),
        ({**MINILM, "num_hidden_layers": None}, None),
    ],
)
def test_sizes_are_read_under_any_family_name(config: dict[str, Any], shape: EncoderShape | None) -> None:
    assert EncoderShape.of(config) == shape


def test_operations_equal_those_counted_by_hand() -> None:
    # One layer, hidden 2, feed-forward 8, 3 tokens: 4 projections of 3x2x2, scores 3x3x2, sums 3x3x2, 2 x 3x2x8.
    assert EncoderShape(2, 1, 8).operations(3) == 2 * (4 * 12 + 18 + 18 + 2 * 48)


def test_operations_of_minilm_at_128_tokens_are_twice_its_weights_per_token_and_attention() -> None:
    shape = EncoderShape.of(MINILM)

    assert shape is not None
    weights = 6 * (4 * 384 * 384 + 2 * 384 * 1536)
    assert shape.operations(128) == 2 * 128 * weights + 6 * 4 * 128 * 128 * 384
    assert shape.operations(128, rows=3) == 3 * shape.operations(128)
