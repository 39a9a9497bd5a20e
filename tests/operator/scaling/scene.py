"""A cluster with one endpoint that serves, and an operator: time is an argument of a tick, so that minutes of load take
as long as their HTTP requests."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from penstock.resources.job_summary import Summary
from penstock_operator.cluster.api import ClusterPort
from penstock_operator.cluster.store import ObjectKey
from penstock_operator.facts.names import CONTAINER
from penstock_operator.process import make_autoscaler
from penstock_operator.scaling.loop import Autoscaler
from penstock_operator.settings import LoadSettings, Settings
from testbed.kubectl import Kubectl
from tests.operator import kubelet
from tests.operator.running import Running, Tripwire, running
from tests.operator.scaling.pods import Fleet, fleet

TICK = 5.0
WINDOW = 120
"""The autoscaler's default window, which it lengthens; the window of an endpoint stays as it is."""
CAPACITY = {
    "requestsPerSecond": 79.7,
    "p95ObjectiveMilliseconds": 20.0,
    "points": [
        {"requestsPerSecond": 20.0, "completedPerSecond": 20.0, "p95Milliseconds": 9.1},
        {"requestsPerSecond": 60.0, "completedPerSecond": 60.0, "p95Milliseconds": 14.2},
        {"requestsPerSecond": 100.0, "completedPerSecond": 97.0, "p95Milliseconds": 26.0},
    ],
}


def endpoint(**scaling: Any) -> dict[str, Any]:
    return {
        "apiVersion": "penstock.dev/v1alpha1",
        "kind": "ModelEndpoint",
        "metadata": {"name": "emotion"},
        "spec": {
            "model": "hf://org/model@main",
            "task": "text-classification",
            "objective": {"latency": {"p95Milliseconds": 20.0}},
            "scaling": {"minReplicas": 1, "maxReplicas": 6, **scaling},
        },
    }


class Scene:
    """A cluster with one endpoint that serves, and an operator."""

    def __init__(self, kubectl: Kubectl, kubeconfig: Path, pods: Fleet) -> None:
        self.kubectl = kubectl
        self.kubeconfig = kubeconfig
        self.fleet = pods
        self.now = time.time()
        self.load = 0.0
        """Requests per second."""
        self.seconds = 0.008
        """Duration of each request."""
        self.addresses: dict[str, str] = {}
        """Addresses of the serving pods, by name."""
        self.operator: Running
        self.autoscaler: Autoscaler
        self.wire: Tripwire

    @asynccontextmanager
    async def operating(self, **settings: Any) -> AsyncIterator[None]:
        """Start an operator with empty caches, and kill it at the end."""

        def trip(port: ClusterPort) -> ClusterPort:
            self.wire = Tripwire(port)
            return self.wire

        chosen = LoadSettings(**settings)
        settings_of_all = Settings(scaling=chosen)
        async with running(
            self.kubeconfig, self.kubectl.namespace, wrap=trip, settings=settings_of_all
        ) as self.operator:
            self.autoscaler = make_autoscaler(self.wire, self.operator.cache, chosen, pod_port=self.fleet.port)
            async with self.autoscaler:
                await self.operator.rest()
                yield

    async def optimised(self, **scaling: Any) -> None:
        """The endpoint has its plan, and its first pod serves."""
        await self.call(self.kubectl.apply, endpoint(**scaling))
        await self.operator.rest()
        pod = await self.call(kubelet.pod_of_job, self.kubectl)
        artefact = kubelet.artefact(self.kubectl.namespace)
        result = {**kubelet.RESULT, "capacity": CAPACITY}
        summary = Summary.model_validate({"succeeded": True, "artefact": artefact.to_object(), "result": result})
        await self.call(kubelet.finish, self.kubectl, pod, summary.to_message())
        await self.until(lambda: self.deployment is not None)
        await self.pods_serve()

    @property
    def deployment(self) -> Any:
        return self.operator.cache.deployments.facts(ObjectKey(self.kubectl.namespace, "emotion"))

    async def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        return await asyncio.to_thread(function, *arguments)

    async def until(self, condition: Callable[[], Any], *, within: float = 240.0) -> None:
        deadline = time.monotonic() + within
        while not condition():
            assert time.monotonic() < deadline, "the condition did not hold within the limit"
            await asyncio.sleep(0.05)

    async def pods_serve(self) -> None:
        """Act as the kubelet: as many pods as the Deployment wants run, are ready, and answer."""
        wanted = -1
        while wanted != self.deployment.wanted:  # something else may scale meanwhile
            wanted = self.deployment.wanted
            await self._pods_come()
        assert self.deployment.ready == wanted

    async def _pods_come(self) -> None:
        cache, key = self.operator.cache, ("endpoint", self.kubectl.namespace, "emotion")

        def there() -> list[str]:
            return [place.name for place, entry in cache.pods.of(key) if not entry.facts.deleting]

        await self.until(lambda: len(there()) == self.deployment.wanted)
        self.addresses = {name: address for name, address in self.addresses.items() if name in there()}
        for name in there():
            if name not in self.addresses:
                address = f"127.0.0.{len(self.fleet.pods) + 2}"
                await self.fleet.add(address)
                await self.call(self._run, name, address)
                self.addresses[name] = address
        await self.operator.rest()

    def _run(self, name: str, address: str) -> None:
        now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        state = {"running": {"startedAt": now}}
        container = {"name": CONTAINER, "image": "x", "imageID": "x", "ready": True, "restartCount": 0, "state": state}
        status = {
            "phase": "Running",
            "podIP": address,
            "podIPs": [{"ip": address}],
            "conditions": [{"type": "Ready", "status": "True", "lastTransitionTime": now}],
            "containerStatuses": [container],
        }
        patch = json.dumps({"status": status})
        self.kubectl("patch", "pod", name, "--subresource=status", "--type=merge", "-p", patch)

    async def passes(self, seconds: float) -> None:
        """Let time pass: requests arrive and are answered, and ticks run."""
        for _ in range(int(seconds / TICK)):
            self.now += TICK
            self.fleet.share(int(self.load * TICK), self.addresses.values(), seconds=self.seconds)
            await self.autoscaler.tick(self.now)
            await asyncio.sleep(0)

    async def settles(self, seconds: float) -> None:
        """The same, and start new replicas when they are requested."""
        for _ in range(int(seconds / TICK)):
            await self.passes(TICK)
            if self.operator.controller.queue.busy:
                await self.operator.rest()
                await self.pods_serve()

    async def found(self) -> dict[str, Any]:
        value: dict[str, Any] = await self.call(self.kubectl.get, "modelendpoint", "emotion")
        return value

    async def replicas(self) -> int:
        """The endpoint as the API server has it."""
        value = await self.call(self.kubectl.get, "deployment", "emotion")
        return int(value["spec"]["replicas"])

    async def condition(self) -> tuple[str, str, str]:
        value = await self.found()
        (one,) = [entry for entry in value["status"]["conditions"] if entry["type"] == "MetricsAvailable"]
        return one["status"], one["reason"], one["message"]


def played(kubectl: Kubectl, kubeconfig: Path, play: Callable[[Scene], Awaitable[None]]) -> None:
    """Play a scene."""

    async def whole() -> None:
        async with fleet() as pods:
            await play(Scene(kubectl, kubeconfig, pods))

    asyncio.run(whole())


def writers(kubectl: Kubectl) -> set[tuple[str, str]]:
    """The owners of the number of replicas: manager and subresource."""
    shown = kubectl("get", "deployment", "emotion", "-o", "json", "--show-managed-fields")
    return {
        (entry["manager"], entry.get("subresource", ""))
        for entry in json.loads(shown)["metadata"]["managedFields"]
        if "f:replicas" in entry.get("fieldsV1", {}).get("f:spec", {})
    }
