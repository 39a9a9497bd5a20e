"""Kopf's events keep a store up to date, and a second listing of a kind is detected."""

from __future__ import annotations

import asyncio
from typing import Any

from penstock_operator.cluster.store import ObjectKey, event_handler
from penstock_operator.control.cache import ClusterCache
from penstock_operator.settings import Settings
from tests.operator import objects


def test_a_listing_and_events_reach_the_store_and_a_second_listing_is_reported_once() -> None:
    store = ClusterCache(Settings().plan_settings()).models
    reports: list[bool] = []
    handle = event_handler(store, lambda: reports.append(True))

    def event(kind: str | None, name: str, version: int) -> None:
        value: dict[str, Any] = {"type": kind, "object": objects.optimized_model(name, version)}
        asyncio.run(handle(event=value))  # type: ignore[arg-type]  # a coroutine

    event(None, "om-a", 1)
    event(None, "om-b", 2)
    event("ADDED", "om-c", 3)
    event("DELETED", "om-a", 4)

    assert ([key.name for key in store], reports) == (["om-b", "om-c"], [])

    # After a gap: om-c was deleted in it, which Kopf does not report.
    event(None, "om-b", 2)
    event(None, "om-d", 6)

    assert store.get(ObjectKey("a", "om-d")) is not None
    assert reports == [True]

    event(None, "om-b", 2)

    assert reports == [True, True]
