"""Processes are started, found again and ended, and are not mistaken for others."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

from testbed.daemon import Daemon, Process

PYTHON = Path(sys.executable)
IGNORES_SIGTERM = """
import signal
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("here", flush=True)
while True:
    signal.pause()
"""


def started(folder: Path, code: str, name: str = "program") -> Daemon:
    """A daemon that runs Python code which prints `here` once it is ready."""
    daemon = Daemon(name, folder)
    daemon.start(PYTHON, [name, "-c", code])
    deadline = time.monotonic() + 60
    while "here" not in daemon.last_words():
        assert daemon.process, daemon.last_words()
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return daemon


def test_program_that_ignores_the_first_signal_is_killed(tmp_path: Path) -> None:
    daemon = started(tmp_path, IGNORES_SIGTERM)
    process = daemon.process

    daemon.stop(grace_seconds=0.2)

    assert process is not None
    assert not process.alive


def test_process_with_a_reused_id_is_not_stopped(tmp_path: Path) -> None:
    own = Process.current()
    stranger = Process(own.pid, own.started_ticks + 1)
    stranger.write(tmp_path / "pids" / "program.json")

    Daemon("program", tmp_path).stop(grace_seconds=0)

    assert own.alive  # it is this process
    assert not stranger.alive


@pytest.mark.parametrize("text", ["", "{", '{"pid": "x", "started_ticks": 1}', '{"pid": 1}'])
def test_broken_record_is_no_process(text: str, tmp_path: Path) -> None:
    record = tmp_path / "program.json"
    record.write_text(text)

    assert Process.read(record) is None
