"""NomicBERT (nomic-embed-text-v1.5): BERT's layers with rotary positions and gated networks, mostly without biases.

Its weights and configuration have two layouts: the authors', and the layout of transformers 5. The authors' models name
code in their repositories, which is not read or run: the formulas are published.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from penstock.tasks import Head
from penstock_optimizer.export.families.family import DEFAULTS, ClassifierNames, Family, MaskNames, parts
from penstock_optimizer.export.reader import NotBuildable
from penstock_optimizer.export.rotary import check_unscaled, positive, rotary, table
from penstock_optimizer.export.transformer import Activation, Dense, Encoder, Layer, MaskFiller, Rotary, Top, Transform
from penstock_runtime.models.folder import ModelFolder

GATED: Mapping[str, Activation] = {"swiglu": Activation.SILU, "geglu": Activation.GELU, "glu": Activation.SIGMOID}
"""`activation_function` of the authors' layout."""
MULTIPLE = 256
"""The authors' code makes the inner width a multiple of it."""
AUTHORS_KEYS: Mapping[str, str] = {
    "hidden_size": "n_embd",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "max_position_embeddings": "n_positions",
}
THETA, AUTHORS_THETA = 1000.0, 10_000.0
"""Defaults of the angles' base."""
MUST_BE: Mapping[str, object] = {
    "prenorm": False,
    "parallel_block": False,
    "use_rms_norm": False,
    "causal": False,
    "rotary_emb_fraction": 1.0,
    "rotary_emb_interleaved": False,
    "rotary_emb_scale_base": None,
    "rotary_scaling_factor": None,
    "num_heads_kv": None,
    "num_experts": 0,
}
"""Fields of the authors' layout, with the only value that the graph computes."""
ABSENT: Mapping[str, object] = {**MUST_BE, "rotary_emb_fraction": 0.0}
"""Their values where config.json omits them."""


class NomicBert(Family):
    """Nomic's encoder."""

    prefix = "bert"
    has_positions = False
    defaults: ClassVar[Mapping[str, int]] = {**DEFAULTS, "vocab_size": 30528, "max_position_embeddings": 2048}
    classifier_names = ClassifierNames("pooler.dense", Activation.TANH, pooled=True)
    mask_names = MaskNames(
        "cls.predictions.transform.dense", "cls.predictions.transform.layer_norm", "cls.predictions.decoder",
        "cls.predictions.bias",
    )  # fmt: skip

    def __init__(self, folder: ModelFolder) -> None:
        """NotBuildable as for `Family`."""
        self.by_authors = "n_embd" in folder.config
        super().__init__(folder)
        if not self.by_authors:
            check_unscaled(table(self.reader, "rope_parameters"))
            return
        for name, known in MUST_BE.items():
            value = folder.config.get(name, ABSENT[name])
            if value != known:
                raise NotBuildable(f"its {name} is {value}")

    @property
    def base(self) -> str:
        """`bert` in the authors' layout, `nomic_bert` in transformers 5."""
        return "nomic_bert" if any(name.startswith("nomic_bert.") for name in self.folder.tensors) else self.prefix

    def key(self, name: str) -> str:
        """By layout."""
        return AUTHORS_KEYS.get(name, name) if self.by_authors else name

    @property
    def epsilon(self) -> float:
        """Epsilon of all normalisations."""
        if self.by_authors:
            return self.reader.number("layer_norm_epsilon", 1e-5)
        return self.reader.number("layer_norm_eps", 1e-12)

    def _biased(self, key: str) -> bool:
        """True if layers have biases, by a field of the authors' layout; in transformers 5 they have none."""
        return self.by_authors and self.reader.flag(key, default=True)

    @property
    def stored_words(self) -> int:
        """Rows of the table of words."""
        words = self.integer("vocab_size")
        multiple = self.reader.integer("pad_vocab_size_multiple", 1) if self.by_authors else 1
        return -(-words // multiple) * multiple

    @property
    def _inner(self) -> int:
        if not self.by_authors:
            return self.integer("intermediate_size")
        inner = self.reader.config.get("n_inner")
        inner = 8 * self.hidden // 3 if inner is None else self.reader.integer("n_inner")
        return -(-inner // MULTIPLE) * MULTIPLE

    @property
    def _activation(self) -> Activation:
        if not self.by_authors:
            return self.reader.activation("hidden_act", "silu")
        name = self.reader.config.get("activation_function", "gelu")
        if name not in GATED:
            raise NotBuildable(f"its activation_function is {name}")
        return GATED[name]

    def encoder(self) -> Encoder:
        """The model without its head."""
        reader, hidden = self.reader, self.hidden
        heads = self.attention_heads
        if reader.config.get("head_dim") not in {None, hidden // heads}:
            raise NotBuildable("its head_dim is not hidden_size / num_attention_heads")
        if self.by_authors:
            theta = reader.number("rotary_emb_base", AUTHORS_THETA)
        else:
            theta = positive(reader, table(reader, "rope_parameters"), "rope_theta", THETA)
        angles = rotary(self.integer("max_position_embeddings"), hidden // heads, theta)
        layers = range(self.integer("num_hidden_layers"))
        read = self._layer if self._newer_names else self._layer_by_authors
        return Encoder(self.embeddings(), tuple(read(index, angles) for index in layers), heads, self._activation)

    @property
    def _newer_names(self) -> bool:
        """Whether the weights have the names of transformers 5, which it also changes into the authors' at times."""
        return f"{self.reader.body.prefix}embeddings.LayerNorm.weight" in self.reader.weights

    @property
    def embedding_norm(self) -> str:  # type: ignore[override] # by layout
        """The name of the norm of the embeddings, by layout."""
        return "embeddings.LayerNorm" if self._newer_names else "emb_ln"

    def _layer_by_authors(self, index: int, angles: Rotary) -> Layer:
        body, name, hidden, inner = self.reader.body, f"encoder.layers.{index}", self.hidden, self._inner
        in_attention, in_network = self._biased("qkv_proj_bias"), self._biased("mlp_fc1_bias")
        query, key, value = parts(body.dense(f"{name}.attn.Wqkv", hidden, 3 * hidden, bias=in_attention), 3)
        return Layer(
            query=query,
            key=key,
            value=value,
            output=body.dense(f"{name}.attn.out_proj", hidden, hidden, bias=in_attention),
            attention_norm=body.norm(f"{name}.norm1", hidden, self.epsilon),
            up=body.dense(f"{name}.mlp.fc12", hidden, inner, bias=in_network),
            gate=body.dense(f"{name}.mlp.fc11", hidden, inner, bias=in_network),
            down=body.dense(f"{name}.mlp.fc2", inner, hidden, bias=self._biased("mlp_fc2_bias")),
            feed_forward_norm=body.norm(f"{name}.norm2", hidden, self.epsilon),
            rotary=angles,
        )

    def _layer(self, index: int, angles: Rotary) -> Layer:
        body, name, hidden, inner = self.reader.body, f"layers.{index}", self.hidden, self._inner
        query, key, value, output = (
            body.dense(f"{name}.self_attn.{part}_proj", hidden, hidden, bias=False) for part in "qkvo"
        )
        return Layer(
            query=query,
            key=key,
            value=value,
            output=output,
            attention_norm=body.norm(f"{name}.post_attention_layernorm", hidden, self.epsilon),
            up=body.dense(f"{name}.mlp.gate_proj", hidden, inner, bias=False),
            gate=body.dense(f"{name}.mlp.up_proj", hidden, inner, bias=False),
            down=body.dense(f"{name}.mlp.down_proj", inner, hidden, bias=False),
            feed_forward_norm=body.norm(f"{name}.post_mlp_layernorm", hidden, self.epsilon),
            rotary=angles,
        )

    def top(self, head: Head, encoder: Encoder) -> Top:
        """As BERT's; the authors' head for masked words has as many biases as their networks."""
        if head is not Head.MASKED_LM or not self.by_authors:
            return super().top(head, encoder)
        reader, names, hidden = self.reader, self.mask_names, encoder.hidden
        biased = self._biased("mlp_fc1_bias")
        activation = Activation.SILU if encoder.activation is Activation.SILU else Activation.GELU
        transform = Transform(
            dense=reader.top.dense(names.dense, hidden, hidden, bias=biased),
            activation=activation,
            norm=reader.top.norm(names.norm, hidden, self.epsilon),
        )
        words = encoder.embeddings.words
        bias = reader.top.vector((f"{names.projection}.bias",), len(words)) if biased else None
        return MaskFiller(transform, Dense(words, bias), self.mask_id())
