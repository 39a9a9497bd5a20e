"""The choice of the connection to close when a limit is reached takes the same time however many are open."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from penstock_runtime.http.transport.pool import MAX_LOOKS, ClientShare

OPEN = 4 * MAX_LOOKS


class Open:
    """A connection that counts how often it is looked at."""

    looks = 0

    def __init__(self, *, waits: bool, rate: float = 0.0) -> None:
        self.waits = waits
        self.rate = rate
        self.transport: asyncio.Transport | None = None
        self.client: Any = None

    @property
    def is_idle(self) -> bool:
        Open.looks += 1
        return self.waits

    @property
    def waits_for_client(self) -> bool:
        return self.is_idle

    def transfer_rate(self, now: float) -> float | None:
        Open.looks += 1
        return self.rate

    def evict(self) -> None: ...

    def sweep(self, now: float) -> None: ...

    def close_if_idle(self) -> bool:
        return False


def share(connections: list[Open]) -> ClientShare:
    client = ClientShare("192.0.2.1")
    client.connections.update(dict.fromkeys(connections))
    client.holders.update(connections)
    return client


@pytest.fixture(autouse=True)
def _no_looks_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Open, "looks", 0)


@pytest.mark.parametrize("find", [ClientShare.idle_connection, ClientShare.waiting_connection])
def test_a_new_connection_costs_a_bounded_number_of_looks_at_busy_ones(find: Any) -> None:
    assert find(share([Open(waits=False) for _ in range(OPEN)])) is None
    assert Open.looks == MAX_LOOKS


@pytest.mark.parametrize("find", [ClientShare.idle_connection, ClientShare.waiting_connection])
def test_an_idle_connection_behind_many_busy_ones_is_found_by_a_later_look(find: Any) -> None:
    connections = [Open(waits=False) for _ in range(OPEN)]
    connections[-1].waits = True
    client = share(connections)

    assert [find(client) for _ in range(OPEN // MAX_LOOKS)] == [None, None, None, connections[-1]]


def test_the_oldest_idle_connections_are_found_first() -> None:
    connections = [Open(waits=number % 2 == 1) for number in range(6)]
    client = share(connections)
    for oldest in connections[1::2]:
        assert client.idle_connection() is oldest
        del client.connections[oldest]

    assert client.idle_connection() is None


def test_the_slowest_of_a_bounded_number_of_bodies_gives_way() -> None:
    few = [Open(waits=True, rate=float(number)) for number in (3, 1, 2)]
    many = [Open(waits=True, rate=float(number)) for number in range(OPEN)]

    assert share(few).slowest_connection(0.0) is few[1]
    Open.looks = 0
    assert share(many).slowest_connection(0.0) in many
    assert Open.looks == MAX_LOOKS
