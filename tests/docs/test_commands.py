"""The commands of the documents exist: values of the chart, flags of `penstock`, make targets, modules, files."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
SOURCES = (ROOT, *(ROOT / name for name in ("dev", "cli", "operator", "runtime", "optimizer", "gateway", "bench")))
"""Folders that modules are imported from."""
FREE = {"extraEnv", "commonLabels"}
"""Values of the chart whose keys are the user's."""
PAGES = sorted(
    path
    for path in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md"))
    if not {"lab", "decisions"} & set(path.relative_to(ROOT).parts)
)


def lines(path: Path) -> Iterator[str]:
    """The lines of a page, with those that end in a backslash joined to the next."""
    yield from path.read_text(encoding="utf-8").replace("\\\n", " ").splitlines()


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_the_commands_of_a_page_exist(page: Path) -> None:
    assert [wrong for line in lines(page) for wrong in objections(line)] == []


def objections(line: str) -> Iterator[str]:
    """The names of a line that do not exist."""
    for path in re.findall(r"--set(?:-string)? '?([a-z]\w*(?:\.\w+)*)=", line):
        if not is_value(path):
            yield f"--set {path}"
    for command, rest in re.findall(r"(?:^|[/`$ ])penstock ([a-z]+)((?: [^`|#]*)?)", line):
        for flag in re.findall(r" (--[a-z][a-z0-9-]*)", rest):
            if command in FLAGS and flag not in FLAGS[command]:
                yield f"penstock {command} {flag}"
    for target in re.findall(r"(?:`|^)make ([a-z]+(?:-[a-z]+)*)(?:`|$| +#| [A-Z])", line):
        if target not in TARGETS:
            yield f"make {target}"
    for module in re.findall(r"python[\d.]* (?:-\S+ )*-m ((?:penstock|benchmarks|testbed|images)[\w.]*)", line):
        if not any(is_module(source / module.replace(".", "/")) for source in SOURCES):
            yield f"python -m {module}"
    for file in re.findall(r"(?:^|[` ])((?:examples|charts/penstock|tests|dev)/[\w./-]+\.\w+)", line):
        if not (ROOT / file).exists():
            yield file


def is_value(path: str) -> bool:
    """Whether the chart has this value."""
    at: Any = VALUES
    for name in path.split("."):
        if name in FREE:
            return True
        if not isinstance(at, dict) or name not in at:
            return path.startswith("operator.settings.")
        at = at[name]
    return True


def is_module(path: Path) -> bool:
    """Whether `python -m` can run it, or a test file of it."""
    return path.with_suffix(".py").is_file() or (path / "__main__.py").is_file()


def flags() -> dict[str, set[str]]:
    """The flags of each command, by the generated reference."""
    parts = re.split(r"^## penstock ", (ROOT / "docs/reference/cli.md").read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {
        part.partition("\n")[0].strip(): set(re.findall(r"--[a-z][a-z0-9-]*", part)) | {"--help"} for part in parts[1:]
    }


VALUES: dict[str, Any] = yaml.safe_load((ROOT / "charts/penstock/values.yaml").read_text(encoding="utf-8"))
FLAGS = flags()
TARGETS = set(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE))


def test_what_does_not_exist_is_found() -> None:
    line = "--set store.uri=a --set store.s3.uri=b --set extraEnv.ANY=c `make demos` `tests/none.py` python -m benchmarks.none"

    assert list(objections(line)) == ["--set store.uri", "make demos", "python -m benchmarks.none", "tests/none.py"]
    assert list(objections("penstock serve a.yaml --budget 3 --store b")) == ["penstock serve --budget"]
