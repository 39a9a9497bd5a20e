"""The files of the repository that git knows."""

from __future__ import annotations

import subprocess
from functools import cache
from pathlib import Path

from images.content import FOLDERS

ROOT = Path(__file__).parents[2]
PRODUCT = tuple(folder for folder in FOLDERS if "/" not in folder)
"""The folders of the product."""


def tracked(*patterns: str) -> list[Path]:
    """The files that fit one of git's path patterns, without those that are deleted."""
    return [path for name in _names(patterns) if (path := ROOT / name).is_file()]


@cache
def _names(patterns: tuple[str, ...]) -> list[str]:
    return subprocess.run(
        ["git", "ls-files", "--", *patterns], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.splitlines()


def sources(*folders: str) -> list[Path]:
    """The Python files below these folders, or below the product's."""
    return tracked(*(f"{folder}/*.py" for folder in folders or PRODUCT))
