"""JinaBERT (jina-embeddings-v2, jina-reranker-v1): BERT's layers with gated networks and ALiBi instead of positions.

The authors' models name code of their own, which is not read or run. They have a second layout, in which queries and
keys are normalised (jina-embeddings-v2-base-code), that is not known here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from penstock_optimizer.export.encoder import Activation, AttentionRange, Embeddings, Encoder, Layer, Slopes
from penstock_optimizer.export.family import ClassifierNames, Family, MaskNames, parts
from penstock_optimizer.export.reader import NotBuildable
from penstock_runtime.rows import Float

GATED: Mapping[str, Activation] = {"geglu": Activation.GELU, "reglu": Activation.RELU}
"""`feed_forward_type`."""


class JinaBert(Family):
    """Jina AI's encoder, of 2023."""

    prefix = "bert"
    position_embedding = "alibi"
    classifier_names = ClassifierNames("pooler.dense", Activation.TANH, pooled=True)
    mask_names = MaskNames(
        "cls.predictions.transform.dense", "cls.predictions.transform.LayerNorm", "cls.predictions.decoder",
        "cls.predictions.bias",
    )  # fmt: skip

    def encoder(self) -> Encoder:
        """As BERT's, with a slope for each head. The activation is that of the gates."""
        stated = self.reader.config.get("feed_forward_type", "geglu")
        if stated not in GATED:
            raise NotBuildable(f"its feed_forward_type is {stated}")
        encoder = super().encoder()
        reach = AttentionRange(bias=Slopes(slopes(encoder.heads)))
        layers = tuple(replace(layer, attends_to=reach) for layer in encoder.layers)
        return replace(encoder, layers=layers, activation=GATED[stated])

    def embeddings(self) -> Embeddings:
        """Words and types."""
        body, hidden = self.reader.body, self.hidden
        types = self.reader.integer("type_vocab_size", 2, least=0)
        return Embeddings(
            words=body.table("embeddings.word_embeddings", self.integer("vocab_size"), hidden),
            positions=None,
            types=body.table("embeddings.token_type_embeddings", types, hidden) if types else None,
            norm=body.norm("embeddings.LayerNorm", hidden, self.epsilon),
        )

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
