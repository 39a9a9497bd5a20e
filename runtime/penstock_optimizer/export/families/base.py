"""What the families have in common: how a head is asked for, and what none of them can be built with."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

from penstock.errors import UnsupportedModel
from penstock.tasks import Head
from penstock_optimizer.export.encoder import (
    Classifier,
    Dense,
    Encoder,
    MaskFiller,
    SpanClassifier,
    TokenClassifier,
    Top,
)
from penstock_optimizer.export.reader import NotBuildable, Reader
from penstock_runtime.models.folder import ModelFolder
from penstock_runtime.tokens.tokenizer import Tokenizer


class Family(ABC):
    """One model, read as a member of the family. Widths are those of torch: [out, in]."""

    prefix: ClassVar[str]
    """transformers' `base_model_prefix`."""
    anchor: ClassVar[str] = "embeddings.word_embeddings.weight"
    """A tensor that every model of the family has, as it is called in a model without a head."""

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

    @abstractmethod
    def encoder(self) -> Encoder:
        """The model without its head."""

    @abstractmethod
    def classifier(self, hidden: int) -> Classifier:
        """What a sequence classification computes from the first token."""

    def token_classifier(self, hidden: int) -> TokenClassifier:
        """One linear layer; the same in all families."""
        return TokenClassifier(self.reader.head_dense("classifier", hidden, self.labels))

    def span_classifier(self, hidden: int) -> SpanClassifier:
        """One linear layer with the outputs start and end; the same in all families."""
        return SpanClassifier(self.reader.head_dense("qa_outputs", hidden, 2))

    @abstractmethod
    def mask_filler(self, encoder: Encoder, mask_id: int) -> MaskFiller:
        """What a masked language model computes from a mask token."""

    def top(self, head: Head, encoder: Encoder) -> Top:
        """The layers of this head."""
        if head is Head.ENCODER:
            return None
        if head is Head.SEQUENCE:
            return self.classifier(encoder.hidden)
        if head is Head.TOKEN:
            return self.token_classifier(encoder.hidden)
        if head is Head.SPAN:
            return self.span_classifier(encoder.hidden)
        return self.mask_filler(encoder, self._mask_id())

    def _mask_id(self) -> int:
        """The very token that the fill-mask task looks for."""
        mask_id = Tokenizer.load(self.folder).mask_id
        if mask_id is None:
            raise UnsupportedModel(
                f"{self.folder.tokenizer} has no mask token", remedy="State it as mask_token in tokenizer_config.json"
            )
        return mask_id

    def vocabulary(self, encoder: Encoder, projection: str, *biases: str) -> Dense:
        """The product with the vocabulary: the word vectors again, unless config.json unties them."""
        words = encoder.embeddings.words
        weight = words
        if self.folder.config.get("tie_word_embeddings", True) is not True:
            weight = self.reader.head_table(projection, *words.shape)
        return Dense(weight, self.reader.head_vector((*biases, f"{projection}.bias"), len(words)))


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
