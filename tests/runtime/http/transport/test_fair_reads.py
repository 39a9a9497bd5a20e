"""FairQueue of client addresses: who is parsed and answered next, and whose tiny pieces are read next."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import cast

from hypothesis import given
from hypothesis import strategies as st

from penstock_runtime.http.transport.fair_reads import READS, FairQueue, LimitedReads, PieceCredit


class ManualLoop:
    """Timers that the test runs."""

    def __init__(self) -> None:
        self.timers: list[Callable[[], None]] = []

    def call_later(self, _: float, callback: Callable[[], None]) -> object:
        """Wait for `run`."""
        self.timers.append(callback)
        return callback

    def run(self) -> bool:
        """Run the timer; false if none is set."""
        due, self.timers = self.timers, []
        for callback in due:
            callback()
        return bool(due)


class Connection:
    """Counts how often it may be read."""

    def __init__(self) -> None:
        self.is_read = True
        self.resumed = 0

    def pause_reading(self) -> None:
        self.is_read = False

    def resume_reading(self) -> None:
        self.is_read = True
        self.resumed += 1


def order(
    waiting: list[tuple[str, int]], cancelled: int | None = None, seconds: Mapping[str, float] = MappingProxyType({})
) -> list[tuple[str, int]]:
    """The order in which these are started. `seconds`: that each takes, by client."""
    found: list[tuple[str, int]] = []
    clock = 0.0

    async def run() -> None:
        turns = FairQueue(asyncio.get_running_loop(), lambda: clock)
        done = asyncio.Event()

        def start(client: str, number: int) -> None:
            nonlocal clock
            clock += seconds.get(client, 0.001)
            found.append((client, number))
            if len(found) == len(waiting) - (cancelled is not None):
                done.set()

        made = [turns.add(client, partial(start, client, number)) for client, number in waiting]
        if cancelled is not None:
            made[cancelled].cancel()
        assert not turns.is_free()
        await asyncio.wait_for(done.wait(), 60)

    asyncio.run(run())
    return found


def test_one_of_each_client_is_started_in_turn() -> None:
    many = [("many", number) for number in range(300)]

    assert order([*many, ("one", 0), ("two", 0), ("two", 1)]) == [
        many[0], ("one", 0), ("two", 0), many[1], ("two", 1), *many[2:]
    ]  # fmt: skip


def test_a_client_whose_requests_cost_more_is_started_less_often() -> None:
    found = order([*(("a", 0),) * 9, *(("b", 0),) * 9], seconds={"a": 0.03})

    assert "".join(client for client, _ in found) == "ab" + "b" * 8 + "a" * 8
    found = order([*(("a", 0),) * 5, *(("b", 0),) * 9], seconds={"a": 0.003})
    assert "".join(client for client, _ in found) == "abbbabbbabbbaa"


def test_a_cancelled_turn_is_not_started() -> None:
    assert order([("a", 0), ("a", 1), ("b", 0)], cancelled=0) == [("b", 0), ("a", 1)]


def test_of_one_client_a_few_connections_with_tiny_pieces_are_read_at_a_time_and_all_in_turn() -> None:
    loop = ManualLoop()
    turns = LimitedReads(cast("asyncio.AbstractEventLoop", loop))
    connections = [Connection() for _ in range(100)]
    other = Connection()
    for connection in connections:
        turns.wait("a", connection)
    turns.wait("b", other)
    assert not any(one.is_read for one in (*connections, other))
    for number in range(2 * 100 // READS):
        assert loop.run()
        assert sum(one.is_read for one in connections) == READS
        assert other.is_read
        if number % 2:  # some send a byte, others nothing
            for connection in connections:
                if connection.is_read:
                    turns.wait("a", connection)

    assert {one.resumed for one in connections} <= {1, 2, 3}


def test_a_connection_whose_request_is_complete_is_read_again_at_once() -> None:
    loop = ManualLoop()
    turns = LimitedReads(cast("asyncio.AbstractEventLoop", loop))
    one, two = Connection(), Connection()
    turns.wait("a", one)
    turns.wait("a", two)
    turns.leave("a", one)
    assert (one.is_read, two.is_read) == (True, False)
    loop.run()
    turns.leave("a", two)

    assert two.is_read
    assert not loop.run()


def test_headers_and_body_in_two_pieces_and_large_pieces_are_never_delayed() -> None:
    assert PieceCredit().pays(60)
    credit = PieceCredit()
    assert [credit.pays(60), *(credit.pays(1400) for _ in range(100))] == [True] * 101
    assert [credit.pays(1) for _ in range(6)].count(False) >= 3


@given(st.lists(st.integers(1, 511), min_size=2))
def test_a_request_gets_one_tiny_piece_before_it_waits(pieces: list[int]) -> None:
    credit = PieceCredit()

    assert [credit.pays(size) for size in pieces] == [True] + [False] * (len(pieces) - 1)
