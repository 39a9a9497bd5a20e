"""An informer keeps a store up to date through failures of its watch."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from penstock_operator.cluster import informer as module
from penstock_operator.cluster.api import POD
from penstock_operator.cluster.errors import Backoff
from penstock_operator.cluster.informer import Informer
from penstock_operator.cluster.store import ObjectKey, Store
from tests.operator.scripted_api import Answer, ScriptedApi, cut, listing, problem, scripted, stream, thing


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BACKOFF", Backoff(first_seconds=0.001, limit_seconds=0.002))


def follow(until: Callable[[Store[None]], bool], *answers: Answer) -> tuple[set[str], ScriptedApi]:
    """Run an informer until the condition holds; the names in the store, and the requests that the server got."""

    async def scenario() -> tuple[set[str], ScriptedApi]:
        async with scripted(*answers) as api, api.port() as port:
            store: Store[None] = Store(POD, lambda _: None)
            there = asyncio.Event()
            store.listen(lambda _: there.set() if until(store) else None)
            task = asyncio.create_task(Informer(port, store, labels="ours=yes").run())
            async with asyncio.timeout(60):
                await there.wait()
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            return {key.name for key in store}, api

    return asyncio.run(scenario())


def names(*wanted: str) -> Callable[[Store[None]], bool]:
    return lambda store: {key.name for key in store} == set(wanted)


def event(kind: str, name: str, version: int) -> dict[str, object]:
    return {"type": kind, "object": thing(name, version)}


def test_an_informer_lists_once_and_watches_from_that_version() -> None:
    found, api = follow(
        names("y", "z"),
        listing(10, thing("x", 1), thing("y", 2)),
        stream(event("ADDED", "z", 11), event("DELETED", "x", 12), end="hang"),
    )

    assert found == {"y", "z"}
    assert [seen.query.get("watch") for seen in api.seen] == [None, "true"]
    assert api.seen[1].query["resourceVersion"] == "10"


def test_an_informer_resumes_from_the_last_event_when_the_stream_ends() -> None:
    _, api = follow(
        names("x", "y"),
        listing(10, thing("x", 1)),
        stream({"type": "BOOKMARK", "object": thing("", 25)}),
        stream(event("ADDED", "y", 26), end="hang"),
    )

    assert [seen.query.get("resourceVersion") for seen in api.seen] == [None, "10", "25"]


def test_an_object_deleted_during_a_gap_of_the_watch_is_removed() -> None:
    expired = {"type": "ERROR", "object": {"code": 410, "message": "too old resource version"}}

    found, _ = follow(
        names("y"),
        listing(10, thing("x", 1), thing("y", 2)),
        stream(expired),
        listing(20, thing("y", 2)),
        stream(end="hang"),
    )

    assert found == {"y"}


def test_an_informer_waits_for_a_restarting_api_server() -> None:
    found, _ = follow(
        names("x", "y"),
        listing(10, thing("x", 1)),
        stream(end="cut"),
        cut,
        problem(503, "starting"),
        problem(403, "RBAC is not loaded yet"),
        problem(410, "compacted"),
        listing(20, thing("x", 1), thing("y", 15)),
        stream(end="hang"),
    )

    assert found == {"x", "y"}


def test_a_list_that_fails_half_way_removes_nothing() -> None:
    async def scenario() -> set[ObjectKey]:
        async with scripted(problem(410, "the continue token is too old")) as api, api.port() as port:
            store: Store[None] = Store(POD, lambda _: None)
            store.put(thing("x", 1))
            task = asyncio.create_task(Informer(port, store).run())
            await api.requests(3)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            return set(store)

    assert asyncio.run(scenario()) == {ObjectKey("a", "x")}


def test_every_request_has_the_label_selector() -> None:
    _, api = follow(names("x"), listing(10, thing("x", 1)), stream(end="hang"))

    assert {seen.query.get("labelSelector") for seen in api.seen} == {"ours=yes"}


def test_an_optional_kind_that_is_not_installed_is_looked_for_until_it_is() -> None:
    async def scenario() -> tuple[list[bool], set[str]]:
        answers = (
            problem(404, "no such kind"),
            problem(404, "no such kind"),
            listing(10, thing("x", 1)),
            stream(end="hang"),
        )
        async with scripted(*answers) as api, api.port() as port:
            store: Store[None] = Store(POD, lambda _: None)
            served: list[bool] = []
            store.listen_served(lambda: served.append(store.served))
            arrived = asyncio.Event()
            store.listen(lambda _: arrived.set())
            informer = Informer(port, store, optional=True)
            task = asyncio.create_task(informer.run())
            async with asyncio.timeout(60):
                await informer.synced.wait()
                await arrived.wait()
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            return served, {key.name for key in store}

    assert asyncio.run(scenario()) == ([False, True], {"x"})


def test_objects_are_removed_when_their_kind_is_uninstalled() -> None:
    async def scenario() -> tuple[bool, int]:
        answers = (listing(10, thing("x", 1)), problem(404, "no such kind"), problem(404, "no such kind"))
        async with scripted(*answers) as api, api.port() as port:
            store: Store[None] = Store(POD, lambda _: None)
            gone = asyncio.Event()
            store.listen_served(gone.set)
            task = asyncio.create_task(Informer(port, store, optional=True).run())
            async with asyncio.timeout(60):
                await gone.wait()
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            return store.served, len(store)

    assert asyncio.run(scenario()) == (False, 0)
