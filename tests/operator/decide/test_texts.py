"""Texts that are longer or shorter than those that the capacity was measured with."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock_operator.decide import Idle, MeasuredTexts, Measurement, Metrics, Service, Unknown, Value
from penstock_operator.decide.service import AROUND_MILLISECONDS, LONGEST, SHORTEST
from tests.examples import examples
from tests.operator.decide.cases import CURVE, SETTINGS, Replay, traffic, without

MEASURED = 64.0
TIMES = [(8.0, 0.7), (16.0, 1.7), (64.0, 7.7), (128.0, 17.7)]
"""Without the time around a run: a request of 8 tokens takes 1 ms, one of 16 2 ms, of 64 8 ms, of 128 18 ms."""


def measured() -> MeasuredTexts:
    found = MeasuredTexts.of(MEASURED, TIMES)
    assert found is not None
    return found


def service(*, pooled: bool = False) -> Service:
    found = Service.from_curve(CURVE, pooled=pooled, texts=measured())
    assert found is not None
    return found


def of_length(tokens: Measurement, rate: float, *, factor: float = 1.0) -> Metrics:
    """Requests that take `factor` times as long as the measured ones."""
    return without(traffic(rate, p95=110 * factor), tokens_per_request=tokens)


SHORT = of_length(Value(8), 60, factor=1 / 8)


def test_the_table_is_with_the_time_around_a_run() -> None:
    assert AROUND_MILLISECONDS == 0.3


@pytest.mark.parametrize(
    ("tokens", "factor"),
    [
        (64, 1.0),
        (16, 2 / 8),
        (8, 1 / 8),
        (3, 1 / 8),  # no shorter time than the shortest was measured
        (40, 5 / 8),
        (128, 18 / 8),
        (192, 28 / 8),  # with the slope of the last two
        (100_000, LONGEST),
    ],
)
def test_the_factor_is_that_of_the_measured_times(tokens: float, factor: float) -> None:
    assert measured().factor(Value(tokens)) == pytest.approx(factor)


@pytest.mark.parametrize("observed", [Idle(), Unknown("prometheus does not answer"), Value(0)])
def test_without_tokens_there_is_no_factor(observed: Measurement) -> None:
    assert measured().factor(observed) is None


@pytest.mark.parametrize(
    ("tokens", "times"),
    [(None, TIMES), (64.0, []), (64.0, TIMES[:1]), (64.0, [(8.0, 1.0), (8.0, 2.0)]), (64.0, [(8.0, 0.0), (16.0, 1.0)])],
)
def test_times_of_one_length_show_nothing(tokens: float | None, times: list[tuple[float, float]]) -> None:
    assert MeasuredTexts.of(tokens, times) is None


@settings(max_examples=examples(200), deadline=None)
@given(
    tokens=st.floats(0.5, 1e6),
    longer=st.floats(1, 100),
    times=st.lists(st.tuples(st.integers(1, 8192), st.floats(0.01, 1000)), min_size=2, max_size=8),
)
def test_any_times_give_a_factor_within_its_limits(
    tokens: float, longer: float, times: list[tuple[int, float]]
) -> None:
    found = MeasuredTexts.of(MEASURED, [(float(length), time) for length, time in times])
    if found is None:
        assert len({length for length, _ in times}) < 2
        return
    factor, more = found.factor(Value(tokens)), found.factor(Value(tokens * longer))

    assert factor is not None
    assert more is not None
    assert SHORTEST <= factor <= LONGEST
    if [time for _, time in sorted(times)] == sorted(time for _, time in times):
        assert more >= factor * (1 - 1e-9)


@settings(max_examples=examples(200), deadline=None)
@given(factor=st.floats(SHORTEST, LONGEST), rate=st.floats(0.1, 100), pooled=st.booleans())
def test_a_replica_with_other_texts_is_the_measured_one_in_another_unit_of_time(
    factor: float, rate: float, pooled: bool
) -> None:
    other = service(pooled=pooled).for_texts(factor)

    assert other.p95_at(rate) == pytest.approx(factor * service().p95_at(factor * rate))
    assert other.saturation == pytest.approx(service().saturation / factor)
    assert other.p95_objective_milliseconds == service().p95_objective_milliseconds
    if other.within_objective:
        assert other.p95_at(other.rate) <= other.p95_objective_milliseconds * (1 + 1e-9)
    # Never more than the change of unit alone with the objective in the new unit, nor than what was kept up with.
    assert factor * other.rate <= 12 * (1 + 1e-9)


def test_the_same_texts_change_nothing() -> None:
    assert service().for_texts(1.0) == service()


def test_texts_and_fewer_cores_are_both_taken_into_account() -> None:
    other = service().slower(2.0).for_texts(0.5)

    assert other.rates == pytest.approx(service().rates)
    assert other.p95_milliseconds == pytest.approx(service().p95_milliseconds)
    assert other.rate == pytest.approx(service().rate)


def test_short_texts_need_fewer_replicas_after_the_window_and_not_before() -> None:
    """A replica takes 10 requests/s of 64 tokens; eight times as short, at least eight times as many."""
    replay = Replay(service=service(), replicas=1).settled(60)
    before = replay.replicas

    first = replay.tick(SHORT)
    replay.play(SHORT, 4 * SETTINGS.shrink_window_seconds)

    assert before == 8
    assert first.replicas == before
    assert replay.replicas == 1
    assert "(requests of 8 tokens, measured with 64)" in replay.decisions[-1].reason
    assert replay.decisions[-1].capacity is not None
    assert replay.decisions[-1].capacity >= 80


def test_long_texts_need_more_replicas_at_once_and_are_no_slow_down() -> None:
    replay = Replay(service=service(), replicas=1).settled(10)
    before = replay.replicas

    assert replay.tick(of_length(Value(128), 10)).replicas > before

    longer = measured().factor(Value(128))
    assert longer is not None
    replay.play(of_length(Value(128), 10, factor=longer), 900)
    assert replay.state.slowdown < 1.1
    assert replay.decisions[-1].curve_current.status


@pytest.mark.parametrize("missing", [Unknown("no pod was scraped twice"), Idle()])
def test_a_missing_reading_of_the_length_does_not_add_replicas(missing: Measurement) -> None:
    replay = Replay(service=service(), replicas=1)
    replay.play(SHORT, 8 * SETTINGS.shrink_window_seconds)
    settled = replay.replicas

    numbers = replay.play(of_length(missing, 60, factor=1 / 8), 60)

    assert settled == 1
    assert set(numbers) == {1}


def test_a_gap_in_the_observation_keeps_the_length() -> None:
    replay = Replay(service=service(), replicas=1)
    replay.play(SHORT, 8 * SETTINGS.shrink_window_seconds)

    assert replay.tick(of_length(Unknown("no pod was scraped twice"), 60, factor=1 / 8), seconds=300).replicas == 1


def test_lengths_as_measured_are_not_in_the_sentence() -> None:
    replay = Replay(service=service(), replicas=1)

    assert "tokens" not in replay.tick(of_length(Value(66), 5)).reason
