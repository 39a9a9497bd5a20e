"""One real node: a containerd and a kubelet, started, and removed with all their files."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import yaml

from testbed import host, node_files
from testbed.daemon import Daemon, Process
from testbed.errors import BedError
from testbed.layout import Node

CNI_RECORDS = Path("/var/lib/cni/results")
CONTAINER_LOGS = Path("/var/log/containers")
"""The two paths that cannot be moved below the node's folder."""

RUNTIME_SECONDS = 180
END_SECONDS = 20
POLL_SECONDS = 0.05


class RunningNode:
    """A node's processes."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self.runtime = Daemon("containerd", node.folder)
        self.kubelet = Daemon("kubelet", node.folder)

    def start_runtime(self, images: Iterable[Path]) -> None:
        """Start containerd, and import OCI archives into it. Needs no API server."""
        node = self.node
        for name in ("cni", "kubelet", "pod-logs"):
            (node.folder / name).mkdir(parents=True, exist_ok=True)
        host.add_address(node)
        _make_cgroups(node)
        snapshotter = "native" if host.filesystem(node.folder) == "overlay" else "overlayfs"
        configuration = node.folder / "containerd.toml"
        configuration.write_text(node_files.containerd(node, snapshotter=snapshotter))
        (node.folder / "cni" / "10-bridge.conflist").write_text(json.dumps(node_files.pod_network(node)))
        with _on_all_cores():
            self.runtime.start(_found("containerd"), ["containerd", "--config", str(configuration)])
        self._wait_for_runtime()
        for archive in images:
            self.import_image(archive)

    def start_kubelet(self, executable: Path, *, kubeconfig: Path, client_authority: Path) -> None:
        """Start the kubelet: it registers the node with the API server of `kubeconfig`."""
        configuration = node_files.kubelet(self.node, client_authority=client_authority)
        (self.node.folder / "kubelet.yaml").write_text(yaml.safe_dump(configuration))
        with _on_all_cores():
            self.kubelet.start(executable, node_files.kubelet_arguments(self.node, kubeconfig=kubeconfig))

    def import_image(self, archive: Path) -> None:
        """Give the node's containerd the images of an OCI or Docker archive."""
        self.ctr("images", "import", str(archive))

    def ctr(self, *arguments: str) -> str:
        """What containerd's own client prints, in Kubernetes' namespace."""
        return host.run("ctr", "--address", str(self.node.socket), "--namespace", "k8s.io", *arguments)

    def remove(self) -> None:
        """End the node and its pods at once, and undo all that they did to the machine."""
        node = self.node
        self.kubelet.stop(grace_seconds=0)
        self.runtime.stop(grace_seconds=0)
        for process in [*_shims(node), *_pod_processes(node)]:
            process.end(grace_seconds=0)
        _remove_shim_sockets(node)
        host.unmount(host.mounts_below(node.folder))
        _remove_link(node.bridge)
        _remove_cgroups(node)
        for record in CNI_RECORDS.glob("*"):  # each names the network namespace, which lies in our folder
            if str(node.folder) in record.read_text(errors="replace"):
                record.unlink(missing_ok=True)
        for link in CONTAINER_LOGS.glob("*.log"):
            if link.is_symlink() and link.readlink().is_relative_to(node.folder):
                link.unlink(missing_ok=True)
        shutil.rmtree(node.folder, ignore_errors=True)

    def _wait_for_runtime(self) -> None:
        deadline = time.monotonic() + RUNTIME_SECONDS
        while True:
            try:
                self.ctr("version")
            except BedError as error:
                if self.runtime.process is None or time.monotonic() > deadline:
                    raise BedError(
                        f"containerd of node {self.node.name} does not start:\n{self.runtime.last_words()}\n"
                    ) from error
                time.sleep(POLL_SECONDS)
            else:
                return


@contextmanager
def _on_all_cores() -> Iterator[None]:
    """Processes that are started inside may use every core, even if this one may not.

    A pod inherits its runtime's affinity, and the kernel intersects it with the pod's own cores: a containerd started
    under taskset would take pinned pods' cores away.
    """
    ours = os.sched_getaffinity(0)
    os.sched_setaffinity(0, host.online_cores())
    try:
        yield
    finally:
        os.sched_setaffinity(0, ours)


def _found(command: str) -> Path:
    path = shutil.which(command)
    if path is None:
        raise BedError(f"no {command} here", remedy="`make system` installs it on Debian and Ubuntu")
    return Path(path)


def _make_cgroups(node: Node) -> None:
    """The kubelet wants its root group to exist in every hierarchy; a new cpuset is empty until it is filled."""
    for hierarchy in host.hierarchies():
        group = hierarchy / node.cgroup
        group.mkdir(exist_ok=True)
        for name in ("cpuset.cpus", "cpuset.mems"):
            if (hierarchy / name).exists():
                (group / name).write_text((hierarchy / name).read_text())


def _pod_processes(node: Node) -> list[Process]:
    """Everything in the node's control groups."""
    pids: set[int] = set()
    for hierarchy in host.hierarchies():
        for procs in (hierarchy / node.cgroup).rglob("cgroup.procs"):
            with suppress(FileNotFoundError, OSError):
                pids.update(int(pid) for pid in procs.read_text().split())
    return [process for pid in pids if (process := Process.of(pid))]


def _shims(node: Node) -> list[Process]:
    """The processes that hold containers for a containerd, whether it still lives or not."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with suppress(FileNotFoundError, ProcessLookupError):
                words = (folder / "cmdline").read_bytes().decode(errors="replace").split("\0")
                if "containerd-shim" in words[0] and str(node.socket) in words:
                    process = Process.of(int(folder.name))
                    found += [process] if process else []
    return found


def _remove_shim_sockets(node: Node) -> None:
    """A shim that is killed leaves its socket in /run/containerd; the container's folder names it."""
    for address in node.folder.glob("state/io.containerd.runtime.v2.task/*/*/address"):
        Path(address.read_text().removeprefix("unix://")).unlink(missing_ok=True)


def _remove_link(name: str) -> None:
    """Remove a bridge. The pods' ends went with their namespaces, at the kernel's leisure; ours may linger."""
    for member in Path(f"/sys/class/net/{name}/brif").glob("*"):
        with suppress(BedError):
            host.run("ip", "link", "delete", member.name)
    if Path(f"/sys/class/net/{name}").exists():
        host.run("ip", "link", "delete", name)


def _remove_cgroups(node: Node) -> None:
    """Remove the groups from the leaves up; the kernel lets go of the last dead process a moment after its end."""
    deadline = time.monotonic() + END_SECONDS
    # runc also makes them where both v1 and v2 are mounted.
    roots = [*host.hierarchies(), host.CGROUPS / "unified"]
    left = [group for root in roots if (group := root / node.cgroup).exists()]
    while left:
        for group in left:
            for folder, _, _ in os.walk(group, topdown=False):
                with suppress(OSError):
                    Path(folder).rmdir()
        left = [group for group in left if group.exists()]
        if left and time.monotonic() > deadline:
            raise BedError(f"control groups of node {node.name} are still in use: {', '.join(map(str, left))}")
        if left:
            time.sleep(POLL_SECONDS)
