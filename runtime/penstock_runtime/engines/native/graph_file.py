"""The file format of native graphs, `model.native`: a header with the steps, then the tensors.

    8 bytes   b"PENSTOCK"
    8 bytes   size of the header, little endian
    header    JSON: {"version": 1, "output": {"buffer", "name"}, "steps": [...], "tensors": {name: {...}}}
    tensors   each at a multiple of 64 bytes from the end of the header, which is padded to one itself

The optimiser writes the file, the engine maps it into memory. Reading checks everything that the C code relies on:
types and shapes of tensors, and that they lie within the file.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from penstock.errors import ArtefactError

MAGIC = b"PENSTOCK"
VERSION = 1
ALIGNMENT = 64
SUFFIX = ".native"
MOST_BUFFERS = 64
DISTANCES_SPARE = 33
"""`PENSTOCK_DISTANCES_SPARE` of native.h."""

Operator = Literal[
    "embed", "norm", "linear8", "linear32", "attention", "first", "chosen", "rotate", "average", "head-norm", "last",
    "largest",
]  # fmt: skip
Activation = Literal["none", "gelu", "relu", "tanh", "gelu-tanh", "silu"]
Array = NDArray[Any]


class GraphStep(BaseModel):
    """One step. `penstock_step` of native.h documents the numbers; tensors are named by their role in it."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    operator: Operator
    source: int = Field(default=-1, ge=-1, lt=MOST_BUFFERS)
    target: int = Field(ge=0, lt=MOST_BUFFERS)
    residual: int = Field(default=-1, ge=-1, lt=MOST_BUFFERS)
    keys: int = Field(default=-1, ge=-1, lt=MOST_BUFFERS)
    values: int = Field(default=-1, ge=-1, lt=MOST_BUFFERS)
    inputs: int = Field(default=0, ge=0, lt=2**28)
    """Width of the source; for `embed` the size of the vocabulary; for `attention` the vectors of distances."""
    outputs: int = Field(ge=1, lt=2**24)
    activation: Activation = "none"
    heads: int = Field(default=0, ge=0, le=4096)
    positions: int = Field(default=0, ge=0, lt=2**24)
    types: int = Field(default=0, ge=0, lt=2**16)
    padding: int = Field(default=-1, ge=-1, lt=2**24)
    gated: bool = False
    key_heads: int = Field(default=0, ge=0, le=4096)
    """0: as many as `heads`."""
    before: int = Field(default=-1, ge=-1, lt=2**24)
    after: int = Field(default=-1, ge=-1, lt=2**24)
    epsilon: float = Field(default=0.0, ge=0.0, le=1.0)
    tensors: dict[str, str] = Field(default_factory=dict)
    """Names in the file by role in the step."""


class GraphOutput(BaseModel):
    """The output of the graph."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    name: str
    buffer: int = Field(ge=0, lt=MOST_BUFFERS)
    width: int = Field(ge=1)
    """Valid numbers of each line: a product's outputs are padded to a multiple of 32."""
    per_row: bool
    """One line for each row instead of one for each token."""
    chosen_id: int = Field(default=-1, ge=-1, lt=2**24)
    """Not -1: one line for each token of this id, row by row."""
    columns: tuple[str, ...] = ()
    """Names of outputs of one number of each line, in order, instead of `name`. Empty: the lines are the output."""

    @model_validator(mode="after")
    def _names_all_columns(self) -> Self:
        if self.columns and len(set(self.columns)) != self.width:
            raise ValueError(f"{self.width} columns have the names {', '.join(self.columns)}")
        return self

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the graph's outputs."""
        return self.columns or (self.name,)


class StoredTensor(BaseModel):
    """Where a tensor is in the file."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    dtype: Literal["int8", "uint8", "int16", "float32"]
    shape: list[int]
    offset: int = Field(ge=0)


class _Header(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    version: Literal[1]
    output: GraphOutput
    steps: list[GraphStep] = Field(min_length=1, max_length=2000)
    tensors: dict[str, StoredTensor]


@dataclass(frozen=True, eq=False)
class NativeGraph:
    """Steps and their tensors."""

    steps: tuple[GraphStep, ...]
    output: GraphOutput
    tensors: Mapping[str, Array] = field(repr=False)


def output_width(steps: Sequence[GraphStep], output: GraphOutput) -> int:
    """Width of the lines of the output's buffer. ValueError if no step writes it, or it is narrower than the output."""
    width = next((step.outputs for step in reversed(steps) if step.target == output.buffer), 0)
    if width < output.width:
        raise ValueError(f"has an output of {output.width} numbers in lines of {width}")
    return width


def expected_tensors(step: GraphStep) -> dict[str, tuple[str, tuple[int, ...], bool]]:
    """Type, shape, and whether it is optional, of each tensor of a step."""
    wide, by_type = (step.outputs,), step.types > 0
    match step.operator:
        case "embed":
            return {
                "weights": ("int16", (step.inputs, step.outputs), False),
                "scales": ("float32", (step.inputs,), False),
                **({"position_table": ("float32", (step.positions, step.outputs), False)} if step.positions else {}),
                **({"type_table": ("float32", (step.types, step.outputs), False)} if by_type else {}),
            }
        case "norm":
            return {"weights": ("float32", wide, False), "bias": ("float32", wide, True)}
        case "head-norm":
            return {"weights": ("float32", (step.outputs // max(step.heads, 1),), False)}
        case "linear8" | "largest":
            return {
                "weights": ("int8", (step.inputs, step.outputs), False),
                "scales": ("float32", wide, False),
                "bias": ("float32", wide, False),
                "factors": ("float32", (step.inputs,), True),
            }
        case "linear32":
            return {"weights": ("float32", (step.outputs, step.inputs), False), "bias": ("float32", wide, False)}
        case "attention" if step.inputs:
            vectors = ("float32", (step.heads, step.inputs, step.outputs // max(step.heads, 1)), True)
            rows = ("int16", (2 * step.positions - 1,), False)
            return {"distance_keys": vectors, "distance_queries": vectors, "distance_rows": rows}
        case "attention":
            shape = (step.heads, 2 * step.positions - 1 + DISTANCES_SPARE)
            return {"distances": ("float32", shape, False)} if step.positions else {}
        case "rotate":
            angles = ("float32", (step.positions, step.outputs // max(step.heads, 1) // 2), False)
            return {"cosines": angles, "sines": angles}
    return {}


def write(path: Path, graph: NativeGraph) -> None:
    """Write the file, deterministically. ValueError if a step's tensors are not as expected."""
    output_width(graph.steps, graph.output)
    for step in graph.steps:
        _check_step(step, {name: (str(a.dtype), a.shape) for name, a in graph.tensors.items()})
    fields = {
        "output": graph.output.model_dump(exclude_defaults=True),
        "steps": [step.model_dump(exclude_defaults=True) for step in graph.steps],
    }
    write_tensors(path, fields, graph.tensors)


def write_tensors(path: Path, fields: Mapping[str, Any], tensors: Mapping[str, Array]) -> None:
    """Write a file with these fields, its version and the offsets of the tensors in its header."""
    # Offsets from the end of the header: its size depends on their digits.
    places: dict[str, Any] = {}
    size = 0
    for name, array in tensors.items():
        places[name] = {"dtype": str(array.dtype), "shape": list(array.shape), "offset": size}
        size = _aligned(size + array.nbytes)
    document = {"version": VERSION, **fields, "tensors": places}
    text = json.dumps(document, separators=(",", ":")).encode()
    header = text + b" " * (_aligned(16 + len(text)) - 16 - len(text))
    with path.open("wb") as file:
        file.write(MAGIC + len(header).to_bytes(8, "little") + header)
        for name, array in tensors.items():
            file.seek(16 + len(header) + places[name]["offset"])
            file.write(np.ascontiguousarray(array).tobytes())


def read(path: Path) -> NativeGraph:
    """Map the file. ArtefactError if it is missing, truncated, altered, or of another version."""
    with header_checked(path):
        text, data = read_header(path)
        header = _Header.model_validate_json(text)
        output_width(header.steps, header.output)
        tensors = {name: mapped_tensor(data, one) for name, one in header.tensors.items()}
        for step in header.steps:
            _check_step(step, {name: (one.dtype, tuple(one.shape)) for name, one in header.tensors.items()})
    return NativeGraph(tuple(header.steps), header.output, tensors)


@contextmanager
def header_checked(path: Path) -> Iterator[None]:
    """Errors of a header's fields and tensors become an ArtefactError that names the file."""
    try:
        yield
    except ValidationError as error:
        first = error.errors()[0]
        raise bad_file(
            path, f"has a header that is wrong at {'.'.join(map(str, first['loc']))}: {first['msg']}"
        ) from error
    except ValueError as error:
        raise bad_file(path, str(error)) from error


def read_header(path: Path) -> tuple[bytes, Array]:
    """The header and the bytes after it, mapped. ArtefactError if the file is missing or cut short."""
    if not path.is_file():
        raise bad_file(path, "is missing")
    try:
        data = np.memmap(path, dtype=np.uint8, mode="r")
    except (OSError, ValueError) as error:
        raise bad_file(path, f"cannot be read: {error}") from error
    start = bytes(data[:16])
    size = int.from_bytes(start[8:16], "little")
    if start[:8] != MAGIC or size > data.size - 16 or (16 + size) % ALIGNMENT:
        raise bad_file(path, "is not a native graph, or is cut short")
    return bytes(data[16 : 16 + size]), data[16 + size :]


def mapped_tensor(data: Array, tensor: StoredTensor) -> Array:
    """The tensor, from the bytes after the header. ValueError if they do not hold it."""
    dtype = np.dtype(tensor.dtype)
    if any(size < 1 for size in tensor.shape):
        raise ValueError(f"has a tensor of shape {tensor.shape}")
    size = math.prod(tensor.shape) * dtype.itemsize
    if tensor.offset % ALIGNMENT or tensor.offset + size > data.size:
        raise ValueError("is cut short: a tensor lies beyond its end")
    return np.asarray(data[tensor.offset : tensor.offset + size].view(dtype).reshape(tensor.shape))


def _check_step(step: GraphStep, tensors: Mapping[str, tuple[str, tuple[int, ...]]]) -> None:
    expected = expected_tensors(step)
    for part in step.tensors:
        if part not in expected:
            raise ValueError(f"has a step {step.operator} with an unknown tensor {part}")
    for part, (dtype, shape, optional) in expected.items():
        if part not in step.tensors and optional:
            continue
        found = tensors.get(step.tensors.get(part, ""))
        if found != (dtype, shape):
            raise ValueError(f"has a step {step.operator} whose {part} is {found}, not {(dtype, shape)}")


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def bad_file(path: Path, what: str) -> ArtefactError:
    """The error of a file that cannot be read."""
    return ArtefactError(f"{path} {what}", remedy="Run penstock optimize again")
