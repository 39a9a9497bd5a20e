"""JSON files of a model folder: objects only, errors that name the file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from penstock.errors import CorruptModel

LFS_POINTER = b"version https://git-lfs.github.com/spec/"
"""What a file starts with when the repository was cloned without git-lfs: 130 bytes in place of the content."""


def check_pointer(path: Path) -> None:
    """CorruptModel when `path` is a git-lfs pointer or empty instead of the real content."""
    with path.open("rb") as file:
        start = file.read(len(LFS_POINTER))
    if start == LFS_POINTER:
        raise CorruptModel(
            f"{path} is a git-lfs pointer, not the file itself", remedy="Run git lfs pull in the clone, then try again"
        )
    if not start:
        raise CorruptModel(f"{path} is empty", remedy="Fetch the model again")


def read_object(folder: Path, name: str) -> dict[str, Any]:
    """The JSON object in `folder/name`; CorruptModel when it is anything else."""
    path = folder / name
    check_pointer(path)
    try:
        value = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise CorruptModel(f"{path} is not JSON: {error}", remedy="Fetch the model again") from error
    if not isinstance(value, dict):
        raise CorruptModel(f"{path} holds a JSON {type(value).__name__}, not an object", remedy="Fetch the model again")
    return value


def read_optional(folder: Path, name: str) -> dict[str, Any]:
    """As `read_object`, and empty when there is no such file."""
    return read_object(folder, name) if (folder / name).is_file() else {}


def read_list(folder: Path, name: str) -> list[dict[str, Any]]:
    """The JSON list of objects in `folder/name`, empty when there is no such file; CorruptModel otherwise."""
    path = folder / name
    if not path.is_file():
        return []
    check_pointer(path)
    try:
        value = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise CorruptModel(f"{path} is not JSON: {error}", remedy="Fetch the model again") from error
    if not isinstance(value, list) or not all(isinstance(entry, dict) for entry in value):
        raise CorruptModel(f"{path} is not a list of objects", remedy="Fetch the model again")
    return value


def positive_number(path: Path, values: dict[str, Any], key: str) -> int | None:
    """A whole number from 1 at `key`, None when absent or null; CorruptModel for anything else."""
    value = values.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not value >= 1:
        raise CorruptModel(f"{path}: {key} is {value!r}", remedy="Make it a number from 1, or remove it")
    return int(value) if value != float("inf") else None
