"""Which rates are measured, on simulated replicas."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.capacity import CapacityPoint
from penstock_optimizer.capacity.curve import CapacitySteps


def replica(rate: float, *, capacity: float, service: float = 5.0) -> CapacityPoint:
    """A queue: p95 grows as 1 / (1 - utilisation), and without bound from the capacity on."""
    used = rate / capacity
    p95 = service / (1 - used) if used < 0.98 else 1e4
    return CapacityPoint(
        arrivals_per_second=rate,
        completed_per_second=min(rate, capacity),
        p50_milliseconds=min(p95 / 2, 1e4),
        p95_milliseconds=min(p95, 1e4),
        p99_milliseconds=min(p95 * 1.5, 2e4),
        samples=200,
    )


def run(steps: CapacitySteps, *, capacity: float, service: float = 5.0) -> int:
    count = 0
    while (rate := steps.next_rate()) is not None:
        steps.record(replica(rate, capacity=capacity, service=service))
        count += 1
        assert count < 40
    return count


@pytest.mark.parametrize("objective", [10.0, 20.0, 50.0])
@pytest.mark.parametrize("estimate_error", [0.4, 1.0, 2.0])
def test_the_knee_is_found_whatever_the_first_guess(objective: float, estimate_error: float) -> None:
    steps = CapacitySteps(saturation=100 * estimate_error, p95_objective=objective)
    count = run(steps, capacity=100)

    true = 100 * (1 - 5 / objective)
    assert steps.curve().requests_per_second == pytest.approx(true, rel=0.1)
    assert count <= 16


def test_one_burst_of_other_work_does_not_end_the_curve() -> None:
    steps = CapacitySteps(saturation=100, p95_objective=20)
    disturbed = False
    while (rate := steps.next_rate()) is not None:
        point = replica(rate, capacity=100)
        if not disturbed and 20 < rate < 40:
            disturbed = True
            point = point.model_copy(update={"p95_milliseconds": 500.0})
        steps.record(point)

    assert disturbed
    assert steps.curve().requests_per_second == pytest.approx(75, rel=0.1)


def test_an_objective_tighter_than_a_lone_request_has_no_rate() -> None:
    steps = CapacitySteps(saturation=100, p95_objective=4.0)
    count = run(steps, capacity=100)

    assert steps.curve().requests_per_second is None
    assert steps.curve().points
    assert count <= 12


def test_without_an_objective_the_knee_is_three_times_the_idle_p95() -> None:
    steps = CapacitySteps(saturation=100, p95_objective=None)
    run(steps, capacity=100)
    curve = steps.curve()

    limit = curve.p95_objective_milliseconds
    assert limit is not None
    assert limit == pytest.approx(3 * curve.points[0].p95_milliseconds)
    assert curve.requests_per_second == pytest.approx(100 * (1 - 5 / limit), rel=0.1)


def test_refused_requests_are_a_miss_however_fast_the_others_were() -> None:
    steps = CapacitySteps(saturation=100, p95_objective=1000)
    while (rate := steps.next_rate()) is not None:
        refused = 0.2 if rate > 60 else 0.0
        steps.record(
            replica(min(rate, 90), capacity=100).model_copy(
                update={
                    "arrivals_per_second": rate,
                    "refused_share": refused,
                    "p95_milliseconds": 10.0,
                    "completed_per_second": rate,
                }
            )
        )

    found = steps.curve().requests_per_second
    assert found is not None
    assert 50 < found <= 60


def test_a_slowly_growing_queue_is_a_miss_even_if_the_latency_does_not_show_it() -> None:
    steps = CapacitySteps(saturation=100, p95_objective=1e9)
    run(steps, capacity=100)
    found = steps.curve().requests_per_second

    assert found is not None
    assert found <= 100 / 0.9 + 1e-6


@given(
    capacity=st.floats(1, 1e4),
    objective=st.one_of(st.none(), st.floats(1, 1e4)),
    guess=st.floats(0.2, 3),
    noise=st.floats(0, 0.3),
    seed=st.integers(0, 100),
)
def test_the_search_ends_and_its_points_rise(
    *, capacity: float, objective: float | None, guess: float, noise: float, seed: int
) -> None:
    generator = random.Random(seed)
    steps = CapacitySteps(saturation=capacity * guess, p95_objective=objective)
    for _ in range(60):
        rate = steps.next_rate()
        if rate is None:
            break
        assert rate > 0
        point = replica(rate, capacity=capacity)
        slower = 1 + generator.random() * noise
        steps.record(point.model_copy(update={"p95_milliseconds": point.p95_milliseconds * slower}))
    else:
        pytest.fail("the search did not end")
    curve = steps.curve()
    rates = [point.arrivals_per_second for point in curve.points]

    assert rates == sorted(set(rates))
    found = curve.requests_per_second
    assert found is None or min(rates) <= found <= max(rates)
