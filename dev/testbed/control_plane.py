"""etcd, kube-apiserver, kube-controller-manager and kube-scheduler as processes of this machine."""

from __future__ import annotations

import ssl
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import yaml

from testbed import state
from testbed.build import Say, binary, say
from testbed.daemon import Daemon
from testbed.identities import Authority, Identity, KeyPair, key_pair, kubeconfig
from testbed.kubectl import Kubectl
from testbed.ports import free_ports
from testbed.programs import LOOPBACK, SPARING, Settings, api_hosts, arguments
from testbed.readiness import AddressTaken, await_ready
from testbed.tools import KUBE

START_SECONDS = 180
"""Five seconds on two quiet cores; machines are shared."""

ATTEMPTS = 3


class ControlPlane:
    """The four programs of one control plane, each of which can be stopped and started on its own."""

    def __init__(self, settings: Settings, executable: Path) -> None:
        self.settings = settings
        self._executable = executable
        self._arguments = arguments(settings)

    @property
    def kubeconfig(self) -> Path:
        """The administrator's."""
        return self.settings.kubeconfig("admin")

    @property
    def kubectl(self) -> Kubectl:
        """The administrator's kubectl."""
        return Kubectl(self._executable.with_name("kubectl"), self.kubeconfig)

    @property
    def programs(self) -> list[str]:
        """Their names, in the order in which they start."""
        return list(self._arguments)

    def daemon(self, program: str) -> Daemon:
        """One of `programs`: its process and its log."""
        return Daemon(program, self.settings.folder)

    def start(self) -> None:
        """Make keys where there are none, start what does not run, and return when all of it works."""
        prepare(self.settings)
        for program in self.programs:
            if self.daemon(program).process is None:
                self.launch(program)
            if program == "kube-apiserver":  # the other two end when they find none
                self.wait_for(program)
        for program in ("kube-controller-manager", "kube-scheduler"):
            self.wait_for(program)

    def launch(self, program: str) -> None:
        """Start one program without waiting for it."""
        self.daemon(program).start(self._executable, self._arguments[program], SPARING)

    def stop(self, program: str, *, grace_seconds: float = 10) -> None:
        """End one program; with a grace of 0 as `kill -9` does."""
        self.daemon(program).stop(grace_seconds=grace_seconds)

    def restart(self, program: str, *, grace_seconds: float = 10) -> None:
        """Stop, start, and wait until it works again."""
        self.stop(program, grace_seconds=grace_seconds)
        self.launch(program)
        self.wait_for(program)

    def wait_for(self, program: str) -> None:
        """Return once the program does its work. Raises what `await_ready` raises."""
        settings, daemon = self.settings, self.daemon(program)
        probe = {
            "etcd": f"http://{LOOPBACK}:{settings.ports.etcd}/health",
            "kube-apiserver": f"{settings.server}/readyz",
            # Its first visible work: nothing can be created in a namespace before.
            "kube-controller-manager": f"{settings.server}/api/v1/namespaces/default/serviceaccounts/default",
            "kube-scheduler": f"https://{LOOPBACK}:{settings.ports.scheduler}/healthz",
        }[program]
        context = _client(settings, verify=program != "kube-scheduler")
        await_ready(daemon, probe, seconds=START_SECONDS, context=context)

    def client(self) -> ssl.SSLContext:
        """The administrator's, for HTTP requests of one's own."""
        return _client(self.settings, verify=True)

    def user(self, name: str, *groups: str) -> Path:
        """The kubeconfig of a new user, who has no rights until RBAC grants them."""
        keys = self.settings.keys
        authority = Authority((keys / "ca.crt").read_bytes(), (keys / "ca.key").read_bytes())
        return _write_kubeconfig(
            self.settings, authority, name, authority.client(name, *groups), file=name.replace(":", "-")
        )


@contextmanager
def running_control_plane(
    *, extra: Mapping[str, tuple[str, ...]] | None = None, report: Say = say
) -> Iterator[ControlPlane]:
    """A control plane on free loopback ports until the block ends, or this process does.

    `extra` are further arguments by program (`Settings.extra`). Needs no privilege. Ends first what interrupted runs
    left behind.
    """
    executable = binary(KUBE, report=report)
    for folder in state.sweep():
        report(f"removed a control plane that an interrupted run left in {folder}")
    settings = Settings(folder=state.owned_folder(), extra=extra or {})
    try:
        yield started(settings, executable)
    finally:
        state.remove(settings.folder)


def started(settings: Settings, executable: Path, *, api_port: int | None = None) -> ControlPlane:
    """Start on ports that were free a moment ago, and on other ports if another process took them.

    The API server's is `api_port` where that is given.
    """
    for attempt in range(1, ATTEMPTS + 1):
        ports = free_ports()
        ports = ports if api_port is None else replace(ports, api=api_port)
        plane = ControlPlane(replace(settings, ports=ports), executable)
        try:
            plane.start()
        except AddressTaken:
            if attempt == ATTEMPTS:
                raise
            for program in plane.programs:
                plane.stop(program, grace_seconds=0)
        else:
            return plane
    raise AssertionError("the last attempt returns or raises")


def prepare(settings: Settings) -> None:
    """Write keys and kubeconfigs. Those that exist stay, but the API server's own addresses may have changed."""
    keys = settings.keys
    keys.mkdir(parents=True, exist_ok=True)
    if (keys / "tokens.pub").exists():
        authority = Authority((keys / "ca.crt").read_bytes(), (keys / "ca.key").read_bytes())
    else:
        authority = Authority.create()
        _write_identity(settings, "ca", authority)
        _write_tokens(settings, key_pair())
    _write_identity(settings, "apiserver", authority.server("kube-apiserver", api_hosts(settings)))
    _write_identity(settings, "kubelet-client", authority.client("kube-apiserver-kubelet-client", "system:masters"))
    _write_identity(settings, "front-proxy", authority.client("front-proxy-client"))
    admin = authority.client("admin", "system:masters")
    _write_identity(settings, "admin", admin)
    _write_kubeconfig(settings, authority, "admin", admin)
    for program in ("controller-manager", "scheduler", "proxy"):
        user = f"system:kube-{program}"
        _write_kubeconfig(settings, authority, user, authority.client(user), file=program)


def node_kubeconfig(settings: Settings, node: str) -> Path:
    """Write the kubeconfig of a node's kubelet, which the Node authorizer keeps to its own pods."""
    keys = settings.keys
    authority = Authority((keys / "ca.crt").read_bytes(), (keys / "ca.key").read_bytes())
    user = f"system:node:{node}"
    return _write_kubeconfig(settings, authority, user, authority.client(user, "system:nodes"), file=node)


def _write_identity(settings: Settings, name: str, identity: Identity) -> None:
    (settings.keys / f"{name}.crt").write_bytes(identity.certificate)
    _write_secret(settings.keys / f"{name}.key", identity.key)


def _write_tokens(settings: Settings, pair: KeyPair) -> None:
    _write_secret(settings.keys / "tokens.key", pair.private)
    (settings.keys / "tokens.pub").write_bytes(pair.public)


def _write_kubeconfig(settings: Settings, authority: Identity, user: str, identity: Identity, file: str = "") -> Path:
    path = settings.kubeconfig(file or user)
    configuration = kubeconfig(settings.server, authority.certificate, user, identity)
    _write_secret(path, yaml.safe_dump(configuration).encode())
    return path


def _write_secret(path: Path, data: bytes) -> None:
    path.touch(mode=0o600)
    path.write_bytes(data)


def _client(settings: Settings, *, verify: bool) -> ssl.SSLContext:
    keys = settings.keys
    context = ssl.create_default_context(cafile=str(keys / "ca.crt"))
    if not verify:  # the scheduler signs its certificate itself
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    context.load_cert_chain(keys / "admin.crt", keys / "admin.key")
    return context
