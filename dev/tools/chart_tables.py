"""The table of the chart's values in docs/reference/chart-values.md, from charts/*/values.yaml and their comments."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
DOCUMENT = "docs/reference/chart-values.md"
MARK = "-- "
"""Begins the comment of a value at the top."""


@dataclass(frozen=True)
class Value:
    """One value with its comment."""

    path: str
    default: Any
    comment: str


def values(text: str) -> Iterator[Value]:
    """The values in a values.yaml. A comment belongs to the key in the line after it, of the same indentation.

    ValueError for a key at the top without a comment, which must begin with `-- `.
    """
    lines = text.splitlines()
    yield from _entries(yaml.compose(text, Loader=yaml.SafeLoader), "", lines)


def _entries(node: Any, path: str, lines: list[str]) -> Iterator[Value]:
    for key, value in node.value:
        name = f"{path}.{key.value}".strip(".")
        comment = _comment(lines, key.start_mark.line, key.start_mark.column)
        if not path:
            if not comment.startswith(MARK):
                raise ValueError(f"{name} has no comment that begins with `# {MARK}`")
            comment = comment.removeprefix(MARK)
        block = isinstance(value, yaml.MappingNode) and not value.flow_style
        yield Value(name, None if block else yaml.SafeLoader("").construct_object(value, deep=True), comment)
        if block:
            yield from _entries(value, name, lines)


def _comment(lines: list[str], line: int, column: int) -> str:
    """The comment above a line, as one paragraph."""
    found: list[str] = []
    mark = " " * column + "#"
    while line and lines[line - 1].startswith(mark):
        line -= 1
        found.insert(0, lines[line].removeprefix(mark).strip())
    # A comment apart, at the head of the file, belongs to no value.
    return " ".join(found) if column or not found or found[0].startswith(MARK) else ""


def table(chart: str) -> str:
    """A row for each value."""
    text = (ROOT / "charts" / chart / "values.yaml").read_text(encoding="utf-8")
    rows = ["| value | default | meaning |", "|---|---|---|"]
    for value in values(text):
        default = "" if value.default is None else f"`{json.dumps(value.default)}`"
        rows.append(f"| `{value.path}` | {default} | {value.comment.replace('|', chr(92) + '|')} |")
    return "\n".join(rows)


PARTS: dict[str, tuple[str, Callable[[], str]]] = {
    f"values-{chart}": (DOCUMENT, partial(table, chart)) for chart in ("penstock", "penstock-crds")
}
