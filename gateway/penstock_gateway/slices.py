"""The replicas in the EndpointSlices of a Service. Pure: times are arguments."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

REMOVED_SLICE_SECONDS = 10.0
"""How long a removed slice still counts. If the whole Service is deleted, its other slices are removed within this."""


@dataclass(frozen=True, order=True)
class ReplicaAddress:
    """A replica, for HAProxy."""

    name: str
    """Pod and address: a pod with a new address is another replica."""
    host: str
    port: int
    takes_requests: bool
    """False: it finishes its requests and gets no new ones."""
    canary: bool = False
    """It gets the canary's share of the requests, and no others."""


CANARY_PERCENT = "penstock.dev/canary-percent"
"""Label of the slices: the share of the requests for the pods of the canary."""


def canary_percent(slices: Iterable[Mapping[str, Any]]) -> int:
    """The canary's share, 0 to 100. Slices get a changed label one after the other: the largest counts."""
    labels = ((piece.get("metadata") or {}).get("labels") or {} for piece in slices)
    found = [text for one in labels if (text := str(one.get(CANARY_PERCENT) or "")).isdecimal() and len(text) < 4]
    return min(100, max(map(int, found), default=0))


def replicas(slices: Iterable[Mapping[str, Any]], canary: str = "") -> dict[str, ReplicaAddress]:
    """Replicas by name. A pod that is ready in one slice is ready: it may be in two slices for a moment. `canary`: the
    name of the canary's Deployment; may be empty."""
    found: dict[str, ReplicaAddress] = {}
    for piece in slices:
        port = next((entry["port"] for entry in piece.get("ports") or () if entry.get("port")), None)
        if port is None:
            continue
        for endpoint in piece.get("endpoints") or ():
            replica = _replica(endpoint, int(port), canary)
            if replica is not None and (replica.takes_requests or replica.name not in found):
                found[replica.name] = replica
    return found


class SliceHistory:
    """The present slices and those that were removed recently.

    A Service with more than a hundred replicas has several slices, which are removed one after the other when it is
    deleted; a Service without pods still has one slice. Therefore the replicas of a removed slice drain at first; when
    the last slice is removed, all recently removed replicas accept requests again, for the last requests that arrive.
    """

    def __init__(self, canary: str = "") -> None:
        """`canary`: the name of the canary's Deployment; may be empty."""
        self._canary = canary
        self._present: dict[str, Mapping[str, Any]] = {}
        self._removed: dict[str, tuple[float, Mapping[str, Any]]] = {}

    def update(self, slices: Mapping[str, Mapping[str, Any]], now: float) -> None:
        """Set the present slices by name. `now`: seconds of a monotonic clock."""
        self.drop_old(now)
        went = {name: (now, piece) for name, piece in self._present.items() if name not in slices}
        kept = {name: removed for name, removed in self._removed.items() if name not in slices}
        self._present, self._removed = dict(slices), kept | went

    def drop_old(self, now: float) -> bool:
        """Drop slices that were removed long ago; True if there were any."""
        if not self._present:
            return False
        before = len(self._removed)
        self._removed = {
            name: (at, piece) for name, (at, piece) in self._removed.items() if now - at < REMOVED_SLICE_SECONDS
        }
        return len(self._removed) < before

    @property
    def service_removed(self) -> bool:
        """True if all slices were removed."""
        return not self._present and bool(self._removed)

    @property
    def canary_percent(self) -> int:
        """The canary's share of the requests."""
        return canary_percent(self._present.values())

    def replicas(self) -> dict[str, ReplicaAddress]:
        """Replicas of all slices by name. Present slices take precedence."""
        removed = replicas((piece for _, piece in self._removed.values()), self._canary)
        if self._present:
            removed = {name: replace(replica, takes_requests=False) for name, replica in removed.items()}
        return removed | replicas(self._present.values(), self._canary)


def _replica(endpoint: Mapping[str, Any], port: int, canary: str) -> ReplicaAddress | None:
    addresses = endpoint.get("addresses") or ()
    if not addresses:
        return None
    host = str(addresses[0])
    pod = str((endpoint.get("targetRef") or {}).get("name") or "address")
    # The API defines a missing condition as ready.
    ready = (endpoint.get("conditions") or {}).get("ready")
    tries = bool(canary) and pod.startswith(f"{canary}-")
    return ReplicaAddress(f"{pod}_{host}", host, port, takes_requests=ready is not False, canary=tries)
