"""Asks serving pods where they run, once each: `GET http://<pod IP>:8080/info`.

What the API knows of a pod is what was asked for; only the pod knows what it got.
"""

from __future__ import annotations

import asyncio
import json
import logging

import aiohttp

from penstock_operator.cluster.backoff import Backoff
from penstock_operator.cluster.store import Difference, Index, Key
from penstock_operator.loop.queue import WorkQueue
from penstock_operator.metrics import PROBES
from penstock_operator.plan.names import HTTP_PORT
from penstock_operator.plan.observed import HostReport, PodFacts
from penstock_operator.watch.cluster_cache import World

MAX_BYTES = 262_144
BACKOFF = Backoff(first_seconds=0.5, limit_seconds=10.0)
"""A pod that warms up does not listen yet: that takes seconds, sometimes a minute."""
AGAIN_SECONDS = 600.0
"""A pod is asked again after this: a kubelet that is restarted with other settings may take its cores away."""

logger = logging.getLogger(__name__)


class Probes:
    """Keeps `world.reports` as the pods say. `changed` is called with the pod's place when one says something new."""

    def __init__(self, world: World, *, timeout_seconds: float, concurrency: int, port: int = HTTP_PORT) -> None:
        self._world = world
        self._timeout = aiohttp.ClientTimeout(total=timeout_seconds)
        self._concurrency = concurrency
        self._port = port
        self._queue: WorkQueue[Key] = WorkQueue(backoff=BACKOFF)
        self._asked: dict[str, tuple[int, bool]] = {}
        """Restarts and readiness of the pod, by uid, when it was last asked."""
        world.pods.listen(self._on_pod)

    async def run(self) -> None:
        """Until cancelled."""
        async with (
            aiohttp.ClientSession(timeout=self._timeout, trust_env=False) as session,
            asyncio.TaskGroup() as group,
        ):
            for _ in range(self._concurrency):
                group.create_task(self._work(session))

    def _on_pod(self, difference: Difference[PodFacts]) -> None:
        if difference.new is None:
            if difference.old is not None:
                self._world.reports.forget(difference.old.uid)
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
            pod = self._world.pods.facts(key)
            if pod is None or not _runs(pod):
                self._queue.done(key)
                continue
            self._asked[pod.uid] = (pod.container.restarts, pod.ready)
            report, problem = await self._ask(session, pod)
            PROBES.labels("ok" if report is not None else "failed").inc()
            if self._world.pods.facts(key) is not None:
                self._world.tell_report(key, pod.uid, (report, problem))
            self._queue.done(key, failed=report is None, again_seconds=AGAIN_SECONDS)

    async def _ask(self, session: aiohttp.ClientSession, pod: PodFacts) -> tuple[HostReport | None, str]:
        host = f"[{pod.ip}]" if ":" in pod.ip else pod.ip
        url = f"http://{host}:{self._port}/info"
        try:
            async with session.get(url, allow_redirects=False) as response:
                if response.status != 200:
                    return None, f"{url} answers {response.status}"
                # A body that is longer is cut, and so is no JSON.
                body = bytearray()
                async for chunk in response.content.iter_any():
                    body += chunk
                    if len(body) > MAX_BYTES:
                        break
                report = HostReport.from_info(json.loads(body[:MAX_BYTES]))
        except TimeoutError:
            return None, f"{url} does not answer within {self._timeout.total:g} s"
        except aiohttp.ClientError as error:
            return None, f"{url} cannot be reached: {error}"
        except (ValueError, TypeError, AttributeError) as error:
            return None, f"{url} says nothing that this version of the operator understands: {error}"
        return report, "" if report is not None else "it has not looked at its host yet"


def _serves(indexes: tuple[Index, ...]) -> bool:
    return any(index[0] == "endpoint" for index in indexes)


def _runs(pod: PodFacts) -> bool:
    return bool(pod.ip) and pod.phase == "Running" and not pod.deleting
