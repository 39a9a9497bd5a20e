"""The machine as this process sees it, in one value."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from penstock.hardware import CpuIdentity
from penstock_runtime.host.cgroup import find_groups
from penstock_runtime.host.cpuinfo import amx_permitted_here, identify, read_processors
from penstock_runtime.host.files import cpu_list, number, read_cpus, read_text
from penstock_runtime.host.grant import CoreGrant, grant_cores
from penstock_runtime.host.memory import Memory, read_memory
from penstock_runtime.host.topology import Core, read_cores

REAL_ROOT = Path("/")


@dataclass(frozen=True)
class Host:
    """What `read_host` found. CPU numbers are the kernel's."""

    cpu: CpuIdentity
    online: tuple[int, ...]
    """All CPUs of the machine."""
    cores: tuple[Core, ...]
    """All physical cores of the machine."""
    affinity: tuple[int, ...]
    """Where the scheduler may put this process: the cpuset, narrowed by `taskset` or the like."""
    cpuset: tuple[int, ...] | None
    """The cgroup's CPUs; None when none can be read."""
    quota: float | None
    """CPUs' worth of time; None without a limit."""
    memory: Memory

    @property
    def allowed(self) -> tuple[int, ...]:
        """The CPUs that this process may use: affinity and cpuset, as far as they are online."""
        allowed = set(self.affinity) & set(self.online)
        within = allowed.intersection(self.cpuset) if self.cpuset is not None else allowed
        # A cpuset that has just changed may not overlap the affinity for a moment; the kernel then goes by the former.
        return tuple(sorted(within or allowed or self.online))

    @property
    def usable(self) -> int:
        """Physical cores among the allowed CPUs."""
        return sum(1 for core in self.cores if set(core.cpus).intersection(self.allowed))

    def with_present_memory(self) -> Host:
        """The same with the memory as it is now: a model may have been loaded since."""
        return replace(self, memory=read_memory(REAL_ROOT))

    def usable_cores(self, asked: int | None = None) -> CoreGrant:
        """The cores to use when `asked` physical cores are wanted (None: all); HostError when there are fewer.

        A smaller quota grants fewer, at least one, and says so in the findings.
        """
        return grant_cores(
            asked,
            cores=self.cores,
            online=self.online,
            allowed=self.allowed,
            cpuset=self.cpuset,
            quota=self.quota,
        )


def read_host(root: Path = REAL_ROOT, *, amx_permitted: bool | None = None) -> Host:
    """Read the machine from `proc` and `sys` below `root`. Never fails: what cannot be read is left at its default.

    `amx_permitted` None asks the running kernel whether processes may use the AMX tiles; tests with a captured tree
    say it.
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
    """What `sched_getaffinity` returns, as the kernel writes it into the status file."""
    for line in (read_text(root, "/proc/self/status") or "").splitlines():
        key, _, value = line.partition(":")
        if key == "Cpus_allowed_list":
            return cpu_list(value) or ()
    return ()
