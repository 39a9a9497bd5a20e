"""A real KEDA scales by the operator's number: its operator and its metrics server, built from their Go module.

Real time passes here: KEDA and Prometheus have no other clock.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Self

import pytest

from penstock_operator.cluster.store import ObjectKey
from penstock_operator.decide import Decision
from testbed import keda
from testbed.aggregated import ROUTING_OFF
from testbed.cluster import Cluster
from testbed.control_plane import ControlPlane, running_control_plane
from testbed.fixtures import install_crds
from testbed.kubectl import Kubectl
from tests.operator.scaling.prometheus_server import Server
from tests.operator.scaling.scene import Scene, endpoint, played
from tests.operator.scaling.telemetry import registry_of, scraped
from tests.operator.scaling.test_discovery import discovery
from tests.operator.scaling.writers import HPA, OPERATOR, Chronicle, chronicle

WITHIN_SECONDS = 300.0
QUICK = {**ROUTING_OFF, "kube-controller-manager": ("--horizontal-pod-autoscaler-sync-period=1s",)}

pytestmark = [pytest.mark.extended, pytest.mark.slow, pytest.mark.timeout(2400)]


@pytest.fixture(scope="module")
def plane() -> Iterator[ControlPlane]:
    """A control plane with KEDA."""
    with running_control_plane(extra=QUICK) as plane:
        install_crds(Cluster(plane.kubeconfig, plane.kubectl))
        keda.install_definitions(plane.kubectl)
        any_class = {"apiVersion": "penstock.dev/v1alpha1", "kind": "HardwareClass"}
        plane.kubectl.apply({**any_class, "metadata": {"name": "any"}, "spec": {}})
        with keda.running_keda(plane):
            yield plane


@pytest.fixture
def kubectl(plane: ControlPlane) -> Iterator[Kubectl]:
    with Cluster(plane.kubeconfig, plane.kubectl).temporary_namespace() as name:
        yield plane.kubectl.within(name)


class Stage:
    """A scene with a Prometheus that scrapes its operator and its pods."""

    def __init__(self, scene: Scene, folder: Path) -> None:
        self.scene = scene
        self._folder = folder
        self.prometheus: Server
        self.history: Chronicle
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        scene, namespace = self.scene, self.scene.kubectl.namespace
        pods = discovery(scene.kubeconfig, namespace, scene.fleet.port)
        self.prometheus = await self._stack.enter_async_context(
            scraped(registry_of(self._decisions), self._folder, others=[pods])
        )
        await self._stack.enter_async_context(
            scene.operating(keda=True, prometheus_url=self.prometheus.url, prometheus_interval_seconds=1.0)
        )
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._stack.aclose()

    async def follow(self) -> None:
        """Record the writers of the number from now on."""
        self.history = await self._stack.enter_async_context(chronicle(self.scene.wire, self.scene.kubectl.namespace))

    def _decisions(self) -> Mapping[ObjectKey, Decision]:
        autoscaler = getattr(self.scene, "autoscaler", None)
        return {} if autoscaler is None else autoscaler.decisions()

    async def until(self, condition: Callable[[], bool], *, load: int, what: str) -> None:
        """Apply `load` requests/s until the condition holds; pods start as they are requested."""
        scene = self.scene
        deadline = time.monotonic() + WITHIN_SECONDS
        while not condition():
            assert time.monotonic() < deadline, f"{what}: {self._decisions()}, {await scene.condition()}"
            scene.fleet.share(load, scene.addresses.values())
            await asyncio.sleep(1)
            scene.now = time.time()
            await scene.autoscaler.tick(scene.now)
            if scene.operator.controller.queue.busy or scene.deployment.wanted != len(scene.addresses):
                await scene.pods_serve()

    async def scaled(self, number: int, *, load: int) -> None:
        """Wait until the Deployment asks for `number` replicas."""
        await self.until(lambda: self.scene.deployment.wanted == number, load=load, what=f"not {number} replicas")

    async def wait_for_reason(self, reason: str) -> None:
        """Wait until MetricsAvailable has this reason."""
        async with asyncio.timeout(WITHIN_SECONDS):
            while (await self.scene.condition())[1] != reason:
                await self.scene.autoscaler.tick(time.time())
                await asyncio.sleep(0.5)


def test_keda_follows_the_decision_as_the_only_writer_and_stops_when_the_mode_changes(
    plane: ControlPlane, kubectl: Kubectl, tmp_path: Path
) -> None:
    async def play(scene: Scene) -> None:
        async with Stage(scene, tmp_path) as stage:
            await scene.optimised(maxReplicas=3)
            await stage.follow()
            await scene.call(kubectl.apply, endpoint(mode="KEDA", maxReplicas=3))

            await stage.scaled(3, load=150)
            hpas = await scene.call(kubectl.items, "horizontalpodautoscalers")
            assert [one["metadata"]["name"] for one in hpas] == ["keda-hpa-emotion"]
            assert stage.history.writers == [frozenset({OPERATOR}), frozenset({HPA})]
            await stage.wait_for_reason("Read")
            # One step down is enough: the test waits for the window in real time.
            await stage.scaled(2, load=10)

            stage.prometheus.kill()
            await stage.wait_for_reason("MetricsMissing")
            assert await scene.replicas() == 2
            assert stage.history.writers[-1] == {HPA}

            before = len(stage.history.seen)
            await scene.call(kubectl.apply, endpoint(mode="Internal", minReplicas=2, maxReplicas=2))
            await scene.until(lambda: stage.history.writers[-1] == {OPERATOR}, within=WITHIN_SECONDS)
            assert await scene.call(kubectl.items, "scaledobjects") == []
            assert await scene.call(kubectl.items, "horizontalpodautoscalers") == []
            assert {number for number, _ in stage.history.seen[before:]} == {2}
            assert all(len(writers) == 1 for writers in stage.history.writers)

    played(kubectl, plane.kubeconfig, play)


def test_keda_scales_from_ten_to_eleven_in_spite_of_the_tolerance_of_ten_percent(
    plane: ControlPlane, kubectl: Kubectl, tmp_path: Path
) -> None:
    async def play(scene: Scene) -> None:
        async with Stage(scene, tmp_path) as stage:
            await scene.optimised(minReplicas=10, maxReplicas=11)
            await stage.follow()
            assert await scene.replicas() == 10
            await scene.call(kubectl.apply, endpoint(mode="KEDA", minReplicas=10, maxReplicas=11))

            await stage.scaled(11, load=640)
            await stage.scaled(10, load=100)

            assert stage.history.numbers == [10, 11, 10]
            assert stage.history.writers == [frozenset({OPERATOR}), frozenset({HPA})]

    played(kubectl, plane.kubeconfig, play)
