"""Which node owns which cores, and what each node is called, listens on and lies in. Pure.

Several nodes live on one machine. Each has a containerd and a kubelet with the static CPU manager, which gives whole
cores of those that the node owns to Guaranteed pods; all other cores are `reserved`, so that no two nodes give away the
same one. Pods that are not pinned run on the reserved cores and on owned ones that are not given away.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from testbed.errors import BedError

HOST_BRIDGE = "penstock0"
HOST_ADDRESS = "10.99.0.1"
"""Where the API server and DNS listen: on a bridge without ports, for a loopback address cannot be an endpoint."""

HOST_NETWORK = "10.99.0.0/24"
API_PORT = 6443
DEFAULT_NODES = 2
MOST_NODES = 9


@dataclass(frozen=True)
class Node:
    """One node of this machine."""

    name: str
    index: int
    """From 1: it is part of addresses and ports."""

    owned: frozenset[int]
    """Cores that it gives to pods for themselves."""

    reserved: frozenset[int]
    """All other cores of the machine."""

    folder: Path
    """All that it writes lies below. Short: sockets have their limit of 107 bytes."""

    @property
    def address(self) -> str:
        """Its InternalIP, on HOST_BRIDGE."""
        return f"10.99.0.{10 + self.index}"

    @property
    def pod_network(self) -> str:
        """Where its pods' addresses come from."""
        return f"10.244.{self.index}.0/24"

    @property
    def bridge(self) -> str:
        """The network interface that its pods hang on; the kernel takes 15 characters."""
        return f"penstock-{self.name}"[:15]

    @property
    def network(self) -> str:
        """The name of its pods' network in CNI's records."""
        return f"penstock-testbed-{self.name}"

    @property
    def cgroup(self) -> str:
        """The control group, in every hierarchy, that holds all its pods."""
        return f"penstock-testbed-{self.name}"

    @property
    def socket(self) -> Path:
        """Its containerd's."""
        return self.folder / "containerd.sock"

    @property
    def kubelet_port(self) -> int:
        """Of the kubelet's API, on `address`."""
        return 10250


def layout(cores: Sequence[int], folder: Path, *, nodes: int = DEFAULT_NODES) -> list[Node]:
    """Share the machine's `cores` (their numbers) among `nodes` nodes named a, b, c...

    With a core to spare no node gets the first one: the control plane and unpinned processes run there. Without one
    (two nodes on two cores) each node owns one, and the rest shares them.

    Raises BedError when a node would own nothing.
    """
    if not 1 <= nodes <= MOST_NODES:
        raise BedError(f"{nodes} nodes: a machine holds 1 to {MOST_NODES}")
    spare = len(cores) > nodes
    to_give = list(cores)[1:] if spare else list(cores)
    if len(to_give) < nodes or len(cores) < 2:
        raise BedError(
            f"{len(cores)} cores are too few for {nodes} nodes that own a core each",
            remedy="start fewer nodes, on a machine of at least two cores",
        )
    each, more = divmod(len(to_give), nodes)
    result = []
    for index in range(nodes):
        share, to_give = to_give[: each + (index < more)], to_give[each + (index < more) :]
        name = chr(ord("a") + index)
        owned = frozenset(share)
        result.append(Node(name, index + 1, owned, frozenset(cores) - owned, folder / "nodes" / name))
    return result


def core_list(cores: frozenset[int]) -> str:
    """The kernel's way to write a set of cores, as single numbers: 0,2,3."""
    return ",".join(str(core) for core in sorted(cores))


def parse_core_list(text: str) -> frozenset[int]:
    """Read the kernel's way: 0-2,5."""
    found: set[int] = set()
    for part in text.strip().split(","):
        if part:
            first, _, last = part.partition("-")
            found.update(range(int(first), int(last or first) + 1))
    return frozenset(found)
