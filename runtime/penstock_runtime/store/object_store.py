"""The artefact store in an object store (`s3://`, `gs://`, `az://`), through fsspec."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

from penstock.artefact_store import NAMESPACE_PATTERN, NAMESPACES, Digest, StoreScheme, StoreUri
from penstock.errors import (
    ArtefactError,
    ArtefactNotFound,
    OutOfDisk,
    PenstockError,
    StoreAccessDenied,
    StoreError,
    StoreUnavailable,
)
from penstock.manifest import MANIFEST_NAME
from penstock_runtime import remote
from penstock_runtime.remote import (
    FailureKind,
    Retries,
    WritableFileSystem,
    already_exists,
    classify_failure,
    first_line,
    not_supported,
    relative,
)
from penstock_runtime.store.base import OnFileWritten, Stored

T = TypeVar("T")

DOCUMENTED = "docs/reference/artefact-store.md#object-stores"
PART_BYTES = 16 * 2**20
_UPLOAD: Mapping[StoreScheme, Mapping[str, Any]] = {
    # Parts are held in memory during their upload: the default of s3fs is ten of 50 MB.
    StoreScheme.S3: {"chunksize": PART_BYTES, "max_concurrency": 4},
    StoreScheme.GS: {"chunksize": PART_BYTES},
    # Without it an interrupted upload could not be repeated.
    StoreScheme.AZ: {"overwrite": True},
}
_ADDRESSES: Mapping[StoreScheme, str] = {
    StoreScheme.S3: " (AWS_ENDPOINT_URL)",
    StoreScheme.AZ: " (AZURE_STORAGE_ACCOUNT_NAME, AZURE_STORAGE_CONNECTION_STRING)",
}
_MODIFIED_KEYS = ("LastModified", "last_modified", "updated", "mtime", "created")


@dataclass(frozen=True)
class ObjectStore:
    """See `StoreBackend`."""

    uri: StoreUri
    filesystem: WritableFileSystem
    retries: Retries

    @classmethod
    def open(cls, uri: StoreUri, retries: Retries) -> ObjectStore:
        """Use the credentials that the store's library finds. MissingPackage names the package to install."""
        filesystem = _translate(uri, lambda: remote.open_filesystem(uri.scheme.value))
        return cls(uri, filesystem, retries)

    def namespaces(self) -> Sequence[str]:
        """See `StoreBackend`."""
        return self._run(lambda: self._folders(self._path(NAMESPACES), NAMESPACE_PATTERN))

    def of_namespace(self, namespace: str) -> ObjectStore:
        """See `StoreBackend`."""
        return replace(self, uri=self.uri.of_namespace(namespace))

    def holds(self, digest: Digest, sizes: Mapping[str, int]) -> bool:
        """See `StoreBackend`. Compares names, sizes and the manifest."""
        there = self.sizes(digest)
        if any(there.get(name) != size for name, size in sizes.items()):
            return False
        try:
            return Digest.of(self.read(digest, MANIFEST_NAME, 0, sizes[MANIFEST_NAME])) == digest
        except ArtefactError:  # altered
            return False

    def sizes(self, digest: Digest) -> Mapping[str, int]:
        """See `StoreBackend`."""
        folder = self._path(digest.hexadecimal)
        found = self._run(lambda: list(self._walk(folder)))
        return {relative(facts["name"], folder): int(facts.get("size") or 0) for facts in found}

    def read(self, digest: Digest, name: str, start: int, end: int) -> bytes:
        """See `StoreBackend`."""
        path = self._path(digest.hexadecimal, name)

        def read() -> bytes:
            try:
                return self.filesystem.cat_file(path, start=start, end=end)
            except FileNotFoundError as error:
                raise ArtefactNotFound(
                    f"{self.uri.of(digest)} has no {name}", remedy="It was deleted, or never published whole"
                ) from error
            except Exception as error:
                if classify_failure(error) is not FailureKind.ALTERED:
                    raise
                raise ArtefactError(
                    f"{self.uri.of(digest)}/{name} is not the file that was published ({first_line(error)})",
                    remedy="The store is damaged: delete the OptimizedModel, so that it is made and published again",
                ) from error

        return self._run(read)

    def publish(self, digest: Digest, folder: Path, names: Sequence[str], sent: OnFileWritten) -> None:
        """See `StoreBackend`. Objects are replaced atomically, and the contents of a digest never change, so concurrent
        publishers do not interfere."""
        *files, last = names
        options = _UPLOAD[self.uri.scheme]
        for name in files:
            target = self._path(digest.hexadecimal, name)
            self._run(lambda name=name, target=target: self._put(folder / name, target, options))  # type: ignore[misc]
            sent(name)
        self._run(lambda: self._finish(digest, (folder / last).read_bytes(), self._path(digest.hexadecimal, last)))
        sent(last)

    def entries(self) -> Iterator[Stored]:
        """See `StoreBackend`."""
        for name in self._run(lambda: self._folders(self._path(), r"[0-9a-f]{64}")):
            folder = self._path(name)
            files = self._run(lambda folder=folder: list(self._walk(folder)))  # type: ignore[misc]
            if files:
                yield Stored(
                    digest=Digest(name),
                    bytes=sum(int(facts.get("size") or 0) for facts in files),
                    modified=max(map(_modified, files)),
                    complete=any(relative(facts["name"], folder) == MANIFEST_NAME for facts in files),
                    name=name,
                )

    def touch(self, digest: Digest) -> bool:
        """See `StoreBackend`. Writes the manifest again: an object's time is that of its last write."""
        path = self._path(digest.hexadecimal, MANIFEST_NAME)

        def touch() -> bool:
            try:
                manifest = self.filesystem.cat_file(path)
            except FileNotFoundError:
                return False
            self.filesystem.pipe_file(path, manifest)
            return True

        return self._run(touch)

    def delete(self, stored: Stored) -> bool:
        """See `StoreBackend`. Between the last check of its age and the first deletion is one request's time."""
        folder = self._path(stored.name)
        files = self._run(lambda: list(self._walk(folder)))
        if any(_modified(facts) > stored.modified for facts in files):
            return False
        names = [facts["name"] for facts in files]
        for path in sorted(names, key=lambda path: relative(path, folder) != MANIFEST_NAME):
            self._run(lambda path=path: self._remove(path))  # type: ignore[misc]
        return True

    # The methods below make one or a few requests each.

    def _put(self, source: Path, target: str, options: Mapping[str, Any]) -> None:
        self.filesystem.put_file(str(source), target, **options)

    def _finish(self, digest: Digest, manifest: bytes, target: str) -> None:
        """Write the manifest; on S3 only if there is none, so that a correct one is not written again."""
        if self.uri.scheme is StoreScheme.S3:
            try:
                self.filesystem.pipe_file(target, manifest, mode="create")
            except Exception as error:
                if already_exists(error):
                    if self._is_manifest(digest, target):
                        return
                elif not not_supported(error):
                    raise
            else:
                return
        self.filesystem.pipe_file(target, manifest)

    def _is_manifest(self, digest: Digest, path: str) -> bool:
        try:
            return Digest.of(self.filesystem.cat_file(path)) == digest
        except Exception as error:
            if classify_failure(error) not in {FailureKind.ALTERED, FailureKind.NOTHING_THERE}:
                raise
            return False

    def _remove(self, path: str) -> None:
        try:
            self.filesystem.rm_file(path)
        except FileNotFoundError:  # deleted by another collector
            return

    def _folders(self, parent: str, pattern: str) -> list[str]:
        """The names of the folders in a folder that match a pattern."""
        found = [facts["name"] for facts in self._list(parent) if facts.get("type") == "directory"]
        names = (path.rstrip("/").rpartition("/")[2] for path in found)
        return sorted(name for name in names if re.fullmatch(pattern, name))

    def _walk(self, folder: str) -> Iterator[dict[str, Any]]:
        """The files below a folder.

        Not fsspec's `find`: s3fs ignores errors there, and denied access would look like an empty folder.
        """
        for facts in self._list(folder):
            if facts.get("type") != "directory":
                if relative(facts["name"], folder):  # some stores list a folder as a separate entry
                    yield facts
            elif relative(facts["name"], folder):
                yield from self._walk(facts["name"])

    def _list(self, folder: str) -> list[dict[str, Any]]:
        self.filesystem.invalidate_cache()
        try:
            found = self.filesystem.ls(folder, detail=True)
        except FileNotFoundError:
            # Other libraries may report an empty bucket the same way: there a missing one shows on the first write.
            if self.uri.scheme is StoreScheme.S3:
                self._require_bucket()
            return []
        return list(found)

    def _require_bucket(self) -> None:
        """StoreError if the bucket does not exist. A missing prefix is no error: it has no objects yet."""
        bucket = self.uri.location.partition("/")[0]
        try:
            self.filesystem.ls(bucket, detail=True)
        except FileNotFoundError as error:
            raise StoreError(
                f"the artefact store {self.uri}: there is no bucket {bucket}",
                remedy=f"Create it, or correct PENSTOCK_STORE_URI ({DOCUMENTED})",
            ) from error
        except Exception as error:
            # Credentials for the prefix only are refused here: then the bucket exists.
            if classify_failure(error) is not FailureKind.DENIED:
                raise

    def _path(self, *parts: str) -> str:
        return "/".join((self.uri.location, *parts))

    def _run(self, action: Callable[[], T]) -> T:
        return self.retries.run(lambda: _translate(self.uri, action))


def _translate(uri: StoreUri, action: Callable[[], T]) -> T:
    """Run `action` and map the library's errors to ours; unknown errors pass unchanged."""
    try:
        return action()
    except PenstockError:
        raise
    except Exception as error:  # each store raises its own library's errors
        known = store_error(error, uri)
        if known is None:
            raise
        raise known from error


def store_error(error: Exception, uri: StoreUri) -> PenstockError | None:
    """The error of Penstock for an error of a store's library; None for other errors."""
    where = f"the artefact store {uri}"
    match classify_failure(error):
        case FailureKind.NOTHING_THERE:
            return StoreError(
                f"{where}: there is nothing under this name ({first_line(error)})",
                remedy=f"Create the bucket, or correct PENSTOCK_STORE_URI ({DOCUMENTED})",
            )
        case FailureKind.DENIED:
            return StoreAccessDenied(
                f"{where} refuses access ({first_line(error)})",
                remedy=f"Give credentials that may list, read and, to publish, write and delete there ({DOCUMENTED})",
            )
        case FailureKind.FULL_DISK:
            return OutOfDisk(f"no space is left here while {uri} is read", remedy="Free space, or set another cache")
        case FailureKind.REFUSED:
            return StoreError(
                f"{where} cannot answer ({first_line(error)})",
                remedy=f"Check its address, its settings and the credentials ({DOCUMENTED})",
            )
        case FailureKind.UNAVAILABLE | FailureKind.ALTERED:
            return StoreUnavailable(
                f"{where} does not answer ({first_line(error)})",
                remedy=f"Check its address{_ADDRESSES.get(uri.scheme, '')} and the connection, and try again later",
            )
        case None:
            return None


def _modified(facts: Mapping[str, Any]) -> datetime:
    """The time of an object's last write; the present if unknown, so that it is not deleted for its age."""
    value = next((facts[key] for key in _MODIFIED_KEYS if facts.get(key)), None)
    if isinstance(value, str):
        value = datetime.fromisoformat(value)
    if isinstance(value, int | float):
        return datetime.fromtimestamp(value, UTC)
    if isinstance(value, datetime):
        return value if value.tzinfo is not None else value.replace(tzinfo=UTC)
    return datetime.now(UTC)
