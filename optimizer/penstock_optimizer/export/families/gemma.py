"""Gemma 3 for texts (EmbeddingGemma): Llama's layers with norms before and after each half, windows in most layers.

EmbeddingGemma's tokens attend to all (`use_bidirectional_attention`), within a window on both sides in most layers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar

import numpy as np

from penstock_optimizer.export.families.decoder_family import FULL, SLIDING, DecoderFamily
from penstock_optimizer.export.reader import NotBuildable
from penstock_optimizer.export.rotary import rotary_of, stated_rotary, table
from penstock_optimizer.export.transformer import AttentionRange, Embeddings, Encoder, Layer, RootMeanSquareNorm, Rotary

THETAS = {FULL: ("rope_theta", 1_000_000.0), SLIDING: ("rope_local_base_freq", 10_000.0)}
"""Where transformers 4 has the base of the angles, and its default."""
PATTERN = 6
"""Default of `sliding_window_pattern`: the last of this number of layers has no window."""


class Gemma3(DecoderFamily):
    """Google's decoder, and the encoder that was made of it."""

    defaults: ClassVar[Mapping[str, int]] = {
        "vocab_size": 262208,
        "hidden_size": 2304,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "intermediate_size": 9216,
        "max_position_embeddings": 131072,
    }
    keys: ClassVar[Mapping[str, str]] = {"hidden_act": "hidden_activation"}
    default_activation = "gelu_pytorch_tanh"
    default_key_heads = 4
    has_head_norms = True
    tied_by_default = True

    @property
    def causal(self) -> bool:
        """Unless it is stated otherwise."""
        return not self.reader.flag("use_bidirectional_attention", default=False)

    @property
    def head_width(self) -> int:
        """Values of a head, by default not a share of the hidden states."""
        return self.reader.integer("head_dim", 256)

    def biased(self) -> tuple[bool, bool, bool]:
        """By one field."""
        attention = self.reader.flag("attention_bias", default=False)
        return attention, attention, False

    def encoder(self) -> Encoder:
        """The model without its head. NotBuildable where scores are capped, which Gemma 2 does."""
        if self.reader.config.get("attn_logit_softcapping") is not None:
            raise NotBuildable("its attn_logit_softcapping is not null")
        return super().encoder()

    def embeddings(self) -> Embeddings:
        """Words alone, times the root of the width."""
        return replace(super().embeddings(), scale=math.sqrt(self.hidden))

    def norm(self, name: str, width: int = 0) -> RootMeanSquareNorm:
        """Their weights are the distances from 1."""
        norm = super().norm(name, width)
        return replace(norm, weight=norm.weight + np.float32(1))

    def _kinds(self) -> list[str]:
        pattern, layers = self.reader.integer("sliding_window_pattern", PATTERN), self.integer("num_hidden_layers")
        return self.kinds([SLIDING if (layer + 1) % pattern else FULL for layer in range(layers)])

    def attends_to(self, index: int) -> AttentionRange:
        """A window on one side or, where the model is not causal, half of it on each."""
        if self._kinds()[index] == FULL:
            return AttentionRange(causal=self.causal)
        window = self.reader.integer("sliding_window", 4096)
        return self.windowed(window if self.causal else window // 2 + 1)

    def rotaries(self) -> list[Rotary]:
        """The angles of each layer, by its kind."""
        reader, kinds, width = self.reader, self._kinds(), self.head_width
        stated, found = table(reader, "rope_parameters"), {}
        for kind in set(kinds):
            key, theta = THETAS[kind]
            if stated:
                parameters = stated.get(kind) or {}
                if not isinstance(parameters, dict):
                    raise reader.invalid(f"rope_parameters.{kind}", parameters, "an object")
                found[kind] = rotary_of(reader, parameters, self.longest, width, theta=theta)
            elif kind == FULL:
                found[kind] = stated_rotary(reader, self.longest, width, theta=theta, key=key)
            else:  # never scaled
                base = {"rope_theta": reader.number(key, theta)}
                found[kind] = rotary_of(reader, base, self.longest, width, theta=theta)
        return [found[kind] for kind in kinds]

    def numbered_layer(self, index: int, angles: Rotary | None) -> Layer:
        """With the norms of both results; the scale of the scores is taken into the norm of the queries."""
        layer, name = super().numbered_layer(index, angles), f"layers.{index}"
        scale = math.sqrt(self.head_width / self.reader.integer("query_pre_attn_scalar", 256))
        query_norm = self.norm(f"{name}.self_attn.q_norm", self.head_width)
        return replace(
            layer,
            query_norm=replace(query_norm, weight=query_norm.weight * np.float32(scale)),
            attention_output_norm=self.norm(f"{name}.post_attention_layernorm"),
            feed_forward_norm=self.norm(f"{name}.pre_feedforward_layernorm"),
            feed_forward_output_norm=self.norm(f"{name}.post_feedforward_layernorm"),
        )
