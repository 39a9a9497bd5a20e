"""The resources of this process on its machine: CPUs, CPU quota, memory, instruction set. Linux only.

`read_host()` reads them once at start; `Host.usable_cores(n)` chooses the cores to use, with findings about them.
"""

from penstock_runtime.host.cgroup import HostMemory, Throttling, read_throttling, require_memory
from penstock_runtime.host.cores import CoreGrant, is_on_one_core, lower_priority, pin_process, place_stream
from penstock_runtime.host.cpus import Core
from penstock_runtime.host.host import Host, read_host

__all__ = [
    "Core",
    "CoreGrant",
    "Host",
    "HostMemory",
    "Throttling",
    "is_on_one_core",
    "lower_priority",
    "pin_process",
    "place_stream",
    "read_host",
    "read_throttling",
    "require_memory",
]
