"""Stores an optimisation in progress: built candidates, their records, the reference's outcomes, trials and logs.

    <store>/<key>.lock            held while an optimisation runs
    <store>/<key>.work/
        export/<flavour>/         the fp32 graphs
        export/<flavour>.json     the record of one (ExportRecord)
        candidates/<slug>/        the built graph, as it goes into the artefact
        candidates/<slug>.json    its record (CandidateRecord)
        candidates/<slug>.tries   how often it was begun and not finished (text generation)
        teacher.zip               the outcomes of the fp32 reference (`save_observed`)
        trials.jsonl              the plan search
        logs/<slug>.log           output of libraries

An interrupted optimisation reads it and continues; a finished one deletes it.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import shutil
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import BaseModel, Field, ValidationError

from penstock.manifest import MANIFEST_NAME, SCHEMA_VERSION, CandidateFacts, Frozen, GraphIO
from penstock.recipe import Recipe
from penstock.resources.endpoint import ModelEndpointSpec
from penstock_optimizer.guard.judge import ObservedAnswer
from penstock_runtime.host.disk import lock_file, translate_write_errors

REPORT_NAME = "report.html"
"""In an artefact folder, next to the manifest."""


def sha256(path: Path) -> str:
    """Of a file's contents, hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def digests(folder: Path) -> dict[str, str]:
    """sha256 of every file below a folder, by relative path, without the manifest and the report."""
    return {
        name: sha256(path)
        for path in sorted(folder.rglob("*"))
        if path.is_file() and (name := path.relative_to(folder).as_posix()) not in {MANIFEST_NAME, REPORT_NAME}
    }


def result_key(spec: ModelEndpointSpec, model_digest: str, parts: Mapping[str, Any]) -> str:
    """sha256, hexadecimal, over all that decides the result of an optimisation. `parts`: what else does."""
    optimization = spec.optimization
    shared: dict[str, Any] = {
        "schema": SCHEMA_VERSION,
        "model": model_digest,
        "task": spec.task.value,
        "mode": optimization.mode.value,
        "accuracy": optimization.accuracy.model_dump(mode="json"),
        "when_no_candidate": optimization.when_no_candidate.value,
        "objective": spec.objective.model_dump(mode="json"),
        "workload": spec.workload.model_dump(mode="json"),
        "max_input_tokens": spec.serving.max_input_tokens,
    }
    if spec.vector_space is not None:
        shared["vector_space"] = spec.vector_space.model_dump(mode="json")
    return hashlib.sha256(json.dumps({**shared, **parts}, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


class ExportedFacts(Frozen):
    """The fp32 graph on disk."""

    graph: str
    """Path."""
    io: GraphIO
    fused_nodes: dict[str, int]
    how: str
    parameters: int
    weights: str
    """See `Exported.weights`."""
    notes: tuple[str, ...] = ()
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
    """The record of one candidate."""

    facts: CandidateFacts
    graph: str = ""
    """File name of the graph in the candidate's folder; empty when none was built."""
    io: GraphIO | None = None
    files: dict[str, str] = Field(default_factory=dict)
    """sha256 of the built files, by relative path."""
    taught: str = ""
    """sha256 of the outcomes that the reference gave; empty in other records."""

    @property
    def built(self) -> BuiltFacts | None:
        """The graph as it was built; None when none was."""
        if not self.graph or self.io is None:
            return None
        return BuiltFacts(
            graph=self.graph,
            io=self.io,
            fused_nodes=self.facts.fused_nodes,
            size_bytes=self.facts.size_bytes,
            seconds=self.facts.build_seconds,
        )


class ExportRecord(Frozen):
    """The record of an exported fp32 graph."""

    facts: ExportedFacts
    """The path is the file name alone: the next run may reach the same store by another path."""
    files: dict[str, str]
    """sha256 of the exported files, by relative path."""


@dataclass(frozen=True)
class WorkFolder:
    """Paths and records of one work folder."""

    path: Path

    @property
    def trials(self) -> Path:
        """The measurements of the plan search."""
        return self.path / "trials.jsonl"

    @property
    def reference(self) -> Path:
        """The outcomes of the fp32 reference."""
        return self.path / "teacher.zip"

    def export(self, flavour: str) -> Path:
        """The folder of an exported fp32 graph."""
        return self.path / "export" / flavour

    def candidate(self, recipe: Recipe) -> Path:
        """The folder of a built candidate."""
        return self.path / "candidates" / recipe.slug

    def log(self, name: str) -> Path:
        """A log file; its folder is made."""
        folder = self.path / "logs"
        folder.mkdir(parents=True, exist_ok=True)
        return folder / f"{name}.log"

    def save(self, record: CandidateRecord) -> None:
        """Store a candidate's record, atomically."""
        _write(self._record(record.facts.recipe), record)

    def load(self, recipe: Recipe) -> CandidateRecord | None:
        """The record of a candidate; None when there is none, when it is of another version, or when its files were
        changed."""
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

    def tries(self, recipe: Recipe) -> int:
        """How often a candidate was begun and not finished."""
        try:
            return int(self._tries(recipe).read_text(encoding="ascii"))
        except (FileNotFoundError, ValueError):
            return 0

    def save_tries(self, recipe: Recipe, count: int) -> None:
        """Store how often a candidate was begun and not finished."""
        path = self._tries(recipe)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(str(count), encoding="ascii")

    def _tries(self, recipe: Recipe) -> Path:
        return self.path / "candidates" / f"{recipe.slug}.tries"

    def reference_digest(self) -> str:
        """sha256 of the reference's outcomes; empty when there are none."""
        return sha256(self.reference) if self.reference.is_file() else ""

    def save_export(self, flavour: str, facts: ExportedFacts) -> None:
        """Store the record of an exported graph, which is in its folder, atomically."""
        named = facts.model_copy(update={"graph": Path(facts.graph).name})
        _write(self._export_record(flavour), ExportRecord(facts=named, files=digests(self.export(flavour))))

    def load_export(self, flavour: str) -> ExportedFacts | None:
        """The export of a flavour; None when there is none, when it is of another version, or when its files were
        changed."""
        try:
            record = ExportRecord.model_validate_json(self._export_record(flavour).read_bytes())
        except (FileNotFoundError, ValidationError):
            return None
        folder = self.export(flavour)
        if not _are_whole(folder, record.files):
            return None
        return record.facts.model_copy(update={"graph": str(folder / record.facts.graph)})

    def remove(self) -> None:
        """Delete the folder."""
        shutil.rmtree(self.path, ignore_errors=True)

    def _record(self, recipe: Recipe) -> Path:
        return self.path / "candidates" / f"{recipe.slug}.json"

    def _export_record(self, flavour: str) -> Path:
        return self.path / "export" / f"{flavour}.json"


def _write(path: Path, record: BaseModel) -> None:
    """Write atomically, safe against a power failure: contents are on the disk before the file gets its name."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_suffix(".tmp")
    with draft.open("w", encoding="utf-8") as file:
        file.write(record.model_dump_json(indent=1))
        file.flush()
        os.fsync(file.fileno())
    draft.replace(path)


def _are_whole(folder: Path, files: dict[str, str]) -> bool:
    """True when the folder has exactly these files, by their sha256."""
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


def save_observed(observed: Sequence[ObservedAnswer], path: Path) -> None:
    """Write the outcomes of the reference, atomically, so that no other candidate's process need run fp32 again.

    A zip file with JSON and arrays in NumPy's format; no pickles, since stores may be shared volumes. Of the reduced
    rows only arrays are stored (embeddings, which the guard compares); answers always are.
    """
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
        # On the disk before the reference's record, which refers to it.
        file.flush()
        os.fsync(file.fileno())
    draft.replace(path)


def load_observed(path: Path) -> tuple[ObservedAnswer, ...]:
    """Read the outcomes that `save_observed` wrote."""
    with zipfile.ZipFile(path) as archive:
        entries = json.loads(archive.read(_INDEX))

        def array(index: int) -> np.ndarray[Any, Any]:
            found: np.ndarray[Any, Any] = np.load(io.BytesIO(archive.read(f"{index}.npy")), allow_pickle=False)
            return found

        return tuple(
            ObservedAnswer(_thaw(entry["answer"], array), tuple(_thaw(value, array) for value in entry["reduced"]))
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
