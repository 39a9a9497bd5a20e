"""Which other programs ran on the measured processors, and which requests met them. From the kernel's own record of its
scheduler (tracefs, for root): it writes down nothing while only what is measured runs.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import click
import numpy as np
import numpy.typing as npt
import psutil

from penstock_bench.cell import CellResult

TRACEFS = Path("/sys/kernel/tracing")
EVENT = "events/sched/sched_stat_runtime"
"""The trace events: for each program that leaves a processor, and at every tick, how long it has run."""
BUFFER_KILOBYTES = 16_384
"""Of each processor."""
LEAST_SECONDS = 1e-4
"""Less of other programs than this is not counted: the kernel's own threads that carry packets."""

_LINE = re.compile(r"\[(\d+)\] \S+ +([\d.]+): sched_stat_runtime: comm=(.*) pid=\d+ runtime=(\d+)")


class Span(NamedTuple):
    """A program on a processor, from and to, seconds on the clock of `perf_counter`."""

    began: float
    ended: float
    program: str


@dataclass(frozen=True)
class Record:
    """What is being written down."""

    folder: Path

    def spans(self, cpus: Sequence[int]) -> list[Span]:
        """Of other programs on these processors, until now. A ClickException when there was no room for all."""
        for cpu in cpus:
            lost = re.search(r"^overrun: (\d+)", (self.folder / f"per_cpu/cpu{cpu}/stats").read_text(), re.MULTILINE)
            if lost and int(lost[1]):
                raise click.ClickException(f"too many programs ran to write them down: {lost[1]} entries are lost")
        return spans((self.folder / "trace").read_text(), cpus)


@contextmanager
def record(own: Sequence[int]) -> Iterator[Record]:
    """While it lasts, all programs but these processes are written down. A ClickException without the right to it."""
    threads = [thread.id for pid in own for thread in psutil.Process(pid).threads()]
    folder = TRACEFS / f"instances/penstock-{threads[0]}"
    try:
        folder.mkdir()
    except OSError as error:
        raise click.ClickException(
            f"--trace is for root, with tracefs in {TRACEFS} (mount -t tracefs tracefs {TRACEFS}): {error.strerror}"
        ) from None
    try:
        # That of time.perf_counter.
        (folder / "trace_clock").write_text("mono")
        (folder / "buffer_size_kb").write_text(str(BUFFER_KILOBYTES))
        (folder / EVENT / "filter").write_text(" && ".join(f"pid != {thread}" for thread in threads))
        (folder / EVENT / "enable").write_text("1")
        yield Record(folder)
    finally:
        (folder / EVENT / "enable").write_text("0")
        folder.rmdir()


def spans(trace: str, cpus: Sequence[int]) -> list[Span]:
    """What the kernel has written, as it writes it."""
    found = []
    for cpu, at, program, nanoseconds in _LINE.findall(trace):
        if int(cpu) in cpus:
            ended = float(at)
            found.append(Span(ended - int(nanoseconds) / 1e9, ended, program))
    return found


def most(others: Sequence[Span], count: int = 3) -> str:
    """The names of those that ran longest."""
    seconds: defaultdict[str, float] = defaultdict(float)
    for one in others:
        seconds[one.program] += one.ended - one.began
    return ", ".join(sorted(seconds, key=seconds.__getitem__, reverse=True)[:count])


def met(due: npt.NDArray[np.float64], ended: npt.NDArray[np.float64], others: Sequence[Span]) -> npt.NDArray[np.bool_]:
    """Which requests, by rising time at which they were due, met another program: it ran while they were under way, or
    while one was that was under way when they came. So what a server needs longer to catch up is its own.

    due, ended: (requests,), seconds on the clock of the spans.
    """
    if not others:
        return np.zeros(len(due), bool)
    edges = sorted([(one.began, 1) for one in others] + [(one.ended, -1) for one in others])
    times = np.array([at for at, _ in edges])
    running = np.cumsum([step for _, step in edges])
    before = np.concatenate(([0.0], np.cumsum(running[:-1] * np.diff(times))))
    itself = np.interp(ended, times, before) - np.interp(due, times, before) >= LEAST_SECONDS
    latest = np.maximum.accumulate(np.where(itself, ended, -np.inf))
    behind = np.concatenate(([-np.inf], latest[:-1])) > due
    return np.asarray(itself | behind)


def without(cell: CellResult, others: Sequence[Span]) -> CellResult:
    """The cell with those requests alone that met no other program."""
    ended = np.array(cell.ended_seconds)
    latencies = np.array(cell.latencies_milliseconds)
    alone = ~met(ended - latencies / 1e3, ended, others)
    return cell.model_copy(
        update={
            "latencies_milliseconds": tuple(latencies[alone].tolist()),
            "ended_seconds": tuple(ended[alone].tolist()),
        }
    )
