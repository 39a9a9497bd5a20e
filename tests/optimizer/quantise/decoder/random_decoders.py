"""Random decoders without a file, and the logits of decoders in numpy, with the native engine's rounding or without."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.manifest import DecoderFacts
from penstock_optimizer.export.transformer import (
    Activation,
    AnyNorm,
    AttentionRange,
    Decoder,
    Dense,
    Layer,
    Norm,
    RootMeanSquareNorm,
    Rotary,
    window_of,
)
from penstock_optimizer.quantise.decoder.native_file import packed
from penstock_optimizer.quantise.decoder.openvino_graph import decoder_facts
from penstock_runtime.rows import Float

Wide = NDArray[Any]
"""float64."""
VOCABULARY = 70
"""Not a multiple of 32: the head is filled up."""


def random_decoder(
    seed: int, *, hidden: int = 64, heads: int = 4, key_heads: int = 2, head_size: int = 16, inner: int = 96,
    layers: int = 2, window: int | None = None, turned: int | None = 16, gated: bool = True, biased: bool = False,
    normed_heads: bool = False, normed_outputs: bool = False, tied: bool = True, positions: bool = False,
    activation: Activation = Activation.SILU,
) -> Decoder:  # fmt: skip
    """A decoder whose logits depend on every part. `turned`: numbers of a head that are rotated."""
    random = np.random.default_rng(seed)

    def numbers(*shape: int, scale: float = 1.0) -> Float:
        return (random.normal(0, scale, shape)).astype(np.float32)

    def dense(inputs: int, outputs: int) -> Dense:
        return Dense(
            numbers(outputs, inputs, scale=1 / math.sqrt(inputs)), numbers(outputs, scale=0.1) if biased else None
        )

    def norm(width: int) -> AnyNorm:
        weight = 1 + numbers(width, scale=0.2)
        return Norm(weight, numbers(width, scale=0.1), 1e-5) if positions else RootMeanSquareNorm(weight, 1e-5)

    def heads_norm() -> AnyNorm | None:
        return RootMeanSquareNorm(1 + numbers(head_size, scale=0.2), 1e-6) if normed_heads else None

    rotary = None
    if turned is not None:
        exponents = np.arange(turned // 2, dtype=np.float32) / np.float32(8)
        rotary = Rotary((np.float32(100.0) ** -exponents).astype(np.float32), positions=256, magnitude=1.1)
    made = tuple(
        Layer(
            query=dense(hidden, heads * head_size),
            key=dense(hidden, key_heads * head_size),
            value=dense(hidden, key_heads * head_size),
            output=dense(heads * head_size, hidden),
            up=dense(hidden, inner),
            down=dense(inner, hidden),
            gate=dense(hidden, inner) if gated else None,
            attention_norm=norm(hidden),
            feed_forward_norm=norm(hidden),
            query_norm=heads_norm(),
            key_norm=heads_norm(),
            attention_output_norm=norm(hidden) if normed_outputs else None,
            feed_forward_output_norm=norm(hidden) if normed_outputs else None,
            rotary=rotary,
            attends_to=AttentionRange(window=window - 1 if window is not None and index else None, causal=True),
        )
        for index in range(layers)
    )
    return Decoder(
        embeddings=numbers(VOCABULARY, hidden),
        embedding_scale=1.5,
        positions=numbers(256, hidden, scale=0.3) if positions else None,
        layers=made,
        activation=activation,
        final_norm=norm(hidden),
        head=None if tied else numbers(VOCABULARY, hidden, scale=1 / math.sqrt(hidden)),
        heads=heads,
        key_heads=key_heads,
        head_size=head_size,
        context=256,
    )


def facts_of(decoder: Decoder) -> DecoderFacts:
    """What the engine needs besides the graph."""
    return decoder_facts(decoder)


def whole_weights(records: NDArray[np.uint8], bits: int) -> NDArray[np.int32]:
    """The whole numbers [outputs, inputs] of a product's records."""
    panels, groups, _ = records.shape
    if bits == 8:
        whole = records.view(np.int8).reshape(panels, groups, 8, 32, 4).astype(np.int32)
    else:
        pairs = records[:, :, :512].reshape(panels, groups, 4, 32, 4).astype(np.int32)
        # Odd lines of four inputs are in the upper bits.
        numbers = np.stack([pairs & 15, pairs >> 4], 3).reshape(panels, groups, 8, 32, 4)
        starts = np.ascontiguousarray(records[:, :, 512:576]).view(np.int16).astype(np.int32)[:, :, None, :, None]
        steps = records[:, :, 576:].astype(np.int32)[:, :, None, :, None]
        whole = (steps * numbers + starts) // 16
    assert np.abs(whole).max() <= 127
    return np.asarray(whole.transpose(0, 3, 1, 2, 4).reshape(panels * 32, groups * 32))


def unpacked(weight: Float, bits: int) -> Float:
    """The weight [outputs, inputs] that the native engine multiplies with."""
    outputs, inputs = weight.shape
    filled = np.pad(weight, [(0, -outputs % 32), (0, -inputs % 32)])
    records, scales = packed(filled, bits)
    wide = whole_weights(records, bits) * scales[:, None]
    return np.asarray(wide[:outputs, :inputs], np.float32)


def exact_logits(decoder: Decoder, ids: NDArray[np.int32]) -> Wide:
    """The logits [tokens, vocabulary] without any rounding."""
    return native_logits(decoder, None, ids)


def native_logits(decoder: Decoder, bits: int | None, ids: NDArray[np.int32]) -> Wide:
    """The logits [tokens, vocabulary] with the weights, the rounded activations and the float16 cache of the native
    engine; `bits` None: without any rounding."""
    heads, key_heads, size, count = decoder.heads, decoder.key_heads, decoder.head_size, len(ids)
    places = np.arange(count)
    table = decoder.embeddings if bits is None else unpacked(decoder.embeddings, 8)
    x = table[ids].astype(np.float64) * decoder.embedding_scale
    if decoder.positions is not None:
        x = x + decoder.positions[:count]
    width = -(-size // 16) * 16
    for layer in decoder.layers:
        read = _normal(x, layer.attention_norm)

        def split(dense: Dense, number: int, read: Any = read) -> Wide:
            return _product(read, dense, bits).reshape(count, number, size)

        query, key, value = split(layer.query, heads), split(layer.key, key_heads), split(layer.value, key_heads)
        query, key = _normal(query, layer.query_norm), _normal(key, layer.key_norm)
        if layer.rotary is not None:
            query, key = (_turned(one, layer.rotary, places) for one in (query, key))
        if bits is not None:  # in the cache
            key, value = (one.astype(np.float16).astype(np.float64) for one in (key, value))
        seen = places[None] <= places[:, None]
        if window_of(layer):
            seen &= places[None] > places[:, None] - window_of(layer)
        mixed = np.zeros((count, heads, width))
        for number in range(heads):
            shared = number // (heads // key_heads)
            scores = np.where(seen, query[:, number] @ key[:, shared].T * decoder.score_scale, -np.inf)
            powers = np.exp(scores - scores.max(1, keepdims=True))
            mixed[:, number, :size] = powers / powers.sum(1, keepdims=True) @ value[:, shared]
        # Heads are filled up with zeros, so that groups of weights are others.
        output = np.zeros((decoder.hidden, heads, width), np.float32)
        output[:, :, :size] = layer.output.weight.reshape(-1, heads, size)
        mixed = _product(mixed.reshape(count, -1), Dense(output.reshape(decoder.hidden, -1), layer.output.bias), bits)
        x = x + _normal(mixed, layer.attention_output_norm)
        read = _normal(x, layer.feed_forward_norm)
        inner = _activated(_product(read, layer.up, bits), decoder.activation)
        if layer.gate is not None:
            inner = inner * _product(read, layer.gate, bits)
        inner = _product(inner, layer.down, bits)
        x = x + _normal(inner, layer.feed_forward_output_norm)
    head = decoder.head if decoder.head is not None else decoder.embeddings
    return _product(_normal(x, decoder.final_norm), Dense(head, None), bits and 8)


def _product(x: Wide, dense: Dense, bits: int | None) -> Wide:
    if bits is None:
        y = x[:, : dense.weight.shape[1]] @ dense.weight.T.astype(np.float64)
        return np.asarray(y if dense.bias is None else y + dense.bias)
    scale = np.maximum(np.abs(x).max(1, keepdims=True) / 32767, 1e-30)
    y = np.rint(x / scale) * scale @ unpacked(dense.weight, bits).T.astype(np.float64)
    return np.asarray(y if dense.bias is None else y + dense.bias)


def _normal(x: Wide, norm: AnyNorm | None) -> Wide:
    if norm is None:
        return x
    if isinstance(norm, RootMeanSquareNorm):
        return np.asarray(x / np.sqrt((x**2).mean(-1, keepdims=True) + norm.epsilon) * norm.weight)
    centred = x - x.mean(-1, keepdims=True)
    scaled = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + norm.epsilon) * norm.weight
    return np.asarray(scaled + norm.bias)


def _turned(x: Wide, rotary: Rotary, places: NDArray[Any]) -> Wide:
    half = len(rotary.frequencies)
    angles = places[:, None, None] * rotary.frequencies
    cosines, sines = np.cos(angles) * rotary.magnitude, np.sin(angles) * rotary.magnitude
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return np.concatenate([first * cosines - second * sines, second * cosines + first * sines, rest], -1)


def _activated(x: Wide, activation: Activation) -> Wide:
    if activation is Activation.RELU:
        return np.maximum(x, 0)
    if activation is Activation.GELU_TANH:
        return np.asarray(x / 2 * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))))
    return np.asarray(x / (1 + np.exp(-x)))
