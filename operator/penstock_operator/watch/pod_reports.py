"""Reads what the API does not have: `/info` of runtime pods, the progress of running jobs from their logs, and changes
of the users' text ConfigMaps.

The API has the resources that a pod requested; only the pod knows which CPUs it got. Jobs have no API token, so their
progress is read from the tail of their logs.
"""

from __future__ import annotations

import asyncio
import json
import logging
from dataclasses import replace

import aiohttp

from penstock.logs import log_event
from penstock_operator.cluster.api import ClusterPort
from penstock_operator.cluster.errors import Backoff, ClusterError
from penstock_operator.cluster.informer import Informer
from penstock_operator.cluster.store import Index, ObjectKey, PackedObject, StoreChange
from penstock_operator.loop.queue import WorkQueue
from penstock_operator.metrics import PROBES
from penstock_operator.plan.names import INTERNAL_PORT
from penstock_operator.plan.workloads import HostReport, JobLog, PodFacts
from penstock_operator.watch.cluster_cache import ClusterCache

INFO_MAX_BYTES = 262_144
BACKOFF = Backoff(first_seconds=0.5, limit_seconds=10.0)
"""A pod that warms up does not listen yet: that takes seconds, sometimes a minute."""
AGAIN_SECONDS = 600.0
"""A pod is read again after this time: a kubelet restarted with other settings may move it to other CPUs."""
logger = logging.getLogger(__name__)


class PodInfoReader:
    """Keeps the reports of the cache up to date: reads `/info` of each runtime pod once, and again after changes."""

    def __init__(
        self, cache: ClusterCache, *, timeout_seconds: float, concurrency: int, port: int = INTERNAL_PORT
    ) -> None:
        self._cache = cache
        self._timeout = aiohttp.ClientTimeout(total=timeout_seconds)
        self._concurrency = concurrency
        self._port = port
        self._queue: WorkQueue[ObjectKey] = WorkQueue(backoff=BACKOFF)
        self._asked: dict[str, tuple[int, bool]] = {}
        """Restarts and readiness of the pod at its last read, by uid."""
        cache.pods.listen(self._on_pod)

    async def run(self) -> None:
        """Until cancelled."""
        async with (
            aiohttp.ClientSession(timeout=self._timeout, trust_env=False) as session,
            asyncio.TaskGroup() as group,
        ):
            for _ in range(self._concurrency):
                group.create_task(self._work(session))

    def _on_pod(self, difference: StoreChange[PodFacts]) -> None:
        if difference.new is None:
            if difference.old is not None:
                self._cache.reports.forget(difference.old.uid)
                self._asked.pop(difference.old.uid, None)
            self._queue.forget(difference.key)
            return
        pod = difference.new.facts
        if not _serves(difference.new.index) or not _runs(pod):
            return
        if self._asked.get(pod.uid) != (pod.container.restarts, pod.ready):
            self._queue.add(difference.key)

    async def _work(self, session: aiohttp.ClientSession) -> None:
        while True:
            key = await self._queue.get()
            pod = self._cache.pods.facts(key)
            if pod is None or not _runs(pod):
                self._queue.done(key)
                continue
            self._asked[pod.uid] = (pod.container.restarts, pod.ready)
            report, problem = await self._ask(session, pod)
            PROBES.labels("ok" if report is not None else "failed").inc()
            if self._cache.pods.facts(key) is not None:
                self._cache.put_report(key, pod.uid, (report, problem))
            self._queue.done(key, failed=report is None, again_seconds=AGAIN_SECONDS)

    async def _ask(self, session: aiohttp.ClientSession, pod: PodFacts) -> tuple[HostReport | None, str]:
        host = f"[{pod.ip}]" if ":" in pod.ip else pod.ip
        url = f"http://{host}:{self._port}/info"
        try:
            async with session.get(url, allow_redirects=False) as response:
                if response.status != 200:
                    return None, f"{url} answers {response.status}"
                # A longer body is cut, so it is not valid JSON.
                body = bytearray()
                async for chunk in response.content.iter_any():
                    body += chunk
                    if len(body) > INFO_MAX_BYTES:
                        break
                report = HostReport.from_info(json.loads(body[:INFO_MAX_BYTES]))
        except TimeoutError:
            return None, f"{url} does not answer within {self._timeout.total:g} s"
        except aiohttp.ClientError as error:
            return None, f"{url} cannot be reached: {error}"
        except (ValueError, TypeError, AttributeError) as error:
            return None, f"{url} has a form that this version of the operator does not understand: {error}"
        return report, "" if report is not None else "it has not inspected its host yet"


def _serves(indexes: tuple[Index, ...]) -> bool:
    return any(index[0] == "endpoint" for index in indexes)


def _runs(pod: PodFacts) -> bool:
    return bool(pod.ip) and pod.phase == "Running" and not pod.deleting


LOG_LINES = 40
"""The baseline is logged once, early: it is remembered when it is no longer in the tail."""
LOG_MAX_BYTES = 65_536
LOG_CONCURRENCY = 4


class JobLogReader:
    """Keeps the job logs of the cache up to date. Makes no call while no job runs."""

    def __init__(self, port: ClusterPort, cache: ClusterCache, *, interval_seconds: float) -> None:
        self._port = port
        self._cache = cache
        self._interval_seconds = interval_seconds
        self._queue: WorkQueue[ObjectKey] = WorkQueue()
        cache.pods.listen(self._on_pod)

    async def run(self) -> None:
        """Until cancelled."""
        async with asyncio.TaskGroup() as group:
            for _ in range(LOG_CONCURRENCY):
                group.create_task(self._work())

    def _on_pod(self, difference: StoreChange[PodFacts]) -> None:
        if difference.new is None:
            if difference.old is not None:
                self._cache.logs.forget(difference.old.uid)
            self._queue.forget(difference.key)
        elif difference.new.facts.attempt and difference.new.facts.phase == "Running":
            self._queue.add(difference.key)

    async def _work(self) -> None:
        while True:
            key = await self._queue.get()
            pod = self._cache.pods.facts(key)
            if pod is None or pod.phase != "Running":
                self._queue.done(key)
                continue
            try:
                text = await self._port.log_tail(key.name, key.namespace, lines=LOG_LINES, max_bytes=LOG_MAX_BYTES)
            except ClusterError as error:
                # Progress is optional: the result comes with the termination message.
                logger.warning(
                    "cannot read the progress of job pod %s: %s",
                    key,
                    error,
                    extra=log_event("JobLogUnreadable", object=str(key), reason=error),
                )
                self._queue.done(key, failed=True)
                continue
            before = self._cache.logs.get(pod.uid) or JobLog()
            now = JobLog.from_lines(text)
            known = now if now.baseline_digest else replace(before, progress=now.progress)
            self._cache.put_log(key, pod.uid, known if known.progress else replace(known, progress=before.progress))
            self._queue.done(key, again_seconds=self._interval_seconds)


class TextsWatcher:
    """Watches the ConfigMaps that endpoints take texts from.

    Users own these ConfigMaps: no label selects them, and one watch for each of thousands would be too many. So the
    metadata of all ConfigMaps of the cluster is watched, and those that no endpoint names are ignored. Nothing is
    watched while no endpoint names one.
    """

    def __init__(self, port: ClusterPort, cache: ClusterCache, namespaces: tuple[str, ...]) -> None:
        self._informers = tuple(Informer(port, cache.text_sources, namespace=one) for one in namespaces or ("",))
        self._wanted = asyncio.Event()
        cache.endpoints.listen(self._on_endpoint)

    @property
    def silence_seconds(self) -> dict[str, float]:
        """Seconds since the last data of each watch; empty while nothing is watched."""
        if not self._wanted.is_set():
            return {}
        return {f"texts: {informer.name}": informer.silence_seconds for informer in self._informers}

    async def run(self) -> None:
        """Until cancelled."""
        await self._wanted.wait()
        async with asyncio.TaskGroup() as group:
            for informer in self._informers:
                group.create_task(informer.run())

    def _on_endpoint(self, change: StoreChange[PackedObject]) -> None:
        if not self._wanted.is_set() and any(index[0] == "texts" for index in change.indexes):
            self._wanted.set()
