"""The state of running clusters; the processes of an interrupted run are found by it and ended."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

from testbed.daemon import Process, daemons

STATE = Path(os.environ.get("PENSTOCK_TESTBED_STATE") or f"/var/tmp/penstock-testbed-{os.getuid()}")  # noqa: S108 - per user
"""Short on purpose: sockets lie below, and a socket's path may have 107 bytes."""

PLANES = STATE / "planes"
"""One folder for each control plane that lives as long as the process that started it."""

OWNER = "owner.json"


def owned_folder() -> Path:
    """A new folder that belongs to this process: once the process is gone, `sweep` removes it."""
    PLANES.mkdir(parents=True, exist_ok=True)
    # Hidden until its owner is written, so that no clean-up removes it in between.
    hidden = Path(tempfile.mkdtemp(prefix=".", dir=PLANES))
    Process.current().write(hidden / OWNER)
    return hidden.rename(PLANES / hidden.name.removeprefix("."))


def sweep(parent: Path = PLANES) -> list[Path]:
    """End what dead owners left running, remove its folders, and say which."""
    left = [folder for folder in parent.glob("[!.]*") if _is_abandoned(folder)]
    for folder in left:
        remove(folder)
    return left


def remove(folder: Path) -> None:
    """End every daemon of the folder at once (nothing in it is worth a graceful end), and the folder."""
    for daemon in daemons(folder):
        daemon.stop(grace_seconds=0)
    shutil.rmtree(folder, ignore_errors=True)


def _is_abandoned(folder: Path) -> bool:
    owner = Process.read(folder / OWNER)
    return owner is None or not owner.alive
