"""Selects the tests of `make unit`: those that need no root, no cluster, no browser and no torch, and take no minutes.

Nothing is listed by hand. A file is read without being imported, because what it imports may be missing: with the
helpers of the tests that it imports, and the conftest.py files above it. Of the remaining files, tests are left out by
their fixtures and markers.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
TESTS = ROOT / "tests"
OPTION = "--unit"

MISSING_PACKAGES = frozenset(
    {"torch", "transformers", "sentence_transformers", "onnxscript", "s3fs", "gcsfs", "adlfs", "tritonclient"}
)
"""Top-level packages that the dependency group `unit` leaves out (tests/contracts/test_unit.py compares)."""
MACHINERY = frozenset({"testbed", "images"})
"""Our packages that start clusters and containers: they need Go, Debian packages or root."""
MARKERS = ("slow", "extended", "parity")
FIXTURES_OF = "testbed.fixtures"
"""The module of the fixtures that give a test a cluster."""


@cache
def is_unit_file(path: Path) -> bool:
    """Whether a test file and the helpers that it imports import nothing of the above, in functions as well, and look
    for no program of the system; and whether the conftest.py files above it can be imported."""
    folders = [folder for folder in path.parents if folder.is_relative_to(TESTS) and folder != TESTS]
    conftests = [file for folder in folders if (file := folder / "conftest.py").is_file()]
    return all(_is_light(file) for file in _with_helpers([path])) and all(
        not _top_level(_imports(_tree(file).body)) & MISSING_PACKAGES for file in _with_helpers(conftests)
    )


def holds_unit_files(folder: Path) -> bool:
    """Whether there are such files below a folder: the conftest.py of others may not be imported."""
    return any(is_unit_file(path) for path in folder.rglob("test_*.py"))


def is_unit_test(item: pytest.Item) -> bool:
    """Whether a test of such a file has no marker of the above, and no fixture that gives it a cluster or imports
    something of the above."""
    if any(item.get_closest_marker(name) for name in MARKERS):
        return False
    fixtures = getattr(item, "_fixtureinfo", None)
    definitions = fixtures.name2fixturedefs.values() if fixtures else ()
    return not any(_is_heavy_fixture(one.func) for found in definitions for one in found)


@cache
def _is_heavy_fixture(function: Callable[..., Any]) -> bool:
    module = function.__module__
    if module.endswith(FIXTURES_OF):
        return True
    source = textwrap.dedent(inspect.getsource(function)) if module.startswith("tests.") else ""
    return "shutil.which" in source or bool(
        _top_level(_imports(ast.walk(ast.parse(source)))) & (MISSING_PACKAGES | MACHINERY)
    )


def _with_helpers(files: list[Path]) -> set[Path]:
    found: set[Path] = set()
    while files:
        file = files.pop()
        if file not in found:
            found.add(file)
            files += [helper for name in _imports_of(file) if (helper := _helper(name))]
    return found


@cache
def _is_light(file: Path) -> bool:
    heavy = _top_level(_imports_of(file)) & (MISSING_PACKAGES | MACHINERY)
    return not heavy and "shutil.which" not in file.read_text(encoding="utf-8")


@cache
def _tree(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"))


def _imports(nodes: Iterable[ast.AST]) -> set[str]:
    """Dotted names of all that these statements import; `from a import b` gives `a` and `a.b`."""
    names = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names


@cache
def _imports_of(file: Path) -> frozenset[str]:
    """All that a file imports, in functions as well."""
    return frozenset(_imports(ast.walk(_tree(file))))


def _top_level(names: Iterable[str]) -> set[str]:
    """Their packages at the top, and one level below: `dev` in `dev.testbed` decides nothing."""
    return {part for name in names for part in name.split(".")[:2]}


def _helper(name: str) -> Path | None:
    """The file of an imported module of the tests, or of what else lies in the repository beside the packages."""
    path = ROOT.joinpath(*name.split(".")).with_suffix(".py")
    return path if not name.startswith("penstock") and path.is_file() else None
