"""What a new leader goes on from: little, versioned, and whatever else stands there is nothing."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock_operator.scaling.decide import Metrics, Started, State, Value, bequeathed, inherited
from penstock_operator.scaling.decide.handover import MOST_CHARACTERS
from penstock_operator.scaling.decide.memory import watched_for_a_window, window_seconds
from tests.examples import examples
from tests.operator.scaling.decide.cases import SETTINGS, START, Replay, flips, traffic
from tests.operator.scaling.decide.test_properties import steps

LEARNT = State(
    at=START,
    window_factor=3.517,
    factor_at=START - 100,
    shrunk_from=7,
    shrinking_since=START - 50,
    started=tuple(Started(at=START - 60 + index, seconds=30.25 + index) for index in range(7)),
)


def test_what_a_window_of_watching_does_not_bring_back_goes_on() -> None:
    found = inherited(bequeathed(LEARNT), SETTINGS, START + 5, slowdown=1.25)

    assert found.window_factor == pytest.approx(3.52)
    assert (found.factor_at, found.shrunk_from, found.shrinking_since) == (START - 100, 7, START - 50)
    assert [one.seconds for one in found.started] == pytest.approx([one.seconds for one in LEARNT.started], abs=0.06)
    assert found.slowdown == 1.25
    assert found.at is None, "it has not watched yet"


def test_it_is_small_and_says_its_version() -> None:
    text = bequeathed(LEARNT)

    assert json.loads(text)["v"] == 1
    assert len(text) < MOST_CHARACTERS / 2
    assert bequeathed(State()) == '{"v":1}'


@pytest.mark.parametrize(
    "text",
    [
        "", "{}", "null", "[]", "3", "x" * 5000, '{"v":2,"windowFactor":8}', '{"v":1,"windowFactor":-1}',
        '{"v":1,"windowFactor":1e999}', '{"v":1,"started":[{"at":1}]}', '{"v":"one"}', '{"v":1,"shrunkFrom":"many"}',
        '{"v":1,"started":' + json.dumps([{"at": 1, "seconds": 1}] * 50) + "}",
    ],
)  # fmt: skip
def test_whatever_else_stands_there_is_nothing(text: str) -> None:
    assert inherited(text, SETTINGS, START) == State()


@given(st.text(max_size=200))
def test_no_text_makes_it_fail(text: str) -> None:
    assert inherited(text, SETTINGS, START).at is None


@given(
    st.recursive(
        st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5)),
        lambda inner: st.lists(inner, max_size=3),
        max_leaves=5,
    ),
    st.sampled_from(["windowFactor", "factorAt", "shrunkFrom", "shrinkingSince", "started"]),
)
def test_no_value_makes_a_window_shorter_than_its_setting_or_longer_than_the_longest(value: object, name: str) -> None:
    state = inherited(json.dumps({"v": 1, name: value}), SETTINGS, START)

    assert SETTINGS.shrink_window_seconds <= window_seconds(state, SETTINGS)
    assert window_seconds(state, SETTINGS) <= SETTINGS.shrink_window_seconds * SETTINGS.longest_window_factor


def test_what_comes_from_a_clock_ahead_is_left_out() -> None:
    found = inherited(bequeathed(LEARNT), SETTINGS, START - 1000)

    assert (found.shrunk_from, found.started, found.factor_at) == (None, (), START - 1000)
    assert found.window_factor == pytest.approx(3.52)


def failed_over(replay: Replay, *, garbage: str | None = None) -> None:
    """Another process leads: what it knows is what the status has."""
    text = bequeathed(replay.state) if garbage is None else garbage
    replay.state = inherited(text, replay.settings, replay.now, slowdown=round(replay.state.slowdown, 2))


@settings(max_examples=examples(100), deadline=None)
@given(steps, steps, st.integers(1, 20), st.one_of(st.none(), st.text(max_size=20)))
def test_whoever_takes_over_shrinks_nothing_for_a_window_whatever_was_and_is_seen(
    before: list[tuple[Metrics, float, bool, int]],
    after: list[tuple[Metrics, float, bool, int]],
    replicas: int,
    garbage: str | None,
) -> None:
    """In the middle of a surge as well, with replicas that have not started."""
    replay = Replay(replicas=replicas)
    for metrics, seconds, rolling_out, ready in before:
        replay.rolling_out, replay.ready = rolling_out, ready
        replay.tick(metrics, seconds=seconds)

    failed_over(replay, garbage=garbage)

    for metrics, seconds, rolling_out, ready in after:
        replay.rolling_out, replay.ready = rolling_out, ready
        number = replay.replicas
        asked = replay.tick(metrics, seconds=seconds).replicas
        if not watched_for_a_window(replay.state, replay.settings, replay.now):
            assert asked >= number


@settings(max_examples=examples(40), deadline=None)
@given(
    st.floats(8, 150),
    st.lists(st.integers(20, 200), min_size=1, max_size=4),
    st.integers(0, 2**32 - 1),
)
def test_failing_over_at_a_steady_peak_turns_nothing(rate: float, waits: list[int], seed: int) -> None:
    """Poisson arrivals counted over five seconds; leaders that come after one another. The number may grow once, by
    one, where the peak lies on the edge between two numbers: as without any failover."""
    random = np.random.default_rng(seed)

    def arriving(_: float) -> Metrics:
        count = float(random.poisson(rate * 5)) / 5
        slow = float(random.poisson(rate * 120)) / 120
        return Metrics(Value(count), Value(slow), Value(rate * 0.08), Value(0.99), Value(110.0), fast_seconds=5.0)

    replay = Replay()
    replay.play(arriving, 1500)
    peak = replay.replicas
    numbers = [peak]

    for wait in waits:
        failed_over(replay)
        numbers += replay.play(arriving, wait)

    assert min(numbers) == peak
    assert max(numbers) <= peak + 1
    assert flips(numbers) == 0


def test_a_learnt_window_outlives_the_leader_that_learnt_it() -> None:
    replay = Replay().settled(5)
    for _ in range(2):
        replay.play(traffic(45), 400)
        replay.play(traffic(5), 400)
    learnt = window_seconds(replay.state, replay.settings)
    assert learnt > 400
    replay.play(traffic(45), 400)
    peak = replay.replicas

    failed_over(replay)

    assert window_seconds(replay.state, replay.settings) >= learnt
    assert min(replay.play(traffic(5), 400)) == peak, "the next bout comes within the window"


def test_a_shrink_is_regretted_by_the_next_leader_too() -> None:
    replay = Replay().settled(45)
    while replay.replicas > 1:
        replay.tick(traffic(5))

    failed_over(replay)
    replay.play(traffic(45), 60)

    assert replay.state.window_factor >= 2


def test_what_has_not_started_is_not_given_back_by_a_leader_that_did_not_ask_for_it() -> None:
    replay = Replay().settled(10)
    replay.ready = 2
    replay.play(lambda second: traffic(10 + 2 * second, in_flight=20), 30)
    peak = replay.replicas
    assert peak > 4

    failed_over(replay)

    assert min(replay.play(traffic(20), SETTINGS.shrink_window_seconds)) >= peak


def test_nothing_is_known_and_nothing_changes() -> None:
    replay = Replay(replicas=5)
    failed_over(replay)

    assert replay.play(Metrics.unknown("nobody answers"), 600) == [5] * 120
