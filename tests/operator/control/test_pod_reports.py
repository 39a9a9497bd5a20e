"""Reading /info of pods, over real HTTP on loopback addresses."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, cast

import pytest
from aiohttp import web

from penstock_operator.cluster.api import ClusterPort
from penstock_operator.cluster.errors import Backoff
from penstock_operator.cluster.store import ObjectKey
from penstock_operator.control import pod_reports as module
from penstock_operator.control.cache import ClusterCache
from penstock_operator.control.pod_reports import PodInfoReader, TextsReader
from penstock_operator.facts import names
from penstock_operator.facts.names import Json
from penstock_operator.facts.pods import HostReport
from penstock_operator.settings import Settings
from testbed.ports import some_free_ports
from tests.operator import objects

INFO = {"host": {"cpus_allowed": [1, 2], "cores": {"granted": 1, "pinned": True}, "cpu": {"isa": "AVX2"}}}


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BACKOFF", Backoff(first_seconds=0.01, limit_seconds=0.02))


class Pod:
    """A pod's HTTP server: gives the answers of a test, and counts its requests."""

    def __init__(self, *answers: Any) -> None:
        self.answers = list(answers)
        self.asked = 0
        self.informed = 0

    async def known(self, request: web.Request) -> web.StreamResponse:
        """`POST /capacity/known`."""
        self.informed += 1
        self.answers = [INFO]
        return web.Response(text="ok")

    async def info(self, request: web.Request) -> web.StreamResponse:
        self.asked += 1
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if answer == "hang":
            await asyncio.Event().wait()
        if isinstance(answer, int):
            return web.Response(status=answer)
        if isinstance(answer, str):
            return web.Response(text=answer)
        return web.json_response(answer)


@asynccontextmanager
async def serving(pods: dict[str, Pod]) -> AsyncIterator[int]:
    """Pods by address, on one port: as in a cluster."""
    runners = []
    (port,) = some_free_ports(1)
    for address, pod in pods.items():
        app = web.Application()
        app.router.add_get("/info", pod.info)
        app.router.add_post("/capacity/known", pod.known)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, address, port).start()
        runners.append(runner)
    try:
        yield port
    finally:
        for runner in runners:
            await runner.cleanup()


def probed(
    pods: dict[str, Pod], until: Callable[[ClusterCache], bool], *, timeout: float = 30.0, model: Json | None = None
) -> ClusterCache:
    """The cache once `until` holds. `model`: the status of the OptimizedModel of the pods."""

    async def scenario() -> ClusterCache:
        cache = ClusterCache(Settings().plan_settings())
        async with serving(pods) as port:
            probes = PodInfoReader(cache, timeout_seconds=timeout, concurrency=4, port=port)
            reached = asyncio.Event()
            cache.listen_reports(lambda _: reached.set() if until(cache) else None)
            task = asyncio.create_task(probes.run())
            cache.endpoints.put(objects.endpoint("e"))
            cache.deployments.put(objects.deployment("e"))
            cache.replica_sets.put(objects.replica_set("e"))
            if model is not None:
                cache.models.put(objects.optimized_model("m", status=model))
            for number, address in enumerate(pods):
                pod = objects.runtime_pod(f"p{number}", "e", ip=address, node="n")
                if model is not None:
                    pod["metadata"]["labels"][names.OPTIMIZED_MODEL] = "m"
                    pod["metadata"]["annotations"] = {names.ARTEFACT: model["artefact"]["digest"]}
                cache.pods.put(pod)
            async with asyncio.timeout(60):
                await reached.wait()
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            return cache

    return asyncio.run(scenario())


def report(cache: ClusterCache, number: int = 0) -> tuple[HostReport | None, str]:
    return cache.reports.get(f"uid-p{number}") or (None, "")


def has_report(cache: ClusterCache) -> bool:
    return report(cache)[0] is not None


def test_a_pod_is_asked_once_and_its_report_kept() -> None:
    pod = Pod(INFO)

    cache = probed({"127.0.0.1": pod}, has_report)

    assert report(cache) == (HostReport.from_info(INFO), "")
    assert pod.asked == 1


@pytest.mark.parametrize(
    ("bad", "why"),
    [
        (503, "answers 503"),
        ("not json", "has a form that this version of the operator does not understand"),
        ("[]", "has a form that this version of the operator does not understand"),
        ({}, "it has not inspected its host yet"),
        ("hang", "does not answer within 0.05 s"),
    ],
)
def test_a_pod_without_a_report_is_asked_again_and_the_reason_is_kept_meanwhile(bad: Any, why: str) -> None:
    problems = []

    def until(cache: ClusterCache) -> bool:
        problems.append(report(cache)[1])
        return has_report(cache)

    # Time for all but the one that hangs.
    probed({"127.0.0.1": Pod(bad, INFO)}, until, timeout=0.05 if bad == "hang" else 30.0)

    assert why in problems[0]


@pytest.mark.parametrize(("provisional", "informed"), [(False, 1), (True, 0)])
def test_a_pod_that_measures_what_another_one_has_measured_is_informed(
    *, provisional: bool, informed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MEASURING_SECONDS", 0.01)
    pod = Pod({**INFO, "capacity": {"state": "measuring"}})
    capacity = {"points": [{"requestsPerSecond": 9}], "provisional": provisional}
    status = {"artefact": {"digest": "sha256:" + "a" * 64}, "result": {"capacity": capacity}}

    def until(cache: ClusterCache) -> bool:
        found = report(cache)[0]
        return found is not None and (provisional or not found.measures_capacity)

    probed({"127.0.0.1": pod}, until, model=status)

    assert pod.informed == informed


def test_a_pod_that_hangs_does_not_keep_the_others_waiting() -> None:
    pods = {"127.0.0.1": Pod("hang"), "127.0.0.2": Pod(INFO), "127.0.0.3": Pod(INFO)}

    cache = probed(pods, lambda cache: all(report(cache, number)[0] is not None for number in (1, 2)), timeout=30.0)

    assert report(cache, 0) == (None, "")


def test_a_body_without_end_is_not_read_to_its_end() -> None:
    cache = probed({"127.0.0.1": Pod("x" * 2_000_000)}, lambda cache: bool(report(cache)[1]))

    assert "does not understand" in report(cache)[1]


def test_the_report_of_a_deleted_pod_is_removed() -> None:
    cache = probed({"127.0.0.1": Pod(INFO)}, has_report)

    cache.pods.remove(ObjectKey("a", "p0"))

    assert len(cache.reports) == 0


def test_jobs_and_pods_without_an_address_are_not_asked() -> None:
    async def scenario() -> bool:
        cache = ClusterCache(Settings().plan_settings())
        probes = PodInfoReader(cache, timeout_seconds=1, concurrency=1, port=1)
        cache.pods.put(objects.job_pod("j", "m"))
        cache.pods.put(objects.runtime_pod("p", "e"))
        task = asyncio.create_task(probes.run())
        try:
            async with asyncio.timeout(0.1):
                await task
        except TimeoutError:
            return len(cache.reports) == 0
        return False

    assert asyncio.run(scenario())


def test_config_maps_that_no_endpoint_names_any_more_are_forgotten() -> None:
    cache = ClusterCache(Settings().plan_settings())
    source = {"textsFrom": {"configMapName": "texts", "key": "t"}}
    cache.endpoints.put(objects.endpoint("e", workload=source))
    cache.put_texts(ObjectKey("a", "texts"), {"metadata": objects.metadata("texts", 5), "data": {"t": "one"}})
    cache.endpoints.remove(ObjectKey("a", "e"))
    reader = TextsReader(cast("ClusterPort", None), cache, interval_seconds=0)

    async def scenario() -> None:
        gone = asyncio.Event()
        cache.text_sources.listen(lambda _: gone.set())
        run = asyncio.create_task(reader.run())
        await gone.wait()
        run.cancel()

    asyncio.run(asyncio.wait_for(scenario(), 60))
    assert len(cache.text_sources) == 0
