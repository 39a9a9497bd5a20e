"""Canaries in an operator on a real API server: the Deployment controller makes the pods, and serves their metrics."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from penstock_operator.cluster.store import ObjectKey
from penstock_operator.facts.names import CANARY_PERCENT
from penstock_operator.scaling.canaries import CanaryLoop
from penstock_operator.scaling.read.scrape import PodScraper
from testbed.cluster import Cluster
from testbed.kubectl import Kubectl
from tests.operator.scaling.pods import ServingPod
from tests.operator.scaling.scene import Scene, played

CANARY = "emotion-canary"
TICK = 6.0


class CanaryScene:
    """One endpoint whose new pods get a tenth of the requests for a minute."""

    def __init__(self, scene: Scene, loop: CanaryLoop) -> None:
        self.scene, self.loop = scene, loop
        self.now = 0.0

    async def patch(self, **spec: Any) -> None:
        value = json.dumps({"spec": spec})
        await self.scene.call(
            lambda: self.scene.kubectl("patch", "modelendpoint", "emotion", "--type=merge", "-p", value)
        )

    def pods_of(self, deployment: str) -> list[str]:
        cache, namespace = self.scene.operator.cache, self.scene.kubectl.namespace
        names = {"endpoint": "emotion", "gateway": "emotion"}
        found = [name for kind in names for name in cache.pods.of((kind, namespace, "emotion"))]
        return sorted({place.name for place, _ in found if place.name.startswith(f"{deployment}-")})

    def serving_templates(self) -> set[str]:
        """Of the ReplicaSets of the endpoint's Deployment that have pods."""
        cache, key = self.scene.operator.cache, ObjectKey(self.scene.kubectl.namespace, "emotion")
        present = cache.deployments.get(key)
        sets = [entry.facts for _, entry in cache.replica_sets.of(("endpoint", *key))]
        return {one.template for one in sets if present and one.owner.uid == present.uid and one.wanted}

    async def after_sleep(self) -> set[str]:
        """The endpoint sleeps and wakes: the templates that serve then."""
        for replicas in (0, 1):
            await self.patch(replicas=replicas)
            await self.scene.until(lambda: bool(self.serving_templates()) is bool(replicas))  # noqa: B023 - awaited here
            await self.scene.operator.rest()
        return self.serving_templates()

    async def serve(self, deployment: str, count: int) -> list[ServingPod]:
        """The pods of a Deployment run and are ready."""
        await self.scene.until(lambda: len(self.pods_of(deployment)) == count)
        made = []
        for name in self.pods_of(deployment):
            address = f"127.0.0.{len(self.scene.fleet.pods) + 2}"
            made.append(await self.scene.fleet.add(address))
            await self.scene.call(self.scene._run, name, address)
        await self.scene.operator.rest()
        return made

    async def status(self) -> dict[str, Any]:
        found: dict[str, Any] = (await self.scene.found())["status"]
        return found

    async def progress(self) -> tuple[str, str]:
        conditions = (await self.status())["conditions"]
        (one,) = [entry for entry in conditions if entry["type"] == "Progressing"]
        return one["status"], one["reason"]

    async def runs(self, present: ServingPod, new: ServingPod, *, errors: int = 0) -> None:
        """A minute and more of requests, with a look after each tenth."""
        for _ in range(12):
            await self.loop.tick(self.now)
            self.now += TICK
            present.answer(450)
            new.answer(50 - errors)
            for _ in range(errors):
                new.metrics.finished("/predict", 500, 0.01, inference=True)
        await self.loop.tick(self.now)
        await self.scene.operator.rest()


@pytest.mark.slow
def test_a_canary_passes_and_the_next_one_that_has_errors_is_rejected(
    classes: Cluster, kubectl: Kubectl, kubeconfig: Path
) -> None:
    async def play(scene: Scene) -> None:
        async with scene.operating():
            scraper = PodScraper(timeout_seconds=5, concurrency=4, port=scene.fleet.port)
            canary = CanaryScene(scene, CanaryLoop(scene.operator.cache, scraper, interval_seconds=1))
            await scene.optimised(mode="None")
            await canary.patch(rollout={"canary": {"percent": 10, "minutes": 1}})
            await canary.serve("emotion-gateway", 2)
            (present,) = (scene.fleet.pods[next(iter(scene.addresses.values()))],)
            gateway = ObjectKey(kubectl.namespace, "emotion-gateway")
            cache = scene.operator.cache
            await scene.until(lambda: (found := cache.deployments.facts(gateway)) and found.available == 2)

            await canary.patch(pod={"memory": "700Mi"})
            (new,) = await canary.serve(CANARY, 1)
            assert await canary.progress() == ("True", "CanaryRunning")
            slices = await scene.call(kubectl.items, "endpointslices", "kubernetes.io/service-name=emotion-pods")
            assert [one["metadata"]["labels"].get(CANARY_PERCENT) for one in slices] == ["10"]
            async with scraper:
                await canary.runs(present, new)
                status = await canary.status()
                assert (status["canary"]["phase"], status["canary"]["reason"]) == ("Passed", "NotWorse")
                assert status["canary"]["requests"] >= 500
                await scene.until(lambda: not canary.pods_of(CANARY))
                # The Deployment controller replaces the pods.
                await scene.until(lambda: len(canary.pods_of("emotion")) >= 4)
                before = set(scene.addresses)
                (name,) = [name for name in canary.pods_of("emotion") if "gateway" not in name and name not in before]
                address = f"127.0.0.{len(scene.fleet.pods) + 2}"
                present = await scene.fleet.add(address)
                await scene.call(scene._run, name, address)
                await scene.until(
                    lambda: name in canary.pods_of("emotion") and not before & set(canary.pods_of("emotion"))
                )
                await scene.operator.rest()
                assert await canary.progress() == ("False", "Settled")

                # Back to the first plan, whose ReplicaSet still exists.
                serving = canary.serving_templates()
                await canary.patch(pod={"memory": None})
                (new,) = await canary.serve(CANARY, 1)
                await canary.runs(present, new, errors=5)
                await scene.until(lambda: not canary.pods_of(CANARY))
                await canary.loop.tick(canary.now)
                await scene.operator.rest()
            assert await canary.progress() == ("False", "CanaryRejected")
            rejected = (await canary.status())["canary"]
            assert (rejected["phase"], rejected["reason"]) == ("Rejected", "MoreErrors")
            assert [one for one in canary.pods_of("emotion") if "gateway" not in one] == [name]
            # The rejected plan does not come back when the endpoint wakes.
            assert await canary.after_sleep() == serving
            assert await canary.progress() == ("False", "CanaryRejected")
        events = {event["reason"] for event in await scene.call(kubectl.items, "events.events.k8s.io")}
        assert {"CanaryRunning", "CanaryPassed", "CanaryRejected"} <= events

    played(kubectl, kubeconfig, play)
