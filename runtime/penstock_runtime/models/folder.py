"""Reads and checks a model folder: configuration, labels, limits, pooling, weights and tokenizer files.

Read-only: nothing is loaded into an engine, no code of the model runs, no pickle is opened.
`penstock_runtime.models.sources` fetches the folders.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from penstock.errors import CorruptModel, ModelAccessDenied, ModelNotFound, UnsupportedModel
from penstock_runtime.models.files import (
    GRAPHS,
    check_code,
    check_links,
    missing_weights,
    open_within,
    own_graph,
    read_object,
    read_optional,
    read_text,
    remote_code_classes,
)
from penstock_runtime.models.gliner import (
    HEAD_FILE,
    SETTINGS_FILE,
    GlinerHead,
    configuration,
    head_tensors,
    read_gliner,
)
from penstock_runtime.models.graph import check_data, check_graph, graph_data
from penstock_runtime.models.limits import LONGEST_ROW, position_limit, tokenizer_limit
from penstock_runtime.models.multi_vector import (
    COLBERT_AI,
    HEAD_FILES,
    SPARSE_HEAD,
    TOKEN_HEAD,
    MultiVector,
    read_head,
)
from penstock_runtime.models.safetensors import INDEX, SINGLE, TensorInfo, check_shards, shard_files, written
from penstock_runtime.models.sentence import ADAPTERS, LIMIT_FILES, SETTINGS, SentenceModules, SparsePooling
from penstock_runtime.models.vector_modules import DenseModule, VectorModule
from penstock_runtime.rows import AnyPooling

LONGEST_WITHOUT_A_LIMIT = 512
"""Tokens; for models with relative positions and no stated limit: the usual training length of such encoders."""

MOST_LABELS = 1_000_000
"""More than any head has; keeps a damaged count from filling the memory."""

TOKENIZER = "tokenizer.json"
TOKENIZER_FILES = (
    TOKENIZER,
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
)
SLOW_TEXT_FILES = ("vocab.txt", "vocab.json", "merges.txt")
SLOW_FILES = (*SLOW_TEXT_FILES, "sentencepiece.bpe.model", "spiece.model", "spm.model", "tokenizer.model")
"""Files of tokenizers without a tokenizer.json, which is then made of them (`tokens.convert`). Artefacts have that
instead."""
TEMPLATE_FILE, TOOL_TEMPLATE_FILE = "chat_template.jinja", "additional_chat_templates/tool_use.jinja"
GENERATION_FILES = ("generation_config.json", TEMPLATE_FILE, TOOL_TEMPLATE_FILE)
"""Defaults of requests, and the form of conversations, of models that generate text."""
MODEL_FILES = ("config.json", "modules.json", SETTINGS, *GENERATION_FILES, *HEAD_FILES, SETTINGS_FILE, HEAD_FILE)
"""Together with the tokenizer's files, the weights and the modules' `config.json`, all files that affect an answer."""
SETTINGS_FILES = frozenset({*MODEL_FILES, *TOKENIZER_FILES, *LIMIT_FILES})
"""The files at the top of a folder that are read if present. `modules.json` names the folders of the modules."""


@dataclass(frozen=True)
class ModelFolder:
    """The checked contents of a model folder. Create it with `open`."""

    path: Path
    config: Mapping[str, Any]
    """`config.json`."""

    @classmethod
    def open(cls, path: Path, *, weights: bool = True) -> ModelFolder:
        """Read and check a folder; each error names the file.

        `weights` False is for an artefact, which has its graphs elsewhere: only settings are read and required.

        ModelNotFound if there is no such folder. UnsafeModel for pickled weights only, remote code, or links out of
        the folder. CorruptModel for missing, truncated or contradictory files. UnsupportedModel for other contents,
        such as an adapter. ModelAccessDenied for files that this process may not read.
        """
        try:
            return cls._open(path, weights=weights)
        except PermissionError as error:
            raise ModelAccessDenied(
                f"{error.filename or path} may not be read by this process (user {os.getuid()})",
                remedy="Give it read access to the whole folder",
            ) from error
        except OSError as error:
            raise CorruptModel(
                f"{error.filename or path}: {error.strerror}", remedy="Check the volume that holds the model"
            ) from error

    @classmethod
    def _open(cls, path: Path, *, weights: bool) -> ModelFolder:
        if not path.is_dir():
            kind = "a file, not a folder" if path.exists() else "not there"
            raise ModelNotFound(f"{path} is {kind}", remedy="Give the folder that holds the model's config.json")
        folder = cls(path=path, config=_read_config(path))
        check_links(path)
        if weights:
            folder._check_weights()
            for name in SLOW_TEXT_FILES:
                if (path / name).is_file():
                    read_text(path, path / name)
        for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"):
            read_optional(path, name)
        _ = folder.labels, folder.max_tokens, folder._sentence
        return folder

    def _check_weights(self) -> None:
        check_code(self.path, self.config, has_graph=self.onnx is not None)
        if self.onnx is None and not self.safetensors:
            raise missing_weights(self.path, _names(self.path) + _names(self.path / "onnx", "onnx/"))
        if self.onnx is not None:
            check_graph(self.path, self.onnx)
            _ = graph_data(self.path, self.onnx)
            if not self.safetensors:  # otherwise the graph may not be used at all
                check_data(self.path, self.onnx)
        _ = self.tensors

    @cached_property
    def model_type(self) -> str:
        """Such as `bert`; empty if config.json has none."""
        return _text(self.config.get("model_type"))

    @cached_property
    def architecture(self) -> str:
        """First entry of `architectures`, such as `BertForSequenceClassification`; empty if there is none."""
        architectures = self.config.get("architectures")
        return _text(architectures[0]) if isinstance(architectures, list) and architectures else ""

    @cached_property
    def label_values(self) -> tuple[str | float | None, ...]:
        """`id2label` in order of ids, numbers and null as they are; else `LABEL_0`, ... up to `num_labels` (two)."""
        return _labels(self.path, self.config)

    @cached_property
    def labels(self) -> tuple[str, ...]:
        """`label_values` as texts."""
        return tuple(map(str, self.label_values))

    @property
    def num_labels(self) -> int:
        """Number of labels of a classification head."""
        return len(self.labels)

    @property
    def problem_type(self) -> str | None:
        """`regression`, `single_label_classification` or `multi_label_classification`, if config.json has it."""
        return _text(self.config.get("problem_type")) or None

    @cached_property
    def max_tokens(self) -> int:
        """The longest sequence in tokens, special tokens included.

        The smaller of the position table's size (less its offset) and sentence-transformers' `max_seq_length`, or
        without the latter the tokenizer's `model_max_length` (the order of sentence-transformers); at most
        `LONGEST_ROW`.
        """
        table = position_limit(self.path, self.config)
        own = self._sentence.max_tokens or tokenizer_limit(self.path)
        known = [limit for limit in (table, own) if limit is not None]
        return min(LONGEST_ROW, min(known, default=LONGEST_WITHOUT_A_LIMIT))

    @cached_property
    def pooling(self) -> AnyPooling | None:
        """The pooling of sentence-transformers' modules; None if the folder is a plain transformers model, or one with
        a vector for each token.

        UnsupportedModel names a module or a pooling that is not supported.
        """
        return None if self.multi_vector is not None else self._sentence.pooling()

    @cached_property
    def multi_vector(self) -> MultiVector | None:
        """The settings of a model with a vector for each token (ColBERT); None for other models."""
        return self._sentence.multi_vector(self.architecture, self.tensors)

    @cached_property
    def heads(self) -> dict[str, DenseModule]:
        """The linear layers of BGE-M3 by their file names, `TOKEN_HEAD` and `SPARSE_HEAD`; empty for other models."""
        if self.multi_vector is not None:
            return {}
        return {name: read_head(self.path, name) for name in (TOKEN_HEAD, SPARSE_HEAD) if (self.path / name).is_file()}

    @property
    def artefact_files(self) -> dict[str, bytes]:
        """Files that an artefact needs instead of weights: of colbert-ai's projection, and of GLiNER's head."""
        if self.gliner is not None:
            return {HEAD_FILE: written(head_tensors(self.path, self.tensors))}
        if self.architecture == COLBERT_AI and self.multi_vector is not None:
            return {TOKEN_HEAD: written({"weight": self.multi_vector.projections[0].weight})}
        return {}

    @cached_property
    def gliner(self) -> GlinerHead | None:
        """The head of a GLiNER model; None for other models."""
        return read_gliner(self.path, self.config, self.tensors)

    @cached_property
    def normalize(self) -> bool:
        """True if sentence-transformers' modules end with Normalize. UnsupportedModel as `pooling`."""
        return self._sentence.normalize()

    @cached_property
    def include_prompt(self) -> bool:
        """False if the tokens of a prompt do not count in the pooling. UnsupportedModel as `pooling`."""
        return self._sentence.include_prompt()

    @cached_property
    def sparse(self) -> SparsePooling | None:
        """The pooling of a SPLADE model by sentence-transformers' modules; None: its vectors are dense.

        UnsupportedModel for other modules next to it.
        """
        return self._sentence.sparse()

    @cached_property
    def vector_modules(self) -> tuple[VectorModule, ...]:
        """The modules between the pooling and a Normalize at the end, such as Dense. Errors name the file."""
        return self._sentence.vector_modules()

    @property
    def adapter(self) -> str | None:
        """The adapter of jina-embeddings-v3 that is applied; None: none of them, or the model has none."""
        return self._sentence.default_task if ADAPTERS in self.config else None

    @property
    def missing_module_weights(self) -> str | None:
        """The first file with weights of a module that the folder lacks, relative to it; None if it has all."""
        return self._sentence.missing_weights()

    @property
    def final_width(self) -> int | None:
        """Values of a vector after the modules, by their configurations; None: as many as the pooling gives."""
        return self._sentence.final_width()

    @property
    def graph_has_modules(self) -> bool:
        """True if only the model's own ONNX graph can hold the modules after the pooling: the folder lacks weights."""
        return not self.safetensors and self.onnx is not None and self.missing_module_weights is not None

    @property
    def lower_case(self) -> bool:
        """True if sentence-transformers converts texts to lower case before tokenising."""
        return self._sentence.lower_case

    @property
    def prompts(self) -> Mapping[str, str]:
        """Named prefixes from `config_sentence_transformers.json`, such as `{"query": "query: "}`."""
        return self._sentence.prompts

    @property
    def default_prompt(self) -> str:
        """The prefix that sentence-transformers puts before every text by default; usually empty."""
        return self._sentence.default_prompt

    @property
    def dimensions(self) -> int | None:
        """The number of leading values of a vector that are kept after all modules (`truncate_dim`); None: all."""
        return self._sentence.dimensions

    @property
    def activation(self) -> str | None:
        """The activation of a CrossEncoder of sentence-transformers, such as `torch.nn.modules.linear.Identity`.

        From the settings of current versions, or else from the two fields of config.json of older versions. As in
        sentence-transformers, names outside of torch are ignored. None without a name: the default is then the sigmoid
        (one label).
        """
        own = self.config.get("sentence_transformers")
        older = {"activation_fn": self.config.get("sbert_ce_default_activation_function")}
        by_config = (older | own if isinstance(own, dict) else older)["activation_fn"]
        names = (_text(name) for name in (self._sentence.activation, by_config))
        return next((name for name in names if name.startswith("torch.")), None)

    @property
    def ranks_by_words(self) -> bool:
        """True for a language model that may rank texts by its next word, yes or no (Qwen3-Reranker)."""
        return self.architecture == "Qwen3ForCausalLM"

    @property
    def ranking_answers(self) -> tuple[object, object] | None:
        """The ids of the tokens for yes and no by sentence-transformers' module LogitScore; None without it."""
        return self._sentence.answers()

    @cached_property
    def safetensors(self) -> tuple[Path, ...]:
        """Weight files in shard order; empty if there are none, or if they need the model's own code."""
        return () if remote_code_classes(self.config) else shard_files(self.path)

    @cached_property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """All tensors of the safetensors files by name: dtype, shape, file. Reads headers only, no weights."""
        return check_shards(self.path, self.safetensors)

    @cached_property
    def onnx(self) -> Path | None:
        """The model's ONNX graph: `model.onnx`, `onnx/model.onnx`, or without safetensors the only one of any name.

        Next to safetensors another name mostly means a variant, such as a quantised one.
        """
        names = _names(self.path) + _names(self.path / "onnx", "onnx/")
        name = own_graph(names if not self.safetensors else set(names).intersection(GRAPHS))
        return None if name is None else self.path / name

    @cached_property
    def tokenizer(self) -> Path:
        """`tokenizer.json`, or else the first of the files that it can be made of; CorruptModel if there is none."""
        for name in (TOKENIZER, *SLOW_FILES):
            if (self.path / name).is_file():
                return self.path / name
        raise CorruptModel(
            f"{self.path} has no tokenizer: neither {TOKENIZER} nor any of {', '.join(SLOW_FILES)}",
            remedy="Fetch the model again, or add the tokenizer of the model that it was trained from",
        )

    @cached_property
    def settings(self) -> tuple[Path, ...]:
        """Configuration, tokenizer and modules: the files that an artefact holds besides its graphs."""
        chosen = [self.path / name for name in (*MODEL_FILES, *TOKENIZER_FILES)]
        return self._sorted([*chosen, *self._sentence.files])

    @cached_property
    def files(self) -> tuple[Path, ...]:
        """All files that affect an answer: settings and weights, sorted by relative name."""
        weights = [*self.safetensors]
        if not (self.path / TOKENIZER).is_file():
            weights += [self.path / name for name in SLOW_FILES]
        if self.safetensors and self.safetensors[0].name != SINGLE:
            weights.append(self.path / INDEX)
        if self.onnx is not None:
            weights += [self.onnx, *graph_data(self.path, self.onnx)]
        return self._sorted([*self.settings, *weights])

    def _sorted(self, paths: Iterable[Path]) -> tuple[Path, ...]:
        present = {path for path in paths if path.is_file()}
        return tuple(sorted(present, key=lambda path: path.relative_to(self.path).as_posix()))

    def digest(self) -> str:
        """sha256 (hexadecimal) over relative names and contents of `files`; independent of the folder's path."""
        whole = hashlib.sha256()
        for path in self.files:
            with open_within(self.path, path) as file:
                content = hashlib.file_digest(file, "sha256").hexdigest()
            whole.update(f"{path.relative_to(self.path).as_posix()}\0{content}\n".encode())
        return whole.hexdigest()

    @cached_property
    def _sentence(self) -> SentenceModules:
        return SentenceModules.read(self.path)


def _read_config(path: Path) -> dict[str, Any]:
    if (path / SETTINGS_FILE).is_file():
        return configuration(path)
    if (path / "config.json").is_file():
        return read_object(path, "config.json")
    nested = sorted(child.parent.name for child in path.glob("*/config.json") if shard_files(child.parent))
    if nested and (path / "modules.json").is_file():
        raise UnsupportedModel(
            f"{path} keeps its transformer in the folder {nested[0]}, as old sentence-transformers did",
            remedy="Load and save it once with sentence-transformers 5, which puts it at the top "
            "(docs/how-to/convert-a-model.md#safetensors)",
        )
    if (path / "adapter_config.json").is_file():
        raise missing_weights(path, _names(path))
    hint = f"; did you mean its folder {nested[0]}?" if nested else ""
    raise CorruptModel(
        f"{path} has no config.json{hint}", remedy="Give a folder as transformers' save_pretrained writes it"
    )


def _labels(path: Path, config: Mapping[str, Any]) -> tuple[str | float | None, ...]:
    table = config.get("id2label")
    if table is None:
        count = config.get("num_labels", 2)
        if not isinstance(count, int) or isinstance(count, bool) or not 1 <= count <= MOST_LABELS:
            raise CorruptModel(
                f"{path}/config.json: num_labels is {count!r}", remedy=f"Make it a number from 1 to {MOST_LABELS}"
            )
        return tuple(f"LABEL_{index}" for index in range(count))
    try:
        names = {
            int(index): name if name is None or isinstance(name, int | float) else str(name)
            for index, name in table.items()
        }
    except (AttributeError, TypeError, ValueError):
        names = {}
    if not names or sorted(names) != list(range(len(table))):
        raise CorruptModel(
            f"{path}/config.json: id2label does not number its labels 0, 1, 2, ...",
            remedy="Give every output of the head one label",
        )
    return tuple(names[index] for index in range(len(names)))


def _names(path: Path, prefix: str = "") -> list[str]:
    return [prefix + child.name for child in path.iterdir() if child.is_file()] if path.is_dir() else []


def _text(value: object) -> str:
    return value if isinstance(value, str) else ""
