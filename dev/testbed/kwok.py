"""Fake nodes by the hundred, on which pods become Running without running: for placement and for scale.

kwok plays the kubelet of the nodes that carry its annotation, so that real and fake nodes may share a cluster. Fake
nodes have a taint: only pods that tolerate it get there, unless a node is made without.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from testbed import state
from testbed.build import Say, binary, say
from testbed.daemon import Daemon
from testbed.kubectl import Kubectl
from testbed.ports import some_free_ports
from testbed.programs import LOOPBACK
from testbed.readiness import await_ready
from testbed.tools import KWOK

ANNOTATION = "kwok.x-k8s.io/node"
START_SECONDS = 180
TAINT: Mapping[str, str] = {"key": ANNOTATION, "value": "fake", "effect": "NoSchedule"}
TOLERATION: Mapping[str, str] = {"key": ANNOTATION, "operator": "Exists", "effect": "NoSchedule"}


@dataclass(frozen=True)
class FakeNode:
    """The status of a node."""

    name: str
    labels: Mapping[str, str] = field(default_factory=dict)
    taints: Sequence[Mapping[str, str]] = (TAINT,)
    resources: Mapping[str, str] = field(default_factory=dict)
    """Added to 32 cores, 256 GiB, 500 GiB of disk and 110 pods, or replacing them: `{"aws.amazon.com/neuron": "4"}`."""

    architecture: str = "amd64"

    def manifest(self) -> dict[str, Any]:
        """The Node object."""
        resources = {"cpu": "32", "memory": "256Gi", "ephemeral-storage": "500Gi", "pods": "110", **self.resources}
        labels = {
            "kubernetes.io/hostname": self.name,
            "kubernetes.io/os": "linux",
            "kubernetes.io/arch": self.architecture,
            **self.labels,
        }
        return {
            "apiVersion": "v1",
            "kind": "Node",
            "metadata": {"name": self.name, "labels": labels, "annotations": {ANNOTATION: "fake"}},
            "spec": {"taints": [dict(taint) for taint in self.taints]},
            "status": {"allocatable": resources, "capacity": resources},
        }


class FakeNodes:
    """The fake nodes of one cluster."""

    def __init__(self, kubectl: Kubectl) -> None:
        self._kubectl = kubectl
        self._added: set[str] = set()

    def add(self, nodes: Iterable[FakeNode], *, timeout_seconds: float = 60) -> None:
        """Add nodes and return when they are Ready."""
        manifests = [node.manifest() for node in nodes]
        self._added.update(manifest["metadata"]["name"] for manifest in manifests)
        # Not server-side: that writes no status of a new object.
        self._kubectl.apply(*manifests, server_side=False)
        names = [f"node/{manifest['metadata']['name']}" for manifest in manifests]
        self._kubectl.wait("condition=Ready", *names, timeout_seconds=timeout_seconds)

    def remove(self, *names: str) -> None:
        """Remove nodes; their pods follow a moment later."""
        self._added.difference_update(names)
        self._kubectl("delete", "node", "--ignore-not-found", *names)

    def remove_all(self) -> None:
        """Remove all that were added."""
        if self._added:
            self.remove(*self._added)


@contextmanager
def running_kwok(kubeconfig: Path, kubectl: Kubectl, *, report: Say = say) -> Iterator[FakeNodes]:
    """Keep kwok at work on a cluster, until the block ends. Nodes that were added are the caller's to remove."""
    executable = binary(KWOK, report=report)
    folder = state.owned_folder()
    port = some_free_ports(1)[0]
    daemon = Daemon("kwok", folder)
    try:
        daemon.start(
            executable,
            [
                "kwok",
                f"--kubeconfig={kubeconfig}",
                "--manage-all-nodes=false",
                f"--manage-nodes-with-annotation-selector={ANNOTATION}=fake",
                "--cidr=10.100.0.0/16",
                "--node-ip=10.100.0.1",
                "--node-lease-duration-seconds=40",
                f"--server-address={LOOPBACK}:{port}",
            ],
        )
        await_ready(daemon, f"http://{LOOPBACK}:{port}/healthz", seconds=START_SECONDS)
        yield FakeNodes(kubectl)
    finally:
        state.remove(folder)
