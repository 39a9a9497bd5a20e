"""What processes have used so far: processor time and memory."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from dataclasses import dataclass

import psutil


@dataclass(frozen=True)
class Usage:
    """Of some processes together, those that have ended left out."""

    seconds: float
    """CPU time, user and system."""
    resident_bytes: int

    @classmethod
    def of(cls, pids: Iterable[int]) -> Usage:
        """As of now."""
        seconds, resident = 0.0, 0
        for pid in pids:
            with contextlib.suppress(psutil.NoSuchProcess):
                process = psutil.Process(pid)
                times = process.cpu_times()
                seconds += times.user + times.system
                resident += process.memory_info().rss
        return cls(seconds, resident)


def family(pid: int) -> tuple[int, ...]:
    """A process and all its descendants; empty when there is no such process."""
    try:
        process = psutil.Process(pid)
        return (pid, *(child.pid for child in process.children(recursive=True)))
    except psutil.NoSuchProcess:
        return ()
