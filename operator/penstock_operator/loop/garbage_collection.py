"""Has the artefact store cleared of what nothing refers to any more, once in a period.

State is in the cluster: a job of this period's name has been made, or not. What is referred to is read from the caches,
in all namespaces that are looked after: every digest that a ModelEndpoint or an OptimizedModel names anywhere, in its
spec or status, and what Deployments, ReplicaSets and pods serve.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Callable

from penstock.errors import PenstockError
from penstock_operator.cluster.errors import ClusterError, NotLeading
from penstock_operator.cluster.port import ClusterPort
from penstock_operator.cluster.store import Difference, Key
from penstock_operator.metrics import COLLECTIONS
from penstock_operator.plan.collection import Home, Target, is_collection, job, keep_list, name_of, targets
from penstock_operator.plan.endpoint import Endpoint
from penstock_operator.plan.observed import JobFacts
from penstock_operator.watch.cluster_cache import World

AT_ONCE = 4
"""Collections that run at the same time: there may be a thousand nodes, and no hurry."""
SETTLING_SECONDS = 900.0
"""An operator that has just begun to lead leaves the store alone: let it have seen everything."""
BETWEEN_SECONDS = 15.0
"""Looks at whether there is room for another one."""
REFUSED_SECONDS = 900.0

logger = logging.getLogger(__name__)
_DIGEST = re.compile(rb"sha256:[0-9a-f]{64}")


class Collector:
    """`run` it while leading. `well`: whether the caches are current; while they are not, nothing is begun."""

    def __init__(
        self, port: ClusterPort, world: World, *, well: Callable[[], bool], clock: Callable[[], float] = time.time
    ) -> None:
        self._port = port
        self._world = world
        self._well = well
        self._clock = clock
        world.jobs.listen(self._on_job)

    async def run(self) -> None:
        """Until cancelled; at once asleep for ever where nothing is to be collected."""
        every = self._world.settings.store_collect_seconds
        if not every:
            await asyncio.Event().wait()
        await asyncio.sleep(min(SETTLING_SECONDS, every))
        while True:
            try:
                more = await self.collect()
            except NotLeading:
                raise
            except ClusterError as error:
                logger.warning("collecting garbage in the artefact store: %s; trying again", error)
                await asyncio.sleep(REFUSED_SECONDS)
                continue
            await asyncio.sleep(BETWEEN_SECONDS if more else every - self._clock() % every)

    async def collect(self) -> bool:
        """Begin what there is room for; True while some of this period has not been begun. ClusterError."""
        settings = self._world.settings
        period = int(self._clock() // settings.store_collect_seconds)
        nodes = [entry.facts for name in self._world.nodes if (entry := self._world.nodes.get(name)) is not None]
        wanted = targets(self._homes(), nodes, settings)
        due = [target for target in wanted if self._world.jobs.get(_key(target, period)) is None]
        if not self._well():
            return bool(due)
        room = AT_ONCE - sum(1 for key in self._world.jobs if is_collection(key.name) and self._runs(key))
        for target in due[: max(0, room)]:
            made = await self._port.apply(job(target, period, settings))
            self._world.jobs.put(made)
            # After the job: the later it is made, the less it lacks. Its pod waits for it.
            await self._port.apply(keep_list(made, referred(self._world)))
            COLLECTIONS.labels("begun").inc()
            logger.info(
                "collecting garbage in the artefact store: job %s/%s%s",
                target.home.namespace,
                made["metadata"]["name"],
                f" on node {target.node}" if target.node else "",
            )
        return len(due) > room

    def _homes(self) -> list[Home]:
        """The first endpoint of each namespace that can be understood."""
        homes: dict[str, Home] = {}
        for key in sorted(self._world.endpoints):
            entry = self._world.endpoints.get(key) if key.namespace not in homes else None
            if entry is None or "deletionTimestamp" in entry.facts.value["metadata"]:
                continue
            try:
                homes[key.namespace] = Home(key.namespace, Endpoint.from_object(entry.facts.value).spec.pod)
            except PenstockError:
                continue
        return list(homes.values())

    def _runs(self, key: Key) -> bool:
        facts = self._world.jobs.facts(key)
        return facts is not None and facts.ended is None

    def _on_job(self, change: Difference[JobFacts]) -> None:
        if change.new is None or not is_collection(change.key.name):
            return
        ended = change.old is not None and change.old.facts.ended is not None
        if change.new.facts.failed and not ended:
            COLLECTIONS.labels("failed").inc()
            logger.warning(
                "collecting garbage in the artefact store failed (%s): kubectl logs -n %s job/%s says why; tried again "
                "in the next period",
                change.new.facts.failed_message or change.new.facts.failed,
                *change.key,
            )
        elif change.new.facts.complete and not ended:
            COLLECTIONS.labels("complete").inc()


def referred(world: World) -> frozenset[str]:
    """All digests that anything known refers to. Some are of other things than artefacts, which does no harm."""
    found: set[str] = set()
    for packed in (world.endpoints, world.models):
        for key in packed:
            entry = packed.get(key)
            if entry is not None:
                found.update(digest.decode() for digest in _DIGEST.findall(entry.facts.text))
    for serving in (world.deployments, world.replica_sets, world.pods):
        for key in serving:
            facts = serving.facts(key)
            if facts is not None and facts.artefact:
                found.add(facts.artefact)
    return frozenset(found)


def _key(target: Target, period: int) -> Key:
    return Key(target.home.namespace, name_of(target, period))
