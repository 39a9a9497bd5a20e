"""docs/explanation/architecture.md names modules that exist, and each of its paths is within its limit."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/explanation/architecture.md").read_text(encoding="utf-8")
FOLDERS = {
    "request": "runtime/penstock_runtime",
    "endpoint": "operator/penstock_operator",
    "recipe": "optimizer/penstock_optimizer",
    "sample": "operator/penstock_operator",
}
"""Path -> the folder that its modules are below. Names that begin with a package are of that package."""
PACKAGES = {"penstock": ROOT, "penstock_runtime": ROOT / "runtime"}


def steps(name: str) -> tuple[int, list[str]]:
    """The limit of a path, and its modules in order."""
    section = re.search(rf"<!-- path: {name}, at most (\d+) -->\n\n((?:\d+\. .+\n(?:   .+\n)*)+)", PAGE)
    assert section is not None, name
    return int(section[1]), re.findall(r"^\d+\. `([^`]+)`", section[2], re.MULTILINE)


@pytest.mark.parametrize("name", FOLDERS)
def test_every_module_of_a_path_exists(name: str) -> None:
    _, modules = steps(name)

    files = [PACKAGES.get(module.split("/")[0], ROOT / FOLDERS[name]) / module for module in modules]

    assert [str(file.relative_to(ROOT)) for file in files if not file.is_file()] == []


@pytest.mark.parametrize("name", FOLDERS)
def test_a_path_is_within_its_limit_and_names_each_module_once(name: str) -> None:
    limit, modules = steps(name)

    assert 10 < len(modules) <= limit
    assert len(set(modules)) == len(modules)
