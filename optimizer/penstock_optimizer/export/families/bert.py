"""BERT and its descendants that have its layers: ERNIE, DistilBERT, ELECTRA, ALBERT, RoBERTa, data2vec, MPNet."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar

import numpy as np

from penstock_optimizer.export.families.family import DEFAULTS, ClassifierNames, Family, LayerNames, MaskNames
from penstock_optimizer.export.families.t5 import BUCKETS, distance_buckets
from penstock_optimizer.export.reader import NotBuildable
from penstock_optimizer.export.transformer import Activation, Embeddings, Encoder, Layer, Positions
from penstock_runtime.rows import Float


class Bert(Family):
    """Google's encoder; MiniLM, BGE, E5, GTE, SPLADE and many more have its form."""

    prefix = "bert"
    classifier_names = ClassifierNames("pooler.dense", Activation.TANH, pooled=True)
    mask_names = MaskNames(
        "cls.predictions.transform.dense", "cls.predictions.transform.LayerNorm", "cls.predictions.decoder",
        "cls.predictions.bias",
    )  # fmt: skip


class Ernie(Bert):
    """Baidu's encoder: BERT, unless it uses task ids."""

    prefix = "ernie"

    def encoder(self) -> Encoder:
        """As BERT's; NotBuildable with task ids."""
        if self.folder.config.get("use_task_id"):
            raise NotBuildable("it uses task ids")
        return super().encoder()


class DistilBert(Family):
    """BERT without token types and pooler, under other names."""

    prefix = "distilbert"
    keys: ClassVar[Mapping[str, str]] = {
        "hidden_size": "dim",
        "num_hidden_layers": "n_layers",
        "num_attention_heads": "n_heads",
        "intermediate_size": "hidden_dim",
        "hidden_act": "activation",
    }
    defaults: ClassVar[Mapping[str, int]] = {**DEFAULTS, "num_hidden_layers": 6}
    fixed_epsilon = 1e-12
    default_types = None
    layers = "transformer.layer"
    layer_names = LayerNames(
        "attention.q_lin", "attention.k_lin", "attention.v_lin", "attention.out_lin", "sa_layer_norm",
        "ffn.lin1", "ffn.lin2", "output_layer_norm",
    )  # fmt: skip
    classifier_names = ClassifierNames("pre_classifier", Activation.RELU)
    mask_names = MaskNames("vocab_transform", "vocab_layer_norm", "vocab_projector")


class Electra(Family):
    """BERT's layers; narrower embeddings that are projected; heads with GELU. Discriminators and generators."""

    prefix = "electra"
    defaults: ClassVar[Mapping[str, int]] = {
        **DEFAULTS,
        "hidden_size": 256,
        "num_attention_heads": 4,
        "intermediate_size": 1024,
    }
    narrow = True
    classifier_names = ClassifierNames("classifier.dense", Activation.GELU, "classifier.out_proj")
    mask_names = MaskNames(
        "generator_predictions.dense", "generator_predictions.LayerNorm", "generator_lm_head",
        activation=Activation.GELU,
    )  # fmt: skip

    def embeddings(self) -> Embeddings:
        """As BERT's, projected where the widths differ."""
        embeddings = super().embeddings()
        if self.embedding_width == self.hidden:
            return embeddings
        projection = self.reader.body.dense("embeddings_project", self.embedding_width, self.hidden)
        return replace(embeddings, projection=projection)


class Albert(Family):
    """Groups of layers, each group used for several layers in a row; its weights are written once."""

    prefix = "albert"
    defaults: ClassVar[Mapping[str, int]] = {
        **DEFAULTS,
        "hidden_size": 4096,
        "num_attention_heads": 64,
        "intermediate_size": 16384,
    }
    default_activation = "gelu_new"
    narrow = True
    layer_names = LayerNames(
        "attention.query", "attention.key", "attention.value", "attention.dense", "attention.LayerNorm",
        "ffn", "ffn_output", "full_layer_layer_norm",
    )  # fmt: skip
    classifier_names = ClassifierNames("pooler", Activation.TANH, pooled=True)
    mask_names = MaskNames("predictions.dense", "predictions.LayerNorm", "predictions.decoder", "predictions.bias")

    def embeddings(self) -> Embeddings:
        """As BERT's, always projected."""
        projection = self.reader.body.dense("encoder.embedding_hidden_mapping_in", self.embedding_width, self.hidden)
        return replace(super().embeddings(), projection=projection)

    def all_layers(self) -> tuple[Layer, ...]:
        """Each group is used for an equal share of the layers."""
        layers, groups = self.integer("num_hidden_layers"), self.reader.integer("num_hidden_groups", 1)
        inner_layers = range(self.reader.integer("inner_group_num", 1))
        read = [
            [self.layer(f"encoder.albert_layer_groups.{group}.albert_layers.{index}") for index in inner_layers]
            for group in range(groups)
        ]
        return tuple(layer for index in range(layers) for layer in read[int(index / (layers / groups))])


class Roberta(Family):
    """BERT's layers under BERT's names; positions counted from the padding id on; other heads."""

    prefix = "roberta"
    positions = Positions.CUMULATIVE
    default_padding = 1
    classifier_names = ClassifierNames("classifier.dense", Activation.TANH, "classifier.out_proj")
    mask_names = MaskNames(
        "lm_head.dense", "lm_head.layer_norm", "lm_head.decoder", "lm_head.bias", activation=Activation.GELU
    )


class Data2VecText(Roberta):
    """Meta's data2vec for text: RoBERTa under another prefix."""

    prefix = "data2vec_text"


LONGEST = 2048
"""Positions: the bias is written out for every pair, so it grows with the square."""


class MPNet(Roberta):
    """RoBERTa's positions and heads; no token types; a bias on the scores by the distance of query and key."""

    prefix = "mpnet"
    defaults: ClassVar[Mapping[str, int]] = {**DEFAULTS, "vocab_size": 30527}
    default_types = None
    layer_names = LayerNames(
        "attention.attn.q", "attention.attn.k", "attention.attn.v", "attention.attn.o", "attention.LayerNorm"
    )
    padding_id = 1
    """Written into the model's code."""

    def encoder(self) -> Encoder:
        """As BERT's, with the bias of every distance looked up ahead of time."""
        encoder = super().encoder()
        rows = self.reader.integer("relative_attention_num_buckets", BUCKETS)
        length = self.integer("max_position_embeddings") - self.padding_id - 1
        if rows < BUCKETS or length > LONGEST:
            raise NotBuildable(f"it has {rows} distance buckets for {length} positions")
        table = self.reader.body.table("encoder.relative_attention_bias", rows, encoder.heads)
        return replace(encoder, distance_bias=distance_bias(table, length))


def distance_bias(table: Float, length: int) -> Float:
    """From [buckets, heads] to [1, heads, length, length]: the bias of a query (third axis) on a key (fourth)."""
    distances = np.arange(length)[None, :] - np.arange(length)[:, None]
    bias: Float = table[distance_buckets(distances)].transpose(2, 0, 1)[None]
    return np.ascontiguousarray(bias)
