"""The site of the documents: it builds, and all its links and anchors exist."""

import subprocess
import sys
from pathlib import Path

import pytest

from tools.site_navigation import expanded

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built strictly: a broken link, a missing anchor or a page outside the navigation is an error."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stdout + built.stderr
    return folder


def test_the_site_has_a_page_for_every_document(site: Path) -> None:
    documents = {path.relative_to(ROOT / "docs").with_suffix(".html") for path in (ROOT / "docs").rglob("*.md")}

    assert documents
    assert {page for page in documents if not (site / page).is_file()} == set()


def test_pages_load_nothing_from_other_servers(site: Path) -> None:
    text = (site / "index.html").read_text(encoding="utf-8")

    assert "fonts.googleapis.com" not in text
    assert 'src="http' not in text
    assert 'rel="stylesheet" href="http' not in text


def test_patterns_of_the_navigation_become_the_pages_that_are_not_named(tmp_path: Path) -> None:
    (tmp_path / "lab").mkdir()
    for name in ("b.md", "a.md", "c.md"):
        (tmp_path / "lab" / name).touch()

    entries = expanded([{"Lab": ["lab/c.md", "lab/*.md"]}, {"None": ["none/*.md"]}], tmp_path, frozenset({"lab/c.md"}))

    assert entries == [{"Lab": ["lab/c.md", "lab/a.md", "lab/b.md"]}]
