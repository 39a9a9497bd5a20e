"""The teacher's outcomes on disk, so that each candidate's process need not run fp32 again: JSON, with arrays beside it
in NumPy's own format. No pickles: stores may be shared volumes."""

from __future__ import annotations

import io
import json
import os
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from penstock_optimizer.guard import Observed

_ARRAY = "$array"
_INDEX = "observed.json"


def save_observed(observed: Sequence[Observed], path: Path) -> None:
    """Write the outcomes, atomically. What rows were boiled down to is kept where it is arrays (the embeddings, which
    the guard compares); answers are always kept."""
    arrays: list[np.ndarray[Any, Any]] = []
    entries = [
        {
            "answer": _freeze(one.answer, arrays),
            "reduced": [_freeze(value, arrays) for value in one.reduced if isinstance(value, np.ndarray)],
        }
        for one in observed
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_suffix(".tmp")
    with draft.open("wb") as file:
        with zipfile.ZipFile(file, "w") as archive:
            archive.writestr(_INDEX, json.dumps(entries))
            for index, array in enumerate(arrays):
                buffer = io.BytesIO()
                np.save(buffer, array, allow_pickle=False)
                archive.writestr(f"{index}.npy", buffer.getvalue())
        # On the disk before the teacher's record is, which says that it is there.
        file.flush()
        os.fsync(file.fileno())
    draft.replace(path)


def load_observed(path: Path) -> tuple[Observed, ...]:
    """Read them back."""
    with zipfile.ZipFile(path) as archive:
        entries = json.loads(archive.read(_INDEX))

        def array(index: int) -> np.ndarray[Any, Any]:
            found: np.ndarray[Any, Any] = np.load(io.BytesIO(archive.read(f"{index}.npy")), allow_pickle=False)
            return found

        return tuple(
            Observed(_thaw(entry["answer"], array), tuple(_thaw(value, array) for value in entry["reduced"]))
            for entry in entries
        )


def _freeze(value: Any, arrays: list[np.ndarray[Any, Any]]) -> Any:
    match value:
        case np.ndarray():
            arrays.append(value)
            return {_ARRAY: len(arrays) - 1}
        case np.floating():
            return float(value)
        case np.integer():
            return int(value)
        case dict():
            return {str(key): _freeze(entry, arrays) for key, entry in value.items()}
        case list() | tuple():
            return [_freeze(entry, arrays) for entry in value]
        case None | bool() | int() | float() | str():
            return value
        case _:
            raise TypeError(f"{type(value).__name__} is not part of an answer")


def _thaw(value: Any, array: Any) -> Any:
    match value:
        case {"$array": int(index)}:
            return array(index)
        case dict():
            return {key: _thaw(entry, array) for key, entry in value.items()}
        case list():
            return [_thaw(entry, array) for entry in value]
        case _:
            return value
