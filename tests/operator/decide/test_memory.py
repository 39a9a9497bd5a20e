"""The state: the shrink window, start-up times, and the handover snapshot for a new leader."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock_operator.decide import (
    Metrics,
    ScalingSettings,
    Started,
    State,
    Value,
    dump_handover,
    restore_handover,
)
from penstock_operator.decide.memory import (
    KEPT_START_UPS,
    LONGEST_START_UP_SECONDS,
    expected_start_up_seconds,
    observed_for_a_window,
    scaled_down,
    scaled_up,
    window_seconds,
    with_start_ups,
)
from tests.examples import examples
from tests.operator.decide.cases import SETTINGS, START, Replay, flips, traffic
from tests.operator.decide.test_properties import steps


@pytest.mark.parametrize(
    ("below", "above", "needed", "longer"),
    [
        (3, 2, 3, True),
        (2, 1, 2, True),
        (1, 0, 1, False),  # from zero
        (3, 0, 3, False),
        (3, 3, 4, False),  # nothing was taken back
        (3, 2, 4, True),  # by noise
        (3, 2, 5, False),  # a new level: three would not have been enough
    ],
)
def test_scaling_up_makes_the_window_longer_only_if_the_removed_replicas_would_have_been_enough(
    below: int, above: int, needed: int, longer: bool
) -> None:
    chosen = ScalingSettings(shrink_window_seconds=120)
    state = scaled_down(State(), 1000.0, below=below, served=True)

    after = scaled_up(state, chosen, 1060.0, above=above, needed=needed)

    assert (window_seconds(after, chosen) > window_seconds(State(), chosen)) is longer


# Start-up times

READY_AT = 1_000_000.0


def observed(known: tuple[Started, ...], seen: tuple[Started, ...], now: float) -> tuple[Started, ...]:
    return with_start_ups(State(started=known), seen, now).started


def times(*seconds: float) -> tuple[Started, ...]:
    return tuple(Started(at=READY_AT + index, seconds=value) for index, value in enumerate(seconds))


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
    """A late replica costs requests, an early one only seconds: the upper median is used."""
    assert expected_start_up_seconds(times(*seen), 40) == expected


def test_a_replica_counts_once_even_if_it_is_reported_repeatedly() -> None:
    first = observed((), times(10, 20), READY_AT + 60)

    assert observed(first, times(10, 20), READY_AT + 60) == first
    assert observed(first, times(10, 20, 30), READY_AT + 60) == times(10, 20, 30)


def test_the_newest_start_ups_count_but_none_in_the_future_and_none_that_took_too_long() -> None:
    known = observed((), times(*range(1, 20)), READY_AT + 60)

    assert [one.seconds for one in known] == list(range(20 - KEPT_START_UPS, 20))
    assert observed((), times(10), READY_AT - 1) == ()
    assert observed((), times(LONGEST_START_UP_SECONDS + 1), READY_AT + 60) == ()


@given(st.lists(st.floats(0, LONGEST_START_UP_SECONDS), max_size=30), st.floats(0, 600))
def test_the_expected_start_up_time_is_an_observed_one_or_the_setting(seconds: list[float], setting: float) -> None:
    known = observed((), times(*seconds), READY_AT + 60)

    assert expected_start_up_seconds(known, setting) in {setting, *seconds}


def test_a_rising_load_scales_up_earlier_where_replicas_start_slowly() -> None:
    """A surge is extrapolated to the time at which a new replica would serve."""

    def grown(start_up: float) -> int:
        replay = Replay(ScalingSettings(max_replicas=50), replicas=2)
        replay.started = tuple(Started(at=replay.now - 900 + i, seconds=start_up) for i in range(4))
        replay.play(traffic(10), 600)
        return max(replay.play(lambda second: traffic(10 + second, in_flight=10), 30))

    assert grown(10) < grown(40) < grown(100)


def test_start_up_times_are_kept_from_decision_to_decision() -> None:
    replay = Replay(SETTINGS)
    replay.started = times(*[13.0] * 3)
    replay.now = READY_AT + 60
    replay.tick(traffic(5))
    replay.started = ()
    replay.tick(traffic(5))

    assert replay.decisions[-1].demand is not None
    assert replay.decisions[-1].demand.ahead_seconds == 13


# The change of leader


def test_a_new_leader_has_the_learnt_window_and_the_slow_down() -> None:
    text = dump_handover(State(at=START, window_factor=3.517, factor_at=START - 100, shrunk_from=7))
    found = restore_handover(text, SETTINGS, START + 5, slowdown=1.25)

    assert found == State(slowdown=1.25, window_factor=3.52, factor_at=START + 5)
    assert found.at is None, "the new leader has not observed anything yet"


def test_a_snapshot_of_an_earlier_version_has_the_learnt_window() -> None:
    text = '{"v":1,"windowFactor":3.52,"factorAt":5,"shrunkFrom":7,"started":[{"at":1,"seconds":2}]}'

    assert restore_handover(text, SETTINGS, START).window_factor == 3.52


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{}",
        "null",
        "[]",
        "3",
        "x" * 5000,
        '{"windowFactor":-1}',
        '{"windowFactor":1e999}',
        '{"windowFactor":"many"}',
    ],
)
def test_any_other_text_is_a_window_that_was_not_lengthened(text: str) -> None:
    assert restore_handover(text, SETTINGS, START) == State(factor_at=START)


@given(st.text(max_size=200))
def test_no_text_raises(text: str) -> None:
    assert restore_handover(text, SETTINGS, START).at is None


@given(
    st.recursive(
        st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5)),
        lambda inner: st.lists(inner, max_size=3),
        max_leaves=5,
    )
)
def test_no_value_makes_a_window_shorter_than_its_setting_or_longer_than_the_longest(value: object) -> None:
    state = restore_handover(json.dumps({"windowFactor": value}), SETTINGS, START)

    assert SETTINGS.shrink_window_seconds <= window_seconds(state, SETTINGS)
    assert window_seconds(state, SETTINGS) <= SETTINGS.shrink_window_seconds * SETTINGS.longest_window_factor


def failed_over(replay: Replay, *, garbage: str | None = None) -> None:
    """Another process leads, and has only the snapshot in the status."""
    text = dump_handover(replay.state) if garbage is None else garbage
    replay.state = restore_handover(text, replay.settings, replay.now, slowdown=round(replay.state.slowdown, 2))


@settings(max_examples=examples(100), deadline=None)
@given(steps, steps, st.integers(1, 20), st.one_of(st.none(), st.text(max_size=20)))
def test_a_new_leader_removes_nothing_for_a_window_after_any_history(
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
        if not observed_for_a_window(replay.state, replay.settings, replay.now):
            assert asked >= number


@settings(max_examples=examples(40), deadline=None)
@given(
    st.floats(8, 150),
    st.lists(st.integers(20, 200), min_size=1, max_size=4),
    st.integers(0, 2**32 - 1),
)
def test_failovers_at_a_steady_peak_do_not_change_the_number(rate: float, waits: list[int], seed: int) -> None:
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


def test_a_new_leader_keeps_the_learnt_window() -> None:
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
    assert min(replay.play(traffic(5), 400)) == peak, "the next rise comes within the window"


def test_a_new_leader_keeps_replicas_that_have_not_started() -> None:
    replay = Replay().settled(10)
    replay.ready = 2
    replay.play(lambda second: traffic(10 + 2 * second, in_flight=20), 30)
    peak = replay.replicas
    assert peak > 4

    failed_over(replay)

    assert min(replay.play(traffic(20), SETTINGS.shrink_window_seconds)) >= peak


def test_unknown_metrics_change_nothing_after_a_failover() -> None:
    replay = Replay(replicas=5)
    failed_over(replay)

    assert replay.play(Metrics.unknown("no pod answers"), 600) == [5] * 120
