"""How many operations one forward pass takes, from the model's configuration: 2 x M x K x N for each matrix product.

Element-wise work (softmax, normalisation, activations) is left out: the ceiling that this is held against is one of
matrix products.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from penstock.tasks import Head

_HIDDEN = ("hidden_size", "dim", "d_model", "n_embd")
_LAYERS = ("num_hidden_layers", "n_layers", "num_layers", "n_layer")
_FEED_FORWARD = ("intermediate_size", "hidden_dim", "ffn_dim", "d_ff", "n_inner")


@dataclass(frozen=True)
class EncoderShape:
    """The sizes that decide an encoder's work."""

    hidden: int
    layers: int
    feed_forward: int
    first_only: bool = False
    """The last layer is computed for the first token alone, which is all that is read of it; its keys and values are of
    all tokens."""

    @classmethod
    def of(cls, config: Mapping[str, Any], *, head: Head = Head.ENCODER, how: str = "") -> EncoderShape | None:
        """From `config.json`, under any of the names that families use; None when a size is missing.

        `head` and `how` (as `ExportedFacts` has it): of the graph. Those that are built from the weights leave out what
        a sequence's classification does not read.
        """
        sizes = [
            next((int(config[name]) for name in names if isinstance(config.get(name), int)), None)
            for names in (_HIDDEN, _LAYERS, _FEED_FORWARD)
        ]
        if None in sizes:
            return None
        hidden, layers, feed_forward = (size for size in sizes if size is not None)
        return cls(hidden, layers, feed_forward, first_only=head is Head.SEQUENCE and how == "builder")

    def operations(self, tokens: int, rows: int = 1) -> int:
        """Multiplications and additions of the encoder's matrix products: projections (query, key, value, output),
        attention scores and their sums, and the two feed-forward products."""
        layer = self._layer(tokens, tokens)
        last = self._layer(tokens, 1) if self.first_only else layer
        return rows * ((self.layers - 1) * layer + last)

    def _layer(self, tokens: int, queries: int) -> int:
        """One layer's, of which only `queries` of the tokens come out."""
        keys_and_values = 2 * 2 * tokens * self.hidden * self.hidden
        queries_and_output = 2 * 2 * queries * self.hidden * self.hidden
        attention = 2 * 2 * queries * tokens * self.hidden
        feed_forward = 2 * 2 * queries * self.hidden * self.feed_forward
        return keys_and_values + queries_and_output + attention + feed_forward
