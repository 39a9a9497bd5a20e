"""Scaling to zero replicas and from zero."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock_operator.decide import (
    Cause,
    Decision,
    Idle,
    Measurement,
    Metrics,
    Observation,
    ScalingSettings,
    State,
    Unknown,
    Value,
    decide,
)
from tests.operator.decide.cases import START, TICK, Replay, service, traffic

SETTINGS = ScalingSettings(min_replicas=0, max_replicas=5, shrink_window_seconds=60)
NOTHING = traffic(0)
UNKNOWN = Metrics.unknown("no pod was scraped")
FIRST = Metrics(Unknown("one sample"), Unknown("one sample"), Value(1), Unknown("none"), Unknown("none"))
"""The first scrape: a request waits, but a rate takes two scrapes."""


class ZeroReplay(Replay):
    def tick(self, metrics: Metrics, *, seconds: float = TICK) -> Decision:
        self.now += seconds
        ready = self.replicas if self.ready is None else self.ready
        seen = Observation(self.replicas, ready, metrics, rolling_out=self.rolling_out)
        decision, state = decide(self.settings, self.service, seen, self.state, self.now)
        self.state = State.model_validate_json(state.model_dump_json(by_alias=True, exclude_defaults=True))
        self.replicas = decision.replicas
        return decision


@pytest.fixture(params=[True, False], ids=["with a curve", "without a curve"])
def replay(request: pytest.FixtureRequest) -> ZeroReplay:
    """With one replica."""
    return ZeroReplay(settings=SETTINGS, service=service(pooled=True) if request.param else None)


def asleep(replay: ZeroReplay) -> ZeroReplay:
    replay.play(NOTHING, 400)
    assert replay.replicas == 0
    return replay


def test_the_number_goes_to_zero_after_a_window_without_requests_and_not_before(replay: ZeroReplay) -> None:
    numbers = replay.play(NOTHING, 200)

    # A window of observation, and one without requests, in tenths.
    assert numbers[: int(60 / TICK) - 1] == [1] * (int(60 / TICK) - 1)
    assert numbers[-1] == 0
    assert sorted(numbers, reverse=True) == numbers


def test_a_waiting_request_brings_one_replica_at_the_first_decision(replay: ZeroReplay) -> None:
    decision = asleep(replay).tick(FIRST)

    assert (decision.replicas, decision.cause) == (1, Cause.WOKEN)
    assert decision.reason == "1 replica, up from 0: 1 request waits at the gateway"


def test_many_waiting_requests_bring_as_many_replicas_as_they_need() -> None:
    replay = asleep(ZeroReplay(settings=SETTINGS, service=service(pooled=True)))
    replay.tick(traffic(30, in_flight=300), seconds=2)
    decision = replay.tick(traffic(30, in_flight=360), seconds=2)

    assert decision.replicas >= 3


def test_a_waiting_request_keeps_the_replica_while_it_starts(replay: ZeroReplay) -> None:
    asleep(replay).tick(FIRST)
    replay.ready = 0
    waiting = Metrics(Idle(), Idle(), Value(1), Unknown("none"), Unknown("none"))

    assert set(replay.play(waiting, 1800)) == {1}


def test_the_number_returns_to_zero_a_window_after_the_last_request(replay: ZeroReplay) -> None:
    asleep(replay).tick(FIRST)
    numbers = replay.play(NOTHING, 55)

    assert set(numbers) == {1}
    # The window was too short and became longer; it never grows beyond eight times its length.
    assert replay.play(NOTHING, 8 * 60 + 100)[-1] == 0


@pytest.mark.parametrize("rate", [0.02, 1, 5])
def test_earlier_load_does_not_make_the_window_longer(replay: ZeroReplay, rate: float) -> None:
    replay.play(traffic(rate), 600)
    # Metrics of two minutes: no more requests arrive, and the last ones were answered late.
    ended = replace(traffic(rate, in_flight=0, p95=900, good=0.5), arrivals_fast=Idle())
    numbers = replay.play(ended, 80)

    assert set(numbers[: int(60 / TICK) - 1]) == {1}
    # A window and a tenth, and one more tick.
    assert numbers[int(66 / TICK) + 1] == 0


@pytest.mark.parametrize("unknown", ["arrivals_fast", "in_flight"])
def test_unknown_metrics_never_scale_to_zero(replay: ZeroReplay, unknown: str) -> None:
    lost = Unknown("it cannot be reached")
    metrics = replace(NOTHING, arrivals_fast=lost) if unknown == "arrivals_fast" else replace(NOTHING, in_flight=lost)

    assert set(replay.play(metrics, 1800)) == {1}


def test_a_partial_scrape_never_scales_to_zero(replay: ZeroReplay) -> None:
    assert set(replay.play(replace(NOTHING, coverage=0.5), 1800)) == {1}


def test_the_number_stays_at_zero_while_metrics_are_unknown(replay: ZeroReplay) -> None:
    assert set(asleep(replay).play(UNKNOWN, 600)) == {0}


def test_with_min_replicas_1_the_number_is_never_zero(replay: ZeroReplay) -> None:
    replay.settings = replace_minimum(SETTINGS, 1)

    assert set(replay.play(NOTHING, 1800)) == {1}


def replace_minimum(settings: ScalingSettings, least: int) -> ScalingSettings:
    return settings.model_copy(update={"min_replicas": least})


MEASUREMENTS: st.SearchStrategy[Measurement] = st.one_of(
    st.just(Idle()), st.just(Unknown("why")), st.floats(0, 40).map(Value)
)


@given(st.lists(st.tuples(MEASUREMENTS, MEASUREMENTS, st.floats(0.1, 1)), min_size=1, max_size=60), st.booleans())
def test_no_waiting_request_is_left_without_a_replica(
    course: list[tuple[Measurement, Measurement, float]], curve: bool
) -> None:
    replay = ZeroReplay(settings=SETTINGS, service=service(pooled=True) if curve else None, now=START)
    for arrivals, in_flight, coverage in course:
        metrics = Metrics(arrivals, arrivals, in_flight, Idle(), Idle(), coverage=coverage)
        decision = replay.tick(metrics, seconds=20)
        assert 0 <= decision.replicas <= 5
        if isinstance(in_flight, Value) and in_flight.value > 0:
            assert decision.replicas > 0
