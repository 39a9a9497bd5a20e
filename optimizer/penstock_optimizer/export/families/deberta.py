"""DeBERTa-v2 and -v3: BERT's layers with disentangled attention: scores depend on contents and distances."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from penstock.tasks import Head
from penstock_optimizer.export.families.family import DEFAULTS, Family, LayerNames, MaskNames
from penstock_optimizer.export.reader import NotBuildable
from penstock_optimizer.export.transformer import (
    Classifier,
    Convolution,
    DistanceVectors,
    Embeddings,
    Encoder,
    Layer,
    Norm,
    Positions,
    Top,
    Transform,
)
from penstock_runtime.models.limits import LONGEST_ROW
from penstock_runtime.rows import Float

KEYS, QUERIES = "c2p", "p2c"
"""In `pos_att_type`: queries meet the distances' keys, and keys their queries."""

NEW_MASK_NAMES = MaskNames(
    "lm_predictions.lm_head.dense", "lm_predictions.lm_head.LayerNorm", "", "lm_predictions.lm_head.bias"
)
"""With `legacy: false` in the configuration; the words are then always tied."""


class DebertaV2(Family):
    """Microsoft's encoder; many zero-shot classifiers are it."""

    prefix = "deberta"
    defaults: ClassVar[Mapping[str, int]] = {
        **DEFAULTS,
        "vocab_size": 128100,
        "hidden_size": 1536,
        "num_hidden_layers": 24,
        "num_attention_heads": 24,
        "intermediate_size": 6144,
    }
    layer_names = LayerNames(
        "attention.self.query_proj", "attention.self.key_proj", "attention.self.value_proj",
    )  # fmt: skip
    mask_names = MaskNames(
        "cls.predictions.transform.dense", "cls.predictions.transform.LayerNorm", "cls.predictions.decoder",
        "cls.predictions.bias",
    )  # fmt: skip

    @property
    def epsilon(self) -> float:
        """Of every normalisation."""
        return self.reader.number("layer_norm_eps", 1e-7)

    @property
    def embedding_width(self) -> int:
        """Width of the embeddings; by default the width of the hidden states."""
        return self.reader.integer("embedding_size", self.hidden)

    def embeddings(self) -> Embeddings:
        """Words, positions and types as far as the configuration has them; normalised after the projection, if any."""
        reader, width, hidden = self.reader, self.embedding_width, self.hidden
        body, types = reader.body, reader.integer("type_vocab_size", 0, least=0)
        words = body.table("embeddings.word_embeddings", self.integer("vocab_size"), width)
        positions = typed = None
        if reader.flag("position_biased_input", default=True):
            positions = body.table("embeddings.position_embeddings", self.integer("max_position_embeddings"), width)
        if types:
            typed = body.table("embeddings.token_type_embeddings", types, width)
        if width != hidden:
            # Projected ahead of time: a sum of projections is the projection of the sum.
            projection = body.table("embeddings.embed_proj", hidden, width).T
            words = words @ projection
            positions = None if positions is None else positions @ projection
            typed = None if typed is None else typed @ projection
        norm = body.norm("embeddings.LayerNorm", hidden, self.epsilon)
        return Embeddings(words, positions, typed, norm, Positions.INDEX, padding_id=0)

    def encoder(self) -> Encoder:
        """As BERT's, with distances and a convolution where the configuration has them."""
        encoder = super().encoder()
        heads = encoder.heads
        if self.reader.integer("attention_head_size", self.hidden // heads) != self.hidden // heads:
            raise NotBuildable("its attention_head_size is not hidden_size / num_attention_heads")
        used = [kind for kind in (KEYS, QUERIES) if kind in self._kinds()]
        relative = bool(used) and self.reader.flag("relative_attention", default=False)
        layers = encoder.layers
        if used:
            table = self._distance_table() if relative else None
            layers = tuple(
                self._disentangled(layer, table, used, heads, f"{self.layers}.{index}.attention.self")
                for index, layer in enumerate(layers)
            )
        rows = self._distance_rows() if relative else None
        return replace(encoder, layers=layers, distance_rows=rows, convolution=self._convolution())

    def _kinds(self) -> list[str]:
        kinds = self.reader.config.get("pos_att_type") or []
        if isinstance(kinds, str):
            kinds = [kind.strip() for kind in kinds.lower().split("|")]
        if not isinstance(kinds, list):
            raise self.reader.invalid("pos_att_type", kinds, "a list of names, such as c2p and p2c")
        return kinds

    def _disentangled(self, layer: Layer, table: Float | None, used: list[str], heads: int, name: str) -> Layer:
        """The layer with its vectors of the distances.

        Scores are divided by the root of the width and of the number of terms. The graph divides by the former; the
        latter is taken into the queries here.
        """
        reader, hidden = self.reader, self.hidden
        terms, width = math.sqrt(1 + len(used)), math.sqrt(hidden // heads)
        query = layer.query.scaled(1 / terms)
        if table is None:
            return replace(layer, query=query)
        shared = reader.flag("share_att_key", default=False)
        vectors: dict[str, Float] = {}
        for kind, own, part in ((KEYS, layer.key, "pos_key_proj"), (QUERIES, layer.query, "pos_query_proj")):
            if kind in used:
                dense = own if shared else reader.body.dense(f"{name}.{part}", hidden, hidden)
                product = table @ dense.weight.T + (0 if dense.bias is None else dense.bias)
                # Queries are scaled already where the keys of distances meet them; keys are not.
                product = product / np.float32(width if kind == KEYS else width * terms)
                vectors[kind] = np.ascontiguousarray(product.reshape(len(table), heads, -1).transpose(1, 0, 2))
        return replace(layer, query=query, distances=DistanceVectors(vectors.get(KEYS), vectors.get(QUERIES)))

    def _distance_table(self) -> Float:
        """[2 * span, hidden]: the vectors that all layers project."""
        reader, hidden = self.reader, self.hidden
        table = reader.body.table("encoder.rel_embeddings", 2 * self._span, hidden)
        stated = reader.config.get("norm_rel_ebd", "none")
        if not isinstance(stated, str):
            raise reader.invalid("norm_rel_ebd", stated, "none or layer_norm")
        if "layer_norm" not in [part.strip() for part in stated.lower().split("|")]:
            return table
        return _normalised(table, reader.body.norm("encoder.LayerNorm", hidden, self.epsilon))

    @property
    def _furthest(self) -> int:
        """`max_relative_positions`, or by default the number of positions."""
        stated = self.reader.integer("max_relative_positions", -1, least=-1)
        return stated if stated > 0 else self.integer("max_position_embeddings")

    @property
    def _buckets(self) -> int:
        """`position_buckets`; 0: distances are not put into buckets."""
        return max(0, self.reader.integer("position_buckets", -1, least=-1))

    @property
    def _span(self) -> int:
        return self._buckets or self._furthest

    def _distance_rows(self) -> NDArray[np.int64]:
        positions = min(self.integer("max_position_embeddings"), LONGEST_ROW)
        if self._buckets and not 1 <= self._buckets // 2 < self._furthest - 1:
            raise NotBuildable(f"it has {self._buckets} distance buckets for {self._furthest} positions")
        distances = np.arange(-positions, positions + 1)
        buckets = log_buckets(distances, self._buckets, self._furthest) if self._buckets else distances
        return np.clip(buckets + self._span, 0, 2 * self._span - 1)

    def _convolution(self) -> Convolution | None:
        reader, hidden = self.reader, self.hidden
        size = reader.integer("conv_kernel_size", 0, least=0)
        if not size:
            return None
        if size % 2 == 0:
            raise NotBuildable(f"its conv_kernel_size is {size}, an even number")
        groups = reader.integer("conv_groups", 1)
        shape = (hidden, hidden // groups, size)
        return Convolution(
            weight=reader.weights.take(f"{reader.body.prefix}encoder.conv.conv.weight", shape),
            bias=reader.body.vector(("encoder.conv.conv.bias",), hidden),
            groups=groups,
            activation=reader.activation("conv_act", "tanh"),
            norm=reader.body.norm("encoder.conv.LayerNorm", hidden, self.epsilon),
        )

    def top(self, head: Head, encoder: Encoder) -> Top:
        """As BERT's, with another pooler, and with another masked language model where `legacy` is false."""
        reader, hidden = self.reader, self.hidden
        if head is Head.SEQUENCE:
            if reader.integer("pooler_hidden_size", hidden) != hidden:
                raise NotBuildable("its pooler_hidden_size is not its hidden_size")
            activation = reader.activation("pooler_hidden_act", "gelu")
            transform = Transform(reader.top.dense("pooler.dense", hidden, hidden), activation)
            return Classifier(transform, reader.top.dense("classifier", hidden, self.labels))
        if head is Head.MASKED_LM and not reader.flag("legacy", default=True):
            return self.mask_filler(encoder, NEW_MASK_NAMES)
        return super().top(head, encoder)

    def vocabulary_weight(self, words: Float, names: MaskNames) -> Float:
        """The word vectors before their projection, unless they are untied."""
        words = self.reader.body.table("embeddings.word_embeddings", len(words), self.embedding_width)
        return words if names is NEW_MASK_NAMES else super().vocabulary_weight(words, names)


def _normalised(table: Float, norm: Norm) -> Float:
    centred = table - table.mean(axis=1, keepdims=True)
    deviation = np.sqrt((centred**2).mean(axis=1, keepdims=True) + np.float32(norm.epsilon))
    return np.asarray(centred / deviation * norm.weight + norm.bias, np.float32)


def log_buckets(distances: NDArray[np.int64], buckets: int, furthest: int) -> NDArray[np.int64]:
    """The bucket of a distance: its own up to half of the `buckets`, then shared ones that grow up to `furthest`.

    In float32, as torch computes it: a bucket's edge depends on the rounding.
    """
    half = buckets // 2
    away = np.abs(distances)
    ratio = np.log(np.maximum(away, half).astype(np.float32) / np.float32(half))
    share = ratio / np.log(np.float32((furthest - 1) / half))
    far = np.ceil(share * np.float32(half - 1)).astype(np.int64) + half
    return np.where(away <= half, distances, far * np.sign(distances))
