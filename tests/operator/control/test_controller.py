"""Which objects the controller queues after a change."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any, cast

import pytest

from penstock_operator.cluster.api import ClusterPort, ListPage
from penstock_operator.cluster.store import ObjectKey
from penstock_operator.control.cache import ClusterCache
from penstock_operator.control.controller import GONE_SECONDS, MANY, Controller
from penstock_operator.control.reconcile import Reconciler, ReconcileRequest
from penstock_operator.facts import names
from penstock_operator.facts.pods import HostReport
from penstock_operator.limits.concurrency import Ask, SlotDecision, SlotKey
from penstock_operator.settings import Settings
from tests.operator import objects
from tests.operator.virtual_time import run

Change = Callable[[ClusterCache], Any]


class Empty:
    """A cluster without endpoints: `begin` lists them."""

    async def pages(self, *_: Any, **__: Any) -> Any:
        yield ListPage((), "1")


def looked_at(before: Change, change: Change, *, wait: float = 0.0) -> list[str]:
    """The objects that are queued after a change, in order."""

    async def scenario() -> list[str]:
        cache = ClusterCache(replace(Settings().plan_settings(), keda=True))
        controller = Controller(cast("ClusterPort", Empty()), cache, identity="test")
        await controller.begin()
        before(cache)
        while len(controller.queue):
            controller.queue.done(await controller.queue.get())
        change(cache)
        await asyncio.sleep(wait)
        found: list[str] = []
        while len(controller.queue):
            subject = await controller.queue.get()
            found.append(f"{'' if subject.kind == 'ModelEndpoint' else 'model '}{subject.key.name}")
            controller.queue.done(subject)
        return found

    return run(scenario())


def two_endpoints(cache: ClusterCache) -> None:
    cache.endpoints.put(objects.endpoint("e1", status={"optimizedModel": "m"}))
    cache.endpoints.put(objects.endpoint("e2", status={"optimizedModel": "m"}, hardwareClass="icelake"))
    cache.models.put(objects.optimized_model("m"))
    cache.pods.put(objects.runtime_pod("p", "e1", ip="10.0.0.1", node="n"))


def of(name: str) -> dict[str, Any]:
    return {"metadata": objects.metadata(name, 9, names.runtime_labels(name))}


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda w: w.endpoints.put(objects.endpoint("e3", 9)), ["e3"]),
        (lambda w: w.endpoints.put(objects.endpoint("e1", 1)), []),
        (lambda w: w.models.put(objects.optimized_model("m", 9, status={"phase": "Ready"})), ["e1", "e2"]),
        (lambda w: w.models.put(objects.optimized_model("unused", 9)), ["model unused"]),
        (lambda w: w.jobs.put(objects.job("m", 1, 9)), ["e1"]),
        (lambda w: w.pods.put(objects.job_pod("j", "m", 1, 9)), ["e1"]),
        (lambda w: w.services.put(of("e2")), ["e2"]),
        (lambda w: w.services.put(of("unknown")), []),
        (lambda w: w.pods.remove(ObjectKey("a", "p")), ["e1"]),
        (lambda w: w.put_report(ObjectKey("a", "p"), "uid-p", (HostReport(), "")), ["e1"]),
        (lambda w: w.classes.put({"metadata": {"name": "icelake", "resourceVersion": "9"}}), ["e2"]),
        (lambda w: w.nodes.put({"metadata": {"name": "n", "resourceVersion": "9"}}), ["e1", "e2"]),
        (lambda w: w.namespaces.put({"metadata": {"name": "a", "resourceVersion": "9"}}), ["e1", "e2"]),
        (lambda w: w.namespaces.put({"metadata": {"name": "b", "resourceVersion": "9"}}), []),
        (lambda w: w.endpoints.remove(ObjectKey("a", "e1")), []),
        (lambda w: w.endpoints.put(objects.endpoint("e2", 9, status={"optimizedModel": "other"})), ["e2"]),
    ],
)
def test_a_change_queues_the_objects_that_depend_on_it(change: Change, expected: list[str]) -> None:
    assert looked_at(two_endpoints, change) == expected


DIGEST = f"sha256:{'e' * 64}"


def test_an_endpoint_is_queued_when_an_optimized_model_of_its_namespace_has_the_artefact_that_it_pins() -> None:
    def pinned(cache: ClusterCache) -> None:
        cache.endpoints.put(objects.endpoint("e1", optimization={"mode": "Pinned", "artefact": DIGEST}))
        cache.endpoints.put(objects.endpoint("e2"))
        cache.models.put(objects.optimized_model("m"))

    def published(cache: ClusterCache) -> None:
        cache.models.put(objects.optimized_model("m", 9, status={"artefact": {"digest": DIGEST}}))

    assert looked_at(pinned, published) == ["e1", "model m"]


def test_a_job_is_followed_by_an_endpoint_that_writes_the_status_of_its_optimized_model() -> None:
    def one_pins(cache: ClusterCache) -> None:
        status = {"optimizedModel": "m"}
        pins = {"mode": "Pinned", "artefact": DIGEST}
        cache.endpoints.put(objects.endpoint("e1", status=status, optimization=pins))
        cache.endpoints.put(objects.endpoint("e2", status=status))
        cache.models.put(objects.optimized_model("m"))

    assert looked_at(one_pins, lambda w: w.jobs.put(objects.job("m", 1, 9))) == ["e2"]


def test_a_deleted_scaled_object_is_queued_after_a_delay_in_case_keda_was_uninstalled() -> None:
    def with_scaled_object(cache: ClusterCache) -> None:
        two_endpoints(cache)
        cache.scaled_objects.put(of("e1"))

    def goes(cache: ClusterCache) -> None:
        cache.scaled_objects.remove(ObjectKey("a", "e1"))

    assert looked_at(with_scaled_object, goes, wait=0.9 * GONE_SECONDS) == []
    assert looked_at(with_scaled_object, goes, wait=1.1 * GONE_SECONDS) == ["e1"]


def test_deleting_the_last_user_queues_its_model() -> None:
    def both_go(cache: ClusterCache) -> None:
        cache.endpoints.remove(ObjectKey("a", "e1"))
        cache.endpoints.remove(ObjectKey("a", "e2"))

    assert looked_at(two_endpoints, both_go) == ["model m"]


def test_deleting_an_endpoint_that_waits_for_its_turn_queues_those_behind_it() -> None:
    def wait(cache: ClusterCache) -> None:
        for name in ("first", "second"):
            cache.endpoints.put(objects.endpoint(name))
            ask = Ask(datetime(2026, 11, 21, tzinfo=UTC), SlotKey("a", name))
            rollout = SlotDecision(allowed=False, ask=ask)
            cache.slots.planned(ObjectKey("a", name), None, rollout)

    assert looked_at(wait, lambda w: w.endpoints.remove(ObjectKey("a", "first"))) == ["second"]


def test_a_change_of_a_node_does_not_queue_ready_endpoints() -> None:
    ready = {"conditions": [{"type": "Ready", "status": "True"}]}

    found = looked_at(
        lambda w: w.endpoints.put(objects.endpoint("e", status=ready)),
        lambda w: w.nodes.put({"metadata": {"name": "n", "resourceVersion": "9"}}),
    )

    assert found == []


@pytest.mark.parametrize(("wait", "expected"), [(0.0, 0), (60.0, MANY + 1)])
def test_progress_is_queued_for_thousands_of_users_with_a_delay(wait: float, expected: int) -> None:
    def many(cache: ClusterCache) -> None:
        cache.models.put(objects.optimized_model("m", status={"phase": "Optimizing", "progress": "7/23"}))
        for number in range(MANY + 1):
            cache.endpoints.put(objects.endpoint(f"e{number}", status={"optimizedModel": "m"}))

    def goes_on(cache: ClusterCache) -> None:
        cache.models.put(objects.optimized_model("m", 9, status={"phase": "Optimizing", "progress": "8/23"}))

    assert len(looked_at(many, goes_on, wait=wait)) == expected


def test_a_result_is_queued_for_thousands_of_users_at_once() -> None:
    def many(cache: ClusterCache) -> None:
        cache.models.put(objects.optimized_model("m", status={"phase": "Optimizing"}))
        for number in range(MANY + 1):
            cache.endpoints.put(objects.endpoint(f"e{number}", status={"optimizedModel": "m"}))

    def ready(cache: ClusterCache) -> None:
        cache.models.put(objects.optimized_model("m", 9, status={"phase": "Ready"}))

    assert len(looked_at(many, ready)) == MANY + 1


TEXTS = {"textsFrom": {"configMapName": "texts", "key": "t"}}


def config_map(name: str, version: int) -> dict[str, Any]:
    return {"metadata": objects.metadata(name, version), "data": {"t": "one"}}


def takes_texts(cache: ClusterCache) -> None:
    cache.endpoints.put(objects.endpoint("e", workload=TEXTS))
    cache.endpoints.put(objects.endpoint("other"))
    cache.put_texts(ObjectKey("a", "texts"), config_map("texts", 5))


@pytest.mark.parametrize(
    ("change", "expected", "read"),
    [
        (lambda w: w.text_sources.put(config_map("texts", 6)), ["e"], False),
        (lambda w: w.text_sources.remove(ObjectKey("a", "texts")), ["e"], False),
        (lambda w: w.text_sources.put(config_map("texts", 5)), [], True),
        (lambda w: w.text_sources.put(config_map("strange", 6)), [], True),
    ],
    ids=["edited", "deleted", "as it was read", "another one"],
)
def test_texts_are_read_again_when_their_config_map_changes(change: Change, expected: list[str], read: bool) -> None:
    worlds: list[ClusterCache] = []

    def changed(cache: ClusterCache) -> None:
        worlds.append(cache)
        change(cache)

    assert looked_at(takes_texts, changed) == expected
    assert (ObjectKey("a", "texts") in worlds[0].texts) is read


def test_missing_texts_are_read_when_their_config_map_appears() -> None:
    def waits(cache: ClusterCache) -> None:
        cache.endpoints.put(objects.endpoint("e", workload=TEXTS))
        cache.put_texts(ObjectKey("a", "texts"), None)

    assert looked_at(waits, lambda w: w.text_sources.put(config_map("texts", 6))) == ["e"]


def test_many_due_objects_that_need_no_write_do_not_block_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lease renewals, watch events and probes all wait for the next iteration of the event loop."""
    reconciled: list[ReconcileRequest] = []

    async def nothing_to_write(self: Reconciler, subject: ReconcileRequest) -> None:
        end = time.thread_time() + 0.003
        while time.thread_time() < end:
            pass
        reconciled.append(subject)

    async def scenario() -> tuple[int, float]:
        cache = ClusterCache(Settings().plan_settings())
        controller = Controller(cast("ClusterPort", Empty()), cache, identity="test")
        for number in range(300):
            cache.endpoints.put(objects.endpoint(f"e{number}"))
        controller.begun.set()
        workers = asyncio.create_task(controller.work(8))
        gaps: list[float] = []
        while len(reconciled) < 300:
            begin = time.thread_time()
            await asyncio.sleep(0)
            gaps.append(time.thread_time() - begin)
        workers.cancel()
        return len(gaps), max(gaps)

    monkeypatch.setattr(Reconciler, "reconcile", nothing_to_write)

    # A pause of the virtual machine counts in the thread's clock too. Code that never yields is slow at every try.
    for _ in range(3):
        reconciled.clear()
        turns, longest = asyncio.run(scenario())
        assert turns > 20
        if longest < 0.2:
            return
    pytest.fail(f"a turn of the loop took {longest:.2f} s")
