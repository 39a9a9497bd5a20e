"""How long replicas take to start, learnt from those that did."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock_operator.scaling.decide import ScalingSettings, Started
from penstock_operator.scaling.decide.start_up import KEPT, LONGEST_SECONDS, expected_seconds, observed
from tests.operator.scaling.decide.cases import SETTINGS, Replay, traffic

NOW = 1_000_000.0


def times(*seconds: float) -> tuple[Started, ...]:
    return tuple(Started(at=NOW + index, seconds=value) for index, value in enumerate(seconds))


@pytest.mark.parametrize(
    ("seen", "expected"),
    [
        ((), 40),
        ((12,), 40),
        ((90,), 90),
        ((12, 13, 14), 14),
        ((12, 13, 14, 600), 14),
        ((70, 80, 90, 100, 110), 90),
    ],
)
def test_the_setting_counts_as_one_observation(seen: tuple[float, ...], expected: float) -> None:
    """A late replica costs requests and an early one seconds: the upper median."""
    assert expected_seconds(times(*seen), 40) == expected


def test_each_replica_counts_once_however_often_it_is_told() -> None:
    first = observed((), times(10, 20), NOW + 60)

    assert observed(first, times(10, 20), NOW + 60) == first
    assert observed(first, times(10, 20, 30), NOW + 60) == times(10, 20, 30)


def test_the_last_few_count_and_neither_the_future_nor_an_eternity() -> None:
    known = observed((), times(*range(1, 20)), NOW + 60)

    assert [one.seconds for one in known] == list(range(20 - KEPT, 20))
    assert observed((), times(10), NOW - 1) == ()
    assert observed((), times(LONGEST_SECONDS + 1), NOW + 60) == ()


@given(st.lists(st.floats(0, LONGEST_SECONDS), max_size=30), st.floats(0, 600))
def test_what_is_expected_was_observed_or_set(seconds: list[float], setting: float) -> None:
    known = observed((), times(*seconds), NOW + 60)

    assert expected_seconds(known, setting) in {setting, *seconds}


def test_a_rise_is_met_earlier_where_replicas_were_seen_to_start_slowly() -> None:
    """The line of a surge is followed to when a new replica would serve."""

    def grown(start_up: float) -> int:
        replay = Replay(ScalingSettings(max_replicas=50), replicas=2)
        replay.started = tuple(Started(at=replay.now - 900 + i, seconds=start_up) for i in range(4))
        replay.play(traffic(10), 600)
        return max(replay.play(lambda second: traffic(10 + second, in_flight=10), 30))

    assert grown(10) < grown(40) < grown(100)


def test_what_was_learnt_is_remembered_from_decision_to_decision() -> None:
    replay = Replay(SETTINGS)
    replay.started = times(*[13.0] * 3)
    replay.now = NOW + 60
    replay.tick(traffic(5))
    replay.started = ()
    replay.tick(traffic(5))

    assert replay.decisions[-1].demand is not None
    assert replay.decisions[-1].demand.ahead_seconds == 13
