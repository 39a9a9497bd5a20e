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
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from penstock.manifest import CandidateFacts, GraphIO
from penstock.recipe import Recipe
from penstock_optimizer.candidate.lab import ExportedFacts
from penstock_optimizer.job.artefact import digests, sha256
from penstock_runtime.host.disk import unwritable_said


class CandidateRecord(BaseModel):
    """One candidate on disk."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    facts: CandidateFacts
    graph: str = ""
    """File name of the graph within the candidate's folder; empty when none was built."""
    io: GraphIO | None = None
    files: dict[str, str] = {}
    """sha256 of the built files, by relative path."""
    taught: str = ""
    """sha256 of the teacher's outcomes, in the teacher's record; empty in those of others and of earlier versions."""


class ExportRecord(BaseModel):
    """An exported fp32 graph on disk."""

    model_config = ConfigDict(frozen=True, extra="forbid")

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
def locked(path: Path, *, waiting: Callable[[], None]) -> Iterator[None]:
    """Hold the lock file `path` alone; calls `waiting` once when another process has it, and then waits.

    The kernel lets go of it when its holder ends, however it ends. HostError when the folder cannot be written.
    """
    with unwritable_said(path.parent, what="the store", option="--store"):
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("a")
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            waiting()
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextmanager
def locked_at_once(path: Path) -> Iterator[None]:
    """Hold the lock file `path` alone; BlockingIOError when another process has it, another OSError when it cannot be
    written."""
    with path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
