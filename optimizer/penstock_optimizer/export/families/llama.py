"""Llama, Mistral, Phi-3, Qwen2 and Qwen3; and EuroBERT, an encoder of the same form.

Tokens attend to all tokens in EuroBERT, and in models of Qwen2 that are stated not to be causal (gte-Qwen2).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

import numpy as np

from penstock.tasks import Head
from penstock_optimizer.export.families.decoder_family import FULL, SLIDING, DecoderFamily
from penstock_optimizer.export.reader import NotBuildable, no_head
from penstock_optimizer.export.transformer import (
    Activation,
    AttentionRange,
    Classifier,
    Dense,
    Encoder,
    MaskFiller,
    Pooled,
    TokenClassifier,
    Top,
    Transform,
)
from penstock_runtime.tokens.tokenizer import Tokenizer

LLAMA: Mapping[str, int] = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "intermediate_size": 11008,
    "max_position_embeddings": 2048,
}
"""Defaults of Llama's config.json."""


class Llama(DecoderFamily):
    """Meta's decoder."""

    defaults = LLAMA


class Mistral(DecoderFamily):
    """Mistral AI's decoder: e5-mistral and many that were trained like it."""

    defaults: ClassVar[Mapping[str, int]] = {
        **LLAMA, "intermediate_size": 14336, "max_position_embeddings": 131072
    }  # fmt: skip
    default_key_heads: ClassVar[int | None] = 8
    default_window: ClassVar[int | None] = 4096

    def biased(self) -> tuple[bool, bool, bool]:
        """There are none."""
        return False, False, False

    def attends_to(self, _index: int) -> AttentionRange:
        """All layers have the window, if there is one."""
        if self.reader.config.get("sliding_window", self.default_window) is None:
            return AttentionRange(causal=self.causal)
        return self.windowed(self.reader.integer("sliding_window", self.default_window))


class Phi3(Mistral):
    """Microsoft's decoder, Phi-3 and Phi-4-mini: products of the same inputs are stored as one matrix."""

    defaults: ClassVar[Mapping[str, int]] = {
        **LLAMA, "vocab_size": 32064, "hidden_size": 3072, "intermediate_size": 8192,
        "max_position_embeddings": 4096,
    }  # fmt: skip
    default_key_heads = None
    default_epsilon = 1e-5
    default_window = None

    def attention_products(self, name: str, *, bias: bool) -> Sequence[Dense]:  # noqa: ARG002 - there is none
        """The products that give queries, keys and values."""
        queries, keys = self.heads * self.head_width, self.key_heads * self.head_width
        joined = self.reader.body.table(f"{name}.qkv_proj", queries + 2 * keys, self.hidden)
        return [Dense(part, None) for part in np.split(joined, [queries, queries + keys])]

    def gated_products(self, name: str, *, bias: bool) -> Sequence[Dense]:  # noqa: ARG002 - there is none
        """The activated gate, and the factor of its result."""
        joined = self.reader.body.table(f"{name}.gate_up_proj", 2 * self.integer("intermediate_size"), self.hidden)
        return [Dense(part, None) for part in np.split(joined, 2)]


class Qwen2(DecoderFamily):
    """Alibaba's decoder."""

    defaults: ClassVar[Mapping[str, int]] = {
        **LLAMA, "vocab_size": 151936, "intermediate_size": 22016, "max_position_embeddings": 32768
    }  # fmt: skip
    default_key_heads = 32

    @property
    def causal(self) -> bool:
        """False for gte-Qwen2: by its authors' code, which is not read or run, unless config.json has `is_causal`."""
        return self.reader.flag("is_causal", default=not self.folder.config.get("auto_map"))

    def biased(self) -> tuple[bool, bool, bool]:
        """Queries, keys and values always have them."""
        return True, False, False

    def attends_to(self, index: int) -> AttentionRange:
        """The last layers may have a window."""
        reader, layers = self.reader, self.integer("num_hidden_layers")
        slides = (
            reader.flag("use_sliding_window", default=False) and reader.config.get("sliding_window", 4096) is not None
        )
        first = reader.integer("max_window_layers", 28, least=0)
        kinds = self.kinds([SLIDING if slides and layer >= first else FULL for layer in range(layers)])
        if kinds[index] == FULL or not slides:
            return AttentionRange(causal=self.causal)
        if not self.causal:
            raise NotBuildable("it has windows and is not causal")
        return self.windowed(reader.integer("sliding_window", 4096))


class Qwen3(Qwen2):
    """Alibaba's decoder since 2025: Qwen3-Embedding and Qwen3-Reranker."""

    has_head_norms = True

    @property
    def head_width(self) -> int:
        """Values of a head, by default not a share of the hidden states."""
        return self.reader.integer("head_dim", 128)

    def biased(self) -> tuple[bool, bool, bool]:
        """By one field."""
        attention = self.reader.flag("attention_bias", default=False)
        return attention, attention, False

    def top(self, head: Head, encoder: Encoder) -> Top:
        """Also the head of Qwen3-Reranker: the logit of the next token yes less the logit of no."""
        if head is not Head.SEQUENCE or not self.folder.ranks_by_words:
            return super().top(head, encoder)
        tokenizer, words = Tokenizer.load(self.folder), encoder.embeddings.words
        answers = tokenizer.id_of("yes"), tokenizer.id_of("no")
        if answers[0] is None or answers[1] is None:
            raise no_head(self.folder, head)
        table = self.language_head(words)
        weight = table[answers[0]] - table[answers[1]]
        return Classifier(None, Dense(weight[np.newaxis], None), Pooled.LAST)


class EuroBert(DecoderFamily):
    """An encoder that is built like Llama, and attends to all tokens."""

    defaults: ClassVar[Mapping[str, int]] = {
        "vocab_size": 128256,
        "hidden_size": 768,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "intermediate_size": 3072,
        "max_position_embeddings": 8192,
    }
    default_epsilon = 1e-5

    @property
    def causal(self) -> bool:
        """Tokens attend to all."""
        return False

    def top(self, head: Head, encoder: Encoder) -> Top:
        """Its own heads."""
        reader, hidden = self.reader, encoder.hidden
        match head:
            case Head.SEQUENCE:
                transform = Transform(reader.top.dense("dense", hidden, hidden), Activation.GELU)
                return Classifier(transform, reader.top.dense("classifier", hidden, self.labels), self._pooled())
            case Head.TOKEN:
                return TokenClassifier(reader.top.dense("classifier", hidden, self.labels))
            case Head.MASKED_LM:
                words = encoder.embeddings.words
                biased = reader.flag("mlp_bias", default=False)
                bias = reader.top.vector(("lm_head.bias",), len(words)) if biased else None
                return MaskFiller(None, Dense(self.language_head(words), bias), self.mask_id())
            case _:
                return super().top(head, encoder)

    def _pooled(self) -> Pooled:
        key = "classifier_pooling" if "classifier_pooling" in self.reader.config else "clf_pooling"
        pooling = self.reader.config.get(key, "late")
        if pooling not in POOLINGS:
            raise self.reader.invalid(key, pooling, ", ".join(POOLINGS))
        return POOLINGS[pooling]


POOLINGS: Mapping[str, Pooled] = {"bos": Pooled.FIRST, "mean": Pooled.MEAN, "late": Pooled.LATE}
"""`classifier_pooling` of EuroBERT; its authors' code calls it `clf_pooling`."""
