"""The modules of sentence-transformers after the pooling, from a vector to a vector: Dense, LayerNorm, Normalize.

As sentence-transformers computes them, in numpy: each vector by itself, so that an answer does not depend on the other
texts of a request.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol

import numpy as np

from penstock.errors import CorruptModel, UnsafeModel, UnsupportedModel
from penstock_runtime.models.files import PICKLED, positive_number, read_object
from penstock_runtime.models.safetensors import SINGLE, TensorInfo, read_float32, read_header
from penstock_runtime.rows import Float

_EPSILON = 1e-5
"""Of torch's LayerNorm by default, which the module uses."""
_erf = np.vectorize(math.erf, otypes=[np.float32])


def _sigmoid(x: Float) -> Float:
    result: Float = np.reciprocal(1 + np.exp(-x))
    return result


_ACTIVATIONS: Mapping[str, Callable[[Float], Float]] = {
    "Identity": lambda x: x,
    "Tanh": np.tanh,
    "ReLU": lambda x: np.maximum(x, 0),
    "Sigmoid": _sigmoid,
    "SiLU": lambda x: x * _sigmoid(x),
    "GELU": lambda x: x * (1 + _erf(x / np.float32(math.sqrt(2)))) / 2,
}
"""By the name of torch's class."""


def activation_name(activation: Callable[[Float], Float]) -> str:
    """The name of torch's class for the activation of a DenseModule."""
    return next(name for name, known in _ACTIVATIONS.items() if known is activation)


class VectorModule(Protocol):
    """One of the modules."""

    @property
    def kind(self) -> str:
        """The name of its class in sentence-transformers."""
        ...

    @property
    def width(self) -> int | None:
        """Values of its vectors; None: as many as it is given."""
        ...

    def __call__(self, vector: Float) -> Float:
        """[values] to [width]."""
        ...


@dataclass(frozen=True, eq=False)
class DenseModule:
    """A linear layer and its activation."""

    weight: Float
    """[out, in]"""
    bias: Float | None
    activation: Callable[[Float], Float] = _ACTIVATIONS["Identity"]
    residual: Float | None = None
    """[out, in]: the product with the input is added to the output (`use_residual`)."""
    kind: ClassVar[str] = "Dense"

    @property
    def width(self) -> int:
        """See `VectorModule`."""
        return int(self.weight.shape[0])

    def __call__(self, vector: Float) -> Float:
        """See `VectorModule`."""
        product = self.weight @ vector
        result = self.activation(product if self.bias is None else product + self.bias)
        return result if self.residual is None else result + self.residual @ vector

    def of_tokens(self, vectors: Float) -> Float:
        """[tokens, values] to [tokens, width]."""
        product = vectors @ self.weight.T
        result = self.activation(product if self.bias is None else product + self.bias)
        return result if self.residual is None else result + vectors @ self.residual.T


@dataclass(frozen=True, eq=False)
class LayerNormModule:
    """Layer normalisation."""

    weight: Float
    bias: Float
    kind: ClassVar[str] = "LayerNorm"

    @property
    def width(self) -> int:
        """See `VectorModule`."""
        return int(self.weight.shape[0])

    def __call__(self, vector: Float) -> Float:
        """See `VectorModule`."""
        centred = vector - vector.mean()
        scale = 1 / math.sqrt(float(np.square(centred).mean()) + _EPSILON)
        result: Float = centred * np.float32(scale) * self.weight + self.bias
        return result


@dataclass(frozen=True, eq=False)
class NormalizeModule:
    """To length 1; a zero vector stays as it is."""

    kind: ClassVar[str] = "Normalize"
    width: None = None

    def __call__(self, vector: Float) -> Float:
        """See `VectorModule`."""
        return vector / max(float(np.linalg.norm(vector)), 1e-12)


def weights_file(path: Path, folder: str) -> Path:
    """The file with the weights of a module in `folder` of the model at `path`. An error if there is none."""
    file = path / folder / SINGLE
    if file.is_file():
        return file
    names = [child.name for child in (path / folder).iterdir()] if (path / folder).is_dir() else []
    pickled = next((name for name in sorted(names) if name.endswith(PICKLED)), None)
    if pickled is not None:
        raise UnsafeModel(
            f"{path} holds {folder}/{pickled}, which is a pickle and can run code when loaded",
            remedy="Load and save the model once with sentence-transformers where you trust it, which writes "
            f"{folder}/{SINGLE}",
        )
    raise CorruptModel(f"{path} has no {folder}/{SINGLE}, the weights of a module", remedy="Fetch the model again")


def read_module(path: Path, kind: str, folder: str) -> VectorModule:
    """A Dense or LayerNorm module in `folder` of the model at `path`. Errors as `read_dense`."""
    if kind == "Dense":
        return read_dense(path, folder)
    module = _Module.read(path, folder)
    width = _number(module.origin, module.values, "dimension")
    return LayerNormModule(module.take("norm.weight", width), module.take("norm.bias", width))


def read_dense(path: Path, folder: str, *, of_tokens: bool = False) -> DenseModule:
    """A Dense module in `folder` of the model at `path`; `of_tokens`: of a model with a vector for each token.

    CorruptModel if a file is missing or contradicts the other; UnsupportedModel for another input than the pooled
    vector, or than the tokens' vectors, or an unknown activation; UnsafeModel for pickled weights.
    """
    module = _Module.read(path, folder)
    origin, values = module.origin, module.values
    read = "token_embeddings" if of_tokens else "sentence_embedding"
    for key in ("module_input_name", "module_output_name"):
        if values.get(key, read) not in {read, None}:
            what = "the vectors of tokens" if of_tokens else "the pooled vector"
            raise UnsupportedModel(
                f"{origin}: {key} is {values[key]!r}, and only {what} ({read}) is served",
                remedy="Use a model whose Dense modules are all of tokens"
                if of_tokens
                else "Use a model whose Dense modules follow the pooling",
            )
    before, after = _number(origin, values, "in_features"), _number(origin, values, "out_features")
    weight, residual = module.take("linear.weight", after, before), None  # its size is checked before others are made
    if values.get("use_residual") is True:
        residual = np.eye(after, dtype=np.float32) if before == after else module.take("residual.weight", after, before)
    bias = module.take("linear.bias", after) if values.get("bias", True) else None
    plain = of_tokens and values.get("activation_function") is None
    activation = _ACTIVATIONS["Identity"] if plain else _activation(origin, values)
    return DenseModule(weight, bias, activation, residual)


@dataclass(frozen=True)
class _Module:
    """The files of a module."""

    path: Path
    file: Path
    origin: Path
    values: dict[str, Any]
    tensors: Mapping[str, TensorInfo]

    @classmethod
    def read(cls, path: Path, folder: str) -> _Module:
        if not (path / folder / "config.json").is_file():
            raise CorruptModel(f"{path} lacks {folder}/config.json", remedy="Fetch the model again")
        values = read_object(path, f"{folder}/config.json")
        file = weights_file(path, folder)
        return cls(path, file, path / folder / "config.json", values, read_header(path, file))

    def take(self, name: str, *shape: int) -> Float:
        info = self.tensors.get(name)
        if info is None or info.shape != shape:
            found = "no such tensor" if info is None else f"shape {list(info.shape)}"
            raise CorruptModel(
                f"{self.file}: {name} should have shape {list(shape)} by {self.origin.name} next to it; it has {found}",
                remedy="Take both files from the same revision of the model",
            )
        # A copy: arrays in a file are not aligned, and would be copied for each product.
        return read_float32(self.path, info, name).copy()


def _number(origin: Path, values: dict[str, Any], key: str) -> int:
    number = positive_number(origin, values, key)
    if number is None:
        raise CorruptModel(f"{origin} has no {key}", remedy="Fetch the model again")
    return number


def _activation(origin: Path, values: Mapping[str, Any]) -> Callable[[Float], Float]:
    """As sentence-transformers: Tanh without a name, and for names of classes outside of torch."""
    stated = values.get("activation_function")
    if not isinstance(stated, str) or not stated.startswith("torch."):
        return _ACTIVATIONS["Tanh"]
    name = stated.rpartition(".")[2]
    if name not in _ACTIVATIONS:
        raise UnsupportedModel(
            f"{origin}: activation_function is {stated}",
            remedy=f"Served are {', '.join(_ACTIVATIONS)}; use a model with one of them",
        )
    return _ACTIVATIONS[name]
