"""How many operations one forward pass takes, from the model's configuration: 2 x M x K x N for each matrix product.

Element-wise work (softmax, normalisation, activations) is left out: the ceiling that this is held against is one of
matrix products.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_HIDDEN = ("hidden_size", "dim", "d_model", "n_embd")
_LAYERS = ("num_hidden_layers", "n_layers", "num_layers", "n_layer")
_FEED_FORWARD = ("intermediate_size", "hidden_dim", "ffn_dim", "d_ff", "n_inner")


@dataclass(frozen=True)
class EncoderShape:
    """The sizes that decide an encoder's work."""

    hidden: int
    layers: int
    feed_forward: int

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> EncoderShape | None:
        """From `config.json`, under any of the names that families use; None when a size is missing."""
        sizes = [
            next((int(config[name]) for name in names if isinstance(config.get(name), int)), None)
            for names in (_HIDDEN, _LAYERS, _FEED_FORWARD)
        ]
        if None in sizes:
            return None
        hidden, layers, feed_forward = (size for size in sizes if size is not None)
        return cls(hidden, layers, feed_forward)

    def operations(self, tokens: int, rows: int = 1) -> int:
        """Multiplications and additions of the encoder's matrix products: projections (query, key, value, output),
        attention scores and their sums, and the two feed-forward products."""
        projections = 4 * 2 * tokens * self.hidden * self.hidden
        attention = 2 * 2 * tokens * tokens * self.hidden
        feed_forward = 2 * 2 * tokens * self.hidden * self.feed_forward
        return rows * self.layers * (projections + attention + feed_forward)
