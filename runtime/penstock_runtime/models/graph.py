"""Checks an ONNX file without the onnx package: completeness, its external data files, its operators.

An ONNX file is one protobuf message. Walking over its top-level fields detects a truncated file in microseconds;
walking down to the tensors, without reading their contents, finds the external data files in milliseconds. The onnx
package could do this too, but is not a dependency of the runtime.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import BinaryIO, NamedTuple

from penstock.errors import CorruptModel, UnsafeModel
from penstock_runtime.models.files import LFS_POINTER, check_pointer, is_inner, open_within

GRAPH_FIELD = 7
"""`ModelProto.graph`."""
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_LONGEST_VARINT = 10
_LONGEST_TEXT = 4096
"""Bytes of a key or a file name: no system opens longer names."""

_INNER: Mapping[str, Mapping[int, str]] = {
    "model": {GRAPH_FIELD: "graph", 25: "function"},
    "graph": {1: "node", 5: "tensor", 15: "sparse tensor"},
    "function": {7: "node", 11: "attribute"},
    "node": {5: "attribute"},
    "attribute": {5: "tensor", 6: "graph", 10: "tensor", 11: "graph", 22: "sparse tensor", 23: "sparse tensor"},
    "sparse tensor": {1: "tensor", 2: "tensor"},
}
"""Where tensors occur, by the field numbers of onnx.proto: in graphs and constants, also of functions and of the
branches of nodes such as If. Not in `training_info`, which no engine reads."""
_EXTERNAL_DATA, _DATA_LOCATION = 13, 14
"""Fields of TensorProto."""
_EXTERNAL = 1
"""`TensorProto.DataLocation`."""
_GRAPH_NODE, _NODE_OP_TYPE = 1, 4
"""Fields of GraphProto and NodeProto."""
_KEY, _VALUE = 1, 2
"""Fields of StringStringEntryProto."""


class _Field(NamedTuple):
    number: int
    wire: int
    value: int
    """The number, for a varint."""
    start: int
    end: int
    """Start and end of the contents in the file."""


def check_graph(folder: Path, path: Path) -> None:
    """CorruptModel if the file of a model folder is a git-lfs pointer, truncated, or not an ONNX model."""
    with open_within(folder, path) as file:
        check_pointer(path, file.read(len(LFS_POINTER)))
        fields = {field.number for field in _fields(path, file, 0, _size(file))}
    if GRAPH_FIELD not in fields:
        raise _corrupt(path)


def graph_data(folder: Path, path: Path) -> tuple[Path, ...]:
    """The external data files that the graph of a model folder refers to: `model.onnx_data`, or one for each tensor.

    They need not exist (`check_data`). UnsafeModel if one is outside of the graph's folder, or hidden.
    """
    names: set[str] = set()
    with open_within(folder, path) as file:
        waiting = [("model", 0, _size(file))]
        while waiting:
            kind, start, end = waiting.pop()
            if kind == "tensor":
                names |= _locations(path, file, start, end)
                continue
            for field in _fields(path, file, start, end):
                inner = _INNER[kind].get(field.number)
                if inner is not None and field.wire == _BYTES:
                    waiting.append((inner, field.start, field.end))
    for name in sorted(names):
        if not is_inner(name):
            raise UnsafeModel(
                f"{path} keeps weights in {name}, outside its folder or in a hidden one",
                remedy="Use a model from a source you trust",
            )
    return tuple(sorted(path.parent / name for name in names))


def check_data(folder: Path, path: Path) -> None:
    """CorruptModel if an external data file is missing; it names the first one. UnsafeModel if one is a link out of the
    model folder."""
    data = graph_data(folder, path)
    missing = next((file for file in data if not file.is_file()), None)
    for file in data if missing is None else ():
        open_within(folder, file).close()
    if missing is not None:
        raise CorruptModel(
            f"{path} keeps weights in {missing.relative_to(path.parent)}, which is not in its folder",
            remedy=f"Put that file there; of a remote model, which is fetched by known names, save it anew with all "
            f"weights in {path.name}_data (docs/how-to/convert-a-model.md#onnx-weights)",
        )


def count_operators(path: Path) -> Counter[str]:
    """The number of nodes of each `op_type` in the main graph. CorruptModel if the file is not an ONNX model."""
    found: Counter[str] = Counter()
    with path.open("rb") as file:
        for model in _fields(path, file, 0, path.stat().st_size):
            if model.number != GRAPH_FIELD:
                continue
            for part in _fields(path, file, model.start, model.end):
                if part.number == _GRAPH_NODE:
                    names = _fields(path, file, part.start, part.end)
                    found.update(_text(path, file, name) for name in names if name.number == _NODE_OP_TYPE)
    return found


def _locations(path: Path, file: BinaryIO, start: int, end: int) -> set[str]:
    """The external file of a tensor's contents; empty if the tensor holds them itself."""
    fields = list(_fields(path, file, start, end))
    if not any(field.number == _DATA_LOCATION and field.value == _EXTERNAL for field in fields):
        return set()
    entries = [
        {part.number: _text(path, file, part) for part in _fields(path, file, field.start, field.end)}
        for field in fields
        if field.number == _EXTERNAL_DATA and field.wire == _BYTES
    ]
    return {entry.get(_VALUE, "") for entry in entries if entry.get(_KEY) == "location"}


def _text(path: Path, file: BinaryIO, field: _Field) -> str:
    if field.wire != _BYTES or field.end - field.start > _LONGEST_TEXT:
        raise _corrupt(path)
    file.seek(field.start)
    try:
        text = file.read(field.end - field.start).decode()
    except UnicodeDecodeError as error:
        raise _corrupt(path) from error
    if "\0" in text:
        raise _corrupt(path)
    return text


def _fields(path: Path, file: BinaryIO, start: int, end: int) -> Iterator[_Field]:
    """The fields of the message between these offsets of the file. The file's position may change between two fields.

    CorruptModel if there is no valid message, or it is truncated.
    """
    place = start
    while place < end:
        file.seek(place)
        tag = _varint(path, file)
        number, wire, value, length = tag >> 3, tag & 7, 0, 0
        if wire == _VARINT:
            value = _varint(path, file)
        elif wire in {_FIXED64, _FIXED32}:
            length = 8 if wire == _FIXED64 else 4
        elif wire == _BYTES:
            length = _varint(path, file)
        contents = file.tell()
        place = contents + length
        if number == 0 or wire not in {_VARINT, _FIXED64, _BYTES, _FIXED32} or place > end:
            raise _corrupt(path)
        yield _Field(number, wire, value, contents, place)


def _size(file: BinaryIO) -> int:
    return os.fstat(file.fileno()).st_size


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
