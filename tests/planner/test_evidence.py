"""Evidence: measurements of users, and curves of faster and wider replicas."""

from __future__ import annotations

import contextlib
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.capacity import TokenCurve
from penstock.errors import SettingError
from penstock_operator.decide import Service
from penstock_planner.evidence import Origin, curve_of_closed_loop, curve_of_tokens, of_file, wider
from tests.examples import examples
from tests.planner.cases import CURVE, TOKENS

GIVEN = """
measurements:
  - hardwareClass: gpu-a10g
    plan: TensorRT fp16
    source: our test of 2026-11-20
    points:
      - {requestsPerSecond: 100, p95Milliseconds: 5}
      - {requestsPerSecond: 900, p95Milliseconds: 12}
  - {hardwareClass: gpu-l4, source: a blog, throughput: 800, latencyMilliseconds: 10, batch: 8, error: 0.05}
"""


def test_measurements_of_users_are_read() -> None:
    curve, loop = of_file(GIVEN, name="mine.yaml")

    assert (curve.hardware_class, curve.cores, curve.plan, curve.origin) == (
        "gpu-a10g",
        1,
        "TensorRT fp16",
        Origin.GIVEN,
    )
    assert curve.curve.rate_within(12) == 900
    assert curve.interval.low == pytest.approx(0.9)
    assert loop.curve.rate_within(10) is None
    assert loop.interval.low == pytest.approx(0.75)
    assert "estimated by a queueing formula" in loop.caveats[0]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "the whole"),
        ("measurements: []", "measurements"),
        ("measurements: [{hardwareClass: x, source: s}]", "measurements.0 needs points, or throughput"),
        ("measurements: [{hardwareClass: x, source: s, throughput: 5}]", "no latencyMilliseconds"),
        ("measurements: [{hardwareClass: x, source: s, throughput: -5, latencyMilliseconds: 1}]", "throughput"),
        (
            "measurements: [{hardwareClass: x, source: s, points: [{requestsPerSecond: .inf, p95Milliseconds: 1}]}]",
            "requestsPerSecond",
        ),
        ("measurements: [{hardwareClass: x, source: s, speed: 1}]", "speed"),
        ("{", "is not YAML"),
    ],
)
def test_wrong_measurements_name_the_file_and_the_field(text: str, problem: str) -> None:
    with pytest.raises(SettingError) as caught:
        of_file(text, name="mine.yaml")

    assert "mine.yaml" in caught.value.message
    assert problem in caught.value.message


@settings(max_examples=examples(200))
@given(st.text(max_size=200))
def test_any_text_is_read_or_refused_with_an_error_of_ours(text: str) -> None:
    with contextlib.suppress(SettingError):
        assert of_file(text, name="f")


@settings(max_examples=examples(100))
@given(st.floats(0.1, 10), st.floats(21, 190))
def test_a_faster_replica_takes_more_at_a_shorter_latency(factor: float, p95: float) -> None:
    rate = CURVE.rate_within(p95)

    assert rate is not None
    assert CURVE.faster(factor).rate_within(p95 / factor) == pytest.approx(rate * factor)
    assert wider(CURVE, factor).rate_within(p95) == pytest.approx(rate * factor)


def test_text_generation_has_the_rates_of_the_autoscaler_up_to_its_objectives() -> None:
    service = Service.from_tokens(TOKENS)
    found = curve_of_tokens(TOKENS)

    assert service is not None
    assert found.p95_objective_milliseconds == 500
    assert found.rate_within(500) == pytest.approx(service.rate)
    # A later first token does not allow a higher rate: the points behind miss an objective of the measurement.
    assert found.rate_within(5000) == pytest.approx(service.rate)
    assert curve_of_tokens(TokenCurve()).points == ()


def test_text_generation_that_misses_its_objectives_keeps_up_with_no_rate() -> None:
    missed = TokenCurve.of(TOKENS.points, first_token=50, next_token=None)

    assert missed.within is None
    assert curve_of_tokens(missed).points
    assert curve_of_tokens(missed).rate_within(math.inf) is None


def test_a_closed_loop_needs_positive_figures() -> None:
    with pytest.raises(ValueError, match="positive"):
        curve_of_closed_loop(0, 10)
