"""An API that another process serves, behind the aggregation layer of a control plane: external metrics.

The API server finds such a server by an APIService that names a Service. Here the Service points to loopback: the
control plane must run with `--enable-aggregator-routing=false`, or the API server would look for endpoints, which may
not be loopback addresses.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from testbed import state
from testbed.build import Say, binary, say
from testbed.control_plane import ControlPlane
from testbed.daemon import Daemon
from testbed.identities import Authority
from testbed.ports import some_free_ports
from testbed.programs import LOOPBACK
from testbed.readiness import await_ready
from testbed.tools import EXTERNAL_METRICS, PROMETHEUS_ADAPTER, Tool

NAMESPACE = "kube-system"
GROUP, VERSION = "external.metrics.k8s.io", "v1beta1"
START_SECONDS = 120.0
RELIST_SECONDS = 1
"""How often prometheus-adapter reads the list of series."""
ROUTING_OFF = {"kube-apiserver": ("--enable-aggregator-routing=false",)}
"""What `running_control_plane(extra=...)` needs, at least."""


@dataclass(frozen=True)
class Server:
    """Where an aggregated API server listens, and the files that it is started with."""

    name: str
    """Also of its user, its Service and its process."""
    port: int
    kubeconfig: Path
    certificate: Path
    key: Path

    def arguments(self) -> list[str]:
        """Those that every server has that is made of Kubernetes' library for them."""
        return [
            f"--secure-port={self.port}",
            f"--bind-address={LOOPBACK}",
            f"--tls-cert-file={self.certificate}",
            f"--tls-private-key-file={self.key}",
            f"--authentication-kubeconfig={self.kubeconfig}",
            f"--authorization-kubeconfig={self.kubeconfig}",
        ]


@contextmanager
def running_external_metrics(
    plane: ControlPlane, *, configuration: str, prometheus_url: str, tool: Tool = EXTERNAL_METRICS, report: Say = say
) -> Iterator[Daemon]:
    """external.metrics.k8s.io over a Prometheus, until the block ends.

    `configuration` is one of prometheus-adapter (YAML) with `externalRules`; `tool` is the test bed's own server of
    such rules, or prometheus-adapter itself.
    """
    folder = state.owned_folder()
    try:
        rules = folder / "config.yaml"
        rules.write_text(configuration)

        def arguments(server: Server) -> Sequence[str]:
            return [
                f"--lister-kubeconfig={server.kubeconfig}",
                f"--config={rules}",
                f"--prometheus-url={prometheus_url}",
                *([f"--metrics-relist-interval={RELIST_SECONDS}s"] if tool is PROMETHEUS_ADAPTER else []),
            ]

        with running_aggregated(plane, tool, folder, arguments, report=report) as daemon:
            yield daemon
    finally:
        state.remove(folder)


@contextmanager
def running_aggregated(
    plane: ControlPlane,
    tool: Tool,
    folder: Path,
    arguments: Callable[[Server], Sequence[str]],
    *,
    environment: Mapping[str, str] | None = None,
    report: Say = say,
) -> Iterator[Daemon]:
    """A server of external metrics at work, which the API server knows and calls, until the block ends.

    Its keys lie in `folder`: ca.crt, tls.crt, tls.key.
    """
    executable = binary(tool, report=report)
    name = tool.name
    keys = plane.settings.keys
    authority = Authority((keys / "ca.crt").read_bytes(), (keys / "ca.key").read_bytes())
    identity = authority.peer(name, [LOOPBACK, "localhost", f"{name}.{NAMESPACE}.svc"])
    certificate, key = folder / "tls.crt", folder / "tls.key"
    (folder / "ca.crt").write_bytes(authority.certificate)
    certificate.write_bytes(identity.certificate)
    key.touch(mode=0o600)
    key.write_bytes(identity.key)
    server = Server(name, some_free_ports(1)[0], plane.user(name), certificate, key)
    daemon = Daemon(name, folder)
    manifests = _manifests(server, authority.certificate)
    kubectl = plane.kubectl.within(NAMESPACE)
    try:
        kubectl.apply(*manifests)
        daemon.start(executable, [name, *server.arguments(), *arguments(server)], environment)
        # Called through the API server: it has to know of it, trust it, and be trusted.
        context = plane.client()
        await_ready(daemon, f"{plane.settings.server}/apis/{GROUP}/{VERSION}", seconds=START_SECONDS, context=context)
        yield daemon
    finally:
        daemon.stop(grace_seconds=0)
        kubectl.delete(*manifests, wait=False)


def _manifests(server: Server, authority: bytes) -> list[dict[str, Any]]:
    """The Service, the APIService, and the rights of the server's user: TokenReview and SubjectAccessReview."""
    user = {"kind": "User", "name": server.name, "apiGroup": "rbac.authorization.k8s.io"}
    return [
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": {"name": server.name, "namespace": NAMESPACE},
            "spec": {"type": "ExternalName", "externalName": "localhost"},
        },
        {
            "apiVersion": "apiregistration.k8s.io/v1",
            "kind": "APIService",
            "metadata": {"name": f"{VERSION}.{GROUP}"},
            "spec": {
                "group": GROUP,
                "version": VERSION,
                "groupPriorityMinimum": 100,
                "versionPriority": 100,
                "service": {"name": server.name, "namespace": NAMESPACE, "port": server.port},
                "caBundle": base64.b64encode(authority).decode(),
            },
        },
        {
            "apiVersion": "rbac.authorization.k8s.io/v1",
            "kind": "ClusterRoleBinding",
            "metadata": {"name": f"{server.name}-delegates"},
            "roleRef": {"apiGroup": user["apiGroup"], "kind": "ClusterRole", "name": "system:auth-delegator"},
            "subjects": [user],
        },
        {
            "apiVersion": "rbac.authorization.k8s.io/v1",
            "kind": "RoleBinding",
            "metadata": {"name": f"{server.name}-reads-front-proxy", "namespace": NAMESPACE},
            "roleRef": {
                "apiGroup": user["apiGroup"],
                "kind": "Role",
                "name": "extension-apiserver-authentication-reader",
            },
            "subjects": [user],
        },
    ]
