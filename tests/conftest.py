"""Fixtures and hooks for all tests."""

from __future__ import annotations

import gc
import os
import resource
import signal
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis.database import DirectoryBasedExampleDatabase

from penstock_runtime.host.cores import pin_process
from tests import distribution, unit
from tests.examples import FAILED_EXAMPLES, NEW_DRAWS, examples
from tests.process_state import ProcessState, signals_to_this_process_fail

# Machines differ and are shared: a slow example is no failure. The pytest timeout ends what hangs.
# An example that failed is tried first the next time, so that the repetition of a failed test fails as well.
settings.register_profile(
    "penstock",
    deadline=None,
    print_blob=True,
    max_examples=examples(100),
    derandomize=not NEW_DRAWS,
    database=DirectoryBasedExampleDatabase(FAILED_EXAMPLES) if NEW_DRAWS else None,
)
settings.load_profile("penstock")

# A Kubernetes for the tests that name one: `control_plane`, `kubectl` and others, described there.
pytest_plugins = ["testbed.fixtures"]

FEWEST_CPUS = 2
"""Some tests ask for two cores."""
OPEN_FILES = 16_384
"""More than a server needs by default: one that runs in a test process would raise the limit for the tests after it."""


def pytest_configure() -> None:
    """Allow as many open files as servers need, take signals, and leave each of several test processes another lowest
    CPU.

    A shell that starts the tests in the background, or `nohup`, makes every process below it ignore SIGINT or SIGHUP,
    which tests send.

    What asks for one core of a machine takes its first: candidates, replicas and servers of all test processes would
    queue for that one, with the others idle.
    """
    for number, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, handler)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if resource.RLIM_INFINITY != soft < OPEN_FILES:
        allowed = OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, OPEN_FILES)
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    worker = os.environ.get("PYTEST_XDIST_WORKER", "")
    cpus = sorted(os.sched_getaffinity(0))
    firsts = len(cpus) - FEWEST_CPUS + 1
    if worker and firsts > 1:
        pin_process(cpus[int(worker.removeprefix("gw")) % firsts :])


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Keep modules and tests out of garbage collections. They stay until the end, and each later collection, of a test
    or of pytest at the end, would look at these millions of objects again."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.fixture(autouse=True, scope="session")
def _no_test_signals_this_process() -> Iterator[None]:
    with signals_to_this_process_fail():
        yield


@pytest.fixture(autouse=True, scope="module")
def _file_leaves_the_process_as_it_was() -> Iterator[None]:
    """The fixtures of a file, too: this one is set up before them, and torn down after them."""
    with _leaves_the_process_as_it_was():
        yield


@pytest.fixture(autouse=True)
def _test_leaves_the_process_as_it_was(_file_leaves_the_process_as_it_was: None) -> Iterator[None]:
    """The test that changes this process fails, not a later one whose result depends on what was changed."""
    with _leaves_the_process_as_it_was():
        yield


@contextmanager
def _leaves_the_process_as_it_was() -> Iterator[None]:
    before = ProcessState.now()
    yield
    if differences := before.differences(ProcessState.now()):
        before.restore()
        pytest.fail("left this process changed: " + "; ".join(differences))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(unit.OPTION, action="store_true", help="only tests without root, cluster, browser and torch")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out files that are no unit tests before they are imported."""
    if not config.getoption(unit.OPTION):
        return None
    if collection_path.is_dir():
        return None if unit.holds_unit_files(collection_path) else True
    is_test = collection_path.match("test_*.py")
    return True if is_test and not unit.is_unit_file(collection_path) else None


def pytest_collection_modifyitems(items: list[pytest.Item], config: pytest.Config) -> None:
    """Groups of files come first, then files with slow tests: what begins last keeps a single worker busy while the
    others are done."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: (not distribution.is_grouped(item.nodeid), item.path not in slow))
    if config.getoption(unit.OPTION):
        others = [item for item in items if not unit.is_unit_test(item)]
        items[:] = [item for item in items if unit.is_unit_test(item)]
        config.hook.pytest_deselected(items=others)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With `--dist loadfile`, all files of a group go to one process."""
    return distribution.scheduling(config, log)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Record what was skipped and why, for `make test` (dev/tools/run_tests.py)."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    cache = getattr(session.config, "cache", None)
    if reporter is not None and cache is not None and not hasattr(session.config, "workerinput"):
        skipped = {(one.nodeid, one.longrepr[2].removeprefix("Skipped: ")) for one in reporter.stats.get("skipped", ())}
        cache.set("penstock/skipped", sorted(skipped))
