"""`s3://`, `gs://` and `az://`, through fsspec."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

from penstock.artefact_store import Digest, StoreScheme, StoreUri
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
from penstock_runtime.store import object_storage
from penstock_runtime.store.backend import Sent, Stored
from penstock_runtime.store.object_storage import (
    Trouble,
    WritableFileSystem,
    already_there,
    first_line,
    not_supported,
    relative,
    trouble,
)
from penstock_runtime.store.retries import Retries

T = TypeVar("T")

DOCUMENTED = "docs/reference/artefact-store.md#object-stores"
PART_BYTES = 16 * 2**20
_UPLOAD: Mapping[StoreScheme, Mapping[str, Any]] = {
    # Parts under way are held in memory: s3fs' own default is ten of 50 MB.
    StoreScheme.S3: {"chunksize": PART_BYTES, "max_concurrency": 4},
    StoreScheme.GS: {"chunksize": PART_BYTES},
    # Without it an upload that had been broken off could not be repeated.
    StoreScheme.AZ: {"overwrite": True},
}
_MOST_ATTEMPTS: Mapping[StoreScheme, int] = {StoreScheme.AZ: 2}
"""Azure's library tries again by itself, for a minute and a half, and adlfs leaves no way to tell it otherwise."""
_ADDRESSES: Mapping[StoreScheme, str] = {
    StoreScheme.S3: " (AWS_ENDPOINT_URL)",
    StoreScheme.AZ: " (AZURE_STORAGE_ACCOUNT_NAME, AZURE_STORAGE_CONNECTION_STRING)",
}
_MODIFIED_KEYS = ("LastModified", "last_modified", "updated", "mtime", "created")


@dataclass(frozen=True)
class Objects:
    """See `Place`."""

    uri: StoreUri
    filesystem: WritableFileSystem
    retries: Retries

    @classmethod
    def open(cls, uri: StoreUri, retries: Retries) -> Objects:
        """With the credentials that the store's own library finds. MissingPackage says what to install."""
        filesystem = _translated(uri, lambda: object_storage.open_filesystem(uri.scheme.value))
        attempts = min(retries.attempts, _MOST_ATTEMPTS.get(uri.scheme, retries.attempts))
        return cls(uri, filesystem, replace(retries, attempts=attempts))

    def holds(self, digest: Digest, sizes: Mapping[str, int]) -> bool:
        """See `Place`. By names, sizes and the manifest."""
        there = self.sizes(digest)
        if any(there.get(name) != size for name, size in sizes.items()):
            return False
        try:
            return Digest.of(self.read(digest, MANIFEST_NAME, 0, sizes[MANIFEST_NAME])) == digest
        except ArtefactError:  # altered
            return False

    def sizes(self, digest: Digest) -> Mapping[str, int]:
        """See `Place`."""
        folder = self._path(digest.hexadecimal)
        found = self._run(lambda: list(self._walk(folder)))
        return {relative(facts["name"], folder): int(facts.get("size") or 0) for facts in found}

    def read(self, digest: Digest, name: str, start: int, end: int) -> bytes:
        """See `Place`."""
        path = self._path(digest.hexadecimal, name)

        def read() -> bytes:
            try:
                return self.filesystem.cat_file(path, start=start, end=end)
            except FileNotFoundError as error:
                raise ArtefactNotFound(
                    f"{self.uri.of(digest)} has no {name}", remedy="It was deleted, or never published whole"
                ) from error
            except Exception as error:
                if trouble(error) is not Trouble.ALTERED:
                    raise
                raise ArtefactError(
                    f"{self.uri.of(digest)}/{name} is not the file that was published ({first_line(error)})",
                    remedy="The store is damaged: delete the OptimizedModel, so that it is made and published again",
                ) from error

        return self._run(read)

    def publish(self, digest: Digest, folder: Path, names: Sequence[str], sent: Sent) -> None:
        """See `Place`. Each object is replaced as a whole, and what a digest's objects hold never changes, so two
        publishers do not disturb each other."""
        *files, last = names
        options = _UPLOAD[self.uri.scheme]
        for name in files:
            target = self._path(digest.hexadecimal, name)
            self._run(lambda name=name, target=target: self._put(folder / name, target, options))  # type: ignore[misc]
            sent(name)
        self._run(lambda: self._finish(digest, (folder / last).read_bytes(), self._path(digest.hexadecimal, last)))
        sent(last)

    def entries(self) -> Iterator[Stored]:
        """See `Place`."""
        for folder in self._run(self._folders):
            files = self._run(lambda folder=folder: list(self._walk(folder)))  # type: ignore[misc]
            name = folder.rpartition("/")[2]
            if files:
                yield Stored(
                    digest=Digest(name),
                    bytes=sum(int(facts.get("size") or 0) for facts in files),
                    modified=max(map(_modified, files)),
                    complete=any(relative(facts["name"], folder) == MANIFEST_NAME for facts in files),
                    name=name,
                )

    def touch(self, digest: Digest) -> bool:
        """See `Place`. By writing the manifest again: an object's time is that of its last write."""
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
        """See `Place`. Between the last look at its age and the first deletion lies the time of one request."""
        folder = self._path(stored.name)
        files = self._run(lambda: list(self._walk(folder)))
        if any(_modified(facts) > stored.modified for facts in files):
            return False
        names = [facts["name"] for facts in files]
        for path in sorted(names, key=lambda path: relative(path, folder) != MANIFEST_NAME):
            self._run(lambda path=path: self._remove(path))  # type: ignore[misc]
        return True

    # one request or a few each

    def _put(self, source: Path, target: str, options: Mapping[str, Any]) -> None:
        self.filesystem.put_file(str(source), target, **options)

    def _finish(self, digest: Digest, manifest: bytes, target: str) -> None:
        """Write the manifest, only if there is none where the store can say so: a right one is not written again."""
        if self.uri.scheme is StoreScheme.S3:
            try:
                self.filesystem.pipe_file(target, manifest, mode="create")
            except Exception as error:
                if already_there(error):
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
            if trouble(error) not in {Trouble.ALTERED, Trouble.NOTHING_THERE}:
                raise
            return False

    def _remove(self, path: str) -> None:
        try:
            self.filesystem.rm_file(path)
        except FileNotFoundError:  # somebody else collects, too
            return

    def _folders(self) -> list[str]:
        found = self._list(self._path())
        named = [facts["name"].rstrip("/") for facts in found if facts.get("type") == "directory"]
        return sorted(name for name in named if re.fullmatch(r"[0-9a-f]{64}", name.rpartition("/")[2]))

    def _walk(self, folder: str) -> Iterator[dict[str, Any]]:
        """The files below a folder. Not fsspec's `find`: s3fs passes over errors there, and refused access would look
        like an empty folder."""
        for facts in self._list(folder):
            if facts.get("type") != "directory":
                if relative(facts["name"], folder):  # some stores list a folder as an entry of its own
                    yield facts
            elif relative(facts["name"], folder):
                yield from self._walk(facts["name"])

    def _list(self, folder: str) -> list[dict[str, Any]]:
        self.filesystem.invalidate_cache()
        try:
            found = self.filesystem.ls(folder, detail=True)
        except FileNotFoundError:
            # The other stores' libraries may say the same of a bucket that is empty: there it shows when one writes.
            if self.uri.scheme is StoreScheme.S3:
                self._require_bucket()
            return []
        return list(found)

    def _require_bucket(self) -> None:
        """A prefix without objects does not exist, which is no error. A bucket that does not exist is one."""
        bucket = self.uri.location.partition("/")[0]
        try:
            self.filesystem.ls(bucket, detail=True)
        except FileNotFoundError as error:
            raise StoreError(
                f"the artefact store {self.uri}: there is no bucket {bucket}",
                remedy=f"Create it, or correct PENSTOCK_STORE_URI ({DOCUMENTED})",
            ) from error
        except Exception as error:
            # Who may list below the prefix only is refused here: then there is a bucket.
            if trouble(error) is not Trouble.DENIED:
                raise

    def _path(self, *parts: str) -> str:
        return "/".join((self.uri.location, *parts))

    def _run(self, action: Callable[[], T]) -> T:
        return self.retries.run(lambda: _translated(self.uri, action))


def _translated(uri: StoreUri, action: Callable[[], T]) -> T:
    """Run with the library's errors told as ours; a defect passes through as it is."""
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
    """What an error of a store's library means; None for one that is not theirs."""
    where = f"the artefact store {uri}"
    match trouble(error):
        case Trouble.NOTHING_THERE:
            return StoreError(
                f"{where}: there is nothing under this name ({first_line(error)})",
                remedy=f"Create the bucket, or correct PENSTOCK_STORE_URI ({DOCUMENTED})",
            )
        case Trouble.DENIED:
            return StoreAccessDenied(
                f"{where} refuses access ({first_line(error)})",
                remedy=f"Give credentials that may list, read and, to publish, write and delete there ({DOCUMENTED})",
            )
        case Trouble.FULL_DISK:
            return OutOfDisk(f"no space is left here while {uri} is read", remedy="Free space, or set another cache")
        case Trouble.REFUSED:
            return StoreError(
                f"{where} cannot answer ({first_line(error)})",
                remedy=f"Check its address, its settings and the credentials ({DOCUMENTED})",
            )
        case Trouble.UNAVAILABLE | Trouble.ALTERED:
            return StoreUnavailable(
                f"{where} does not answer ({first_line(error)})",
                remedy=f"Check its address{_ADDRESSES.get(uri.scheme, '')} and the connection, and try again later",
            )
        case None:
            return None


def _modified(facts: Mapping[str, Any]) -> datetime:
    """When an object was written. One that does not say counts as new: nobody deletes it for its age."""
    value = next((facts[key] for key in _MODIFIED_KEYS if facts.get(key)), None)
    if isinstance(value, str):
        value = datetime.fromisoformat(value)
    if isinstance(value, int | float):
        return datetime.fromtimestamp(value, UTC)
    if isinstance(value, datetime):
        return value if value.tzinfo is not None else value.replace(tzinfo=UTC)
    return datetime.now(UTC)
