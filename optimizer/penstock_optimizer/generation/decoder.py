"""What a decoder (a causal language model) is, as values: every family is read into it, and graphs are made from it.

A decoder is embeddings, then layers of attention and feed-forward network with normalisations before them, then a
normalisation and the product with the head. `penstock_optimizer.export` knows the families.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from penstock.errors import UnsupportedModel
from penstock_optimizer.export.decoders import Llama
from penstock_optimizer.export.encoder import Activation, AnyNorm, Dense, Layer
from penstock_optimizer.export.families import FAMILIES
from penstock_optimizer.export.reader import NotBuildable
from penstock_runtime.models.folder import ModelFolder
from penstock_runtime.rows import Float

LONGEST_CONTEXT = 131_072
"""Tokens; limits what config.json may promise."""


@dataclass(frozen=True, eq=False)
class Decoder:
    """A whole model. Every layer is causal, and has `attention_norm`."""

    embeddings: Float
    """[vocabulary, hidden]"""
    embedding_scale: float
    """Factor of the embeddings (Gemma); 1 for the others."""
    positions: Float | None
    """[positions, hidden], added to the embeddings (GPT-2)."""
    layers: tuple[Layer, ...]
    activation: Activation
    final_norm: AnyNorm
    head: Float | None
    """[vocabulary, hidden]; None: the embeddings are the head's weights."""
    heads: int
    key_heads: int
    """Heads of keys and values; each serves heads / key_heads queries."""
    head_size: int
    context: int
    """The largest number of tokens of a sequence."""

    @property
    def vocabulary(self) -> int:
        """The number of logits of a token."""
        return len(self.embeddings)

    @property
    def hidden(self) -> int:
        """Width between layers."""
        return int(self.embeddings.shape[1])

    @property
    def score_scale(self) -> float:
        """Factor of the products of queries and keys."""
        return 1 / math.sqrt(self.head_size)

    @property
    def parameters(self) -> int:
        """Numbers of all products and tables, each shared one once, without normalisations and biases."""
        tables = [self.embeddings, self.positions, self.head]
        products = [one.weight for layer in self.layers for one in _products(layer)]
        return sum(table.size for table in (*products, *tables) if table is not None)


def _products(layer: Layer) -> list[Dense]:
    gate = [layer.gate] if layer.gate is not None else []
    return [layer.query, layer.key, layer.value, layer.output, layer.up, layer.down, *gate]


def window_of(layer: Layer) -> int:
    """The number of tokens that a token attends to at most, the last of them itself; 0: to all before it."""
    return 0 if layer.attends_to.window is None else layer.attends_to.window + 1


def read_decoder(folder: ModelFolder) -> Decoder:
    """The decoder of a model folder; weights are memory-mapped where they are float32.

    UnsupportedModel for other families and for variants that are not computed here, with the list of the families;
    CorruptModel names the file and the field or tensor.
    """
    family = FAMILIES.get(folder.model_type)
    if family is None or not issubclass(family, Llama) or not family.generates:
        served = sorted(name for name, one in FAMILIES.items() if one.generates)
        raise UnsupportedModel(
            f"{folder.path} is of the type {folder.model_type or 'unknown'}, which text-generation does not serve",
            remedy=f"Use a model of one of the types {', '.join(served)}",
        )
    try:
        return _read(family(folder, LONGEST_CONTEXT))
    except NotBuildable as error:
        raise UnsupportedModel(
            f"{folder.path} cannot be served for text-generation: {error}",
            remedy="Use another model of this family (docs/reference/models.md#text-generation)",
        ) from error


def _read(family: Llama) -> Decoder:
    encoder = family.encoder()
    if not family.causal:
        raise NotBuildable("its tokens also attend to those after them, and those of a language model must not")
    if family.reader.config.get("final_logit_softcapping"):
        raise NotBuildable("it limits its logits (final_logit_softcapping)")
    words = encoder.embeddings.words
    head = family.language_head(words)
    limits = [layer.rotary.limit for layer in encoder.layers if layer.rotary is not None]
    return Decoder(
        embeddings=words,
        embedding_scale=encoder.embeddings.scale,
        positions=encoder.embeddings.positions,
        layers=encoder.layers,
        activation=encoder.activation,
        final_norm=family.final_norm(),
        head=None if head is words else head,
        heads=family.heads,
        key_heads=family.key_heads,
        head_size=family.head_width,
        context=min(family.longest, *(limit for limit in limits if limit is not None), LONGEST_CONTEXT),
    )
