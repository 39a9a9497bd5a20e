"""The artefact store in a folder (`file://`), usually a hostPath or a volume that several pods mount.

Works without root: new files are group-writable (fsGroup, setgid folders) and world-readable. Reading writes nothing,
so that the runtime may mount the volume read-only.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from uuid import uuid4

from penstock.artefact_store import NAMESPACE_PATTERN, NAMESPACES, Digest, StoreUri
from penstock.errors import ArtefactNotFound, OutOfDisk, PenstockError, StoreAccessDenied, StoreError, StoreUnavailable
from penstock.manifest import MANIFEST_NAME
from penstock_runtime.host.disk import FULL, sync_folders
from penstock_runtime.store.base import OnFileWritten, Stored
from penstock_runtime.store.fetch import fault

_DRAFT = re.compile(r"\.([0-9a-f]{64})-.+")
_OCCUPIED = {errno.ENOTEMPTY, errno.EEXIST}
_FOLDER_MODE = 0o775
_FILE_MODE = 0o644
_COPY_BYTES = 4 * 2**20


@dataclass(frozen=True)
class Volume:
    """See `StoreBackend`."""

    uri: StoreUri

    @property
    def root(self) -> Path:
        """The folder."""
        return Path(self.uri.location)

    def namespaces(self) -> Sequence[str]:
        """See `StoreBackend`. No links: they could lead to the store of another namespace."""
        with self._translate_errors("read"):
            self._require_root()
            folder = self.root / NAMESPACES
            return sorted(path.name for path in _folders(folder) if re.fullmatch(NAMESPACE_PATTERN, path.name))

    def of_namespace(self, namespace: str) -> Volume:
        """See `StoreBackend`."""
        return Volume(self.uri.of_namespace(namespace))

    def holds(self, digest: Digest, sizes: Mapping[str, int]) -> bool:
        """See `StoreBackend`. Reads all files, which is cheap on a volume."""
        with self._translate_errors("read"):
            target = self.root / digest.hexadecimal
            return _sizes(target) == dict(sizes) and not fault(target, digest)

    def sizes(self, digest: Digest) -> Mapping[str, int]:
        """See `StoreBackend`."""
        with self._translate_errors("read"):
            self._require_root()
            return _sizes(self.root / digest.hexadecimal)

    def read(self, digest: Digest, name: str, start: int, end: int) -> bytes:
        """See `StoreBackend`."""
        with self._translate_errors("read"):
            try:
                with (self.root / digest.hexadecimal / name).open("rb") as file:
                    file.seek(start)
                    return file.read(end - start)
            except FileNotFoundError as error:
                raise ArtefactNotFound(
                    f"{self.uri.of(digest)} has no {name}", remedy="It was deleted, or never published whole"
                ) from error

    def publish(self, digest: Digest, folder: Path, names: Sequence[str], sent: OnFileWritten) -> None:
        """See `StoreBackend`. A damaged copy is replaced."""
        with self._translate_errors("written"):
            self.root.mkdir(parents=True, exist_ok=True)
            target = self.root / digest.hexadecimal
            draft = Path(tempfile.mkdtemp(prefix=f".{digest.hexadecimal}-", dir=self.root))
            try:
                _add_permissions(draft, _FOLDER_MODE)
                for name in names:
                    _copy(folder / name, draft / name, draft)
                    sent(name)
                # Everything is on the disk before it gets its name: the node may lose power.
                sync_folders(draft)
                self._place(draft, target, digest)
                sync_folders(self.root, below=False)
            finally:
                shutil.rmtree(draft, ignore_errors=True)

    def entries(self) -> Iterator[Stored]:
        """See `StoreBackend`."""
        with self._translate_errors("read"):
            self._require_root()
            for path in sorted(_folders(self.root)):
                draft = _DRAFT.fullmatch(path.name)
                name = draft[1] if draft else path.name
                if re.fullmatch(r"[0-9a-f]{64}", name) is None:
                    continue
                try:
                    sizes = _sizes(path)
                    modified = _modified(path, sizes)
                except FileNotFoundError:  # renamed or deleted concurrently
                    continue
                yield Stored(
                    digest=Digest(name),
                    bytes=sum(sizes.values()),
                    modified=modified,
                    complete=draft is None and MANIFEST_NAME in sizes,
                    name=path.name,
                )

    def touch(self, digest: Digest) -> bool:
        """See `StoreBackend`."""
        with self._translate_errors("written"):
            try:
                os.utime(self.root / digest.hexadecimal)
            except FileNotFoundError:
                return False
            return True

    def delete(self, stored: Stored) -> bool:
        """See `StoreBackend`. Renamed first: after that no other process changes it or its age."""
        with self._translate_errors("written"):
            folder = self.root / stored.name
            trash = self.root / f".{stored.digest.hexadecimal}-deleted-{uuid4().hex[:8]}"
            try:
                folder.rename(trash)
            except FileNotFoundError:
                return True
            if _modified(trash, _sizes(trash)) > stored.modified:
                with suppress(OSError):  # published again by another process at the same time
                    trash.rename(folder)
                    return False
            shutil.rmtree(trash)
            return True

    def _place(self, draft: Path, target: Path, digest: Digest) -> None:
        """Rename the draft to its final name. An intact copy of another publisher is kept, a damaged one replaced."""
        try:
            draft.rename(target)
        except OSError as error:
            if error.errno not in _OCCUPIED:
                raise
            if not fault(target, digest):
                return
            old = target.with_name(f".{target.name}-damaged-{uuid4().hex[:8]}")
            target.rename(old)
            draft.rename(target)
            shutil.rmtree(old, ignore_errors=True)

    def _require_root(self) -> None:
        if not self.root.is_dir():
            raise StoreError(
                f"the artefact store {self.uri} is not there",
                remedy=f"Mount its volume at {self.root}, or correct PENSTOCK_STORE_URI",
            )

    @contextmanager
    def _translate_errors(self, what: str) -> Iterator[None]:
        try:
            yield
        except PenstockError:
            raise
        except OSError as error:
            raise self._error(error, what) from error
        except RecursionError as error:
            raise StoreError(
                f"the artefact store {self.uri} has folders that are nested too deeply",
                remedy="Delete what is not an artefact there",
            ) from error

    def _error(self, error: OSError, what: str) -> PenstockError:
        where = f"the artefact store {self.uri}"
        if error.errno in FULL:
            return OutOfDisk(f"no space is left in {where}", remedy="Free space there, or give it a larger volume")
        if error.errno in {errno.EACCES, errno.EPERM, errno.EROFS}:
            return StoreAccessDenied(
                f"{where} cannot be {what} by user {os.getuid()} ({error.strerror})",
                remedy="Mount the volume with an fsGroup of this user's (a hostPath: give its folder to that user or "
                "group), and not read-only where artefacts are published",
            )
        if error.errno in {errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ENAMETOOLONG}:
            return StoreError(f"{where} is no folder that can be used ({error.strerror})", remedy="Correct its path")
        return StoreUnavailable(
            f"{where} does not answer ({error.strerror or type(error).__name__})",
            remedy="Check the volume and its node, and try again later",
        )


def _folders(folder: Path) -> list[Path]:
    """The folders in a folder, without links; none if it is a link or does not exist."""
    if folder.is_symlink() or not folder.is_dir():
        return []
    return [path for path in folder.iterdir() if path.is_dir() and not path.is_symlink()]


def _sizes(folder: Path) -> dict[str, int]:
    return {
        path.relative_to(folder).as_posix(): path.stat().st_size for path in sorted(folder.rglob("*")) if path.is_file()
    }


def _modified(folder: Path, names: Iterable[str]) -> datetime:
    newest = max([folder.stat().st_mtime, *((folder / name).stat().st_mtime for name in names)])
    return datetime.fromtimestamp(newest, UTC)


def _copy(source: Path, target: Path, root: Path) -> None:
    missing = [folder for folder in (target.parent, *target.parent.parents) if folder.is_relative_to(root)]
    for folder in reversed(missing):
        if not folder.exists():
            folder.mkdir()
            _add_permissions(folder, _FOLDER_MODE)
    with source.open("rb") as reader, target.open("wb") as writer:
        shutil.copyfileobj(reader, writer, _COPY_BYTES)
        writer.flush()
        os.fsync(writer.fileno())
    _add_permissions(target, _FILE_MODE)


def _add_permissions(path: Path, mode: int) -> None:
    """Add these permissions, independent of the umask; keeps the setgid bit of a volume's folders."""
    path.chmod(stat.S_IMODE(path.stat().st_mode) | mode)
