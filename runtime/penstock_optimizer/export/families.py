"""The families that the builder knows: names of weights, defaults of configuration, heads.

`Family` reads a model under the names that BERT's descendants kept. A family states what it calls otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from penstock.errors import UnsupportedModel
from penstock.tasks import Head
from penstock_optimizer.export.encoder import (
    Activation,
    Classifier,
    Dense,
    Embeddings,
    Encoder,
    Layer,
    MaskFiller,
    Positions,
    SpanClassifier,
    TokenClassifier,
    Top,
)
from penstock_optimizer.export.reader import NotBuildable, Reader
from penstock_runtime.models.folder import ModelFolder
from penstock_runtime.rows import Float
from penstock_runtime.tokens.tokenizer import Tokenizer


@dataclass(frozen=True)
class LayerNames:
    """Names of a layer's tensors, below that of the layer."""

    query: str = "attention.self.query"
    key: str = "attention.self.key"
    value: str = "attention.self.value"
    output: str = "attention.output.dense"
    attention_norm: str = "attention.output.LayerNorm"
    up: str = "intermediate.dense"
    down: str = "output.dense"
    output_norm: str = "output.LayerNorm"


@dataclass(frozen=True)
class ClassifierNames:
    """Of a sequence classification: dense, activation, dense."""

    dense: str
    activation: Activation
    out: str = "classifier"
    pooled: bool = False
    """The first layer is the encoder's pooler, not a part of the head."""


@dataclass(frozen=True)
class MaskNames:
    """Of a masked language model: dense, activation, norm, then the product with the vocabulary."""

    dense: str
    norm: str
    projection: str
    bias: str = ""
    """Where the bias of the projection may be as well."""
    activation: Activation | None = None
    """None: the encoder's."""


DEFAULTS: Mapping[str, int] = {
    "vocab_size": 30522,
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "intermediate_size": 3072,
    "max_position_embeddings": 512,
}
"""BERT's, of the fields of config.json that every family has."""
NARROW_WIDTH = 128
"""The default of `embedding_size`, in families whose embeddings are narrower than the hidden states."""


class Family:
    """One model, read as a member of the family. Widths are those of torch: [out, in]."""

    prefix: ClassVar[str]
    """transformers' `base_model_prefix`."""
    anchor: ClassVar[str] = "embeddings.word_embeddings.weight"
    """A tensor that every model of the family has, as it is called in a model without a head."""
    defaults: ClassVar[Mapping[str, int]] = DEFAULTS
    keys: ClassVar[Mapping[str, str]] = {}
    """Fields of config.json that the family calls otherwise than BERT."""
    default_activation: ClassVar[str] = "gelu"
    fixed_epsilon: ClassVar[float | None] = None
    """Where it is written into the model's code, not its configuration."""
    positions: ClassVar[Positions] = Positions.INDEX
    default_padding: ClassVar[int] = 0
    """Of `pad_token_id`."""
    has_types: ClassVar[bool] = True
    narrow: ClassVar[bool] = False
    """Embeddings have a width of their own."""
    layers: ClassVar[str] = "encoder.layer"
    layer_names: ClassVar[LayerNames] = LayerNames()
    classifier_names: ClassVar[ClassifierNames]
    mask_names: ClassVar[MaskNames]

    def __init__(self, folder: ModelFolder) -> None:
        """NotBuildable when this model departs from what the family's graph computes."""
        _check(folder)
        self.folder = folder
        self.reader = Reader(folder, self.prefix, self.anchor)
        self.labels = len(folder.labels)

    @property
    def parameters(self) -> int:
        """How many weights were read so far."""
        return self.reader.weights.parameters

    def key(self, name: str) -> str:
        """What the family calls a field of config.json."""
        return self.keys.get(name, name)

    def integer(self, name: str) -> int:
        """One of the fields in `defaults`."""
        return self.reader.integer(self.key(name), self.defaults[name])

    @property
    def hidden(self) -> int:
        """Width of the hidden states."""
        return self.integer("hidden_size")

    @property
    def embedding_width(self) -> int:
        """Width of the embeddings."""
        return self.reader.integer("embedding_size", NARROW_WIDTH) if self.narrow else self.hidden

    @property
    def epsilon(self) -> float:
        """Of every normalisation."""
        return self.fixed_epsilon or self.reader.number("layer_norm_eps", 1e-12)

    @property
    def padding_id(self) -> int:
        """The token from which cumulative positions count."""
        return self.reader.integer("pad_token_id", self.default_padding, least=0)

    def encoder(self) -> Encoder:
        """The model without its head."""
        heads, default = self.key("num_attention_heads"), self.defaults["num_attention_heads"]
        return Encoder(
            embeddings=self.embeddings(),
            layers=self.all_layers(),
            heads=self.reader.heads(heads, default, self.key("hidden_size"), self.hidden),
            activation=self.reader.activation(self.key("hidden_act"), self.default_activation),
        )

    def embeddings(self) -> Embeddings:
        """Words, positions, types."""
        body, width = self.reader.body, self.embedding_width
        types = self.reader.integer("type_vocab_size", 2, least=0) if self.has_types else 0
        return Embeddings(
            words=body.table("embeddings.word_embeddings", self.integer("vocab_size"), width),
            positions=body.table("embeddings.position_embeddings", self.integer("max_position_embeddings"), width),
            types=body.table("embeddings.token_type_embeddings", types, width) if types else None,
            norm=body.norm("embeddings.LayerNorm", width, self.epsilon),
            position_kind=self.positions,
            padding_id=self.padding_id if self.positions is Positions.CUMULATIVE else 0,
        )

    def all_layers(self) -> tuple[Layer, ...]:
        """The layers in order."""
        return tuple(self.layer(f"{self.layers}.{index}") for index in range(self.integer("num_hidden_layers")))

    def layer(self, name: str) -> Layer:
        """One layer."""
        body, names, hidden, epsilon = self.reader.body, self.layer_names, self.hidden, self.epsilon
        inner = self.integer("intermediate_size")
        return Layer(
            query=body.dense(f"{name}.{names.query}", hidden, hidden),
            key=body.dense(f"{name}.{names.key}", hidden, hidden),
            value=body.dense(f"{name}.{names.value}", hidden, hidden),
            output=body.dense(f"{name}.{names.output}", hidden, hidden),
            attention_norm=body.norm(f"{name}.{names.attention_norm}", hidden, epsilon),
            up=body.dense(f"{name}.{names.up}", hidden, inner),
            down=body.dense(f"{name}.{names.down}", inner, hidden),
            output_norm=body.norm(f"{name}.{names.output_norm}", hidden, epsilon),
        )

    def top(self, head: Head, encoder: Encoder) -> Top:
        """The layers of this head."""
        reader, hidden = self.reader, encoder.hidden
        match head:
            case Head.ENCODER:
                return None
            case Head.SEQUENCE:
                names = self.classifier_names
                dense = (reader.body.dense if names.pooled else reader.top.dense)(names.dense, hidden, hidden)
                return Classifier(dense, names.activation, reader.top.dense(names.out, hidden, self.labels))
            case Head.TOKEN:
                return TokenClassifier(reader.top.dense("classifier", hidden, self.labels))
            case Head.SPAN:
                return SpanClassifier(reader.top.dense("qa_outputs", hidden, 2))
            case Head.MASKED_LM:
                return self._mask_filler(encoder)

    def _mask_filler(self, encoder: Encoder) -> MaskFiller:
        """For the very token that the fill-mask task looks for."""
        mask_id = Tokenizer.load(self.folder).mask_id
        if mask_id is None:
            raise UnsupportedModel(
                f"{self.folder.tokenizer} has no mask token", remedy="State it as mask_token in tokenizer_config.json"
            )
        reader, names, width = self.reader, self.mask_names, self.embedding_width
        return MaskFiller(
            dense=reader.top.dense(names.dense, encoder.hidden, width),
            activation=names.activation or encoder.activation,
            norm=reader.top.norm(names.norm, width, self.epsilon),
            out=self._vocabulary(encoder.embeddings.words, names),
            mask_id=mask_id,
        )

    def _vocabulary(self, words: Float, names: MaskNames) -> Dense:
        """The product with the vocabulary: the word vectors again, unless config.json unties them."""
        weight = words
        if self.folder.config.get("tie_word_embeddings", True) is not True:
            weight = self.reader.top.table(names.projection, *words.shape)
        biases = (*((names.bias,) if names.bias else ()), f"{names.projection}.bias")
        return Dense(weight, self.reader.top.vector(biases, len(words)))


def _check(folder: ModelFolder) -> None:
    config = folder.config
    positions = config.get("position_embedding_type", "absolute")
    if positions != "absolute":
        raise NotBuildable(f"its position_embedding_type is {positions}")
    if config.get("is_decoder") or config.get("add_cross_attention"):
        raise NotBuildable("it is a decoder")
    if config.get("pruned_heads"):
        raise NotBuildable("attention heads were pruned")
    if config.get("quantization_config"):
        raise NotBuildable("its weights are quantised")


class Bert(Family):
    """Google's encoder; MiniLM, BGE, E5, GTE, SPLADE and many others are it as well."""

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
    """BERT without token types and pooler, under names of its own."""

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
    has_types = False
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


BUCKETS = 32
MAX_DISTANCE = 128
"""Both are written into MPNet's code; its configuration states the table's size only."""
LONGEST = 2048
"""Positions: the bias is written out for every pair, so it grows with the square."""


class MPNet(Roberta):
    """RoBERTa's positions and heads; no token types; a bias on the scores by the distance of query and key."""

    prefix = "mpnet"
    defaults: ClassVar[Mapping[str, int]] = {**DEFAULTS, "vocab_size": 30527}
    has_types = False
    layer_names = LayerNames(
        "attention.attn.q", "attention.attn.k", "attention.attn.v", "attention.attn.o", "attention.LayerNorm"
    )
    padding_id = 1
    """Written into the model's code."""

    def encoder(self) -> Encoder:
        """As BERT's, with the bias of every distance looked up ahead of time."""
        encoder = super().encoder()
        rows = self.reader.integer("relative_attention_num_buckets", BUCKETS)
        length = len(encoder.embeddings.positions) - self.padding_id - 1
        if rows < BUCKETS or length > LONGEST:
            raise NotBuildable(f"it has {rows} distance buckets for {length} positions")
        table = self.reader.body.table("encoder.relative_attention_bias", rows, encoder.heads)
        return replace(encoder, distance_bias=distance_bias(table, length))


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


FAMILIES: Mapping[str, type[Family]] = {
    "albert": Albert,
    "bert": Bert,
    "camembert": Roberta,
    "data2vec-text": Data2VecText,
    "distilbert": DistilBert,
    "electra": Electra,
    "ernie": Ernie,
    "mpnet": MPNet,
    "roberta": Roberta,
    "xlm-roberta": Roberta,
}
"""By `model_type` of config.json."""
