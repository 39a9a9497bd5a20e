"""Where bulk work reads and writes: a local folder, or a folder of a bucket (`s3://`, `gs://`, `az://`).

A file appears whole or not at all, and is never replaced by `create`. Locally it is written next to its final name,
synced, and linked; in a bucket it is one conditional request, or an unconditional one where the store has no
conditions: two processes write the same bytes.
"""

from __future__ import annotations

import contextlib
import io
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, Protocol, TypeVar

from penstock.errors import HostError, PenstockError, StoreAccessDenied, StoreError, StoreUnavailable
from penstock_runtime.host.disk import lock_file, sync_folders, translate_write_errors
from penstock_runtime.remote import (
    DEFAULT_RETRIES,
    Bucket,
    FailureKind,
    Retries,
    already_exists,
    classify_failure,
    describe,
    not_supported,
    open_bucket,
)

T = TypeVar("T")

SCHEMES = ("s3", "gs", "az")
READ_BYTES = 4 * 2**20
"""Of one request for a part of an object, and held in memory."""
LOCK = "_lock"
UNFINISHED = "_unfinished"


@dataclass(frozen=True)
class StoredFile:
    """A file or object."""

    name: str
    """Relative to its folder, with `/`."""
    size: int
    version: str
    """Changes with the content: the entity tag of an object, the time of a file."""
    modified: float
    """Seconds since 1970."""


class Folder(Protocol):
    """A folder. Methods raise PenstockError."""

    @property
    def uri(self) -> str:
        """Its address, or its absolute path."""
        ...

    def files(self) -> list[StoredFile]:
        """All files below it, by name; none if it does not exist."""
        ...

    def open(self, file: StoredFile) -> BinaryIO:
        """A file to read from, which can be positioned."""
        ...

    def read(self, name: str) -> bytes | None:
        """The content of a small file; None if there is none."""
        ...

    def create(self, name: str, content: Path | bytes) -> bool:
        """Write a file; False if there is one of that name, which is left as it is. A path is of `unfinished`."""
        ...

    def replace(self, name: str, content: bytes) -> None:
        """Write a file in place of another one."""
        ...

    def working(self) -> contextlib.AbstractContextManager[Path]:
        """While the block runs, a local folder for files that are not finished. Locally one process at a time."""
        ...


def open_folder(address: str, retries: Retries = DEFAULT_RETRIES) -> Folder:
    """The folder of a path or an address. PenstockError for one that cannot be used."""
    scheme, separator, location = address.partition("://")
    if not separator:
        return LocalFolder(Path(address).expanduser().absolute())
    if scheme not in SCHEMES:
        raise PenstockError(
            f"{address}: there is no access to {scheme}://",
            remedy=f"Give a local path, or one of {', '.join(f'{one}://' for one in SCHEMES)}",
        )
    uri = f"{scheme}://{location.strip('/')}"
    return BucketFolder(uri, translated(uri, lambda: open_bucket(scheme, location.strip("/"))), retries)


@dataclass(frozen=True)
class LocalFolder:
    """See `Folder`."""

    path: Path

    @property
    def uri(self) -> str:
        """See `Folder`."""
        return str(self.path)

    def files(self) -> list[StoredFile]:
        """See `Folder`."""
        found = []
        for path in self.path.rglob("*"):
            with contextlib.suppress(FileNotFoundError):  # deleted meanwhile
                if path.is_file():
                    facts, name = path.stat(), path.relative_to(self.path).as_posix()
                    found.append(StoredFile(name, facts.st_size, str(facts.st_mtime_ns), facts.st_mtime))
        return sorted(found, key=lambda one: one.name)

    def open(self, file: StoredFile) -> BinaryIO:
        """See `Folder`."""
        try:
            return (self.path / file.name).open("rb")
        except OSError as error:
            raise PenstockError(
                f"{self.path / file.name} cannot be read ({error.strerror})", remedy="Check path and access"
            ) from error

    def read(self, name: str) -> bytes | None:
        """See `Folder`."""
        try:
            return (self.path / name).read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise PenstockError(
                f"{self.path / name} cannot be read ({error.strerror})", remedy="Check path and access"
            ) from error

    def create(self, name: str, content: Path | bytes) -> bool:
        """See `Folder`."""
        target = self.path / name
        with self._errors():
            target.parent.mkdir(exist_ok=True)
            source = self._written(target, content) if isinstance(content, bytes) else content
            _sync(source)
            try:
                os.link(source, target)
            except FileExistsError:
                return False
            finally:
                source.unlink()
            sync_folders(target.parent, below=False)
        return True

    def replace(self, name: str, content: bytes) -> None:
        """See `Folder`."""
        target = self.path / name
        with self._errors():
            target.parent.mkdir(exist_ok=True)
            source = self._written(target, content)
            _sync(source)
            source.replace(target)
            sync_folders(target.parent, below=False)

    @contextlib.contextmanager
    def working(self) -> Iterator[Path]:
        """See `Folder`. What a killed process left unfinished is deleted first."""
        with self._errors():
            self.path.mkdir(parents=True, exist_ok=True)
        with contextlib.ExitStack() as held:
            unfinished = self.path / UNFINISHED
            with self._errors():
                try:
                    held.enter_context(lock_file(self.path / LOCK, blocking=False))
                except BlockingIOError as error:
                    raise HostError(
                        f"another process is working on {self.path}", remedy="Wait until it has ended"
                    ) from error
                shutil.rmtree(unfinished, ignore_errors=True)
                unfinished.mkdir()
            yield unfinished
            shutil.rmtree(unfinished, ignore_errors=True)

    def _written(self, target: Path, content: bytes) -> Path:
        path = self.path / UNFINISHED / target.name
        path.write_bytes(content)
        return path

    def _errors(self) -> contextlib.AbstractContextManager[None]:
        return write_errors(self.path)


def write_errors(folder: Path) -> contextlib.AbstractContextManager[None]:
    """Errors of a local output as errors of Penstock: a full disk, a folder without access."""
    return translate_write_errors(folder, what="the output", option="OUT")


def _sync(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())


@dataclass(frozen=True)
class BucketFolder:
    """See `Folder`."""

    uri: str
    bucket: Bucket
    retries: Retries = field(default=DEFAULT_RETRIES)

    def files(self) -> list[StoredFile]:
        """See `Folder`."""
        found = [
            StoredFile(one.name, one.size, one.version, one.modified.timestamp())
            for one in self._run(self.bucket.objects)
        ]
        return sorted(found, key=lambda one: one.name)

    def open(self, file: StoredFile) -> BinaryIO:
        """See `Folder`."""
        return io.BufferedReader(_RemoteFile(partial(self._range, file.name), file.size), READ_BYTES)

    def read(self, name: str) -> bytes | None:
        """See `Folder`."""

        def read() -> bytes | None:
            try:
                return self.bucket.read(name)
            except FileNotFoundError:
                return None

        return self._run(read)

    def create(self, name: str, content: Path | bytes) -> bool:
        """See `Folder`."""

        def write() -> bool:
            try:
                self.bucket.write(name, content, create=True)
            except Exception as error:
                if already_exists(error):
                    return False
                if not not_supported(error):
                    raise
                self.bucket.write(name, content)
            return True

        created = self._run(write)
        if isinstance(content, Path):
            content.unlink()
        return created

    def replace(self, name: str, content: bytes) -> None:
        """See `Folder`."""
        self._run(lambda: self.bucket.write(name, content))

    @contextlib.contextmanager
    def working(self) -> Iterator[Path]:
        """See `Folder`."""
        with tempfile.TemporaryDirectory(prefix="penstock-bulk-") as folder:
            yield Path(folder)

    def _range(self, name: str, start: int, end: int) -> bytes:
        return self._run(lambda: self.bucket.read(name, start, end))

    def _run(self, action: Callable[[], T]) -> T:
        return self.retries.run(lambda: translated(self.uri, action))


class _RemoteFile(io.RawIOBase):
    """Reads an object by ranges."""

    def __init__(self, read: Callable[[int, int], bytes], size: int) -> None:
        self._read, self._size, self._position = read, size, 0

    def readable(self) -> bool:
        """See `io.RawIOBase`."""
        return True

    def seekable(self) -> bool:
        """See `io.RawIOBase`."""
        return True

    def readinto(self, buffer: Any) -> int:
        """See `io.RawIOBase`."""
        found = self._read(self._position, min(self._size, self._position + len(buffer)))
        buffer[: len(found)] = found
        self._position += len(found)
        return len(found)

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """See `io.RawIOBase`."""
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size}
        self._position = base[whence] + offset
        return self._position


def translated(uri: str, action: Callable[[], T]) -> T:
    """Run `action`; errors of the store's library become errors of Penstock."""
    try:
        return action()
    except PenstockError:
        raise
    except Exception as error:  # each store raises its own library's errors
        match classify_failure(error):
            case FailureKind.NO_BUCKET | FailureKind.NO_OBJECT:
                known: PenstockError = StoreError(
                    f"{uri}: there is nothing under this name ({describe(error)})", remedy="Correct bucket and path"
                )
            case FailureKind.DENIED:
                known = StoreAccessDenied(
                    f"{uri} refuses access ({describe(error)})",
                    remedy="Give credentials that may list and read there, and for OUT write "
                    "(docs/reference/artefact-store.md#object-stores)",
                )
            case FailureKind.REFUSED:
                known = StoreError(
                    f"{uri} refuses the request ({describe(error)})",
                    remedy="Check the address (docs/reference/artefact-store.md#object-stores)",
                )
            case FailureKind.UNAVAILABLE:
                known = StoreUnavailable(
                    f"{uri} does not answer ({describe(error)})", remedy="Run the same command again later: it resumes"
                )
            case None:
                raise
        raise known from error
