"""Equal shares of a resource among clients, by cost: start-time fair queueing. Pure: no clock."""

from __future__ import annotations

from collections.abc import Iterable
from statistics import median

_MOST_KEPT = 1024
"""Clients that are remembered. For one more, the half with the least time is forgotten."""


class FairShares:
    """What each client has used, on a virtual time that all clients have in common.

    The client with the least time is next. A client that had nothing to do starts at the time of the others: it gets no
    credit for that, and pays no debt for a resource that it had alone.
    """

    def __init__(self) -> None:
        self._now = 0.0
        self._times: dict[str, float] = {}

    def next(self, clients: Iterable[str]) -> str:
        """The client to be served next; ValueError if there are none. Among equals the first one."""
        chosen = min(clients, key=self._time)
        self._now = self._time(chosen)
        return chosen

    def charge(self, client: str, cost: float) -> None:
        """A client has been served work of this cost."""
        self._times[client] = self._time(client) + cost
        if len(self._times) > _MOST_KEPT:
            self._now = max(self._now, median(self._times.values()))
            self._times = {name: time for name, time in self._times.items() if time > self._now}

    def _time(self, client: str) -> float:
        return max(self._now, self._times.get(client, 0.0))
