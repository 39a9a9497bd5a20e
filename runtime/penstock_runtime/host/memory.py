"""How much memory this process may still take."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from penstock.errors import HostError
from penstock_runtime.host.cgroup import find_groups
from penstock_runtime.host.files import key_values, read_text


@dataclass(frozen=True)
class Memory:
    """All in bytes."""

    total: int
    """Of the machine."""
    limit: int | None
    """Of the tightest cgroup; None without one, or when it is no tighter than the machine."""
    available: int
    """What can still be taken before the limit or the machine is full; file cache counts as free."""


def read_memory(root: Path) -> Memory:
    """Read `/proc/meminfo` and the cgroup's limits below `root`; zeros where neither can be read."""
    meminfo = key_values(read_text(root, "/proc/meminfo"))
    total = meminfo.get("MemTotal", 0) * 1024
    available = meminfo.get("MemAvailable", meminfo.get("MemFree", 0)) * 1024
    groups = find_groups(root, "memory")
    limits = list(groups.memory) if groups is not None else []
    tightest = min((limit for limit, _ in limits), default=None)
    free = [max(0, limit - used) for limit, used in limits]
    return Memory(
        total=total,
        limit=tightest if tightest is not None and (total == 0 or tightest < total) else None,
        available=min([available, *free]) if total else min(free, default=0),
    )


def require_memory(memory: Memory, needed: int, what: str) -> None:
    """HostError when `needed` bytes are not available; `what` says what for, such as `serving model X`.

    Does nothing where the machine does not tell how much it has.
    """
    if needed <= memory.available or (memory.total == 0 and memory.limit is None):
        return
    if memory.limit is not None:
        where = f"of the limit of {size(memory.limit)}"
        remedy = f"Raise the memory limit of this container by {size(needed - memory.available)}, or use fewer streams"
    else:
        where = f"of this machine's {size(memory.total)}"
        remedy = "Free memory on this machine, or take a larger one"
    raise HostError(f"{what} needs {size(needed)}, but {size(memory.available)} {where} are free", remedy=remedy)


def size(count: int) -> str:
    """Bytes for people, rounded to three figures: `1.25 GiB`."""
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 999.5:  # rounds to 999 at most
            return f"{value:.3g} {unit}"
        value /= 1024
    return f"{value:.3g} TiB"
