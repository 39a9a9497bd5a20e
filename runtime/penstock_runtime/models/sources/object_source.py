"""`s3://`, `gs://` and `az://` model sources: downloads through fsspec.

The folder of a model is named by a hash of the listing (names, sizes, entity tags), so a changed model gets a new
folder and an unchanged one is fetched once. Files are written to a temporary folder, which is synced and renamed when
it is complete. An interrupted fetch is resumed. A copy that has lost a file or a part of one is fetched again.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from penstock.errors import (
    CorruptModel,
    ModelAccessDenied,
    ModelError,
    ModelNotFound,
    ModelUnavailable,
    OutOfDisk,
    PenstockError,
)
from penstock.resources.core import ModelSource
from penstock_runtime import remote
from penstock_runtime.host.disk import lock_file, sync_folders
from penstock_runtime.models.files import check_code, own_graph, remote_code_classes
from penstock_runtime.models.sources.transfer import (
    FOLDER,
    FetchProgress,
    OnProgress,
    choose_files,
    translate_folder_errors,
)
from penstock_runtime.remote import FailureKind, FileSystem, Retries, classify_failure, first_line, relative

CHUNK_BYTES = 16 * 2**20
"""Size of one read: held in memory, and the most that is lost if a connection breaks."""

_VERSION_KEYS = (
    "ETag",
    "etag",
    "md5Hash",
    "content_settings",
    "generation",
    "LastModified",
    "last_modified",
    "mtime",
    "created",
)
"""The stores' names for the version of an object, the most precise one first."""


@dataclass(frozen=True)
class _Object:
    path: str
    """The full name in the store."""
    size: int
    version: str


@dataclass(frozen=True)
class ObjectFetch:
    """One fetch of one prefix."""

    source: ModelSource
    filesystem: FileSystem
    cache: Path
    graph: bool
    retries: Retries
    report: OnProgress

    def run(self) -> Path:
        """Fetch and return the folder. ModelUnavailable if the objects keep changing during the fetch, HostError if the
        models folder cannot be written."""
        for _ in range(self.retries.attempts):
            # Errors of the store's library are translated at each call: any other OSError is one of the folder.
            with translate_folder_errors(self.cache):
                folder = self._once()
            if folder is not None:
                return folder
        raise ModelUnavailable(
            f"{self.source} changes while it is fetched, again and again", remedy="Wait until its upload has ended"
        )

    def _once(self) -> Path | None:
        """Fetch the objects of one listing; None if they changed during the fetch."""
        wanted = self._wanted()
        key = self._key(wanted)
        folder = self.cache / "objects" / key
        if _is_whole(folder, wanted):
            return folder
        folder.parent.mkdir(parents=True, exist_ok=True)
        with lock_file(folder.with_suffix(".lock")):
            if _is_whole(folder, wanted):  # another process was faster
                return folder
            if folder.is_dir():
                note = f"the copy in {folder} is damaged: fetching it again"
                self.report(FetchProgress(str(self.source), "", 0, 0, note))
                shutil.rmtree(folder)
            unfinished = folder.with_suffix(".partial")
            self._fetch_all(wanted, unfinished)
            # Objects are fetched in chunks: one that was replaced during the fetch would be a mix of two versions.
            if self._key(self._wanted()) != key:
                shutil.rmtree(unfinished)
                return None
            sync_folders(unfinished)
            unfinished.rename(folder)
            sync_folders(folder.parent, below=False)
        return folder

    def _list(self) -> dict[str, _Object]:
        """The files of the folder and of its relevant subfolders, by relative name."""
        prefix = self.source.location.rstrip("/")
        with self._translate_errors():
            self.filesystem.invalidate_cache()
            # Not `find` or `walk`: s3fs ignores errors there, and denied access would look like an empty folder.
            found = self.filesystem.ls(prefix, detail=True)
            folders = [facts["name"] for facts in found if facts.get("type") == "directory"]
            for folder in folders:
                if FOLDER.fullmatch(relative(folder, prefix)):
                    found = [*found, *self.filesystem.ls(folder, detail=True)]
        objects = {
            relative(facts["name"], prefix): _Object(facts["name"], int(facts.get("size") or 0), _version(facts))
            for facts in found
            if facts.get("type") == "file"
        }
        if not any(objects):
            raise ModelNotFound(f"{self.source}: there is nothing under this name", remedy="Check bucket and path")
        return objects

    def _wanted(self) -> dict[str, _Object]:
        """The objects to fetch, by relative name."""
        objects = self.retries.run(self._list)
        graph = self.graph
        if "config.json" in objects:
            config = self.retries.run(lambda: self._config(objects["config.json"]))
            check_code(str(self.source), config, has_graph=own_graph(objects) is not None)
            graph = graph or bool(remote_code_classes(config))
        return {name: objects[name] for name in choose_files(str(self.source), objects, graph=graph)}

    def _config(self, found: _Object) -> Mapping[str, Any]:
        """`config.json`, to check early for models with their own code; `ModelFolder.open` reports a damaged file."""
        with self._translate_errors():
            content = self.filesystem.cat_file(found.path)
        try:
            value = json.loads(content)
        except (ValueError, RecursionError):
            return {}
        return value if isinstance(value, dict) else {}

    def _key(self, wanted: Mapping[str, _Object]) -> str:
        listed = sorted((name, found.size, found.version) for name, found in wanted.items())
        return hashlib.sha256(json.dumps([str(self.source), listed]).encode()).hexdigest()

    def _fetch_all(self, wanted: Mapping[str, _Object], folder: Path) -> None:
        total, done = sum(found.size for found in wanted.values()), 0
        for name, found in wanted.items():
            target = folder / name
            target.parent.mkdir(parents=True, exist_ok=True)
            with target.open("ab") as file:
                position = file.tell()
                if position > found.size:
                    file.truncate(position := 0)
                while position < found.size:
                    self.report(FetchProgress(str(self.source), name, done + position, total))
                    chunk = self.retries.run(partial(self._chunk, found, position))
                    file.write(chunk)
                    position += len(chunk)
                file.flush()
                os.fsync(file.fileno())
            done += found.size
            self.report(FetchProgress(str(self.source), name, done, total))

    def _chunk(self, found: _Object, start: int) -> bytes:
        with self._translate_errors():
            chunk = self.filesystem.cat_file(found.path, start=start, end=min(start + CHUNK_BYTES, found.size))
        if not chunk:
            raise ModelUnavailable(f"{self.source}: {found.path} ends before its size", remedy="Try again later")
        return chunk

    @contextmanager
    def _translate_errors(self) -> Iterator[None]:
        try:
            yield
        except PenstockError:
            raise
        except Exception as error:  # each store raises its own library's errors
            known = object_error(error, self.source)
            if known is None:
                raise
            raise known from error


def open_filesystem(source: ModelSource) -> FileSystem:
    """The object store of a source, with the credentials that its library finds (environment, files, workload
    identity).

    MissingPackage names the package to install.
    """
    try:
        filesystem: FileSystem = remote.open_filesystem(source.scheme.value)
    except PenstockError:
        raise
    except Exception as error:  # some libraries look for credentials here
        known = object_error(error, source)
        if known is None:
            raise
        raise known from error
    return filesystem


def object_error(error: Exception, source: ModelSource) -> PenstockError | None:
    """The error of Penstock for an error of a store's library; None for other errors."""
    match classify_failure(error):
        case FailureKind.NOTHING_THERE:
            return ModelNotFound(f"{source}: there is nothing under this name", remedy="Check bucket and path")
        case FailureKind.DENIED:
            return ModelAccessDenied(
                f"{source}: the store refuses access ({first_line(error)})",
                remedy="Give credentials that may list and read it (docs/reference/models.md#object-stores)",
            )
        case FailureKind.FULL_DISK:
            return OutOfDisk(
                f"no space left in the cache for {source}", remedy="Free space there, or set another cache"
            )
        case FailureKind.REFUSED:
            return ModelError(
                f"{source}: the store cannot answer ({first_line(error)})",
                remedy="Check its address, its settings and the credentials (docs/reference/models.md#object-stores)",
            )
        case FailureKind.ALTERED:
            return CorruptModel(
                f"{source}: a file was altered in the store ({first_line(error)})", remedy="Upload the model again"
            )
        case FailureKind.UNAVAILABLE:
            return ModelUnavailable(
                f"{source}: the store does not deliver ({first_line(error)})",
                remedy="Check its address and the connection, and try again later",
            )
        case None:
            return None


def _is_whole(folder: Path, wanted: Mapping[str, _Object]) -> bool:
    """True if every file exists with its size. Contents are not read: that would take as long as a fetch."""
    try:
        return all((folder / name).stat().st_size == found.size for name, found in wanted.items())
    except (FileNotFoundError, NotADirectoryError):
        return False


def _version(facts: Mapping[str, Any]) -> str:
    return next((str(facts[key]) for key in _VERSION_KEYS if facts.get(key)), "")
