"""Reads the identity of a model's vector space from its folder."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from penstock.tasks import TaskName
from penstock.vector_space import VectorSpace, digest_of_json
from penstock_runtime.models.folder import ModelFolder
from penstock_runtime.models.vector_modules import activation_name
from penstock_runtime.rows import AnyPooling, Float, Pooling, Poolings
from penstock_runtime.tasks.embeddings.embedding import width
from penstock_runtime.tasks.texts import PromptTexts
from penstock_runtime.tokens import Tokenizer

VECTOR_TASKS = frozenset({TaskName.FEATURE_EXTRACTION, TaskName.SENTENCE_SIMILARITY})


class _Hash(Protocol):
    def update(self, data: bytes | memoryview, /) -> None: ...


def read_space(
    folder: ModelFolder, tokenizer: Tokenizer, *, weights: str, max_tokens: int, prompts: PromptTexts
) -> VectorSpace:
    """The space of a model that gives vectors. `weights`: see `VectorSpace.weights`. Errors of the model's files as of
    the folder's properties."""
    dense = folder.multi_vector is None and folder.sparse is None
    # A plain transformers model gives pooled vectors by the mean, as sentence-transformers does with it.
    pooling = (folder.pooling or Pooling.MEAN) if dense else None
    modules = folder.vector_modules if dense and not folder.graph_has_modules else ()
    whole = hashlib.sha256()
    _feed(
        whole,
        {
            "pooling": pooling,
            "include_prompt": dense and folder.include_prompt,
            "modules": modules,
            "multi_vector": folder.multi_vector,
            "sparse": folder.sparse,
            "heads": folder.heads,
            "adapter": folder.adapter,
        },
    )
    return VectorSpace(
        weights=weights,
        tokenizer=tokenizer_digest(tokenizer),
        modules=whole.hexdigest(),
        pooling=_pooling_words(pooling),
        kind=_kind(folder),
        normalised=folder.multi_vector.normalized if folder.multi_vector is not None else dense and folder.normalize,
        dimensions=folder.dimensions or _width(folder, pooling),
        max_tokens=max_tokens,
        truncate_side=str(tokenizer.side),
        prompts=dict(prompts.texts),
        default_prompt=prompts.default,
    )


def tokenizer_digest(tokenizer: Tokenizer) -> str:
    """sha256 of a tokenizer as it is used. Settings that are off count as absent, and merges are written in one way, so
    that a newer version of the tokenizers library gives the same."""
    backend: dict[str, Any] = json.loads(tokenizer.backend.to_str())
    for name in ("version", "truncation", "padding"):
        backend.pop(name, None)
    model = backend["model"]
    if model.get("merges"):
        model["merges"] = [one.split(" ") if isinstance(one, str) else one for one in model["merges"]]
    return digest_of_json({"backend": _without_defaults(backend), "pads_left": tokenizer.pads_left})


def tensors_digest(tensors: Mapping[str, Float]) -> str:
    """sha256 of float32 arrays by name, independent of their order."""
    whole = hashlib.sha256()
    _feed(whole, tensors)
    return whole.hexdigest()


def files_digest(paths: Mapping[str, Path]) -> str:
    """sha256 of the contents of files by name: of a graph that is the model's own."""
    contents = {}
    for name, path in paths.items():
        with path.open("rb") as file:
            contents[name] = hashlib.file_digest(file, "sha256").hexdigest()
    return digest_of_json(contents)


def _without_defaults(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_defaults(one) for key, one in value.items() if one is not None and one is not False}
    return [_without_defaults(one) for one in value] if isinstance(value, list) else value


def _feed(whole: _Hash, value: Any) -> None:
    """Hash a value of plain values, arrays, enumerations, activations and dataclasses of them, each with its type and
    length, so that different values never give the same bytes."""
    if isinstance(value, np.ndarray):
        array = np.ascontiguousarray(value, np.float32)
        whole.update(f"array{array.shape}".encode())
        if array.size:
            whole.update(array.data.cast("B"))
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        whole.update(type(value).__name__.encode())
        _feed(whole, {field.name: getattr(value, field.name) for field in dataclasses.fields(value)})
    elif isinstance(value, Mapping):
        whole.update(f"map{len(value)}".encode())
        for key in sorted(value):
            _feed(whole, key)
            _feed(whole, value[key])
    elif isinstance(value, tuple | list):
        whole.update(f"list{len(value)}".encode())
        for one in value:
            _feed(whole, one)
    elif callable(value):
        _feed(whole, activation_name(value))
    else:
        text = str(value.value if isinstance(value, Enum) else value).encode()
        whole.update(f"{type(value).__name__}{len(text)}:".encode() + text)


def _width(folder: ModelFolder, pooling: AnyPooling | None) -> int | None:
    """Values of a vector after all modules; None: of a sparse vector, or not known."""
    hidden = width(folder.config)
    if folder.multi_vector is not None:
        return folder.multi_vector.width or hidden
    if pooling is None or hidden is None:
        return None
    return folder.final_width or hidden * (len(pooling.kinds) if isinstance(pooling, Poolings) else 1)


def _pooling_words(pooling: AnyPooling | None) -> str:
    if pooling is None:
        return ""
    return "+".join(map(str, pooling.kinds)) if isinstance(pooling, Poolings) else str(pooling)


def _kind(folder: ModelFolder) -> str:
    if folder.heads:
        return "dense, sparse, multi_vector"
    if folder.multi_vector is not None:
        return "multi_vector"
    if folder.sparse is not None:
        return "sparse"
    return "dense"
