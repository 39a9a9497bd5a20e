"""What families of decoders have in common: pre-norm layers with RMSNorm, rotary positions, gated networks and
grouped-query attention, in which a token attends to itself and to the tokens before it.

A family is read for the graphs that embed, rank and classify (`encoder`) and for text generation (`decoder`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from penstock.tasks import Head
from penstock_optimizer.export.families.family import Family
from penstock_optimizer.export.reader import NotBuildable, no_head
from penstock_optimizer.export.rotary import stated_rotary
from penstock_optimizer.export.transformer import (
    LONGEST_CONTEXT,
    Activation,
    AnyNorm,
    AttentionRange,
    Classifier,
    Decoder,
    Dense,
    Embeddings,
    Encoder,
    Last,
    Layer,
    Pooled,
    RootMeanSquareNorm,
    Rotary,
    SpanClassifier,
    TokenClassifier,
    Top,
)
from penstock_runtime.models.folder import ModelFolder
from penstock_runtime.rows import Float

FULL, SLIDING = "full_attention", "sliding_attention"
"""Values of `layer_types`."""
BEFORE_TRANSFORMERS_5 = "transformer"
"""The prefix of the weights' names in some models for question answering."""


class DecoderFamily(Family):
    """A decoder, read under the names that Llama's descendants kept. A family overrides what differs."""

    prefix = "model"
    anchor = "embed_tokens.weight"
    default_activation = "silu"
    default_key_heads: ClassVar[int | None] = None
    """Default of `num_key_value_heads`; None: as many as heads of queries."""
    default_theta: ClassVar[float] = 10_000.0
    default_epsilon: ClassVar[float] = 1e-6
    has_head_norms: ClassVar[bool] = False
    """True: queries and keys are normalised head by head."""
    tied_by_default: ClassVar[bool] = False
    """Default of `tie_word_embeddings`."""

    def __init__(self, folder: ModelFolder, longest: int | None = None) -> None:
        """`longest`: tokens of the longest text that is served; None: `ModelFolder.max_tokens`."""
        super().__init__(folder)
        limit = folder.max_tokens if longest is None else longest
        self.longest = min(self.integer("max_position_embeddings"), limit)
        """Positions of the tables of angles."""

    @property
    def base(self) -> str:
        """The prefix of the weights' names in a model with a head."""
        older = f"{BEFORE_TRANSFORMERS_5}.{self.anchor}"
        return BEFORE_TRANSFORMERS_5 if older in self.folder.tensors else self.prefix

    @property
    def epsilon(self) -> float:
        """Epsilon of all normalisations."""
        return self.reader.number("rms_norm_eps", self.default_epsilon)

    @property
    def causal(self) -> bool:
        """True: a token attends to itself and to the tokens before it."""
        return True

    def decoder(self) -> Decoder:
        """The whole model, for text generation. NotBuildable for variants that generation does not compute."""
        encoder = self.encoder()
        if not self.causal:
            raise NotBuildable("its tokens also attend to those after them, and those of a language model must not")
        if self.reader.config.get("final_logit_softcapping"):
            raise NotBuildable("it limits its logits (final_logit_softcapping)")
        words = encoder.embeddings.words
        head = self.language_head(words)
        limits = [layer.rotary.limit for layer in encoder.layers if layer.rotary is not None]
        return Decoder(
            embeddings=words,
            embedding_scale=encoder.embeddings.scale,
            positions=encoder.embeddings.positions,
            layers=encoder.layers,
            activation=encoder.activation,
            final_norm=self.final_norm(),
            head=None if head is words else head,
            heads=self.heads,
            key_heads=self.key_heads,
            head_size=self.head_width,
            context=min(self.longest, *(limit for limit in limits if limit is not None), LONGEST_CONTEXT),
        )

    @property
    def heads(self) -> int:
        """Number of heads of queries."""
        return self.integer("num_attention_heads")

    @property
    def key_heads(self) -> int:
        """Number of heads of keys and values."""
        stated = self.reader.config.get("num_key_value_heads", self.default_key_heads)
        heads = self.heads if stated is None else self.reader.integer("num_key_value_heads", self.default_key_heads)
        if self.heads % heads:
            raise self.reader.invalid("num_key_value_heads", heads, f"a number that divides the {self.heads} heads")
        return heads

    @property
    def head_width(self) -> int:
        """Width of a head."""
        if self.reader.config.get("head_dim") is not None:
            return self.reader.integer("head_dim")
        return self.hidden // self.attention_heads

    def biased(self) -> tuple[bool, bool, bool]:
        """Which products have biases: queries, keys and values; the attention's output; the feed-forward network."""
        attention = self.reader.flag("attention_bias", default=False)
        return attention, attention, self.reader.flag("mlp_bias", default=False)

    def attends_to(self, _index: int) -> AttentionRange:
        """The attention range of a layer."""
        return AttentionRange(causal=self.causal)

    def windowed(self, window: int) -> AttentionRange:
        """The range of `window` tokens: a token itself and those before it."""
        return AttentionRange(window=window - 1 if window < self.longest else None, causal=self.causal)

    def kinds(self, default: list[str]) -> list[str]:
        """The kind of attention of each layer, by `layer_types`."""
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
        """The normalisation after the last layer."""
        return self.norm("norm")

    def language_head(self, words: Float) -> Float:
        """Weights [vocabulary, hidden] of the product from hidden states to logits; `words` if they are tied."""
        if self.reader.flag("tie_word_embeddings", default=self.tied_by_default):
            return words
        return self.reader.top.table("lm_head", *words.shape)

    def activation(self) -> Activation:
        """The activation of the gates."""
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
            up=gate,  # transformers calls the activated product the gate
            gate=up,
            down=body.dense(f"{name}.mlp.down_proj", self.integer("intermediate_size"), hidden, bias=in_network),
            feed_forward_norm=self.norm(f"{name}.post_attention_layernorm"),
            rotary=angles,
            attends_to=self.attends_to(index),
            query_norm=head_norm("q"),
            key_norm=head_norm("k"),
        )

    def attention_products(self, name: str, *, bias: bool) -> Sequence[Dense]:
        """The products that give queries, keys and values."""
        queries, keys = self.heads * self.head_width, self.key_heads * self.head_width
        return [
            self.reader.body.dense(f"{name}.{part}_proj", self.hidden, width, bias=bias)
            for part, width in (("q", queries), ("k", keys), ("v", keys))
        ]

    def gated_products(self, name: str, *, bias: bool) -> Sequence[Dense]:
        """The two first products of the network: the activated gate, and the factor of its result."""
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
