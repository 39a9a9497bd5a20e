"""For all tests."""

from __future__ import annotations

import os
from collections.abc import Generator

import pytest
from hypothesis import settings

from penstock_runtime.host.cores import pin_process
from tests.examples import THOROUGH, examples

# Machines differ and are shared: a slow example is no failure. The pytest timeout ends what hangs.
settings.register_profile(
    "penstock", deadline=None, print_blob=True, max_examples=examples(100), derandomize=not THOROUGH
)
settings.load_profile("penstock")

# A Kubernetes for the tests that name one: `control_plane`, `kubectl` and others, described there.
pytest_plugins = ["testbed.fixtures"]

FEWEST_CPUS = 2
"""Some tests ask for two cores."""


def pytest_configure() -> None:
    """Leave each of several test processes another lowest CPU.

    What asks for one core of a machine takes its first: candidates, replicas and servers of all test processes would
    queue for that one, with the others idle.
    """
    worker = os.environ.get("PYTEST_XDIST_WORKER", "")
    cpus = sorted(os.sched_getaffinity(0))
    firsts = len(cpus) - FEWEST_CPUS + 1
    if worker and firsts > 1:
        pin_process(cpus[int(worker.removeprefix("gw")) % firsts :])


_cpus_before = pytest.StashKey[set[int]]()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    item.stash[_cpus_before] = os.sched_getaffinity(0)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item) -> Generator[None]:
    """A test that leaves this process on other CPUs fails, not a later one that starts children where it then is."""
    yield
    before, after = item.stash[_cpus_before], os.sched_getaffinity(0)
    if after != before:
        pin_process(before)
        pytest.fail(f"left this process on CPUs {sorted(after)} and found it on {sorted(before)}")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with slow tests come first: one that begins last keeps a single worker busy while the others are done."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)
