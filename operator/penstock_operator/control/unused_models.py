"""Marks, keeps or deletes OptimizedModels that no endpoint may be using."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime

from penstock.logs import log_event
from penstock_operator.cluster.api import OPTIMIZED_MODEL, ClusterPort, Json
from penstock_operator.cluster.store import ObjectKey, PackedObject, StoreEntry
from penstock_operator.control.cache import ClusterCache
from penstock_operator.endpoint.optimization.unused import NEW_SECONDS, unused_model_action
from penstock_operator.metrics import COLLECTED

logger = logging.getLogger(__name__)


async def reconcile_model(
    port: ClusterPort,
    cache: ClusterCache,
    key: ObjectKey,
    write_status: Callable[[StoreEntry[PackedObject], Json], Awaitable[None]],
) -> float | None:
    """Seconds until the next look; None: the resync is enough."""
    entry, facts = cache.models.get(key), cache.model(key)
    if entry is None or facts is None:
        return None
    outcome = unused_model_action(facts, now=datetime.now(UTC), settings=cache.settings)
    if outcome.delete and is_awaited(cache, key):
        return NEW_SECONDS
    if outcome.status is not None:
        await write_status(entry, outcome.status.status)
    if outcome.delete and await port.delete(OPTIMIZED_MODEL, key.name, key.namespace, uid=entry.uid):
        COLLECTED.inc()
        logger.info(
            "deleted OptimizedModel %s: no endpoint uses it",
            key,
            extra=log_event("OptimizedModelDeleted", object=str(key), reason="Unused"),
        )
    return outcome.requeue_seconds


def is_awaited(cache: ClusterCache, key: ObjectKey) -> bool:
    """Whether an endpoint may be about to use an OptimizedModel: its present spec has no status yet, which would
    name the OptimizedModel. Of one that has owners, only these may be."""
    entry = cache.models.get(key)
    owners = [] if entry is None else entry.facts.value["metadata"].get("ownerReferences") or []
    places = [ObjectKey(key.namespace, owner["name"]) for owner in owners]
    if not places:
        places = [place for place, _ in cache.endpoints.of(("namespace", key.namespace))]
    found = (entry.facts.value for place in places if (entry := cache.endpoints.get(place)) is not None)
    return any(
        "deletionTimestamp" not in value["metadata"]
        and (value.get("status") or {}).get("observedGeneration") != value["metadata"].get("generation")
        for value in found
    )
