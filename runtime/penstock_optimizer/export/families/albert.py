"""ALBERT: few layers, used many times."""

from __future__ import annotations

from dataclasses import replace

from penstock_optimizer.export.encoder import Activation, Classifier, Embeddings, Encoder, Layer, MaskFiller
from penstock_optimizer.export.families.bert import Bert


class Albert(Bert):
    """Groups of layers, each group used for several layers in a row; its weights are written once."""

    prefix = "albert"
    default_hidden = 4096
    default_heads = 64
    default_inner = 16384

    @property
    def embedding_width(self) -> int:
        """Width of the embeddings."""
        return self.reader.integer("embedding_size", 128)

    def embeddings(self) -> Embeddings:
        """As BERT's, always projected."""
        projection = self.reader.dense("encoder.embedding_hidden_mapping_in", self.embedding_width, self.hidden)
        return replace(super().embeddings(), projection=projection)

    def encoder(self) -> Encoder:
        """Each group is used for an equal share of the layers."""
        reader = self.reader
        layers, groups = reader.integer("num_hidden_layers", 12), reader.integer("num_hidden_groups", 1)
        inner_layers = range(reader.integer("inner_group_num", 1))
        read = [
            [self.layer(f"encoder.albert_layer_groups.{group}.albert_layers.{index}") for index in inner_layers]
            for group in range(groups)
        ]
        return Encoder(
            embeddings=self.embeddings(),
            layers=tuple(layer for index in range(layers) for layer in read[int(index / (layers / groups))]),
            heads=self.heads(),
            activation=reader.activation("hidden_act", "gelu_new"),
        )

    def layer(self, name: str) -> Layer:
        """One layer of a group."""
        reader, hidden, epsilon = self.reader, self.hidden, self.epsilon
        inner = reader.integer("intermediate_size", self.default_inner)
        return Layer(
            query=reader.dense(f"{name}.attention.query", hidden, hidden),
            key=reader.dense(f"{name}.attention.key", hidden, hidden),
            value=reader.dense(f"{name}.attention.value", hidden, hidden),
            output=reader.dense(f"{name}.attention.dense", hidden, hidden),
            attention_norm=reader.norm(f"{name}.attention.LayerNorm", hidden, epsilon),
            up=reader.dense(f"{name}.ffn", hidden, inner),
            down=reader.dense(f"{name}.ffn_output", inner, hidden),
            output_norm=reader.norm(f"{name}.full_layer_layer_norm", hidden, epsilon),
        )

    def classifier(self, hidden: int) -> Classifier:
        """The pooler (dense, tanh), then one linear layer."""
        return Classifier(
            dense=self.reader.dense("pooler", hidden, hidden),
            activation=Activation.TANH,
            out=self.reader.head_dense("classifier", hidden, self.labels),
        )

    def mask_filler(self, encoder: Encoder, mask_id: int) -> MaskFiller:
        """Down to the width of the embeddings, then the word vectors."""
        reader, width = self.reader, self.embedding_width
        return MaskFiller(
            dense=reader.head_dense("predictions.dense", encoder.hidden, width),
            activation=encoder.activation,
            norm=reader.head_norm("predictions.LayerNorm", width, self.epsilon),
            out=self.vocabulary(encoder, "predictions.decoder", "predictions.bias"),
            mask_id=mask_id,
        )
