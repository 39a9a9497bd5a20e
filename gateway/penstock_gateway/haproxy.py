"""HAProxy's runtime socket, and the synchronisation of its servers with the replicas of the cluster."""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from penstock_gateway.config import BACKEND
from penstock_gateway.log_events import log_event
from penstock_gateway.settings import GatewayError
from penstock_gateway.slices import ReplicaAddress

TIMEOUT_SECONDS = 5.0
CHECK = "check inter 2s fastinter 500ms downinter 500ms fall 3 rise 1 observe layer4 error-limit 1 on-error mark-down"
"""A replica that refuses a connection is down at once: requests are held or go to other replicas. Health checks bring
it back. Checks alone detect a failure slowly, since a busy replica may be slow to answer them."""
TLS = " ssl verify none check-ssl"
"""Replicas serve HTTPS. Their addresses come from the API server, so their certificates are not checked
(docs/decisions/gateway.md)."""
MAINTENANCE, DRAINING = 0x01, 0x08
"""Bits of `srv_admin_state`, set over the socket."""
ADDED, DELETED = "New server registered.", "Server deleted."

logger = logging.getLogger("penstock.gateway")


class HAProxySocket:
    """HAProxy's runtime API: one command, one reply for each connection."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def send(self, command: str) -> str:
        """Send a command; the reply without empty lines. OSError if HAProxy does not answer."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as link:
            link.settimeout(TIMEOUT_SECONDS)
            link.connect(str(self._path))
            link.sendall(f"{command}\n".encode())
            answer = bytearray()
            while piece := link.recv(65536):
                answer += piece
        return "\n".join(line for line in answer.decode(errors="replace").splitlines() if line.strip())

    def held(self) -> int:
        """Number of requests that are held now."""
        return int(self.send("gateway held"))

    def wait_until_ready(self, seconds: float) -> None:
        """Wait until HAProxy answers; GatewayError if it does not within `seconds`."""
        deadline = time.monotonic() + seconds
        while True:
            try:
                self.send("show info")
            except OSError as error:
                if time.monotonic() > deadline:
                    raise GatewayError(f"HAProxy does not answer after {seconds:g} s: {error}. See its log.") from error
                time.sleep(0.02)
            else:
                return


class ServerState(Enum):
    """State of a server in HAProxy."""

    READY = "ready"
    DRAIN = "drain"
    """Finishes its requests and gets no new ones."""
    LEAVING = "maint"
    """Removed from the cluster; to be deleted when its last connection has ended."""


@dataclass(frozen=True)
class ServerCommand:
    """A command about one server, and the reply of success, which is mostly empty."""

    name: str
    text: str
    state: ServerState | None
    """State of the server afterwards; None: deleted."""
    expected: str = ""


def commands(
    wanted: Mapping[str, ReplicaAddress], present: Mapping[str, ServerState], *, concurrency: int, tls: bool = False
) -> list[ServerCommand]:
    """The commands that change `present` to `wanted`. New servers first, so that there is always one for requests."""
    found: list[ServerCommand] = []
    for name, server in sorted(wanted.items()):
        state = present.get(name)
        if not server.takes_requests:
            continue
        if state is None:
            found.append(_added(server, concurrency, tls=tls))
        if state in {None, ServerState.LEAVING}:
            found.append(ServerCommand(name, f"enable health {BACKEND}/{name}", ServerState.LEAVING))
        if state is not ServerState.READY:
            found.append(_set(name, ServerState.READY))
    for name, state in sorted(present.items()):
        target = wanted.get(name)
        if target is None:
            if state is not ServerState.LEAVING:
                found.append(_set(name, ServerState.LEAVING))
            found.append(ServerCommand(name, f"del server {BACKEND}/{name}", None, DELETED))
        elif not target.takes_requests and state is ServerState.READY:
            found.append(_set(name, ServerState.DRAIN))
    return found


def read_states(text: str) -> dict[str, ServerState]:
    """Parse the reply to `show servers state`; ValueError if it is something else."""
    found: dict[str, ServerState] = {}
    columns: list[str] = []
    for line in text.splitlines():
        words = line.split()
        if line.startswith("#"):
            columns = words[1:]
        elif columns and len(words) >= len(columns):
            row = dict(zip(columns, words, strict=False))
            admin = int(row["srv_admin_state"])
            state = (
                ServerState.LEAVING
                if admin & MAINTENANCE
                else ServerState.DRAIN
                if admin & DRAINING
                else ServerState.READY
            )
            found[row["srv_name"]] = state
    if "srv_admin_state" not in columns:
        raise ValueError(f"unexpected reply of HAProxy to show servers state: {text[:200]!r}")
    return found


def _added(server: ReplicaAddress, concurrency: int, *, tls: bool) -> ServerCommand:
    host = f"[{server.host}]" if ":" in server.host else server.host
    # Servers without a weight get the requests only that name them: see hold.lua.
    command = (
        f"add server {BACKEND}/{server.name} {host}:{server.port} maxconn {concurrency} {CHECK}{TLS if tls else ''}"
        f"{' weight 0' if server.canary else ''}"
    )
    # A new server is in maintenance.
    return ServerCommand(server.name, command, ServerState.LEAVING, ADDED)


def _set(name: str, state: ServerState) -> ServerCommand:
    return ServerCommand(name, f"set server {BACKEND}/{name} state {state.value}", state)


class ServerSync:
    """Keeps HAProxy's servers equal to the replicas. Thread-safe: used by the watch and by the retry timer."""

    def __init__(self, send: Callable[[str], str], *, concurrency: int, tls: bool = False) -> None:
        """`tls`: the replicas serve HTTPS."""
        self._send = send
        self._tls = tls
        self._concurrency = concurrency
        self._lock = threading.Lock()
        self._present: dict[str, ServerState] | None = None
        """None: unknown, to be read from HAProxy."""
        self._wanted: Mapping[str, ReplicaAddress] = {}
        self._canary_percent = 0
        self._canary: str | None = ""
        """The canary that HAProxy has; None: unknown."""

    def set_replicas(self, wanted: Mapping[str, ReplicaAddress], *, canary_percent: int = 0) -> None:
        """Set the wanted servers, and the share of those of the canary. OSError if HAProxy does not answer."""
        with self._lock:
            self._wanted, self._canary_percent = wanted, canary_percent
            self._synchronise()

    def retry(self) -> None:
        """Repeat refused commands: a server with open connections cannot be deleted yet. OSError as above."""
        with self._lock:
            self._synchronise()

    def _synchronise(self) -> None:
        present = self._present
        # Unknown until the end: a command that was sent but not answered may or may not have been executed.
        self._present = None
        if present is None:
            present = read_states(self._send(f"show servers state {BACKEND}"))
        certain = True
        failed: set[str] = set()
        for command in commands(self._wanted, present, concurrency=self._concurrency, tls=self._tls):
            if command.name in failed:
                continue
            reply = self._send(command.text)
            if reply == command.expected:
                _record(present, command)
                continue
            failed.add(command.name)
            if command.state is None:
                # The server still has open connections.
                logger.debug("HAProxy refused %r: %s", command.text, reply)
            else:
                logger.warning(
                    "HAProxy refused %r: %s",
                    command.text,
                    reply,
                    extra=log_event("HAProxyRefused", object=command.name),
                )
                certain = False
        self._present = present if certain else None
        ready = [name for name, state in sorted(present.items()) if state is ServerState.READY]
        names = ",".join(name for name in ready if name in self._wanted and self._wanted[name].canary)
        canary = f"{self._canary_percent} {names}" if names and self._canary_percent else ""
        if canary != self._canary:
            self._canary = None
            self._send(f"gateway canary {canary or '0'}")
            self._canary = canary
            logger.info(
                "the canary gets %d %% of the requests",
                self._canary_percent if canary else 0,
                extra=log_event("CanaryShare", object=names),
            )


def _record(present: dict[str, ServerState], command: ServerCommand) -> None:
    name, state = command.name, command.state
    if state is None:
        del present[name]
        return
    if state is not present.get(name) and state is not ServerState.LEAVING:
        ready = state is ServerState.READY
        logger.info(
            "replica %s: %s",
            name,
            "accepts requests" if ready else "draining",
            extra=log_event("ReplicaChanged", object=name, reason="Ready" if ready else "Draining"),
        )
    present[name] = state
