"""The encoders of T5, mT5, umT5 and FLAN-T5 (sentence-t5): pre-norm layers with RMSNorm, and a bias by distance.

Of a folder with both halves, the encoder alone is read.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from penstock.tasks import Head
from penstock_optimizer.export.families.family import Family
from penstock_optimizer.export.reader import NotBuildable
from penstock_optimizer.export.transformer import (
    Activation,
    AttentionRange,
    Dense,
    DistanceBias,
    Embeddings,
    Encoder,
    Layer,
    RootMeanSquareNorm,
    TokenClassifier,
    Top,
)
from penstock_runtime.models.limits import LONGEST_ROW

BUCKETS, FURTHEST = 32, 128
"""Defaults of `relative_attention_num_buckets` and `relative_attention_max_distance`."""


class T5(Family):
    """Google's encoder with a decoder, without the latter."""

    prefix = "transformer"
    anchor = "encoder.final_layer_norm.weight"
    defaults: ClassVar[Mapping[str, int]] = {
        "vocab_size": 32128, "hidden_size": 512, "d_kv": 64, "d_ff": 2048, "num_layers": 6, "num_heads": 8
    }  # fmt: skip
    keys: ClassVar[Mapping[str, str]] = {"hidden_size": "d_model"}
    default_network: ClassVar[str] = "relu"
    """Of `feed_forward_proj`."""
    shares_bias: ClassVar[bool] = True
    """All layers have the first one's bias by distance."""

    @property
    def epsilon(self) -> float:
        """Epsilon of all normalisations."""
        return self.reader.number("layer_norm_epsilon", 1e-6)

    def encoder(self) -> Encoder:
        """The encoder."""
        gated, activation = self._network()
        layers = range(self.integer("num_layers"))
        shared = self._bias(0) if self.shares_bias else None
        return Encoder(
            embeddings=self.embeddings(),
            layers=tuple(self._layer(index, shared or self._bias(index), gated=gated) for index in layers),
            heads=self.integer("num_heads"),
            activation=activation,
            final_norm=self._norm("encoder.final_layer_norm"),
        )

    def embeddings(self) -> Embeddings:
        """Words alone, under the name that was written."""
        body, names = self.reader.body, ("shared", "encoder.embed_tokens")
        name = next((one for one in names if f"{body.prefix}{one}.weight" in body.weights), names[0])
        return Embeddings(body.table(name, self.integer("vocab_size"), self.hidden), None, None, None)

    def _network(self) -> tuple[bool, Activation]:
        """Whether the networks are gated, and their activation."""
        stated = self.reader.config.get("feed_forward_proj", self.default_network)
        kind, _, name = stated.rpartition("-") if isinstance(stated, str) else ("?", "", "")
        if kind not in {"", "gated"}:
            raise self.reader.invalid(
                "feed_forward_proj", stated, "the name of an activation, with gated- before it or not"
            )
        if stated == "gated-gelu":  # the approximation, by an exception in transformers
            name = "gelu_new"
        known = self.reader.activation_named("feed_forward_proj", name)
        return bool(kind), known

    def _bias(self, index: int) -> DistanceBias:
        """By the distance of query and key, of a layer."""
        reader = self.reader
        buckets = reader.integer("relative_attention_num_buckets", BUCKETS, least=4)
        furthest = reader.integer("relative_attention_max_distance", FURTHEST)
        if furthest <= buckets // 4:
            raise NotBuildable(f"it has {buckets} distance buckets for {furthest} positions")
        name = f"encoder.block.{index}.layer.0.SelfAttention.relative_attention_bias"
        table = reader.body.table(name, buckets, self.integer("num_heads"))
        reach = min(furthest, LONGEST_ROW)
        rows = distance_buckets(np.arange(-reach, reach + 1), buckets, furthest)
        return DistanceBias(np.ascontiguousarray(table[rows].T))

    def _norm(self, name: str) -> RootMeanSquareNorm:
        return RootMeanSquareNorm(self.reader.body.vector((f"{name}.weight",), self.hidden), self.epsilon)

    def _layer(self, index: int, bias: DistanceBias, *, gated: bool) -> Layer:
        body, name, hidden = self.reader.body, f"encoder.block.{index}.layer", self.hidden
        inner, width = self.integer("d_ff"), self.integer("d_kv")
        whole = width * self.integer("num_heads")
        attention, network = f"{name}.0.SelfAttention", f"{name}.1.DenseReluDense"
        query, key, value = (body.dense(f"{attention}.{part}", hidden, whole, bias=False) for part in "qkv")
        up, gate = ("wi_0", "wi_1") if gated else ("wi", "")
        return Layer(
            # The graph divides the scores by the root of the width; T5 does not.
            query=Dense(query.weight * np.float32(math.sqrt(width)), None),
            key=key,
            value=value,
            output=body.dense(f"{attention}.o", whole, hidden, bias=False),
            attention_norm=self._norm(f"{name}.0.layer_norm"),
            up=body.dense(f"{network}.{up}", hidden, inner, bias=False),
            gate=body.dense(f"{network}.{gate}", hidden, inner, bias=False) if gate else None,
            down=body.dense(f"{network}.wo", inner, hidden, bias=False),
            feed_forward_norm=self._norm(f"{name}.1.layer_norm"),
            attends_to=AttentionRange(bias=bias),
        )

    def top(self, head: Head, encoder: Encoder) -> Top:
        """None, or one number for each token and label; other heads read the decoder."""
        match head:
            case Head.ENCODER:
                return None
            case Head.TOKEN:
                return TokenClassifier(self.reader.top.dense("classifier", encoder.hidden, self.labels))
            case _:
                raise NotBuildable("its head reads the decoder's hidden states")


class UMT5(T5):
    """The later multilingual T5: each layer has another bias."""

    default_network = "gated-gelu"
    shares_bias = False


class MT5(T5):
    """The multilingual T5."""

    default_network = "gated-gelu"


def distance_buckets(
    distances: NDArray[np.int64], buckets: int = BUCKETS, furthest: int = FURTHEST
) -> NDArray[np.int64]:
    """The bucket of key position less query position: near ones apart, far ones together, behind before ahead.

    In float32, as torch computes it: a bucket's edge depends on the rounding.
    """
    half, exact = buckets // 2, buckets // 4
    away = np.abs(distances)
    ratio = np.log(np.maximum(away, 1).astype(np.float32) / np.float32(exact))
    far = ratio / np.float32(math.log(furthest / exact)) * np.float32(half - exact)
    bucket = np.where(away < exact, away, np.minimum(exact + far.astype(np.int64), half - 1))
    return bucket + np.where(distances > 0, half, 0)
