"""How long the threads of this process waited for a CPU while it measured something.

The kernel counts for each thread the time that it ran and the time that it waited on a run queue
(`/proc/<pid>/task/<tid>/schedstat`; Documentation/scheduler/sched-stats.rst), and for each CPU the time in which the
hypervisor ran another machine (`steal` in `/proc/stat`). On a quiet machine both hardly grow, except for the
microseconds that a thread takes to wake up.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

DISTURBED = 0.1
"""Share of waiting from which a single run is measured again. Threads that wake up wait for some 2 % of a run of half a
millisecond."""
NOT_QUIET = 0.05
"""Share of waiting of a whole search from which its figures are marked."""


@dataclass(frozen=True)
class CpuTime:
    """CPU time of the threads of this process, and time in which they waited for a CPU, in nanoseconds since they were
    started."""

    ran: int = 0
    waited: int = 0

    @classmethod
    def read(cls) -> CpuTime:
        """Of now; zeros where the kernel does not count (CONFIG_SCHED_INFO)."""
        ran = waited = 0
        with contextlib.suppress(OSError):
            for thread in Path("/proc/self/task").iterdir():
                with contextlib.suppress(OSError):  # it has just ended
                    fields = (thread / "schedstat").read_bytes().split()
                    ran, waited = ran + int(fields[0]), waited + int(fields[1])
        return cls(ran, waited + _stolen(os.sched_getaffinity(0)))

    def since(self, before: CpuTime) -> CpuTime:
        """What was added."""
        # A thread that ended takes its counts with it.
        return CpuTime(max(self.ran - before.ran, 0), max(self.waited - before.waited, 0))

    def __add__(self, other: CpuTime) -> CpuTime:
        return CpuTime(self.ran + other.ran, self.waited + other.waited)

    @property
    def share(self) -> float:
        """The share of waiting, 0 to 1."""
        return self.waited / (self.ran + self.waited) if self.waited else 0.0


def _stolen(cpus: set[int]) -> int:
    """Nanoseconds in which the hypervisor ran something else on these CPUs."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        tick = 1_000_000_000 // os.sysconf("SC_CLK_TCK")
        names = {f"cpu{number}" for number in cpus}
        with Path("/proc/stat").open(encoding="ascii") as lines:
            return sum(int(line.split()[8]) * tick for line in lines if line.split(" ", 1)[0] in names)
    return 0


class Contention:
    """Adds up the waiting in all measurements of a process."""

    def __init__(self, read: Callable[[], CpuTime] = CpuTime.read) -> None:
        self._read = read
        self.total = CpuTime()
        self.last = CpuTime()
        """Of the last measurement."""

    @contextmanager
    def measured(self) -> Iterator[None]:
        """What runs in the block counts."""
        before = self._read()
        yield
        self.last = self._read().since(before)
        self.total += self.last


CONTENTION = Contention()
"""Of this process. A candidate's process measures one thing at a time."""
