"""Liveness depends on the progress of work, not on whether a server answers."""

from __future__ import annotations

import asyncio

import aiohttp
import pytest
from prometheus_client import CollectorRegistry, Counter

from penstock_operator.control.queue import WorkProgress
from penstock_operator.health import HealthChecks, serve


@pytest.mark.parametrize(
    ("ages", "ok", "message"),
    [
        ({}, True, "ok"),
        ({"Pod": 59.0, "work": 0.0}, True, "ok"),
        ({"Pod": 61.0, "Job": 300.0}, False, "Job: nothing for 300 s; Pod: nothing for 61 s"),
    ],
)
def test_a_watch_that_is_silent_for_too_long_fails_the_liveness_check(
    ages: dict[str, float], ok: bool, message: str
) -> None:
    health = HealthChecks(limit_seconds=60)
    health.add_ages(lambda: ages)

    verdict = health.live()

    assert (verdict.ok, verdict.message) == (ok, message)


def test_an_empty_queue_and_one_in_progress_are_healthy() -> None:
    assert WorkProgress(lambda: 0.0).age_seconds == 0.0
    moving = WorkProgress(lambda: 1000.0)
    moving.moved()

    assert moving.age_seconds < 100


def test_readiness_names_what_it_waits_for() -> None:
    health = HealthChecks(limit_seconds=60)
    health.set_readiness(lambda: "waiting for the first list of Pod")

    assert health.ready().message == "waiting for the first list of Pod"
    assert not health.ready().ok


def test_probes_and_metrics_are_served() -> None:
    async def scenario() -> list[tuple[int, str]]:
        health = HealthChecks(limit_seconds=60)
        registry = CollectorRegistry()
        Counter("some_things_total", "Some things", registry=registry).inc()
        runner = await serve(health, registry, host="127.0.0.1", port=0)
        try:
            async with aiohttp.ClientSession(f"http://127.0.0.1:{runner.addresses[0][1]}") as session:
                found = []
                for path in ("/healthz", "/readyz", "/metrics", "/elsewhere"):
                    async with session.get(path) as response:
                        found.append((response.status, await response.text()))
                return found
        finally:
            await runner.cleanup()

    live, ready, metrics, elsewhere = asyncio.run(scenario())

    assert live == (200, "ok\n")
    assert ready == (503, "starting\n")
    assert "some_things_total 1.0" in metrics[1]
    assert elsewhere[0] == 404
