"""`s3://`, `gs://` and `az://` model sources: downloads.

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
    ModelAccessDenied,
    ModelError,
    ModelNotFound,
    ModelUnavailable,
    PenstockError,
    UnsupportedModel,
)
from penstock.resources.core import ModelSource
from penstock_runtime.host.disk import lock_file, sync_folders
from penstock_runtime.models.files import check_code, own_graph, remote_code_classes
from penstock_runtime.models.sources.transfer import (
    FOLDER,
    FetchProgress,
    OnConfig,
    OnProgress,
    check_size,
    choose_files,
    ignore_config,
    more_than_listed,
    translate_folder_errors,
)
from penstock_runtime.remote import (
    Bucket,
    FailureKind,
    Retries,
    StoredObject,
    classify_failure,
    describe,
    open_bucket,
)

CHUNK_BYTES = 16 * 2**20
"""Size of one read: held in memory, and the most that is lost if a connection breaks."""


@dataclass(frozen=True)
class ObjectFetch:
    """One fetch of one prefix."""

    source: ModelSource
    bucket: Bucket
    cache: Path
    graph: bool
    retries: Retries
    report: OnProgress
    check: OnConfig = ignore_config

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

    def _list(self) -> dict[str, StoredObject]:
        """The files of the folder and of its relevant subfolders, by relative name."""
        with self._translate_errors():
            folders, found = self.bucket.level()
            objects = {one.name: one for one in found}
            for folder in filter(FOLDER.fullmatch, folders):
                _, found = self.bucket.below(folder).level()
                objects |= {f"{folder}/{one.name}": one for one in found}
        if not any(objects):
            raise ModelNotFound(f"{self.source}: there is nothing under this name", remedy="Check bucket and path")
        return objects

    def _wanted(self) -> dict[str, StoredObject]:
        """The objects to fetch, by relative name."""
        objects = self.retries.run(self._list)
        graph = self.graph
        if "config.json" in objects:
            config = self.retries.run(partial(self._config, objects["config.json"].size))
            check_code(str(self.source), config, has_graph=own_graph(objects) is not None)
            self.check(config)
            graph = graph or bool(remote_code_classes(config))
        return {name: objects[name] for name in choose_files(str(self.source), objects, graph=graph)}

    def _config(self, size: int) -> Mapping[str, Any]:
        """`config.json`, to check early for models with their own code; `ModelFolder.open` reports a damaged file."""
        with self._translate_errors():
            content = self.bucket.read("config.json", 0, min(size, CHUNK_BYTES))
        try:
            value = json.loads(content)
        except (ValueError, RecursionError):
            return {}
        return value if isinstance(value, dict) else {}

    def _key(self, wanted: Mapping[str, StoredObject]) -> str:
        listed = sorted((name, found.size, found.version) for name, found in wanted.items())
        return hashlib.sha256(json.dumps([str(self.source), listed]).encode()).hexdigest()

    def _fetch_all(self, wanted: Mapping[str, StoredObject], folder: Path) -> None:
        total, done = sum(found.size for found in wanted.values()), 0
        check_size(str(self.source), total)
        for name, found in wanted.items():
            target = folder / name
            target.parent.mkdir(parents=True, exist_ok=True)
            with target.open("ab") as file:
                position = file.tell()
                if position > found.size:
                    file.truncate(position := 0)
                while position < found.size:
                    self.report(FetchProgress(str(self.source), name, done + position, total))
                    chunk = self.retries.run(partial(self._chunk, name, position, found.size))
                    file.write(chunk)
                    position += len(chunk)
                file.flush()
                os.fsync(file.fileno())
            done += found.size
            self.report(FetchProgress(str(self.source), name, done, total))

    def _chunk(self, name: str, start: int, size: int) -> bytes:
        with self._translate_errors():
            end = min(start + CHUNK_BYTES, size)
            chunk = self.bucket.read(name, start, end)
        if not chunk:
            raise ModelUnavailable(f"{self.source}: {name} ends before its size", remedy="Try again later")
        if len(chunk) > end - start:
            raise more_than_listed(str(self.source), name, size)
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


def open_source(source: ModelSource) -> Bucket:
    """The folder of a source in its object store, with the credentials of the environment. Raises the errors of
    `open_bucket`, those of obstore as errors of the model."""
    try:
        return open_bucket(source.scheme.value, source.location)
    except PenstockError:
        raise
    except Exception as error:  # invalid settings
        known = object_error(error, source)
        if known is None:
            raise
        raise known from error


def fetch_object(folder: ModelSource, name: str, path: Path, most_bytes: int) -> None:
    """Write one object of a folder to a file. Raises the errors of `open_source`, and UnsupportedModel for more bytes
    than allowed."""
    bucket, position = open_source(folder), 0
    with path.open("wb") as file:
        while True:
            try:
                chunk = bucket.read(name, position, position + CHUNK_BYTES)
            except Exception as error:  # each store raises its own library's errors
                known = object_error(error, folder)
                if known is None:
                    raise
                raise known from error
            file.write(chunk)
            position += len(chunk)
            if position > most_bytes:
                raise UnsupportedModel(
                    f"{folder}/{name} has over {most_bytes // 2**20} MiB", remedy="Export fewer rows"
                )
            if len(chunk) < CHUNK_BYTES:
                return


def object_error(error: Exception, source: ModelSource) -> PenstockError | None:
    """The error of Penstock for an error of a store's library; None for other errors."""
    match classify_failure(error):
        case FailureKind.NO_OBJECT | FailureKind.NO_BUCKET:
            return ModelNotFound(f"{source}: there is nothing under this name", remedy="Check bucket and path")
        case FailureKind.DENIED:
            return ModelAccessDenied(
                f"{source}: the store refuses access ({describe(error)})",
                remedy="Give credentials that may list and read it (docs/reference/models.md#object-stores)",
            )
        case FailureKind.REFUSED:
            return ModelError(
                f"{source}: the store cannot answer ({describe(error)})",
                remedy="Check its address, its settings and the credentials (docs/reference/models.md#object-stores)",
            )
        case FailureKind.UNAVAILABLE:
            return ModelUnavailable(
                f"{source}: the store does not deliver ({describe(error)})",
                remedy="Check its address and the connection, and try again later",
            )
        case None:
            return None


def _is_whole(folder: Path, wanted: Mapping[str, StoredObject]) -> bool:
    """True if every file exists with its size. Contents are not read: that would take as long as a fetch."""
    try:
        return all((folder / name).stat().st_size == found.size for name, found in wanted.items())
    except (FileNotFoundError, NotADirectoryError):
        return False
