"""No clock, no chance, no IO: time is an argument, and the same arguments give the same decision."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import penstock_operator.scaling.decide as library

MODULES = sorted(Path(library.__file__).parent.glob("*.py"))
ALLOWED = {
    "__future__", "collections", "dataclasses", "enum", "itertools", "math", "typing", "pydantic", "penstock",
    "penstock_operator",
}  # fmt: skip


@pytest.mark.parametrize("module", MODULES, ids=lambda path: path.stem)
def test_a_module_imports_nothing_that_could_look_around(module: Path) -> None:
    found = set()
    for node in ast.walk(ast.parse(module.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add(node.module or "")

    assert {name.partition(".")[0] for name in found} <= ALLOWED
    assert all(
        name.startswith(("penstock_operator.scaling.decide", "penstock."))
        for name in found
        if name.startswith("penstock")
    )


def test_what_is_public_is_there() -> None:
    assert [name for name in library.__all__ if not hasattr(library, name)] == []
