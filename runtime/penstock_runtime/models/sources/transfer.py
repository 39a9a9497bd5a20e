"""Shared by the fetchers of remote models: progress, the choice of files, and errors of the models folder."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.errors import CorruptModel, SettingError, UnsupportedModel
from penstock_runtime.host.disk import translate_write_errors
from penstock_runtime.models.files import missing_weights, own_graph
from penstock_runtime.models.folder import SETTINGS_FILES, SLOW_FILES
from penstock_runtime.models.safetensors import INDEX, SINGLE


@dataclass(frozen=True)
class FetchProgress:
    """One step of a fetch."""

    source: str
    """The source URL as given, such as `hf://org/name@main`."""
    file: str
    """The file that is being fetched, or the last one."""
    bytes_done: int
    bytes_total: int
    note: str = ""
    """A readable message, such as why a cached copy is used; usually empty."""


OnProgress = Callable[[FetchProgress], None]


def ignore_progress(_: FetchProgress) -> None:
    """The callback of callers that need no progress."""


OnConfig = Callable[[Mapping[str, Any]], object]


def ignore_config(_: Mapping[str, Any]) -> None:
    """The check of callers that take any model."""


OPTION = "--models or PENSTOCK_MODELS"
"""The settings that choose the models folder, for error messages."""


@contextmanager
def translate_folder_errors(folder: Path, *, option: str = OPTION) -> Iterator[None]:
    """Raise an OSError of the block as HostError about the models folder, OutOfDisk if the disk is full."""
    with translate_write_errors(folder, what="the models folder", option=option):
        yield


MAX_BYTES_VARIABLE = "PENSTOCK_MODEL_MAX_BYTES"
DEFAULT_MAX_BYTES = 64 * 2**30
MOST_FILES = 1000
"""Files of one model: the largest published ones have some 200 shards."""


def max_model_bytes() -> int:
    """The largest download of a model, and the largest folder that a GGUF file or static embeddings are expanded to.
    SettingError for a variable that is no number."""
    text = os.environ.get(MAX_BYTES_VARIABLE) or str(DEFAULT_MAX_BYTES)
    if not re.fullmatch(r"[1-9][0-9]{0,17}", text):
        raise SettingError(f"{text[:40]!r} is not a number of bytes", field=MAX_BYTES_VARIABLE, remedy="Write digits")
    return int(text)


def check_size(origin: str, size: int, what: str = "files") -> None:
    """UnsupportedModel, before anything is written, for a model over the limit."""
    if size > (limit := max_model_bytes()):
        raise UnsupportedModel(
            f"{origin}: its {what} have {size:,} bytes; the limit is {limit:,}",
            remedy=f"Raise {MAX_BYTES_VARIABLE} (on a cluster jobs.disk of the chart, of which a model may take half), "
            "or use a smaller model",
        )


def more_than_listed(origin: str, name: str, size: int) -> CorruptModel:
    """The error for a source that sends more than the `size` bytes that it listed."""
    return CorruptModel(
        f"{origin}: {name} has more than the {size:,} bytes that were listed", remedy="Upload it again, or try later"
    )


FOLDER = re.compile(r"onnx|additional_chat_templates|[0-9]+_\w+")
"""Subfolders of a model that may hold files to fetch."""
_MODULE = re.compile(r"[0-9]+_\w+/(config\.json|model\.safetensors|tokenizer\.json)")
_STATIC = re.compile(r"[0-9]+_StaticEmbedding/model\.safetensors")
_SHARD = re.compile(r"[\w.-]+\.safetensors")


def choose_files(origin: str, names: Iterable[str], *, graph: bool) -> list[str]:
    """The names of the files to fetch, settings first: known names only.

    Weights are the safetensors files, or the model's ONNX graph if there are none; with `graph` both. `origin` names
    the model in errors: UnsafeModel, UnsupportedModel or CorruptModel if there is nothing that can be served.
    """
    names = set(names)
    settings = sorted(name for name in names if name in SETTINGS_FILES or name in SLOW_FILES or _MODULE.fullmatch(name))
    if SINGLE in names:
        tensors = [SINGLE]
    elif INDEX in names:
        tensors = [INDEX, *sorted(name for name in names if _SHARD.fullmatch(name))]
    else:
        tensors = []
    own = own_graph(names)
    if len(tensors) > MOST_FILES:
        raise UnsupportedModel(
            f"{origin} has {len(tensors)} files of weights", remedy=f"Use at most {MOST_FILES} files"
        )
    if own is None and not tensors and not any(map(_STATIC.fullmatch, settings)):
        raise missing_weights(origin, names)
    data = re.compile(re.escape(own or "") + r"[._]data[\w.]*")
    graphs = [own, *sorted(name for name in names if data.fullmatch(name))] if own is not None else []
    return [*settings, *tensors, *(graphs if graph or not tensors else [])]
