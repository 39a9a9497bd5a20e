"""Tensors of a model folder, by name, as float32: memory-mapped, without torch.

`ModelFolder.tensors` has checked the headers. Here the bytes are read, straight from the file: a float32 tensor is
not copied before it is written, and float16 and bfloat16 (which numpy does not know) are widened exactly.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from penstock.errors import CorruptModel, UnsupportedModel
from penstock_runtime.models.files import open_within
from penstock_runtime.models.folder import ModelFolder
from penstock_runtime.models.safetensors import TensorInfo
from penstock_runtime.rows import Float

_STORED: Mapping[str, np.dtype[Any]] = {
    "F64": np.dtype("<f8"),
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype("<u2"),  # the upper half of a float32
}
_RENEWED = {"gamma": "weight", "beta": "bias"}
"""Names of normalisation weights in the first BERT checkpoints; transformers renames them while it loads."""


class Weights(Mapping[str, TensorInfo]):
    """All tensors of a model, by name with old suffixes renewed; `take` reads the arrays.

    Two calls of `take` for one tensor give the same array object, so that what is shared stays shared.
    """

    def __init__(self, folder: ModelFolder) -> None:
        self.folder = folder
        self._stored_names = {_renewed(name): name for name in folder.tensors}
        self._taken: dict[str, Float] = {}

    def __getitem__(self, name: str) -> TensorInfo:
        return self.folder.tensors[self._stored_names[name]]

    def __iter__(self) -> Iterator[str]:
        return iter(self._stored_names)

    def __len__(self) -> int:
        return len(self._stored_names)

    @property
    def parameters(self) -> int:
        """How many numbers were taken so far, each shared tensor once."""
        return sum(array.size for array in self._taken.values())

    def take(self, name: str, shape: Sequence[int]) -> Float:
        """The tensor as float32; CorruptModel when it is missing or has another shape, with its name and file."""
        info = self.get(name)
        if info is None:
            files = ", ".join(file.name for file in self.folder.safetensors)
            raise CorruptModel(
                f"{self.folder.path} has no tensor {name!r} (looked in {files})",
                remedy="Fetch the model again; if it stays so, config.json and the weights are not of one model",
            )
        if info.shape != tuple(shape):
            raise CorruptModel(
                f"{info.file}: tensor {self._stored_names[name]!r} has shape {list(info.shape)}, "
                f"but config.json asks for {list(shape)}",
                remedy="Take config.json and the weights from the same revision of the model",
            )
        if name not in self._taken:
            self._taken[name] = _as_float32(self.folder.path, info, self._stored_names[name])
        return self._taken[name]


def _renewed(name: str) -> str:
    stem, dot, last = name.rpartition(".")
    return stem + dot + _RENEWED.get(last, last)


def _as_float32(folder: Path, info: TensorInfo, stored_name: str) -> Float:
    stored = _STORED.get(info.dtype)
    if stored is None:
        raise UnsupportedModel(
            f"{info.file}: tensor {stored_name!r} is stored as {info.dtype}, which is not a floating-point weight",
            remedy="Use the model as it was before quantisation, with weights of type F32, F16 or BF16",
        )
    count = math.prod(info.shape)
    if count == 0:
        return np.zeros(info.shape, np.float32)
    with open_within(folder, info.file) as file:
        raw = np.memmap(file, dtype=stored, mode="r", offset=info.start, shape=(count,))
    array: Float
    if info.dtype == "BF16":
        array = (raw.astype(np.uint32) << 16).view(np.float32)
    else:
        array = raw.astype(np.float32, copy=False)
    return array.view(np.ndarray).reshape(info.shape)
