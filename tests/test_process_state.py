"""The checks of tests/conftest.py: a test that leaves this process changed fails, and the next one finds it restored; a
test that would send this process a signal fails."""

from __future__ import annotations

import logging
import os
import re
import resource
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.process_state import ProcessState

ROOT = Path(__file__).parents[1]

LEAKING = """
import os
import signal

import pytest

def test_leaks():
    os.environ["PENSTOCK_LEFT"] = "1"

def test_depends_on_it():
    assert "PENSTOCK_LEFT" not in os.environ

def raise_it(number):
    signal.raise_signal(number)

@pytest.mark.parametrize("send", [lambda number: os.kill(os.getpid(), number), raise_it])
def test_signals_itself(send):
    send(signal.SIGTERM)

def test_a_forked_process_may():
    if not (child := os.fork()):
        os.kill(os.getpid(), signal.SIGKILL)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL
"""


def lower_the_limit_of_open_files() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft - 1, hard))


CHANGES: dict[str, Callable[[], object]] = {
    "environment": lambda: os.environ.update(PENSTOCK_LEFT="1"),
    "directory": lambda: os.chdir("/"),
    "umask": lambda: os.umask(0o137),
    "signal_handlers": lambda: signal.signal(signal.SIGUSR2, signal.SIG_IGN),
    "limits": lower_the_limit_of_open_files,
    "module_search_path": lambda: sys.path.insert(0, "/nowhere"),
    "recursion_limit": lambda: sys.setrecursionlimit(sys.getrecursionlimit() + 1),
    "logging": lambda: logging.root.addHandler(logging.NullHandler()),
    "excepthook": lambda: setattr(sys, "excepthook", print),
}


@pytest.mark.parametrize("field", CHANGES)
def test_a_change_is_found_and_undone(field: str) -> None:
    before = ProcessState.now()

    CHANGES[field]()
    differences = before.differences(ProcessState.now())
    before.restore()

    assert [one.partition(":")[0].partition("[")[0] for one in differences] == [field]
    assert before.differences(ProcessState.now()) == []


def test_a_test_that_changes_or_signals_the_process_fails_and_the_next_ones_do_not(tmp_path: Path) -> None:
    file = tmp_path / "test_leaking.py"
    file.write_text(LEAKING)
    options = ["-q", "-p", "no:cacheprovider", "-p", "tests.conftest"]

    result = subprocess.run(
        [sys.executable, "-m", "pytest", *options, file], cwd=ROOT, capture_output=True, text=True, check=False
    )

    assert "2 failed, 3 passed, 1 error" in result.stdout
    # The summary may name the reasons once more.
    assert len(re.findall(r"^E +Failed: signal 15 to the process of the tests", result.stdout, re.MULTILINE)) == 2
    assert "environment['PENSTOCK_LEFT']: None before, '1' after" in result.stdout
