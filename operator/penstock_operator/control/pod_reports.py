"""Reads data that the API does not have: `/info` of runtime pods, `/progress` of the pods of running jobs, and changes
of the users' text ConfigMaps.

The API has the resources that a pod requested; only the pod knows which CPUs it got. Jobs have no API token to write
their progress with.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable
from typing import Any, TypeVar

import aiohttp

from penstock.logs import log_event
from penstock_operator.cluster.api import CONFIG_MAP, ClusterPort
from penstock_operator.cluster.errors import Backoff, ClusterError
from penstock_operator.cluster.store import Index, ObjectKey, StoreChange
from penstock_operator.control.cache import ClusterCache
from penstock_operator.control.queue import WorkQueue
from penstock_operator.endpoint.optimization.model import digests
from penstock_operator.facts.findings import unprintable_as_spaces
from penstock_operator.facts.names import INTERNAL_PORT
from penstock_operator.facts.pod_data import INFO_MAX_BYTES, PROGRESS_MAX_BYTES, Unreadable, read_body, read_json
from penstock_operator.facts.pods import HostReport, JobFacts, JobReport, PodFacts
from penstock_operator.metrics import PROBES

BACKOFF = Backoff(first_seconds=0.5, limit_seconds=10.0)
"""A pod that warms up does not listen yet: that takes seconds, sometimes a minute."""
AGAIN_SECONDS = 600.0
"""A pod is read again after this time: a kubelet restarted with other settings may move it to other CPUs."""
MEASURING_SECONDS = 2.0
"""Interval between the reads of a pod that measures its capacity, or is about to."""
LIVE_SECONDS = 10.0
"""Of a pod that compares live answers."""
logger = logging.getLogger(__name__)
Found = TypeVar("Found")


def pod_session(timeout: aiohttp.ClientTimeout, *, limit: int) -> aiohttp.ClientSession:
    """A session for at most `limit` connections to pods (0: unlimited), which keeps no cookies and decompresses
    nothing: the size of a body is what arrives."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=limit, keepalive_timeout=60.0),
        timeout=timeout,
        cookie_jar=aiohttp.DummyCookieJar(),
        auto_decompress=False,
        trust_env=False,
    )


class _PodReader(ABC):
    """Reads the pods in its queue over HTTP, each again after an interval or after a failure."""

    def __init__(
        self, cache: ClusterCache, *, timeout_seconds: float, concurrency: int, port: int = INTERNAL_PORT
    ) -> None:
        self._cache = cache
        self._timeout = aiohttp.ClientTimeout(total=timeout_seconds)
        self._concurrency = concurrency
        self._port = port
        self._queue: WorkQueue[ObjectKey] = WorkQueue(backoff=BACKOFF)
        cache.pods.listen(self._on_pod)

    async def run(self) -> None:
        """Until cancelled."""
        async with pod_session(self._timeout, limit=self._concurrency) as session, asyncio.TaskGroup() as group:
            for _ in range(self._concurrency):
                group.create_task(self._work(session))

    async def _work(self, session: aiohttp.ClientSession) -> None:
        while True:
            key = await self._queue.get()
            failed, again_seconds = True, None
            try:
                failed, again_seconds = await self._read(session, key)
            finally:
                self._queue.done(key, failed=failed, again_seconds=again_seconds)

    @abstractmethod
    def _on_pod(self, difference: StoreChange[PodFacts]) -> None:
        """A pod was added, changed or removed: queue or forget it."""

    @abstractmethod
    async def _read(self, session: aiohttp.ClientSession, key: ObjectKey) -> tuple[bool, float | None]:
        """Read a pod, and store its report. Returns whether to try again after a back-off, and otherwise after how
        many seconds (None: only when it is queued again)."""


class PodInfoReader(_PodReader):
    """Keeps the reports of the cache up to date: reads `/info` of each runtime pod once, and again after changes
    and while it measures its capacity."""

    def __init__(
        self, cache: ClusterCache, *, timeout_seconds: float, concurrency: int, port: int = INTERNAL_PORT
    ) -> None:
        self._asked: dict[str, tuple[int, bool]] = {}
        """Restarts and readiness of the pod at its last read, by uid."""
        super().__init__(cache, timeout_seconds=timeout_seconds, concurrency=concurrency, port=port)

    def _on_pod(self, difference: StoreChange[PodFacts]) -> None:
        if difference.new is None:
            if difference.old is not None:
                self._cache.reports.pop(difference.old.uid, None)
                self._asked.pop(difference.old.uid, None)
            self._queue.forget(difference.key)
            return
        pod = difference.new.facts
        if not _serves(difference.new.index) or not _runs(pod):
            return
        if self._asked.get(pod.uid) != (pod.container.restarts, pod.ready):
            self._queue.add(difference.key)

    async def _read(self, session: aiohttp.ClientSession, key: ObjectKey) -> tuple[bool, float | None]:
        pod = self._cache.pods.facts(key)
        if pod is None or not _runs(pod):
            return False, None
        if not self._cache.is_runtime_pod(key):
            # Another program's pod with the operator's labels; or its ReplicaSet is not in the cache yet.
            return True, None
        self._asked[pod.uid] = (pod.container.restarts, pod.ready)
        report, problem = await self._ask(session, pod)
        PROBES.labels("ok" if report is not None else "failed").inc()
        if self._cache.pods.facts(key) is not None:
            self._cache.put_report(key, pod.uid, (report, problem))
        measuring = report is not None and report.measures_capacity
        if measuring and capacity_is_known(self._cache, key):
            await self._tell_capacity_known(session, pod)
        compares = report is not None and report.live is not None
        return report is None, MEASURING_SECONDS if measuring else LIVE_SECONDS if compares else AGAIN_SECONDS

    async def _tell_capacity_known(self, session: aiohttp.ClientSession, pod: PodFacts) -> None:
        """Another pod has measured the artefact: this one need not wait for its own measurement. It is sent again with
        the next read if this fails."""
        with contextlib.suppress(TimeoutError, aiohttp.ClientError):
            async with session.post(f"{_address(pod, self._port)}/capacity/known", allow_redirects=False):
                pass

    async def _ask(self, session: aiohttp.ClientSession, pod: PodFacts) -> tuple[HostReport | None, str]:
        answer, problem = await _read_from_pod(
            session, pod, self._port, "/info", HostReport.from_info, max_bytes=INFO_MAX_BYTES
        )
        if answer is None:
            return None, problem or "it has not inspected its host yet"
        return answer, ""


async def _read_from_pod(
    session: aiohttp.ClientSession,
    pod: PodFacts,
    port: int,
    path: str,
    parse: Callable[[Any], Found],
    *,
    max_bytes: int,
) -> tuple[Found | None, str]:
    """What `parse` makes of the JSON that the pod answers, or None and why it could not be read."""
    url = f"{_address(pod, port)}{path}"
    try:
        async with session.get(url, allow_redirects=False) as response:
            if response.status != 200:
                return None, f"{url} answers {response.status}"
            body = await read_body(response.content.iter_any(), max_bytes=max_bytes)
        return parse(read_json(body, max_bytes=max_bytes)), ""
    except TimeoutError:
        return None, f"{url} does not answer within {session.timeout.total:g} s"
    except aiohttp.ClientError as error:
        return None, unprintable_as_spaces(f"{url} cannot be reached: {error}")
    except Unreadable as error:
        return None, f"{url} has a form that this version of the operator does not understand: {error}"
    except Exception as error:
        # The parsed data comes from the pod: a defect must not keep the other pods from being read.
        logger.exception(
            "the read of %s failed: this is a defect of the operator",
            url,
            extra=log_event("PodReadDefect", object=pod.name, reason=error),
        )
        return None, f"{url} cannot be read: {type(error).__name__}"


def _address(pod: PodFacts, port: int) -> str:
    return f"http://{f'[{pod.ip}]' if ':' in pod.ip else pod.ip}:{port}"


def _serves(indexes: tuple[Index, ...]) -> bool:
    return any(index[0] == "endpoint" for index in indexes)


def _runs(pod: PodFacts) -> bool:
    return bool(pod.ip) and pod.phase == "Running" and not pod.deleting


FAILURES_BEFORE_WARNING = 5
"""A job that starts does not listen yet."""


class JobProgressReader(_PodReader):
    """Keeps the job reports of the cache up to date: reads `/progress` of each running job's pod at an interval."""

    def __init__(
        self,
        cache: ClusterCache,
        *,
        interval_seconds: float,
        timeout_seconds: float,
        concurrency: int,
        port: int = INTERNAL_PORT,
    ) -> None:
        self._interval_seconds = interval_seconds
        self._failures: Counter[str] = Counter()
        """Failed reads since the last one that succeeded, by the uid of the pod."""
        super().__init__(cache, timeout_seconds=timeout_seconds, concurrency=concurrency, port=port)

    async def run(self) -> None:
        """Until cancelled; reads nothing with an interval of 0."""
        if not self._interval_seconds:
            await asyncio.Event().wait()
        await super().run()

    def _on_pod(self, difference: StoreChange[PodFacts]) -> None:
        if difference.new is None:
            if difference.old is not None:
                self._cache.job_reports.pop(difference.old.uid, None)
                self._failures.pop(difference.old.uid, None)
            self._queue.forget(difference.key)
        elif difference.new.facts.attempt and _runs(difference.new.facts):
            self._queue.add(difference.key)

    async def _read(self, session: aiohttp.ClientSession, key: ObjectKey) -> tuple[bool, float | None]:
        pod = self._cache.pods.facts(key)
        if pod is None or not _runs(pod):
            return False, None
        if job_of(self._cache, key) is None:
            # Another program's pod with the operator's labels; or its Job is not in the cache yet.
            return True, None
        report, problem = await _read_from_pod(
            session, pod, self._port, "/progress", JobReport.from_json, max_bytes=PROGRESS_MAX_BYTES
        )
        if report is not None:
            self._failures.pop(pod.uid, None)
            if self._cache.pods.facts(key) is not None:
                self._cache.put_job_report(key, pod.uid, report)
            return False, self._interval_seconds
        self._failures[pod.uid] += 1
        if self._failures[pod.uid] == FAILURES_BEFORE_WARNING:
            # Progress is optional: the result comes with the termination message.
            logger.warning(
                "cannot read the progress of job pod %s: %s",
                key,
                problem,
                extra=log_event("JobProgressUnreadable", object=str(key), reason=problem),
            )
        return True, None


class TextsReader:
    """Reads the ConfigMaps that endpoints take texts from, at an interval.

    Users own these ConfigMaps, so no label selects them. A watch would need the right to list, and so to read, all
    ConfigMaps.
    """

    def __init__(self, port: ClusterPort, cache: ClusterCache, *, interval_seconds: float) -> None:
        self._port = port
        self._cache = cache
        self._interval_seconds = interval_seconds

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await asyncio.sleep(self._interval_seconds)
            named = {ObjectKey(namespace, name) for _, namespace, name in self._cache.endpoints.sizes("texts")}
            for place in set(self._cache.text_sources) - named:
                self._cache.text_sources.remove(place)
            for place in sorted(named):
                await self._read(place)

    async def _read(self, place: ObjectKey) -> None:
        try:
            value = await self._port.get(CONFIG_MAP, place.name, place.namespace)
        except ClusterError as error:
            logger.debug("cannot read the ConfigMap %s, trying again later: %s", place, error)
            return
        if value is None:
            self._cache.text_sources.remove(place)
        else:
            self._cache.text_sources.put(value)


def capacity_is_known(cache: ClusterCache, pod: ObjectKey) -> bool:
    """Whether the capacity of the artefact that this runtime pod serves was measured."""
    facts = cache.pods.facts(pod)
    entry = None if facts is None else cache.models.get(ObjectKey(pod.namespace, facts.optimized_model))
    if facts is None or entry is None:
        return False
    status = entry.facts.value.get("status") or {}
    capacity = (status.get("result") or {}).get("capacity") or {}
    return digests(status)[0] == facts.artefact and bool(capacity.get("points")) and not capacity.get("provisional")


def job_of(cache: ClusterCache, place: ObjectKey) -> JobFacts | None:
    """The Job that created a pod, if the operator created that for an OptimizedModel; by uid."""
    pod = cache.pods.facts(place)
    job = cache.jobs.get(ObjectKey(place.namespace, pod.owner.name)) if pod is not None else None
    if pod is None or job is None or job.uid != pod.owner.uid:
        return None
    model = cache.models.get(ObjectKey(place.namespace, job.facts.owner.name))
    return job.facts if model is not None and model.uid == job.facts.owner.uid else None
