"""Fetches an artefact from a store into a local cache, and verifies it against its digest. The fetch is atomic.

<cache>/<digest>/             complete and verified
<cache>/<digest>.partial/     being fetched, or left by an interrupted fetch: the next fetch resumes it
<cache>/<digest>.lock         held during a fetch: pods that share a cache fetch once
"""

from __future__ import annotations

import hashlib
import os
import shutil
import stat
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from penstock.artefact_store import Digest
from penstock.errors import ArtefactError, ArtefactNotFound, HostError, OutOfDisk, PenstockError, StoreUnavailable
from penstock.manifest import MANIFEST_NAME, Manifest
from penstock_runtime.host.disk import FULL, lock_file
from penstock_runtime.models.sources.transfer import FetchProgress, OnProgress
from penstock_runtime.store.base import StoreBackend
from penstock_runtime.store.verification import stranger


def digest_of(folder: Path) -> Digest:
    """The digest of an artefact folder; ArtefactError if it has no manifest."""
    try:
        return Digest.of((folder / MANIFEST_NAME).read_bytes())
    except OSError as error:
        raise ArtefactError(
            f"{folder} has no {MANIFEST_NAME} that can be read ({error.strerror})",
            remedy="Give the folder that penstock optimize has written",
        ) from error


def file_digest(path: Path) -> str:
    """sha256 of a file, hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def fault(folder: Path, digest: Digest) -> str:
    """Why a folder is not a copy of `digest`, in one clause; empty if it is complete and unaltered.

    Files that the manifest does not list are a fault if the runtime would read them (`stranger`).
    """
    try:
        if digest_of(folder) != digest:
            return f"its {MANIFEST_NAME} is another one"
        manifest = Manifest.load(folder)
        for name, expected in manifest.files.items():
            if file_digest(folder / name) != expected:
                return f"{name} has changed"
        added = stranger(folder, manifest)
        if added is not None:
            return f"{added} was added"
    except ArtefactError as error:
        return error.message
    except OSError as error:
        return f"{error.filename or 'a file'} cannot be read ({error.strerror})"
    return ""


CHUNK_BYTES = 16 * 2**20
"""Size of one read: held in memory, and the most that is lost if a connection breaks."""
LARGEST_MANIFEST = 64 * 2**20


@dataclass(frozen=True)
class ArtefactFetch:
    """One fetch of one artefact."""

    backend: StoreBackend
    digest: Digest
    cache: Path
    report: OnProgress

    @property
    def uri(self) -> str:
        """The address of the artefact."""
        return self.backend.uri.of(self.digest)

    def run(self) -> Path:
        """Fetch, verify, and return the folder; errors as `ArtefactStore.fetch`."""
        folder = self.cache / self.digest.hexadecimal
        with self._translate_cache_errors():
            self.cache.mkdir(parents=True, exist_ok=True)
            with lock_file(folder.with_suffix(".lock"), on_wait=self._wait):
                if folder.is_dir():
                    wrong = fault(folder, self.digest)
                    if not wrong:
                        return folder
                    self._note(f"the copy in the cache is damaged ({wrong}): fetching it again")
                    shutil.rmtree(folder)
                partial = folder.with_suffix(".partial")
                if partial.is_symlink():
                    partial.unlink()
                partial.mkdir(exist_ok=True)
                _remove_unexpected(partial)
                self._fill(partial)
                partial.rename(folder)
        return folder

    def _fill(self, partial: Path) -> None:
        sizes = self.backend.sizes(self.digest)
        manifest = self._manifest(partial, sizes)
        _remove_unexpected(partial, {MANIFEST_NAME, *manifest.files})
        missing = [name for name in manifest.files if name not in sizes]
        if missing:
            raise ArtefactError(
                f"{self.uri} is incomplete: {missing[0]} is missing"
                + (f", and {len(missing) - 1} more" if missing[1:] else ""),
                remedy="Files were deleted: delete the OptimizedModel, so that it is made and published again",
            )
        total, done = sum(sizes[name] for name in manifest.files), 0
        for name, expected in manifest.files.items():
            self._file(partial / name, name, sizes[name], expected, done=done, total=total)
            done += sizes[name]
        self.report(FetchProgress(self.uri, MANIFEST_NAME, done, total))

    def _manifest(self, partial: Path, sizes: Mapping[str, int]) -> Manifest:
        """Fetch the manifest, which lists the files to fetch. Its digest is checked, so it can be trusted."""
        if MANIFEST_NAME not in sizes:
            what = "has no manifest: it is being published, or was given up" if sizes else "is not in the store"
            raise ArtefactNotFound(
                f"the artefact {self.digest} {what} ({self.backend.uri})",
                remedy="Check PENSTOCK_STORE_URI; a deleted artefact is made again when its OptimizedModel is deleted",
            )
        size = sizes[MANIFEST_NAME]
        content = b"" if size > LARGEST_MANIFEST else self.backend.read(self.digest, MANIFEST_NAME, 0, max(size, 1))
        found = Digest.of(content)
        if found != self.digest:
            raise ArtefactError(
                f"{self.uri}/{MANIFEST_NAME} is not the one that was published "
                f"(sha256 {found.short}…, expected {self.digest.short}…; {size:,} bytes)",
                remedy="The store is damaged: delete the OptimizedModel, so that it is made and published again",
            )
        (partial / MANIFEST_NAME).write_bytes(content)
        return Manifest.load(partial)

    def _file(self, target: Path, name: str, size: int, expected: str, *, done: int, total: int) -> None:
        target.parent.mkdir(parents=True, exist_ok=True)
        while True:
            resumed = self._append(target, name, size, done=done, total=total)
            found = file_digest(target)
            if found == expected:
                return
            target.unlink()
            # The part of an interrupted fetch may be damaged. A file that was just fetched completely is not retried.
            if not resumed:
                raise ArtefactError(
                    f"{self.uri}/{name} is not the file that was published "
                    f"(sha256 {found[:12]}…, expected {expected[:12]}…; {size:,} bytes)",
                    remedy="The store is damaged: delete the OptimizedModel, so that it is made and published again",
                )

    def _append(self, target: Path, name: str, size: int, *, done: int, total: int) -> bool:
        """Fetch the missing part of a file; True if a part was there before."""
        with target.open("ab") as file:
            position = file.tell()
            if position > size:
                file.truncate(position := 0)
            resumed = position > 0
            while position < size:
                self.report(FetchProgress(self.uri, name, done + position, total))
                chunk = self.backend.read(self.digest, name, position, min(position + CHUNK_BYTES, size))
                if not chunk:
                    raise StoreUnavailable(f"{self.uri}/{name} ends before its size", remedy="Try again later")
                file.write(chunk)
                position += len(chunk)
        return resumed

    def _wait(self) -> None:
        self._note("another process is fetching it into the same cache: waiting for it")

    def _note(self, note: str) -> None:
        self.report(FetchProgress(self.uri, "", 0, 0, note))

    @contextmanager
    def _translate_cache_errors(self) -> Iterator[None]:
        """Raise an OSError as one about the cache; errors of the store are already translated by the backend."""
        try:
            yield
        except PenstockError:
            raise
        except OSError as error:
            if error.errno in FULL:
                raise OutOfDisk(
                    f"no space is left in the cache {self.cache} for {self.uri}",
                    remedy="Give the cache's volume more room (an emptyDir's sizeLimit, the node's disk)",
                ) from error
            raise HostError(
                f"the cache {self.cache} cannot be used ({error.strerror or error})",
                remedy="Set PENSTOCK_CACHE to a folder that this user may write",
            ) from error


def _remove_unexpected(folder: Path, names: Collection[str] | None = None) -> None:
    """Delete everything except regular files, and with `names` everything except these. Otherwise a file could be
    written through a link to another folder, and an unlisted file would be read with the rest."""
    for parent, folders, files in os.walk(folder, topdown=False):
        for path in (Path(parent, name) for name in files):
            known = names is None or path.relative_to(folder).as_posix() in names
            if not known or not stat.S_ISREG(path.lstat().st_mode):
                path.unlink()
        for path in (Path(parent, name) for name in folders):
            if path.is_symlink():
                path.unlink()
            elif not any(path.iterdir()):  # created again if needed; a file may have to replace it
                path.rmdir()
