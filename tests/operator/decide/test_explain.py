"""The sentence that explains a decision."""

from __future__ import annotations

import re

from penstock.capacity import CapacityCurve
from penstock_operator.decide import Idle, Metrics, ScalingSettings, Service, Unknown, Value
from tests.operator.decide.cases import Replay, point, without


def endpoint() -> Service:
    curve = CapacityCurve(
        points=(point(20, 10), point(61, 13.1), point(88, 20), point(100, 60)), p95_objective_milliseconds=20
    )
    found = Service.from_curve(curve)
    assert found is not None
    return found


MORNING = Metrics(Value(184), Value(184), Value(3), Value(0.99), Value(14.1), slow_seconds=300)


def test_the_sentence_has_all_inputs() -> None:
    replay = Replay(ScalingSettings(max_replicas=8), endpoint(), replicas=3)

    decision = replay.tick(MORNING)

    assert decision.reason == (
        "3 replicas: 184 requests/s now, over 88 per replica at p95 20 ms with 25 % headroom; "
        "p95 observed 14.1 ms, predicted 13.2"
    )


def test_a_rise_names_the_forecast() -> None:
    replay = Replay(ScalingSettings(max_replicas=8), endpoint(), replicas=3)
    replay.play(without(MORNING, arrivals_fast=Value(130)), 600)

    replay.play(MORNING, 60)

    assert re.match(
        r"3 replicas: 17\d requests/s now, (1[89]\d|2\d\d) forecast in 40 s, over 88 per replica at p95 20 ms",
        replay.decisions[-1].reason,
    )


def test_one_replica_is_singular() -> None:
    replay = Replay(ScalingSettings(max_replicas=8), endpoint(), replicas=1)

    assert replay.tick(Metrics(Idle(), Idle(), Value(0), Idle(), Idle())).reason == (
        "1 replica: 0 requests/s now, over 88 per replica at p95 20 ms with 25 % headroom"
    )


def test_an_unknown_metric_is_named_with_the_consequence() -> None:
    replay = Replay(ScalingSettings(max_replicas=8), endpoint(), replicas=3)

    assert replay.tick(Metrics.unknown("prometheus does not answer")).reason == (
        "3 replicas: demand is unknown, prometheus does not answer, so the number stays as it is"
    )
    known = replay.tick(without(MORNING, p95_milliseconds=Unknown("no histogram")))
    assert known.reason.endswith("; p95 unknown: no histogram")


def test_an_objective_out_of_reach_is_mentioned() -> None:
    curve = CapacityCurve(points=(point(20, 30), point(50, 50)), p95_objective_milliseconds=20)
    replay = Replay(ScalingSettings(max_replicas=8), Service.from_curve(curve), replicas=3)

    assert "over 50 per replica (p95 20 ms is out of reach)" in replay.tick(MORNING).reason
