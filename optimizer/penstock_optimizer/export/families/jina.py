"""Jina AI's encoders: JinaBERT (jina-embeddings-v2, jina-reranker-v1), and XLM-RoBERTa in another layout
(jina-embeddings-v3, jina-colbert-v2, jina-reranker-v2).

JinaBERT has BERT's layers with gated networks, and ALiBi instead of positions. Its second layout, in which queries and
keys are normalised (jina-embeddings-v2-base-code), is not known here.

The other one has RoBERTa's layers under other names, with rotary positions or RoBERTa's. jina-embeddings-v3 has
low-rank adapters (LoRA) for several tasks, of which one may be chosen; its product is added to the weights while they
are read.

The models name code in their repositories, which is not read or run.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar

import numpy as np

from penstock.errors import CorruptModel
from penstock_optimizer.export.families.family import DEFAULTS, ClassifierNames, Family, MaskNames, parts
from penstock_optimizer.export.reader import NotBuildable, Reader, Tensors
from penstock_optimizer.export.rotary import rotary
from penstock_optimizer.export.transformer import Activation, AttentionRange, Encoder, Layer, Positions, Rotary, Slopes
from penstock_runtime.models.folder import ModelFolder
from penstock_runtime.models.sentence import ADAPTERS
from penstock_runtime.rows import Float

GATED: Mapping[str, Activation] = {"geglu": Activation.GELU, "reglu": Activation.RELU}
"""`feed_forward_type`."""


class JinaBert(Family):
    """Jina AI's encoder, of 2023."""

    prefix = "bert"
    position_embedding = "alibi"
    has_positions = False
    classifier_names = ClassifierNames("pooler.dense", Activation.TANH, pooled=True)
    mask_names = MaskNames(
        "cls.predictions.transform.dense", "cls.predictions.transform.LayerNorm", "cls.predictions.decoder",
        "cls.predictions.bias",
    )  # fmt: skip

    def encoder(self) -> Encoder:
        """As BERT's, with a slope for each head. The gates have the activation."""
        stated = self.reader.config.get("feed_forward_type", "geglu")
        if stated not in GATED:
            raise NotBuildable(f"its feed_forward_type is {stated}")
        encoder = super().encoder()
        reach = AttentionRange(bias=Slopes(slopes(encoder.heads)))
        layers = tuple(replace(layer, attends_to=reach) for layer in encoder.layers)
        return replace(encoder, layers=layers, activation=GATED[stated])

    def layer(self, name: str) -> Layer:
        """One layer."""
        body, hidden, epsilon = self.reader.body, self.hidden, self.epsilon
        inner, attention = self.integer("intermediate_size"), f"{name}.attention"
        up, gate = parts(body.dense(f"{name}.mlp.gated_layers", hidden, 2 * inner, bias=False), 2)
        return Layer(
            query=body.dense(f"{attention}.self.query", hidden, hidden),
            key=body.dense(f"{attention}.self.key", hidden, hidden),
            value=body.dense(f"{attention}.self.value", hidden, hidden),
            output=body.dense(f"{attention}.output.dense", hidden, hidden),
            attention_norm=body.norm(f"{attention}.output.LayerNorm", hidden, epsilon),
            up=up,
            gate=gate,
            down=body.dense(f"{name}.mlp.wo", inner, hidden),
            feed_forward_norm=body.norm(f"{name}.mlp.layernorm", hidden, epsilon),
        )


def slopes(heads: int) -> Float:
    """[heads]: a geometric series; of a number of heads that is no power of 2, every second of a longer one as well.

    Press et al., "Train Short, Test Long" (2021), and the authors' code for other numbers of heads.
    """
    whole = 1 << (heads.bit_length() - 1)
    ratio = 2.0 ** (-8.0 / whole)
    found = [ratio**power for power in range(1, whole + 1)]
    between = [(ratio**0.5) ** power for power in range(1, 2 * whole + 1, 2)]
    return np.array(found + between[: heads - whole], np.float32)


THETA = 10_000.0
"""Default of `rotary_emb_base`."""
MUST_BE: Mapping[str, object] = {
    "rotary_emb_dim": None,
    "rotary_emb_scale_base": None,
    "rotary_emb_interleaved": False,
    "use_reg_tokens": False,
}
"""Fields with the only value that the graph computes."""
_ORIGINAL = "parametrizations.weight.original"
_LORA = "parametrizations.weight.0.lora_"
LAYER = "encoder.layers.0.mixer.Wqkv.bias"
"""A tensor that every model of this layout has, and no other XLM-RoBERTa."""


class XlmRobertaFlash(Family):
    """With RoBERTa's positions: jina-reranker-v2."""

    prefix = "roberta"
    anchor = "emb_ln.weight"
    defaults: ClassVar[Mapping[str, int]] = {
        **DEFAULTS,
        "vocab_size": 250_002,
        "hidden_size": 1024,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "intermediate_size": 4096,
        "max_position_embeddings": 8194,
    }
    positions = Positions.CUMULATIVE
    default_padding = 1
    default_types = 1
    embedding_norm = "emb_ln"
    classifier_names = ClassifierNames("classifier.dense", Activation.TANH, "classifier.out_proj")
    mask_names = MaskNames(
        "lm_head.dense", "lm_head.layer_norm", "lm_head.decoder", "lm_head.bias", activation=Activation.GELU
    )

    def __init__(self, folder: ModelFolder) -> None:
        """NotBuildable as for `Family`; CorruptModel for an adapter that does not exist."""
        super().__init__(folder)
        for name, known in MUST_BE.items():
            if folder.config.get(name, known) not in {known, None}:
                raise NotBuildable(f"its {name} is {folder.config[name]}")
        if ADAPTERS in folder.config:
            self.reader.body = AdaptedTensors(self.reader, folder)

    @property
    def epsilon(self) -> float:
        """Epsilon of all normalisations."""
        return self.reader.number("layer_norm_eps", 1e-5)

    @property
    def notes(self) -> tuple[str, ...]:
        """Which adapter is applied."""
        if ADAPTERS not in self.folder.config:
            return ()
        if self.folder.adapter is not None:
            return (f"The adapter {self.folder.adapter} is part of the weights",)
        names = ", ".join(map(str, self.folder.config[ADAPTERS]))
        return (f"No adapter ({names}) is applied: docs/how-to/convert-a-model.md#adapters has how to choose one",)

    @property
    def stored_words(self) -> int:
        """Rows of the table of words."""
        words, multiple = self.integer("vocab_size"), self.reader.integer("pad_vocab_size_multiple", 1)
        return -(-words // multiple) * multiple

    def encoder(self) -> Encoder:
        """The model without its head."""
        heads = self.attention_heads
        angles = self._angles(heads)
        layers = tuple(self._layer(index, angles) for index in range(self.integer("num_hidden_layers")))
        return Encoder(self.embeddings(), layers, heads, self.reader.activation("hidden_act", "gelu"))

    def _angles(self, heads: int) -> Rotary | None:  # noqa: ARG002 - of those with rotary positions
        return None

    def _layer(self, index: int, angles: Rotary | None) -> Layer:
        body, name, hidden = self.reader.body, f"encoder.layers.{index}", self.hidden
        inner = self.integer("intermediate_size")
        query, key, value = parts(body.dense(f"{name}.mixer.Wqkv", hidden, 3 * hidden), 3)
        return Layer(
            query=query,
            key=key,
            value=value,
            output=body.dense(f"{name}.mixer.out_proj", hidden, hidden),
            attention_norm=body.norm(f"{name}.norm1", hidden, self.epsilon),
            up=body.dense(f"{name}.mlp.fc1", hidden, inner),
            down=body.dense(f"{name}.mlp.fc2", inner, hidden),
            feed_forward_norm=body.norm(f"{name}.norm2", hidden, self.epsilon),
            rotary=angles,
        )


class XlmRobertaRotary(XlmRobertaFlash):
    """With rotary positions: jina-embeddings-v3, jina-colbert-v2."""

    position_embedding = "rotary"
    positions = Positions.INDEX
    has_positions = False

    def _angles(self, heads: int) -> Rotary:
        base = self.reader.number("rotary_emb_base", THETA)
        return rotary(self.integer("max_position_embeddings"), self.hidden // heads, base)


class AdaptedTensors(Tensors):
    """The encoder's tensors of a model with adapters: each matrix W is W + (alpha / rank) B A of the chosen one.

    Hu et al., "LoRA", arXiv 2106.09685. Of embeddings the product is A B, as they are stored transposed.
    """

    def __init__(self, reader: Reader, folder: ModelFolder) -> None:
        """CorruptModel if the chosen adapter is not one of the model's."""
        super().__init__(reader.weights, reader.body.prefix)
        names = folder.config[ADAPTERS]
        if not isinstance(names, list) or not names:
            raise reader.invalid(ADAPTERS, names, "a list of names")
        if folder.adapter is not None and folder.adapter not in names:
            raise CorruptModel(
                f"{folder.path}: the default task is {folder.adapter!r}, and the model's adapters are "
                f"{', '.join(map(str, names))}",
                remedy="Name one of these in sentence_bert_config.json, or remove default_task",
            )
        self._index = None if folder.adapter is None else names.index(folder.adapter)
        self._count, self._rank = len(names), reader.integer("lora_rank", 4)
        self._scale = reader.number("lora_alpha", 1.0) / self._rank

    def table(self, name: str, rows: int, width: int) -> Float:
        """See `Tensors`."""
        stem = f"{self.prefix}{name}"
        if f"{stem}.{_ORIGINAL}" not in self.weights:
            return super().table(name, rows, width)
        original = self.weights.take(f"{stem}.{_ORIGINAL}", (rows, width))
        if self._index is None:
            return original
        first, second = ((self._rank, width), (rows, self._rank))
        is_table = name.startswith("embeddings.")
        if is_table:
            first, second = second, first
        a, b = (
            self.weights.take(f"{stem}.{_LORA}{letter}", (self._count, *shape))[self._index]
            for letter, shape in (("A", first), ("B", second))
        )
        product = a @ b if is_table else b @ a
        adapted: Float = original + product * self._scale
        return adapted
