"""Starts jobs that remove unreferenced artefacts from the artefact store, once in each period.

The state is in the cluster: the job of a period exists or not. References to artefacts come from the caches, by
namespace: every digest in the spec or status of a ModelEndpoint or an OptimizedModel, and what Deployments, ReplicaSets
and pods serve. While nothing is referenced, nothing is deleted.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping

from penstock.errors import PenstockError
from penstock.logs import log_event
from penstock_operator.cluster.api import ClusterPort
from penstock_operator.cluster.errors import ClusterError, Conflict, NotLeading
from penstock_operator.cluster.store import ObjectKey, StoreChange
from penstock_operator.control.cache import ClusterCache
from penstock_operator.endpoint.optimization.collection import (
    CollectionHome,
    CollectionTarget,
    by_namespace,
    is_collection,
    job,
    keep_arguments,
    name_of,
    policy,
    targets,
)
from penstock_operator.endpoint.spec import ParsedEndpoint, refusal
from penstock_operator.facts.pods import JobFacts
from penstock_operator.metrics import COLLECTIONS

AT_ONCE = 4
"""Maximum number of jobs at the same time: there may be a thousand nodes, and no hurry."""
SETTLING_SECONDS = 900.0
"""A new leader starts no job before this time: its caches must be complete."""
BETWEEN_SECONDS = 15.0
"""Interval between checks whether another job may start."""
REFUSED_SECONDS = 900.0

logger = logging.getLogger(__name__)
_DIGEST = re.compile(rb"sha256:[0-9a-f]{64}")


class StoreCollection:
    """Run it while leading. `caches_current`: whether the caches are current; no job starts while they are not."""

    def __init__(
        self,
        port: ClusterPort,
        cache: ClusterCache,
        *,
        caches_current: Callable[[], bool],
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._port = port
        self._cache = cache
        self._caches_current = caches_current
        self._clock = clock
        self._refused: set[ObjectKey] = set()
        """Jobs that could not be created because another object has their name."""
        cache.jobs.listen(self._on_job)

    async def run(self) -> None:
        """Until cancelled; sleeps forever when collection is disabled."""
        every = self._cache.settings.store_collect_seconds
        if not every:
            await asyncio.Event().wait()
        await asyncio.sleep(min(SETTLING_SECONDS, every))
        while True:
            try:
                more = await self.collect()
            except NotLeading:
                raise
            except ClusterError as error:
                logger.warning(
                    "cannot start a job that collects garbage in the artefact store, retrying: %s",
                    error,
                    extra=log_event("CollectionNotStarted", reason=error),
                )
                await asyncio.sleep(REFUSED_SECONDS)
                continue
            await asyncio.sleep(BETWEEN_SECONDS if more else every - self._clock() % every)

    async def collect(self) -> bool:
        """Start jobs up to the limit. True while jobs of this period remain to be started. ClusterError."""
        settings = self._cache.settings
        period = int(self._clock() // settings.store_collect_seconds)
        nodes = [entry.facts for name in self._cache.nodes if (entry := self._cache.nodes.get(name)) is not None]
        wanted = targets(self._homes(), nodes, settings)
        self._refused &= {_key(target, period) for target in wanted}
        due = [target for target in wanted if self._cache.jobs.get(_key(target, period)) is None]
        due = [target for target in due if _key(target, period) not in self._refused]
        if not self._caches_current():
            return bool(due)
        # Only jobs of these names: a user could create similar ones.
        room = AT_ONCE - sum(1 for target in wanted if self._runs(_key(target, period)))
        if not due:
            return False
        references = referred(self._cache)
        keep = () if by_namespace(settings) else self._keep(references)
        for target in due:
            if room <= 0:
                return True
            if by_namespace(settings):
                keep = self._keep({"": references.get(target.home.namespace, set())})
            if keep and await self._start(target, period, keep):
                room -= 1
        return False

    def _keep(self, references: Mapping[str, Iterable[str]]) -> tuple[str, ...]:
        """The arguments that name the artefacts a job must keep; empty: no job may run."""
        try:
            return keep_arguments(references)
        except ValueError as error:
            logger.warning(
                "cannot start a job that collects garbage in the artefact store: %s",
                error,
                extra=log_event("CollectionNotStarted", reason=error),
            )
            return ()

    async def _start(self, target: CollectionTarget, period: int, keep: tuple[str, ...]) -> bool:
        """Start a job, after its NetworkPolicy exists; False if another object has its name. ClusterError."""
        key = _key(target, period)
        await self._port.apply(policy(key.namespace, self._cache.settings))
        try:
            # Not applied: a job that the operator did not create must neither be used nor changed.
            made = await self._port.create(job(target, period, self._cache.settings, keep))
        except Conflict as error:
            self._refused.add(key)
            logger.warning(
                "cannot start a job that collects garbage in the artefact store: another object has its name, %s",
                key,
                extra=log_event("CollectionNotStarted", object=str(key), reason=error),
            )
            return False
        self._cache.jobs.put(made)
        COLLECTIONS.labels("begun").inc()
        logger.info(
            "started garbage collection of the artefact store: job %s%s",
            key,
            f" on node {target.node}" if target.node else "",
            extra=log_event("CollectionStarted", object=str(key)),
        )
        return True

    def _homes(self) -> list[CollectionHome]:
        """The first readable endpoint of each namespace with an allowed spec."""
        homes: dict[str, CollectionHome] = {}
        for key in sorted(self._cache.endpoints):
            entry = self._cache.endpoints.get(key) if key.namespace not in homes else None
            if entry is None or "deletionTimestamp" in entry.facts.value["metadata"]:
                continue
            try:
                spec = ParsedEndpoint.from_object(entry.facts.value).spec
            except PenstockError:
                continue
            # One that is not accepted has no artefact, and no job runs for it.
            if refusal(spec, self._cache.settings.allowed, self._cache.namespace_labels(key.namespace)) is None:
                homes[key.namespace] = CollectionHome(key.namespace, spec.pod)
        return list(homes.values())

    def _runs(self, key: ObjectKey) -> bool:
        facts = self._cache.jobs.facts(key)
        return facts is not None and facts.ended is None

    def _on_job(self, change: StoreChange[JobFacts]) -> None:
        if change.new is None or not is_collection(change.key.name):
            return
        settings = self._cache.settings
        if change.key.namespace != settings.operator_namespace and not by_namespace(settings):
            return
        ended = change.old is not None and change.old.facts.ended is not None
        if change.new.facts.failed and not ended:
            COLLECTIONS.labels("failed").inc()
            logger.warning(
                "garbage collection of the artefact store failed (%s): see kubectl logs -n %s job/%s; the next attempt "
                "is in the next period",
                change.new.facts.failed_message or change.new.facts.failed,
                *change.key,
                extra=log_event("CollectionFailed", object=str(change.key), reason=change.new.facts.failed),
            )
        elif change.new.facts.complete and not ended:
            COLLECTIONS.labels("complete").inc()


def referred(cache: ClusterCache) -> dict[str, set[str]]:
    """The digests that the objects of each namespace refer to. Some are not artefacts, which does no harm."""
    found: defaultdict[str, set[str]] = defaultdict(set)
    for packed in (cache.endpoints, cache.models):
        for key in packed:
            entry = packed.get(key)
            if entry is not None:
                found[key.namespace].update(digest.decode() for digest in _DIGEST.findall(entry.facts.text))
    for serving in (cache.deployments, cache.replica_sets, cache.pods):
        for key in serving:
            facts = serving.facts(key)
            if facts is not None and facts.artefact:
                found[key.namespace].add(facts.artefact)
    return dict(found)


def _key(target: CollectionTarget, period: int) -> ObjectKey:
    return ObjectKey(target.home.namespace, name_of(target, period))
