"""Reads how far running jobs are, from the tail of their logs: jobs have no API token to say it themselves."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace

from penstock_operator.cluster.errors import ClusterError
from penstock_operator.cluster.port import ClusterPort
from penstock_operator.cluster.store import Difference, Key
from penstock_operator.loop.queue import WorkQueue
from penstock_operator.plan.observed import JobLog, PodFacts
from penstock_operator.watch.cluster_cache import World

LINES = 40
"""The baseline is said once, and early: what was read of it is kept when it has scrolled out of the tail."""
MAX_BYTES = 65_536
CONCURRENCY = 4

logger = logging.getLogger(__name__)


class JobLogs:
    """Keeps `world.logs` as the running jobs' pods say. No job runs: no call is made."""

    def __init__(self, port: ClusterPort, world: World, *, interval_seconds: float) -> None:
        self._port = port
        self._world = world
        self._interval_seconds = interval_seconds
        self._queue: WorkQueue[Key] = WorkQueue()
        world.pods.listen(self._on_pod)

    async def run(self) -> None:
        """Until cancelled."""
        async with asyncio.TaskGroup() as group:
            for _ in range(CONCURRENCY):
                group.create_task(self._work())

    def _on_pod(self, difference: Difference[PodFacts]) -> None:
        if difference.new is None:
            if difference.old is not None:
                self._world.logs.forget(difference.old.uid)
            self._queue.forget(difference.key)
        elif difference.new.facts.attempt and difference.new.facts.phase == "Running":
            self._queue.add(difference.key)

    async def _work(self) -> None:
        while True:
            key = await self._queue.get()
            pod = self._world.pods.facts(key)
            if pod is None or pod.phase != "Running":
                self._queue.done(key)
                continue
            try:
                text = await self._port.log_tail(key.name, key.namespace, lines=LINES, max_bytes=MAX_BYTES)
            except ClusterError as error:
                # Progress is a courtesy: the result comes by the termination message.
                logger.warning("%s", error)
                self._queue.done(key, failed=True)
                continue
            before = self._world.logs.get(pod.uid) or JobLog()
            now = JobLog.from_lines(text)
            known = now if now.baseline_digest else replace(before, progress=now.progress)
            self._world.tell_log(key, pod.uid, known if known.progress else replace(known, progress=before.progress))
            self._queue.done(key, again_seconds=self._interval_seconds)
