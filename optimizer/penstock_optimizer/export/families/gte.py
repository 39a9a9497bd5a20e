"""GTE since 2024 (gte-multilingual, gte-base-en-v1.5, snowflake-arctic-embed-m-v2.0): BERT's layers with rotary
positions and gated networks.

As with NomicBERT there are two layouts, and the authors' models name code in their repositories, which is not read or
run.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar

from penstock_optimizer.export.families.family import DEFAULTS, ClassifierNames, Family, MaskNames, parts
from penstock_optimizer.export.reader import NotBuildable
from penstock_optimizer.export.rotary import check_unscaled, positive, rotary, table
from penstock_optimizer.export.transformer import Activation, Encoder, Layer, MaskFiller, Rotary
from penstock_runtime.models.folder import ModelFolder

THETAS = {True: 10_000.0, False: 160_000.0}
"""Default of the angles' base: in the authors' layout (True), and in transformers 5 (False)."""
MUST_BE: Mapping[str, object] = {"layer_norm_type": "layer_norm", "logn_attention_scale": False, "pack_qkv": True}
"""Fields of the authors' layout, with the only value that the graph computes: their default."""


class Gte(Family):
    """Alibaba's encoder."""

    prefix = "new"
    position_embedding = "rope"
    has_positions = False
    default_types = 1
    defaults: ClassVar[Mapping[str, int]] = {**DEFAULTS, "vocab_size": 250048, "max_position_embeddings": 8192}
    classifier_names = ClassifierNames("pooler.dense", Activation.TANH, pooled=True)
    mask_names = MaskNames("lm_head.dense", "lm_head.norm", "lm_head.decoder")
    newer_mask_names = replace(mask_names, norm="lm_head.layer_norm")

    def __init__(self, folder: ModelFolder) -> None:
        """NotBuildable as for `Family`."""
        super().__init__(folder)
        for name, known in MUST_BE.items():
            if folder.config.get(name, known) != known:
                raise NotBuildable(f"its {name} is {folder.config[name]}")
        check_unscaled(table(self.reader, "rope_parameters"))

    @property
    def base(self) -> str:
        """`new` in the authors' layout, `gte` in transformers 5."""
        return "gte" if any(name.startswith("gte.") for name in self.folder.tensors) else self.prefix

    @property
    def _newer_names(self) -> bool:
        """Whether the weights have the names of transformers 5, which it also changes into the authors' at times."""
        return f"{self.reader.body.prefix}layers.0.self_attn.o_proj.weight" in self.reader.weights

    def encoder(self) -> Encoder:
        """The model without its head."""
        reader, hidden = self.reader, self.hidden
        heads = self.attention_heads
        angles = self._rotary(hidden // heads)
        layers = tuple(self._layer(index, angles) for index in range(self.integer("num_hidden_layers")))
        return Encoder(self.embeddings(), layers, heads, reader.activation("hidden_act", "gelu"))

    def mask_filler(self, encoder: Encoder, names: MaskNames) -> MaskFiller:
        """With the name of its norm by layout."""
        return super().mask_filler(encoder, self.newer_mask_names if self._newer_names else names)

    def _rotary(self, width: int) -> Rotary:
        """With the authors' scaling for longer texts, if stated: another base, and all angles smaller."""
        reader = self.reader
        stated = table(reader, "rope_parameters")
        if stated:
            theta = positive(reader, stated, "rope_theta", THETAS[False])
        else:
            theta = reader.number("rope_theta", THETAS[self.folder.model_type == "new"])
        scaling, shrink = table(reader, "rope_scaling"), 1.0
        if scaling.get("type", scaling.get("rope_type")) == "ntk":
            factor = scaling.get("factor")
            if not isinstance(factor, int | float) or isinstance(factor, bool) or factor < 1:
                raise reader.invalid("rope_scaling.factor", factor, "a number of at least 1")
            if scaling.get("mixed_b") is not None:
                raise NotBuildable("its rope_scaling has mixed_b")
            theta, shrink = theta * factor, factor ** (2 / width)
        else:
            check_unscaled(scaling)
        return rotary(self.integer("max_position_embeddings"), width, theta, shrink=shrink)

    def _layer(self, index: int, angles: Rotary) -> Layer:
        body, hidden, inner = self.reader.body, self.hidden, self.integer("intermediate_size")
        if self._newer_names:
            name, attention, norms = f"layers.{index}", "self_attn", ("post_attention_layernorm", "post_mlp_layernorm")
            query, key, value = (body.dense(f"{name}.{attention}.{part}_proj", hidden, hidden) for part in "qkv")
            up, gate = (body.dense(f"{name}.mlp.{part}_proj", hidden, inner, bias=False) for part in ("up", "gate"))
        else:
            name, attention, norms = f"encoder.layer.{index}", "attention", ("attn_ln", "mlp_ln")
            query, key, value = parts(body.dense(f"{name}.{attention}.qkv_proj", hidden, 3 * hidden), 3)
            up, gate = parts(body.dense(f"{name}.mlp.up_gate_proj", hidden, 2 * inner, bias=False), 2)
        return Layer(
            query=query,
            key=key,
            value=value,
            output=body.dense(f"{name}.{attention}.o_proj", hidden, hidden),
            attention_norm=body.norm(f"{name}.{norms[0]}", hidden, self.epsilon),
            up=gate,  # the authors call the activated product the gate
            gate=up,
            down=body.dense(f"{name}.mlp.down_proj", inner, hidden),
            feed_forward_norm=body.norm(f"{name}.{norms[1]}", hidden, self.epsilon),
            rotary=angles,
        )
