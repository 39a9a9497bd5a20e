"""ELECTRA: discriminators and generators."""

from __future__ import annotations

from dataclasses import replace

from penstock_optimizer.export.encoder import Activation, Classifier, Embeddings, Encoder, MaskFiller
from penstock_optimizer.export.families.bert import Bert


class Electra(Bert):
    """BERT's layers; narrower embeddings that are projected; heads with GELU."""

    prefix = "electra"
    default_hidden = 256
    default_heads = 4
    default_inner = 1024

    @property
    def embedding_width(self) -> int:
        """Width of the embeddings."""
        return self.reader.integer("embedding_size", 128)

    def embeddings(self) -> Embeddings:
        """As BERT's, projected where the widths differ."""
        embeddings = super().embeddings()
        if self.embedding_width == self.hidden:
            return embeddings
        return replace(
            embeddings, projection=self.reader.dense("embeddings_project", self.embedding_width, self.hidden)
        )

    def classifier(self, hidden: int) -> Classifier:
        """Dense, GELU, dense."""
        return Classifier(
            dense=self.reader.head_dense("classifier.dense", hidden, hidden),
            activation=Activation.GELU,
            out=self.reader.head_dense("classifier.out_proj", hidden, self.labels),
        )

    def mask_filler(self, encoder: Encoder, mask_id: int) -> MaskFiller:
        """The generator's: down to the width of the embeddings, then the word vectors."""
        reader, width = self.reader, self.embedding_width
        return MaskFiller(
            dense=reader.head_dense("generator_predictions.dense", encoder.hidden, width),
            activation=Activation.GELU,
            norm=reader.head_norm("generator_predictions.LayerNorm", width, self.epsilon),
            out=self.vocabulary(encoder, "generator_lm_head"),
            mask_id=mask_id,
        )
