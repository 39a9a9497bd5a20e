"""The key of an image depends on its contents, and on nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest

from images.content import content_key, copy_sources, sources
from images.target import ROOT


def test_the_key_does_not_depend_on_the_path_of_the_checkout(
    checkout: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    copy_sources(checkout, elsewhere)

    assert content_key(elsewhere, ["runtime"]) == content_key(checkout, ["runtime"])


@pytest.mark.parametrize("name", ["Dockerfile", "constraints.txt", "operator/b/c.py", "dev/images/inside/f"])
def test_a_changed_file_changes_the_key(checkout: Path, name: str) -> None:
    before = content_key(checkout, ["runtime"])

    (checkout / name).write_text("changed")

    assert content_key(checkout, ["runtime"]) != before


@pytest.mark.parametrize("name", ["penstock/__pycache__/a.cpython-313.pyc", "tests/test_a.py", "docs/a.md"])
def test_files_that_a_build_does_not_read_do_not_change_the_key(checkout: Path, name: str) -> None:
    before = content_key(checkout, ["runtime"])

    (checkout / name).parent.mkdir(parents=True, exist_ok=True)
    (checkout / name).write_text("new")

    assert content_key(checkout, ["runtime"]) == before


def test_the_sources_are_the_files_that_dockerignore_allows() -> None:
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    allowed = {line.removeprefix("!") for line in lines if line.startswith("!")} - {"images"}

    tops = {str(path.relative_to(ROOT)) for path in sources(ROOT)}

    outside = {name for name in tops if not any(name == top or name.startswith(f"{top}/") for top in allowed)}
    assert outside == {"Dockerfile", ".dockerignore"}
    assert {top for top in allowed if not any(name == top or name.startswith(f"{top}/") for name in tops)} == set()
