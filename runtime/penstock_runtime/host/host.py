"""The machine and its limits for this process, as one value."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from penstock.hardware import CpuIdentity
from penstock_runtime.host.cgroup import HostMemory, find_groups, read_memory
from penstock_runtime.host.cores import CoreGrant, grant_cores
from penstock_runtime.host.cpus import Core, amx_permitted_here, identify, read_cores, read_processors
from penstock_runtime.host.procfs import cpu_list, number, read_cpus, read_text

REAL_ROOT = Path("/")


@dataclass(frozen=True)
class Host:
    """The result of `read_host`. CPU numbers are the kernel's."""

    cpu: CpuIdentity
    online: tuple[int, ...]
    """All CPUs of the machine."""
    cores: tuple[Core, ...]
    """All physical cores of the machine."""
    affinity: tuple[int, ...]
    """The scheduler affinity of this process: the cpuset, narrowed for example by `taskset`."""
    cpuset: tuple[int, ...] | None
    """The cgroup's CPUs; None if they cannot be read."""
    quota: float | None
    """CPU quota in CPUs; None without a limit."""
    memory: HostMemory

    @property
    def allowed(self) -> tuple[int, ...]:
        """The online CPUs that this process may use: those in both affinity and cpuset."""
        allowed = set(self.affinity) & set(self.online)
        within = allowed.intersection(self.cpuset) if self.cpuset is not None else allowed
        # Just after a change of the cpuset it may not overlap the affinity; the kernel then uses the cpuset.
        return tuple(sorted(within or allowed or self.online))

    @property
    def usable(self) -> int:
        """Physical cores among the allowed CPUs."""
        return sum(1 for core in self.cores if set(core.cpus).intersection(self.allowed))

    def with_present_memory(self) -> Host:
        """A copy with the current memory: a model may have been loaded since."""
        return replace(self, memory=read_memory(REAL_ROOT))

    def usable_cores(self, asked: int | None = None) -> CoreGrant:
        """The cores to use for `asked` physical cores (None: all); HostError if there are fewer.

        With a smaller quota there are fewer, at least one, and a finding reports it.
        """
        return grant_cores(
            asked, cores=self.cores, online=self.online, allowed=self.allowed, cpuset=self.cpuset, quota=self.quota
        )


def read_host(root: Path = REAL_ROOT, *, amx_permitted: bool | None = None) -> Host:
    """Read the machine from `proc` and `sys` below `root`. Never fails: unreadable values keep their defaults.

    `amx_permitted` None asks the running kernel whether processes may use the AMX tiles; tests with a captured tree
    set it.
    """
    processors = read_processors(read_text(root, "/proc/cpuinfo") or "")
    affinity = _affinity(root)
    listed = [cpu for block in processors if (cpu := number(block.get("processor"))) is not None]
    online = read_cpus(root, "/sys/devices/system/cpu/online") or tuple(sorted(listed)) or affinity or (0,)
    sets, times = find_groups(root, "cpuset"), find_groups(root, "cpu")
    permitted = amx_permitted_here() if amx_permitted is None else amx_permitted
    return Host(
        cpu=identify(processors, amx_permitted=permitted),
        online=online,
        cores=read_cores(root, online, processors),
        affinity=affinity or online,
        cpuset=sets.cpuset if sets is not None else None,
        quota=times.quota if times is not None else None,
        memory=read_memory(root),
    )


def _affinity(root: Path) -> tuple[int, ...]:
    """The affinity, as `sched_getaffinity` returns it, from the status file."""
    for line in (read_text(root, "/proc/self/status") or "").splitlines():
        key, _, value = line.partition(":")
        if key == "Cpus_allowed_list":
            return cpu_list(value) or ()
    return ()
