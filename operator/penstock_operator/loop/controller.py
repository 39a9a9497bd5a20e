"""What happens when something happens: from a change in a store to the endpoints that it concerns, and the workers that
reconcile them."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterable
from typing import Any

from penstock.errors import PenstockError
from penstock_operator.cluster.errors import ClusterError, Conflict, NotLeading
from penstock_operator.cluster.kinds import MODEL_ENDPOINT, Json
from penstock_operator.cluster.port import ClusterPort
from penstock_operator.cluster.store import Difference, Index, Key, Packed, key_of, version_of
from penstock_operator.health import Progress
from penstock_operator.logs import ENDPOINT
from penstock_operator.loop.queue import Lane, WorkQueue
from penstock_operator.loop.reconcile import Reconciler, Subject, jittered
from penstock_operator.loop.time_slices import Slices
from penstock_operator.metrics import MISSED, RECONCILE_ERRORS, RECONCILE_SECONDS
from penstock_operator.watch.cluster_cache import World

MANY = 32
"""A change that concerns more endpoints than this is not urgent: others' changes go first."""
LAG_SECONDS = 30.0
GONE_SECONDS = 15.0
"""A ScaledObject that somebody took away is made again after this, unless KEDA's definitions went with it: the API
server looks every 5 s whether all objects of a definition are gone."""

logger = logging.getLogger(__name__)


class Controller:
    """Feeds the queue and works on it."""

    def __init__(
        self,
        port: ClusterPort,
        world: World,
        *,
        identity: str,
        namespaces: tuple[str, ...] = (),
        resync_seconds: float = 900.0,
    ) -> None:
        self._port = port
        self._world = world
        self._namespaces = namespaces or ("",)
        self._resync_seconds = resync_seconds
        self._reconciler = Reconciler(port, world, identity=identity)
        self._begun = False
        self._slices = Slices()
        self.queue: WorkQueue[Subject] = WorkQueue()
        self.progress = Progress(lambda: self.queue.oldest_seconds)
        world.endpoints.listen(self._on_endpoint)
        world.models.listen(self._on_model)
        world.classes.listen(lambda change: self._add_all(("class", change.key.name)))
        world.nodes.listen(lambda _: self._add_all(("unready",)))
        world.text_sources.listen(self._on_texts)
        for store in world.made:
            store.listen(self._on_scaled_object if store is world.scaled_objects else self._on_made)
        world.scaled_objects.listen_served(lambda: self._add_all(("keda",)))
        world.listen_said(self._on_indexes)

    async def begin(self) -> None:
        """Learn of all endpoints, once the caches of everything else are filled. They are looked at in the routine
        lane: what happens from now on goes first."""
        await self._list()
        for key in self._world.models:
            if not self._world.users(*key):
                self.queue.add(Subject("OptimizedModel", key), Lane.ROUTINE)
        self._begun = True
        logger.info("looking after %d ModelEndpoints", len(self._world.endpoints))

    def heard(self, kind: str | None, value: Json) -> None:
        """An event of a ModelEndpoint, as Kopf tells it: None is the initial listing."""
        if kind == "DELETED":
            self._world.endpoints.remove(key_of(value), version=version_of(value))
        else:
            self._world.endpoints.put(value)

    async def work(self, workers: int) -> None:
        """Reconcile until cancelled."""
        async with asyncio.TaskGroup() as group:
            for _ in range(workers):
                group.create_task(self._work())

    async def resync(self) -> None:
        """Now and then list the endpoints, in case an event was lost: Kopf lists again after a gap in its watch, and
        what was deleted in the gap is in no list. ConfigMaps of texts are read again as well, in case their watch
        missed something."""
        while True:
            await asyncio.sleep(jittered(self._resync_seconds))
            self._world.texts.clear()
            try:
                missed = await self._list()
            except NotLeading:
                raise
            except ClusterError as error:
                logger.warning("%s; trying again with the next resync", error)
                continue
            if missed:
                MISSED.inc(missed)
                logger.warning("%d ModelEndpoints were other than their events had said", missed)

    async def _list(self) -> int:
        """How many were not as they were known."""
        differences = 0
        for namespace in self._namespaces:
            seen: set[Key] = set()
            version = 0
            async for page in self._port.pages(MODEL_ENDPOINT, namespace):
                version = int(page.resource_version or 0)
                for value in page.items:
                    value.setdefault("apiVersion", MODEL_ENDPOINT.api_version)
                    value.setdefault("kind", MODEL_ENDPOINT.name)
                    differences += self._world.endpoints.put(value)
                    seen.add(key_of(value))
            differences += self._world.endpoints.retain(seen, version=version, namespace=namespace)
        return differences

    async def _work(self) -> None:
        while True:
            # A reconcile that finds nothing to write waits for nothing: of thousands that are due at the same time,
            # one worker would do all in a single turn of the loop, and nobody else would get to anything meanwhile.
            await self._slices.give_way()
            subject = await self.queue.get()
            token = ENDPOINT.set(str(subject.key))
            begin = time.monotonic()
            outcome = "ok"
            again: float | None = None
            try:
                again = await self._reconciler.reconcile(subject)
                logger.debug("%s is reconciled", subject)
            except Conflict as error:
                # Read again, decide again: usually the event of the other write is already here.
                outcome = "conflict"
                logger.debug("%s", error)
            except NotLeading:
                raise
            except PenstockError as error:
                outcome = "failed"
                RECONCILE_ERRORS.labels(type(error).__name__).inc()
                logger.warning("%s; trying again", error)
            except Exception as error:
                # One endpoint that we have a mistake for must not end the work on all others.
                outcome = "failed"
                RECONCILE_ERRORS.labels(type(error).__name__).inc()
                logger.exception("%s: this is a defect of the operator; trying again", subject)
            finally:
                ENDPOINT.reset(token)
            RECONCILE_SECONDS.labels(outcome).observe(time.monotonic() - begin)
            self.progress.moved()
            gone = subject.kind == "ModelEndpoint" and self._world.endpoints.get(subject.key) is None
            if again is None and not gone and subject.kind == "ModelEndpoint":
                again = jittered(self._resync_seconds)
            self.queue.done(subject, failed=outcome != "ok" and not gone, again_seconds=again)

    def _on_endpoint(self, change: Difference[Packed]) -> None:
        subject = Subject("ModelEndpoint", change.key)
        if change.new is None:
            self.queue.forget(subject)
        else:
            self.queue.add(subject, self._lane)
        before = set(change.old.index) if change.old is not None else set()
        now = set(change.new.index) if change.new is not None else set()
        for index in before - now:
            if index[0] == "model":
                self._on_unused(index)

    def _on_model(self, change: Difference[Packed]) -> None:
        index = ("model", *change.key)
        same_stage = change.old is not None and change.new is not None and change.old.index == change.new.index
        users = self._world.users(*change.key)
        if same_stage and len(users) > MANY:
            # `Optimizing 8/23` in thousands of statuses may lag a little.
            for key in users:
                self.queue.add_after(Subject("ModelEndpoint", key), jittered(LAG_SECONDS))
        else:
            self._add_all(index)
        self._on_unused(index)

    def _on_unused(self, index: Index) -> None:
        _, namespace, name = index
        if not self._world.users(namespace, name) and self._begun:
            self.queue.add(Subject("OptimizedModel", Key(namespace, name)), Lane.ROUTINE)

    def _on_texts(self, change: Difference[None]) -> None:
        read = self._world.texts.get(change.key)
        now = change.new.version if change.new is not None else 0
        if read is None or read.version == now:
            # Nobody has read them yet, or this is what was read.
            return
        del self._world.texts[change.key]
        self._add_all(("texts", *change.key))

    def _on_made(self, change: Difference[Any]) -> None:
        self._on_indexes(change.indexes)

    def _on_scaled_object(self, change: Difference[Any]) -> None:
        # The API server takes away a definition only when it has seen none of its objects: whoever removes KEDA must
        # not find one that was made anew meanwhile.
        self._on_indexes(change.indexes, after_seconds=GONE_SECONDS if change.new is None else 0.0)

    def _on_indexes(self, indexes: Iterable[Index], *, after_seconds: float = 0.0) -> None:
        for index in indexes:
            what, *rest = index
            if what == "endpoint":
                subject = Subject("ModelEndpoint", Key(*rest))
                if self._world.endpoints.get(subject.key) is None:
                    continue
                if after_seconds:
                    self.queue.add_after(subject, after_seconds)
                else:
                    self.queue.add(subject, self._lane)
            elif what == "model":
                # One of the users suffices: it writes the OptimizedModel's status, and that tells the others.
                users = self._world.users(*rest)
                if users:
                    self.queue.add(Subject("ModelEndpoint", users[0]), self._lane)

    def _add_all(self, index: Index) -> None:
        found = self._world.endpoints.of(index)
        lane = self._lane if len(found) <= MANY else Lane.ROUTINE
        for key, _ in found:
            self.queue.add(Subject("ModelEndpoint", key), lane)

    @property
    def _lane(self) -> Lane:
        return Lane.URGENT if self._begun else Lane.ROUTINE
