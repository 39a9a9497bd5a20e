"""How pytest-xdist divides the tests among processes: by file, except that two processes get all tests that share a
control plane.

The fixture `control_plane` starts one in each process that has such a test: some fifteen seconds of CPU until the
process ends. Two groups, not one: no process works longer than the others.
"""

from __future__ import annotations

CONTROL_PLANE_GROUPS = (
    (
        "tests/operator/scaling/test_canaries.py",
        "tests/operator/scaling/test_discovery.py",
        "tests/operator/scaling/test_failover.py",
        "tests/operator/scaling/test_operator.py",
    ),
    (),
)
"""Files whose tests use `control_plane` (tests/contracts/test_distribution.py compares)."""

_GROUPS = {file: f"control plane {number}" for number, files in enumerate(CONTROL_PLANE_GROUPS) for file in files}


def group_of(nodeid: str) -> str:
    """What one process gets as a whole: the test's file, or the group of the file."""
    file = nodeid.partition("::")[0]
    return _GROUPS.get(file, file)


def is_grouped(nodeid: str) -> bool:
    """Whether the test's file is in a group."""
    return nodeid.partition("::")[0] in _GROUPS
