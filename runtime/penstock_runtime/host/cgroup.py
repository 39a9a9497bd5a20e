"""Resource limits of this process: cgroup CPU quota, cpuset and memory (version 1, 2 or both), and machine memory.

Limits apply along the whole path from the process's own group up to the mount point of the tree. Inside a container the
mount point is usually the container's own group; the limits of the pod above it are not visible.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from penstock.errors import HostError
from penstock_runtime.host.procfs import key_values, number, read_cpus, read_text


@dataclass(frozen=True)
class Cgroups:
    """The cgroups of one controller, from the process's own one upwards."""

    root: Path
    version: int
    paths: tuple[str, ...]
    """Folders, such as `/sys/fs/cgroup/cpu/kubepods/pod1`."""

    @property
    def quota(self) -> float | None:
        """The lowest CPU quota of the groups, in CPUs; None without a limit."""
        limits = [limit for path in self.paths if (limit := self._quota(path)) is not None]
        return min(limits, default=None)

    def _quota(self, path: str) -> float | None:
        if self.version == 2:
            quota_text, _, period_text = (read_text(self.root, f"{path}/cpu.max") or "").partition(" ")
        else:
            quota_text = read_text(self.root, f"{path}/cpu.cfs_quota_us") or ""
            period_text = read_text(self.root, f"{path}/cpu.cfs_period_us") or ""
        quota, period = number(quota_text), number(period_text)
        return quota / period if quota is not None and period is not None and quota > 0 and period > 0 else None

    @property
    def cpuset(self) -> tuple[int, ...] | None:
        """The CPUs of the nearest group with a cpuset; None if none can be read."""
        names = ("cpuset.cpus.effective",) if self.version == 2 else ("cpuset.effective_cpus", "cpuset.cpus")
        candidates = (read_cpus(self.root, f"{path}/{name}") for path in self.paths for name in names)
        return next((cpus for cpus in candidates if cpus), None)

    @property
    def memory(self) -> Iterator[tuple[int, int]]:
        """Limit and usage in bytes of each group that has a limit.

        Usage is without the reclaimable file cache, active and inactive. Shared memory (tmpfs) counts as used.
        """
        limit_name, use_name, prefix = (
            ("memory.max", "memory.current", "")
            if self.version == 2
            else ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_")
        )
        for path in self.paths:
            limit = number(read_text(self.root, f"{path}/{limit_name}"))
            use = number(read_text(self.root, f"{path}/{use_name}"))
            # Version 1 has no value for "no limit": it shows 2^63 rounded down to a page.
            if limit is not None and 0 < limit < 2**62:
                stat = key_values(read_text(self.root, f"{path}/memory.stat"))
                cache = stat.get(f"{prefix}inactive_file", 0) + stat.get(f"{prefix}active_file", 0)
                yield limit, max(0, (use or 0) - cache)


def find_groups(root: Path, controller: str) -> Cgroups | None:
    """The groups of the controller `cpu`, `cpuset` or `memory`; None if no such tree is mounted."""
    own = _own_groups(read_text(root, "/proc/self/cgroup") or "")
    mounts = list(_mounts(read_text(root, "/proc/self/mountinfo") or ""))
    for version in (1, 2):
        for mount in mounts:
            if mount.version != version or (version == 1 and controller not in mount.controllers):
                continue
            path = own.get(controller if version == 1 else "")
            if path is not None:
                return Cgroups(root, version, _path_upwards(root, mount, path))
    return None


@dataclass(frozen=True)
class _Mount:
    version: int
    controllers: frozenset[str]
    base: str
    """The mounted group: `/`, or the container's own group."""
    point: str


def _own_groups(text: str) -> dict[str, str]:
    """`/proc/self/cgroup`: the process's group by controller; version 2 under the empty name."""
    groups: dict[str, str] = {}
    for line in text.splitlines():
        fields = line.split(":", 2)
        if len(fields) == 3:
            for controller in fields[1].split(","):
                groups[controller] = fields[2]
    return groups


def _mounts(text: str) -> Iterator[_Mount]:
    """The cgroup lines of `/proc/self/mountinfo`."""
    for line in text.splitlines():
        left, _, right = line.partition(" - ")
        before, after = left.split(), right.split()
        if len(before) < 5 or len(after) < 3 or after[0] not in {"cgroup", "cgroup2"}:
            continue
        yield _Mount(
            version=2 if after[0] == "cgroup2" else 1,
            controllers=frozenset(after[2].split(",")),
            base=_unescape(before[3]),
            point=_unescape(before[4]),
        )


def _path_upwards(root: Path, mount: _Mount, path: str) -> tuple[str, ...]:
    """Folders from the process's group up to the mount point; only the mount point if the group is not visible."""
    group, base = PurePosixPath(path), PurePosixPath(mount.base)
    inside = ".." not in group.parts and group.is_relative_to(base)
    below = group.relative_to(base) if inside else PurePosixPath()
    folder = PurePosixPath(mount.point) / below
    # In a cgroup namespace the group may be outside of this mount.
    if not (root / str(folder).lstrip("/")).is_dir():
        folder, below = PurePosixPath(mount.point), PurePosixPath()
    return tuple(str(step) for step in (folder, *list(folder.parents)[: len(below.parts)]))


def _unescape(text: str) -> str:
    """Decode the octal escapes of spaces and backslashes in mount paths."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text)


@dataclass(frozen=True)
class HostMemory:
    """Memory of the machine and of the cgroup, in bytes."""

    total: int
    """Memory of the machine."""
    limit: int | None
    """The lowest cgroup limit; None if there is none below the machine's memory."""
    available: int
    """Free memory within the limit and the machine; file cache counts as free."""


def read_memory(root: Path) -> HostMemory:
    """Read `/proc/meminfo` and the cgroup's limits below `root`; zeros if neither can be read."""
    meminfo = key_values(read_text(root, "/proc/meminfo"))
    total = meminfo.get("MemTotal", 0) * 1024
    available = meminfo.get("MemAvailable", meminfo.get("MemFree", 0)) * 1024
    groups = find_groups(root, "memory")
    limits = list(groups.memory) if groups is not None else []
    tightest = min((limit for limit, _ in limits), default=None)
    free = [max(0, limit - used) for limit, used in limits]
    return HostMemory(
        total=total,
        limit=tightest if tightest is not None and (total == 0 or tightest < total) else None,
        available=min([available, *free]) if total else min(free, default=0),
    )


def require_memory(memory: HostMemory, needed: int, what: str) -> None:
    """HostError if `needed` bytes are not available; `what` names the purpose, such as `serving model X`.

    Does nothing if the machine's memory is unknown.
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
    """A readable size with three digits: `1.25 GiB`."""
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 999.5:  # rounds to 999 at most
            return f"{value:.3g} {unit}"
        value /= 1024
    return f"{value:.3g} TiB"


@dataclass(frozen=True)
class Throttling:
    """CPU throttling counters since the creation of the cgroup."""

    periods: int
    """Quota periods (usually 100 ms) in which the group ran."""
    throttled_periods: int
    throttled_seconds: float


def read_throttling(root: Path = Path("/")) -> Throttling | None:
    """The throttling counters of the process's own group; None without the cpu controller."""
    groups = find_groups(root, "cpu")
    if groups is None:
        return None
    values = key_values(read_text(root, f"{groups.paths[0]}/cpu.stat"))
    if "nr_periods" not in values:
        return None
    # Version 1 counts nanoseconds, version 2 microseconds.
    seconds = values.get("throttled_usec", 0) / 1e6 if groups.version == 2 else values.get("throttled_time", 0) / 1e9
    return Throttling(
        periods=values["nr_periods"], throttled_periods=values.get("nr_throttled", 0), throttled_seconds=seconds
    )
