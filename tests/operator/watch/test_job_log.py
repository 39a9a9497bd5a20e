"""Progress from the logs of jobs."""

from __future__ import annotations

import asyncio
import json

from aiohttp import web

from penstock_operator.plan.workloads import JobLog, JobProgress
from penstock_operator.settings import Settings
from penstock_operator.watch.cluster_cache import ClusterCache
from penstock_operator.watch.pod_reports import JobLogReader
from tests.operator import objects
from tests.operator.scripted_api import Answer, ScriptedApi, problem, scripted


def log(*lines: dict[str, object] | str) -> Answer:
    async def give(_: web.Request) -> web.StreamResponse:
        return web.Response(text="\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))

    return give


def progress(done: int) -> dict[str, object]:
    return {"event": "progress", "nonce": "n", "done": done, "of": 23, "stage": "measuring", "message": ""}


def followed(until: int, *answers: Answer, phase: str = "Running") -> tuple[JobLog | None, ScriptedApi]:
    """The parsed log of a job, and the API, once its progress is `until`."""

    async def scenario() -> tuple[JobLog | None, ScriptedApi]:
        async with scripted(*answers) as api, api.port() as port:
            cache = ClusterCache(Settings().plan_settings())
            logs = JobLogReader(port, cache, interval_seconds=0.01)
            arrived = asyncio.Event()

            def check(_: object) -> None:
                known = cache.logs.get("uid-j")
                if known is not None and known.progress is not None and known.progress.done == until:
                    arrived.set()

            cache.listen_reports(check)
            task = asyncio.create_task(logs.run())
            cache.models.put(objects.optimized_model("m"))
            cache.jobs.put(objects.job("m", nonce="n"))
            cache.pods.put(objects.job_pod("j", "m", phase=phase))
            try:
                async with asyncio.timeout(60 if phase == "Running" else 0.2):
                    await arrived.wait()
            except TimeoutError:
                assert phase != "Running"
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            return cache.logs.get("uid-j"), api

    return asyncio.run(scenario())


def test_progress_is_read_as_it_grows() -> None:
    found, api = followed(8, log(progress(7)), log("Downloading...", progress(7), progress(8)))

    assert found == JobLog(JobProgress(8, 23, "measuring", ""))
    assert api.seen[0].path == "/api/v1/namespaces/a/pods/j/log"


def test_the_baseline_is_kept_when_it_is_no_longer_in_the_tail_of_the_log() -> None:
    baseline: dict[str, object] = {
        "event": "baseline",
        "nonce": "n",
        "digest": "sha256:" + "0" * 64,
        "uri": "file:///x",
    }

    found, _ = followed(9, log(baseline, progress(1)), log(progress(9)))

    assert found is not None
    assert (found.baseline_digest, found.baseline_uri) == (baseline["digest"], baseline["uri"])


def test_a_log_that_cannot_be_read_for_now_is_read_later() -> None:
    found, _ = followed(3, problem(403, "no"), log(progress(3)))

    assert found is not None


def test_no_call_is_made_for_a_job_that_does_not_run() -> None:
    found, api = followed(1, log(progress(1)), phase="Succeeded")

    assert found is None
    assert api.seen == []


def test_with_an_interval_of_0_no_log_is_read() -> None:
    async def scenario() -> ScriptedApi:
        async with scripted(log(progress(1))) as api, api.port() as port:
            cache = ClusterCache(Settings().plan_settings())
            task = asyncio.create_task(JobLogReader(port, cache, interval_seconds=0).run())
            cache.models.put(objects.optimized_model("m"))
            cache.jobs.put(objects.job("m", nonce="n"))
            cache.pods.put(objects.job_pod("j", "m", phase="Running"))
            for _ in range(100):
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            return api

    assert asyncio.run(scenario()).seen == []
