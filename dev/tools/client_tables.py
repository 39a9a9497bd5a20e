"""The table of clients: the requests that each sends and its answers, from the recorded requests of the tests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[2] / "tests" / "clients"
LONGEST = 150
"""Characters of a request or an answer; more is cut."""


def clients() -> str:
    """A row for every call of a client and every route that it uses: the first request."""
    rows = ["| client | call | request | answer |", "|---|---|---|---|"]
    files = [*sorted(FOLDER.glob("recorded_*.json")), FOLDER / "from_source.json"]
    entries = [entry for file in files for entry in json.loads(file.read_bytes())]
    first: dict[tuple[str, ...], dict[str, Any]] = {}
    for entry in entries:
        first.setdefault((entry["client"], entry["call"], entry["path"], entry["task"]), entry)
    for entry in sorted(first.values(), key=lambda one: one["client"].lower()):
        name = f"{entry['client']} {entry['version']}".strip()
        if entry.get("where"):
            name += " (*from their source, not recorded*)"
        body = entry.get("body", "JSON and binary tensors")
        request = f"{entry['method']} {entry['path']} {body}".strip()
        answer = (
            "binary tensors" if entry["answer"] is None else json.dumps(_rounded(entry["answer"]), ensure_ascii=False)
        )
        rows.append(f"| {name} | {entry['call']} | {_code(request)} | {_code(answer)} |")
    return "\n".join(rows)


def _rounded(value: Any) -> Any:
    """Numbers with three decimals, and lists of numbers with two of them."""
    if isinstance(value, float):
        return round(value, 3)
    if isinstance(value, dict):
        return {name: _rounded(one) for name, one in value.items()}
    if isinstance(value, list):
        if len(value) > 2 and all(isinstance(one, float) for one in value):
            return [*map(_rounded, value[:2]), "…"]
        return [_rounded(one) for one in value]
    return f"{value[:12]}…" if isinstance(value, str) and len(value) > 60 else value


def _code(text: str) -> str:
    text = text.replace('"…"', "…").replace("|", "\\|")
    return f"`{text}`" if len(text) <= LONGEST else f"`{text[:LONGEST]}…`"


PARTS = {"clients": ("docs/reference/clients.md", clients)}
