"""The base of all families of encoders.

`Family` reads a model under the names that BERT's descendants kept. A family overrides the names that differ.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from penstock.errors import UnsupportedModel
from penstock.tasks import Head
from penstock_optimizer.export.reader import NotBuildable, Reader, no_head
from penstock_optimizer.export.transformer import (
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
    Transform,
)
from penstock_runtime.models.folder import ModelFolder
from penstock_runtime.rows import Float
from penstock_runtime.tokens.tokenizer import Tokenizer


@dataclass(frozen=True)
class LayerNames:
    """Names of a layer's tensors, below the layer's name."""

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
MOST_LAYERS = 1_000
NARROW_WIDTH = 128
"""The default of `embedding_size`, in families with embeddings narrower than the hidden states."""


class Family:
    """One model, read as a member of the family. Weights are [out, in], as in torch."""

    prefix: ClassVar[str]
    """transformers' `base_model_prefix`."""
    anchor: ClassVar[str] = "embeddings.word_embeddings.weight"
    """A tensor that every model of the family has, as it is called in a model without a head."""
    defaults: ClassVar[Mapping[str, int]] = DEFAULTS
    keys: ClassVar[Mapping[str, str]] = {}
    """Fields of config.json that the family calls otherwise than BERT."""
    position_embedding: ClassVar[str] = "absolute"
    """The only `position_embedding_type` that is known here."""
    default_activation: ClassVar[str] = "gelu"
    fixed_epsilon: ClassVar[float | None] = None
    """Where it is written into the model's code, not its configuration."""
    positions: ClassVar[Positions] = Positions.INDEX
    default_padding: ClassVar[int] = 0
    """Of `pad_token_id`."""
    has_positions: ClassVar[bool] = True
    """False: there is no table of positions."""
    default_types: ClassVar[int | None] = 2
    """Default of `type_vocab_size`; None: the family has no token types."""
    embedding_norm: ClassVar[str] = "embeddings.LayerNorm"
    narrow: ClassVar[bool] = False
    """True: embeddings may be narrower than the hidden states."""
    layers: ClassVar[str] = "encoder.layer"
    layer_names: ClassVar[LayerNames] = LayerNames()
    classifier_names: ClassVar[ClassifierNames]
    mask_names: ClassVar[MaskNames]

    def __init__(self, folder: ModelFolder) -> None:
        """NotBuildable if the family's graph does not compute this variant of the model."""
        _check(folder, self.position_embedding)
        self.folder = folder
        self.reader = Reader(folder, self.base, self.anchor)
        self.labels = len(folder.labels)

    @property
    def base(self) -> str:
        """The prefix of the encoder's weights in a model with a head."""
        return self.prefix

    @property
    def parameters(self) -> int:
        """How many weights were read so far."""
        return self.reader.weights.parameters

    @property
    def weights_digest(self) -> str:
        """Digest of the weights that were read so far."""
        return self.reader.weights_digest

    @property
    def notes(self) -> tuple[str, ...]:
        """Choices that the model leaves open, as sentences for the user."""
        return ()

    def key(self, name: str) -> str:
        """The family's name of a field of config.json."""
        return self.keys.get(name, name)

    def integer(self, name: str) -> int:
        """One of the fields in `defaults`."""
        most = MOST_LAYERS if name.endswith("layers") else math.inf
        return self.reader.integer(self.key(name), self.defaults[name], most=most)

    @property
    def hidden(self) -> int:
        """Width of the hidden states."""
        return self.integer("hidden_size")

    @property
    def embedding_width(self) -> int:
        """Width of the embeddings."""
        return self.reader.integer("embedding_size", NARROW_WIDTH) if self.narrow else self.hidden

    @property
    def stored_words(self) -> int:
        """Rows of the table of words."""
        return self.integer("vocab_size")

    @property
    def attention_heads(self) -> int:
        """Number of heads, which share the hidden states evenly."""
        heads, default = self.key("num_attention_heads"), self.defaults["num_attention_heads"]
        return self.reader.heads(heads, default, self.key("hidden_size"), self.hidden)

    @property
    def epsilon(self) -> float:
        """Epsilon of all normalisations."""
        return self.fixed_epsilon or self.reader.number("layer_norm_eps", 1e-12)

    @property
    def padding_id(self) -> int:
        """The token from which cumulative positions count."""
        return self.reader.integer("pad_token_id", self.default_padding, least=0)

    def encoder(self) -> Encoder:
        """The model without its head."""
        return Encoder(
            embeddings=self.embeddings(),
            layers=self.all_layers(),
            heads=self.attention_heads,
            activation=self.reader.activation(self.key("hidden_act"), self.default_activation),
        )

    def embeddings(self) -> Embeddings:
        """Words, positions, types."""
        body, width = self.reader.body, self.embedding_width
        types, rows = 0, self.integer("max_position_embeddings")
        if self.default_types is not None:
            types = self.reader.integer("type_vocab_size", self.default_types, least=0)
        return Embeddings(
            words=body.table("embeddings.word_embeddings", self.stored_words, width),
            positions=body.table("embeddings.position_embeddings", rows, width) if self.has_positions else None,
            types=body.table("embeddings.token_type_embeddings", types, width) if types else None,
            norm=body.norm(self.embedding_norm, width, self.epsilon),
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
            feed_forward_norm=body.norm(f"{name}.{names.output_norm}", hidden, epsilon),
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
                out = reader.top.dense(names.out, hidden, self.labels)
                return Classifier(Transform(dense, names.activation), out)
            case Head.TOKEN:
                return TokenClassifier(reader.top.dense("classifier", hidden, self.labels))
            case Head.SPAN:
                return SpanClassifier(reader.top.dense("qa_outputs", hidden, 2))
            case Head.MASKED_LM | Head.SPARSE:
                return self.mask_filler(encoder, self.mask_names)
            case Head.CAUSAL_LM:
                raise no_head(self.folder, head)

    def mask_id(self) -> int:
        """The very token that the fill-mask task looks for."""
        mask_id = Tokenizer.load(self.folder).mask_id
        if mask_id is None:
            raise UnsupportedModel(
                f"{self.folder.tokenizer} has no mask token", remedy="State it as mask_token in tokenizer_config.json"
            )
        return mask_id

    def mask_filler(self, encoder: Encoder, names: MaskNames) -> MaskFiller:
        """The head of a masked language model."""
        reader, width = self.reader, self.embedding_width
        transform = Transform(
            dense=reader.top.dense(names.dense, encoder.hidden, width),
            activation=names.activation or encoder.activation,
            norm=reader.top.norm(names.norm, width, self.epsilon),
        )
        return MaskFiller(transform, self.vocabulary(encoder.embeddings.words, names), self.mask_id())

    def vocabulary(self, words: Float, names: MaskNames) -> Dense:
        """The product with the vocabulary: the word vectors again, unless config.json unties them."""
        biases = (*((names.bias,) if names.bias else ()), f"{names.projection}.bias")
        return Dense(self.vocabulary_weight(words, names), self.reader.top.vector(biases, len(words)))

    def vocabulary_weight(self, words: Float, names: MaskNames) -> Float:
        """The weights of that product, [vocabulary, width]."""
        if self.folder.config.get("tie_word_embeddings", True) is True:
            return words
        return self.reader.top.table(names.projection, *words.shape)


def _check(folder: ModelFolder, known: str) -> None:
    config = folder.config
    positions = config.get("position_embedding_type", known)
    if positions != known:
        raise NotBuildable(f"its position_embedding_type is {positions}")
    if config.get("is_decoder") or config.get("add_cross_attention"):
        raise NotBuildable("it is a decoder")
    if config.get("pruned_heads"):
        raise NotBuildable("attention heads were pruned")
    if config.get("quantization_config"):
        raise NotBuildable("its weights are quantised")


def parts(dense: Dense, count: int) -> list[Dense]:
    """Layers that are stored as one, one below the other."""
    weights = np.split(dense.weight, count)
    biases = [None] * count if dense.bias is None else np.split(dense.bias, count)
    return [Dense(weight, bias) for weight, bias in zip(weights, biases, strict=True)]
