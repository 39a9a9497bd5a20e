"""EndpointSlices of the endpoint's pods -> the servers there should be. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any


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


def _server(endpoint: Mapping[str, Any], port: int) -> Server | None:
    addresses = endpoint.get("addresses") or ()
    if not addresses:
        return None
    host = str(addresses[0])
    pod = str((endpoint.get("targetRef") or {}).get("name") or "address")
    # Not said means ready, by the API's own rule.
    ready = (endpoint.get("conditions") or {}).get("ready")
    return Server(f"{pod}_{host}", host, port, takes_requests=ready is not False)
