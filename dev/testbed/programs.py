"""Arguments of the control plane's programs: pure functions of the settings.

Authentication is by client certificates and service-account tokens, authorization by Node and RBAC, as in a cluster
that one would run: a test has the same rights here and there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

SERVICE_NETWORK = "10.96.0.0/16"
POD_NETWORK = "10.244.0.0/16"
API_SERVICE_ADDRESS = "10.96.0.1"
"""The first address of SERVICE_NETWORK: what `kubernetes.default` resolves to."""

LOOPBACK = "127.0.0.1"

SPARING = {"GOGC": "300"}
"""The environment of Go programs that collect their garbage less often: over a quarter less to compute, for memory that
test machines have."""


@dataclass(frozen=True)
class Ports:
    """TCP ports of one control plane, all on loopback but `api`."""

    etcd: int = 2379
    etcd_peer: int = 2380
    api: int = 6443
    controller_manager: int = 10257
    scheduler: int = 10259


@dataclass(frozen=True)
class Settings:
    """One control plane."""

    folder: Path
    """Everything that it writes lies below."""

    address: str = LOOPBACK
    """Where the API server listens. Nodes need one that their pods can reach."""

    ports: Ports = Ports()

    node_monitor_period_seconds: int = 5
    node_monitor_grace_seconds: int = 50
    """How long a node may be silent before it counts as lost (Kubernetes' defaults)."""

    extra: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Further arguments by program, such as `{"kube-apiserver": ("--max-requests-inflight=20",)}`; the last wins."""

    @property
    def server(self) -> str:
        """The API server's URL."""
        return f"https://{self.address}:{self.ports.api}"

    @property
    def keys(self) -> Path:
        """The folder of keys and certificates."""
        return self.folder / "pki"

    def kubeconfig(self, user: str) -> Path:
        """The file of `user`: admin, controller-manager, scheduler, proxy, or a node's name."""
        return self.folder / f"{user}.kubeconfig"


def api_hosts(settings: Settings) -> list[str]:
    """Names and addresses by which the API server is reached."""
    service = ["kubernetes", "kubernetes.default", "kubernetes.default.svc", "kubernetes.default.svc.cluster.local"]
    return list(dict.fromkeys([settings.address, LOOPBACK, "localhost", API_SERVICE_ADDRESS, *service]))


def arguments(settings: Settings) -> dict[str, list[str]]:
    """The command lines of the four programs, in the order in which they start."""
    lines = {
        "etcd": _etcd(settings),
        "kube-apiserver": _api_server(settings),
        "kube-controller-manager": _controller_manager(settings),
        "kube-scheduler": _scheduler(settings),
    }
    if unknown := sorted(set(settings.extra) - set(lines)):
        raise ValueError(f"no program of a control plane: {', '.join(unknown)}; there are {', '.join(lines)}")
    return {program: [program, *line, *settings.extra.get(program, ())] for program, line in lines.items()}


def _etcd(settings: Settings) -> list[str]:
    client = f"http://{LOOPBACK}:{settings.ports.etcd}"
    peer = f"http://{LOOPBACK}:{settings.ports.etcd_peer}"
    return [
        f"--data-dir={settings.folder / 'etcd'}",
        f"--listen-client-urls={client}",
        f"--advertise-client-urls={client}",
        f"--listen-peer-urls={peer}",
        f"--initial-advertise-peer-urls={peer}",
        f"--initial-cluster=default={peer}",
        # A test cluster's data need not survive a power cut.
        "--unsafe-no-fsync",
        "--log-level=warn",
    ]


def _api_server(settings: Settings) -> list[str]:
    keys = settings.keys
    # A loopback address cannot be an endpoint of the Service `kubernetes`, and without nodes it is not used.
    reconciler = "none" if settings.address == LOOPBACK else "lease"
    return [
        f"--bind-address={settings.address}",
        f"--advertise-address={settings.address}",
        f"--secure-port={settings.ports.api}",
        f"--endpoint-reconciler-type={reconciler}",
        f"--etcd-servers=http://{LOOPBACK}:{settings.ports.etcd}",
        f"--service-cluster-ip-range={SERVICE_NETWORK}",
        "--authorization-mode=Node,RBAC",
        "--enable-admission-plugins=NodeRestriction",
        f"--client-ca-file={keys / 'ca.crt'}",
        f"--tls-cert-file={keys / 'apiserver.crt'}",
        f"--tls-private-key-file={keys / 'apiserver.key'}",
        "--service-account-issuer=https://kubernetes.default.svc.cluster.local",
        f"--service-account-key-file={keys / 'tokens.pub'}",
        f"--service-account-signing-key-file={keys / 'tokens.key'}",
        f"--kubelet-client-certificate={keys / 'kubelet-client.crt'}",
        f"--kubelet-client-key={keys / 'kubelet-client.key'}",
        "--kubelet-preferred-address-types=InternalIP",
        # The aggregation layer: APIs of other servers, such as custom metrics.
        f"--requestheader-client-ca-file={keys / 'ca.crt'}",
        "--requestheader-allowed-names=front-proxy-client",
        "--requestheader-username-headers=X-Remote-User",
        "--requestheader-group-headers=X-Remote-Group",
        "--requestheader-extra-headers-prefix=X-Remote-Extra-",
        f"--proxy-client-cert-file={keys / 'front-proxy.crt'}",
        f"--proxy-client-key-file={keys / 'front-proxy.key'}",
        "--enable-aggregator-routing=true",
        "--allow-privileged=true",
        "--profiling=false",
    ]


def _controller_manager(settings: Settings) -> list[str]:
    keys, own = settings.keys, settings.kubeconfig("controller-manager")
    return [
        f"--kubeconfig={own}",
        f"--authentication-kubeconfig={own}",
        f"--authorization-kubeconfig={own}",
        "--use-service-account-credentials",
        f"--service-account-private-key-file={keys / 'tokens.key'}",
        f"--root-ca-file={keys / 'ca.crt'}",
        f"--cluster-signing-cert-file={keys / 'ca.crt'}",
        f"--cluster-signing-key-file={keys / 'ca.key'}",
        "--leader-elect=false",
        f"--bind-address={LOOPBACK}",
        f"--secure-port={settings.ports.controller_manager}",
        # Forty controllers make their clients one after the other: the default of 20 a second takes six seconds.
        "--kube-api-qps=200",
        "--kube-api-burst=400",
        f"--cluster-cidr={POD_NETWORK}",
        f"--service-cluster-ip-range={SERVICE_NETWORK}",
        "--allocate-node-cidrs=false",
        f"--node-monitor-period={settings.node_monitor_period_seconds}s",
        f"--node-monitor-grace-period={settings.node_monitor_grace_seconds}s",
    ]


def _scheduler(settings: Settings) -> list[str]:
    own = settings.kubeconfig("scheduler")
    return [
        f"--kubeconfig={own}",
        f"--authentication-kubeconfig={own}",
        f"--authorization-kubeconfig={own}",
        "--leader-elect=false",
        f"--bind-address={LOOPBACK}",
        f"--secure-port={settings.ports.scheduler}",
    ]
