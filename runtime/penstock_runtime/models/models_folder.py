"""The folder that keeps what came over the network, in errors about it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from penstock_runtime.host.disk import unwritable_said

OPTION = "--models or PENSTOCK_MODELS"
"""What gives another one."""


@contextmanager
def models_folder_said(folder: Path, *, option: str = OPTION) -> Iterator[None]:
    """Within, an error of the operating system becomes HostError (OutOfDisk when it is full) about the folder."""
    with unwritable_said(folder, what="the models folder", option=option):
        yield
