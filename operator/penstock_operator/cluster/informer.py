"""Keeps a store as the cluster is: lists a kind once, then watches it, and lists again when the watch has a gap."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Generic, TypeVar

from penstock_operator.cluster.backoff import Backoff
from penstock_operator.cluster.errors import ClusterError, Expired, Forbidden, NotFound
from penstock_operator.cluster.port import ClusterPort
from penstock_operator.cluster.store import Key, Store, key_of, version_of
from penstock_operator.metrics import WATCH_RESTARTS

BACKOFF = Backoff(first_seconds=0.2, limit_seconds=20.0)

Facts = TypeVar("Facts")
logger = logging.getLogger(__name__)


class Informer(Generic[Facts]):
    """One kind, in one namespace or in all."""

    def __init__(
        self,
        port: ClusterPort,
        store: Store[Facts],
        *,
        namespace: str = "",
        labels: str = "",
        optional: bool = False,
    ) -> None:
        """`optional`: the API server need not know the kind. Then there is nothing of it, the store says so, and it is
        looked for again until it is there."""
        self.store = store
        self._optional = optional
        self.namespace = namespace
        self._port = port
        self._labels = labels
        self._heard = time.monotonic()
        self._version = 0
        self.synced = asyncio.Event()
        """Set once the first list is complete."""

    @property
    def name(self) -> str:
        """For messages and metrics."""
        return f"{self.store.kind}{'@' if self.namespace else ''}{self.namespace}"

    @property
    def silence_seconds(self) -> float:
        """Since the API server last said anything: an event, a bookmark, a list."""
        return time.monotonic() - self._heard

    async def run(self) -> None:
        """Until cancelled."""
        failures = 0
        while True:
            begin = time.monotonic()
            try:
                if not self._version:
                    self._version = await self._list()
                    self.store.tell_served(True)
                    self.synced.set()
                await self._watch()
                # A stream that ends as soon as it has begun is a failure too, and not to be repeated at full speed.
                failures = failures + 1 if time.monotonic() - begin < 1.0 else 0
            except Expired as error:
                logger.info("%s: listing again: %s", self.name, error)
                WATCH_RESTARTS.labels(self.store.kind.name, "expired").inc()
                self._version = 0
                failures += 1
            except NotFound as error:
                failures += 1
                self._missing(error)
            except ClusterError as error:
                failures += 1
                WATCH_RESTARTS.labels(self.store.kind.name, type(error).__name__.lower()).inc()
                level = logging.ERROR if isinstance(error, Forbidden) or failures > 3 else logging.WARNING
                logger.log(level, "%s: %s", self.name, error)
            if failures:
                await asyncio.sleep(BACKOFF.seconds(failures))

    def _missing(self, error: NotFound) -> None:
        """The API server does not know the kind (any more)."""
        WATCH_RESTARTS.labels(self.store.kind.name, "notfound").inc()
        # It was heard: that of all things it has not this one.
        self._heard = time.monotonic()
        self._version = 0
        if not self._optional:
            logger.error("%s: %s", self.name, error)
            return
        if self.store.served:
            logger.warning("%s: the API server has no %s (yet)", self.name, self.store.kind.plural)
        for key in self.store:
            self.store.remove(key)
        self.store.tell_served(False)
        self.synced.set()

    async def _list(self) -> int:
        seen: set[Key] = set()
        version = 0
        async for page in self._port.pages(self.store.kind, self.namespace, labels=self._labels):
            self._heard = time.monotonic()
            version = int(page.resource_version or 0)
            for value in page.items:
                self.store.put(value)
                seen.add(key_of(value))
        self.store.retain(seen, version=version, namespace=self.namespace)
        return version

    async def _watch(self) -> None:
        """Follow the changes until the stream ends."""
        stream = self._port.watch(
            self.store.kind, self.namespace, labels=self._labels, resource_version=str(self._version)
        )
        async for change in stream:
            self._heard = time.monotonic()
            self._version = max(self._version, version_of(change.object))
            if change.type == "DELETED":
                self.store.remove(key_of(change.object), version=version_of(change.object))
            elif change.type in {"ADDED", "MODIFIED"}:
                self.store.put(change.object)
