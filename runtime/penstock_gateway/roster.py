"""The servers that HAProxy has, kept as they should be: what to tell it, in its own commands."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum

from penstock_gateway.config import BACKEND
from penstock_gateway.slices import Server

CHECK = "check inter 2s fall 3 rise 1"
"""Kubernetes looks every second as well; this one also notices what is cut off from the gateway alone. Slow to judge: a
replica at work may take its time, and who takes the last one away has nobody left."""
ADDED, DELETED = "New server registered.", "Server deleted."

logger = logging.getLogger("penstock.gateway")


class State(Enum):
    """What HAProxy does with a server."""

    READY = "ready"
    DRAIN = "drain"
    """Finishes what it has."""
    LEAVING = "maint"
    """Gone from the cluster; to be deleted when its last connection has ended."""


@dataclass(frozen=True)
class Change:
    """One command, and what HAProxy says when it has obeyed: nothing, mostly."""

    name: str
    command: str
    state: State | None
    """The server's, afterwards; None: it is gone."""
    expected: str = ""


def changes(wanted: Mapping[str, Server], present: Mapping[str, State], *, concurrency: int) -> list[Change]:
    """What leads from `present` to `wanted`. New ones first, so that there is always somebody to answer."""
    found: list[Change] = []
    for name, server in sorted(wanted.items()):
        state = present.get(name)
        if state is None and server.takes_requests:
            found += _added(server, concurrency)
        elif server.takes_requests and state in {State.DRAIN, State.LEAVING}:
            found.append(_set(name, State.READY))
    for name, state in sorted(present.items()):
        target = wanted.get(name)
        if target is None:
            if state is not State.LEAVING:
                found.append(_set(name, State.LEAVING))
            found.append(Change(name, f"del server {BACKEND}/{name}", None, DELETED))
        elif not target.takes_requests and state is State.READY:
            found.append(_set(name, State.DRAIN))
    return found


def _added(server: Server, concurrency: int) -> list[Change]:
    host = f"[{server.host}]" if ":" in server.host else server.host
    place = f"{BACKEND}/{server.name}"
    add = f"add server {place} {host}:{server.port} maxconn {concurrency} {CHECK}"
    return [
        # It begins in maintenance.
        Change(server.name, add, State.LEAVING, ADDED),
        Change(server.name, f"enable health {place}", State.LEAVING),
        Change(server.name, f"enable server {place}", State.READY),
    ]


def _set(name: str, state: State) -> Change:
    return Change(name, f"set server {BACKEND}/{name} state {state.value}", state)


class Roster:
    """Thread-safe: the watch says what is wanted, a clock tries again what HAProxy has refused so far."""

    def __init__(self, tell: Callable[[str], str], *, concurrency: int) -> None:
        self._tell = tell
        self._concurrency = concurrency
        self._lock = threading.Lock()
        self._present: dict[str, State] = {}
        self._wanted: Mapping[str, Server] = {}

    def want(self, wanted: Mapping[str, Server]) -> None:
        """These are the servers there should be."""
        with self._lock:
            self._wanted = wanted
            self._act()

    def again(self) -> None:
        """Whatever could not be done yet: a server is deleted when its last connection has ended."""
        with self._lock:
            self._act()

    def _act(self) -> None:
        failed: set[str] = set()
        for change in changes(self._wanted, self._present, concurrency=self._concurrency):
            if change.name in failed:
                continue
            said = self._tell(change.command)
            if said != change.expected:
                failed.add(change.name)
                # A deletion waits for connections; that is no news.
                level = logging.DEBUG if change.state is None else logging.WARNING
                logger.log(level, "haproxy, told to %s: %s", change.command, said)
                continue
            if change.state is None:
                del self._present[change.name]
            else:
                self._note(change.name, change.state)

    def _note(self, name: str, state: State) -> None:
        if state is not self._present.get(name) and state is not State.LEAVING:
            logger.info("replica %s: %s", name, "takes requests" if state is State.READY else "finishes its last ones")
        self._present[name] = state
