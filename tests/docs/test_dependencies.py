"""docs/reference/dependencies.md names exactly the packages and extras of pyproject.toml."""

import re
import tomllib
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "reference" / "dependencies.md"


def declared() -> dict[str, set[str]]:
    """Package -> extras that name it."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras: dict[str, set[str]] = defaultdict(set)
    for extra, requirements in {"base": project["dependencies"], **project["optional-dependencies"]}.items():
        for requirement in requirements:
            name = re.split(r"[\[<>=]", requirement)[0]
            if name != "penstock":
                extras[name].add(extra)
    return extras


def test_table_has_every_dependency_with_its_extras_reason_size_and_replacement() -> None:
    rows = [
        line.strip("| ").split(" | ") for line in PAGE.read_text(encoding="utf-8").splitlines() if "| `" in line[:3]
    ]

    assert {row[0].strip("`"): set(row[1].split(", ")) for row in rows} == declared()
    assert all(len(row) == 5 and all(row) for row in rows)
