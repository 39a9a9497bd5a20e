"""Pages that errors, comments and other files name exist, with the named section."""

import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]
NAMED = re.compile(r"\bdocs/([\w/-]+\.md)(?:#([\w-]+))?")
EXAMPLES = {"tests/dev/images/test_content.py"}
"""Files with paths that are made up."""


def slugs(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub and MkDocs make them."""
    titles = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def test_every_page_and_section_that_a_file_names_exists() -> None:
    files = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    named = {
        (name, page, section)
        for name in files
        if (ROOT / name).is_file() and Path(name).suffix not in {".png", ".npz"} and name not in EXAMPLES
        for page, section in NAMED.findall((ROOT / name).read_text(encoding="utf-8", errors="replace"))
    }
    assert named

    missing = [
        f"{name}: docs/{page}{'#' if section else ''}{section}"
        for name, page, section in sorted(named)
        if not (ROOT / "docs" / page).is_file() or (section and section not in slugs(ROOT / "docs" / page))
    ]

    assert missing == []
