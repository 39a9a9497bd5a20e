"""RoBERTa, XLM-RoBERTa, CamemBERT and data2vec's text model."""

from __future__ import annotations

from penstock_optimizer.export.encoder import Activation, Classifier, Encoder, MaskFiller, Positions
from penstock_optimizer.export.families.bert import Bert


class Roberta(Bert):
    """BERT's layers under BERT's names; positions counted from the padding id on; other heads."""

    prefix = "roberta"
    positions = Positions.CUMULATIVE
    padding_id = 1

    def classifier(self, hidden: int) -> Classifier:
        """Dense, tanh, dense: a part of the head, there is no pooler."""
        return Classifier(
            dense=self.reader.head_dense("classifier.dense", hidden, hidden),
            activation=Activation.TANH,
            out=self.reader.head_dense("classifier.out_proj", hidden, self.labels),
        )

    def mask_filler(self, encoder: Encoder, mask_id: int) -> MaskFiller:
        """Dense, GELU whatever the encoder's activation is, norm, then the word vectors."""
        reader, hidden = self.reader, encoder.hidden
        return MaskFiller(
            dense=reader.head_dense("lm_head.dense", hidden, hidden),
            activation=Activation.GELU,
            norm=reader.head_norm("lm_head.layer_norm", hidden, self.epsilon),
            out=self.vocabulary(encoder, "lm_head.decoder", "lm_head.bias"),
            mask_id=mask_id,
        )


class Data2VecText(Roberta):
    """Meta's data2vec for text: RoBERTa under another prefix."""

    prefix = "data2vec_text"
