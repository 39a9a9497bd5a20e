"""What a model folder may not do: bring pickles, bring code, or reach outside itself."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from penstock.errors import CorruptModel, UnsafeModel, UnsupportedModel

PICKLED = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle", ".joblib")
"""Endings of weights that torch or joblib unpickle: loading them can run anything."""
OTHER_WEIGHTS = (".h5", ".msgpack", ".ot", ".tflite", ".keras", ".gguf")
"""Weights of other frameworks. Not all can run code (Keras' can), none is read here."""


def unread_weights(names: Iterable[str]) -> list[str]:
    """Those of a folder's file names that hold weights which are not read here; only the unsafe ones if there are."""
    names = sorted(name for name in names if "/" not in name)
    unsafe = [name for name in names if name.endswith(PICKLED) and not name.startswith("training_args")]
    return unsafe or [name for name in names if name.endswith(OTHER_WEIGHTS)]


def no_weights(origin: Path | str, names: Iterable[str]) -> CorruptModel | UnsafeModel | UnsupportedModel:
    """The refusal of a folder without safetensors or ONNX, by what its files (`names`) are instead."""
    names = set(names)
    if "adapter_config.json" in names:
        return UnsupportedModel(
            f"{origin} is an adapter (adapter_config.json), not a whole model",
            remedy="Merge it into its base model with peft's merge_and_unload() and save the result",
        )
    unread = unread_weights(names)
    if not unread:
        return CorruptModel(
            f"{origin} holds no weights: neither model.safetensors (or its index) nor model.onnx",
            remedy="Fetch the model again, or save it with save_pretrained(..., safe_serialization=True)",
        )
    if unread[0].endswith(PICKLED):
        why = "which is a pickle and can run code when loaded"
    else:
        why = "which is not read here, because such files can carry code"
    return UnsafeModel(
        f"{origin} holds {unread[0]}, {why}",
        remedy="Convert it to safetensors (docs/how-to/convert-a-model.md#safetensors) and try again",
    )


def remote_code(config: Mapping[str, Any]) -> list[str]:
    """The classes that `auto_map` of config.json wants from the model's own Python files; empty for most models."""
    table = config.get("auto_map")
    if not table:
        return []
    values = table.values() if isinstance(table, dict) else [table]
    return sorted({str(name) for value in values for name in (value if isinstance(value, list) else [value]) if name})


def check_code(origin: Path | str, config: Mapping[str, Any], *, has_graph: bool) -> None:
    """UnsafeModel when the model can only be run by code that it brings.

    A model that also brings an ONNX graph needs none of that code: the graph alone is offered then.
    """
    wanted = remote_code(config)
    if wanted and not has_graph:
        raise UnsafeModel(
            f"{origin}/config.json wants code of the model's own (auto_map: {wanted[0]})",
            remedy="Code that comes with a model is never run here: export it to ONNX where you trust it and put "
            "model.onnx into the folder (docs/how-to/convert-a-model.md#remote-code)",
        )


def check_links(folder: Path) -> None:
    """UnsafeModel for symbolic links that leave the folder, except into `blobs` beside `snapshots`, as in the hub's
    cache."""
    root = Path(os.path.realpath(folder))
    allowed = [root]
    if root.parent.name == "snapshots":
        allowed.append(root.parent.parent / "blobs")
    for parent, folders, files in os.walk(root):
        links = [path for name in (*folders, *files) if (path := Path(parent, name)).is_symlink()]
        folders[:] = [name for name in folders if not name.startswith(".")]  # .git, .cache: never read
        for path in links:
            # realpath rather than Path.resolve, which fails on loops.
            target = Path(os.path.realpath(path))
            if not any(target.is_relative_to(place) for place in allowed):
                raise UnsafeModel(
                    f"{folder / path.relative_to(root)} is a link to {target}, outside the model's folder",
                    remedy="Copy the file into the folder instead",
                )
