"""Pinning of a process to its cores, on the real kernel, in a child process."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from penstock.errors import HostError
from penstock_runtime.host import pin_process, read_host
from penstock_runtime.host.cores import STREAM_NICENESS

CHILD = """
import os, threading
from penstock_runtime.host import is_on_one_core, pin_process, read_host
stop, started, ids = threading.Event(), threading.Event(), []
def work():
    ids.append(threading.get_native_id()); started.set(); stop.wait()
early = threading.Thread(target=work); early.start(); started.wait()
cpu = min(os.sched_getaffinity(0))
print(is_on_one_core() == (len(os.sched_getaffinity(0)) == 1))
pin_process([cpu])
print(is_on_one_core())
late = []
thread = threading.Thread(target=lambda: late.append(os.sched_getaffinity(0))); thread.start(); thread.join()
host = read_host()
print(os.sched_getaffinity(0) == os.sched_getaffinity(ids[0]) == late[0] == set(host.affinity) == {cpu})
print(host.usable_cores().cpus == (cpu,))
stop.set(); early.join()
"""


def test_earlier_and_later_threads_run_on_the_pinned_cores() -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    child = subprocess.run([sys.executable, "-c", CHILD], capture_output=True, text=True, env=environment, check=True)
    assert child.stdout.split() == ["True"] * 4


def test_a_cpu_that_is_not_there_is_a_clear_error() -> None:
    before = os.sched_getaffinity(0)
    with pytest.raises(HostError, match="cannot be kept on CPUs 4000"):
        pin_process([4000])
    assert os.sched_getaffinity(0) == before


def test_no_cpu_at_all_is_a_clear_error() -> None:
    with pytest.raises(HostError, match=r"cannot be kept on CPUs \(none\)"):
        pin_process([])


STREAMS = """
import json, os, threading
from penstock_runtime.host import pin_process, place_stream
cpus = sorted(os.sched_getaffinity(0))[:2]
pin_process(cpus)
found = []
def work(stream, streams):
    me = threading.get_native_id()
    place_stream(me, stream, streams)
    batch = os.sched_getscheduler(0) == os.SCHED_BATCH
    found.append([sorted(os.sched_getaffinity(0)), os.getpriority(os.PRIO_PROCESS, me), batch])
for stream, streams in ((0, 2), (1, 2), (0, 3), (0, 1)):
    thread = threading.Thread(target=work, args=(stream, streams)); thread.start(); thread.join()
print(json.dumps([cpus, os.getpriority(os.PRIO_PROCESS, 0), found]))
"""


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="two streams need two CPUs")
def test_as_many_streams_as_cpus_have_one_each_and_let_the_loop_go_first() -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    child = subprocess.run([sys.executable, "-c", STREAMS], capture_output=True, text=True, env=environment, check=True)
    cpus, loop, found = json.loads(child.stdout)

    low = min(loop + STREAM_NICENESS, 19)
    assert found == [[[cpus[1]], low, True], [[cpus[0]], low, True], [cpus, loop, False], [cpus, loop, False]]


def test_the_cpus_of_this_machine_are_those_of_the_kernels_affinity() -> None:
    host = read_host()
    assert set(host.affinity) == os.sched_getaffinity(0)
    assert set(host.allowed) <= os.sched_getaffinity(0)
    assert 1 <= host.usable <= len(host.allowed)
    assert host.memory.total > 0
    assert 0 < host.memory.available <= host.memory.total
