"""The load from the gateway's metrics: parsed, combined with the replicas' metrics, and awaited at zero replicas."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from typing import Any, cast

import pytest

from penstock_gateway.haproxy import HAProxySocket
from penstock_operator.cluster.api import ClusterPort
from penstock_operator.cluster.store import ObjectKey
from penstock_operator.control.cache import ClusterCache
from penstock_operator.decide import Idle, Metrics, Unknown, Value
from penstock_operator.facts import names
from penstock_operator.process import make_autoscaler
from penstock_operator.scaling.read.gateways import combined, parse_gateway_metrics
from penstock_operator.scaling.read.scrape import UnreadableMetrics
from penstock_operator.scaling.read.target import ScalingTargets
from penstock_operator.settings import LoadSettings, Settings
from tests.gateway.rig import Crowd, Gateway, Rig, running_rig
from tests.operator import objects

KEY = ObjectKey("a", "e")
TEXT = """# TYPE penstock_gateway_requests_total counter
penstock_gateway_requests_total 12
penstock_gateway_in_flight_requests 5
penstock_gateway_held_requests 2
"""


def test_finished_and_in_flight_requests_are_read() -> None:
    reading = parse_gateway_metrics(TEXT)

    assert (reading.arrivals, reading.in_flight) == (7, 5)


@pytest.mark.parametrize(
    "text",
    ["", "up 1\n", TEXT.replace("12", "NaN"), TEXT.replace("12", "-1"), TEXT.replace("in_flight", "other")],
)
def test_metrics_that_are_not_a_gateways_are_refused(text: str) -> None:
    with pytest.raises(UnreadableMetrics):
        parse_gateway_metrics(text)


def test_rates_are_the_gateways_and_latency_is_the_replicas() -> None:
    gateway = Metrics(Value(9), Value(8), Value(40), Unknown("none"), Unknown("none"))
    replicas = Metrics(Value(1), Value(1), Value(2), Value(0.9), Value(120))

    assert combined(gateway, replicas, ready=2, coverage_least=0.8) == Metrics(
        Value(9), Value(8), Value(40), Value(0.9), Value(120)
    )


def test_the_latency_is_unknown_if_too_few_replicas_were_scraped() -> None:
    gateway = Metrics(Value(9), Value(8), Value(40), Unknown("none"), Unknown("none"))
    replicas = Metrics(Value(1), Value(1), Value(2), Value(0.9), Value(120), coverage=0.5)
    found = combined(gateway, replicas, ready=2, coverage_least=0.8)

    assert found.p95_milliseconds == Unknown("only 50% of the ready replicas were scraped")
    assert found.coverage == 1


def test_without_replicas_there_is_no_latency() -> None:
    gateway = Metrics(Idle(), Idle(), Value(0), Unknown("none"), Unknown("none"))
    no_replica = Metrics.unknown("no replica is ready")

    assert combined(gateway, no_replica, ready=0, coverage_least=0.8).p95_milliseconds == Idle()
    busy = Metrics(Value(1), Value(1), Value(3), Unknown("none"), Unknown("none"))
    assert combined(busy, no_replica, ready=0, coverage_least=0.8).p95_milliseconds == Unknown("no replica is ready")


def gateway_pod(name: str, *, ready: bool = True, deleting: bool = False, version: int = 5) -> dict[str, Any]:
    labels = names.gateway_labels("e")
    more = {"deletionTimestamp": "2026-11-21T20:00:00Z"} if deleting else {}
    return {
        "metadata": objects.metadata(name, version, labels, ownerReferences=objects.controller("e-gateway-1"), **more),
        "spec": {"nodeName": "n"},
        "status": {
            "phase": "Running",
            "podIP": "127.0.0.1",
            "conditions": [{"type": "Ready", "status": "True" if ready else "False"}],
        },
    }


def cluster_at_zero(replicas: int = 0, **spec: Any) -> ClusterCache:
    cache = ClusterCache(Settings().plan_settings())
    cache.endpoints.put(objects.endpoint("e", **{"scaling": {"minReplicas": 0}, **spec}))
    cache.deployments.put(objects.deployment("e", replicas=replicas))
    cache.deployments.put(objects.deployment("e-gateway", of="e"))
    cache.replica_sets.put(objects.replica_set("e-gateway"))
    return cache


@pytest.mark.parametrize(
    ("spec", "pods", "least", "pooled_by"),
    [
        ({}, [("g", True, False)], 0, ("g",)),
        ({}, [("g", True, False), ("h", True, True)], 0, ("g", "h")),
        ({}, [("g", False, False)], 1, ()),
        ({}, [("g", True, True)], 1, ()),
        ({"gateway": {"mode": "Never"}}, [("g", True, False)], 1, ()),
        ({"scaling": {"minReplicas": 0, "mode": "HPA"}}, [("g", True, False)], 1, ("g",)),
        ({"scaling": {"minReplicas": 0, "mode": "KEDA"}}, [("g", True, False)], 0, ("g",)),
        ({"scaling": {"minReplicas": 2}, "gateway": {"mode": "Always"}}, [("g", True, False)], 2, ("g",)),
    ],
)
def test_zero_is_possible_only_behind_a_gateway_that_is_up(
    spec: dict[str, Any], pods: list[tuple[str, bool, bool]], least: int, pooled_by: tuple[str, ...]
) -> None:
    cache = cluster_at_zero(1, **spec)
    for name, ready, deleting in pods:
        cache.pods.put(gateway_pod(name, ready=ready, deleting=deleting))
    target = ScalingTargets(cache).find(KEY)

    assert target is not None
    assert target.settings.min_replicas == least
    assert tuple(pod.name for pod in target.gateways) == pooled_by
    # The gateway's pods do not count as serving pods.
    assert (target.ready, target.pods) == ((), ())


@pytest.fixture
def rig() -> Iterator[Rig]:
    with running_rig() as running:
        yield running


@asynccontextmanager
async def operating(cache: ClusterCache, gateway: Gateway, **settings: Any) -> AsyncIterator[None]:
    """The autoscaler on this cluster cache, with a real gateway."""
    chosen = LoadSettings(**settings)
    port = cast("ClusterPort", object())
    autoscaler = make_autoscaler(port, cache, chosen, pod_port=1, gateway_port=gateway.status_port)
    work = asyncio.create_task(autoscaler.run())
    try:
        yield
    finally:
        work.cancel()
        with suppress(asyncio.CancelledError):
            await work


async def until(condition: Any, *, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)


def test_a_held_request_scales_up_long_before_the_next_tick(rig: Rig) -> None:
    gateway = rig.gateway()
    cache = cluster_at_zero()
    cache.pods.put(gateway_pod("g"))

    async def play() -> None:
        # Ticks are twenty seconds apart, the longest interval that may be set.
        async with operating(cache, gateway, scaling_interval_seconds=20.0):
            deadline = time.monotonic() + 60
            while not await asyncio.to_thread(is_asked, gateway):
                assert time.monotonic() < deadline
                await asyncio.sleep(0.05)
            crowd = Crowd(gateway.url, 3)
            # 0.1 s on a quiet machine.
            await until(lambda: KEY in cache.scales and cache.scales[KEY].replicas == 1, seconds=15)
            await asyncio.to_thread(rig.start, "a")
            assert {answer.status_code for answer in await asyncio.to_thread(crowd.finish)} == {200}

    asyncio.run(play())
    scale = cache.scales[KEY]

    assert scale.cause == "Woken"
    assert "up from 0" in scale.reason
    assert "at the gateway" in scale.reason


def is_asked(gateway: Gateway) -> bool:
    """Whether the operator's request to /demand is open."""
    return "fe=status" in HAProxySocket(gateway.log.parent / "haproxy.sock").send("show sess")


def test_an_endpoint_without_requests_stays_at_zero(rig: Rig) -> None:
    gateway = rig.gateway()
    cache = cluster_at_zero()
    cache.pods.put(gateway_pod("g"))

    async def play() -> None:
        async with operating(cache, gateway, scaling_interval_seconds=0.2):
            await until(lambda: KEY in cache.scales)
            await asyncio.sleep(1)

    asyncio.run(play())

    assert cache.scales[KEY].replicas == 0
    metrics = cache.scales[KEY].metrics
    assert metrics is not None
    assert metrics.true
