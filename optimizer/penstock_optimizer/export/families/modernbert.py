"""ModernBERT (mmBERT, gte-modernbert): pre-norm layers, rotary positions, gated networks, local and global attention.

Its configuration is read as transformers 4 writes it (`global_rope_theta`, `local_rope_theta`,
`global_attn_every_n_layers`) and as transformers 5 does (`rope_parameters`, `layer_types`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from penstock.tasks import Head
from penstock_optimizer.export.families.family import DEFAULTS, Family, MaskNames, parts
from penstock_optimizer.export.rotary import check_unscaled, rotary, table
from penstock_optimizer.export.transformer import (
    EVERY_TOKEN,
    AttentionRange,
    Classifier,
    Dense,
    Embeddings,
    Encoder,
    Layer,
    MaskFiller,
    Norm,
    Pooled,
    Rotary,
    SpanClassifier,
    TokenClassifier,
    Top,
    Transform,
)

GLOBAL, LOCAL = "full_attention", "sliding_attention"
THETAS = {GLOBAL: ("global_rope_theta", 160_000.0), LOCAL: ("local_rope_theta", 10_000.0)}
"""Where transformers 4 has the base of the angles, and its default."""
EVERY = 3
"""Default of `global_attn_every_n_layers`."""
WINDOW = 128
"""Default of `local_attention`."""


class ModernBert(Family):
    """Answer.AI's encoder."""

    prefix = "model"
    anchor = "embeddings.tok_embeddings.weight"
    defaults: ClassVar[Mapping[str, int]] = {
        **DEFAULTS,
        "vocab_size": 50368,
        "num_hidden_layers": 22,
        "intermediate_size": 1152,
        "max_position_embeddings": 8192,
    }
    keys: ClassVar[Mapping[str, str]] = {"hidden_act": "hidden_activation"}
    mask_names = MaskNames("head.dense", "head.norm", "decoder")

    @property
    def epsilon(self) -> float:
        """Epsilon of all normalisations."""
        return self.reader.number("norm_eps", 1e-5)

    def embeddings(self) -> Embeddings:
        """Words alone."""
        words = self.reader.body.table("embeddings.tok_embeddings", self.integer("vocab_size"), self.hidden)
        norm = self._norm("embeddings.norm")
        return Embeddings(words, None, None, norm)

    def encoder(self) -> Encoder:
        """The model without its head."""
        reader, hidden = self.reader, self.hidden
        heads = self.attention_heads
        kinds = self._kinds()
        rotaries = {kind: self._rotary(kind, hidden // heads) for kind in sorted(set(kinds))}
        return Encoder(
            embeddings=self.embeddings(),
            layers=tuple(self._layer(index, kind, rotaries[kind]) for index, kind in enumerate(kinds)),
            heads=heads,
            activation=reader.activation(self.key("hidden_act"), self.default_activation),
            final_norm=self._norm("final_norm"),
        )

    def _kinds(self) -> list[str]:
        """The attention of each layer."""
        reader, layers = self.reader, self.integer("num_hidden_layers")
        kinds = reader.config.get("layer_types")
        if kinds is None:
            every = reader.integer("global_attn_every_n_layers", EVERY)
            return [LOCAL if index % every else GLOBAL for index in range(layers)]
        if not isinstance(kinds, list) or len(kinds) != layers or not set(kinds) <= {GLOBAL, LOCAL}:
            raise reader.invalid("layer_types", kinds, f"a list of {layers} names, each {GLOBAL} or {LOCAL}")
        return kinds

    def _rotary(self, kind: str, width: int) -> Rotary:
        reader, (key, default) = self.reader, THETAS[kind]
        check_unscaled(table(reader, "rope_scaling"))
        parameters = table(reader, "rope_parameters").get(kind) or {}
        if not isinstance(parameters, dict):
            raise reader.invalid(f"rope_parameters.{kind}", parameters, "an object")
        check_unscaled(parameters)
        if "rope_theta" in parameters:
            theta = parameters["rope_theta"]
            if not isinstance(theta, int | float) or isinstance(theta, bool) or theta <= 0:
                raise reader.invalid(f"rope_parameters.{kind}.rope_theta", theta, "a positive number")
        else:
            if key in reader.config and reader.config[key] is None:  # transformers 4: as for global attention
                key, default = THETAS[GLOBAL]
            theta = reader.number(key, default)
        return rotary(self.integer("max_position_embeddings"), width, theta)

    def _layer(self, index: int, kind: str, angles: Rotary) -> Layer:
        reader, name, hidden = self.reader, f"layers.{index}", self.hidden
        in_attention = reader.flag("attention_bias", default=False)
        in_network = reader.flag("mlp_bias", default=False)
        inner = self.integer("intermediate_size")
        query, key, value = parts(reader.body.dense(f"{name}.attn.Wqkv", hidden, 3 * hidden, bias=in_attention), 3)
        up, gate = parts(reader.body.dense(f"{name}.mlp.Wi", hidden, 2 * inner, bias=in_network), 2)
        window = reader.integer("local_attention", WINDOW) // 2
        return Layer(
            query=query,
            key=key,
            value=value,
            output=reader.body.dense(f"{name}.attn.Wo", hidden, hidden, bias=in_attention),
            attention_norm=self._norm(f"{name}.attn_norm") if index else None,
            up=up,
            gate=gate,
            down=reader.body.dense(f"{name}.mlp.Wo", inner, hidden, bias=in_network),
            feed_forward_norm=self._norm(f"{name}.mlp_norm"),
            rotary=angles,
            attends_to=AttentionRange(window) if kind == LOCAL else EVERY_TOKEN,
        )

    def _norm(self, name: str, *, in_head: bool = False) -> Norm:
        reader = self.reader
        tensors = reader.top if in_head else reader.body
        return tensors.norm(name, self.hidden, self.epsilon, bias=reader.flag("norm_bias", default=False))

    def top(self, head: Head, encoder: Encoder) -> Top:
        """Every head starts with dense, activation and norm."""
        reader, hidden = self.reader, encoder.hidden
        if head is Head.ENCODER or head is Head.CAUSAL_LM:
            return super().top(head, encoder)
        transform = Transform(
            dense=reader.top.dense("head.dense", hidden, hidden, bias=reader.flag("classifier_bias", default=False)),
            activation=reader.activation("classifier_activation", "gelu"),
            norm=self._norm("head.norm", in_head=True),
        )
        match head:
            case Head.SEQUENCE:
                out = reader.top.dense("classifier", hidden, self.labels)
                return Classifier(transform, out, self._pooled())
            case Head.TOKEN:
                return TokenClassifier(reader.top.dense("classifier", hidden, self.labels), transform)
            case Head.SPAN:
                return SpanClassifier(reader.top.dense("classifier", hidden, 2), transform)
            case Head.MASKED_LM | Head.SPARSE:
                if reader.flag("decoder_bias", default=True):
                    out = self.vocabulary(encoder.embeddings.words, self.mask_names)
                else:
                    out = Dense(self.vocabulary_weight(encoder.embeddings.words, self.mask_names), None)
                return MaskFiller(transform, out, self.mask_id())

    def _pooled(self) -> Pooled:
        pooling = self.reader.config.get("classifier_pooling", "cls")
        if pooling not in {"cls", "mean"}:
            raise self.reader.invalid("classifier_pooling", pooling, "cls or mean")
        return Pooled.FIRST if pooling == "cls" else Pooled.MEAN
