"""The file format of native decoders (text generation): `graph_file`'s, with another header.

The header has the model's parts with the names of their tensors. Weights are stored as the library reads them
(`record_bytes` of kernels.h).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from penstock_runtime.engines.native.graph_file import (
    Activation,
    Array,
    StoredTensor,
    header_checked,
    mapped_tensor,
    read_header,
    write_tensors,
)

VERSION = 2
"""Version 1 had a scale for each group of inputs."""
GROUP = 32
"""`GROUP` of kernels.h: inputs that share a step and a start, of weights of 4 bits."""
PANEL = 32
"""`PANEL` of kernels.h: outputs that are packed together."""
RECORD_BYTES = {8: GROUP * PANEL, 4: GROUP * PANEL // 2 + 3 * PANEL}
"""`record_bytes` of kernels.h: of a group of inputs of a panel, by the bits of a weight."""


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class ProductPart(_Part):
    """A product."""

    inputs: int = Field(ge=GROUP, multiple_of=GROUP, lt=2**16)
    outputs: int = Field(ge=PANEL, multiple_of=PANEL, lt=2**24)
    bits: Literal[4, 8]
    packed: str
    """uint8 [outputs / 32, inputs / 32, bytes of a record]"""
    scales: str
    """float32 [outputs]"""
    bias: str | None = None
    """float32 [outputs]"""


class NormPart(_Part):
    """A normalisation: by mean and variance with a bias, otherwise by the root mean square."""

    weight: str
    bias: str | None = None
    epsilon: float = Field(ge=0.0, le=1.0)


class RopePart(_Part):
    """Rotary positions."""

    frequencies: str
    """float32 [half]"""
    magnitude: float


class LayerParts(_Part):
    """One layer; `penstock_layer` of native.h documents the parts."""

    attend: ProductPart
    output: ProductPart
    up: ProductPart
    gate: ProductPart | None = None
    down: ProductPart
    attention_norm: NormPart
    network_norm: NormPart
    query_norm: NormPart | None = None
    key_norm: NormPart | None = None
    attended_norm: NormPart | None = None
    expanded_norm: NormPart | None = None
    scale: float
    window: int = Field(default=0, ge=0, lt=2**31)
    rope: int = Field(default=-1, ge=-1)


class DecoderParts(_Part):
    """A decoder; `penstock_decoder_parts` of native.h documents the numbers."""

    heads: int = Field(ge=1)
    key_heads: int = Field(ge=1)
    head_width: int = Field(ge=16, multiple_of=16)
    head_size: int = Field(ge=1)
    vocabulary: int = Field(ge=1)
    activation: Activation
    embedding_scale: float = 1.0
    embeddings: ProductPart
    head: ProductPart | None = None
    position_table: str | None = None
    """float32 [positions, hidden]"""
    positions: int = Field(default=0, ge=0)
    final_norm: NormPart
    ropes: tuple[RopePart, ...] = ()
    layers: tuple[LayerParts, ...] = Field(min_length=1)


class _Header(_Part):
    version: Literal[2]
    decoder: DecoderParts
    tensors: dict[str, StoredTensor]


@dataclass(frozen=True, eq=False)
class NativeDecoderFile:
    """A decoder and its tensors."""

    parts: DecoderParts
    tensors: Mapping[str, Array] = field(repr=False)


def write_decoder(path: Path, decoder: NativeDecoderFile) -> None:
    """Write the file, deterministically. ValueError if a tensor is not as its part needs it."""
    _check(decoder.parts, {name: (str(array.dtype), array.shape) for name, array in decoder.tensors.items()})
    fields = {"version": VERSION, "decoder": decoder.parts.model_dump(mode="json", exclude_defaults=True)}
    write_tensors(path, fields, decoder.tensors)


def read_decoder_file(path: Path) -> NativeDecoderFile:
    """Map the file. ArtefactError if it is missing, truncated, altered, or of another version."""
    with header_checked(path):
        text, data = read_header(path)
        header = _Header.model_validate_json(text)
        _check(header.decoder, {name: (one.dtype, tuple(one.shape)) for name, one in header.tensors.items()})
        tensors = {name: mapped_tensor(data, one) for name, one in header.tensors.items()}
    return NativeDecoderFile(header.decoder, tensors)


def _check(parts: DecoderParts, tensors: Mapping[str, tuple[str, tuple[int, ...]]]) -> None:
    """ValueError if a tensor has another type or shape than the library reads. It checks how parts fit together."""

    def require(name: str, dtype: str, *shape: int) -> None:
        if tensors.get(name) != (dtype, shape):
            raise ValueError(f"has a tensor {name} that is {tensors.get(name)}, not {(dtype, shape)}")

    def product(one: ProductPart) -> None:
        shape = (one.outputs // PANEL, one.inputs // GROUP, RECORD_BYTES[one.bits])
        require(one.packed, "uint8", *shape)
        require(one.scales, "float32", one.outputs)
        if one.bias is not None:
            require(one.bias, "float32", one.outputs)

    def norm(one: NormPart | None, width: int) -> None:
        for name in (one.weight, one.bias) if one is not None else ():
            if name is not None:
                require(name, "float32", width)

    hidden = parts.embeddings.inputs
    for table in (parts.embeddings, parts.head):
        if table is not None:
            product(table)
    norm(parts.final_norm, hidden)
    if parts.position_table is not None:
        require(parts.position_table, "float32", parts.positions, hidden)
    for rope in parts.ropes:
        dtype, shape = tensors.get(rope.frequencies, ("nothing", ()))
        if dtype != "float32" or len(shape) != 1:
            raise ValueError(f"has rotary positions whose frequencies are {(dtype, shape)}")
    for layer in parts.layers:
        for one in (layer.attend, layer.output, layer.up, layer.gate, layer.down):
            if one is not None:
                product(one)
        for wide in (layer.attention_norm, layer.network_norm, layer.attended_norm, layer.expanded_norm):
            norm(wide, hidden)
        for narrow in (layer.query_norm, layer.key_norm):
            norm(narrow, parts.head_width)
