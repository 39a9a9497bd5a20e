"""Errors of folders that cannot be written (full disk, permissions) with remedies; lock files; syncing folders."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from penstock.errors import HostError, OutOfDisk

FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
"""No space, no quota, file size limit: permanent without intervention."""
LEAST_FREE_BYTES = 1 << 20
"""Below this, a failure counts as caused by the full disk: engine libraries do not report the cause of a failure."""


@contextlib.contextmanager
def translate_full_disk(folder: Path, *, what: str) -> Iterator[None]:
    """Raise a full-disk OSError of the block as OutOfDisk about `folder`; `what` names it, such as `the store`.

    An OutOfDisk of a worker process, which does not know the folder, is completed. An OSError about a file in `folder`
    becomes HostError: another process has created or locked the file.
    """
    try:
        yield
    except OutOfDisk as error:
        raise error if error.remedy else full_disk_error(folder, what=what, why=error.message) from error
    except OSError as error:
        if error.errno in FULL:
            raise full_disk_error(folder, what=what, why=os.strerror(error.errno)) from error
        if isinstance(error.filename, str) and folder in Path(error.filename).parents:
            raise HostError(
                f"{what} {folder} cannot be used ({error.filename}: {error.strerror})",
                remedy="Delete that or give this process access to it, or choose another folder",
            ) from error
        raise


@contextlib.contextmanager
def translate_write_errors(folder: Path, *, what: str, option: str) -> Iterator[None]:
    """As `translate_full_disk`; any other OSError becomes HostError about `folder`, with the flag `option` for another
    folder in its remedy."""
    try:
        with translate_full_disk(folder, what=what):
            yield
    except BrokenPipeError:  # of a pipe for progress that has no reader any more, not of the folder
        raise
    except OSError as error:
        raise HostError(
            f"{what} {folder} cannot be written ({error.strerror})",
            remedy=f"Give a folder that this process may write with {option}",
        ) from error


def prepare_folder(folder: Path, *, what: str, option: str) -> None:
    """Create the folder and check that it can be written, before any work; errors as `translate_write_errors`."""
    with translate_write_errors(folder, what=what, option=option):
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass


def full_disk_error(folder: Path, *, what: str, why: str = os.strerror(errno.ENOSPC)) -> OutOfDisk:
    """The error for a folder on a full disk."""
    return OutOfDisk(
        f"{what} {folder} cannot take more: {why} ({free_bytes(folder) / 2**20:.0f} MiB are free)",
        remedy="Free space there or choose another folder, and start again: what was finished is not done again",
    )


def is_full(folder: Path) -> bool:
    """True if almost nothing more can be written below the folder."""
    return free_bytes(folder) < LEAST_FREE_BYTES


def free_bytes(folder: Path) -> int:
    """Bytes free for this process on the disk of the folder, or of its nearest existing parent."""
    place = next(one for one in (folder.absolute(), *folder.absolute().parents) if one.exists())
    found = os.statvfs(place)
    return found.f_bavail * found.f_frsize


def sync_folders(folder: Path, *, below: bool = True) -> None:
    """Flush the entries of a folder to the disk, with `below` also of its subfolders: the node may lose power.
    The files' contents must be flushed by their writer."""
    inner = (path for path in folder.rglob("*") if path.is_dir()) if below else ()
    for place in (*inner, folder):
        descriptor = os.open(place, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


@contextlib.contextmanager
def lock_file(path: Path, *, on_wait: Callable[[], None] = lambda: None, blocking: bool = True) -> Iterator[None]:
    """Hold the lock file `path`, one process at a time; the kernel releases it when its holder ends, however it ends.

    `on_wait` is called once when another process holds it. With `blocking` False that is a BlockingIOError instead.
    OSError when the file cannot be opened for writing.
    """
    with path.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if not blocking:
                raise
            on_wait()
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
