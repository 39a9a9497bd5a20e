"""Reads of the progress of jobs from their pods."""

from __future__ import annotations

import asyncio
import json
import logging
from http.server import BaseHTTPRequestHandler

import pytest

from penstock_operator.cluster.errors import Backoff
from penstock_operator.control import pod_reports
from penstock_operator.control.cache import ClusterCache
from penstock_operator.control.pod_reports import JobProgressReader
from penstock_operator.facts.pods import JobProgress, JobReport
from penstock_operator.settings import Settings
from testbed.ports import some_free_ports
from tests.operator import objects
from tests.operator.hostile import Answer, body, hostile_pods
from tests.operator.running import become_true

IP = "127.0.0.2"
DIGEST = "sha256:" + "0" * 64
BASELINE = {"digest": DIGEST, "uri": "file:///x", "bytes": 12}


@pytest.fixture(autouse=True)
def _short_delays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pod_reports, "BACKOFF", Backoff(first_seconds=0.01, limit_seconds=0.02))


def progress(done: int, **more: object) -> Answer:
    return body(json.dumps({"done": done, "of": 23, "stage": "measuring", "message": "", **more}).encode())


def cache_with_job(*, phase: str = "Running") -> ClusterCache:
    cache = ClusterCache(Settings().plan_settings())
    cache.models.put(objects.optimized_model("m"))
    cache.jobs.put(objects.job("m"))
    cache.pods.put(objects.job_pod("j", "m", phase=phase, ip=IP))
    return cache


def reader(cache: ClusterCache, port: int, *, interval_seconds: float = 0.01) -> JobProgressReader:
    return JobProgressReader(cache, interval_seconds=interval_seconds, timeout_seconds=30, concurrency=2, port=port)


async def followed(cache: ClusterCache, port: int, until: int) -> None:
    """Read until the job's progress is `until`."""
    arrived = asyncio.Event()

    def check(_: object) -> None:
        known = cache.job_reports.get("uid-j")
        if known is not None and known.progress is not None and known.progress.done == until:
            arrived.set()

    cache.listen_reports(check)
    pods = reader(cache, port)
    task = asyncio.create_task(pods.run())
    # The reader listens from now on.
    cache.pods.put(objects.job_pod("j", "m", version=2, ip=IP))
    try:
        async with asyncio.timeout(60):
            await arrived.wait()
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def test_the_progress_and_the_baseline_of_a_job_are_read() -> None:
    (port,) = some_free_ports(1)
    cache = cache_with_job()
    with hostile_pods({(IP, port): progress(8, baseline=BASELINE)}):
        asyncio.run(followed(cache, port, 8))

    assert cache.job_reports.get("uid-j") == JobReport(JobProgress(8, 23, "measuring", ""), DIGEST, "file:///x", 12)


def test_progress_is_read_as_it_grows() -> None:
    (port,) = some_free_ports(1)
    cache = cache_with_job()
    steps = iter(range(1, 1000))

    def grows(request: BaseHTTPRequestHandler) -> None:
        progress(next(steps))(request)

    with hostile_pods({(IP, port): grows}):
        asyncio.run(followed(cache, port, 9))

    report = cache.job_reports.get("uid-j")
    assert report is not None
    assert report.progress is not None
    assert report.progress.done >= 9


def test_a_job_that_does_not_listen_yet_is_read_later_and_one_that_never_does_is_reported_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    (port,) = some_free_ports(1)
    cache = cache_with_job()

    async def scenario() -> None:
        task = asyncio.create_task(reader(cache, port).run())
        cache.pods.put(objects.job_pod("j", "m", version=2, ip=IP))
        await become_true(lambda: bool(caplog.records), task)
        with hostile_pods({(IP, port): progress(3)}):
            await become_true(lambda: cache.job_reports.get("uid-j") is not None, task)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    with caplog.at_level(logging.WARNING):
        asyncio.run(scenario())

    assert [record.__dict__["event"] for record in caplog.records] == ["JobProgressUnreadable"]


@pytest.mark.parametrize(("phase", "interval"), [("Succeeded", 0.01), ("Running", 0.0)])
def test_a_job_that_has_ended_is_not_read_and_with_an_interval_of_0_none_is(phase: str, interval: float) -> None:
    (port,) = some_free_ports(1)
    cache = cache_with_job(phase=phase)

    async def scenario() -> None:
        task = asyncio.create_task(reader(cache, port, interval_seconds=interval).run())
        cache.pods.put(objects.job_pod("j", "m", version=2, phase=phase, ip=IP))
        for _ in range(100):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    with hostile_pods({(IP, port): progress(1)}) as servers:
        asyncio.run(scenario())
        assert servers[IP, port].asked == []
