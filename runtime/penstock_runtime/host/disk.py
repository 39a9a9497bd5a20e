"""A folder that cannot take what is written, full disk or other reasons, said so that somebody can act on it; and what
has to be on the disk before it gets its name."""

from __future__ import annotations

import contextlib
import errno
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from penstock.errors import HostError, OutOfDisk

FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
"""No space, no quota, a limit on the size of files: none of them passes by itself."""
LEAST_FREE_BYTES = 1 << 20
"""With less than this free, whatever failed had nowhere to write: libraries of engines do not say why they failed."""


@contextlib.contextmanager
def full_disk_said(folder: Path, *, what: str) -> Iterator[None]:
    """Within, an operating-system error of a full disk becomes OutOfDisk about `folder`; `what` it is, such as
    `the store`. A OutOfDisk of a worker process, which does not know where it writes to, becomes one that does.

    One of a file within `folder` becomes HostError about it: somebody else has put something there, or locked it.
    """
    try:
        yield
    except OutOfDisk as error:
        raise error if error.remedy else full(folder, what=what, why=error.message) from error
    except OSError as error:
        if error.errno in FULL:
            raise full(folder, what=what, why=os.strerror(error.errno)) from error
        if isinstance(error.filename, str) and folder in Path(error.filename).parents:
            raise HostError(
                f"{what} {folder} cannot be used ({error.filename}: {error.strerror})",
                remedy="Delete that or give this process access to it, or choose another folder",
            ) from error
        raise


@contextlib.contextmanager
def unwritable_said(folder: Path, *, what: str, option: str) -> Iterator[None]:
    """Within, as `full_disk_said`; and any other error of the operating system becomes HostError about `folder`,
    instead of which the flag `option` gives another one."""
    try:
        with full_disk_said(folder, what=what):
            yield
    except BrokenPipeError:  # of whoever was told something meanwhile, and listens no longer
        raise
    except OSError as error:
        raise HostError(
            f"{what} {folder} cannot be written ({error.strerror})",
            remedy=f"Give a folder that this process may write with {option}",
        ) from error


def prepare_folder(folder: Path, *, what: str, option: str) -> None:
    """Make the folder; errors as in `unwritable_said`, before any work, when nothing can be written there."""
    with unwritable_said(folder, what=what, option=option):
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass


def full(folder: Path, *, what: str, why: str = os.strerror(errno.ENOSPC)) -> OutOfDisk:
    """The error for a folder on a full disk."""
    return OutOfDisk(
        f"{what} {folder} cannot take more: {why} ({free_bytes(folder) / 2**20:.0f} MiB are free)",
        remedy="Free space there or choose another folder, and start again: what was finished is not done again",
    )


def is_full(folder: Path) -> bool:
    """True when next to nothing more can be written below the folder."""
    return free_bytes(folder) < LEAST_FREE_BYTES


def free_bytes(folder: Path) -> int:
    """Free for this process on the disk of the folder, or of the nearest one above it that is there."""
    place = next(one for one in (folder.absolute(), *folder.absolute().parents) if one.exists())
    found = os.statvfs(place)
    return found.f_bavail * found.f_frsize


def sync_folders(folder: Path, *, below: bool = True) -> None:
    """Have the names in a folder on the disk, and with `below` those in its folders: a node may lose its power. The
    files' contents are the business of whoever writes them."""
    inner = (path for path in folder.rglob("*") if path.is_dir()) if below else ()
    for place in (*inner, folder):
        descriptor = os.open(place, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
