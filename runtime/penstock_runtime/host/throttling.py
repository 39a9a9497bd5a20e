"""How often the kernel has stopped this process's group because its CPU quota was used up."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from penstock_runtime.host.cgroup import find_groups
from penstock_runtime.host.files import key_values, read_text


@dataclass(frozen=True)
class Throttling:
    """Counters since the group exists."""

    periods: int
    """Quota periods (mostly 100 ms) in which the group ran."""
    throttled_periods: int
    throttled_seconds: float


def read_throttling(root: Path = Path("/")) -> Throttling | None:
    """The counters of the process's own group; None without the cpu controller."""
    groups = find_groups(root, "cpu")
    if groups is None:
        return None
    values = key_values(read_text(root, f"{groups.paths[0]}/cpu.stat"))
    if "nr_periods" not in values:
        return None
    # Version 1 counts nanoseconds, version 2 microseconds.
    seconds = values.get("throttled_usec", 0) / 1e6 if groups.version == 2 else values.get("throttled_time", 0) / 1e9
    return Throttling(
        periods=values["nr_periods"],
        throttled_periods=values.get("nr_throttled", 0),
        throttled_seconds=seconds,
    )
