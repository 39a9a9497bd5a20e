"""The controller: maps changes in the caches to reconcile requests and runs the workers that reconcile them."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Any

from penstock.errors import PenstockError
from penstock.logs import OBJECT, log_event
from penstock_operator.cluster.api import ClusterPort
from penstock_operator.cluster.errors import Conflict, NotLeading
from penstock_operator.cluster.store import Index, ObjectKey, PackedObject, StoreChange
from penstock_operator.control.cache import ClusterCache
from penstock_operator.control.queue import Priority, TimeSlices, WorkProgress, WorkQueue
from penstock_operator.control.reconcile import Reconciler, ReconcileRequest, jittered
from penstock_operator.control.resync import Resync
from penstock_operator.metrics import RECONCILE_ERRORS, RECONCILE_SECONDS

MANY = 32
"""Changes that concern more endpoints than this have routine priority: changes of single endpoints go first."""
LAG_SECONDS = 30.0
GONE_SECONDS = 15.0
"""A deleted ScaledObject is created again after this time, unless KEDA's CRDs were deleted too: the API server
checks every 5 s whether all objects of a CRD are gone."""

logger = logging.getLogger(__name__)


class Controller:
    """Fills the queue and works on it."""

    def __init__(
        self,
        port: ClusterPort,
        cache: ClusterCache,
        *,
        identity: str,
        namespaces: tuple[str, ...] = (),
        resync_seconds: float = 900.0,
    ) -> None:
        self._cache = cache
        self._resync_seconds = resync_seconds
        self._reconciler = Reconciler(port, cache, identity=identity)
        self.begun = asyncio.Event()
        """Set once all endpoints are listed."""
        self.resync = Resync(port, cache, self.begun, namespaces=namespaces, seconds=resync_seconds)
        self._slices = TimeSlices()
        self.queue: WorkQueue[ReconcileRequest] = WorkQueue()
        self.progress = WorkProgress(lambda: self.queue.oldest_seconds)
        cache.endpoints.listen(self._on_endpoint)
        cache.models.listen(self._on_model)
        cache.classes.listen(lambda change: self._add_all(("class", change.key.name)))
        cache.nodes.listen(lambda _: self._add_all(("unready",)))
        cache.namespaces.listen(lambda change: self._add_all(("namespace", change.key.name)))
        cache.text_sources.listen(self._on_texts)
        for store in cache.made:
            store.listen(self._on_scaled_object if store is cache.scaled_objects else self._on_made)
        cache.slots.listen(self._on_free_slot)
        cache.scaled_objects.listen_served(lambda: self._add_all(("keda",)))
        cache.http_routes.listen_served(lambda: self._add_all(("http route",)))
        cache.listen_reports(self._on_indexes)

    async def begin(self) -> None:
        """List Penstock's own kinds, after the other caches are filled. ClusterError: call it again.

        All endpoints are added with routine priority: later changes go first.
        """
        await self.resync.list()
        self._cache.endpoints_listed = True
        self._cache.slots.begin(set(self._cache.endpoints), datetime.now(UTC))
        for key in self._cache.models:
            if not self._cache.users(*key):
                self.queue.add(ReconcileRequest("OptimizedModel", key), Priority.ROUTINE)
        self.begun.set()
        logger.info("reconciling %d ModelEndpoints", len(self._cache.endpoints), extra=log_event("ControllerStarted"))

    async def work(self, workers: int) -> None:
        """Reconcile until cancelled, after `begin`."""
        await self.begun.wait()
        async with asyncio.TaskGroup() as group:
            for _ in range(workers):
                group.create_task(self._work())

    async def _work(self) -> None:
        while True:
            # A reconcile without writes never waits: without this pause one worker would process thousands of due
            # endpoints in a single iteration of the event loop, and block everything else.
            await self._slices.pause()
            request = await self.queue.get()
            token = OBJECT.set(str(request.key))
            begin = time.monotonic()
            outcome = "ok"
            again: float | None = None
            try:
                again = await self._reconciler.reconcile(request)
                logger.debug("reconciled %s", request)
            except Conflict as error:
                # Plan again: usually the event of the other write has already arrived.
                outcome = "conflict"
                logger.debug("planning again after a conflict: %s", error)
            except NotLeading:
                raise
            except PenstockError as error:
                outcome = "failed"
                RECONCILE_ERRORS.labels(type(error).__name__).inc()
                logger.warning(
                    "the reconcile failed, retrying: %s", error, extra=log_event("ReconcileFailed", reason=error)
                )
            except Exception as error:
                # A defect that one endpoint triggers must not stop all other reconciles.
                outcome = "failed"
                RECONCILE_ERRORS.labels(type(error).__name__).inc()
                logger.exception(
                    "the reconcile of %s failed, retrying: this is a defect of the operator",
                    request,
                    extra=log_event("ReconcileDefect", reason=error),
                )
            finally:
                OBJECT.reset(token)
            RECONCILE_SECONDS.labels(outcome).observe(time.monotonic() - begin)
            self.progress.moved()
            gone = request.kind == "ModelEndpoint" and self._cache.endpoints.get(request.key) is None
            if again is None and not gone and request.kind == "ModelEndpoint":
                again = jittered(self._resync_seconds)
            self.queue.done(request, failed=outcome != "ok" and not gone, again_seconds=again)

    def _on_endpoint(self, change: StoreChange[PackedObject]) -> None:
        request = ReconcileRequest("ModelEndpoint", change.key)
        if change.new is None:
            self.queue.forget(request)
        else:
            self.queue.add(request, self._priority)
        before = set(change.old.index) if change.old is not None else set()
        now = set(change.new.index) if change.new is not None else set()
        for index in before - now:
            if index[0] == "model":
                self._on_unused(index)
            elif index[0] == "host":
                # Another endpoint may wait for it.
                self._add_all(index)

    def _on_model(self, change: StoreChange[PackedObject]) -> None:
        index = ("model", *change.key)
        same_stage = change.old is not None and change.new is not None and change.old.index == change.new.index
        users = self._cache.users(*change.key)
        if same_stage and len(users) > MANY:
            # Progress (`Optimizing 8/23`) in thousands of statuses may lag a little.
            for key in users:
                self.queue.add_after(ReconcileRequest("ModelEndpoint", key), jittered(LAG_SECONDS))
        else:
            self._add_all(index)
        if not same_stage:
            for what, *rest in change.indexes:
                if what == "artefact":
                    self._add_all(("pinned", *rest))
        self._on_unused(index)

    def _on_unused(self, index: Index) -> None:
        _, namespace, name = index
        if not self._cache.users(namespace, name) and self.begun.is_set():
            self.queue.add(ReconcileRequest("OptimizedModel", ObjectKey(namespace, name)), Priority.ROUTINE)

    def _on_texts(self, change: StoreChange[None]) -> None:
        read = self._cache.texts.get(change.key)
        now = change.new.version if change.new is not None else 0
        if read is None or read.version == now:
            # They have not been read yet, or this version was read.
            return
        del self._cache.texts[change.key]
        self._add_all(("texts", *change.key))

    def _on_made(self, change: StoreChange[Any]) -> None:
        self._on_indexes(change.indexes)

    def _on_free_slot(self, waiting: set[ObjectKey]) -> None:
        for key in waiting:
            self.queue.add(ReconcileRequest("ModelEndpoint", key), self._priority)

    def _on_scaled_object(self, change: StoreChange[Any]) -> None:
        # The API server deletes a CRD only once it has no objects left: while KEDA is being removed, no new one may
        # appear.
        self._on_indexes(change.indexes, after_seconds=GONE_SECONDS if change.new is None else 0.0)

    def _on_indexes(self, indexes: Iterable[Index], *, after_seconds: float = 0.0) -> None:
        for index in indexes:
            what, *rest = index
            if what == "endpoint":
                request = ReconcileRequest("ModelEndpoint", ObjectKey(*rest))
                if self._cache.endpoints.get(request.key) is None:
                    continue
                if after_seconds:
                    self.queue.add_after(request, after_seconds)
                else:
                    self.queue.add(request, self._priority)
            elif what == "model":
                # One user suffices: it writes the OptimizedModel's status, and that change triggers the other users.
                writer = self._cache.writer(*rest)
                if writer is not None:
                    self.queue.add(ReconcileRequest("ModelEndpoint", writer), self._priority)
            elif what == "host":
                self._add_all(index)

    def _add_all(self, index: Index) -> None:
        found = self._cache.endpoints.of(index)
        priority = self._priority if len(found) <= MANY else Priority.ROUTINE
        for key, _ in found:
            self.queue.add(ReconcileRequest("ModelEndpoint", key), priority)

    @property
    def _priority(self) -> Priority:
        return Priority.URGENT if self.begun.is_set() else Priority.ROUTINE
