"""There are never two leaders, and never none for long. Virtual time; the lease behaves as the API server's."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock_operator.cluster.api import ClusterPort, Json, ResourceKind
from penstock_operator.cluster.errors import Conflict, Unavailable
from penstock_operator.leader.lease import HAND_OVER_SECONDS, Leadership, LeaseTimes
from tests.operator.virtual_time import run

TIMES = LeaseTimes()


@dataclass
class LeaseServer:
    """A Lease with optimistic concurrency, on a network that can be cut off for some replicas."""

    value: Json | None = None
    version: int = 0
    cut_off: set[str] = field(default_factory=set)
    writes: list[tuple[float, str]] = field(default_factory=list)
    seconds: float = 0.25
    """There; the answer comes back at once."""
    lost_answers: bool = False
    answer_seconds: float = 0.0
    """How long the answer to a write travels."""

    def store(self, value: Json) -> Json:
        self.version += 1
        self.value = copy.deepcopy(value)
        self.value["metadata"]["resourceVersion"] = str(self.version)
        self.writes.append((asyncio.get_running_loop().time(), value["spec"]["holderIdentity"]))
        return copy.deepcopy(self.value)


class Network:
    """The connection of one replica to the lease server."""

    def __init__(self, server: LeaseServer, name: str) -> None:
        self._server = server
        self._name = name

    async def _travel(self) -> None:
        await asyncio.sleep(self._server.seconds)
        if self._name in self._server.cut_off:
            await asyncio.sleep(60)
            raise Unavailable("no way")

    async def get(self, kind: ResourceKind, name: str, namespace: str = "") -> Json | None:
        await self._travel()
        return copy.deepcopy(self._server.value)

    async def create(self, value: Json) -> Json:
        await self._travel()
        if self._server.value is not None:
            raise Conflict("exists", status=409)
        return self._server.store(value)

    async def replace(self, value: Json) -> Json:
        await self._travel()
        assert self._server.value is not None
        if value["metadata"]["resourceVersion"] != self._server.value["metadata"]["resourceVersion"]:
            raise Conflict("changed", status=409)
        answer = self._server.store(value)
        await asyncio.sleep(60 if self._server.lost_answers else self._server.answer_seconds)
        return answer


class Replica:
    """A process that leads when it can."""

    def __init__(self, server: LeaseServer, name: str) -> None:
        self.name = name
        clock = asyncio.get_running_loop().time
        # The lease uses three methods of the port.
        port = cast("ClusterPort", Network(server, name))
        self.leadership = Leadership(port, namespace="a", name="l", identity=name, times=TIMES, clock=clock)
        self.task = asyncio.create_task(self._live())

    async def _live(self) -> None:
        await self.leadership.acquire()
        await self.leadership.hold()

    @property
    def leads(self) -> bool:
        return self.leadership.held

    async def kill(self) -> None:
        """End it as kill -9 does: without releasing the lease."""
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)


def scenario(body: Callable[[LeaseServer], Coroutine[Any, Any, Any]]) -> Any:
    return run(body(LeaseServer()))


async def seconds_until(condition: Callable[[], bool], limit: float = 60.0) -> float:
    loop = asyncio.get_running_loop()
    begin = loop.time()
    while not condition():
        assert loop.time() - begin < limit, "the condition did not hold within the limit"
        await asyncio.sleep(0.05)
    return loop.time() - begin


def test_the_first_replica_leads_at_once_and_the_second_waits() -> None:
    async def body(server: LeaseServer) -> tuple[bool, bool]:
        first = Replica(server, "a")
        await asyncio.sleep(1)
        second = Replica(server, "b")
        await asyncio.sleep(60)
        return first.leads, second.leads

    assert scenario(body) == (True, False)


def test_after_a_kill_the_other_leads_within_fifteen_seconds_and_not_before_the_lease_has_run_out() -> None:
    async def body(server: LeaseServer) -> float:
        first = Replica(server, "a")
        await asyncio.sleep(1)
        second = Replica(server, "b")
        await asyncio.sleep(33.3)
        await first.kill()
        return await seconds_until(lambda: second.leads)

    assert TIMES.duration_seconds - TIMES.interval_seconds - 1 < scenario(body) < 15.0


def test_a_leader_that_ends_cleanly_releases_the_lease_at_once() -> None:
    async def body(server: LeaseServer) -> float:
        first = Replica(server, "a")
        await asyncio.sleep(1)
        second = Replica(server, "b")
        await asyncio.sleep(20)
        await first.kill()
        await first.leadership.release()
        return await seconds_until(lambda: second.leads)

    assert scenario(body) < 3.0


def test_a_renewal_without_an_awaited_answer_does_not_prevent_the_hand_over() -> None:
    async def body(server: LeaseServer) -> str:
        first = Replica(server, "a")
        await asyncio.sleep(1)
        server.lost_answers = True
        written = len(server.writes)
        await seconds_until(lambda: len(server.writes) > written)
        server.lost_answers = False
        await first.kill()
        await first.leadership.release()
        assert server.value is not None
        return str(server.value["spec"]["holderIdentity"])

    assert scenario(body) == ""


def test_a_leader_that_ends_without_an_api_server_does_not_wait_for_the_hand_over() -> None:
    async def body(server: LeaseServer) -> float:
        first = Replica(server, "a")
        await asyncio.sleep(10)
        await first.kill()
        server.cut_off.add("a")
        begin = asyncio.get_running_loop().time()
        await first.leadership.release()
        return asyncio.get_running_loop().time() - begin

    assert scenario(body) <= HAND_OVER_SECONDS


def test_a_leader_that_is_cut_off_stops_writing_before_the_other_begins() -> None:
    async def body(server: LeaseServer) -> tuple[float, float]:
        loop = asyncio.get_running_loop()
        first = Replica(server, "a")
        await asyncio.sleep(1)
        second = Replica(server, "b")
        await asyncio.sleep(20)
        server.cut_off.add("a")
        begin = loop.time()
        await seconds_until(lambda: not first.leads)
        stopped = loop.time() - begin
        await seconds_until(lambda: second.leads)
        assert first.task.done()
        return stopped, loop.time() - begin

    stopped, began = scenario(body)

    assert stopped <= TIMES.deadline_seconds
    assert began > stopped


@pytest.mark.parametrize("late", [3.0, 6.0])
def test_the_time_of_a_renewal_counts_from_its_request_however_late_the_answer_is(late: float) -> None:
    async def body(server: LeaseServer) -> int:
        first = Replica(server, "a")
        await asyncio.sleep(1)
        second = Replica(server, "b")
        await asyncio.sleep(20)
        server.answer_seconds, written = late, len(server.writes)
        await seconds_until(lambda: len(server.writes) > written)
        server.cut_off.add("a")  # the answer is on its way
        server.answer_seconds = 0.0
        most = 0
        while not second.leads:
            most = max(most, first.leads + second.leads)
            await asyncio.sleep(0.05)
        return max(most, first.leads + second.leads)

    assert scenario(body) == 1


def test_one_lost_renewal_does_not_cost_the_lease() -> None:
    async def body(server: LeaseServer) -> bool:
        first = Replica(server, "a")
        await asyncio.sleep(10)
        server.cut_off.add("a")
        await asyncio.sleep(2)
        server.cut_off.clear()
        await asyncio.sleep(30)
        return first.leads and not first.task.done()

    assert scenario(body)


def slow_answers(server: LeaseServer) -> None:
    server.seconds = 0.7 * TIMES.deadline_seconds


def lost_requests(server: LeaseServer) -> None:
    server.cut_off.add("a")


def lost_answers(server: LeaseServer) -> None:
    server.lost_answers = True


@pytest.mark.parametrize("outage", [slow_answers, lost_requests, lost_answers])
@pytest.mark.parametrize("begin", [0.0, 0.3, 0.6, 0.9])
def test_an_outage_shorter_than_the_deadline_does_not_cost_the_lease(
    outage: Callable[[LeaseServer], None], begin: float
) -> None:
    """Slow answers, lost requests, lost answers: the replica stays leader throughout, so it may write."""

    async def body(server: LeaseServer) -> bool:
        first = Replica(server, "a")
        await asyncio.sleep(10 + begin * TIMES.interval_seconds)
        outage(server)
        # The last renewal may have begun an interval ago, and the next one takes time as well.
        end = asyncio.get_running_loop().time() + TIMES.deadline_seconds - 2 * TIMES.interval_seconds - 0.3
        led = []
        while asyncio.get_running_loop().time() < end + 30:
            if asyncio.get_running_loop().time() >= end:
                server.seconds, server.lost_answers = 0.25, False
                server.cut_off.clear()
            led.append(first.leads)
            await asyncio.sleep(0.05)
        return all(led) and not first.task.done()

    assert scenario(body)


def test_an_edited_lease_is_still_held() -> None:
    async def body(server: LeaseServer) -> bool:
        first = Replica(server, "a")
        await asyncio.sleep(10)
        assert server.value is not None
        server.value["metadata"]["labels"] = {"edited": "yes"}
        server.store(server.value)
        await asyncio.sleep(30)
        return first.leads

    assert scenario(body)


def test_the_lease_duration_of_the_holder_is_respected() -> None:
    async def body(server: LeaseServer) -> float:
        loop = asyncio.get_running_loop()
        server.store(
            {"metadata": {}, "spec": {"holderIdentity": "an older version", "leaseDurationSeconds": 40}},
        )
        begin = loop.time()
        second = Replica(server, "b")
        await seconds_until(lambda: second.leads)
        return loop.time() - begin

    assert scenario(body) >= 40


def test_transitions_are_counted() -> None:
    async def body(server: LeaseServer) -> Any:
        first = Replica(server, "a")
        await asyncio.sleep(5)
        await first.kill()
        Replica(server, "b")
        await asyncio.sleep(30)
        assert server.value is not None
        return server.value["spec"]

    spec = scenario(body)

    assert (spec["holderIdentity"], spec["leaseTransitions"], spec["leaseDurationSeconds"]) == ("b", 1, 10)


def test_settings_that_would_allow_two_leaders_are_refused() -> None:
    with pytest.raises(ValueError, match="two could lead"):
        LeaseTimes(duration_seconds=7.0)


@given(
    st.lists(
        st.tuples(st.sampled_from(["cut", "mend", "kill", "start"]), st.sampled_from("abc"), st.floats(0.1, 20.0)),
        max_size=12,
    )
)
def test_after_any_sequence_of_events_there_is_at_most_one_leader_and_finally_one(
    events: list[tuple[str, str, float]],
) -> None:
    async def body(server: LeaseServer) -> None:
        replicas: dict[str, Replica] = {name: Replica(server, name) for name in "ab"}
        generation = 0

        async def watch() -> None:
            while True:
                leaders = [name for name, replica in replicas.items() if replica.leads]
                assert len(leaders) <= 1, leaders
                await asyncio.sleep(0.1)

        watcher = asyncio.create_task(watch())
        for what, name, pause in events:
            replica = replicas.get(name)
            if what == "cut":
                server.cut_off.update(one for one in replicas if one.startswith(name))
            elif what == "mend":
                server.cut_off.clear()
            elif what == "kill" and replica is not None:
                await replica.kill()
                # A killed replica: its own view of the lease does not count.
                del replicas[name]
            elif what == "start" and replica is None:
                generation += 1
                replicas[name] = Replica(server, f"{name}{generation}")
            await asyncio.sleep(pause)
        server.cut_off.clear()
        replicas["last"] = Replica(server, "last")
        await seconds_until(lambda: any(replica.leads for replica in replicas.values()))
        assert not watcher.done()
        watcher.cancel()
        for replica in replicas.values():
            await replica.kill()

    scenario(body)
