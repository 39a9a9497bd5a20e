"""BERT, and what is BERT under another name."""

from __future__ import annotations

from typing import ClassVar

from penstock_optimizer.export.encoder import (
    Activation,
    Classifier,
    Embeddings,
    Encoder,
    Layer,
    MaskFiller,
    Positions,
)
from penstock_optimizer.export.families.base import Family
from penstock_optimizer.export.reader import NotBuildable


class Bert(Family):
    """Google's encoder; MiniLM, BGE, E5, GTE, SPLADE and many others are it as well."""

    prefix = "bert"
    positions: ClassVar[Positions] = Positions.INDEX
    padding_id: ClassVar[int] = 0
    """The default of `pad_token_id`."""
    default_hidden: ClassVar[int] = 768
    default_heads: ClassVar[int] = 12
    default_inner: ClassVar[int] = 3072
    """Of `hidden_size`, `num_attention_heads` and `intermediate_size`."""

    def encoder(self) -> Encoder:
        """Embeddings and layers under the names that BERT's descendants kept."""
        reader = self.reader
        layers = range(reader.integer("num_hidden_layers", 12))
        return Encoder(
            embeddings=self.embeddings(),
            layers=tuple(self.layer(f"encoder.layer.{index}") for index in layers),
            heads=self.heads(),
            activation=reader.activation("hidden_act", "gelu"),
        )

    @property
    def hidden(self) -> int:
        """Width of the hidden states."""
        return self.reader.integer("hidden_size", self.default_hidden)

    @property
    def epsilon(self) -> float:
        """Of every normalisation."""
        return self.reader.number("layer_norm_eps", 1e-12)

    @property
    def embedding_width(self) -> int:
        """Width of the embeddings."""
        return self.hidden

    def heads(self) -> int:
        """Attention heads."""
        return self.reader.heads("num_attention_heads", self.default_heads, "hidden_size", self.hidden)

    def embeddings(self) -> Embeddings:
        """Words, positions, types."""
        reader, width = self.reader, self.embedding_width
        types = reader.integer("type_vocab_size", 2, least=0)
        return Embeddings(
            words=reader.table("embeddings.word_embeddings", reader.integer("vocab_size", 30522), width),
            positions=reader.table(
                "embeddings.position_embeddings", reader.integer("max_position_embeddings", 512), width
            ),
            types=reader.table("embeddings.token_type_embeddings", types, width) if types else None,
            norm=reader.norm("embeddings.LayerNorm", width, self.epsilon),
            position_kind=self.positions,
            padding_id=reader.integer("pad_token_id", self.padding_id, least=0)
            if self.positions is Positions.CUMULATIVE
            else 0,
        )

    def layer(self, name: str) -> Layer:
        """One layer."""
        reader, hidden, epsilon = self.reader, self.hidden, self.epsilon
        inner = reader.integer("intermediate_size", self.default_inner)
        return Layer(
            query=reader.dense(f"{name}.attention.self.query", hidden, hidden),
            key=reader.dense(f"{name}.attention.self.key", hidden, hidden),
            value=reader.dense(f"{name}.attention.self.value", hidden, hidden),
            output=reader.dense(f"{name}.attention.output.dense", hidden, hidden),
            attention_norm=reader.norm(f"{name}.attention.output.LayerNorm", hidden, epsilon),
            up=reader.dense(f"{name}.intermediate.dense", hidden, inner),
            down=reader.dense(f"{name}.output.dense", inner, hidden),
            output_norm=reader.norm(f"{name}.output.LayerNorm", hidden, epsilon),
        )

    def classifier(self, hidden: int) -> Classifier:
        """The pooler (dense, tanh), then one linear layer."""
        return Classifier(
            dense=self.reader.dense("pooler.dense", hidden, hidden),
            activation=Activation.TANH,
            out=self.reader.head_dense("classifier", hidden, self.labels),
        )

    def mask_filler(self, encoder: Encoder, mask_id: int) -> MaskFiller:
        """Transform, then the word vectors."""
        reader, hidden = self.reader, encoder.hidden
        return MaskFiller(
            dense=reader.head_dense("cls.predictions.transform.dense", hidden, hidden),
            activation=encoder.activation,
            norm=reader.head_norm("cls.predictions.transform.LayerNorm", hidden, self.epsilon),
            out=self.vocabulary(encoder, "cls.predictions.decoder", "cls.predictions.bias"),
            mask_id=mask_id,
        )


class Ernie(Bert):
    """Baidu's encoder: BERT, unless it uses task ids."""

    prefix = "ernie"

    def encoder(self) -> Encoder:
        """As BERT's; NotBuildable with task ids."""
        if self.folder.config.get("use_task_id"):
            raise NotBuildable("it uses task ids")
        return super().encoder()
