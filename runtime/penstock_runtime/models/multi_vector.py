"""Reads the settings and weights of models with a vector for each token (ColBERT), and of BGE-M3's heads.

Three layouts have them: the modules of PyLate and of sentence-transformers' MultiVectorEncoder, and the folders of
colbert-ai (`HF_ColBERT`), whose projection is among the weights of the encoder and whose settings are in
`artifact.metadata`.
"""

from __future__ import annotations

import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.errors import CorruptModel, UnsupportedModel
from penstock_runtime.models.files import positive_number, read_optional
from penstock_runtime.models.safetensors import TensorInfo, read_float32, read_header
from penstock_runtime.models.vector_modules import DenseModule, read_dense

COLBERT_AI = "HF_ColBERT"
"""The architecture in config.json of the folders that colbert-ai writes."""
METADATA = "artifact.metadata"
"""Their settings."""
TOKEN_HEAD = "colbert_linear.safetensors"  # noqa: S105 - not a password
"""The linear layer from token vectors to the answer's vectors: of BGE-M3, and in artefacts of colbert-ai's models."""
SPARSE_HEAD = "sparse_linear.safetensors"
"""The linear layer from a token vector to the weight of the token: of BGE-M3."""
HEAD_FILES = (METADATA, TOKEN_HEAD, SPARSE_HEAD)
PROJECTION = "linear.weight"
"""The tensor of colbert-ai's projection."""

PYLATE = "pylate"
"""The package with the modules of multi-vector models, in files of the form of sentence-transformers."""
MASK_MODULE = "MultiVectorMask"
QUERY, DOCUMENT = "query", "document"
QUERY_TOKENS = 32
DOCUMENT_TOKENS = 180
"""Defaults of PyLate."""


@dataclass(frozen=True)
class Expansion:
    """Queries are filled up with mask tokens; their vectors count like the vectors of words."""

    tokens: int
    """Length of a query with them."""
    attended: bool
    """The other tokens attend to them."""
    longest: bool
    """Longer queries are cut to it."""
    token: str | None = None
    """None: the mask token, or else the token that ends a text."""


@dataclass(frozen=True)
class MultiVector:
    """A model with a vector for each token."""

    projections: tuple[DenseModule, ...]
    """From the encoder's token vectors to the answer's."""
    normalized: bool
    """Each vector is scaled to length 1."""
    markers: Mapping[str, str]
    """What goes before queries and documents, as one token where the vocabulary has it."""
    longest: Mapping[str, int]
    """Tokens of a query or a document, special tokens included, where they are limited."""
    expansion: Expansion | None
    skipped: tuple[str, ...] = ()
    """Tokens without a vector in the answer."""
    skipped_for: tuple[str, ...] = (DOCUMENT,)

    @property
    def width(self) -> int | None:
        """Values of a vector; None: as many as the encoder's."""
        return self.projections[-1].width if self.projections else None


@dataclass(frozen=True)
class ModuleEntry:
    """An entry of modules.json."""

    kind: str
    folder: str
    package: str
    """Of its class: `sentence_transformers` or `pylate`."""


def read_multi_vector(
    path: Path,
    modules: Sequence[ModuleEntry],
    own: Mapping[str, Any],
    transformer: Mapping[str, Any],
    *,
    architecture: str,
    tensors: Mapping[str, TensorInfo],
) -> MultiVector | None:
    """The settings of a multi-vector model; None for other models.

    `own`: config_sentence_transformers.json; `transformer`: the settings of the Transformer module; `tensors`: of the
    encoder's weights, empty in an artefact. CorruptModel or UnsupportedModel name the file.
    """
    if any(module.package == PYLATE or module.kind == MASK_MODULE for module in modules):
        return _by_modules(path, modules, own, transformer)
    if architecture == COLBERT_AI and not modules:
        return _of_colbert_ai(path, tensors)
    return None


def _by_modules(
    path: Path, modules: Sequence[ModuleEntry], own: Mapping[str, Any], transformer: Mapping[str, Any]
) -> MultiVector:
    first, *rest = modules
    if first.kind != "Transformer" or first.folder:
        raise _unsupported(path, f"starts with a {first.kind}")
    native = any(module.kind == MASK_MODULE for module in rest)
    projections: list[DenseModule] = []
    normalized, mask = not native, {}
    for module in rest:
        if module.kind == "Dense":
            projections.append(read_dense(path, module.folder, of_tokens=True))
        elif module.kind == "Normalize" and module is rest[-1]:
            normalized = True
        elif module.kind == MASK_MODULE:
            mask = read_optional(path, f"{module.folder}/config.json")
        else:
            raise _unsupported(path, f"has a {module.kind} module ({module.folder or 'at the top'})")
    if mask.get("keep_only_token_ids"):
        raise _unsupported(path, "keeps the vectors of a few token ids only")
    if native:
        return _of_sentence_transformers(path, transformer, mask, tuple(projections), normalized=normalized)
    return _of_pylate(path, own, tuple(projections))


def _of_pylate(path: Path, own: Mapping[str, Any], projections: tuple[DenseModule, ...]) -> MultiVector:
    origin = path / "config_sentence_transformers.json"
    tokens = positive_number(origin, dict(own), "query_length") or QUERY_TOKENS
    skipped = own.get("skiplist_words")
    expands = own.get("do_query_expansion") is not False
    return MultiVector(
        projections=projections,
        normalized=True,
        markers={
            QUERY: _text(origin, own, "query_prefix", "[Q] "),
            DOCUMENT: _text(origin, own, "document_prefix", "[D] "),
        },
        longest={QUERY: tokens, DOCUMENT: positive_number(origin, dict(own), "document_length") or DOCUMENT_TOKENS},
        expansion=Expansion(tokens, own.get("attend_to_expansion_tokens") is True, longest=True) if expands else None,
        skipped=tuple(string.punctuation) if skipped is None else _words(origin, skipped),
    )


def _of_sentence_transformers(
    path: Path,
    transformer: Mapping[str, Any],
    mask: Mapping[str, Any],
    projections: tuple[DenseModule, ...],
    *,
    normalized: bool,
) -> MultiVector:
    """Markers are prompts there, which are read as such."""
    origin = path / "sentence_bert_config.json"
    longest = {
        name: tokens
        for name in (QUERY, DOCUMENT)
        if (tokens := positive_number(origin, dict(transformer), f"{name}_length")) is not None
    }
    stated, expansion = transformer.get("query_expansion"), None
    if isinstance(stated, Mapping):
        tokens = positive_number(origin, dict(stated), "length") or QUERY_TOKENS
        token = stated.get("token")
        fixed = stated.get("strategy") != "min"
        attended = stated.get("attend") is True
        expansion = Expansion(tokens, attended, longest=fixed, token=token if isinstance(token, str) else None)
        if fixed:
            longest[QUERY] = tokens
    tasks = mask.get("skiplist_tasks") or [DOCUMENT]
    return MultiVector(
        projections=projections,
        normalized=normalized,
        markers={},
        longest=longest,
        expansion=expansion,
        skipped=_words(path / "modules.json", mask.get("skiplist_words") or []),
        skipped_for=_words(path / "modules.json", [tasks] if isinstance(tasks, str) else tasks),
    )


def _of_colbert_ai(path: Path, tensors: Mapping[str, TensorInfo]) -> MultiVector:
    values, origin = read_optional(path, METADATA), path / METADATA
    if (path / TOKEN_HEAD).is_file():
        projection = read_head(path, TOKEN_HEAD)
    elif PROJECTION in tensors:
        projection = DenseModule(read_float32(path, tensors[PROJECTION], PROJECTION).copy(), None)
    else:
        raise CorruptModel(f"{path} has no tensor {PROJECTION!r}, the projection of ColBERT", remedy="Fetch it again")
    tokens = positive_number(origin, values, "query_maxlen") or QUERY_TOKENS
    return MultiVector(
        projections=(projection,),
        normalized=True,
        markers={
            QUERY: _text(origin, values, "query_token_id", "[unused0]"),
            DOCUMENT: _text(origin, values, "doc_token_id", "[unused1]"),
        },
        longest={QUERY: tokens, DOCUMENT: positive_number(origin, values, "doc_maxlen") or DOCUMENT_TOKENS},
        expansion=Expansion(tokens, values.get("attend_to_mask_tokens") is True, longest=True),
        skipped=tuple(string.punctuation) if values.get("mask_punctuation", True) else (),
    )


def read_head(path: Path, name: str) -> DenseModule:
    """The linear layer in the file `name` of a model folder: tensors `weight` and, mostly, `bias`."""
    tensors = read_header(path, path / name)
    weight, bias = tensors.get("weight"), tensors.get("bias")
    if weight is None or len(weight.shape) != 2 or (bias is not None and bias.shape != weight.shape[:1]):
        shapes = {key: list(tensor.shape) for key, tensor in tensors.items()}
        raise CorruptModel(
            f"{path / name} has the tensors {shapes}, not weight [out, in] and bias [out]",
            remedy="Make it again (docs/how-to/convert-a-model.md#bge-m3)",
        )
    added = None if bias is None else read_float32(path, bias, "bias")
    # A copy: arrays in a file are not aligned, and would be copied for each product.
    return DenseModule(read_float32(path, weight, "weight").copy(), added)


def _text(origin: Path, values: Mapping[str, Any], key: str, default: str) -> str:
    value = values.get(key)
    if value is None:
        return default
    if not isinstance(value, str):
        raise CorruptModel(f"{origin}: {key} is {value!r}, not a text", remedy="Fetch the model again")
    return value


def _words(origin: Path, values: Any) -> tuple[str, ...]:
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        raise CorruptModel(f"{origin}: a list of texts is {values!r}", remedy="Fetch the model again")
    return tuple(values)


def _unsupported(path: Path, what: str) -> UnsupportedModel:
    return UnsupportedModel(
        f"{path}/modules.json {what}, and is of a model with a vector for each token",
        remedy=f"Served are Transformer, Dense, {MASK_MODULE} and, at the end, Normalize",
    )
