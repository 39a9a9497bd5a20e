"""Which tests pytest-xdist gives to one process as a whole."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.distribution import CONTROL_PLANE_GROUPS, group_of, scheduling

ROOT = Path(__file__).parents[2]
GROUPED = [file for files in CONTROL_PLANE_GROUPS for file in files]


def test_files_with_tests_that_share_a_control_plane_are_in_a_group(request: pytest.FixtureRequest) -> None:
    """Of all tests of this run: in `make test` those of the first phase."""
    users = {
        item.nodeid.partition("::")[0]
        for item in request.session.items
        if {"control_plane", "nodeless"}.intersection(getattr(item, "fixturenames", ()))
        and not any(item.get_closest_marker(name) for name in ("full_cluster", "extended"))
    }

    assert users - {*GROUPED} == set()


def test_each_grouped_file_exists_and_is_in_one_group() -> None:
    assert len(GROUPED) == len({*GROUPED})
    assert [file for file in GROUPED if not (ROOT / file).is_file()] == []


def test_one_process_gets_a_whole_file_or_a_whole_group() -> None:
    first, second, *_ = CONTROL_PLANE_GROUPS

    assert group_of(f"{first[0]}::test_one[a::b]") == group_of(f"{first[-1]}::TestClass::test_two")
    assert group_of(f"{first[0]}::test_one") != group_of(f"{second[0]}::test_one")
    assert group_of("tests/test_some.py::test_one[a::b]") == "tests/test_some.py"


@pytest.mark.parametrize("dist", ["loadfile", "load"])
def test_only_the_distribution_by_file_has_groups(dist: str) -> None:
    options: dict[str, Any] = {"dist": dist, "tx": ["2*popen"]}
    config: Any = SimpleNamespace(getoption=options.get, getvalue=options.get)

    found = scheduling(config, None)

    assert (found is None) is (dist != "loadfile")
    if found is not None:
        assert found._split_scope(f"{GROUPED[0]}::test_one") == group_of(GROUPED[0])
