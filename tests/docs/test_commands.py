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
FREE = {"extraEnv", "commonLabels", "settings"}
"""Values of the chart with keys that users choose."""
PAGES = sorted(
    path
    for path in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md"))
    if not {"lab", "decisions"} & set(path.relative_to(ROOT).parts)
)


def flags_by_command() -> dict[str, set[str]]:
    """By the generated reference of the command line."""
    page = (ROOT / "docs/reference/cli.md").read_text(encoding="utf-8")
    parts = [part.partition("\n") for part in page.split("\n## penstock ")[1:]]
    return {name.strip(): {"--help", *re.findall(r"--[a-z][a-z0-9-]*", text)} for name, _, text in parts}


VALUES: dict[str, Any] = yaml.safe_load((ROOT / "charts/penstock/values.yaml").read_text(encoding="utf-8"))
FLAGS = flags_by_command()
TARGETS = set(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE))


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_the_commands_of_a_page_exist(page: Path) -> None:
    paragraphs = page.read_text(encoding="utf-8").replace("\\\n", " ").split("\n\n")

    assert [name for paragraph in paragraphs for name in unknown_names(paragraph)] == []


def unknown_names(paragraph: str) -> Iterator[str]:
    """The names in its commands that do not exist."""
    for value in re.findall(r"--set(?:-string)?\s'?([a-z]\w*(?:\.\w+)*)=", paragraph):
        if not is_value(value):
            yield f"--set {value}"
    for command, rest in re.findall(r"(?:^|[/`$ ])penstock ([a-z]+)((?: [^`|#\n]*)?)", paragraph, re.MULTILINE):
        for flag in re.findall(r" (--[a-z][a-z0-9-]*)", rest):
            if command in FLAGS and flag not in FLAGS[command]:
                yield f"penstock {command} {flag}"
    for target in re.findall(r"(?:`|^)make ([a-z]+(?:-[a-z]+)*)(?=`|$| +#| [A-Z])", paragraph, re.MULTILINE):
        if target not in TARGETS:
            yield f"make {target}"
    # Measured figures name programs of an earlier commit.
    modules = r"python[\d.]* (?:-\S+ )*-m\s((?:penstock|benchmarks|testbed|images)[\w.]*)"
    for module in re.findall(modules, paragraph) if not re.search(r"\bcommit\b", paragraph) else ():
        if not any(is_program(source / module.replace(".", "/")) for source in SOURCES):
            yield f"python -m {module}"
    for file in re.findall(r"(?:^|[`\s])((?:examples|charts/penstock|tests|dev)/[\w./-]+\.\w+)", paragraph):
        if not (ROOT / file).exists():
            yield file


def is_value(path: str) -> bool:
    """Whether the chart has this value."""
    at: Any = VALUES
    for name in path.split("."):
        if not isinstance(at, dict) or name not in at:
            return False
        if name in FREE:
            return True
        at = at[name]
    return True


def is_program(path: Path) -> bool:
    """Whether `python -m` can run the module with this path."""
    return path.with_suffix(".py").is_file() or (path / "__main__.py").is_file()


def test_names_that_do_not_exist_are_found() -> None:
    text = "`make demos`, `tests/none.py` --set store.uri=a --set store.s3.uri=b --set extraEnv.A=c python -m images.no"

    assert list(unknown_names(text)) == ["--set store.uri", "make demos", "python -m images.no", "tests/none.py"]
    assert list(unknown_names("penstock serve a.yaml --budget 3 --store b")) == ["penstock serve --budget"]
