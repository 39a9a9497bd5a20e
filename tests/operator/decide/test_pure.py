"""The autoscaler has no clock, no random numbers and no IO: the same arguments give the same decision."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import penstock_operator.decide as library

MODULES = sorted(Path(library.__file__).parent.glob("*.py"))
ALLOWED = {
    "__future__", "array", "collections", "dataclasses", "enum", "itertools", "math", "typing", "pydantic", "penstock",
    "penstock_operator",
}  # fmt: skip


@pytest.mark.parametrize("module", MODULES, ids=lambda path: path.stem)
def test_a_module_imports_no_io_and_no_clock(module: Path) -> None:
    found = set()
    for node in ast.walk(ast.parse(module.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add(node.module or "")

    assert {name.partition(".")[0] for name in found} <= ALLOWED
    assert all(
        name.startswith(("penstock_operator.decide", "penstock.")) for name in found if name.startswith("penstock")
    )


def test_all_public_names_exist() -> None:
    assert [name for name in library.__all__ if not hasattr(library, name)] == []
