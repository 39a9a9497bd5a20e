"""Which CPUs the measured servers get, and which the client. Pure but for `Host`, which has been read before."""

from __future__ import annotations

from dataclasses import dataclass

from penstock_runtime.host import Host


@dataclass(frozen=True)
class Placement:
    """Logical CPUs."""

    server: tuple[int, ...]
    """One for each physical core."""
    client: tuple[int, ...]
    """Of other cores; empty when the server has them all, and the client has to share them."""

    @property
    def note(self) -> str:
        """What a reader of the figures should know; empty when there is nothing."""
        if self.client:
            return ""
        cores = "the one core" if len(self.server) == 1 else f"all {len(self.server)} cores"
        return f"with {len(self.server)} cores the client ran on the server's CPUs: {cores} of this machine are in use"


def place(host: Host, cores: int) -> Placement:
    """The server's CPUs as the runtime itself would choose them; the client's on cores of which the server has nothing.

    HostError when the machine has fewer cores.
    """
    grant = host.usable_cores(cores)
    taken = {cpu for core in host.cores if set(core.cpus) & set(grant.cpus) for cpu in core.cpus}
    return Placement(server=grant.cpus, client=tuple(cpu for cpu in host.allowed if cpu not in taken))
