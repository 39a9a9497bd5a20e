"""Compiles Python sources so that two builds give the same bytes: `compile.py FOLDER...`.

Ordinary .pyc files carry their source's modification time, which a reproducible image sets to one moment: Python would
find each of them stale and, with a read-only root, compile everything again at every start. So these carry a hash of
the source instead and are never checked (PEP 552, unchecked): the image's files do not change. Run with
PYTHONHASHSEED=0. Standard library only: this runs in the build.
"""

from __future__ import annotations

import py_compile
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path


def compile_folder(folder: Path) -> int:
    """Compile every module below the folder, in order; sources that are no Python of ours stay sources.

    Returns how many were compiled. Caches that are there already are replaced.
    """
    for cache in sorted(folder.rglob("__pycache__")):
        shutil.rmtree(cache)
    compiled = 0
    for source in sorted(folder.rglob("*.py")):
        try:
            py_compile.compile(
                str(source), doraise=True, invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH
            )
        except py_compile.PyCompileError:
            continue  # templates and samples of packages, which are not imported
        compiled += 1
    return compiled


def main(folders: Sequence[str]) -> None:
    """Compile all folders, and say how much that was."""
    for folder in folders:
        print(f"compiled {compile_folder(Path(folder))} modules below {folder}")


if __name__ == "__main__":
    main(sys.argv[1:])
