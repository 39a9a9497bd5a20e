"""Decoders: Llama, Mistral, Qwen2, Qwen3, Phi-3; and EuroBERT, which is built like them.

Pre-norm layers with RMSNorm, rotary positions, gated networks and grouped-query attention. A token attends to itself
and to those before it, except in EuroBERT and in the models of Qwen2 that are stated not to be causal (gte-Qwen2).
A family is read here for the graphs that embed, rank and classify (`build`) and for text generation
(`penstock_optimizer.generation.decoder`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

import numpy as np

from penstock.tasks import Head
from penstock_optimizer.export.encoder import (
    Activation,
    AnyNorm,
    AttentionRange,
    Classifier,
    Dense,
    Embeddings,
    Encoder,
    Last,
    Layer,
    MaskFiller,
    Pooled,
    RootMeanSquareNorm,
    Rotary,
    SpanClassifier,
    TokenClassifier,
    Top,
    Transform,
)
from penstock_optimizer.export.exported import no_head
from penstock_optimizer.export.family import Family
from penstock_optimizer.export.reader import NotBuildable
from penstock_optimizer.export.rotary import stated_rotary
from penstock_runtime.models.folder import ModelFolder
from penstock_runtime.rows import Float
from penstock_runtime.tokens.tokenizer import Tokenizer

FULL, SLIDING = "full_attention", "sliding_attention"
"""In `layer_types`."""
BEFORE_TRANSFORMERS_5 = "transformer"
"""What the names of the weights begin with in some models for question answering."""


class Llama(Family):
    """Meta's decoder, in which the others differ little."""

    prefix = "model"
    anchor = "embed_tokens.weight"
    generates = True
    defaults: ClassVar[Mapping[str, int]] = {
        "vocab_size": 32000,
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "intermediate_size": 11008,
        "max_position_embeddings": 2048,
    }
    default_activation = "silu"
    default_key_heads: ClassVar[int | None] = None
    """Of `num_key_value_heads`; None: as many as queries have."""
    default_theta: ClassVar[float] = 10_000.0
    default_epsilon: ClassVar[float] = 1e-6
    has_head_norms: ClassVar[bool] = False
    """Queries and keys are normalised head by head."""
    tied_by_default: ClassVar[bool] = False
    """Of `tie_word_embeddings`."""

    def __init__(self, folder: ModelFolder, longest: int | None = None) -> None:
        """`longest`: tokens of the longest text that is served; None: `ModelFolder.max_tokens`."""
        super().__init__(folder)
        limit = folder.max_tokens if longest is None else longest
        self.longest = min(self.integer("max_position_embeddings"), limit)
        """How many positions the tables of angles have: no text is longer."""

    @property
    def base(self) -> str:
        """What the names of the weights begin with in a model with a head."""
        older = f"{BEFORE_TRANSFORMERS_5}.{self.anchor}"
        return BEFORE_TRANSFORMERS_5 if older in self.folder.tensors else self.prefix

    @property
    def epsilon(self) -> float:
        """Of every normalisation."""
        return self.reader.number("rms_norm_eps", self.default_epsilon)

    @property
    def causal(self) -> bool:
        """Tokens attend to themselves and to those before them."""
        return True

    @property
    def heads(self) -> int:
        """Heads of queries."""
        return self.integer("num_attention_heads")

    @property
    def key_heads(self) -> int:
        """Heads of keys and values."""
        stated = self.reader.config.get("num_key_value_heads", self.default_key_heads)
        heads = self.heads if stated is None else self.reader.integer("num_key_value_heads", self.default_key_heads)
        if self.heads % heads:
            raise self.reader.invalid("num_key_value_heads", heads, f"a number that divides the {self.heads} heads")
        return heads

    @property
    def head_width(self) -> int:
        """Values of a head."""
        if self.reader.config.get("head_dim") is not None:
            return self.reader.integer("head_dim")
        return self.hidden // self.reader.heads(
            "num_attention_heads", self.defaults["num_attention_heads"], "hidden_size", self.hidden
        )

    def biased(self) -> tuple[bool, bool, bool]:
        """Whether there are biases in queries, keys and values; after the attention; in the network."""
        attention = self.reader.flag("attention_bias", default=False)
        return attention, attention, self.reader.flag("mlp_bias", default=False)

    def attends_to(self, _index: int) -> AttentionRange:
        """Which tokens the tokens attend to in a layer."""
        return AttentionRange(causal=self.causal)

    def windowed(self, window: int) -> AttentionRange:
        """A token attends to `window` tokens, itself among them."""
        return AttentionRange(window=window - 1 if window < self.longest else None, causal=self.causal)

    def kinds(self, default: list[str]) -> list[str]:
        """The attention of each layer by `layer_types`."""
        layers, kinds = self.integer("num_hidden_layers"), self.reader.config.get("layer_types")
        if kinds is None:
            return default
        if not isinstance(kinds, list) or len(kinds) != layers or not set(kinds) <= {FULL, SLIDING}:
            raise self.reader.invalid("layer_types", kinds, f"a list of {layers} names, each {FULL} or {SLIDING}")
        return kinds

    def norm(self, name: str, width: int = 0) -> RootMeanSquareNorm:
        """A normalisation of the hidden states, or of `width` values."""
        return RootMeanSquareNorm(self.reader.body.vector((f"{name}.weight",), width or self.hidden), self.epsilon)

    def encoder(self) -> Encoder:
        """The model without its head."""
        return Encoder(
            embeddings=self.embeddings(),
            layers=self.all_layers(),
            heads=self.heads,
            activation=self.activation(),
            final_norm=self.final_norm(),
        )

    def final_norm(self) -> AnyNorm:
        """After the last layer."""
        return self.norm("norm")

    def language_head(self, words: Float) -> Float:
        """The weights of the product with which hidden states give logits, [vocabulary, hidden]; `words` if tied."""
        if self.reader.flag("tie_word_embeddings", default=self.tied_by_default):
            return words
        return self.reader.top.table("lm_head", *words.shape)

    def activation(self) -> Activation:
        """Of the gates."""
        return self.reader.activation(self.key("hidden_act"), self.default_activation)

    def embeddings(self) -> Embeddings:
        """Words alone, and not normalised."""
        words = self.reader.body.table("embed_tokens", self.integer("vocab_size"), self.hidden)
        return Embeddings(words, positions=None, types=None, norm=None)

    def rotaries(self) -> Sequence[Rotary | None]:
        """The angles of each layer."""
        angles = stated_rotary(self.reader, self.longest, self.head_width, theta=self.default_theta)
        return [angles] * self.integer("num_hidden_layers")

    def all_layers(self) -> tuple[Layer, ...]:
        """The layers in order."""
        return tuple(self.numbered_layer(index, angles) for index, angles in enumerate(self.rotaries()))

    def numbered_layer(self, index: int, angles: Rotary | None) -> Layer:
        """One layer."""
        body, name, hidden = self.reader.body, f"layers.{index}", self.hidden
        in_products, in_output, in_network = self.biased()
        query, key, value = self.attention_products(f"{name}.self_attn", bias=in_products)
        gate, up = self.gated_products(f"{name}.mlp", bias=in_network)

        def head_norm(part: str) -> AnyNorm | None:
            return self.norm(f"{name}.self_attn.{part}_norm", self.head_width) if self.has_head_norms else None

        return Layer(
            query=query,
            key=key,
            value=value,
            output=body.dense(f"{name}.self_attn.o_proj", self.heads * self.head_width, hidden, bias=in_output),
            attention_norm=self.norm(f"{name}.input_layernorm"),
            up=gate,  # theirs is the gate that is activated
            gate=up,
            down=body.dense(f"{name}.mlp.down_proj", self.integer("intermediate_size"), hidden, bias=in_network),
            feed_forward_norm=self.norm(f"{name}.post_attention_layernorm"),
            rotary=angles,
            attends_to=self.attends_to(index),
            query_norm=head_norm("q"),
            key_norm=head_norm("k"),
        )

    def attention_products(self, name: str, *, bias: bool) -> Sequence[Dense]:
        """Of queries, keys and values."""
        queries, keys = self.heads * self.head_width, self.key_heads * self.head_width
        return [
            self.reader.body.dense(f"{name}.{part}_proj", self.hidden, width, bias=bias)
            for part, width in (("q", queries), ("k", keys), ("v", keys))
        ]

    def gated_products(self, name: str, *, bias: bool) -> Sequence[Dense]:
        """Of the gate, which is activated, and of what it is multiplied with."""
        inner = self.integer("intermediate_size")
        return [self.reader.body.dense(f"{name}.{part}_proj", self.hidden, inner, bias=bias) for part in ("gate", "up")]

    def top(self, head: Head, encoder: Encoder) -> Top:
        """The layers of this head."""
        reader, hidden = self.reader, encoder.hidden
        match head:
            case Head.ENCODER:
                return None
            case Head.SEQUENCE:
                padding = reader.config.get("pad_token_id")
                last = Last(padding, other=True) if isinstance(padding, int) else None
                out = reader.top.dense("score", hidden, self.labels, bias=False)
                return Classifier(None, out, Pooled.LAST, last)
            case Head.TOKEN:
                return TokenClassifier(reader.top.dense("score", hidden, self.labels))
            case Head.SPAN:
                return SpanClassifier(reader.top.dense("qa_outputs", hidden, 2))
            case Head.MASKED_LM | Head.SPARSE | Head.CAUSAL_LM:
                raise no_head(self.folder, head)


class Mistral(Llama):
    """Mistral AI's decoder: e5-mistral and many that were trained like it."""

    defaults: ClassVar[Mapping[str, int]] = {
        **Llama.defaults, "intermediate_size": 14336, "max_position_embeddings": 131072
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
        **Llama.defaults, "vocab_size": 32064, "hidden_size": 3072, "intermediate_size": 8192,
        "max_position_embeddings": 4096,
    }  # fmt: skip
    default_key_heads = None
    default_epsilon = 1e-5
    default_window = None

    def attention_products(self, name: str, *, bias: bool) -> Sequence[Dense]:  # noqa: ARG002 - there is none
        """Of queries, keys and values."""
        queries, keys = self.heads * self.head_width, self.key_heads * self.head_width
        joined = self.reader.body.table(f"{name}.qkv_proj", queries + 2 * keys, self.hidden)
        return [Dense(part, None) for part in np.split(joined, [queries, queries + keys])]

    def gated_products(self, name: str, *, bias: bool) -> Sequence[Dense]:  # noqa: ARG002 - there is none
        """Of the gate and of what it is multiplied with."""
        joined = self.reader.body.table(f"{name}.gate_up_proj", 2 * self.integer("intermediate_size"), self.hidden)
        return [Dense(part, None) for part in np.split(joined, 2)]


class Qwen2(Llama):
    """Alibaba's decoder."""

    defaults: ClassVar[Mapping[str, int]] = {
        **Llama.defaults, "vocab_size": 151936, "intermediate_size": 22016, "max_position_embeddings": 32768
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
        """As others, and the head of Qwen3-Reranker: the logit of the next token yes, less that of no."""
        if head is not Head.SEQUENCE or not self.folder.ranks_by_words:
            return super().top(head, encoder)
        tokenizer, words = Tokenizer.load(self.folder), encoder.embeddings.words
        answers = tokenizer.id_of("yes"), tokenizer.id_of("no")
        if answers[0] is None or answers[1] is None:
            raise no_head(self.folder, head)
        table = self.language_head(words)
        weight = table[answers[0]] - table[answers[1]]
        return Classifier(None, Dense(weight[np.newaxis], None), Pooled.LAST)


class EuroBert(Llama):
    """An encoder that is built like Llama, and attends to all tokens."""

    generates = False
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
