"""Where this process stands in the cgroup tree, version 1, 2 or both, and what that limits.

Limits count along the whole path from the process's own group up to where the tree is mounted; inside a container the
mount is mostly the container's own group, and what the pod above it is limited to cannot be seen.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from penstock_runtime.host.files import key_values, number, read_cpus, read_text


@dataclass(frozen=True)
class Groups:
    """The groups of one controller, from the process's own upwards."""

    root: Path
    version: int
    paths: tuple[str, ...]
    """Folders as the kernel names them, such as `/sys/fs/cgroup/cpu/kubepods/pod1`."""

    @property
    def quota(self) -> float | None:
        """CPUs' worth of time that the tightest group allows; None without a limit."""
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
        """The CPUs of the nearest group that has a set; None when none can be read."""
        names = ("cpuset.cpus.effective",) if self.version == 2 else ("cpuset.effective_cpus", "cpuset.cpus")
        candidates = (read_cpus(self.root, f"{path}/{name}") for path in self.paths for name in names)
        return next((cpus for cpus in candidates if cpus), None)

    @property
    def memory(self) -> Iterator[tuple[int, int]]:
        """Limit and use in bytes of each group that has a limit.

        Use is without file cache that can be dropped: what was read twice (`active_file`) as well as the rest. Memory
        that is shared through files (tmpfs) is in neither.
        """
        limit_name, use_name, prefix = (
            ("memory.max", "memory.current", "")
            if self.version == 2
            else ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_")
        )
        for path in self.paths:
            limit = number(read_text(self.root, f"{path}/{limit_name}"))
            use = number(read_text(self.root, f"{path}/{use_name}"))
            # Version 1 has no word for "no limit": it shows 2^63 rounded down to a page.
            if limit is not None and 0 < limit < 2**62:
                stat = key_values(read_text(self.root, f"{path}/memory.stat"))
                cache = stat.get(f"{prefix}inactive_file", 0) + stat.get(f"{prefix}active_file", 0)
                yield limit, max(0, (use or 0) - cache)


def find_groups(root: Path, controller: str) -> Groups | None:
    """The groups of `cpu`, `cpuset` or `memory`; None when no such tree is mounted."""
    own = _own_groups(read_text(root, "/proc/self/cgroup") or "")
    mounts = list(_mounts(read_text(root, "/proc/self/mountinfo") or ""))
    for version in (1, 2):
        for mount in mounts:
            if mount.version != version or (version == 1 and controller not in mount.controllers):
                continue
            path = own.get(controller if version == 1 else "")
            if path is not None:
                return Groups(root, version, _path_upwards(root, mount, path))
    return None


@dataclass(frozen=True)
class _Mount:
    version: int
    controllers: frozenset[str]
    base: str
    """The group that is mounted: `/`, or the container's own."""
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
    """Folders from the process's group up to the mount point; the mount point alone when the group is not in sight."""
    group, base = PurePosixPath(path), PurePosixPath(mount.base)
    inside = ".." not in group.parts and group.is_relative_to(base)
    below = group.relative_to(base) if inside else PurePosixPath()
    folder = PurePosixPath(mount.point) / below
    # A namespace may name a group that this mount does not show.
    if not (root / str(folder).lstrip("/")).is_dir():
        folder, below = PurePosixPath(mount.point), PurePosixPath()
    return tuple(str(step) for step in (folder, *list(folder.parents)[: len(below.parts)]))


def _unescape(text: str) -> str:
    """Mount paths write blanks and backslashes in octal."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text)
