"""Equal shares of a resource among clients, and the line of those that wait for it."""

from __future__ import annotations

import asyncio
import gc
import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock_runtime.admission import Entry, FairLine, FairShares
from penstock_runtime.errors import Overloaded
from penstock_runtime.settings import QueueSettings


def test_the_client_that_was_served_least_is_next() -> None:
    shares = FairShares()
    shares.charge("a", 10)
    shares.charge("b", 3)

    assert shares.next({"a": 0, "b": 0}) == "b"
    shares.charge("b", 10)
    assert shares.next({"a": 0, "b": 0}) == "a"


def test_a_client_that_comes_later_has_no_credit_and_one_that_was_alone_no_debt() -> None:
    shares = FairShares()
    for _ in range(100):
        assert shares.next({"a": 0}) == "a"
        shares.charge("a", 10)
    served = []
    for _ in range(10):
        client = shares.next({"a": 0, "b": 0})
        served.append(client)
        shares.charge(client, 10)

    assert served.count("a") == pytest.approx(5, abs=1)


def test_short_work_does_not_wait_for_long_work_of_each_of_the_others() -> None:
    shares = FairShares()
    costs = {f"long {number}": 100.0 for number in range(10)}
    for _ in range(25):  # in the middle of a round, with equal times
        shares.charge(shares.next(costs), 100)

    assert shares.next({**costs, "short": 1}) == "short"


@given(st.lists(st.integers(1, 100), min_size=2, max_size=6), st.sets(st.integers(0, 149)))
def test_clients_that_always_wait_have_had_the_same_whatever_their_costs(costs: list[int], visitors: set[int]) -> None:
    shares = FairShares()
    wanted = {str(number): float(cost) for number, cost in enumerate(costs)}
    had = dict.fromkeys(wanted, 0.0)
    for number in range(150):
        # Others that come once have no part in it.
        visitor = {f"visitor {number}": 1.0} if number in visitors else {}
        client = shares.next({**wanted, **visitor})
        cost = (wanted | visitor)[client]
        shares.charge(client, cost)
        if client in had:
            had[client] += cost

    assert max(had.values()) - min(had.values()) <= 2 * max(costs)


def test_clients_that_come_once_do_not_keep_long_work_waiting() -> None:
    shares = FairShares()
    served = []
    for number in range(300):
        costs = {"long": 100.0, f"visitor {number}": 1.0}
        client = shares.next(costs)
        shares.charge(client, costs[client])
        served.append(client)

    assert served.count("long") >= 1


def test_what_it_remembers_is_bounded() -> None:
    shares = FairShares()
    for number in range(10_000):
        client = f"client {number}"
        assert shares.next({client: 0}) == client
        shares.charge(client, 1)

    assert len(shares._times) <= 1025


class Bench:
    """A line, and the order in which callers were served."""

    def __init__(self, slots: int = 1, **limits: int) -> None:
        self.line = FairLine(slots, QueueSettings(**limits), "the press")
        self.served: list[str] = []
        self.gate = asyncio.Event()

    async def work(self, client: str, cost: int) -> None:
        async with self.line.slot(client, cost):
            self.served.append(client)
            await self.gate.wait()

    def start(self, client: str, cost: int = 1) -> asyncio.Task[None]:
        return asyncio.create_task(self.work(client, cost))


@pytest.mark.parametrize(
    ("cost_of_a", "expected"),
    [
        (1, ["a", "b", "a", "b", "a", "b"]),  # one after the other
        (10, ["a", "b", "b", "b", "a", "a"]),  # the client with the cheaper work is served more often
    ],
)
def test_the_next_slot_is_for_the_client_that_has_had_the_least(cost_of_a: int, expected: list[str]) -> None:
    async def main() -> list[str]:
        bench = Bench()
        tasks = [bench.start("a", cost_of_a) for _ in range(3)] + [bench.start("b") for _ in range(3)]
        await asyncio.sleep(0)
        bench.gate.set()
        await asyncio.gather(*tasks)
        return bench.served

    assert asyncio.run(main()) == expected


@pytest.mark.parametrize("limits", [{"max_queue_rows": 2}, {"max_queue_tokens": 2}])
def test_a_full_line_refuses_the_newest_of_the_client_with_the_most(limits: dict[str, int]) -> None:
    async def main() -> list[object]:
        bench = Bench(**limits)
        tasks = [bench.start("many") for _ in range(3)]
        await asyncio.sleep(0)
        with pytest.raises(Overloaded, match="2 requests wait for the press already"):
            await bench.line.wait("many")
        tasks.append(bench.start("few"))
        await asyncio.sleep(0)
        bench.gate.set()
        return await asyncio.gather(*tasks, return_exceptions=True)

    found = asyncio.run(main())

    assert [isinstance(one, Overloaded) for one in found] == [False, False, True, False]


def test_a_caller_that_is_cancelled_as_it_gets_the_slot_passes_it_on() -> None:
    async def main() -> list[str]:
        bench = Bench()
        first = await bench.line.wait("first")
        before, after = bench.start("x"), bench.start("y")
        await asyncio.sleep(0)
        before.cancel()
        bench.line.release(first)  # before the cancelled one has run
        late = bench.start("z")
        bench.gate.set()
        await asyncio.gather(before, after, late, return_exceptions=True)
        return bench.served

    assert asyncio.run(main()) == ["y", "z"]


@pytest.mark.parametrize("seed", range(5))
def test_no_slot_is_lost_or_given_twice_when_callers_are_cancelled_or_refused(seed: int) -> None:
    chance = random.Random(seed)
    inside: Counter[str] = Counter()

    async def work(line: FairLine, client: str) -> None:
        async with line.slot(client, chance.randint(1, 5)):
            inside["now"] += 1
            inside["most"] = max(inside["most"], inside["now"])
            try:
                await asyncio.sleep(0)
            finally:
                inside["now"] -= 1

    async def main() -> list[Entry]:
        line = FairLine(2, QueueSettings(max_queue_rows=6), "the press")
        tasks = []
        for number in range(200):
            tasks.append(asyncio.create_task(work(line, f"client {number % 4}")))
            if chance.random() < 0.3:
                chance.choice(tasks).cancel()
            if chance.random() < 0.5:
                await asyncio.sleep(0)
        await asyncio.gather(*tasks, return_exceptions=True)
        return [await asyncio.wait_for(line.wait("last"), 5) for _ in range(2)]

    assert len(asyncio.run(main())) == 2
    assert inside["most"] == 2


def test_a_caller_that_is_refused_and_leaves_at_the_same_time_is_no_error_of_the_loop() -> None:
    async def main() -> list[object]:
        found: list[object] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: found.append(context))
        bench = Bench(max_queue_rows=1)
        tasks = [bench.start("many") for _ in range(2)]
        await asyncio.sleep(0)
        tasks.append(bench.start("few"))
        for _ in range(2):
            tasks[1].cancel()
            await asyncio.sleep(0)
        bench.gate.set()
        await asyncio.gather(*tasks, return_exceptions=True)
        del tasks
        gc.collect()
        return found

    assert asyncio.run(main()) == []
