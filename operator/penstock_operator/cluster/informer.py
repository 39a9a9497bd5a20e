"""Fills stores from the API server: lists a kind (`list_kind`); keeps it up to date by a watch (`Informer`), and lists
again when the watch has a gap. Kopf watches Penstock's own kinds (`control/handlers.py`)."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from penstock.logs import log_event
from penstock_operator.cluster.api import ClusterPort, Json
from penstock_operator.cluster.errors import Backoff, ClusterError, Forbidden, NotFound, WatchExpired
from penstock_operator.cluster.store import ObjectKey, Store, key_of, version_of
from penstock_operator.metrics import OBJECTS_SKIPPED, WATCH_RESTARTS

BACKOFF = Backoff(first_seconds=0.2, limit_seconds=20.0)

Facts = TypeVar("Facts")
logger = logging.getLogger(__name__)


async def list_kind(
    port: ClusterPort,
    store: Store[Any],
    namespace: str = "",
    *,
    labels: str = "",
    put: Callable[[Json], bool] | None = None,
    on_page: Callable[[], None] = lambda: None,
) -> tuple[int, int]:
    """List a kind, in one namespace or in all, into its store. Returns the version of the list, and how many objects
    differed. `put`: stores an object, in place of the store's; `on_page`: called for each page."""
    seen: set[ObjectKey] = set()
    version = differences = 0
    async for page in port.pages(store.kind, namespace, labels=labels):
        on_page()
        version = int(page.resource_version or 0)
        for value in page.items:
            # The items of a list lack them.
            value.setdefault("apiVersion", store.kind.api_version)
            value.setdefault("kind", store.kind.name)
            differences += (put or store.put)(value)
            seen.add(key_of(value))
    return version, differences + store.retain(seen, version=version, namespace=namespace)


class Informer(Generic[Facts]):
    """One kind, in one namespace or in all."""

    def __init__(
        self, port: ClusterPort, store: Store[Facts], *, namespace: str = "", labels: str = "", optional: bool = False
    ) -> None:
        """`optional`: the API server need not serve the kind. Then the store is empty and marked as not served, and
        the informer retries until the kind is served."""
        self.store = store
        self._optional = optional
        self.namespace = namespace
        self._port = port
        self._labels = labels
        self._last_contact = time.monotonic()
        self._version = 0
        self.synced = asyncio.Event()
        """Set once the first list is complete."""

    @property
    def name(self) -> str:
        """For messages and metrics."""
        return f"{self.store.kind}{'@' if self.namespace else ''}{self.namespace}"

    @property
    def silence_seconds(self) -> float:
        """Seconds since the API server last sent anything: an event, a bookmark or a list."""
        return time.monotonic() - self._last_contact

    async def run(self) -> None:
        """Until cancelled."""
        failures = 0
        while True:
            begin = time.monotonic()
            try:
                if not self._version:
                    self._version = await self._list()
                    self.store.set_served(True)
                    self.synced.set()
                await self._watch()
                # A stream that ends immediately counts as a failure, so that it is not restarted at full speed.
                failures = failures + 1 if time.monotonic() - begin < 1.0 else 0
            except WatchExpired as error:
                logger.info(
                    "the watch of %s expired, listing again: %s",
                    self.name,
                    error,
                    extra=log_event("WatchExpired", object=self.name),
                )
                WATCH_RESTARTS.labels(self.store.kind.name, "expired").inc()
                self._version = 0
                failures += 1
            except NotFound as error:
                failures += 1
                self._missing(error)
            except ClusterError as error:
                failures += 1
                WATCH_RESTARTS.labels(self.store.kind.name, type(error).__name__.lower()).inc()
                if isinstance(error, Forbidden) or failures > 3:
                    self._log_failure(error)
                else:
                    logger.warning(
                        "the watch of %s failed, trying again: %s",
                        self.name,
                        error,
                        extra=log_event("WatchInterrupted", object=self.name, reason=error),
                    )
            if failures:
                await asyncio.sleep(BACKOFF.seconds(failures))

    def _log_failure(self, error: ClusterError) -> None:
        logger.error(
            "the watch of %s failed: %s",
            self.name,
            error,
            extra=log_event("WatchFailed", object=self.name, reason=error),
        )

    def _missing(self, error: NotFound) -> None:
        """The API server does not serve the kind."""
        WATCH_RESTARTS.labels(self.store.kind.name, "notfound").inc()
        # The API server answered, so it is not silent.
        self._contact()
        self._version = 0
        if not self._optional:
            self._log_failure(error)
            return
        if self.store.served:
            logger.warning(
                "the API server does not serve %s",
                self.store.kind.plural,
                extra=log_event("KindNotServed", object=self.name, reason=error),
            )
        for key in self.store:
            self.store.remove(key)
        self.store.set_served(False)
        self.synced.set()

    async def _list(self) -> int:
        version, _ = await list_kind(
            self._port, self.store, self.namespace, labels=self._labels, put=self._put, on_page=self._contact
        )
        return version

    async def _watch(self) -> None:
        """Follow the events until the stream ends."""
        stream = self._port.watch(
            self.store.kind, self.namespace, labels=self._labels, resource_version=str(self._version)
        )
        async for change in stream:
            self._contact()
            self._version = max(self._version, version_of(change.object))
            if change.type == "DELETED":
                self.store.remove(key_of(change.object), version=version_of(change.object))
            elif change.type in {"ADDED", "MODIFIED"}:
                self._put(change.object)

    def _contact(self) -> None:
        self._last_contact = time.monotonic()

    def _put(self, value: Json) -> bool:
        """Store an object. One that cannot be read must not keep other objects from being watched."""
        try:
            return self.store.put(value)
        except Exception as error:
            key = key_of(value)
            OBJECTS_SKIPPED.labels(self.store.kind.name).inc()
            logger.exception(
                "%s %s cannot be read and is skipped: this is a defect of the operator",
                self.store.kind,
                key,
                extra=log_event("ObjectSkipped", object=str(key), reason=error),
            )
            return False
