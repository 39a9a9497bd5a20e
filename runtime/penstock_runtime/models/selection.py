"""Which files of a remote model are fetched: known names only, and no weights that would not be read anyway."""

from __future__ import annotations

import re
from collections.abc import Iterable

from penstock_runtime.models import safety
from penstock_runtime.models.folder import SETTINGS_FILES
from penstock_runtime.models.tensors import INDEX, SINGLE

GRAPHS = ("model.onnx", "onnx/model.onnx")
FOLDER = re.compile(r"onnx|[0-9]+_\w+")
"""The folders of a model that may hold something to fetch."""
_MODULE = re.compile(r"[0-9]+_\w+/config\.json")
_SHARD = re.compile(r"[\w.-]+\.safetensors")


def choose_files(origin: str, names: Iterable[str], *, graph: bool) -> list[str]:
    """The names to fetch, settings first.

    Weights are the safetensors, or the model's own ONNX graph where there are none; with `graph` both. `origin` names
    the model in errors: UnsafeModel, UnsupportedModel or CorruptModel when there is nothing that could be served.
    """
    names = set(names)
    settings = sorted(name for name in names if name in SETTINGS_FILES or _MODULE.fullmatch(name))
    if SINGLE in names:
        tensors = [SINGLE]
    elif INDEX in names:
        tensors = [INDEX, *sorted(name for name in names if _SHARD.fullmatch(name))]
    else:
        tensors = []
    own = next((name for name in GRAPHS if name in names), None)
    if own is None and not tensors:
        raise safety.no_weights(origin, names)
    data = re.compile(re.escape(own or "") + r"[._]data[\w.]*")
    graphs = [own, *sorted(name for name in names if data.fullmatch(name))] if own is not None else []
    return [*settings, *tensors, *(graphs if graph or not tensors else [])]
