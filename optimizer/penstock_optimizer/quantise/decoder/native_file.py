"""Writes a decoder as a file of the native engine: weights in 8 bits with a scale for each output, or in 4
bits that are widened to these."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock_optimizer.export.transformer import Activation, AnyNorm, Decoder, Dense, Layer, Norm, Rotary, window_of
from penstock_optimizer.quantise.rounding import LARGEST, SMALLEST_SCALE, largest_step, rounded
from penstock_runtime.engines.native import graph_file
from penstock_runtime.engines.native.decoder_engine import HEAD_MULTIPLE
from penstock_runtime.engines.native.decoder_file import (
    GROUP,
    PANEL,
    DecoderParts,
    LayerParts,
    NativeDecoderFile,
    NormPart,
    ProductPart,
    RopePart,
    write_decoder,
)
from penstock_runtime.rows import Float

_ACTIVATIONS: dict[Activation, graph_file.Activation] = {
    Activation.GELU: "gelu",
    Activation.GELU_TANH: "gelu-tanh",
    Activation.SILU: "silu",
    Activation.RELU: "relu",
    Activation.TANH: "tanh",
    Activation.LINEAR: "none",
}


def why_not_native(decoder: Decoder) -> str | None:
    """Why the native engine does not compute this decoder; None if it does."""
    if decoder.activation not in _ACTIVATIONS:
        return f"the native engine does not compute the activation {decoder.activation.value}"
    queries = decoder.heads * _filled(decoder.head_size, HEAD_MULTIPLE)
    if decoder.hidden % GROUP or queries % GROUP:
        return f"the native engine needs widths that are multiples of {GROUP}, not {decoder.hidden} and {queries}"
    if any(isinstance(norm, Norm) for layer in decoder.layers for norm in (layer.query_norm, layer.key_norm)):
        return "the native engine normalises the heads of queries and keys by the root mean square only"
    return None


def write_native(decoder: Decoder, bits: int, path: Path) -> None:
    """Write `path`. The head and the embeddings are stored in 8 bits. ValueError for a decoder that is refused by
    `why_not_native`."""
    reason = why_not_native(decoder)
    if reason is not None:
        raise ValueError(reason)
    path.parent.mkdir(parents=True, exist_ok=True)
    writer = _Writer(decoder, bits)
    parts = writer.parts()
    write_decoder(path, NativeDecoderFile(parts, writer.tensors))


def packed(weight: Float, bits: int) -> tuple[NDArray[np.uint8], Float]:
    """A weight [outputs, inputs], both multiples of 32, as records (`record_bytes` of kernels.h), uint8
    [outputs / 32, inputs / 32, bytes], and the scales of the outputs, float32 [outputs]."""
    panels, groups = weight.shape[0] // PANEL, weight.shape[1] // GROUP
    if bits == 8:
        values, scales = rounded(weight, 1)
        ordered = np.ascontiguousarray(_ordered(values.view(np.uint8), panels, groups))
        return ordered.reshape(panels, groups, -1), scales[:, 0]
    grouped = weight.reshape(len(weight), groups, GROUP)
    reach = (grouped.max(2) - grouped.min(2)).max(1) / np.float32(15 * 255 / 16)
    scales = np.maximum(np.maximum(largest_step(weight, 1)[:, 0], reach), SMALLEST_SCALE)
    numbers, starts, steps = _numbers(grouped / scales[:, None, None])
    ordered = _ordered(numbers.reshape(weight.shape), panels, groups)
    parts = [
        ordered[:, :, 0::2] | (ordered[:, :, 1::2] << 4),  # [panel, group, eight inputs, output, input]
        *(one.reshape(panels, PANEL, groups).transpose(0, 2, 1) for one in (starts, steps)),
    ]
    records = [np.ascontiguousarray(part).view(np.uint8).reshape(panels, groups, -1) for part in parts]
    return np.concatenate(records, axis=2), scales


def _ordered(values: NDArray[np.uint8], panels: int, groups: int) -> NDArray[np.uint8]:
    """[panel, group, four inputs, output, input]"""
    return values.reshape(panels, PANEL, groups, GROUP // 4, 4).transpose(0, 2, 3, 1, 4)


def _numbers(wanted: Float) -> tuple[NDArray[np.uint8], NDArray[np.int16], NDArray[np.uint8]]:
    """Numbers of 4 bits [outputs, groups, 32] and, for each group, the start and the step [outputs, groups] with which
    floor((step * number + start) / 16) is nearest to `wanted` [outputs, groups, 32], values from -127 to 127.

    Steps are whole numbers: of those next to the exact one, the one with the smallest squared error is taken."""
    lowest, highest = wanted.min(2), wanted.max(2)
    least = np.full(lowest.shape, np.inf, np.float32)
    numbers = np.zeros(wanted.shape, np.uint8)
    steps, starts = np.zeros_like(lowest), np.zeros_like(lowest)
    for step_off in (-1, 0, 1):
        step = np.clip(np.rint((highest - lowest) * np.float32(16 / 15)) + np.float32(step_off), 0, 255)
        start = np.rint((lowest + highest) * 8 - step * np.float32(7.5) + 8)  # levels around the middle; 8: rounded
        off = wanted * 16 + 8 - start[..., None]
        number = np.clip(np.rint(off / np.maximum(step, 1)[..., None]), 0, 15)
        reached = np.floor((step[..., None] * number + start[..., None]) / 16)
        error = ((reached - wanted) ** 2).sum(2)
        better = (error < least) & (np.abs(reached).max(2) <= LARGEST)
        least = np.where(better, error, least)
        steps, starts = np.where(better, step, steps), np.where(better, start, starts)
        numbers = np.where(better[..., None], number, numbers).astype(np.uint8)
    return numbers, starts.astype(np.int16), steps.astype(np.uint8)


class _Writer:
    def __init__(self, decoder: Decoder, bits: int) -> None:
        self._decoder = decoder
        self._bits = bits
        self._head_width = _filled(decoder.head_size, HEAD_MULTIPLE)
        self._rotaries: dict[int, int] = {}
        self._rope_facts: list[RopePart] = []
        self.tensors: dict[str, Any] = {}

    def parts(self) -> DecoderParts:
        """The parts; fills `tensors`."""
        decoder = self._decoder
        layers = tuple(self._layer(layer, f"layer.{index}.") for index, layer in enumerate(decoder.layers))
        table = Dense(decoder.embeddings, None)
        positions = None
        if decoder.positions is not None:
            positions = self._add("positions", decoder.positions)
        return DecoderParts(
            heads=decoder.heads,
            key_heads=decoder.key_heads,
            head_width=self._head_width,
            head_size=decoder.head_size,
            vocabulary=decoder.vocabulary,
            activation=_ACTIVATIONS[decoder.activation],
            embedding_scale=decoder.embedding_scale,
            embeddings=self._product(table, "embeddings", bits=8),
            head=None if decoder.head is None else self._product(Dense(decoder.head, None), "head", bits=8),
            position_table=positions,
            positions=0 if decoder.positions is None else len(decoder.positions),
            final_norm=self._norm(decoder.final_norm, "final_norm"),
            ropes=tuple(self._rope_facts),
            layers=layers,
        )

    def _layer(self, layer: Layer, prefix: str) -> LayerParts:
        decoder, width = self._decoder, self._head_width
        inner = _filled(len(layer.up.weight), GROUP)
        projections = [
            self._heads(dense, heads)
            for dense, heads in (
                (layer.query, decoder.heads),
                (layer.key, decoder.key_heads),
                (layer.value, decoder.key_heads),
            )
        ]
        by_head = _wider(layer.output.weight.reshape(-1, decoder.heads, decoder.head_size), 2, width)
        mixed = by_head.reshape(len(by_head), -1)
        down = Dense(_wider(layer.down.weight, 1, inner), layer.down.bias)
        norms = {
            name: self._norm(norm, prefix + name, width if name in {"query_norm", "key_norm"} else None)
            for name, norm in (
                ("attention_norm", layer.attention_norm),
                ("network_norm", layer.feed_forward_norm),
                ("query_norm", layer.query_norm),
                ("key_norm", layer.key_norm),
                ("attended_norm", layer.attention_output_norm),
                ("expanded_norm", layer.feed_forward_output_norm),
            )
            if norm is not None
        }
        # In the file, the gate is the activated product.
        gate, up = (None, layer.up) if layer.gate is None else (layer.up, layer.gate)
        return LayerParts(
            attend=self._product(_joined(projections), f"{prefix}attend"),
            output=self._product(Dense(mixed, layer.output.bias), f"{prefix}output"),
            up=self._product(_longer(up, inner), f"{prefix}up"),
            gate=None if gate is None else self._product(_longer(gate, inner), f"{prefix}gate"),
            down=self._product(down, f"{prefix}down"),
            scale=decoder.score_scale,
            window=window_of(layer),
            rope=self._rope(layer.rotary),
            **norms,
        )

    def _heads(self, dense: Dense, heads: int) -> Dense:
        """The product with each head's outputs filled up with zeros."""
        size, width = self._decoder.head_size, self._head_width
        weight = _wider(dense.weight.reshape(heads, size, -1), 1, width).reshape(heads * width, -1)
        if dense.bias is None:
            return Dense(weight, None)
        return Dense(weight, _wider(dense.bias.reshape(heads, size), 1, width).reshape(-1))

    def _rope(self, rotary: Rotary | None) -> int:
        """The number of these positions, which several layers may share."""
        if rotary is None:
            return -1
        if id(rotary) not in self._rotaries:
            number = self._rotaries[id(rotary)] = len(self._rotaries)
            name = self._add(f"rope.{number}", rotary.frequencies)
            self._rope_facts.append(RopePart(frequencies=name, magnitude=rotary.magnitude))
        return self._rotaries[id(rotary)]

    def _product(self, dense: Dense, name: str, bits: int | None = None) -> ProductPart:
        weight = _longer(dense, _filled(len(dense.weight), PANEL))
        count = self._bits if bits is None else bits
        self.tensors[name], scales = packed(weight.weight, count)
        bias = None if weight.bias is None else self._add(f"{name}.bias", weight.bias)
        outputs, inputs = weight.weight.shape
        return ProductPart(
            inputs=inputs,
            outputs=outputs,
            bits=8 if count == 8 else 4,
            packed=name,
            scales=self._add(f"{name}.scales", scales),
            bias=bias,
        )

    def _norm(self, norm: AnyNorm, name: str, width: int | None = None) -> NormPart:
        weight = norm.weight if width is None else _wider(norm.weight, 0, width)
        bias = self._add(f"{name}.bias", norm.bias) if isinstance(norm, Norm) else None
        return NormPart(weight=self._add(name, weight), bias=bias, epsilon=norm.epsilon)

    def _add(self, name: str, array: Float) -> str:
        self.tensors[name] = np.ascontiguousarray(array, np.float32)
        return name


def _joined(products: list[Dense]) -> Dense:
    """Products of the same inputs as one."""
    weight = np.concatenate([one.weight for one in products])
    if all(one.bias is None for one in products):
        return Dense(weight, None)
    biases = [np.zeros(len(one.weight), np.float32) if one.bias is None else one.bias for one in products]
    return Dense(weight, np.concatenate(biases))


def _longer(dense: Dense, outputs: int) -> Dense:
    """The product with outputs of zeros behind its own."""
    bias = None if dense.bias is None else _wider(dense.bias, 0, outputs)
    return Dense(_wider(dense.weight, 0, outputs), bias)


def _wider(array: Float, axis: int, size: int) -> Float:
    """The array with zeros behind it on this axis."""
    missing = size - array.shape[axis]
    if not missing:
        return array
    return np.pad(array, [(0, missing if at == axis else 0) for at in range(array.ndim)])


def _filled(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple
