"""Requests through replicas that come and go."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock_simulator.choices import Dispatch
from penstock_simulator.fleet import LOST, Fleet, FleetSettings, ReplicaModel
from tests.examples import examples

ONE = ReplicaModel(servers=1, mean_service_seconds=1.0, sigma=0.0)


def fleet(replicas: int = 1, *, model: ReplicaModel = ONE, **settings: object) -> Fleet:
    found = Fleet(model, FleetSettings(**{"start_up_seconds": 0.0, **settings}))  # type: ignore[arg-type]
    found.resize(replicas, 0.0)
    found.activate(0.0)
    return found


def latencies(
    found: Fleet, arrivals: Sequence[float], services: Sequence[float], until: float = math.inf
) -> list[float]:
    found.advance(arrivals, services, arrivals[-1])
    found.advance([], [], until)
    return [round(latency, 6) for _, _, latency in sorted(found.take_log())]


@pytest.mark.parametrize("dispatch", Dispatch)
def test_one_server_answers_in_order(dispatch: Dispatch) -> None:
    found = fleet(dispatch=dispatch)

    assert latencies(found, [0.0, 0.1, 5.0], [1.0, 1.0, 2.0]) == [1.0, 1.9, 2.0]
    assert found.in_flight == 0


def test_a_fixed_delay_occupies_no_server() -> None:
    found = fleet(model=ReplicaModel(1, 1.0, 0.0, fixed_seconds=0.5))

    assert latencies(found, [0.0, 0.0], [1.0, 1.0]) == [1.5, 2.5]


def test_the_least_busy_replica_is_taken() -> None:
    found = fleet(2)

    assert latencies(found, [0.0, 0.1, 1.5], [10.0, 1.0, 1.0]) == [1.0, 1.0, 10.0]


def test_a_gateway_keeps_the_queue_for_the_first_free_replica() -> None:
    """It is not known at dispatch that the first replica is stuck."""
    arrivals, services = [0.0, 0.1, 0.2, 0.3], [10.0, 1.0, 1.0, 1.0]

    assert max(latencies(fleet(2, dispatch=Dispatch.GATEWAY_QUEUE), arrivals, services)[:-1]) == pytest.approx(2.8)
    assert (
        latencies(fleet(2), arrivals, services)[-2:]
        != latencies(fleet(2, dispatch=Dispatch.GATEWAY_QUEUE), arrivals, services)[-2:]
    )


@pytest.mark.parametrize("dispatch", [Dispatch.LEAST_OUTSTANDING, Dispatch.GATEWAY_QUEUE])
def test_a_request_that_has_not_begun_by_its_deadline_is_dropped(dispatch: Dispatch) -> None:
    found = fleet(dispatch=dispatch, deadline_seconds=1.5)

    assert latencies(found, [0.0, 0.0, 0.0], [1.0, 1.0, 1.0]) == [1.0, LOST, 2.0]


def test_a_full_queue_refuses() -> None:
    found = fleet(queue_rows=2)

    assert latencies(found, [0.0, 0.0, 0.0], [1.0, 1.0, 1.0]) == [1.0, 2.0]
    assert found.refused == 1


def test_without_replicas_everything_is_refused_and_a_gateway_waits() -> None:
    refusing, waiting = fleet(0), fleet(0, dispatch=Dispatch.GATEWAY_QUEUE)
    refusing.advance([0.5], [1.0], 1.0)
    waiting.advance([0.5], [1.0], 1.0)

    assert (refusing.refused, waiting.in_flight) == (1, 1)
    waiting.resize(1, 1.0)
    waiting.activate(3.0)
    waiting.advance([], [], 10.0)
    assert [round(latency, 6) for _, _, latency in waiting.take_log()] == [3.5]


def test_a_replica_takes_traffic_after_its_start_up_and_costs_from_its_request() -> None:
    slow = Fleet(ONE, FleetSettings(start_up_seconds=40, drain_seconds=5))
    slow.resize(2, 10.0)
    slow.activate(49.0)
    assert (slow.replicas, slow.ready) == (2, 0)
    slow.activate(50.0)
    assert slow.ready == 2
    slow.resize(1, 100.0)

    assert slow.replica_seconds(0, 200) == (200 - 10) + (105 - 10)
    assert slow.replica_seconds(60, 100) == 80


def test_replicas_that_have_not_started_are_removed_first_and_at_once() -> None:
    found = Fleet(ONE, FleetSettings(start_up_seconds=40))
    found.resize(1, 0.0)
    found.activate(40.0)
    found.resize(3, 50.0)
    found.resize(2, 60.0)

    assert (found.replicas, found.ready) == (2, 1)
    assert found.pods[2].gone_at == 60.0


def test_a_removed_replica_finishes_its_requests() -> None:
    found = fleet(2)
    found.advance([0.0, 0.0], [20.0, 20.0], 1.0)
    found.resize(1, 1.0)
    assert found.pods[1].gone_at == 20.0

    found.advance([2.0], [1.0], 60.0)

    assert sorted(pod for _, pod, _ in found.take_log()) == [0, 0, 1]


@settings(max_examples=examples(60), deadline=None)
@given(
    st.lists(st.tuples(st.floats(0, 0.5), st.floats(0.01, 3)), min_size=1, max_size=80),
    st.sampled_from(Dispatch),
    st.lists(st.integers(0, 4), min_size=1, max_size=4),
)
def test_every_request_is_answered_lost_or_refused_once(
    requests: list[tuple[float, float]], dispatch: Dispatch, sizes: list[int]
) -> None:
    found = fleet(sizes[0], dispatch=dispatch, deadline_seconds=5.0, queue_rows=6)
    arrivals = np.cumsum([gap for gap, _ in requests]).tolist()
    services = [service for _, service in requests]
    now = 0.0
    for index, size in enumerate([*sizes, 1]):
        part = [
            at
            for at, when in enumerate(arrivals)
            if index * 5 <= when < index * 5 + 5 or (index == len(sizes) and when >= index * 5)
        ]
        now = max([index * 5 + 5.0, *(arrivals[at] for at in part)])
        found.advance([arrivals[at] for at in part], [services[at] for at in part], now)
        found.resize(size, now)
        found.activate(now)

    found.advance([], [], now + 1000)

    log = found.take_log()
    assert len(log) + found.refused == len(arrivals)
    assert found.in_flight == 0
    served = [latency for _, _, latency in log if latency != LOST]
    assert all(latency <= 5.0 + max(services) + 1e-9 for latency in served)


def test_waiting_times_equal_queueing_theory() -> None:
    """M/M/1 at three quarters: a time in the system of 4 service times on average."""
    random = np.random.default_rng(5)
    count = 60_000
    arrivals = np.cumsum(random.exponential(1 / 0.75, count)).tolist()
    found = fleet(deadline_seconds=1e9, queue_rows=count)

    found.advance(arrivals, random.exponential(1.0, count).tolist(), arrivals[-1])
    found.advance([], [], math.inf)
    log = found.take_log()

    assert np.mean([latency for _, _, latency in log]) == pytest.approx(4.0, rel=0.1)


def test_requests_in_flight_follow_littles_law() -> None:
    """Little's law, on the integral that Knative's metric is made of."""
    random = np.random.default_rng(1)
    arrivals = np.sort(random.random(5000) * 1000).tolist()
    found = fleet(6)

    found.advance(arrivals, random.exponential(1.0, 5000).tolist(), 5000.0)

    total = sum(latency for _, _, latency in found.take_log())
    assert found.area == pytest.approx(total)


def test_latency_falls_from_random_to_least_outstanding_to_one_queue() -> None:
    random = np.random.default_rng(2)
    arrivals = np.cumsum(random.exponential(1 / 3.4, 20_000)).tolist()
    services = random.exponential(1.0, 20_000).tolist()
    means = []
    for dispatch in (Dispatch.RANDOM, Dispatch.LEAST_OUTSTANDING, Dispatch.GATEWAY_QUEUE):
        found = fleet(4, dispatch=dispatch, deadline_seconds=1e9, queue_rows=10**6)
        found.advance(arrivals, services, arrivals[-1])
        found.advance([], [], math.inf)
        means.append(float(np.mean([latency for _, _, latency in found.take_log()])))

    assert means[0] > 1.5 * means[1] > 1.5 * means[2] * 0.95
