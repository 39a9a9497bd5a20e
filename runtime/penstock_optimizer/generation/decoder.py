"""What a decoder (a causal language model) is, as values: every family is read into it, and graphs are made from it.

A decoder is embeddings, then layers of attention and feed-forward network with normalisations, then a normalisation and
the product with the head. The families differ in names, in normalisations, in rotary positions, in windows, and in
gates.
"""

from __future__ import annotations

from dataclasses import dataclass

from penstock_optimizer.export.encoder import Activation, Dense
from penstock_runtime.rows import Float


@dataclass(frozen=True, eq=False)
class Normalisation:
    """Normalisation over the last axis.

    Without `bias` by the root mean square (RMSNorm): x / sqrt(mean(x^2) + epsilon) * weight.
    With it by mean and variance (LayerNorm): (x - mean) / sqrt(variance + epsilon) * weight + bias.
    """

    weight: Float
    """[width]. Gemma stores the difference from 1; here it is the factor itself."""
    bias: Float | None
    epsilon: float


@dataclass(frozen=True, eq=False)
class Rope:
    """Rotary positions: number i and number i + half of a head's first 2 x half numbers are turned as a pair, by the
    angle position x frequencies[i]."""

    frequencies: Float
    """[half]"""
    magnitude: float = 1.0
    """Factor of cosine and sine ("attention factor" of LongRoPE)."""


@dataclass(frozen=True, eq=False)
class DecoderLayer:
    """One layer."""

    query: Dense
    key: Dense
    value: Dense
    output: Dense
    up: Dense
    down: Dense
    gate: Dense | None
    """Of a gated network: down(activation(gate(x)) * up(x)). None: down(activation(up(x)))."""
    attention_norm: Normalisation
    """Of the attention's input."""
    network_norm: Normalisation
    """Of the network's input."""
    query_norm: Normalisation | None = None
    """Of each head's queries, before the rotation (Qwen3, Gemma 3)."""
    key_norm: Normalisation | None = None
    attended_norm: Normalisation | None = None
    """Of the attention's output, before the sum (Gemma 3)."""
    expanded_norm: Normalisation | None = None
    """Of the network's output, before the sum (Gemma 3)."""
    rope: Rope | None = None
    """None: positions come from a table."""
    scale: float = 1.0
    """Factor of the products of queries and keys."""
    window: int | None = None
    """A token attends to this number of tokens at most, the last of them itself. None: to all before it."""


@dataclass(frozen=True, eq=False)
class Decoder:
    """A whole model."""

    embeddings: Float
    """[vocabulary, hidden]"""
    embedding_scale: float
    """Factor of the embeddings (Gemma); 1 for the others."""
    positions: Float | None
    """[positions, hidden], added to the embeddings (GPT-2)."""
    layers: tuple[DecoderLayer, ...]
    activation: Activation
    final_norm: Normalisation
    head: Dense | None
    """None: the embeddings are the head's weights."""
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
    def parameters(self) -> int:
        """Numbers of all products and tables, each shared one once, without normalisations and biases."""
        dense = [one for layer in self.layers for one in _products(layer)] + ([self.head] if self.head else [])
        tables = [self.embeddings, *([self.positions] if self.positions is not None else [])]
        return sum(one.weight.size for one in dense) + sum(table.size for table in tables)


def _products(layer: DecoderLayer) -> list[Dense]:
    gate = [layer.gate] if layer.gate is not None else []
    return [layer.query, layer.key, layer.value, layer.output, layer.up, layer.down, *gate]
