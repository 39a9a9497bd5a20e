"""What this machine gives to this process: CPUs, quota, memory, instruction set. Linux only.

`read_host()` reads it once at start; `Host.usable_cores(n)` says which cores to use and what is odd about them.
"""

from penstock_runtime.host.grant import CoreGrant
from penstock_runtime.host.host import Host, read_host
from penstock_runtime.host.memory import Memory, require_memory
from penstock_runtime.host.pin import is_on_one_core, pin_process, place_stream
from penstock_runtime.host.throttling import Throttling, read_throttling
from penstock_runtime.host.topology import Core

__all__ = [
    "Core",
    "CoreGrant",
    "Host",
    "Memory",
    "Throttling",
    "is_on_one_core",
    "pin_process",
    "place_stream",
    "read_host",
    "read_throttling",
    "require_memory",
]
