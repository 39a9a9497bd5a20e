"""Images that are really built, once for all tests that look at them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from images.archive import Archive
from images.build import Builder, builder
from images.errors import ToolMissing
from images.target import target_named


@pytest.fixture(scope="session")
def images() -> Builder:
    """The builder of this checkout."""
    return builder(lambda line: print(line, file=sys.stderr, flush=True))


@pytest.fixture(scope="session")
def archive(images: Builder) -> Callable[[str], Archive]:
    """Gives the image of a target, built where the cache has none; skips where images cannot be built."""
    known: dict[str, Archive] = {}

    def of(name: str) -> Archive:
        if name not in known:
            try:
                known[name] = Archive(images.build(target_named(name)))
            except ToolMissing as missing:
                pytest.skip(str(missing))
        return known[name]

    return of


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A tree of the files that a build reads, each with its own name as its content."""
    for name in ("Dockerfile", ".dockerignore", "constraints.txt", "README.md", "LICENSE", "hatch_build.py"):
        (tmp_path / name).write_text(name)
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "penstock"\nversion = "9.8.7"\n')
    for name in ("penstock/a.py", "operator/b/c.py", "runtime/d/e.py", "dev/images/inside/f"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    return tmp_path
