"""How pytest-xdist divides the tests among processes: by file, except that the files of a group go to one process.

The fixture `control_plane` starts a control plane in each process that has a test with it: some ten seconds of CPU
until the process ends. So few processes get these files.
"""

from __future__ import annotations

from typing import Any

import pytest
from xdist.scheduler import LoadFileScheduling

CONTROL_PLANE_GROUPS = (
    (
        "tests/operator/scaling/test_canaries.py",
        "tests/operator/scaling/test_discovery.py",
        "tests/operator/scaling/test_failover.py",
        "tests/operator/scaling/test_operator.py",
    ),
    (
        "tests/operator/control/test_garbage_collection.py",
        "tests/operator/control/test_reconcile.py",
        "tests/operator/control/test_restore.py",
        "tests/operator/control/test_concurrency_limits.py",
        "tests/operator/control/test_plan_measure.py",
        "tests/operator/endpoint/test_api_server.py",
        "tests/operator/test_protected_endpoint.py",
    ),
    (
        "tests/crds/test_agreement.py",
        "tests/crds/test_kubectl.py",
        "tests/crds/test_plugin.py",
        "tests/dev/testbed/test_api.py",
        "tests/dev/testbed/test_cluster.py",
        "tests/dev/testbed/test_control_plane.py",
    ),
)
"""The files with tests that use `control_plane` or `nodeless`. Each group takes a few minutes, less than all tests."""

_GROUPS = {file: f"control plane {number}" for number, files in enumerate(CONTROL_PLANE_GROUPS) for file in files}


def is_grouped(nodeid: str) -> bool:
    """Whether the test's file is in a group."""
    return nodeid.partition("::")[0] in _GROUPS


def group_of(nodeid: str) -> str:
    """What one process gets as a whole: the test's file, or the group of that file."""
    file = nodeid.partition("::")[0]
    return _GROUPS.get(file, file)


def scheduling(config: pytest.Config, log: Any) -> Any:
    """xdist's scheduling by file, with the groups; None for another `--dist`."""
    if config.getoption("dist") != "loadfile":
        return None
    made = LoadFileScheduling(config, log)
    made._split_scope = group_of
    return made
