"""DistilBERT."""

from __future__ import annotations

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

EPSILON = 1e-12
"""Written into the model's code, not its configuration."""


class DistilBert(Family):
    """BERT without token types and pooler, under names of its own."""

    prefix = "distilbert"

    def encoder(self) -> Encoder:
        """Embeddings and layers."""
        reader = self.reader
        width, inner = reader.integer("dim", 768), reader.integer("hidden_dim", 3072)
        heads = reader.heads("n_heads", 12, "dim", width)
        embeddings = Embeddings(
            words=reader.table("embeddings.word_embeddings", reader.integer("vocab_size", 30522), width),
            positions=reader.table(
                "embeddings.position_embeddings", reader.integer("max_position_embeddings", 512), width
            ),
            types=None,
            norm=reader.norm("embeddings.LayerNorm", width, EPSILON),
            position_kind=Positions.INDEX,
            padding_id=0,
        )
        names = (f"transformer.layer.{index}" for index in range(reader.integer("n_layers", 6)))
        return Encoder(
            embeddings=embeddings,
            layers=tuple(self._layer(name, width, inner) for name in names),
            heads=heads,
            activation=reader.activation("activation", "gelu"),
        )

    def _layer(self, name: str, width: int, inner: int) -> Layer:
        reader = self.reader
        return Layer(
            query=reader.dense(f"{name}.attention.q_lin", width, width),
            key=reader.dense(f"{name}.attention.k_lin", width, width),
            value=reader.dense(f"{name}.attention.v_lin", width, width),
            output=reader.dense(f"{name}.attention.out_lin", width, width),
            attention_norm=reader.norm(f"{name}.sa_layer_norm", width, EPSILON),
            up=reader.dense(f"{name}.ffn.lin1", width, inner),
            down=reader.dense(f"{name}.ffn.lin2", inner, width),
            output_norm=reader.norm(f"{name}.output_layer_norm", width, EPSILON),
        )

    def classifier(self, hidden: int) -> Classifier:
        """Dense, ReLU, dense."""
        return Classifier(
            dense=self.reader.head_dense("pre_classifier", hidden, hidden),
            activation=Activation.RELU,
            out=self.reader.head_dense("classifier", hidden, self.labels),
        )

    def mask_filler(self, encoder: Encoder, mask_id: int) -> MaskFiller:
        """Transform, then the word vectors."""
        reader, hidden = self.reader, encoder.hidden
        return MaskFiller(
            dense=reader.head_dense("vocab_transform", hidden, hidden),
            activation=encoder.activation,
            norm=reader.head_norm("vocab_layer_norm", hidden, EPSILON),
            out=self.vocabulary(encoder, "vocab_projector"),
            mask_id=mask_id,
        )
