"""Makes a model folder of static embeddings, which are a table with a vector for each token: Model2Vec, and
sentence-transformers' StaticEmbedding.

The vector of a text is the mean of its tokens' vectors. The folder has the table in float32 under one name, the
tokenizer without special tokens, and the modules with a Transformer in place of the table; it is written once into the
cache, under a digest of the files.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.errors import CorruptModel
from penstock_runtime.models.files import (
    copy_within,
    positive_number,
    read_list,
    read_object,
    read_optional,
    write_once,
)
from penstock_runtime.models.limits import LONGEST_ROW
from penstock_runtime.models.safetensors import SINGLE, TensorInfo, read_array, read_header, write_pieces
from penstock_runtime.models.sentence import SETTINGS
from penstock_runtime.rows import Float

MODEL_TYPE = "static"
TABLE = "embeddings"
IGNORED_TOKEN = "ignored_token"  # noqa: S105 - not a password
"""The field of config.json with the token that does not count in the mean."""
MODEL2VEC, MODULE = "model2vec", "StaticEmbedding"
MODEL2VEC_TOKENS = 512
"""Longest text of Model2Vec without `max_length`; sentence-transformers has no limit."""
PIECE_BYTES = 16 * 2**20
TOKENIZER = "tokenizer.json"


def is_static(path: Path) -> bool:
    """True for a folder of static embeddings. CorruptModel for settings that cannot be read."""
    if not path.is_dir():
        return False
    modules = read_list(path, "modules.json")
    is_module = bool(modules) and str(modules[0].get("type")).endswith(f".{MODULE}")
    return is_module or read_optional(path, "config.json").get("model_type") == MODEL2VEC


def unpack(path: Path, cache: Path, check_size: Callable[[int], None] = lambda _: None) -> Path:
    """The folder of the model, written now or before. CorruptModel names what is missing or does not fit.

    `check_size` is called with the bytes of the table before it is written, and raises if they are too many: with a
    mapping, a file of a few bytes for each token has a table of a whole vector for each.
    """
    source = _Source.read(path)
    target = cache / MODEL_TYPE / source.digest()[:32]
    if target.is_dir():
        return target
    table = source.table()
    check_size(4 * table.rows * table.width)
    return write_once(target, partial(source.write, table=table))


@dataclass(frozen=True, eq=False)
class _Table:
    """The vectors of all tokens, as they are stored."""

    vectors: NDArray[Any]
    mapping: NDArray[Any] | None
    """The row of `vectors` of each token."""
    weights: NDArray[Any] | None
    """Of each token."""

    @property
    def rows(self) -> int:
        """The number of tokens."""
        return len(self.vectors if self.mapping is None else self.mapping)

    @property
    def width(self) -> int:
        """The numbers of a vector."""
        return int(self.vectors.shape[1])

    def pieces(self) -> Iterator[Float]:
        """In float32, some megabytes at a time."""
        step = max(1, PIECE_BYTES // (4 * self.width or 1))
        for start in range(0, self.rows, step):
            some = slice(start, start + step)
            piece = self.vectors[some if self.mapping is None else self.mapping[some]].astype(np.float32)
            yield piece if self.weights is None else piece * self.weights[some].astype(np.float32)[:, None]


@dataclass(frozen=True)
class _Source:
    """The files of a folder as its authors wrote it."""

    path: Path
    config: Mapping[str, Any]
    """Of Model2Vec; empty for sentence-transformers."""
    modules: list[dict[str, Any]]
    folder: str
    """With table and tokenizer; empty: the top."""

    @classmethod
    def read(cls, path: Path) -> _Source:
        modules = read_list(path, "modules.json")
        config = read_optional(path, "config.json")
        named = str(modules[0].get("path") or "") if modules else ""
        for folder in dict.fromkeys((named, "", f"0_{MODULE}")):
            if all((path / folder / name).is_file() for name in (SINGLE, TOKENIZER)):
                is_own = config.get("model_type") == MODEL2VEC
                return cls(path, config if is_own else {}, modules, "" if folder == "." else folder)
        raise CorruptModel(
            f"{path} has static embeddings, and no folder with both {SINGLE} and {TOKENIZER}",
            remedy="Fetch the model again, or save it again with model2vec or sentence-transformers 5",
        )

    @property
    def _files(self) -> list[str]:
        names = [f"{self.folder}/{name}".lstrip("/") for name in (SINGLE, TOKENIZER)]
        later = [f"{module.get('path')}/{name}" for module in self.modules[1:] for name in ("config.json", SINGLE)]
        return sorted(name for name in {*names, *later, "modules.json", "config.json", SETTINGS} if self._has(name))

    def _has(self, name: str) -> bool:
        return (self.path / name).is_file()

    def digest(self) -> str:
        """Over names and contents."""
        whole = hashlib.sha256()
        for name in self._files:
            with (self.path / name).open("rb") as file:
                whole.update(f"{name}\0{hashlib.file_digest(file, 'sha256').hexdigest()}\n".encode())
        return whole.hexdigest()

    def write(self, draft: Path, table: _Table) -> None:
        """Write the folder."""
        tokenizer = read_object(self.path, f"{self.folder}/{TOKENIZER}".lstrip("/"))
        unknown = _unknown_token(tokenizer) if self.config else None
        limit = LONGEST_ROW
        if self.config:
            stated = positive_number(self.path / "config.json", dict(self.config), "max_length")
            limit = MODEL2VEC_TOKENS if stated is None and "max_length" not in self.config else stated or LONGEST_ROW
        config = {"model_type": MODEL_TYPE, "architectures": ["StaticModel"], "hidden_size": table.width}
        contents: dict[str, Any] = {
            "config.json": {**config, "vocab_size": table.rows, IGNORED_TOKEN: unknown},
            # The mean has no special tokens.
            TOKENIZER: {**tokenizer, "post_processor": None, "truncation": None, "padding": None},
            "tokenizer_config.json": {"tokenizer_class": "PreTrainedTokenizerFast"},
            "sentence_bert_config.json": {"max_seq_length": min(limit, LONGEST_ROW)},
            "modules.json": self._modules(),
            "1_Pooling/config.json": {"word_embedding_dimension": table.width, "pooling_mode_mean_tokens": True},
        }
        (draft / "1_Pooling").mkdir()
        for name, content in contents.items():
            (draft / name).write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")
        write_pieces(draft / SINGLE, {TABLE: ((table.rows, table.width), table.pieces)})
        for name in self._files:
            if name == SETTINGS or ("/" in name and not name.startswith(f"{self.folder or ' '}/")):
                (draft / name).parent.mkdir(exist_ok=True)
                copy_within(self.path, self.path / name, draft / name)

    def _modules(self) -> list[dict[str, Any]]:
        prefix = "sentence_transformers.models"
        later = self.modules[1:]
        if not self.modules and self.config.get("normalize"):
            later = [{"path": "2_Normalize", "type": f"{prefix}.Normalize"}]
        first = [{"path": "", "type": f"{prefix}.Transformer"}, {"path": "1_Pooling", "type": f"{prefix}.Pooling"}]
        return [{**module, "idx": index, "name": str(index)} for index, module in enumerate([*first, *later])]

    def table(self) -> _Table:
        """The vector of each token, with its weight where the model has one."""
        file = self.path / self.folder / SINGLE
        tensors = read_header(self.path, file)

        def take(*names: str) -> NDArray[Any] | None:
            info: TensorInfo | None = next((tensors[name] for name in names if name in tensors), None)
            return None if info is None else read_array(self.path, info, names[0])

        vectors, mapping, weights = take(TABLE, "embedding.weight"), take("mapping"), take("weights")
        if vectors is None or vectors.ndim != 2 or not vectors.size:
            raise CorruptModel(f"{file} has no tensor {TABLE} [tokens, width]", remedy="Fetch the model again")
        if mapping is not None and (
            mapping.ndim != 1
            or mapping.dtype.kind not in "iu"
            or not mapping.size
            or not 0 <= mapping.min() <= mapping.max() < len(vectors)
        ):
            raise CorruptModel(f"{file}: mapping names rows that are not there", remedy="Fetch the model again")
        table = _Table(vectors, mapping, weights)
        if weights is not None and weights.shape != (table.rows,):
            raise CorruptModel(
                f"{file}: {list(weights.shape)} weights for {table.rows} tokens", remedy="Fetch the model again"
            )
        return table


def _unknown_token(tokenizer: Mapping[str, Any]) -> int | None:
    """The id of the unknown token, which Model2Vec leaves out of the mean; None without one."""
    model = tokenizer.get("model") or {}
    if isinstance(model.get("unk_id"), int):  # unigrams
        return int(model["unk_id"])
    token, vocabulary = model.get("unk_token"), model.get("vocab")
    found = vocabulary.get(token) if isinstance(vocabulary, dict) and isinstance(token, str) else None
    return found if isinstance(found, int) else None
