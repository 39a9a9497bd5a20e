"""Encoders of the BERT kind, and decoders, as values: every family is read into them, and every graph is made of them.

All of them are the same machine: embeddings, then layers of attention and feed-forward network, each with a residual
sum and a normalisation: after the sum ("post-norm", BERT) or before attention and network ("pre-norm", ModernBERT).
The families differ in names, in how positions enter, in optional parts (gates, windows, biases), and in the head.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from penstock_runtime.models.sentence import SparsePooling
from penstock_runtime.rows import Float


class Activation(StrEnum):
    """Functions between two linear layers; `BY_NAME` has transformers' names."""

    GELU = "gelu"
    """x / 2 * (1 + erf(x / sqrt 2))."""
    GELU_TANH = "gelu-tanh"
    """The approximation with tanh (`gelu_new`, `gelu_pytorch_tanh`)."""
    GELU_SIGMOID = "gelu-sigmoid"
    """x * sigmoid(1.702 x) (`quick_gelu`)."""
    SILU = "silu"
    RELU = "relu"
    RELU_SQUARED = "relu-squared"
    TANH = "tanh"
    SIGMOID = "sigmoid"
    LINEAR = "linear"


BY_NAME: Mapping[str, Activation] = {
    "gelu": Activation.GELU,
    "gelu_python": Activation.GELU,
    "gelu_new": Activation.GELU_TANH,
    "gelu_fast": Activation.GELU_TANH,
    "gelu_accurate": Activation.GELU_TANH,
    "gelu_pytorch_tanh": Activation.GELU_TANH,
    "gelu_python_tanh": Activation.GELU_TANH,
    "quick_gelu": Activation.GELU_SIGMOID,
    "silu": Activation.SILU,
    "swish": Activation.SILU,
    "relu": Activation.RELU,
    "relu2": Activation.RELU_SQUARED,
    "tanh": Activation.TANH,
    "sigmoid": Activation.SIGMOID,
    "linear": Activation.LINEAR,
}
"""`hidden_act` of config.json."""
THROUGH_TORCH = frozenset({"gelu_10", "laplace", "leaky_relu", "mish", "prelu", "relu6", "xielu"})
"""Further names that transformers has; any other is a mistake in config.json."""


@dataclass(frozen=True, eq=False)
class Dense:
    """y = x W^T + b, weights as torch stores them."""

    weight: Float
    """[out, in]"""
    bias: Float | None
    """[out]; None: nothing is added."""

    def scaled(self, factor: float) -> Dense:
        """The layer with `factor` times the result."""
        number = np.float32(factor)
        return Dense(self.weight * number, None if self.bias is None else self.bias * number)


@dataclass(frozen=True, eq=False)
class Norm:
    """Layer normalisation over the last axis."""

    weight: Float
    bias: Float
    epsilon: float


@dataclass(frozen=True, eq=False)
class RootMeanSquareNorm:
    """Values divided by their root mean square over the last axis (RMSNorm)."""

    weight: Float
    epsilon: float


AnyNorm = Norm | RootMeanSquareNorm


class Positions(StrEnum):
    """How a token's row in the position table is found."""

    INDEX = "index"
    """Its index in the sequence."""
    CUMULATIVE = "cumulative"
    """Padding id plus the count of tokens so far that are not padding; padding itself has the padding id."""


@dataclass(frozen=True, eq=False)
class Embeddings:
    """Sum of word, position and type vectors, normalised, and projected where the hidden size is another."""

    words: Float
    """[vocabulary, width]"""
    positions: Float | None
    """[positions, width]; None when positions enter in the attention only."""
    types: Float | None
    """[types, width]; None when the model has none."""
    norm: AnyNorm | None
    position_kind: Positions = Positions.INDEX
    padding_id: int = 0
    """Only for cumulative positions."""
    scale: float = 1.0
    """Of the word vectors."""
    projection: Dense | None = None
    """[hidden, width]"""


@dataclass(frozen=True, eq=False)
class Rotary:
    """Rotary positions: number i and number i + half of a head's first 2 x half numbers are rotated as a pair, by the
    angle position x frequencies[i]. Queries and keys are; `half` is mostly half the width of a head."""

    frequencies: Float
    """[half], radians for each position."""
    positions: int
    """Rows of the tables."""
    magnitude: float = 1.0
    """Factor of cosine and sine (`attention_factor` of YaRN and LongRoPE)."""
    limit: int | None = None
    """Longer sequences have other frequencies (LongRoPE); None: all have these."""

    @cached_property
    def cos(self) -> Float:
        """[positions, half], the same object each time, so that graphs store it once."""
        return np.cos(self._angles) * np.float32(self.magnitude)

    @cached_property
    def sin(self) -> Float:
        """As `cos`."""
        return np.sin(self._angles) * np.float32(self.magnitude)

    @property
    def _angles(self) -> Float:
        # In float32, as torch computes them: far positions depend on it.
        return np.arange(self.positions, dtype=np.float32)[:, np.newaxis] * self.frequencies


@dataclass(frozen=True, eq=False)
class DistanceVectors:
    """Vectors of the distances between query and key: their products are added to the scores (DeBERTa).

    [heads, rows, width of a head] each, scaled as the scores are; `Encoder.distance_rows` has the row of a distance.
    """

    keys: Float | None
    """Multiplied with queries; None: they are not."""
    queries: Float | None
    """Multiplied with keys; None: they are not."""


@dataclass(frozen=True, eq=False)
class DistanceBias:
    """Added to the scores of each head by the distance from query to key (T5)."""

    table: Float
    """[heads, 2 * furthest + 1]: for each distance, key less query, from -furthest to furthest; it counts as that when
    it is more."""


@dataclass(frozen=True, eq=False)
class Slopes:
    """The distance times the slope of the head, subtracted from the scores (ALiBi)."""

    slopes: Float
    """[heads]"""


@dataclass(frozen=True, eq=False)
class Convolution:
    """Over neighbouring tokens of the embeddings; activated, added to the first layer's result and normalised."""

    weight: Float
    """[out, in / groups, an odd number of tokens]"""
    bias: Float
    groups: int
    activation: Activation
    norm: Norm


@dataclass(frozen=True)
class AttentionRange:
    """Which tokens a token attends to, and what depends on their distance."""

    window: int | None = None
    """The longest distance between a token and those that it attends to; None: any."""
    causal: bool = False
    """It attends to itself and to the tokens before it."""
    bias: DistanceBias | Slopes | None = None


@dataclass(frozen=True, eq=False)
class CrossAttention:
    """Of a decoder's layer, over the encoder's hidden states; after the layer's own attention."""

    query: Dense
    key: Dense
    value: Dense
    output: Dense
    norm: Norm


EVERY_TOKEN = AttentionRange()


@dataclass(frozen=True, eq=False)
class Layer:
    """Attention and feed-forward network with their norms. ALBERT uses one layer object several times."""

    query: Dense
    key: Dense
    """As wide as the queries; narrower where several heads of queries share one of keys and values (grouped-query
    attention)."""
    value: Dense
    output: Dense
    attention_norm: AnyNorm | None
    """After the attention; before it in a pre-norm encoder, where None means no norm."""
    up: Dense
    down: Dense
    feed_forward_norm: AnyNorm
    """After the feed-forward network; before it in a pre-norm encoder."""
    gate: Dense | None = None
    """Not None: its product is multiplied with the activated `up` (GeGLU, SwiGLU)."""
    rotary: Rotary | None = None
    distances: DistanceVectors | None = None
    attends_to: AttentionRange = EVERY_TOKEN
    """Layers with equal ranges share the nodes made of it."""
    query_norm: AnyNorm | None = None
    """Of each head's queries, [width of a head], before rotary positions."""
    key_norm: AnyNorm | None = None
    """The same for keys."""
    attention_output_norm: AnyNorm | None = None
    """Of the attention's result, before it is added."""
    feed_forward_output_norm: AnyNorm | None = None
    """The same for the feed-forward network."""
    cross: CrossAttention | None = None


@dataclass(frozen=True, eq=False)
class Encoder:
    """The model without a head."""

    embeddings: Embeddings
    layers: tuple[Layer, ...]
    heads: int
    activation: Activation
    distance_bias: Float | None = None
    """[1, heads, positions, positions]: added to the attention scores of a query (third axis) and a key (fourth),
    the same in all layers (MPNet)."""
    distance_rows: NDArray[np.int64] | None = None
    """[2 * positions + 1]: the row of `Layer.distances` for each distance from -positions to positions, query less
    key; None when no layer has them."""
    convolution: Convolution | None = None
    """Next to the first layer."""
    final_norm: AnyNorm | None = None
    """After the last layer of a pre-norm encoder; None: the encoder is post-norm."""
    decoder: DecoderHalf | None = None
    """Reads the encoder's hidden states, and gives the model's."""

    @property
    def hidden(self) -> int:
        """Width of the hidden states."""
        return int(self.layers[0].query.weight.shape[1])


@dataclass(frozen=True, eq=False)
class DecoderHalf:
    """The second half of an encoder with a decoder (BART), over the same tokens, moved on by one."""

    start_id: int
    """Replaces the first token."""
    embeddings: Embeddings
    layers: tuple[Layer, ...]
    heads: int


@dataclass(frozen=True, eq=False)
class Transform:
    """Dense, activation and, in some heads, a norm, before the last layer of a head."""

    dense: Dense
    activation: Activation
    norm: Norm | None = None


class Pooled(StrEnum):
    """Which hidden state a sequence classifier reads."""

    FIRST = "first"
    """The first token's."""
    MEAN = "mean"
    """The mean over all tokens that are not padding."""
    LATE = "late"
    """Every token's; the mean of their numbers is taken at the end."""
    LAST = "last"
    """The last token's that is not padding."""


@dataclass(frozen=True)
class Last:
    """The last token of a row with this id, or with any other."""

    token_id: int
    other: bool


@dataclass(frozen=True, eq=False)
class Classifier:
    """From one hidden state for each text to a number for each label."""

    transform: Transform | None
    out: Dense
    pooled: Pooled = Pooled.FIRST
    last: Last | None = None
    """Which token is the last one, with `Pooled.LAST`; None: any that is not padding."""


@dataclass(frozen=True, eq=False)
class TokenClassifier:
    """From the hidden state of every token to a number for each label."""

    out: Dense
    transform: Transform | None = None


@dataclass(frozen=True, eq=False)
class SpanClassifier:
    """From the hidden state of every token to two numbers: start and end."""

    out: Dense
    transform: Transform | None = None


@dataclass(frozen=True, eq=False)
class MaskFiller:
    """A transform, then the product with the (often shared) word vectors; for the mask tokens only."""

    transform: Transform | None
    out: Dense
    mask_id: int


@dataclass(frozen=True, eq=False)
class SparseWeights:
    """The scores of a masked language model for all tokens of a text, pooled to a weight for each of the vocabulary."""

    scores: MaskFiller
    pooling: SparsePooling


Top = Classifier | TokenClassifier | SpanClassifier | MaskFiller | SparseWeights | None
"""The head on the encoder; None: none."""


LONGEST_CONTEXT = 131_072
"""Tokens; limits what config.json may promise."""


@dataclass(frozen=True, eq=False)
class Decoder:
    """A causal language model with its head. Every layer is causal, and has `attention_norm`."""

    embeddings: Float
    """[vocabulary, hidden]"""
    embedding_scale: float
    """Factor of the embeddings (Gemma has one)."""
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
