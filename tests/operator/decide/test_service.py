"""The capacity of one replica, and how much slower it is than its curve."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.capacity import CapacityCurve
from penstock_operator.decide import Service
from tests.operator.decide.cases import CURVE, point, service


def test_the_rate_is_the_curve_s_for_the_objective() -> None:
    assert service().rate == CURVE.requests_per_second == 10
    other = Service.from_curve(CURVE, p95_objective_milliseconds=160)
    assert other is not None
    assert other.rate == pytest.approx(8)


@pytest.mark.parametrize("factor", [1.0, 1.5, 2.0, 4.0])
def test_a_slower_replica_is_the_measured_one_with_longer_durations(factor: float) -> None:
    measured, slower = service(), service().slower(factor)

    assert slower.rate == pytest.approx(measured.capacity(factor))
    assert slower.p95_at(5 / factor) == pytest.approx(factor * measured.p95_at(5))
    assert slower.saturation == pytest.approx(max(slower.rate, measured.saturation / factor))
    assert slower.within_objective is (factor * measured.p95_milliseconds[0] <= measured.p95_objective_milliseconds)


def test_the_saturation_is_the_highest_rate_that_was_answered() -> None:
    assert service().saturation == 14


@pytest.mark.parametrize(
    "curve", [CapacityCurve(), CapacityCurve(points=(point(5, 100, completed=2),), p95_objective_milliseconds=200)]
)
def test_an_empty_curve_makes_no_service(curve: CapacityCurve) -> None:
    assert Service.from_curve(curve) is None


def test_an_objective_out_of_reach_leaves_the_rate_that_is_kept_up_with() -> None:
    found = Service.from_curve(CURVE, p95_objective_milliseconds=50)

    assert found is not None
    assert not found.within_objective
    assert found.rate == 12
    assert found.capacity(2.0) == 6


def test_noise_does_not_make_a_busier_replica_faster() -> None:
    noisy = CapacityCurve(
        points=(point(2, 100), point(4, 80), point(4, 90), point(6, 130)), p95_objective_milliseconds=150
    )

    found = Service.from_curve(noisy)

    assert found is not None
    assert found.p95_milliseconds == (100, 100, 130)


@pytest.mark.parametrize(("rate", "p95"), [(0, 100), (2, 100), (4, 110), (10, 200), (11, 300), (16, 3000), (17, 3650)])
def test_p95_is_interpolated_on_the_curve(rate: float, p95: float) -> None:
    assert service().p95_at(rate) == pytest.approx(p95)


def test_a_curve_of_one_point_rises_in_proportion() -> None:
    found = Service.from_curve(CapacityCurve(points=(point(5, 100),), p95_objective_milliseconds=200))

    assert found is not None
    assert found.p95_at(10) == pytest.approx(200)


@given(st.floats(0.1, 40), st.integers(1, 12), st.floats(0.3, 3.5), st.booleans())
def test_a_slow_down_is_recovered_from_its_p95(rate: float, replicas: int, slowdown: float, pooled: bool) -> None:
    replica = service(pooled=pooled)

    found = replica.slowdown_of(rate, replicas, replica.p95_of(rate, replicas, slowdown=slowdown))

    assert found == pytest.approx(slowdown, rel=1e-3)


def test_a_replica_twice_as_slow_takes_less_than_half() -> None:
    assert service().capacity(1.0) == 10
    assert service().capacity(2.0) == pytest.approx(1.0)  # its idle p95 has become 200 ms: at least a tenth
    assert service().capacity(1.25) == pytest.approx(8 / 1.25)


@given(st.floats(1, 3), st.floats(1, 3))
def test_a_slower_replica_never_takes_more(one: float, other: float) -> None:
    slower, faster = max(one, other), min(one, other)

    assert service().capacity(slower) <= service().capacity(faster) + 1e-9


def test_pooled_replicas_are_more_than_their_sum_and_less_than_their_saturation() -> None:
    alone, together = service(), service(pooled=True)

    assert [alone.total(n) for n in (1, 4)] == [10, 40]
    assert [together.total(n) for n in (1, 4, 9)] == [10, 4 * 14 - 4 * 2, 9 * 14 - 4 * 3]


@given(st.floats(0.01, 500), st.booleans(), st.floats(1, 2))
def test_replicas_for_a_rate_inverts_the_total(rate: float, pooled: bool, slowdown: float) -> None:
    replica = service(pooled=pooled)
    whole = max(1, round(replica.replicas_for(rate, slowdown=slowdown)))

    assert replica.replicas_for(replica.total(whole, slowdown=slowdown), slowdown=slowdown) == pytest.approx(whole)
    assert replica.replicas_for(0) == 0


def test_pooled_replicas_at_the_same_share_of_their_total_have_the_same_p95() -> None:
    together = service(pooled=True)

    assert [together.p95_of(together.total(n), n) for n in (1, 4, 9)] == pytest.approx([200, 200, 200])
