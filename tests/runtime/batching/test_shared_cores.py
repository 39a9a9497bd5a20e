"""The order and the acceptance of work on cores that several models share: tables, properties, and a simulation."""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock_runtime.admission import BulkFloor
from penstock_runtime.batching.shared_cores import (
    BULK_LEVEL,
    HOLD_SHARE,
    LEAST_HOLD_SECONDS,
    MOST_HOLD_SECONDS,
    CoreClaim,
    Cost,
    NextWork,
    SharedCores,
    Terms,
    judge,
    longest_hold,
    next_queue,
)
from penstock_runtime.errors import Overloaded, RequestError
from tests.examples import examples

MEMBERS = "abc"


def claim(member: str, seconds: float, due: float, level: int = 0) -> CoreClaim:
    return CoreClaim(member, level, due, seconds)


def in_order(claims: Sequence[CoreClaim]) -> list[CoreClaim]:
    return sorted(claims, key=lambda one: one.order)


claims_lists = st.lists(
    st.builds(
        claim,
        st.sampled_from(MEMBERS),
        st.floats(0.001, 0.1),
        st.floats(0.0, 1.0),
        st.sampled_from([-1, 0, BULK_LEVEL]),
    ),
    max_size=30,
)


@pytest.mark.parametrize(
    ("waiting", "new", "cores", "busy", "gives_way"),
    [
        pytest.param([], claim("a", 0.1, 0.2), 1, 0.0, [], id="an idle server"),
        pytest.param([], claim("a", 0.1, 0.2), 1, 0.15, None, id="what runs takes too long"),
        pytest.param([], claim("a", 0.1, 0.2), 2, 0.15, [], id="not with two cores"),
        pytest.param([claim("b", 0.15, 0.15)], claim("a", 0.1, 0.2), 1, 0.0, [0], id="who waits more gives way"),
        pytest.param([claim("a", 0.15, 0.15)], claim("a", 0.1, 0.2), 1, 0.0, None, id="not one of its own"),
        pytest.param([claim("b", 0.05, 0.15)], claim("a", 0.2, 0.22), 1, 0.0, None, id="nor one with less"),
        pytest.param([claim("b", 0.1, 0.9, 1)], claim("a", 0.1, 0.1), 1, 0.0, [], id="a lower class is behind"),
        pytest.param([claim("b", 0.1, 0.9, -1)], claim("a", 0.1, 0.1), 1, 0.0, None, id="a higher one before"),
        pytest.param([claim("b", 0.1, 0.1)], claim("a", 0.05, 0.05), 1, 0.0, [0], id="what was accepted in time"),
        pytest.param([claim("b", 0.1, 0.1, 1)], claim("a", 0.05, 0.05), 1, 0.0, [], id="not in a lower class"),
        pytest.param([claim("b", 0.1, 0.05)], claim("a", 0.05, 0.04), 1, 0.0, None, id="it is late by itself"),
        pytest.param([claim("b", 0.1, 0.05)], claim("a", 0.03, 0.04), 1, 0.0, [], id="what is late anyway"),
    ],
)
def test_who_is_accepted(
    waiting: list[CoreClaim], new: CoreClaim, cores: int, busy: float, gives_way: list[int] | None
) -> None:
    """`gives_way`: None if it is refused."""
    verdict = judge(in_order(waiting), new, now=0.0, cores=cores, busy=busy)

    assert verdict.accepted is (gives_way is not None)
    assert list(verdict.gives_way) == [waiting[index] for index in gives_way or []]


@given(claims_lists, st.builds(claim, st.sampled_from(MEMBERS), st.floats(0.001, 0.1), st.floats(0.0, 1.0)))
@settings(max_examples=examples(200))
def test_lower_classes_change_nothing_and_a_member_gives_way_only_to_one_with_less(
    waiting: list[CoreClaim], new: CoreClaim
) -> None:
    ordered = in_order(waiting)
    verdict = judge(ordered, new, now=0.0, cores=1, busy=0.0)
    without = judge([one for one in ordered if one.level <= 0], new, now=0.0, cores=1, busy=0.0)

    assert verdict == without, "bulk work or a lower class delays nothing above it"
    own = new.seconds + sum(one.seconds for one in waiting if (one.member, one.level) == (new.member, 0))
    left = {id(one) for one in verdict.gives_way}
    for one in verdict.gives_way:
        assert (one.level, one.member != new.member) == (0, True)
        # What the member had before its last request left.
        rest = sum(x.seconds for x in waiting if (x.member, x.level) == (one.member, 0) and id(x) not in left)
        assert rest + max(x.seconds for x in verdict.gives_way if x.member == one.member) > own - 1e-9
    if verdict.accepted:
        assert verdict.ends <= new.due


@given(st.lists(st.tuples(st.floats(0.0, 0.05), st.sampled_from(MEMBERS), st.floats(0.001, 0.05)), max_size=60))
@settings(max_examples=examples(100))
def test_all_that_is_accepted_ends_in_time_on_one_core(arrivals: list[tuple[float, str, float]]) -> None:
    """A simulation with exact costs: members of one class with different objectives."""
    objectives = {"a": 0.05, "b": 0.2, "c": 1.0}
    waiting: list[CoreClaim] = []
    now, busy_until, longest = 0.0, 0.0, 0.0

    def run_until(moment: float) -> None:
        nonlocal busy_until
        while waiting and max(busy_until, now) < moment:
            first = waiting.pop(0)
            busy_until = max(busy_until, now) + first.seconds
            # A run cannot be interrupted by what arrives after it began.
            assert busy_until <= first.due + longest + 1e-9

    for gap, member, seconds in arrivals:
        run_until(now + gap)
        now += gap
        longest = max(longest, seconds)
        new = claim(member, seconds, now + objectives[member])
        verdict = judge(waiting, new, now=now, cores=1, busy=max(0.0, busy_until - now))
        if verdict.accepted:
            for one in verdict.gives_way:
                waiting.remove(one)
            insort(waiting, new, key=lambda one: one.order)
    run_until(math.inf)


@given(
    st.lists(
        st.one_of(
            st.none(), st.builds(NextWork, st.tuples(st.integers(-2, 2), st.floats(0, 9)), st.just(1.0), st.just(1))
        )
    )
)
def test_no_work_overtakes_a_higher_class_or_what_is_due_earlier(heads: list[NextWork | None]) -> None:
    found = next_queue(heads, BulkFloor())

    orders = [head.order for head in heads if head is not None]
    assert (found is None) is (not orders)
    if found is not None:
        chosen = heads[found]
        assert chosen is not None
        assert chosen.order == min(orders)


def test_bulk_work_gets_its_floor_and_no_more() -> None:
    floor = BulkFloor()
    heads = [NextWork((0, 1.0), 0.01, 1), NextWork((BULK_LEVEL, 0.0), 0.01, 1)]
    served = [0, 0]
    for _ in range(1000):
        index = next_queue(heads, floor)
        assert index is not None
        served[index] += 1
        if index == 0:
            floor.served(0.01, bulk_waits=True)
        else:
            floor.took(0.01)

    assert served[1] == pytest.approx(1000 * BulkFloor.SHARE, abs=1)


@pytest.mark.parametrize(
    ("level", "others", "waiting", "hold"),
    [
        pytest.param(0, [], [], MOST_HOLD_SECONDS, id="alone"),
        pytest.param(0, [Terms(0, 0.1)], [], HOLD_SHARE * 0.1, id="a share of the shortest objective"),
        pytest.param(0, [Terms(1, 0.1)], [], MOST_HOLD_SECONDS, id="not of a lower class"),
        pytest.param(0, [Terms(-1, math.inf)], [NextWork((-1, 1.05), 0.02, 1)], 0.03, id="the slack of what waits"),
        pytest.param(0, [], [NextWork((0, 0.5), 0.02, 1)], LEAST_HOLD_SECONDS, id="what is late"),
        pytest.param(0, [], [NextWork((BULK_LEVEL, 0.5), 0.02, 1)], MOST_HOLD_SECONDS, id="bulk work"),
    ],
)
def test_how_long_a_batch_may_hold_the_cores(
    level: int, others: list[Terms], waiting: list[NextWork], hold: float
) -> None:
    assert longest_hold(level, others, waiting, 1.0) == pytest.approx(hold)


def test_costs_come_from_the_curve_and_follow_measurements() -> None:
    cost = Cost([(10, 0.01), (20, 0.03), (40, 0.08)])

    assert [cost.seconds(tokens, 1.0) for tokens in (5, 10, 15, 40, 80)] == pytest.approx(
        [0.01, 0.01, 0.02, 0.08, 0.16]
    )
    for _ in range(200):
        cost.observe(cost.seconds(10, 1.0), 0.02)
    assert cost.seconds(10, 1.0) == pytest.approx(0.02, rel=0.01)
    assert Cost().seconds(50, 100.0) == 0.5


@dataclass
class Queue:
    """A queue of batches with one row each."""

    cores: SharedCores
    name: str
    heads: list[NextWork] = field(default_factory=list)
    log: list[tuple[str, float]] = field(default_factory=list)
    running: list[int] = field(default_factory=list)

    def head(self) -> NextWork | None:
        return self.heads[0] if self.heads else None

    def run_next(self, *, seconds: float, is_alone: bool) -> tuple[int, float]:
        head = self.heads.pop(0)
        self.log.append((self.name, seconds))
        self.running.append(self.cores.started(head.cores, head.seconds))
        return head.cores, head.seconds

    def load(self, now: float) -> float:
        return 0.0


def test_work_that_needs_all_cores_is_not_kept_out_by_smaller_work() -> None:
    cores = SharedCores(2, clock=lambda: 0.0)
    log: list[tuple[str, float]] = []
    small = Queue(cores, "small", [NextWork((0, at), 0.01, 1) for at in (1.0, 3.0, 4.0)], log)
    large = Queue(cores, "large", [NextWork((0, 2.0), 0.01, 2)], log)
    for name, queue in (("small", small), ("large", large)):
        cores.share(name).queues.append(queue)

    cores.fill()
    assert [name for name, _ in log] == ["small"], "the free core is kept for the next"
    cores.ended(small.running.pop())
    cores.fill()
    assert [name for name, _ in log] == ["small", "large"]
    cores.ended(large.running.pop())
    cores.fill()
    assert [name for name, _ in log] == ["small", "large", "small", "small"]


def test_a_refusal_has_the_predicted_time_and_a_displaced_request_ends() -> None:
    now = count().__next__
    cores = SharedCores(1, clock=lambda: 0.0 * now())
    first, second = cores.share("first", objective_seconds=1.0), cores.share("second", objective_seconds=1.0)
    ended: list[RequestError] = []

    class Waiting:
        @staticmethod
        def is_waiting() -> bool:
            return True

        @staticmethod
        def refuse(error: RequestError) -> None:
            ended.append(error)

    def ask(share: Any, seconds: float) -> CoreClaim:
        found: CoreClaim = share.claim(seconds, seconds, arrived=0.0, deadline=30.0, is_bulk=False)
        found.work = Waiting()
        return found

    for _ in range(7):
        ask(first, 0.1)
    with pytest.raises(Overloaded, match=r"would end after 900 ms, and is due after 800 ms") as refused:
        ask(first, 0.2)
    assert refused.value.retry_after_seconds == 1
    assert not ended
    ask(second, 0.3)
    assert len(ended) == 2, "of the model that floods"
    assert all(isinstance(error, Overloaded) for error in ended)
