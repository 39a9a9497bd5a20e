"""Lists Penstock's own kinds: before the first reconcile, from time to time, and soon after a gap in a watch."""

from __future__ import annotations

import asyncio
import logging

from penstock.logs import log_event
from penstock_operator.cluster.api import ClusterPort
from penstock_operator.cluster.errors import ClusterError, NotLeading
from penstock_operator.cluster.informer import list_kind
from penstock_operator.control.cache import ClusterCache
from penstock_operator.control.reconcile import jittered
from penstock_operator.metrics import MISSED

RELIST_SECONDS = 5.0
"""Delay between a gap in a watch and the list that finds the objects which were deleted in it."""

logger = logging.getLogger(__name__)


class Resync:
    """Compares the caches with lists: Kopf does not report objects that were deleted in a gap."""

    def __init__(
        self,
        port: ClusterPort,
        cache: ClusterCache,
        begun: asyncio.Event,
        *,
        namespaces: tuple[str, ...],
        seconds: float,
    ) -> None:
        """`begun`: set after the first list."""
        self._port, self._cache, self._begun = port, cache, begun
        self._namespaces = namespaces or ("",)
        self._seconds = seconds
        self._relisted = asyncio.Event()

    def relisted(self) -> None:
        """A watch had a gap and listed again: compare the caches with a new list soon."""
        self._relisted.set()

    async def run(self) -> None:
        """Until cancelled. ConfigMaps of texts are read again too."""
        await self._begun.wait()
        while True:
            try:
                async with asyncio.timeout(jittered(self._seconds)):
                    await self._relisted.wait()
                # Kopf is still listing, and a gap of one watch often is one of all.
                await asyncio.sleep(RELIST_SECONDS)
            except TimeoutError:
                self._cache.texts.clear()
            self._relisted.clear()
            try:
                missed = await self.list()
            except NotLeading:
                raise
            except ClusterError as error:
                logger.warning(
                    "the resync failed, the next resync tries again: %s",
                    error,
                    extra=log_event("ResyncFailed", reason=error),
                )
                continue
            if missed:
                MISSED.inc(missed)
                logger.warning(
                    "the resync found %d objects that differ from the watch: events were missed",
                    missed,
                    extra=log_event("EventsMissed"),
                )

    async def list(self) -> int:
        """List into the caches. Returns how many objects differed."""
        # Endpoints last: their plans need the other kinds.
        differences = 0
        for store in (self._cache.classes, self._cache.models, self._cache.endpoints):
            for namespace in self._namespaces if store.kind.namespaced else ("",):
                _, found = await list_kind(self._port, store, namespace)
                differences += found
        return differences
