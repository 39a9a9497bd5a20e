"""Selects the tests of `make unit`: those that need no root, no cluster, no browser and no torch, and take no minutes.

Nothing is listed by hand. A file is read without being imported, because what it imports may be missing: with the
helpers of the tests that it imports, and the conftest.py files above it. Of the remaining files, tests are left out by
their fixtures and markers.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
TESTS = ROOT / "tests"
OPTION = "--unit"

MISSING_PACKAGES = frozenset(
    {
        "torch",
        "transformers",
        "sentence_transformers",
        "sentencepiece",
        "onnxscript",
        "obstore",
        "tritonclient",
    }
)
"""Top-level packages that the dependency group `unit` leaves out (tests/contracts/test_unit.py compares)."""
MACHINERY = frozenset({"testbed", "images"})
"""Our packages that start clusters and containers: they need Go, Debian packages or root."""
MARKERS = ("slow", "extended", "parity")
FIXTURES_OF = "testbed.fixtures"
"""The module of the fixtures that give a test a cluster."""


IMPORT = re.compile(r"^( *)(?:from +([\w.]+) +import +(\([^)]*\)|[^\n]+)|import +([^\n]+))", re.MULTILINE)
"""An import statement: its indentation, and what it names. Programs that a test keeps as text count as well."""
SKIPPED = re.compile(r"""^( *).*importorskip\(["']([\w.]+)["']""", re.MULTILINE)
"""An import that skips the test if the package is missing: its indentation and its name."""


@cache
def is_unit_file(path: Path) -> bool:
    """Whether a test file and the helpers that it imports import nothing of the above, in functions as well, and look
    for no program of the system; and whether the conftest.py files above it can be imported."""
    folders = [folder for folder in path.parents if folder.is_relative_to(TESTS) and folder != TESTS]
    conftests = [file for folder in folders if (file := folder / "conftest.py").is_file()]
    return not any(_needs_more(_text(file)) for file in _with_helpers([path])) and not any(
        _packages(_text(file), in_functions=False) & MISSING_PACKAGES for file in _with_helpers(conftests)
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
    return module.endswith(FIXTURES_OF) or (module.startswith("tests.") and _needs_more(inspect.getsource(function)))


@cache
def _text(file: Path) -> str:
    return file.read_text(encoding="utf-8")


@cache
def _needs_more(text: str) -> bool:
    return "shutil.which" in text or bool(_packages(text) & (MISSING_PACKAGES | MACHINERY))


def _packages(text: str, *, in_functions: bool = True) -> set[str]:
    """Packages that a text imports, and their parts one level below: `dev` in `dev.testbed` decides nothing."""
    return {part for name in _imports(text, in_functions=in_functions) for part in name.split(".")[:2]}


@cache
def _imports(text: str, *, in_functions: bool = True) -> frozenset[str]:
    """Dotted names of all that a text imports; `from a import b` gives `a` and `a.b`."""
    names: set[str] = set()
    for indentation, source, members, modules in IMPORT.findall(text):
        if in_functions or not indentation:
            found = [part.split()[0] for part in (members or modules).strip("()").split(",") if part.strip()]
            names |= {source, *(f"{source}.{name}" for name in found)} if source else {*found}
    names |= {name for indentation, name in SKIPPED.findall(text) if in_functions or not indentation}
    return frozenset(names)


def _with_helpers(files: list[Path]) -> set[Path]:
    """These files, and those of the tests and of the repository's other folders that they import."""
    found: set[Path] = set()
    while files:
        file = files.pop()
        if file not in found:
            found.add(file)
            files += [helper for name in _imports(_text(file)) if (helper := _helper(name))]
    return found


@cache
def _helper(name: str) -> Path | None:
    path = ROOT.joinpath(*name.split(".")).with_suffix(".py")
    return path if not name.startswith("penstock") and path.is_file() else None
