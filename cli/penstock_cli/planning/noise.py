"""What else this machine does while a server on it is measured: other programs, and the hypervisor."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import psutil

T = TypeVar("T")
LOOK_SECONDS = 1.0
"""How long the machine is watched before the load, while the server is idle."""
MOST_NAMED = 3


@dataclass(frozen=True)
class Noise:
    """Of the server's CPUs."""

    busy: float
    """Share that other programs used, before the load."""
    steal: float
    """Share that the hypervisor took, during the load."""
    load_average: float
    """Of the last minute, before the load."""
    programs: tuple[str, ...]
    """Names of those that used the most, before the load."""

    @property
    def share(self) -> float:
        """Of the CPUs, to all others."""
        return min(1.0, self.busy + self.steal)


def watch(cpus: tuple[int, ...], measure: Callable[[], T]) -> tuple[T, Noise]:
    """Look at these logical CPUs (empty: all) for `LOOK_SECONDS`, then measure; the result, and the noise."""
    load_average = os.getloadavg()[0]
    processes = {process.pid: process for process in psutil.process_iter(["name"])}
    for process in processes.values():
        _percent(process)
    before = _times(cpus)
    time.sleep(LOOK_SECONDS)
    quiet = _times(cpus)
    named = sorted(((_percent(process), process.info["name"] or "") for process in processes.values()), reverse=True)
    found = measure()
    after = _times(cpus)
    programs = tuple(dict.fromkeys(name for percent, name in named if percent >= 5))[:MOST_NAMED]
    return found, Noise(_share(before, quiet, "idle"), _share(quiet, after, "steal"), load_average, programs)


def _percent(process: psutil.Process) -> float:
    try:
        return 0.0 if process.pid == os.getpid() else float(process.cpu_percent())
    except psutil.Error:
        return 0.0


def _times(cpus: tuple[int, ...]) -> dict[str, float]:
    """Seconds of these CPUs together: all, not busy (idle or waiting for a disk), and stolen."""
    every = psutil.cpu_times(percpu=True)
    chosen = [every[cpu] for cpu in cpus if cpu < len(every)] or every
    # Guests' time is part of user and nice.
    total = sum(sum(one) - getattr(one, "guest", 0) - getattr(one, "guest_nice", 0) for one in chosen)
    idle = sum(one.idle + getattr(one, "iowait", 0) for one in chosen)
    return {"total": total, "idle": idle, "steal": sum(getattr(one, "steal", 0) for one in chosen)}


def _share(begin: dict[str, float], end: dict[str, float], of: str) -> float:
    """The stolen share of an interval, or for `idle` the share that was not idle."""
    total = end["total"] - begin["total"]
    share = (end[of] - begin[of]) / total if total > 0 else 0.0
    return max(0.0, min(1.0, 1 - share if of == "idle" else share))
