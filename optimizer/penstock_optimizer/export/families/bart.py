"""BART, of which classifiers for natural language inference are used: an encoder and a decoder over the same tokens.

The classifier reads the decoder's state of the last end-of-text token. Here it is found in each row by itself:
transformers refuses batches with different numbers of them in the rows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar

from penstock.tasks import Head
from penstock_optimizer.export.families.family import Family
from penstock_optimizer.export.reader import NotBuildable, no_head
from penstock_optimizer.export.transformer import (
    Activation,
    AttentionRange,
    Classifier,
    CrossAttention,
    DecoderHalf,
    Dense,
    Embeddings,
    Encoder,
    Last,
    Layer,
    MaskFiller,
    Pooled,
    SpanClassifier,
    Top,
    Transform,
)
from penstock_runtime.models.folder import ModelFolder
from penstock_runtime.rows import Float

POSITIONS_SKIPPED = 2
"""Rows at the start of the position table that are never used."""
MUST_BE: Mapping[str, bool] = {
    "normalize_before": False,
    "normalize_embedding": True,
    "add_final_layer_norm": False,
    "static_position_embeddings": False,
}
"""Fields of old files, with the only value that the graph computes."""


class Bart(Family):
    """Meta's encoder with a decoder. In a model without a head, the hidden states are the decoder's."""

    prefix = "model"
    anchor = "encoder.layernorm_embedding.weight"
    defaults: ClassVar[Mapping[str, int]] = {
        "vocab_size": 50265, "hidden_size": 1024, "max_position_embeddings": 1024, "eos_token_id": 2,
        "decoder_start_token_id": 2,
        **{f"{half}_layers": 12 for half in ("encoder", "decoder")},
        **{f"{half}_ffn_dim": 4096 for half in ("encoder", "decoder")},
        **{f"{half}_attention_heads": 16 for half in ("encoder", "decoder")},
    }  # fmt: skip
    keys: ClassVar[Mapping[str, str]] = {"hidden_size": "d_model", "hidden_act": "activation_function"}
    fixed_epsilon = 1e-5

    def __init__(self, folder: ModelFolder) -> None:
        """NotBuildable as for `Family`."""
        super().__init__(folder)
        for name, known in MUST_BE.items():
            if folder.config.get(name, known) != known:
                raise NotBuildable(f"its {name} is {folder.config[name]}")

    def encoder(self) -> Encoder:
        """Both halves."""
        words = self._words()
        decoder = DecoderHalf(
            start_id=self.reader.integer("decoder_start_token_id", self.defaults["decoder_start_token_id"], least=0),
            embeddings=self._half_embeddings("decoder", words),
            layers=self._half_layers("decoder"),
            heads=self._heads("decoder"),
        )
        return Encoder(
            embeddings=self._half_embeddings("encoder", words),
            layers=self._half_layers("encoder"),
            heads=self._heads("encoder"),
            activation=self.reader.activation(self.key("hidden_act"), self.default_activation),
            decoder=decoder,
        )

    def _heads(self, half: str) -> int:
        key = f"{half}_attention_heads"
        return self.reader.heads(key, self.defaults[key], self.key("hidden_size"), self.hidden)

    def _words(self) -> Float:
        """The table that both halves and the vocabulary share, under the name that was written."""
        body, names = self.reader.body, ("shared", "encoder.embed_tokens", "decoder.embed_tokens")
        name = next((one for one in names if f"{body.prefix}{one}.weight" in body.weights), names[0])
        return body.table(name, self.integer("vocab_size"), self.hidden)

    def _half_embeddings(self, half: str, words: Float) -> Embeddings:
        body, hidden = self.reader.body, self.hidden
        rows = self.integer("max_position_embeddings") + POSITIONS_SKIPPED
        positions = body.table(f"{half}.embed_positions", rows, hidden)[POSITIONS_SKIPPED:]
        scaled = self.reader.flag("scale_embedding", default=False)
        norm = body.norm(f"{half}.layernorm_embedding", hidden, self.epsilon)
        return Embeddings(words, positions, None, norm, scale=math.sqrt(hidden) if scaled else 1.0)

    def _half_layers(self, half: str) -> tuple[Layer, ...]:
        return tuple(
            self._half_layer(half, f"{half}.layers.{index}") for index in range(self.integer(f"{half}_layers"))
        )

    def _half_layer(self, half: str, name: str) -> Layer:
        body, hidden, inner = self.reader.body, self.hidden, self.integer(f"{half}_ffn_dim")

        def products(attention: str) -> tuple[Dense, Dense, Dense, Dense]:
            query, key, value, output = (
                body.dense(f"{name}.{attention}.{part}_proj", hidden, hidden) for part in ("q", "k", "v", "out")
            )
            return query, key, value, output

        query, key, value, output = products("self_attn")
        layer = Layer(
            query=query,
            key=key,
            value=value,
            output=output,
            attention_norm=body.norm(f"{name}.self_attn_layer_norm", hidden, self.epsilon),
            up=body.dense(f"{name}.fc1", hidden, inner),
            down=body.dense(f"{name}.fc2", inner, hidden),
            feed_forward_norm=body.norm(f"{name}.final_layer_norm", hidden, self.epsilon),
        )
        if half == "encoder":
            return layer
        norm = body.norm(f"{name}.encoder_attn_layer_norm", hidden, self.epsilon)
        return replace(
            layer, attends_to=AttentionRange(causal=True), cross=CrossAttention(*products("encoder_attn"), norm)
        )

    def top(self, head: Head, encoder: Encoder) -> Top:
        """The layers of this head."""
        reader, hidden = self.reader, encoder.hidden
        match head:
            case Head.ENCODER:
                return None
            case Head.SEQUENCE:
                if "classification_head.dense.weight" not in reader.weights:
                    raise no_head(self.folder, head)
                transform = Transform(reader.top.dense("classification_head.dense", hidden, hidden), Activation.TANH)
                out = reader.top.dense("classification_head.out_proj", hidden, self.labels)
                last = Last(reader.integer("eos_token_id", self.defaults["eos_token_id"], least=0), other=False)
                return Classifier(transform, out, Pooled.LAST, last)
            case Head.SPAN:
                return SpanClassifier(reader.top.dense("qa_outputs", hidden, 2))
            case Head.MASKED_LM:
                words = self._words()
                bias = reader.weights.take(f"{reader.top.prefix}final_logits_bias", (1, len(words)))
                tied = reader.flag("tie_word_embeddings", default=True)
                weight = words if tied else reader.top.table("lm_head", *words.shape)
                return MaskFiller(None, Dense(weight, bias[0]), self.mask_id())
            case Head.TOKEN | Head.SPARSE | Head.CAUSAL_LM:
                raise no_head(self.folder, head)
