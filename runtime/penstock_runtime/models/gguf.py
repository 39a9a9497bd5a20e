"""Reads GGUF files (llama.cpp's format): checks the header, and expands tensors to float32.

ggml's documents describe the layout (gguf.md), `ggml-common.h` the quantised blocks. docs/decisions/own-readers.md
explains why the `gguf` package is not used.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.errors import CorruptModel, UnsupportedModel
from penstock_runtime.models.files import check_pointer
from penstock_runtime.rows import Float

Bytes = NDArray[np.uint8]

MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
MOST_NUMBERS = 10_000_000
"""Entries of all lists in the header: more than any vocabulary has. Bounds time and memory before anything is read."""
ALONE = 5
"""Entries that are read one at a time, such as texts, count as this many numbers."""
_STRING, _LIST, _BOOL = 8, 9, 7
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 10: "Q", 11: "q", 12: "d", _BOOL: "?"}
"""Type number in the header -> format of `struct`."""


@dataclass(frozen=True)
class GgufTensor:
    """A tensor of a file."""

    shape: tuple[int, ...]
    """As numpy has it: the reverse of the file's order."""
    kind: int
    """ggml's number of the type."""
    start: int
    """Offset of its first byte in the file."""


@dataclass(frozen=True)
class GgufFile:
    """The checked header of a file."""

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, GgufTensor]

    @classmethod
    def open(cls, path: Path) -> GgufFile:
        """Read and check the header. CorruptModel names the inconsistency; UnsupportedModel for other versions, and for
        tensors of a type that is not read here."""
        content = _mapped(path)
        reader = _Reader(path, content)
        if bytes(content[:4]) != MAGIC:
            raise _corrupt(path, "it does not begin with GGUF")
        reader.position = 4
        version = reader.number("I")
        if version not in VERSIONS:
            raise UnsupportedModel(f"{path} has version {version} of GGUF", remedy="Convert it with a newer llama.cpp")
        tensors, entries = reader.number("Q"), reader.number("Q")
        reader.check_count(tensors, 8, ALONE)
        reader.check_count(entries, 8, ALONE)
        metadata = {reader.text(): reader.value(reader.number("I")) for _ in range(entries)}
        described = [reader.tensor() for _ in range(tensors)]
        alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1:
            raise _corrupt(path, f"its alignment is {alignment!r}")
        base = math.ceil(reader.position / alignment) * alignment
        found = {}
        for name, shape, kind, offset in described:
            tensor = GgufTensor(shape, kind, base + offset)
            if tensor.start + _size(path, name, tensor) > len(content):
                raise _corrupt(path, f"the tensor {name} ends beyond the end of the file")
            found[name] = tensor
        return cls(path, metadata, found)

    def read(self, name: str) -> Float:
        """A tensor as float32, expanded exactly as llama.cpp does."""
        tensor = self.tensors[name]
        size = _size(self.path, name, tensor)
        raw = np.asarray(_mapped(self.path)[tensor.start : tensor.start + size])
        expanded = _FORMATS[tensor.kind].expand(raw)
        return expanded.reshape(tensor.shape)


class _Reader:
    """Reads the header's values one after the other."""

    def __init__(self, path: Path, content: Bytes) -> None:
        self._path = path
        self._content = content.data
        self._numbers = 0
        self.position = 0

    def number(self, form: str) -> Any:
        return struct.unpack("<" + form, self._take(struct.calcsize("<" + form)))[0]

    def text(self) -> str:
        length = self.number("Q")
        try:
            return str(self._take(length), "utf-8")
        except UnicodeDecodeError as error:
            raise _corrupt(self._path, "a text of its header is not UTF-8") from error

    def value(self, kind: int, *, depth: int = 0) -> Any:
        if kind == _STRING:
            return self.text()
        if kind in _NUMBERS:
            return self.number(_NUMBERS[kind])
        if kind != _LIST or depth > 1:
            raise _corrupt(self._path, f"its header has a value of the unknown type {kind}")
        inner, count = self.number("I"), self.number("Q")
        if inner in _NUMBERS:
            form = np.dtype("<" + {"?": "u1"}.get(_NUMBERS[inner], np.dtype(_NUMBERS[inner]).str[1:]))
            self.check_count(count, form.itemsize)
            return np.frombuffer(self._take(count * form.itemsize), form).tolist()
        self.check_count(count, 8, ALONE)
        return [self.value(inner, depth=depth + 1) for _ in range(count)]

    def tensor(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self.text()
        axes = self.number("I")
        if not 1 <= axes <= 4:
            raise _corrupt(self._path, f"the tensor {name} has {axes} axes")
        shape = tuple(self.number("Q") for _ in range(axes))
        kind, offset = self.number("I"), self.number("Q")
        return name, shape[::-1], kind, offset

    def check_count(self, count: int, least: int, cost: int = 1) -> None:
        """CorruptModel for more entries than the rest of the file can hold, at `least` bytes each, or than the whole
        header may have (`MOST_NUMBERS`), at `cost` numbers each."""
        self._numbers += count * cost
        if self._numbers > MOST_NUMBERS or count * least > len(self._content) - self.position:
            raise _corrupt(
                self._path, f"its header promises {count:,} entries, more than the file can hold or a model has"
            )

    def _take(self, size: int) -> memoryview:
        end = self.position + size
        if end > len(self._content):
            raise _corrupt(self._path, "it ends within its header")
        taken = self._content[self.position : end]
        self.position = end
        return taken


@dataclass(frozen=True)
class _Format:
    """A type of tensors: `numbers` in each block of `size` bytes."""

    numbers: int
    size: int
    expand: Callable[[Bytes], Float]
    """Raw bytes of whole blocks -> float32 [numbers]."""


def _half(blocks: Bytes, at: int) -> Float:
    """The float16 at this byte of each block, as float32 [blocks, 1]."""
    return blocks[:, at : at + 2].copy().view("<f2").astype(np.float32)


def _nibbles(packed: Bytes) -> Bytes:
    """[blocks, n] -> [blocks, 2 n]: all lower halves, then all upper halves."""
    return np.concatenate([packed & 15, packed >> 4], axis=1)


def _fifth_bits(blocks: Bytes, at: int) -> Bytes:
    """The 32 bits at this byte of each block, as 0 or 16, [blocks, 32]."""
    bits: Bytes = np.unpackbits(blocks[:, at : at + 4], axis=1, bitorder="little") * np.uint8(16)
    return bits


def _q4_0(raw: Bytes) -> Float:
    blocks = raw.reshape(-1, 18)
    return (_half(blocks, 0) * (_nibbles(blocks[:, 2:]).astype(np.float32) - 8)).reshape(-1)


def _q4_1(raw: Bytes) -> Float:
    blocks = raw.reshape(-1, 20)
    return (_half(blocks, 0) * _nibbles(blocks[:, 4:]).astype(np.float32) + _half(blocks, 2)).reshape(-1)


def _q5_0(raw: Bytes) -> Float:
    blocks = raw.reshape(-1, 22)
    values = (_nibbles(blocks[:, 6:]) | _fifth_bits(blocks, 2)).astype(np.float32) - 16
    return (_half(blocks, 0) * values).reshape(-1)


def _q5_1(raw: Bytes) -> Float:
    blocks = raw.reshape(-1, 24)
    values = (_nibbles(blocks[:, 8:]) | _fifth_bits(blocks, 4)).astype(np.float32)
    return (_half(blocks, 0) * values + _half(blocks, 2)).reshape(-1)


def _q8_0(raw: Bytes) -> Float:
    blocks = raw.reshape(-1, 34)
    return (_half(blocks, 0) * blocks[:, 2:].view(np.int8).astype(np.float32)).reshape(-1)


def _scales_and_minima(blocks: Bytes) -> tuple[Float, Float]:
    """6-bit scales and minima of the 8 parts of a block of Q4_K or Q5_K, times the block's factors; [blocks, 8, 1]."""
    packed = blocks[:, 4:16]
    low, middle, high = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = np.concatenate([low & 63, (high & 15) | (low >> 6 << 4)], axis=1).astype(np.float32)
    minima = np.concatenate([middle & 63, (high >> 4) | (middle >> 6 << 4)], axis=1).astype(np.float32)
    return (_half(blocks, 0) * scales)[:, :, None], (_half(blocks, 2) * minima)[:, :, None]


def _q4_k(raw: Bytes) -> Float:
    blocks = raw.reshape(-1, 144)
    scales, minima = _scales_and_minima(blocks)
    packed = blocks[:, 16:].reshape(-1, 4, 1, 32)
    values = np.concatenate([packed & 15, packed >> 4], axis=2).reshape(-1, 8, 32).astype(np.float32)
    return (scales * values - minima).reshape(-1)


def _q5_k(raw: Bytes) -> Float:
    blocks = raw.reshape(-1, 176)
    scales, minima = _scales_and_minima(blocks)
    packed = blocks[:, 48:].reshape(-1, 4, 1, 32)
    low = np.concatenate([packed & 15, packed >> 4], axis=2).reshape(-1, 8, 32)
    fifth = (blocks[:, None, 16:48] >> np.arange(8, dtype=np.uint8)[None, :, None] & 1) << 4
    expanded: Float = (scales * (low | fifth).astype(np.float32) - minima).reshape(-1)
    return expanded


def _q6_k(raw: Bytes) -> Float:
    blocks = raw.reshape(-1, 210)
    low = blocks[:, :128].reshape(-1, 2, 1, 64)
    low = np.concatenate([low & 15, low >> 4], axis=2).reshape(-1, 2, 4, 32)
    shifts = np.array([0, 2, 4, 6], np.uint8)[None, None, :, None]
    high = (blocks[:, 128:192].reshape(-1, 2, 1, 32) >> shifts & 3) << 4
    values = (low | high).astype(np.float32).reshape(-1, 16, 16) - 32
    scales = _half(blocks, 208) * blocks[:, 192:208].view(np.int8).astype(np.float32)
    expanded: Float = (scales[:, :, None] * values).reshape(-1)
    return expanded


_LEVELS = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.float32)
"""Of IQ4_NL and IQ4_XS, whose numbers of 4 bits are not at equal distances."""


def _iq4_nl(raw: Bytes) -> Float:
    blocks = raw.reshape(-1, 18)
    return (_half(blocks, 0) * _LEVELS[_nibbles(blocks[:, 2:])]).reshape(-1)


def _iq4_xs(raw: Bytes) -> Float:
    blocks = raw.reshape(-1, 136)
    high = blocks[:, 2:4].copy().view("<u2") >> np.arange(0, 16, 2, dtype=np.uint16) & 3
    low = (blocks[:, 4:8, None] >> np.array([0, 4], np.uint8) & 15).reshape(-1, 8)
    scales = _half(blocks, 0) * ((low | high << 4).astype(np.float32) - 32)
    packed = blocks[:, 8:].reshape(-1, 8, 16)
    values = _LEVELS[np.concatenate([packed & 15, packed >> 4], axis=2)]
    expanded: Float = (scales[:, :, None] * values).reshape(-1)
    return expanded


def _q2_k(raw: Bytes) -> Float:
    blocks = raw.reshape(-1, 84)
    parts = blocks[:, :16, None]
    values = _quarters(blocks[:, 16:80])
    scales = _half(blocks, 80)[:, :, None] * (parts & 15).astype(np.float32)
    minima = _half(blocks, 82)[:, :, None] * (parts >> 4).astype(np.float32)
    expanded: Float = (scales * values.astype(np.float32) - minima).reshape(-1)
    return expanded


def _q3_k(raw: Bytes) -> Float:
    blocks = raw.reshape(-1, 110)
    low = (blocks[:, 96:104].reshape(-1, 1, 8) >> np.array([[0], [4]], np.uint8) & 15).reshape(-1, 16)
    high = (blocks[:, 104:108].reshape(-1, 1, 4) >> np.array([[0], [2], [4], [6]], np.uint8) & 3).reshape(-1, 16)
    scales = _half(blocks, 108) * ((low | high << 4).astype(np.float32) - 32)
    third = (blocks[:, None, :32] >> np.arange(8, dtype=np.uint8)[None, :, None] & 1).reshape(-1, 16, 16)
    values = _quarters(blocks[:, 32:96]).astype(np.float32) - 4 * (1 - third.astype(np.float32))
    expanded: Float = (scales[:, :, None] * values).reshape(-1)
    return expanded


def _quarters(packed: Bytes) -> Bytes:
    """[blocks, 64] -> numbers of 2 bits, [blocks, 16, 16]: of each half, all lowest bits first."""
    shifts = np.array([0, 2, 4, 6], np.uint8)[None, None, :, None]
    values: Bytes = np.bitwise_and(packed.reshape(-1, 2, 1, 32) >> shifts, np.uint8(3)).reshape(-1, 16, 16)
    return values


def _bfloat(raw: Bytes) -> Float:
    widened: Float = (raw.view("<u2").astype(np.uint32) << 16).view(np.float32)
    return widened


_FORMATS: Mapping[int, _Format] = {
    0: _Format(1, 4, lambda raw: raw.view("<f4").astype(np.float32)),
    1: _Format(1, 2, lambda raw: raw.view("<f2").astype(np.float32)),
    2: _Format(32, 18, _q4_0),
    3: _Format(32, 20, _q4_1),
    6: _Format(32, 22, _q5_0),
    7: _Format(32, 24, _q5_1),
    8: _Format(32, 34, _q8_0),
    10: _Format(256, 84, _q2_k),
    11: _Format(256, 110, _q3_k),
    12: _Format(256, 144, _q4_k),
    13: _Format(256, 176, _q5_k),
    14: _Format(256, 210, _q6_k),
    20: _Format(32, 18, _iq4_nl),
    23: _Format(256, 136, _iq4_xs),
    30: _Format(1, 2, _bfloat),
}
"""The types that are read, by ggml's numbers."""
TYPES: Mapping[int, str] = {
    0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 6: "Q5_0", 7: "Q5_1", 8: "Q8_0", 9: "Q8_1", 10: "Q2_K", 11: "Q3_K",
    12: "Q4_K", 13: "Q5_K", 14: "Q6_K", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S",
    20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64",
    29: "IQ1_M", 30: "BF16", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4",
}  # fmt: skip
"""ggml's names of its numbers."""


def _size(path: Path, name: str, tensor: GgufTensor) -> int:
    """Bytes of a tensor."""
    form = _FORMATS.get(tensor.kind)
    if form is None:
        kind = TYPES.get(tensor.kind, f"number {tensor.kind}")
        raise UnsupportedModel(
            f"{path}: the tensor {name} has the type {kind} of ggml, which is not read here",
            remedy=f"Use a file in one of {', '.join(TYPES[kind] for kind in _FORMATS)}",
        )
    if tensor.shape[-1] % form.numbers:
        raise _corrupt(path, f"rows of {tensor.shape[-1]} numbers of the tensor {name} are not whole blocks")
    return math.prod(tensor.shape) // form.numbers * form.size


def _mapped(path: Path) -> Bytes:
    with path.open("rb") as file:
        check_pointer(path, file.read(64))
        mapped: Bytes = np.memmap(file, np.uint8, mode="r")
    return mapped


def _corrupt(path: Path, what: str) -> CorruptModel:
    return CorruptModel(f"{path} is not a whole GGUF file: {what}", remedy="Fetch the model again")
