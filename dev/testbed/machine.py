"""A whole cluster on this machine: control plane, nodes that own cores, Services, names. One for each machine.

It outlives the process that starts it; `find` gets at a running one, `down` ends it, also after an interrupted start.
"""

from __future__ import annotations

import fcntl
import json
import shutil
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import yaml

from testbed import host, services, state
from testbed.build import Say, binary, say
from testbed.control_plane import START_SECONDS, ControlPlane, node_kubeconfig, started
from testbed.daemon import Daemon, daemons
from testbed.errors import BedError
from testbed.images import Image
from testbed.kubectl import Kubectl
from testbed.layout import API_PORT, DEFAULT_NODES, HOST_ADDRESS, Node, core_list, layout
from testbed.node import RunningNode
from testbed.node_files import PAUSE_IMAGE
from testbed.ports import some_free_ports
from testbed.programs import Ports, Settings
from testbed.readiness import await_ready
from testbed.tools import COREDNS, KUBE, PAUSE

FOLDER = state.STATE / "machine"
RECORD = "cluster.json"
"""Written when all of it works: its nodes, by name the cores that each owns."""

BUSYBOX_IMAGE = "localhost/penstock-testbed-busybox:1"
"""A shell, `httpd`, `nc`: in every node, for tests. (Its static wget does not work where names are to be resolved.)"""

NODE_MONITOR_GRACE_SECONDS = 20
"""Shorter than Kubernetes' 50, so that a test need not wait a minute for a node to count as lost."""


@dataclass(frozen=True)
class Machine:
    """A running cluster."""

    nodes: tuple[Node, ...]

    @property
    def kubeconfig(self) -> Path:
        """The administrator's."""
        return FOLDER / "admin.kubeconfig"

    @property
    def kubectl(self) -> Kubectl:
        """The administrator's kubectl."""
        return Kubectl(binary(KUBE).with_name("kubectl"), self.kubeconfig)

    def node(self, name: str) -> RunningNode:
        """A node's processes, to look at or to end. Raises KeyError for a name that no node has."""
        return RunningNode({node.name: node for node in self.nodes}[name])

    def import_image(self, archive: Path) -> None:
        """Give every node the images of an OCI or Docker archive, as a registry would."""
        with ThreadPoolExecutor(len(self.nodes)) as pool:
            list(pool.map(lambda node: RunningNode(node).import_image(archive), self.nodes))

    @contextmanager
    def additional_node(self, *archives: Path) -> Iterator[RunningNode]:
        """A further node for the block, with the images of these archives.

        It owns a core that the first node owns too: for tests that need more pods than this machine has cores, and in
        which no speed matters.
        """
        first, index = self.nodes[0], len(self.nodes) + 1
        name = chr(ord(first.name) + index - 1)
        owned = frozenset({min(first.owned)})
        folder = first.folder.with_name(name)
        node = RunningNode(Node(name, index, owned, (first.owned | first.reserved) - owned, folder))
        settings = Settings(folder=FOLDER, address=HOST_ADDRESS, ports=Ports(api=API_PORT))
        try:
            node.start_runtime([*_base_images(), *archives])
            node.start_kubelet(
                binary(KUBE),
                kubeconfig=node_kubeconfig(settings, name),
                client_authority=settings.keys / "ca.crt",
            )
            with _with_kubelet_logs([node], "do not get Ready"):
                self.kubectl("wait", "--for=create", f"--timeout={START_SECONDS}s", f"node/{name}")
                self.kubectl.wait("condition=Ready", f"node/{name}", timeout_seconds=START_SECONDS)
            yield node
        finally:
            node.remove()
            self.kubectl("delete", f"node/{name}", "--ignore-not-found")


def find() -> Machine | None:
    """The cluster that runs on this machine; None when none does, or not all of it."""
    try:
        record = json.loads((FOLDER / RECORD).read_text())
    except FileNotFoundError:
        return None
    if any(daemon.process is None for daemon in daemons(FOLDER)):
        return None
    cores = sorted(record["cores"])
    return Machine(tuple(layout(cores, FOLDER, nodes=record["nodes"])))


def up(*, nodes: int = DEFAULT_NODES, egress: bool = False, report: Say = say) -> Machine:
    """Start a cluster and return when all nodes are Ready and names resolve. Removes the remains of an earlier run
    first.

    With `egress` pods have the machine's routes; without it their packets stay on the machine.

    Raises BedError when the machine lacks something, when a cluster runs already, or when a part does not start.
    """
    began = time.monotonic()
    with machine_lock():
        if find():
            raise BedError(
                f"a cluster runs on this machine already ({FOLDER})",
                remedy=f"use it: export KUBECONFIG={FOLDER / 'admin.kubeconfig'}; `make cluster-down` ends it",
            )
        remove(report=report)
        host.require_nodes()
        tools = {tool.name: binary(tool, report=report) for tool in (KUBE, PAUSE, COREDNS)}
        cores = sorted(host.online_cores())
        plan = layout(cores, FOLDER, nodes=nodes)
        FOLDER.mkdir(parents=True)
        try:
            _start(plan, tools, egress=egress, report=report)
            (FOLDER / RECORD).write_text(json.dumps({"cores": cores, "nodes": nodes}))
        except BaseException:
            remove(report=report)
            raise
    for node in plan:
        report(f"node {node.name} owns cores {core_list(node.owned)}")
    report(f"the cluster is up after {time.monotonic() - began:.1f} s: export KUBECONFIG={FOLDER / 'admin.kubeconfig'}")
    return Machine(tuple(plan))


def down(*, report: Say = say) -> bool:
    """End the cluster and undo its changes of the machine; False if there was none."""
    with machine_lock():
        return remove(report=report)


def remove(*, report: Say = say) -> bool:
    """What `down` does, for who holds the lock."""
    if not FOLDER.exists():
        return False
    began = time.monotonic()
    nodes = [Node(folder.name, ord(folder.name) - ord("a") + 1, frozenset(), frozenset(), folder)
             for folder in sorted((FOLDER / "nodes").glob("?"))]  # fmt: skip
    with ThreadPoolExecutor(max(1, len(nodes))) as pool:
        list(pool.map(lambda node: RunningNode(node).remove(), nodes))
    for daemon in daemons(FOLDER):
        daemon.stop(grace_seconds=0)
    host.restore(FOLDER)
    shutil.rmtree(FOLDER)
    report(f"removed the cluster in {FOLDER} in {time.monotonic() - began:.1f} s")
    return True


@contextmanager
def machine_lock(name: str = "machine.lock") -> Iterator[None]:
    """One at a time starts or ends the machine's cluster."""
    state.STATE.mkdir(parents=True, exist_ok=True)
    with (state.STATE / name).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _start(plan: list[Node], tools: dict[str, Path], *, egress: bool, report: Say) -> None:
    host.prepare(FOLDER)
    if egress:
        host.apply_nftables(services.egress())
    images = _images(tools["pause"])
    nodes = [RunningNode(node) for node in plan]
    settings = Settings(
        folder=FOLDER,
        address=HOST_ADDRESS,
        node_monitor_period_seconds=2,
        node_monitor_grace_seconds=NODE_MONITOR_GRACE_SECONDS,
    )
    with ThreadPoolExecutor(len(nodes) + 1) as pool:  # containerd and its images need no API server
        runtimes = [pool.submit(node.start_runtime, images) for node in nodes]
        plane = pool.submit(started, settings, tools["kube"], api_port=API_PORT).result()
        for runtime in runtimes:
            runtime.result()
    report("the control plane works, and each node has a runtime")
    for node in nodes:
        node.start_kubelet(
            tools["kube"],
            kubeconfig=node_kubeconfig(plane.settings, node.node.name),
            client_authority=plane.settings.keys / "ca.crt",
        )
        # One after the other: kubelets share the path of their device plugins' socket, wherever their own
        # folders are, and two that come to it in the same millisecond do not both get it.
        _await_created(plane, [node])
    _start_services(plane, plan[0], tools, egress=egress)
    _await_nodes(plane, nodes)


def _start_services(plane: ControlPlane, first: Node, tools: dict[str, Path], *, egress: bool) -> None:
    health, metrics, ready = some_free_ports(3)
    proxy = services.proxy(
        first.name, kubeconfig=plane.settings.kubeconfig("proxy"), health_port=health, metrics_port=metrics
    )
    (FOLDER / "kube-proxy.yaml").write_text(yaml.safe_dump(proxy))
    (FOLDER / "Corefile").write_text(services.corefile(kubeconfig=plane.kubeconfig, ready_port=ready, forward=egress))
    kube_proxy, coredns = Daemon("kube-proxy", FOLDER), Daemon("coredns", FOLDER)
    kube_proxy.start(tools["kube"], ["kube-proxy", f"--config={FOLDER / 'kube-proxy.yaml'}"])
    coredns.start(tools["coredns"], ["coredns", "-conf", str(FOLDER / "Corefile")])
    await_ready(kube_proxy, f"http://127.0.0.1:{health}/healthz", seconds=START_SECONDS)
    await_ready(coredns, f"http://127.0.0.1:{ready}/ready", seconds=START_SECONDS)


def _await_created(plane: ControlPlane, nodes: list[RunningNode]) -> None:
    with _with_kubelet_logs(nodes, "do not register"):
        plane.kubectl(
            "wait", "--for=create", f"--timeout={START_SECONDS}s", *_names(nodes), timeout_seconds=START_SECONDS
        )


def _await_nodes(plane: ControlPlane, nodes: list[RunningNode]) -> None:
    with _with_kubelet_logs(nodes, "do not get Ready"):
        plane.kubectl.wait("condition=Ready", *_names(nodes), timeout_seconds=START_SECONDS)


def _names(nodes: list[RunningNode]) -> list[str]:
    return [f"node/{node.node.name}" for node in nodes]


@contextmanager
def _with_kubelet_logs(nodes: list[RunningNode], what: str) -> Iterator[None]:
    """Within, an error has the kubelets' last words with it."""
    try:
        yield
    except BedError as error:
        words = "\n".join(f"kubelet of {node.node.name}: {node.kubelet.last_words()}" for node in nodes)
        raise BedError(f"the nodes {what}: {error.message}\n{words}\n") from error


def _images(pause: Path) -> list[Path]:
    """Write the archives of the images that every node has."""
    busybox = Path(shutil.which("busybox") or "")
    applets = host.run(str(busybox), "--list").split()
    images = [
        Image(PAUSE_IMAGE, {"pause": pause.read_bytes()}, {}, ["/pause"]),
        Image(
            BUSYBOX_IMAGE,
            {"bin/busybox": busybox.read_bytes()},
            {f"bin/{applet}": "busybox" for applet in applets if applet != "busybox"},
            ["/bin/sh"],
        ),
    ]
    paths = _base_images()
    for path, image in zip(paths, images, strict=True):
        path.write_bytes(image.archive())
    return paths


def _base_images() -> list[Path]:
    """The paths of these archives."""
    return [FOLDER / f"{name}.oci.tar" for name in ("pause", "busybox")]
