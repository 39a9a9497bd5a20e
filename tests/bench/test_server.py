"""Server processes: started on given CPUs, paused and resumed, ended with all their children."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import psutil
import pytest

from penstock_bench import server as server_module
from penstock_bench.cell import MeasurementFailed
from penstock_bench.server import MeasuredServer, free_port
from tests.bench.conftest import STUB, StartStub, ends

FIRST_CPU = min(os.sched_getaffinity(0))


def status(pid: int) -> str:
    return str(psutil.Process(pid).status())


def is_alive(pid: int) -> bool:
    """Process 1 collects zombies whose parent has ended; in a container it may not do so."""
    return psutil.pid_exists(pid) and status(pid) != psutil.STATUS_ZOMBIE


def test_a_paused_server_stops_and_resumes(start_stub: StartStub) -> None:
    server = start_stub(habit="child")
    assert len(server.pids) == 2

    server.pause()
    assert {status(pid) for pid in server.pids} == {psutil.STATUS_STOPPED}

    server.resume()
    with urllib.request.urlopen(f"{server.url}/health", timeout=60) as answer:
        assert answer.status == 200


def test_stop_ends_children_too_even_while_paused(start_stub: StartStub) -> None:
    server = start_stub(habit="child")
    pids = server.pids
    server.pause()

    server.stop()

    assert not [pid for pid in pids if is_alive(pid)]


def test_a_server_that_ignores_the_signal_is_killed(start_stub: StartStub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "STOP_SECONDS", 0.3)
    server = start_stub(habit="sleepy")
    (pid,) = server.pids

    server.stop()

    assert not is_alive(pid)


LEAVES = """
import sys, time
from penstock_bench.server import MeasuredServer, free_port
port = free_port()
server = MeasuredServer.start("stub", [sys.executable, sys.argv[1], str(port)], port=port)
server.wait_until_ready("/health", seconds=60)
server.pause()
print(*server.pids, flush=True)
time.sleep(600)
"""


def test_a_server_ends_with_its_parent_even_while_paused() -> None:
    words = [sys.executable, "-c", LEAVES, str(STUB)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as starter:
        assert starter.stdout is not None
        pid = int(starter.stdout.readline())
        starter.kill()

    assert ends(pid)


def test_threads_with_another_affinity_get_the_cpus_of_the_server(start_stub: StartStub) -> None:
    server = start_stub(habit="threads", cpus=(FIRST_CPU,))
    (pid,) = server.pids

    server.confine()

    allowed = [os.sched_getaffinity(thread.id) for thread in psutil.Process(pid).threads()]
    assert len(allowed) >= 2
    assert all(cpus == {FIRST_CPU} for cpus in allowed)


def test_the_error_of_a_server_that_ends_while_starting_has_its_last_output() -> None:
    port = free_port()
    server = MeasuredServer.start("broken", [sys.executable, "-c", "raise SystemExit('no model here')"], port=port)
    try:
        with pytest.raises(MeasurementFailed, match=r"broken ended while starting \(1\): no model here"):
            server.wait_until_ready("/health", seconds=60)
    finally:
        server.stop()


def test_a_server_that_never_gets_ready_is_an_error_in_time() -> None:
    server = MeasuredServer.start("idle", [sys.executable, "-c", "import time; time.sleep(600)"], port=free_port())
    try:
        begun = time.monotonic()
        with pytest.raises(MeasurementFailed, match="idle is not ready after 0 s: it printed nothing"):
            server.wait_until_ready("/health", seconds=0.3)
        assert time.monotonic() - begun < 30
    finally:
        server.stop()


def test_a_command_that_does_not_exist_is_named(tmp_path: Path) -> None:
    with pytest.raises(MeasurementFailed, match=r"ghost does not start: .*no-such-program: No such file"):
        MeasuredServer.start("ghost", [str(tmp_path / "no-such-program")], port=free_port())


def test_a_remote_server_is_not_paused_or_stopped(start_stub: StartStub) -> None:
    ours = start_stub()
    elsewhere = MeasuredServer("elsewhere", ours.url)

    elsewhere.pause()
    elsewhere.stop()

    assert (elsewhere.pids, elsewhere.is_ours, elsewhere.paused) == ((), False, False)
    elsewhere.wait_until_ready("/health", seconds=60)
