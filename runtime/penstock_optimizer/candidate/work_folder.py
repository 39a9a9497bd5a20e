"""The folder of an optimisation under way: built candidates, what is known of them, trials and logs.

    <store>/<key>.lock            held while an optimisation runs
    <store>/<key>.work/
        export/<flavour>/         the fp32 graphs
        export/<flavour>.json     what is known of one (ExportRecord)
        candidates/<slug>/        the built graph, as it goes into the artefact
        candidates/<slug>.json    what is known of it (CandidateRecord)
        teacher.zip               what the teacher answered (`teacher_file`)
        trials.jsonl              the plan search
        logs/<slug>.log           what libraries printed

An interrupted optimisation reads it and goes on; a finished one deletes it.

The teacher's outcomes on disk, so that each candidate's process need not run fp32 again: JSON, with arrays beside it
in NumPy's own format. No pickles: stores may be shared volumes.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import shutil
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import BaseModel, Field, ValidationError

from penstock.manifest import MANIFEST_NAME, CandidateFacts, Frozen, GraphIO
from penstock.recipe import Recipe
from penstock_optimizer.guard import Observed
from penstock_runtime.host.disk import lock_file, translate_write_errors

REPORT_NAME = "report.html"
"""In an artefact folder, next to the manifest."""


def sha256(path: Path) -> str:
    """Of a file's contents, hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def digests(folder: Path) -> dict[str, str]:
    """sha256 of every file below a folder, by relative path; the manifest and the report are not among them."""
    return {
        name: sha256(path)
        for path in sorted(folder.rglob("*"))
        if path.is_file() and (name := path.relative_to(folder).as_posix()) not in {MANIFEST_NAME, REPORT_NAME}
    }


class ExportedFacts(Frozen):
    """The fp32 graph on disk."""

    graph: str
    """Path."""
    io: GraphIO
    fused_nodes: dict[str, int]
    how: str
    parameters: int
    seconds: float


class BuiltFacts(Frozen):
    """A candidate's graph on disk, in its folder."""

    graph: str
    """File name."""
    io: GraphIO
    fused_nodes: dict[str, int]
    notes: tuple[str, ...] = ()
    size_bytes: int
    seconds: float


class GraphFile(Frozen):
    """A graph that can be loaded."""

    path: str
    io: GraphIO


class CandidateRecord(Frozen):
    """One candidate on disk."""

    facts: CandidateFacts
    graph: str = ""
    """File name of the graph within the candidate's folder; empty when none was built."""
    io: GraphIO | None = None
    files: dict[str, str] = Field(default_factory=dict)
    """sha256 of the built files, by relative path."""
    taught: str = ""
    """sha256 of the teacher's outcomes, in the teacher's record; empty in those of others and of earlier versions."""


class ExportRecord(Frozen):
    """An exported fp32 graph on disk."""

    facts: ExportedFacts
    """With the graph's name for its path: the next run may reach the same store by another path."""
    files: dict[str, str]
    """sha256 of the exported files, by relative path."""


@dataclass(frozen=True)
class WorkFolder:
    """Paths and records."""

    path: Path

    @property
    def trials(self) -> Path:
        """The plan search's memory."""
        return self.path / "trials.jsonl"

    @property
    def teacher(self) -> Path:
        """The teacher's outcomes."""
        return self.path / "teacher.zip"

    def export(self, flavour: str) -> Path:
        """The folder of an exported fp32 graph."""
        return self.path / "export" / flavour

    def candidate(self, recipe: Recipe) -> Path:
        """The folder of a built candidate."""
        return self.path / "candidates" / recipe.slug

    def log(self, name: str) -> Path:
        """A log file, its folder made."""
        folder = self.path / "logs"
        folder.mkdir(parents=True, exist_ok=True)
        return folder / f"{name}.log"

    def save(self, record: CandidateRecord) -> None:
        """Remember a candidate, atomically."""
        _write(self._record(record.facts.recipe), record)

    def load(self, recipe: Recipe) -> CandidateRecord | None:
        """What is known of a candidate; None when nothing is, when it is of another version, or when its files are
        not those that were built."""
        path = self._record(recipe)
        try:
            record = CandidateRecord.model_validate_json(path.read_bytes())
        except (FileNotFoundError, ValidationError):
            return None
        if record.facts.recipe != recipe:
            return None
        if record.graph and not _are_whole(self.candidate(recipe), record.files):
            return None
        return record

    def taught(self) -> str:
        """sha256 of the teacher's outcomes; empty when there are none."""
        return sha256(self.teacher) if self.teacher.is_file() else ""

    def save_export(self, flavour: str, facts: ExportedFacts) -> None:
        """Remember the export of a flavour, which lies in its folder, atomically."""
        named = facts.model_copy(update={"graph": Path(facts.graph).name})
        _write(self._export_record(flavour), ExportRecord(facts=named, files=digests(self.export(flavour))))

    def load_export(self, flavour: str) -> ExportedFacts | None:
        """The export of a flavour; None when there is none, when it is of another version, or when its files are not
        those that were exported."""
        try:
            record = ExportRecord.model_validate_json(self._export_record(flavour).read_bytes())
        except (FileNotFoundError, ValidationError):
            return None
        folder = self.export(flavour)
        if not _are_whole(folder, record.files):
            return None
        return record.facts.model_copy(update={"graph": str(folder / record.facts.graph)})

    def remove(self) -> None:
        """Delete all of it."""
        shutil.rmtree(self.path, ignore_errors=True)

    def _record(self, recipe: Recipe) -> Path:
        return self.path / "candidates" / f"{recipe.slug}.json"

    def _export_record(self, flavour: str) -> Path:
        return self.path / "export" / f"{flavour}.json"


def _write(path: Path, record: BaseModel) -> None:
    """Atomically, also where the machine loses its power: on the disk before it gets its name."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_suffix(".tmp")
    with draft.open("w", encoding="utf-8") as file:
        file.write(record.model_dump_json(indent=1))
        file.flush()
        os.fsync(file.fileno())
    draft.replace(path)


def _are_whole(folder: Path, files: dict[str, str]) -> bool:
    """True when the folder has these files, by their sha256, and no others."""
    return bool(files) and digests(folder) == files


@contextmanager
def locked(path: Path, *, waiting: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Hold a lock file of the store; `waiting` is called once when another process holds it.

    HostError when the folder cannot be written.
    """
    with translate_write_errors(path.parent, what="the store", option="--store"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    with lock_file(path, on_wait=waiting):
        yield


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
