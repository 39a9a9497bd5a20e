"""A model's own ONNX file: whether it is whole, and which files belong to it. The graph itself is not parsed.

An ONNX file is one protobuf message, so walking its top-level fields tells a truncated file in microseconds.
"""

from __future__ import annotations

from pathlib import Path
from typing import BinaryIO

from penstock.errors import CorruptModel
from penstock_runtime.models.json_files import check_pointer

GRAPH_FIELD = 7
"""`ModelProto.graph`."""
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_LONGEST_VARINT = 10


def check_graph(path: Path) -> None:
    """CorruptModel when the file is a git-lfs pointer, truncated, or not an ONNX model."""
    check_pointer(path)
    size = path.stat().st_size
    fields = set()
    with path.open("rb") as file:
        while file.tell() < size:
            tag = _varint(path, file)
            number, wire = tag >> 3, tag & 7
            if wire == _VARINT:
                _ = _varint(path, file)
            elif wire in {_FIXED64, _FIXED32}:
                file.seek(8 if wire == _FIXED64 else 4, 1)
            elif wire == _BYTES:
                length = _varint(path, file)
                file.seek(min(length, size + 1), 1)  # past the end when it is too long, which is told below
            if number == 0 or wire not in {_VARINT, _FIXED64, _BYTES, _FIXED32} or file.tell() > size:
                raise _corrupt(path)
            fields.add(number)
    if GRAPH_FIELD not in fields:
        raise _corrupt(path)


def graph_data(path: Path) -> tuple[Path, ...]:
    """Files beside the graph that hold its weights: `model.onnx_data`, `model.onnx.data`, `model.onnx_data_1`, ..."""
    beside = (other for other in path.parent.glob(f"{path.name}[._]data*") if other.is_file())
    return tuple(sorted(beside))


def _varint(path: Path, file: BinaryIO) -> int:
    value = 0
    for shift in range(_LONGEST_VARINT):
        byte = file.read(1)
        if not byte:
            break
        value |= (byte[0] & 0x7F) << (7 * shift)
        if byte[0] < 0x80:
            return value
    raise _corrupt(path)


def _corrupt(path: Path) -> CorruptModel:
    return CorruptModel(f"{path} is not a whole ONNX model", remedy="Fetch the model again")
