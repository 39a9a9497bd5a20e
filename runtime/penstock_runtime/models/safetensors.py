"""Reads safetensors files: checks their headers, and reads single tensors.

The layout is 8 bytes of length (little-endian), a JSON header of that length, then the tensors without gaps. The
`safetensors` package has no function that checks a header against the file size without mapping the tensors.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.errors import CorruptModel, UnsafeModel, UnsupportedModel
from penstock_runtime.models.files import LFS_POINTER, check_pointer, is_inner, open_within, read_object
from penstock_runtime.rows import Float

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
LONGEST_HEADER = 25_000_000
"""Bytes. The safetensors package allows 100 million, of which Python makes a gigabyte of objects."""
MOST_TENSORS = 100_000
"""Of a file; the largest models have some thousand in each."""
MOST_AXES = 8
LARGEST = 2**63 - 1
"""Of sizes and offsets."""

BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8, "F6_E2M3": 6, "F6_E3M2": 6, "F4": 4,
    "I16": 16, "U16": 16, "F16": 16, "BF16": 16, "I32": 32, "U32": 32, "F32": 32,
    "I64": 64, "U64": 64, "F64": 64, "C64": 64,
}  # fmt: skip


@dataclass(frozen=True)
class TensorInfo:
    """One tensor of a safetensors file."""

    dtype: str
    """The format's name, such as `F32`."""
    shape: tuple[int, ...]
    file: Path
    start: int
    """Offset of its first byte in the file."""

    @property
    def parameters(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


def shard_files(folder: Path) -> tuple[Path, ...]:
    """The weight files in shard order: the single file, or the files of the index; empty if there are none.

    CorruptModel for an invalid index, UnsafeModel for an index that refers to files outside the folder.
    """
    if (folder / SINGLE).is_file():
        return (folder / SINGLE,)
    if not (folder / INDEX).is_file():
        return ()
    names = sorted(set(_weight_map(folder).values()))
    for name in names:
        pure = PurePosixPath(name)
        if not is_inner(name) or pure.suffix != ".safetensors":
            raise UnsafeModel(
                f"{folder / INDEX} names {name!r}, which is not a safetensors file of this folder",
                remedy="Use a model from a source you trust",
            )
    return tuple(folder / name for name in names)


def check_shards(folder: Path, shards: Sequence[Path]) -> Mapping[str, TensorInfo]:
    """Check every file and return all tensors by name; CorruptModel names the file and the inconsistency."""
    tensors: dict[str, TensorInfo] = {}
    for number, shard in enumerate(shards, start=1):
        if not shard.is_file():
            raise CorruptModel(
                f"{folder} lacks {shard.name}, part {number} of {len(shards)} that {INDEX} names",
                remedy="Fetch the model again",
            )
        tensors.update(read_header(folder, shard))
    if shards and shards[0].name != SINGLE:
        for name, shard_name in _weight_map(folder).items():
            if name not in tensors or tensors[name].file.name != PurePosixPath(shard_name).name:
                raise CorruptModel(
                    f"{folder / shard_name} lacks the tensor {name} that {INDEX} places there",
                    remedy="Fetch the model again",
                )
    return tensors


def read_header(folder: Path, path: Path) -> dict[str, TensorInfo]:
    """The tensors of one file of a model folder, after checking that they fill it exactly.

    CorruptModel names the inconsistency; UnsafeModel for a link out of the folder.
    """
    with open_within(folder, path) as file:
        size = os.fstat(file.fileno()).st_size
        check_pointer(path, file.read(len(LFS_POINTER)))
        file.seek(0)
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > LONGEST_HEADER or 8 + length > size:
            raise _corrupt(path, f"its header of {length} bytes does not fit into {size} bytes")
        raw = file.read(length)
    if raw.count(b"{") > MOST_TENSORS:  # before Python makes objects of them
        raise _corrupt(path, f"its header has more than {MOST_TENSORS:,} tensors")
    try:
        header = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise _corrupt(path, "its header is not JSON") from error
    if not isinstance(header, dict):
        raise _corrupt(path, "its header is not a JSON object")
    spans: list[tuple[int, int, str]] = []
    tensors: dict[str, TensorInfo] = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        tensor, begin, end = _entry(path, name, entry, 8 + length)
        tensors[name] = tensor
        spans.append((begin, end, name))
    _check_spans(path, spans, size - 8 - length)
    return tensors


_STORED: Mapping[str, np.dtype[Any]] = {
    "F64": np.dtype("<f8"),
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype("<u2"),  # the upper half of a float32
}


_INTEGERS: Mapping[str, np.dtype[Any]] = {
    "I8": np.dtype("i1"), "I16": np.dtype("<i2"), "I32": np.dtype("<i4"), "I64": np.dtype("<i8"), "U8": np.dtype("u1"),
    "U16": np.dtype("<u2"), "U32": np.dtype("<u4"), "U64": np.dtype("<u8"),
}  # fmt: skip


def read_array(folder: Path, info: TensorInfo, name: str) -> NDArray[Any]:
    """A tensor of whole numbers as it is; others as `read_float32`."""
    stored = _INTEGERS.get(info.dtype)
    if stored is None:
        return read_float32(folder, info, name)
    if info.parameters == 0:
        return np.zeros(info.shape, stored)
    with open_within(folder, info.file) as file:
        raw = np.memmap(file, dtype=stored, mode="r", offset=info.start, shape=(info.parameters,))
    array: NDArray[Any] = raw.view(np.ndarray).reshape(info.shape)
    return array


def read_float32(folder: Path, info: TensorInfo, name: str) -> Float:
    """A tensor as float32, mapped from its file where that is its type. UnsupportedModel for other types."""
    stored = _STORED.get(info.dtype)
    if stored is None:
        raise UnsupportedModel(
            f"{info.file}: tensor {name!r} is stored as {info.dtype}, which is not a floating-point weight",
            remedy="Use the model as it was before quantisation, with weights of type F32, F16 or BF16",
        )
    if info.parameters == 0:
        return np.zeros(info.shape, np.float32)
    with open_within(folder, info.file) as file:
        raw = np.memmap(file, dtype=stored, mode="r", offset=info.start, shape=(info.parameters,))
    array: Float
    if info.dtype == "BF16":
        array = (raw.astype(np.uint32) << 16).view(np.float32)
    else:
        array = raw.astype(np.float32, copy=False)
    return array.view(np.ndarray).reshape(info.shape)


def written(tensors: Mapping[str, Float]) -> bytes:
    """A safetensors file with these tensors."""
    header = _header({name: tensor.shape for name, tensor in tensors.items()})
    return b"".join([header, *(np.ascontiguousarray(tensor, "<f4").tobytes() for tensor in tensors.values())])


Pieces = tuple[tuple[int, ...], Callable[[], Iterable[Float]]]
"""A tensor that is made while it is written: its shape, and what gives its values one after the other."""


def write_pieces(path: Path, tensors: Mapping[str, Pieces]) -> None:
    """Write a file piece by piece, for tensors that do not fit into memory together."""
    with path.open("wb") as file:
        file.write(_header({name: shape for name, (shape, _) in tensors.items()}))
        for _, values in tensors.values():
            for piece in values():
                file.write(np.ascontiguousarray(piece, "<f4").data)
        file.flush()
        os.fsync(file.fileno())


def _header(shapes: Mapping[str, tuple[int, ...]]) -> bytes:
    """Of a file with tensors in float32."""
    entries: dict[str, Any] = {}
    end = 0
    for name, shape in shapes.items():
        begin, end = end, end + 4 * math.prod(shape)
        entries[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)  # tensors are aligned, as the format advises
    return len(text).to_bytes(8, "little") + text


def _check_spans(path: Path, spans: list[tuple[int, int, str]], available: int) -> None:
    position = 0
    for begin, end, name in sorted(spans):
        if begin != position:
            raise _corrupt(path, f"tensor {name} starts at byte {begin} instead of {position}")
        position = end
    if position > available:
        raise _corrupt(path, f"it is truncated: {position:,} bytes of tensors promised, {available:,} there")
    if position < available:
        raise _corrupt(path, f"{available - position:,} bytes follow its last tensor")


def _entry(path: Path, name: str, entry: Any, data_start: int) -> tuple[TensorInfo, int, int]:
    try:
        dtype, shape, (begin, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
    except (KeyError, TypeError, ValueError) as error:
        raise _corrupt(path, f"tensor {name} has no dtype, shape and data_offsets") from error
    if isinstance(shape, list) and len(shape) > MOST_AXES:
        raise _corrupt(path, f"tensor {name} has {len(shape)} axes")
    whole = [begin, end, *shape] if isinstance(shape, list) else [None]
    if not all(type(value) is int and 0 <= value <= LARGEST for value in whole) or end < begin:
        raise _corrupt(path, f"tensor {name} has shape {shape!r} at {begin!r}..{end!r}")
    bits = BITS.get(dtype) if isinstance(dtype, str) else None
    if bits is None:
        raise _corrupt(path, f"tensor {name} has the unknown dtype {dtype!r}")
    if math.prod(shape) * bits != (end - begin) * 8:
        raise _corrupt(path, f"tensor {name} of shape {shape} and dtype {dtype} does not take {end - begin} bytes")
    return TensorInfo(dtype=dtype, shape=tuple(shape), file=path, start=data_start + begin), begin, end


def _weight_map(folder: Path) -> dict[str, str]:
    table = read_object(folder, INDEX).get("weight_map")
    if not isinstance(table, dict) or not table or not all(isinstance(name, str) for name in table.values()):
        raise CorruptModel(f"{folder / INDEX} has no weight_map", remedy="Fetch the model again")
    return table


def _corrupt(path: Path, what: str) -> CorruptModel:
    return CorruptModel(f"{path} is not a whole safetensors file: {what}", remedy="Fetch the model again")
