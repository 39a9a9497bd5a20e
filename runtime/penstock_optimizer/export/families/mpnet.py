"""MPNet."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from penstock_optimizer.export.encoder import Embeddings, Encoder, Layer, Positions
from penstock_optimizer.export.families.roberta import Roberta
from penstock_optimizer.export.reader import NotBuildable
from penstock_runtime.rows import Float

BUCKETS = 32
MAX_DISTANCE = 128
"""Both are written into the model's code; its configuration has a say in the table's size only."""
PADDING_ID = 1
"""As well."""
LONGEST = 2048
"""Positions: the bias is written out for every pair, so it grows with the square."""


class MPNet(Roberta):
    """RoBERTa's positions and heads; no token types; a bias on the scores by the distance of query and key."""

    prefix = "mpnet"

    def embeddings(self) -> Embeddings:
        """Words and positions."""
        reader, width = self.reader, self.hidden
        return Embeddings(
            words=reader.table("embeddings.word_embeddings", reader.integer("vocab_size", 30527), width),
            positions=reader.table(
                "embeddings.position_embeddings", reader.integer("max_position_embeddings", 512), width
            ),
            types=None,
            norm=reader.norm("embeddings.LayerNorm", width, self.epsilon),
            position_kind=Positions.CUMULATIVE,
            padding_id=PADDING_ID,
        )

    def encoder(self) -> Encoder:
        """As BERT's, with the bias of every distance looked up ahead of time."""
        encoder = super().encoder()
        rows = self.reader.integer("relative_attention_num_buckets", BUCKETS)
        length = len(encoder.embeddings.positions) - PADDING_ID - 1
        if rows < BUCKETS or length > LONGEST:
            raise NotBuildable(f"it has {rows} distance buckets for {length} positions")
        table = self.reader.table("encoder.relative_attention_bias", rows, encoder.heads)
        return replace(encoder, distance_bias=distance_bias(table, length))

    def layer(self, name: str) -> Layer:
        """One layer."""
        reader, hidden, epsilon = self.reader, self.hidden, self.epsilon
        inner = reader.integer("intermediate_size", self.default_inner)
        return Layer(
            query=reader.dense(f"{name}.attention.attn.q", hidden, hidden),
            key=reader.dense(f"{name}.attention.attn.k", hidden, hidden),
            value=reader.dense(f"{name}.attention.attn.v", hidden, hidden),
            output=reader.dense(f"{name}.attention.attn.o", hidden, hidden),
            attention_norm=reader.norm(f"{name}.attention.LayerNorm", hidden, epsilon),
            up=reader.dense(f"{name}.intermediate.dense", hidden, inner),
            down=reader.dense(f"{name}.output.dense", inner, hidden),
            output_norm=reader.norm(f"{name}.output.LayerNorm", hidden, epsilon),
        )


def distance_bias(table: Float, length: int) -> Float:
    """From [buckets, heads] to [1, heads, length, length]: the bias of a query (third axis) on a key (fourth)."""
    distances = np.arange(length)[None, :] - np.arange(length)[:, None]
    bias: Float = table[distance_buckets(distances)].transpose(2, 0, 1)[None]
    return np.ascontiguousarray(bias)


def distance_buckets(distances: NDArray[np.int64]) -> NDArray[np.int64]:
    """The bucket of key position less query position: near ones apart, far ones together, behind before ahead.

    In float32, as torch computes it: a bucket's edge depends on the rounding.
    """
    half, exact = BUCKETS // 2, BUCKETS // 4
    away = np.abs(distances)
    ratio = np.log(np.maximum(away, 1).astype(np.float32) / np.float32(exact))
    far = ratio / np.float32(math.log(MAX_DISTANCE / exact)) * np.float32(half - exact)
    bucket = np.where(away < exact, away, np.minimum(exact + far.astype(np.int64), half - 1))
    return bucket + np.where(distances > 0, half, 0)
