"""docs/explanation/architecture.md names modules that exist, and each of its paths is within its limit.

The lists of executed files are compared with an execution in `test_path_*.py`.
"""

import re

import pytest

from tests.docs.executed import PAGE, ROOT, documented

PATHS = re.findall(r"<!-- path: (\w+)", PAGE.read_text(encoding="utf-8"))


@pytest.mark.parametrize("path", PATHS)
def test_every_module_of_a_path_exists_and_their_number_is_within_the_limit(path: str) -> None:
    files, limit = documented(path)

    assert [name for name in sorted(files) if not (ROOT / name).is_file()] == []
    assert 10 < len(files) <= limit


def test_the_page_has_the_four_paths() -> None:
    assert len(PATHS) == 4
