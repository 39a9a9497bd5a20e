"""A disk that is full while an optimisation writes, said so that somebody can act on it."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path

from penstock.errors import OutOfDisk

FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
"""No space, no quota, a limit on the size of files: none of them passes by itself."""
LEAST_FREE_BYTES = 1 << 20
"""With less than this free, whatever failed had nowhere to write: libraries of engines do not say why they failed."""


@contextlib.contextmanager
def full_disk_said(folder: Path, *, what: str) -> Iterator[None]:
    """Within, an operating-system error of a full disk becomes OutOfDisk about `folder`; `what` it is, such as
    `the store`. A OutOfDisk of a worker process, which does not know where it writes to, becomes one that does."""
    try:
        yield
    except OutOfDisk as error:
        raise error if error.remedy else full(folder, what=what, why=error.message) from error
    except OSError as error:
        if error.errno not in FULL:
            raise
        raise full(folder, what=what, why=os.strerror(error.errno)) from error


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
