"""EndpointSlices of the endpoint's pods -> the servers there should be. Pure: times are given."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

PARTING_SECONDS = 10.0
"""A slice that went still counts for so long: by then the others of its Service have gone too, if they are to go."""


@dataclass(frozen=True, order=True)
class Server:
    """A replica, as HAProxy is to know it."""

    name: str
    """Pod and address: a pod that comes back elsewhere is another server."""
    host: str
    port: int
    takes_requests: bool
    """False: it finishes what it has, and is given nothing more."""


def servers(slices: Iterable[Mapping[str, Any]]) -> dict[str, Server]:
    """By name. A pod that is ready anywhere is ready: for a moment it may stand in two slices."""
    found: dict[str, Server] = {}
    for piece in slices:
        port = next((entry["port"] for entry in piece.get("ports") or () if entry.get("port")), None)
        if port is None:
            continue
        for endpoint in piece.get("endpoints") or ():
            server = _server(endpoint, int(port))
            if server is not None and (server.takes_requests or server.name not in found):
                found[server.name] = server
    return found


class Known:
    """The slices that count: those that there are, and those that have just gone.

    A Service of over a hundred replicas has several slices, which go one after the other when it is taken away; and it
    has one even when it has no pods. So the servers of a slice that went finish what they have; and when the last one
    goes, all that went with it take requests again: the replicas are still there for the last that come here.
    """

    def __init__(self) -> None:
        self._present: dict[str, Mapping[str, Any]] = {}
        self._gone: dict[str, tuple[float, Mapping[str, Any]]] = {}

    def becomes(self, slices: Mapping[str, Mapping[str, Any]], now: float) -> None:
        """What there is from `now` (seconds, of a clock that only goes on), by name."""
        self.forget(now)
        went = {name: (now, piece) for name, piece in self._present.items() if name not in slices}
        kept = {name: gone for name, gone in self._gone.items() if name not in slices}
        self._present, self._gone = dict(slices), kept | went

    def forget(self, now: float) -> bool:
        """Leave out what went some time ago; True when that changes what counts."""
        if not self._present:
            return False
        before = len(self._gone)
        self._gone = {name: (at, piece) for name, (at, piece) in self._gone.items() if now - at < PARTING_SECONDS}
        return len(self._gone) < before

    @property
    def service_gone(self) -> bool:
        """True when there is no slice any more, and was one."""
        return not self._present and bool(self._gone)

    def servers(self) -> dict[str, Server]:
        """Those of all slices that count, by name. What a slice that is there says of a pod goes before."""
        gone = servers(piece for _, piece in self._gone.values())
        if self._present:
            gone = {name: replace(server, takes_requests=False) for name, server in gone.items()}
        return gone | servers(self._present.values())


def _server(endpoint: Mapping[str, Any], port: int) -> Server | None:
    addresses = endpoint.get("addresses") or ()
    if not addresses:
        return None
    host = str(addresses[0])
    pod = str((endpoint.get("targetRef") or {}).get("name") or "address")
    # Not said means ready, by the API's own rule.
    ready = (endpoint.get("conditions") or {}).get("ready")
    return Server(f"{pod}_{host}", host, port, takes_requests=ready is not False)
