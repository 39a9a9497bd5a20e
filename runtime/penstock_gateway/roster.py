"""The servers that HAProxy has, kept as they should be: what to tell it, in its own commands."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum

from penstock_gateway.config import BACKEND
from penstock_gateway.slices import Server

CHECK = "check inter 2s fastinter 500ms downinter 500ms fall 3 rise 1 observe layer4 error-limit 1 on-error mark-down"
"""A replica that takes no connection gets no request from that moment on: those that come are held, or go to others.
Checks bring it back. By checks alone it is slow to fall: a replica at work may take its time to answer one."""
MAINTENANCE, DRAINING = 0x01, 0x08
"""Bits of `srv_admin_state`: said by us, over the socket."""
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
        if not server.takes_requests:
            continue
        if state is None:
            found.append(_added(server, concurrency))
        if state in {None, State.LEAVING}:
            found.append(Change(name, f"enable health {BACKEND}/{name}", State.LEAVING))
        if state is not State.READY:
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


def read_states(text: str) -> dict[str, State]:
    """What HAProxy says to `show servers state`. ValueError when that is something else."""
    found: dict[str, State] = {}
    columns: list[str] = []
    for line in text.splitlines():
        words = line.split()
        if line.startswith("#"):
            columns = words[1:]
        elif columns and len(words) >= len(columns):
            row = dict(zip(columns, words, strict=False))
            admin = int(row["srv_admin_state"])
            state = State.LEAVING if admin & MAINTENANCE else State.DRAIN if admin & DRAINING else State.READY
            found[row["srv_name"]] = state
    if "srv_admin_state" not in columns:
        raise ValueError(f"haproxy, asked for its servers, says {text[:200]!r}")
    return found


def _added(server: Server, concurrency: int) -> Change:
    host = f"[{server.host}]" if ":" in server.host else server.host
    command = f"add server {BACKEND}/{server.name} {host}:{server.port} maxconn {concurrency} {CHECK}"
    # It begins in maintenance.
    return Change(server.name, command, State.LEAVING, ADDED)


def _set(name: str, state: State) -> Change:
    return Change(name, f"set server {BACKEND}/{name} state {state.value}", state)


class Roster:
    """Thread-safe: the watch says what is wanted, a clock tries again what HAProxy has refused so far."""

    def __init__(self, tell: Callable[[str], str], *, concurrency: int) -> None:
        self._tell = tell
        self._concurrency = concurrency
        self._lock = threading.Lock()
        self._present: dict[str, State] | None = None
        """None: not known any more, to be asked for."""
        self._wanted: Mapping[str, Server] = {}

    def want(self, wanted: Mapping[str, Server]) -> None:
        """These are the servers there should be. OSError when HAProxy is not there."""
        with self._lock:
            self._wanted = wanted
            self._act()

    def again(self) -> None:
        """Whatever could not be done yet: a server is deleted when its last connection has ended. OSError as above."""
        with self._lock:
            self._act()

    def _act(self) -> None:
        present = self._present
        # Until the end of this, what is there is as uncertain as any command is that was sent and not answered.
        self._present = None
        if present is None:
            present = read_states(self._tell(f"show servers state {BACKEND}"))
        certain = True
        failed: set[str] = set()
        for change in changes(self._wanted, present, concurrency=self._concurrency):
            if change.name in failed:
                continue
            said = self._tell(change.command)
            if said == change.expected:
                _note(present, change)
                continue
            failed.add(change.name)
            if change.state is None:
                # Connections that are still open: no news.
                logger.debug("haproxy, told to %s: %s", change.command, said)
            else:
                logger.warning("haproxy, told to %s: %s", change.command, said)
                certain = False
        self._present = present if certain else None


def _note(present: dict[str, State], change: Change) -> None:
    name, state = change.name, change.state
    if state is None:
        del present[name]
        return
    if state is not present.get(name) and state is not State.LEAVING:
        logger.info("replica %s: %s", name, "takes requests" if state is State.READY else "finishes its last ones")
    present[name] = state
