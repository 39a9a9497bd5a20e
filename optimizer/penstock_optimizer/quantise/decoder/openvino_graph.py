"""Writes a decoder as an OpenVINO graph without its attention, which the engine adds when it loads the graph.

Inputs: `input_ids` int64 [tokens], `position_ids` int64 [tokens], `logit_rows` int32 [n] (the tokens that need
logits), and `attention.N` float32 [tokens, heads x head size] for each layer N.
Outputs: `logits` float32 [n, vocabulary], and for each layer `query.N`, `key.N`, `value.N` float32 [tokens, width].

The engine connects the three outputs of a layer with its input by the plugin's paged attention. That operation cannot
be stored in a file, and its inputs differ between versions of the library.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
from openvino import PartialShape, Type
from openvino import opset13 as op

from penstock.manifest import DecoderFacts
from penstock_optimizer.export.transformer import Activation, AnyNorm, Decoder, Dense, Layer, Norm, Rotary, window_of
from penstock_optimizer.quantise.decoder.storage import Storage, stored


def write_graph(decoder: Decoder, storage: Storage, path: Path) -> None:
    """Write `path` (.xml) and its `.bin`. The head and the embeddings are stored in 8 bits at least."""
    path.parent.mkdir(parents=True, exist_ok=True)
    ov.save_model(_Writer(decoder, storage).model(), str(path), compress_to_fp16=False)


def decoder_facts(decoder: Decoder) -> DecoderFacts:
    """Facts that the engine needs besides the graph."""
    return DecoderFacts(
        vocabulary=decoder.vocabulary,
        context=decoder.context,
        heads=decoder.heads,
        key_heads=decoder.key_heads,
        head_size=decoder.head_size,
        scales=(decoder.score_scale,) * len(decoder.layers),
        windows=tuple(window_of(layer) for layer in decoder.layers),
    )


class _Writer:
    """Writes one graph. Hidden states are [tokens, 1, hidden]: in this form the plugin fuses rotations and
    normalisations."""

    def __init__(self, decoder: Decoder, storage: Storage) -> None:
        self._decoder = decoder
        self._storage = storage
        self._ids = _parameter("input_ids", Type.i64, [-1])
        self._positions = _parameter("position_ids", Type.i64, [-1])
        self._rows = _parameter("logit_rows", Type.i32, [-1])
        self._parameters = [self._ids, self._positions, self._rows]
        self._results: list[Any] = []
        self._angles: dict[int, tuple[Any, Any]] = {}

    def model(self) -> Any:
        """The graph."""
        decoder = self._decoder
        # Rounding the table to 4 bits would cost most of the accuracy, and the rows of a step are a small part of it.
        table_storage = Storage.INT8_GROUPS if self._storage is Storage.INT4 else self._storage
        table = stored(decoder.embeddings, table_storage, "embeddings")
        x = op.gather(table, op.convert(op.unsqueeze(self._ids, _ints(1)), Type.i32), _int(0))
        if decoder.embedding_scale != 1.0:
            x = op.multiply(x, _float(decoder.embedding_scale))
        if decoder.positions is not None:
            places = op.convert(op.unsqueeze(self._positions, _ints(1)), Type.i32)
            x = op.add(x, op.gather(op.constant(decoder.positions), places, _int(0)))
        for index, layer in enumerate(decoder.layers):
            x = self._layer(layer, x, index)
        x = self._norm(op.gather(x, self._rows, _int(0)), decoder.final_norm)
        head = table if decoder.head is None else stored(decoder.head, table_storage, "head")
        logits = op.matmul(x, head, transpose_a=False, transpose_b=True)
        self._result("logits", op.reshape(logits, _ints(-1, decoder.vocabulary), special_zero=False))
        return ov.Model(self._results, self._parameters, "decoder")

    def _layer(self, layer: Layer, x: Any, index: int) -> Any:
        decoder = self._decoder
        read = self._norm(x, layer.attention_norm)
        rotary, name = layer.rotary, f"layer.{index}"
        query = self._heads(read, layer.query, decoder.heads, f"{name}.query", norm=layer.query_norm, rotary=rotary)
        key = self._heads(read, layer.key, decoder.key_heads, f"{name}.key", norm=layer.key_norm, rotary=rotary)
        value = self._dense(read, layer.value, f"{name}.value")
        for name, node, heads in (
            ("query", query, decoder.heads),
            ("key", key, decoder.key_heads),
            ("value", value, decoder.key_heads),
        ):
            flat = op.reshape(node, _ints(-1, heads * decoder.head_size), special_zero=False)
            self._result(f"{name}.{index}", flat)
        attended = _parameter(f"attention.{index}", Type.f32, [-1, decoder.heads * decoder.head_size])
        self._parameters.append(attended)
        mixed = self._dense(op.unsqueeze(attended, _ints(1)), layer.output, f"layer.{index}.output")
        x = op.add(x, self._norm(mixed, layer.attention_output_norm))
        read = self._norm(x, layer.feed_forward_norm)
        inner = _activated(self._dense(read, layer.up, f"layer.{index}.up"), decoder.activation)
        if layer.gate is not None:
            inner = op.multiply(inner, self._dense(read, layer.gate, f"layer.{index}.gate"))
        inner = self._dense(inner, layer.down, f"layer.{index}.down")
        return op.add(x, self._norm(inner, layer.feed_forward_output_norm))

    def _heads(
        self, x: Any, dense: Dense, heads: int, name: str, *, norm: AnyNorm | None, rotary: Rotary | None
    ) -> Any:
        """Queries or keys, [tokens, 1, heads, head size]."""
        split = op.reshape(self._dense(x, dense, name), _ints(0, 0, heads, self._decoder.head_size), special_zero=True)
        split = self._norm(split, norm)
        if rotary is None:
            return split
        turned = self._turned(op.transpose(split, _ints(0, 2, 1, 3)), rotary)
        return op.transpose(turned, _ints(0, 2, 1, 3))

    def _turned(self, x: Any, rotary: Rotary) -> Any:
        """Queries or keys [tokens, heads, 1, head size], the first 2 x half numbers turned by the positions' angles."""
        cos, sin = self._angle(rotary)
        half = len(rotary.frequencies)
        rest = None
        if 2 * half < self._decoder.head_size:
            x, rest = _part(x, 0, 2 * half), _part(x, 2 * half, self._decoder.head_size)
        first, second = _part(x, 0, half), _part(x, half, 2 * half)
        swapped = op.concat([op.multiply(second, op.constant(np.full((1, 1, 1, 1), -1, np.float32))), first], -1)
        turned = op.add(op.multiply(x, cos), op.multiply(swapped, sin))
        return turned if rest is None else op.concat([turned, rest], -1)

    def _angle(self, rotary: Rotary) -> tuple[Any, Any]:
        """Cosine and sine, [tokens, 1, 1, 2 x half] each; once for all layers that share them."""
        if id(rotary) not in self._angles:
            positions = op.convert(op.unsqueeze(op.unsqueeze(self._positions, _ints(1)), _ints(1)), Type.f32)
            frequencies = op.constant(rotary.frequencies.reshape(1, 1, -1))
            angles = op.matmul(positions, frequencies, transpose_a=False, transpose_b=False)
            both = op.concat([angles, angles], -1)
            cos, sin = op.unsqueeze(op.cos(both), _ints(1)), op.unsqueeze(op.sin(both), _ints(1))
            if rotary.magnitude != 1.0:
                cos, sin = (op.multiply(one, _float(rotary.magnitude)) for one in (cos, sin))
            self._angles[id(rotary)] = cos, sin
        return self._angles[id(rotary)]

    def _dense(self, x: Any, dense: Dense, name: str) -> Any:
        y = op.matmul(x, stored(dense.weight, self._storage, name), transpose_a=False, transpose_b=True)
        return y if dense.bias is None else op.add(y, op.constant(dense.bias.reshape(1, 1, -1)))

    def _norm(self, x: Any, norm: AnyNorm | None) -> Any:
        """Normalised over the last axis; `x` itself where there is no norm."""
        if norm is None:
            return x
        shape = [1] * (len(x.output(0).get_partial_shape()) - 1) + [-1]
        weight = op.constant(norm.weight.reshape(shape))
        if isinstance(norm, Norm):
            normal = op.mvn(x, _ints(-1), normalize_variance=True, eps=norm.epsilon, eps_mode="inside_sqrt")
            return op.add(op.multiply(normal, weight), op.constant(norm.bias.reshape(shape)))
        ones = [1] * len(shape)
        mean = op.reduce_mean(op.power(x, op.constant(np.full(ones, 2, np.float32))), _ints(-1), keep_dims=True)
        root = op.sqrt(op.add(mean, op.constant(np.full(ones, norm.epsilon, np.float32))))
        return op.multiply(op.multiply(x, op.divide(op.constant(np.full(ones, 1, np.float32)), root)), weight)

    def _result(self, name: str, node: Any) -> None:
        node.output(0).set_names({name})
        self._results.append(op.result(node))


def _parameter(name: str, kind: Any, shape: list[int]) -> Any:
    parameter = op.parameter(PartialShape(shape), kind, name=name)
    parameter.output(0).set_names({name})
    return parameter


def _activated(x: Any, activation: Activation) -> Any:
    match activation:
        case Activation.SILU:
            return op.swish(x)
        case Activation.GELU:
            return op.gelu(x, "erf")
        case Activation.GELU_TANH:
            return op.gelu(x, "tanh")
        case Activation.RELU:
            return op.relu(x)
        case Activation.RELU_SQUARED:
            return op.power(op.relu(x), _float(2.0))
        case Activation.TANH:
            return op.tanh(x)
        case Activation.SIGMOID:
            return op.sigmoid(x)
        case Activation.GELU_SIGMOID:
            return op.multiply(x, op.sigmoid(op.multiply(x, _float(1.702))))
        case Activation.LINEAR:
            return x


def _part(x: Any, start: int, stop: int) -> Any:
    """Numbers `start` to `stop` of the last of four axes."""
    return op.slice(x, _ints(start), _ints(stop), _ints(1), _ints(3))


def _ints(*values: int) -> Any:
    return op.constant(np.array(values, np.int64))


def _int(value: int) -> Any:
    return op.constant(np.array(value, np.int64))


def _float(value: float) -> Any:
    return op.constant(np.array(value, np.float32))
