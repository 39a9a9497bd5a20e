"""The key that a built image is kept under: a hash of everything that it is made of.

So a checkout that has been built before is not built again, whichever branch it is on, and a changed line is.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path

FILES = ("Dockerfile", ".dockerignore", "pyproject.toml", "constraints.txt", "README.md", "LICENSE", "hatch_build.py")
"""Single files that the build reads."""
FOLDERS = (
    "penstock",
    "cli",
    "operator",
    "runtime",
    "optimizer",
    "gateway",
    "bench",
    "simulator",
    "planner",
    "bulk",
    "report",
    "dev/images/inside",
)
"""Folders that the build reads whole. The same as .dockerignore lets through."""
IGNORED = {"__pycache__"}
COMPILED = {".pyc", ".so"}
"""Files that a checkout has only if it was installed."""


def sources(root: Path) -> Iterator[Path]:
    """Every file that the build reads, in order."""
    for name in FILES:
        yield root / name
    for folder in FOLDERS:
        for path in sorted((root / folder).rglob("*")):
            if path.is_file() and path.suffix not in COMPILED and not IGNORED.intersection(path.parts):
                yield path


def content_key(root: Path, words: Iterable[str]) -> str:
    """Sixteen hexadecimal digits that stand for the sources and for the words (target, base, version).

    Every name and content enters with its length, so that no two lists of files give the same stream.
    """
    digest = hashlib.sha256()

    def add(data: bytes) -> None:
        digest.update(len(data).to_bytes(8, "big"))
        digest.update(data)

    for word in words:
        add(word.encode())
    for path in sources(root):
        add(str(path.relative_to(root)).encode())
        add(path.read_bytes())
    return digest.hexdigest()[:16]


def copy_sources(root: Path, folder: Path) -> None:
    """Copy every file that the build reads to the folder: a few megabytes, separate from the checkout."""
    for path in sources(root):
        copy = folder / path.relative_to(root)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, copy)
