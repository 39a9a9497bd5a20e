"""GPT-2: Llama's order of the parts, with LayerNorm, a table of positions, biases everywhere and no gates."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import ClassVar

import numpy as np

from penstock.tasks import Head
from penstock_optimizer.export.families.decoder_family import DecoderFamily
from penstock_optimizer.export.families.family import parts
from penstock_optimizer.export.transformer import (
    AnyNorm,
    Dense,
    Embeddings,
    Encoder,
    Layer,
    Rotary,
    TokenClassifier,
    Top,
)


class Gpt2(DecoderFamily):
    """OpenAI's decoder."""

    prefix = "transformer"
    anchor = "wte.weight"
    defaults: ClassVar[Mapping[str, int]] = {
        "vocab_size": 50257,
        "hidden_size": 768,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "max_position_embeddings": 1024,
    }
    keys: ClassVar[Mapping[str, str]] = {
        "hidden_size": "n_embd",
        "num_hidden_layers": "n_layer",
        "num_attention_heads": "n_head",
        "max_position_embeddings": "n_positions",
        "hidden_act": "activation_function",
    }
    default_activation = "gelu_new"
    tied_by_default = True

    @property
    def epsilon(self) -> float:
        """Epsilon of all normalisations."""
        return self.reader.number("layer_norm_epsilon", 1e-5)

    @property
    def heads(self) -> int:
        """Number of heads, which share the hidden states evenly."""
        return self.attention_heads

    @property
    def key_heads(self) -> int:
        """Heads of keys and values: as many as of queries."""
        return self.heads

    @property
    def head_width(self) -> int:
        """Values of a head."""
        return self.hidden // self.heads

    @property
    def inner(self) -> int:
        """Width of the feed-forward network."""
        return self.reader.integer("n_inner") if self.reader.config.get("n_inner") else 4 * self.hidden

    def layer_norm(self, name: str) -> AnyNorm:
        """A normalisation of the hidden states."""
        return self.reader.body.norm(name, self.hidden, self.epsilon)

    def final_norm(self) -> AnyNorm:
        """After the last layer."""
        return self.layer_norm("ln_f")

    def embeddings(self) -> Embeddings:
        """Words and positions."""
        body, hidden = self.reader.body, self.hidden
        words = body.table("wte", self.integer("vocab_size"), hidden)
        positions = body.table("wpe", self.integer("max_position_embeddings"), hidden)
        return Embeddings(words, positions, types=None, norm=None)

    def rotaries(self) -> Sequence[Rotary | None]:
        """There are none."""
        return [None] * self.integer("num_hidden_layers")

    def numbered_layer(self, index: int, angles: Rotary | None) -> Layer:
        """One layer; a scale of the scores that other models do not have is taken into the queries."""
        name, hidden = f"h.{index}", self.hidden
        query, key, value = parts(self.transposed(f"{name}.attn.c_attn", hidden, 3 * hidden), 3)
        scale = 1.0 if self.reader.flag("scale_attn_weights", default=True) else math.sqrt(self.head_width)
        if self.reader.flag("scale_attn_by_inverse_layer_idx", default=False):
            scale /= index + 1
        return Layer(
            query=query if scale == 1.0 else query.scaled(scale),
            key=key,
            value=value,
            output=self.transposed(f"{name}.attn.c_proj", hidden, hidden),
            attention_norm=self.layer_norm(f"{name}.ln_1"),
            up=self.transposed(f"{name}.mlp.c_fc", hidden, self.inner),
            down=self.transposed(f"{name}.mlp.c_proj", self.inner, hidden),
            feed_forward_norm=self.layer_norm(f"{name}.ln_2"),
            rotary=angles,
            attends_to=self.attends_to(index),
        )

    def top(self, head: Head, encoder: Encoder) -> Top:
        """Only the head of tokens has another name than in the other families."""
        if head is Head.TOKEN:
            return TokenClassifier(self.reader.top.dense("classifier", encoder.hidden, self.labels))
        return super().top(head, encoder)

    def transposed(self, name: str, width_in: int, width_out: int) -> Dense:
        """A linear layer, which is stored as [in, out]."""
        stored = self.reader.body.table(name, width_in, width_out)
        return Dense(np.ascontiguousarray(stored.T), self.reader.body.vector((f"{name}.bias",), width_out))
