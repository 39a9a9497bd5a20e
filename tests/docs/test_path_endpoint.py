"""The files that a ModelEndpoint's event executes, up to the applied Deployment, are those of the architecture page.

The port to the API server is a stand-in that stores what is applied: no control plane is needed.
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import AsyncIterator
from typing import Any

from penstock_operator.cluster.api import Json, ListPage, ResourceKind
from penstock_operator.cluster.store import event_handler
from penstock_operator.control.cache import ClusterCache
from penstock_operator.control.controller import Controller
from tests.docs.executed import PAGE, Recorder, compare, recorder
from tests.operator.endpoint.kube import SETTINGS, Kube

CREATED = "2026-11-21T19:00:00Z"
MOST_LINES = 7_080


class StoringPort:
    """An API server with nothing but the objects that were applied to it."""

    def __init__(self) -> None:
        self.objects: dict[tuple[str, str], Json] = {}
        self.deployed = asyncio.Event()
        self._version = 100

    def store(self, value: Json) -> Json:
        """A new version of an object."""
        self._version += 1
        made = copy.deepcopy(value)
        before = self.objects.get((made["kind"], made["metadata"]["name"]), {})
        metadata = {"namespace": "a", "generation": 1, "creationTimestamp": CREATED, "uid": f"uid-{self._version}"}
        made["metadata"] = {**metadata, **(before.get("metadata") or {}), **made["metadata"]}
        made["metadata"]["resourceVersion"] = str(self._version)
        self.objects[made["kind"], made["metadata"]["name"]] = made
        return made

    async def get(self, kind: ResourceKind, name: str, namespace: str = "") -> Json | None:
        """One object; None when it does not exist."""
        del namespace
        return self.objects.get((kind.name, name))

    async def pages(self, kind: ResourceKind, namespace: str = "", *, labels: str = "") -> AsyncIterator[ListPage]:
        """The listed objects."""
        del namespace, labels
        yield ListPage(tuple(value for (name, _), value in self.objects.items() if name == kind.name), "1")

    async def apply(self, value: Json, *, subresource: str = "") -> Json:
        """Store an object, or its status."""
        before = self.objects.get((value["kind"], value["metadata"]["name"]), {})
        made = {**before, "status": value["status"]} if subresource else {**value, "status": before.get("status") or {}}
        if value["kind"] == "Deployment":
            self.deployed.set()
        return self.store(made)

    async def create(self, value: Json) -> Json:
        """Accept an Event."""
        return value


def ready_model() -> Kube:
    """An endpoint whose OptimizedModel is ready, and that has no Deployment yet."""
    kube = Kube()
    kube.reconcile()
    kube.job_succeeds()
    kube.act(kube.plan())
    return kube


async def settle() -> None:
    """Let the worker, which never waits here, do all its work."""
    for _ in range(1000):
        await asyncio.sleep(0)


async def event_to_deployment(traced: Recorder) -> Any:
    kube, port, cache = ready_model(), StoringPort(), ClusterCache(SETTINGS)
    controller = Controller(port, cache, identity="test")  # type: ignore[arg-type] # what a reconcile does not call is left out
    for value in kube.classes.values():
        port.store({"apiVersion": "penstock.dev/v1alpha1", "kind": "HardwareClass", **value})
    for (kind, _), value in kube.objects.items():
        if kind == "OptimizedModel":
            port.store(value)
    await controller.begin()
    endpoint = port.store(kube.endpoint)
    handle = event_handler(cache.endpoints, lambda: None)
    worker = asyncio.create_task(controller.work(1))
    await settle()
    with traced.record():
        await handle({"type": "ADDED", "object": endpoint})
        await asyncio.wait_for(port.deployed.wait(), timeout=60)
        await settle()
    worker.cancel()
    return port.objects["Deployment", kube.name]


def test_the_executed_files_are_those_of_the_page() -> None:
    with recorder() as traced:
        made = asyncio.run(event_to_deployment(traced))

    assert made["spec"]["template"]["spec"]["containers"][0]["image"] == SETTINGS.runtime_image
    compare("endpoint", traced.files)
    assert f"at most {MOST_LINES:,} lines together" in PAGE.read_text(encoding="utf-8")
    assert traced.lines() <= MOST_LINES
