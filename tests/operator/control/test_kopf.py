"""Kopf, run as the operator runs it, against a scripted API server: start-up, the watches of the own kinds, the end."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import cast

from aiohttp import web
from kubernetes.aio.client import Configuration

from penstock_operator.cluster.errors import Unavailable
from penstock_operator.cluster.store import ObjectKey
from penstock_operator.control.cache import ClusterCache
from penstock_operator.control.controller import Controller
from penstock_operator.process import run_kopf
from penstock_operator.settings import Settings
from tests.operator import objects
from tests.operator.objects import Json

KINDS = {"modelendpoints": "ModelEndpoint", "optimizedmodels": "OptimizedModel", "hardwareclasses": "HardwareClass"}

ROOT = Path(__file__).parents[3]


def hardware_class(name: str, version: int) -> Json:
    metadata = {"name": name, "uid": f"uid-{name}", "resourceVersion": str(version)}
    return {"apiVersion": "penstock.dev/v1alpha1", "kind": "HardwareClass", "metadata": metadata, "spec": {}}


class Api:
    """Serves discovery, a list of each kind, and watches that give the queued events."""

    def __init__(self) -> None:
        self.items: dict[str, list[Json]] = {
            "modelendpoints": [objects.endpoint("emotion", 1)],
            "optimizedmodels": [objects.optimized_model("om", 2)],
            "hardwareclasses": [hardware_class("any", 3)],
        }
        self.events: dict[str, asyncio.Queue[Json]] = {plural: asyncio.Queue() for plural in KINDS}
        self.writes: list[str] = []

    async def answer(self, request: web.Request) -> web.StreamResponse:
        if request.method != "GET":
            self.writes.append(f"{request.method} {request.path}")
        plural = request.path.rsplit("/", 1)[-1]
        if plural in KINDS and "watch" in request.query:
            return await self._watch(request, plural)
        return web.json_response(self._document(request.path, plural))

    def _document(self, path: str, plural: str) -> Json:
        if plural in KINDS:
            return {"metadata": {"resourceVersion": "9"}, "items": self.items[plural]}
        if path == "/apis":
            version = {"groupVersion": "penstock.dev/v1alpha1", "version": "v1alpha1"}
            return {"groups": [{"name": "penstock.dev", "versions": [version], "preferredVersion": version}]}
        if path == "/apis/penstock.dev/v1alpha1":
            verbs = ["get", "list", "watch", "patch"]
            served = [
                {
                    "name": plural,
                    "singularName": kind.lower(),
                    "kind": kind,
                    "namespaced": plural != "hardwareclasses",
                    "verbs": verbs,
                }
                for plural, kind in KINDS.items()
            ]
            return {"resources": served}
        if path == "/api/v1":
            # Kopf waits for this kind before it watches any.
            namespaces = {"name": "namespaces", "singularName": "namespace", "kind": "Namespace", "namespaced": False}
            return {"resources": [{**namespaces, "verbs": ["get", "list", "watch"]}]}
        return {"versions": ["v1"]}

    async def _watch(self, request: web.Request, plural: str) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        await response.prepare(request)
        while True:
            event = await self.events[plural].get()
            await response.write(json.dumps(event).encode() + b"\n")
            if event["type"] == "ERROR":
                return response


class Began:
    """In place of the controller: fails once, then starts."""

    def __init__(self) -> None:
        self.attempts = 0
        self.relists = 0
        self.resync = self

    async def begin(self) -> None:
        self.attempts += 1
        if self.attempts == 1:
            raise Unavailable("list ModelEndpoint: no answer")

    def relisted(self) -> None:
        self.relists += 1


@asynccontextmanager
async def served(api: Api) -> AsyncIterator[Configuration]:
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", api.answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    configuration = Configuration()
    configuration.host = "http://{}:{}".format(*runner.addresses[0][:2])
    try:
        yield configuration
    finally:
        await runner.cleanup()


async def until(true: Callable[[], bool]) -> None:
    while not true():  # noqa: ASYNC110 - stores have listeners, and these tests poll several
        await asyncio.sleep(0.02)


async def kinds_relists_and_signals() -> None:
    """For a process of its own: a signal that is not caught would end the process of other tests, too."""
    api, controller = Api(), Began()
    cache = ClusterCache(Settings().plan_settings())
    stop, stop_kopf = asyncio.Event(), asyncio.Event()
    async with asyncio.timeout(300), served(api) as configuration:
        work = run_kopf(
            configuration, Settings(), cast("Controller", controller), cache, stop=stop, stop_kopf=stop_kopf
        )
        task = asyncio.create_task(work)
        await until(lambda: all(len(store) == 1 for store in (cache.endpoints, cache.models, cache.classes)))
        assert controller.attempts == 2

        await api.events["optimizedmodels"].put({"type": "ADDED", "object": objects.optimized_model("new", 11)})
        await until(lambda: cache.models.get(ObjectKey("a", "new")) is not None)
        gone = {"type": "DELETED", "object": objects.optimized_model("om", 12)}
        await api.events["optimizedmodels"].put(gone)
        await until(lambda: cache.models.get(ObjectKey("a", "om")) is None)
        assert controller.relists == 0

        # The history is lost: Kopf lists again.
        expired = {"type": "ERROR", "object": {"kind": "Status", "code": 410, "reason": "Expired"}}
        await api.events["hardwareclasses"].put(expired)
        await until(lambda: controller.relists == 1)

        signal.raise_signal(signal.SIGTERM)
        await asyncio.wait_for(stop.wait(), 60)
        assert not task.done()

        stop_kopf.set()
        await task
    assert api.writes == []


def test_kopf_updates_the_own_kinds_reports_a_new_listing_and_handles_no_signals() -> None:
    code = (
        "import asyncio; from penstock_operator.control import handlers; from tests.operator.control import test_kopf; "
        "handlers.START_RETRY_SECONDS = 0.1; asyncio.run(test_kopf.kinds_relists_and_signals())"
    )
    run = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=330, check=False
    )

    assert run.returncode == 0, run.stderr[-3000:]
