"""The machine's own settings that a whole cluster needs, and how they are put back. The rim: every call here acts.

Each change is recorded before it is made, so that an interrupted run can be undone by the next.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from testbed.errors import BedError
from testbed.layout import HOST_ADDRESS, HOST_BRIDGE, Node, parse_core_list
from testbed.node_files import CNI_PLUGINS
from testbed.services import EGRESS_TABLE, PROXY_TABLES

CGROUPS = Path("/sys/fs/cgroup")
COMMANDS = ("containerd", "runc", "ctr", "ip", "nft", "iptables", "conntrack")

SYSCTLS = (
    "net/ipv4/ip_forward",
    "net/bridge/bridge-nf-call-iptables",
    # The kubelet sets these as it starts.
    "vm/overcommit_memory",
    "vm/panic_on_oom",
    "kernel/panic",
    "kernel/panic_on_oops",
    "kernel/keys/root_maxkeys",
    "kernel/keys/root_maxbytes",
)
"""What may change while a cluster runs: written down first, put back afterwards."""

WANTED = {"net/ipv4/ip_forward": "1", "net/bridge/bridge-nf-call-iptables": "1"}


@dataclass(frozen=True)
class Facts:
    """What decides whether nodes can run here."""

    root: bool
    missing_commands: tuple[str, ...]
    has_cni: bool
    has_cpuset_v1: bool
    cores: int
    foreign_proxy: bool
    """Another kube-proxy's nftables tables are there: this machine is part of some other cluster."""


def facts() -> Facts:
    """Look at this machine. Tables of our own, of an interrupted run, must be gone by now."""
    return Facts(
        root=os.geteuid() == 0,
        missing_commands=tuple(command for command in COMMANDS if shutil.which(command) is None),
        has_cni=(CNI_PLUGINS / "bridge").exists(),
        has_cpuset_v1=(CGROUPS / "cpuset" / "cpuset.cpus").exists(),
        cores=len(online_cores()),
        foreign_proxy=shutil.which("nft") is not None
        and any(_succeeds("nft", "list", "table", family, table) for family, table in PROXY_TABLES),
    )


def complaints(facts: Facts) -> list[str]:
    """Why nodes cannot run here, each with what helps; empty when they can. Pure."""
    found = []
    if not facts.root:
        found.append("nodes need root (namespaces, control groups, network): run as root")
    if facts.missing_commands or not facts.has_cni:
        missing = [*facts.missing_commands, *([] if facts.has_cni else [f"{CNI_PLUGINS}/bridge"])]
        found.append(f"{', '.join(missing)} missing: `make system` installs them on Debian and Ubuntu")
    if not facts.has_cpuset_v1:
        found.append(
            "no cgroup v1 cpuset hierarchy: the nodes of this test bed are made for cgroup v1 "
            "(docs/how-to/local-cluster.md lists alternatives)"
        )
    if facts.cores < 2:
        found.append(f"{facts.cores} core: pinned pods take a machine of at least two")
    if facts.foreign_proxy:
        found.append("another kube-proxy works on this machine: stop it, or take another machine")
    return found


def require_nodes() -> None:
    """Raise BedError with all that is missing, and the way round it."""
    if found := complaints(facts()):
        raise BedError(
            "a cluster with real nodes cannot run here:\n- " + "\n- ".join(found) + "\n",
            remedy="Or use any cluster whose nodes have the static CPU manager (kind takes cpuManagerPolicy in a "
            "KubeletConfiguration patch): PENSTOCK_TEST_KUBECONFIG=/path/to/kubeconfig",
        )


def online_cores() -> frozenset[int]:
    """The machine's cores, whatever this process may use of them."""
    return parse_core_list(Path("/sys/devices/system/cpu/online").read_text())


def prepare(folder: Path) -> None:
    """Set what nodes need, and give the machine HOST_ADDRESS."""
    record = folder / "sysctls.json"
    values = {name: _sysctl(name).read_text().strip() for name in SYSCTLS if _sysctl(name).exists()}
    record.write_text(json.dumps(values))
    for name, value in WANTED.items():
        if _sysctl(name).exists():  # the bridge's appears with its kernel module
            _sysctl(name).write_text(value)
    run("ip", "link", "add", HOST_BRIDGE, "type", "bridge")
    run("ip", "address", "add", f"{HOST_ADDRESS}/24", "dev", HOST_BRIDGE)
    run("ip", "link", "set", HOST_BRIDGE, "up")


def restore(folder: Path) -> None:
    """Undo `prepare`, `add_egress` and kube-proxy; without effect where there is nothing to undo."""
    for family, table in (("ip", EGRESS_TABLE), *PROXY_TABLES):
        _succeeds("nft", "delete", "table", family, table)
    _succeeds("ip", "link", "delete", HOST_BRIDGE)
    with suppress(FileNotFoundError):
        for name, value in json.loads((folder / "sysctls.json").read_text()).items():
            if _sysctl(name).read_text().strip() != value:
                _sysctl(name).write_text(value)


def add_address(node: Node) -> None:
    """Give the machine the node's address."""
    run("ip", "address", "replace", f"{node.address}/24", "dev", HOST_BRIDGE)


def apply_nftables(script: str) -> None:
    """Run an nftables script."""
    run("nft", "-f", "-", text=script)


def hierarchies() -> list[Path]:
    """The roots of cgroup v1's hierarchies; two names of one hierarchy count once."""
    found: dict[Path, None] = {}
    for folder in sorted(CGROUPS.iterdir()):
        if folder.name != "unified" and (folder / "cgroup.procs").exists():
            found.setdefault(folder.resolve())
    return list(found)


def filesystem(path: Path) -> str:
    """The type of the file system that `path` lies on: ext4, overlay..."""
    return run("findmnt", "--noheadings", "--output", "FSTYPE", "--target", str(path)).strip()


def mounts_below(folder: Path) -> list[Path]:
    """Mount points in a folder, the innermost first."""
    targets = [Path(line.split()[4]) for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    return sorted((target for target in targets if target.is_relative_to(folder)), reverse=True)


def run(*command: str, text: str | None = None) -> str:
    """A command's standard output. Raises BedError with its standard error when it fails."""
    result = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        raise BedError(f"{' '.join(command)}: {result.stderr.strip() or result.stdout.strip()}")
    return result.stdout


def _succeeds(*command: str) -> bool:
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def _sysctl(name: str) -> Path:
    return Path("/proc/sys", name)


def unmount(targets: Sequence[Path]) -> None:
    """Detach mounts; those that are gone by now are no error."""
    for target in targets:
        _succeeds("umount", "--lazy", str(target))
