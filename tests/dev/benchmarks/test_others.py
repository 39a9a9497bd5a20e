"""Which requests overlapped with other programs, from the kernel's scheduling records."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from pathlib import Path

import click
import numpy as np
import pytest

from benchmarks.others import TRACEFS, Span, met, most, record, spans, without
from penstock_bench.cell import CellResult

MAY_TRACE = os.access(TRACEFS / "instances", os.W_OK)


def other(began: float, ended: float, program: str = "agent") -> Span:
    return Span(began, ended, program)


@pytest.mark.parametrize(
    ("requests", "others", "expected"),
    [
        pytest.param([(0.0, 1.0), (2.0, 3.0)], [], [False, False], id="no other process"),
        pytest.param([(0.0, 1.0), (2.0, 3.0)], [other(2.5, 2.6)], [False, True], id="while it was under way"),
        pytest.param([(0.0, 1.0), (2.0, 3.0)], [other(1.2, 1.8)], [False, False], id="between two"),
        pytest.param([(0.0, 1.0)], [other(0.5, 0.50005)], [False], id="too short to count"),
        pytest.param([(0.0, 1.0)], [other(0.5, 0.50006), other(0.7, 0.70006)], [True], id="short ones add up"),
        pytest.param([(0.0, 1.0)], [other(0.5, 0.50006), other(0.5, 0.50006)], [True], id="on two processors"),
        pytest.param([(1.0, 2.0)], [other(0.0, 9.0)], [True], id="all the time"),
        pytest.param([(0.0, 5.0), (1.0, 6.0)], [other(0.1, 0.4)], [True, True], id="behind one that met it"),
        pytest.param(
            [(0.0, 5.0), (4.0, 6.0), (5.5, 7.0)], [other(0.1, 0.4)], [True, True, False], id="not behind one behind it"
        ),
    ],
)
def test_a_request_overlaps_what_runs_at_the_same_time(
    requests: list[tuple[float, float]], others: list[Span], expected: list[bool]
) -> None:
    due, ended = np.array(requests).T
    assert met(due, ended, others).tolist() == expected


def test_a_cell_keeps_only_requests_without_overlap() -> None:
    cell = CellResult(seconds=4, latencies_milliseconds=(1000.0, 500.0), ended_seconds=(11.0, 13.0))

    left = without(cell, [other(10.2, 10.4)])

    assert (left.latencies_milliseconds, left.ended_seconds) == ((500.0,), (13.0,))
    assert without(cell, []) == cell


def test_the_kernels_lines_are_read() -> None:
    trace = """# tracer: nop
#
            bash-19465   [000] d..2. 48784.743349: sched_stat_runtime: comm=bash pid=19465 runtime=3203829 [ns]
     kworker/1:2-18      [001] dN.2. 48784.500000: sched_stat_runtime: comm=a name pid=18 runtime=500000000 [ns]
          <idle>-0       [001] d..2. 48784.743577: sched_stat_runtime: comm=late pid=7 runtime=10 [ns]
"""
    (bash,) = spans(trace, [0])
    assert (bash.began, bash.ended) == pytest.approx((48784.740145, 48784.743349), abs=1e-6)
    found = spans(trace, [1])
    assert [one.program for one in found] == ["a name", "late"]
    assert (found[0].began, found[0].ended) == pytest.approx((48784.0, 48784.5), abs=1e-6)
    assert most([*found, bash], 2) == "a name, bash"


@pytest.mark.skipif(not MAY_TRACE, reason=f"only root may have the kernel's record ({TRACEFS})")
def test_other_processes_are_read_from_the_kernel(tmp_path: Path) -> None:
    binary = shutil.which("yes")
    assert binary is not None
    programs = {}
    for name in ("measured", "stranger"):
        shutil.copy(binary, tmp_path / name)
        programs[name] = subprocess.Popen([str(tmp_path / name)], stdout=subprocess.DEVNULL)
    try:
        begin = time.perf_counter()
        with record([os.getpid(), programs["measured"].pid]) as written:
            found: list[Span] = []
            # The program runs at some time, even on a busy machine; the test's own limit ends a hang.
            while not any(one.program == "stranger" and one.ended > begin for one in found):
                time.sleep(0.05)
                found = written.spans(range(os.cpu_count() or 1))
    finally:
        for process in programs.values():
            process.kill()
            process.wait()
    assert all(one.program != "measured" for one in found)
    # On the clock of the measuring client.
    mine = [one for one in found if one.program == "stranger"]
    assert begin - 10 < mine[-1].began < mine[-1].ended <= time.perf_counter()
    assert not list((TRACEFS / "instances").glob(f"penstock-{os.getpid()}"))


def test_without_the_permission_an_error_names_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.others.TRACEFS", tmp_path / "nothing")

    with pytest.raises(click.ClickException, match="--trace is for root"), record([os.getpid()]):
        pytest.fail("there is no such file system")
