"""The Kubernetes port over real HTTP, with an API server that fails in various ways."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import pytest

from penstock_operator.cluster import kubernetes as adapter
from penstock_operator.cluster.api import (
    CONFIG_MAP,
    DEPLOYMENT,
    KINDS,
    NODE,
    POD,
    ListPage,
    ResourceKind,
    WatchEvent,
)
from penstock_operator.cluster.errors import (
    ClusterError,
    Conflict,
    Forbidden,
    NotFound,
    NotLeading,
    Refused,
    Unavailable,
    WatchExpired,
    from_status,
)
from penstock_operator.cluster.kubernetes import KubernetesPort
from tests.operator.scripted_api import (
    Answer,
    ScriptedApi,
    answer,
    cut,
    problem,
    scripted,
    silence,
    stream,
    thing,
)

WANTED = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "x", "namespace": "a"}, "data": {"k": "v"}}


def ask(act: Callable[[KubernetesPort], Awaitable[Any]], *answers: Answer, **more: Any) -> tuple[Any, ScriptedApi]:
    """The result of a call, and the requests that the server got."""

    async def scenario() -> tuple[Any, ScriptedApi]:
        async with scripted(*answers) as api, api.port(**more) as port:
            return await act(port), api

    return asyncio.run(scenario())


def get(port: KubernetesPort) -> Awaitable[Any]:
    return port.get(POD, "x", "a")


def apply(port: KubernetesPort) -> Awaitable[Any]:
    return port.apply(WANTED)


@pytest.mark.parametrize(
    "bad",
    [problem(429, "too many"), problem(500, "oops"), problem(503, "etcd leader changed"), cut],
    ids=["429", "500", "503", "cut"],
)
@pytest.mark.parametrize("act", [get, apply], ids=["read", "apply"])
def test_temporary_errors_are_retried(bad: Answer, act: Callable[[KubernetesPort], Awaitable[Any]]) -> None:
    found, api = ask(act, bad, bad, answer(200, thing("x", 5)))

    assert found["metadata"]["resourceVersion"] == "5"
    assert len(api.seen) == 3


def test_retries_end_with_an_error_that_names_the_operation() -> None:
    with pytest.raises(Unavailable, match="get Pod a/x: HTTP 503: down for good"):
        ask(get, problem(503, "down for good"))


def test_a_server_that_does_not_answer_costs_no_more_than_the_time_out() -> None:
    with pytest.raises(Unavailable, match="get Pod a/x"):
        ask(get, silence, timeout_seconds=0.05)


def test_a_retry_waits_at_least_for_retry_after() -> None:
    async def scenario() -> float:
        loop = asyncio.get_running_loop()
        answers = (problem(429, "later", Retry_After="1"), answer(200, thing("x", 1)))
        async with scripted(*answers) as api, api.port() as port:
            begin = loop.time()
            await get(port)
            return loop.time() - begin

    assert asyncio.run(scenario()) >= 1.0


@pytest.mark.parametrize(
    ("status", "kind"),
    [(409, Conflict), (410, WatchExpired), (403, Forbidden), (401, Forbidden), (422, Refused), (400, Refused)],
)
def test_permanent_errors_are_raised_without_a_retry(status: int, kind: type[ClusterError]) -> None:
    async def scenario() -> int:
        async with scripted(problem(status, "no")) as api, api.port() as port:
            with pytest.raises(kind) as caught:
                await apply(port)
            assert caught.value.status == status
            assert "apply ConfigMap a/x" in str(caught.value)
            return len(api.seen)

    assert asyncio.run(scenario()) == 1


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        (CONFIG_MAP, {""}),
        (replace(CONFIG_MAP, metadata_only=True), {"PartialObjectMetadata", "PartialObjectMetadataList"}),
    ],
)
def test_kinds_that_need_only_metadata_are_listed_as_metadata(kind: ResourceKind, expected: set[str]) -> None:
    async def both(port: KubernetesPort) -> None:
        async for _ in port.pages(kind):
            pass
        async for _ in port.watch(kind, resource_version="1"):
            pass
        await port.get(kind, "x", "a")

    _, api = ask(both, answer(200, {"metadata": {}, "items": []}), stream(), answer(200, thing("x", 1)))

    asked = [seen.accept.partition(";as=")[2].partition(";")[0] for seen in api.seen]
    assert set(asked[:2]) == expected
    assert asked[2] == ""  # a get by name reads the whole object


def test_an_object_that_is_not_there_is_none() -> None:
    found, _ = ask(get, problem(404, "not found"))

    assert found is None


def test_apply_is_server_side_with_our_name_and_force() -> None:
    _, api = ask(apply, answer(200, thing("x", 1)))

    (seen,) = api.seen
    assert (seen.method, seen.path) == ("PATCH", "/api/v1/namespaces/a/configmaps/x")
    assert seen.query == {"fieldManager": "penstock-operator", "force": "true"}
    assert seen.content_type == "application/apply-patch+yaml"
    assert seen.body == WANTED


def test_scaling_changes_the_number_of_one_object_and_nothing_else() -> None:
    _, api = ask(lambda port: port.scale(DEPLOYMENT, "x", "a", 3, uid="u1"), answer(200, thing("x", 1)))

    (seen,) = api.seen
    assert (seen.method, seen.path) == ("PATCH", "/apis/apps/v1/namespaces/a/deployments/x")
    assert seen.content_type == "application/merge-patch+json"
    assert seen.query == {"fieldManager": "penstock-operator"}
    assert seen.body == {"metadata": {"uid": "u1"}, "spec": {"replicas": 3}}


def test_a_delete_is_in_the_background_and_of_one_object_only() -> None:
    found, api = ask(lambda port: port.delete(POD, "x", "a", uid="u1"), answer(200))

    assert found is True
    assert api.seen[0].body["propagationPolicy"] == "Background"
    assert api.seen[0].body["preconditions"] == {"uid": "u1"}


@pytest.mark.parametrize("status", [404, 409])
def test_deleting_a_missing_or_replaced_object_is_not_an_error(status: int) -> None:
    found, _ = ask(lambda port: port.delete(POD, "x", "a", uid="u1"), problem(status, "gone"))

    assert found is False


def test_without_the_lease_reads_are_allowed_and_writes_are_refused() -> None:
    async def scenario() -> int:
        async with scripted(answer(200, thing("x", 1))) as api, api.port(may_write=lambda: False) as port:
            await get(port)
            with pytest.raises(NotLeading):
                await apply(port)
            with pytest.raises(NotLeading):
                await port.delete(POD, "x", "a")
            with pytest.raises(NotLeading):
                await port.create(WANTED)
            return len(api.seen)

    assert asyncio.run(scenario()) == 1


def test_a_retry_does_not_outlive_the_lease() -> None:
    held = [True, False]

    async def scenario() -> None:
        async with scripted(problem(503, "away")) as api, api.port(may_write=lambda: held.pop(0)) as port:
            with pytest.raises(NotLeading):
                await apply(port)

    asyncio.run(scenario())


def test_long_lists_are_read_in_pages() -> None:
    first = answer(200, {"metadata": {"resourceVersion": "7", "continue": "token"}, "items": [thing("x", 1)]})
    second = answer(200, {"metadata": {"resourceVersion": "7"}, "items": [thing("y", 2)]})

    async def all_pages(port: KubernetesPort) -> list[ListPage]:
        return [page async for page in port.pages(POD, labels="a=b")]

    pages, api = ask(all_pages, first, second)

    assert [[item["metadata"]["name"] for item in page.items] for page in pages] == [["x"], ["y"]]
    assert {page.resource_version for page in pages} == {"7"}
    assert [seen.query.get("continue") for seen in api.seen] == [None, "token"]
    assert {seen.query["labelSelector"] for seen in api.seen} == {"a=b"}


async def changes(port: KubernetesPort) -> list[WatchEvent]:
    return [change async for change in port.watch(NODE, resource_version="3")]


def test_a_watch_yields_events_and_ends_with_the_stream() -> None:
    lines = [{"type": "ADDED", "object": thing("x", 4)}, {"type": "BOOKMARK", "object": thing("", 9)}]

    found, api = ask(changes, stream(*lines))

    assert [(change.type, change.object["metadata"]["resourceVersion"]) for change in found] == [
        ("ADDED", "4"),
        ("BOOKMARK", "9"),
    ]
    assert api.seen[0].query["resourceVersion"] == "3"
    assert api.seen[0].query["allowWatchBookmarks"] == "true"


def test_a_watch_that_starts_too_far_back_fails_within_the_stream() -> None:
    gone = {"type": "ERROR", "object": {"kind": "Status", "code": 410, "message": "too old resource version"}}

    with pytest.raises(WatchExpired, match="too old"):
        ask(changes, stream(gone))


def test_a_silent_watch_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapter, "SILENCE_SECONDS", 0.05)

    found, _ = ask(changes, stream({"type": "ADDED", "object": thing("x", 4)}, end="hang"))

    assert len(found) == 1


@pytest.mark.parametrize(
    "broken", [stream('{"type": "ADD'), stream({"type": "ADDED", "object": thing("x", 4)}, end="cut")]
)
def test_a_watch_that_breaks_off_is_temporary(broken: Answer) -> None:
    with pytest.raises(Unavailable, match="watch Node"):
        ask(changes, broken)


def test_an_event_of_two_megabytes_is_read() -> None:
    large = {"type": "ADDED", "object": thing("x", 4) | {"data": "x" * 2_000_000}}

    found, _ = ask(changes, stream(large))

    assert len(found[0].object["data"]) == 2_000_000


@pytest.mark.parametrize("status", [400, 401, 403, 404, 405, 409, 410, 413, 415, 422, 429, 500, 502, 503, 504])
def test_every_http_status_becomes_a_cluster_error(status: int) -> None:
    error = from_status(status, b"<html>a proxy</html>", what="get Pod a/x")

    assert error.status == status
    assert error.temporary is (status in {409, 410, 429} or status >= 500)
    assert "a proxy" in error.message


def test_retry_after_is_also_read_from_the_body() -> None:
    error = from_status(429, b'{"message": "m", "details": {"retryAfterSeconds": 7}}', what="x")

    assert error.retry_after_seconds == 7.0


def test_a_forbidden_error_names_the_missing_right_unless_the_namespace_is_terminating() -> None:
    ending = b'{"message": "m", "details": {"causes": [{"reason": "NamespaceTerminating"}]}}'

    assert from_status(403, ending, what="x").remedy == ""
    assert "service account" in from_status(403, b'{"message": "m"}', what="x").remedy


def test_paths_are_those_of_the_api() -> None:
    assert POD.path("a", "x", "log") == "/api/v1/namespaces/a/pods/x/log"
    assert KINDS["Deployment"].path("a") == "/apis/apps/v1/namespaces/a/deployments"
    assert NODE.path("ignored", "n") == "/api/v1/nodes/n"
    assert CONFIG_MAP.path() == "/api/v1/configmaps"
    assert isinstance(NotFound("x"), ClusterError)
