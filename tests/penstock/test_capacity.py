"""The highest rate within an objective, from measured points."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from penstock.capacity import KEEPS_UP, CapacityCurve, CapacityPoint


def point(rate: float, p95: float, *, refused: float = 0.0, completed: float | None = None) -> CapacityPoint:
    return CapacityPoint(
        arrivals_per_second=rate,
        completed_per_second=rate if completed is None else completed,
        p50_milliseconds=p95 / 2,
        p95_milliseconds=p95,
        p99_milliseconds=p95 * 1.5,
        refused_share=refused,
        samples=1000,
    )


def curve(*points: CapacityPoint, objective: float | None = None) -> CapacityCurve:
    return CapacityCurve(points=points, p95_objective_milliseconds=objective)


@pytest.mark.parametrize(
    ("points", "rate"),
    [
        ([], None),
        ([point(10, 60)], None),
        ([point(10, 50)], 10),
        ([point(10, 20), point(20, 30)], 20),
        ([point(10, 20), point(20, 80)], 15),
        ([point(20, 80), point(10, 20)], 15),
        ([point(10, 20), point(20, 80), point(30, 20)], 15),
        ([point(10, 50), point(20, 51)], 10),
        ([point(10, 20), point(20, 30, refused=0.01)], 10),
        ([point(10, 20), point(20, 90, refused=0.5)], 10),
        ([point(10, 20), point(20, 30, completed=17)], 10),
        ([point(10, 20), point(20, 30, completed=18)], 20),
        ([point(10, 20, refused=0.1), point(20, 30)], None),
    ],
    ids=[
        "nothing measured", "not even the first", "just met", "all met", "between good and bad", "in any order",
        "good again is noise", "bad by a hair", "refusals end it", "refusals do not interpolate", "falls behind",
        "keeps up", "refused from the start",
    ],
)  # fmt: skip
def test_the_rate_within_50_milliseconds(points: list[CapacityPoint], rate: float | None) -> None:
    assert curve(*points).rate_within(50) == rate
    assert curve(*points, objective=50).requests_per_second == rate


def test_without_an_objective_there_is_no_rate() -> None:
    assert curve(point(10, 20)).requests_per_second is None


def test_a_point_meets_the_objective_only_if_the_server_keeps_up_with_the_load() -> None:
    assert point(100, 20, completed=100 * KEEPS_UP).meets(20)
    assert not point(100, 20, completed=100 * KEEPS_UP - 0.1).meets(20)
    assert not point(100, 20).meets(19.99)


@pytest.mark.parametrize(
    "wrong",
    [{"arrivals_per_second": 0}, {"p95_milliseconds": -1}, {"refused_share": 1.1}, {"p95_milliseconds": float("nan")}],
)
def test_impossible_measurements_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValidationError):
        CapacityPoint.model_validate({**point(10, 20).model_dump(), **wrong})


RATES = st.floats(0.1, 1e5)
POINTS = st.lists(
    st.builds(point, RATES, st.floats(0, 1e5), refused=st.sampled_from([0.0, 0.0, 0.2]), completed=st.floats(0, 1e5)),
    max_size=8,
    unique_by=lambda measured: measured.arrivals_per_second,
)


@given(POINTS, st.floats(0.01, 1e5))
def test_the_rate_is_within_the_measured_rates_and_below_the_first_miss(
    points: list[CapacityPoint], limit: float
) -> None:
    rate = curve(*points).rate_within(limit)
    ordered = sorted(points, key=lambda measured: measured.arrivals_per_second)
    misses = [measured for measured in ordered if not measured.meets(limit)]
    if not ordered or ordered[0] in misses:
        assert rate is None
        return
    assert rate is not None
    assert ordered[0].arrivals_per_second <= rate <= ordered[-1].arrivals_per_second
    assert not misses or rate <= misses[0].arrivals_per_second


@given(POINTS, st.floats(0.01, 1e5), st.floats(0.01, 1e5))
def test_a_looser_objective_never_allows_a_lower_rate(points: list[CapacityPoint], one: float, other: float) -> None:
    tight, loose = sorted((one, other))
    measured = curve(*points)
    assert (measured.rate_within(tight) or 0) <= (measured.rate_within(loose) or 0) * (1 + 1e-9)


@given(POINTS, st.floats(0.01, 1e5))
def test_a_curve_survives_json(points: list[CapacityPoint], objective: float) -> None:
    measured = curve(*points, objective=objective)
    assert CapacityCurve.model_validate_json(measured.model_dump_json()) == measured
