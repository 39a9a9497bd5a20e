"""Which copy takes the next run."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from penstock_runtime.engines.neuron.copies import Copies, Place


def test_runs_are_spread_over_the_copies_before_a_copy_gets_a_second_one() -> None:
    copies = Copies(3, 2)

    taken = [copies.take() for _ in range(7)]

    assert [None if place is None else place.copy for place in taken] == [0, 1, 2, 0, 1, 2, None]


def test_a_copy_with_fewer_runs_is_next() -> None:
    copies = Copies(2, 2)
    first, second, _ = (copies.take() for _ in range(3))
    assert first is not None
    assert second is not None
    copies.give_back(second)

    assert copies.take() == Place(1, second.number)


def test_a_copy_that_is_out_of_service_takes_no_runs() -> None:
    copies = Copies(2, 1)

    assert copies.fail(0, "hardware")
    assert not copies.fail(0, "again")

    assert copies.take() == Place(1, 0)
    assert copies.take() is None
    assert copies.in_service == 1
    assert copies.failed == {0: "hardware"}


def test_a_place_is_given_back_once() -> None:
    copies = Copies(1, 1)
    with pytest.raises(ValueError, match="is free already"):
        copies.give_back(Place(0, 0))


class Use(RuleBasedStateMachine):
    """Any sequence of runs and failures."""

    def __init__(self) -> None:
        super().__init__()
        self.copies = Copies(3, 2)
        self.held: list[Place] = []
        self.failed_before: set[int] = set()

    @rule()
    def take(self) -> None:
        place = self.copies.take()
        free = [copy for copy in range(3) if copy not in self.copies.failed and self.running(copy) < 2]
        if place is None:
            assert not free
            return
        assert place.copy in free
        assert self.running(place.copy) == min(self.running(copy) for copy in free)
        assert place not in self.held
        self.held.append(place)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def give_back(self, data: st.DataObject) -> None:
        place = data.draw(st.sampled_from(self.held))
        self.held.remove(place)
        self.copies.give_back(place)

    @rule(copy=st.integers(0, 2))
    def fail(self, copy: int) -> None:
        assert self.copies.fail(copy, "broken") == (copy not in self.failed_before)
        self.failed_before.add(copy)

    def running(self, copy: int) -> int:
        return Counter(place.copy for place in self.held)[copy]

    @invariant()
    def counts_agree(self) -> None:
        assert [self.copies.in_progress(copy) for copy in range(3)] == [self.running(copy) for copy in range(3)]
        assert self.copies.in_service == 3 - len(self.failed_before)


TestUse = Use.TestCase
