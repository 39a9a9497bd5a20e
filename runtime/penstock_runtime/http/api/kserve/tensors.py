"""Tensors of the Open Inference Protocol v2: BYTES, FP32 and INT64, as JSON or in the binary extension. Pure.

Binary: after the JSON header the tensors follow one another; a BYTES element is its length (4 bytes, little endian) and
the bytes; numbers are little endian. A tensor's `binary_data_size` parameter is its length in bytes.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock_runtime.errors import InvalidInput
from penstock_runtime.tasks.fields import json_words

LENGTH = struct.Struct("<I")
LARGEST = 2**31 - 1
"""Size of a dimension."""
MOST_DIMENSIONS = 32
"""More than any tensor has: the product of a hundred thousand sizes takes seconds."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One input or output of the model. -1 in the shape: any size."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    description: str = ""

    def as_json(self) -> dict[str, Any]:
        """The tensor in the metadata."""
        return {"name": self.name, "datatype": self.datatype, "shape": list(self.shape)}


@dataclass(frozen=True, slots=True)
class OutputTensor:
    """One output tensor: texts, or float32 numbers."""

    name: str
    shape: tuple[int, ...]
    texts: Sequence[str] | None = None
    numbers: NDArray[np.float32] | None = None

    @property
    def datatype(self) -> str:
        """BYTES or FP32."""
        return "BYTES" if self.numbers is None else "FP32"

    def as_json(self) -> dict[str, Any]:
        """The tensor with its data, flat."""
        data: Any = self.texts if self.numbers is None else np.ascontiguousarray(self.numbers).reshape(-1)
        return {"name": self.name, "datatype": self.datatype, "shape": list(self.shape), "data": data}

    def as_binary(self) -> tuple[dict[str, Any], bytes]:
        """The JSON part and the binary data."""
        if self.numbers is None:
            encoded = [text.encode() for text in self.texts or ()]
            data = b"".join(part for text in encoded for part in (LENGTH.pack(len(text)), text))
        else:
            data = self.numbers.astype("<f4", copy=False).tobytes()
        parameters = {"binary_data_size": len(data)}
        header = {"name": self.name, "datatype": self.datatype, "shape": list(self.shape), "parameters": parameters}
        return header, data


def element_count(shape: Any, where: str) -> int:
    """How many elements a shape holds; InvalidInput when it is no list of sizes (3.0 is one)."""
    sizes_fit = (
        isinstance(shape, list)
        and len(shape) <= MOST_DIMENSIONS
        and all(
            isinstance(size, int | float) and not isinstance(size, bool) and 0 <= size <= LARGEST and size == int(size)
            for size in shape
        )
    )
    if not sizes_fit:
        raise InvalidInput(f"{where}.shape must be a list of sizes", field=f"{where}.shape", remedy="Such as [1]")
    return math.prod(int(size) for size in shape)


def read_texts(tensor: dict[str, Any], binary: bytes | None, where: str) -> list[str]:
    """The texts of a BYTES tensor, flat. `binary`: its data, when it came behind the JSON."""
    datatype = tensor.get("datatype")
    if datatype != "BYTES":
        shown = repr(datatype[:20]) if isinstance(datatype, str) else json_words(datatype)
        raise InvalidInput(
            f"{where}.datatype must be BYTES, not {shown}", field=f"{where}.datatype", remedy="Send texts as BYTES"
        )
    count = element_count(tensor.get("shape"), where)
    if binary is not None:
        texts = _binary_texts(binary, count, where)
    else:
        data = _flat(tensor.get("data"), where)
        for index, text in enumerate(data):
            if not isinstance(text, str):
                path = f"{where}.data[{index}]"
                raise InvalidInput(f"{path} must be a text, not {json_words(text)}", field=path, remedy="Send texts")
        texts = data
    if len(texts) != count:
        found = f"more than {count}" if len(texts) > count else f"{len(texts)}"
        raise InvalidInput(
            f"{where} has {found} elements, but its shape {tensor['shape']} holds {count}",
            field=f"{where}.shape",
            remedy="Make the shape fit the data",
        )
    return texts


def _flat(data: Any, where: str) -> list[Any]:
    """Row-major elements of flat or nested lists."""
    if not isinstance(data, list):
        raise InvalidInput(
            f"{where}.data must be a list, not {json_words(data)}", field=f"{where}.data", remedy="Send a list of texts"
        )
    flat: list[Any] = data
    while flat and all(isinstance(item, list) for item in flat):
        flat = [element for item in flat for element in item]
    return flat


def _binary_texts(data: bytes, count: int, where: str) -> list[str]:
    """No more than one text over `count`, however many empty ones there are."""
    texts: list[str] = []
    position = 0
    while position < len(data) and len(texts) <= count:
        if position + LENGTH.size > len(data):
            raise _cut_off(where)
        (length,) = LENGTH.unpack_from(data, position)
        position += LENGTH.size
        if position + length > len(data):
            raise _cut_off(where)
        try:
            texts.append(data[position : position + length].decode())
        except UnicodeDecodeError as error:
            path = f"{where}.data[{len(texts)}]"
            raise InvalidInput(f"{path} is not UTF-8", field=path, remedy="Encode texts as UTF-8") from error
        position += length
    return texts


def _cut_off(where: str) -> InvalidInput:
    return InvalidInput(
        f"{where}: its binary data ends inside an element",
        field=where,
        remedy="Write each element as its length in 4 bytes, little endian, and its bytes",
    )
