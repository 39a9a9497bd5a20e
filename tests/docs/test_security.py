"""The tests that the threat model names exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "explanation" / "security.md"
NAMED = re.findall(r"`([\w/]+\.py)((?:::\w+)*)`", PAGE.read_text())


def exists(file: str, names: list[str]) -> bool:
    """Whether the file below `tests/` has the test: a function, or one in a class."""
    path = ROOT / "tests" / file
    if not path.is_file():
        return False
    body: list[ast.stmt] = ast.parse(path.read_text()).body
    for name in names:
        found = [
            node
            for node in body
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and node.name == name
        ]
        if not found:
            return False
        body = found[0].body
    return True


def test_every_named_test_exists() -> None:
    assert [file + names for file, names in NAMED if not exists(file, names.split("::")[1:])] == []


def test_every_attack_names_a_test() -> None:
    rows = [line for line in PAGE.read_text().splitlines() if line.startswith("| ") and line.count(" | ") == 2]
    attacks = [row for row in rows if not row.startswith(("| Attack ", "| --- ", "| Actor ")) and "`" in row]

    assert len(attacks) > 30
    assert [row for row in attacks if ".py" not in row.rpartition(" | ")[2]] == []
