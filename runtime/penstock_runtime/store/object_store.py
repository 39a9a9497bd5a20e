"""The artefact store in an object store (`s3://`, `gs://`, `az://`)."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from penstock.artefact_store import NAMESPACE_PATTERN, NAMESPACES, Digest, StoreScheme, StoreUri
from penstock.errors import ArtefactNotFound, PenstockError, StoreAccessDenied, StoreError, StoreUnavailable
from penstock.manifest import MANIFEST_NAME
from penstock_runtime.remote import (
    Bucket,
    FailureKind,
    Retries,
    already_exists,
    classify_failure,
    describe,
    not_supported,
    open_bucket,
)
from penstock_runtime.store.base import OnFileWritten, Stored

T = TypeVar("T")

DOCUMENTED = "docs/reference/artefact-store.md#object-stores"
_ADDRESSES: Mapping[StoreScheme, str] = {
    StoreScheme.S3: " (AWS_ENDPOINT_URL)",
    StoreScheme.AZ: " (AZURE_STORAGE_ACCOUNT_NAME, AZURE_STORAGE_CONNECTION_STRING)",
}


@dataclass(frozen=True)
class ObjectStore:
    """See `StoreBackend`."""

    uri: StoreUri
    bucket: Bucket
    """The folder of `uri`."""
    retries: Retries

    @classmethod
    def open(cls, uri: StoreUri, retries: Retries) -> ObjectStore:
        """With the credentials of the environment. Raises the errors of `open_bucket`."""
        return cls(uri, _translate(uri, lambda: open_bucket(uri.scheme.value, uri.location)), retries)

    def namespaces(self) -> Sequence[str]:
        """See `StoreBackend`."""
        return self._folders(self.bucket.below(NAMESPACES), NAMESPACE_PATTERN)

    def of_namespace(self, namespace: str) -> ObjectStore:
        """See `StoreBackend`."""
        uri = self.uri.of_namespace(namespace)
        return replace(self, uri=uri, bucket=self.bucket.below(f"{NAMESPACES}/{namespace}"))

    def holds(self, digest: Digest, sizes: Mapping[str, int]) -> bool:
        """See `StoreBackend`. Compares names, sizes and the manifest."""
        there = self.sizes(digest)
        if any(there.get(name) != size for name, size in sizes.items()):
            return False
        return Digest.of(self.read(digest, MANIFEST_NAME, 0, sizes[MANIFEST_NAME])) == digest

    def sizes(self, digest: Digest) -> Mapping[str, int]:
        """See `StoreBackend`."""
        return {one.name: one.size for one in self._run(self._folder(digest).objects)}

    def read(self, digest: Digest, name: str, start: int, end: int) -> bytes:
        """See `StoreBackend`."""

        def read() -> bytes:
            try:
                return self._folder(digest).read(name, start, end)
            except FileNotFoundError as error:
                raise ArtefactNotFound(
                    f"{self.uri.of(digest)} has no {name}", remedy="It was deleted, or never published whole"
                ) from error

        return self._run(read)

    def publish(self, digest: Digest, folder: Path, names: Sequence[str], sent: OnFileWritten) -> None:
        """See `StoreBackend`. Objects are replaced atomically, and the contents of a digest never change, so concurrent
        publishers do not interfere."""
        *files, last = names
        target = self._folder(digest)
        for name in files:
            self._run(lambda name=name: target.write(name, folder / name))  # type: ignore[misc]
            sent(name)
        self._run(lambda: self._finish(digest, (folder / last).read_bytes()))
        sent(last)

    def entries(self) -> Iterator[Stored]:
        """See `StoreBackend`."""
        for name in self._folders(self.bucket, r"[0-9a-f]{64}"):
            objects = self._run(self.bucket.below(name).objects)
            if objects:
                yield Stored(
                    digest=Digest(name),
                    bytes=sum(one.size for one in objects),
                    modified=max(one.modified for one in objects),
                    complete=any(one.name == MANIFEST_NAME for one in objects),
                    name=name,
                )

    def touch(self, digest: Digest) -> bool:
        """See `StoreBackend`. Writes the manifest again: an object's time is the time of its last write."""
        folder = self._folder(digest)

        def touch() -> bool:
            try:
                manifest = folder.read(MANIFEST_NAME)
            except FileNotFoundError:
                return False
            folder.write(MANIFEST_NAME, manifest)
            return True

        return self._run(touch)

    def delete(self, stored: Stored) -> bool:
        """See `StoreBackend`. Between the last check of its age and the first deletion is one request's time."""
        folder = self.bucket.below(stored.name)
        objects = self._run(folder.objects)
        if any(one.modified > stored.modified for one in objects):
            return False
        for name in sorted((one.name for one in objects), key=lambda name: name != MANIFEST_NAME):
            self._run(lambda name=name: _remove(folder, name))  # type: ignore[misc]
        return True

    def _folder(self, digest: Digest) -> Bucket:
        return self.bucket.below(digest.hexadecimal)

    def _finish(self, digest: Digest, manifest: bytes) -> None:
        """Write the manifest; on S3 only if there is none, so that a correct one is not written again."""
        folder = self._folder(digest)
        if self.uri.scheme is StoreScheme.S3:
            try:
                folder.write(MANIFEST_NAME, manifest, create=True)
            except Exception as error:
                if already_exists(error):
                    if self._has_manifest(digest):
                        return
                elif not not_supported(error):
                    raise
            else:
                return
        folder.write(MANIFEST_NAME, manifest)

    def _has_manifest(self, digest: Digest) -> bool:
        try:
            return Digest.of(self._folder(digest).read(MANIFEST_NAME)) == digest
        except FileNotFoundError:
            return False

    def _folders(self, parent: Bucket, pattern: str) -> list[str]:
        """The names of the folders in a folder that match a pattern."""
        folders, _ = self._run(parent.level)
        return sorted(name for name in folders if re.fullmatch(pattern, name))

    def _run(self, action: Callable[[], T]) -> T:
        return self.retries.run(lambda: _translate(self.uri, action))


def _remove(folder: Bucket, name: str) -> None:
    try:
        folder.delete(name)
    except FileNotFoundError:  # deleted by another collector
        return


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
        case FailureKind.NO_BUCKET:
            bucket = uri.location.partition("/")[0]
            return StoreError(
                f"{where}: there is no bucket {bucket}",
                remedy=f"Create it, or correct PENSTOCK_STORE_URI ({DOCUMENTED})",
            )
        case FailureKind.NO_OBJECT:
            return StoreError(
                f"{where}: there is nothing under this name ({describe(error)})",
                remedy=f"Create the bucket, or correct PENSTOCK_STORE_URI ({DOCUMENTED})",
            )
        case FailureKind.DENIED:
            return StoreAccessDenied(
                f"{where} refuses access ({describe(error)})",
                remedy=f"Give credentials that may list, read and, to publish, write and delete there ({DOCUMENTED})",
            )
        case FailureKind.REFUSED:
            return StoreError(
                f"{where} cannot answer ({describe(error)})",
                remedy=f"Check its address, its settings and the credentials ({DOCUMENTED})",
            )
        case FailureKind.UNAVAILABLE:
            return StoreUnavailable(
                f"{where} does not answer ({describe(error)})",
                remedy=f"Check its address{_ADDRESSES.get(uri.scheme, '')} and the connection, and try again later",
            )
        case None:
            return None
