"""The autoscaler in an operator on a real API server, over pods that serve the runtime's metrics by real HTTP.

Time is an argument of a tick, so that minutes of load take as long as their HTTP requests.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock_operator.collectors import scaling_metrics
from testbed.cluster import Cluster
from testbed.kubectl import Kubectl
from tests.operator.scaling.scene import Scene, endpoint, played, writers


@pytest.mark.slow
def test_replicas_follow_the_load_with_one_writer_and_events_have_the_reason(
    classes: Cluster, kubectl: Kubectl, kubeconfig: Path
) -> None:
    async def play(scene: Scene) -> None:
        async with scene.operating():
            await scene.optimised()
            scene.load = 40
            await scene.settles(150)
            assert await scene.replicas() == 1
            assert (await scene.condition())[:2] == ("True", "Read")

            scene.load = 150
            await scene.settles(30)
            assert await scene.replicas() >= 3, "150 requests/s over 79.7 per replica, with a quarter as headroom"
            await scene.settles(240)
            assert await scene.replicas() == 3
            assert await scene.call(writers, kubectl) == {("penstock-operator", "")}
            scaling = (await scene.found())["status"]["scaling"]
            assert scaling["desired"] == 3
            assert "requests/s" in scaling["reason"]
            assert scaling["capacityPerReplica"] == 79.7

            # A steady load: the ticks write nothing.
            await scene.settles(180)
            before = list(scene.wire.writes)
            await scene.settles(300)
            assert scene.wire.writes == before

            # A number that another program writes is corrected.
            generation = scene.deployment.generation
            await scene.call(lambda: kubectl("scale", "deployment/emotion", "--replicas=1"))
            await scene.until(lambda: scene.deployment.generation == generation + 2)
            assert scene.deployment.wanted == 3
            assert await scene.call(writers, kubectl) == {("penstock-operator", "")}
            await scene.pods_serve()

            scene.load = 10
            await scene.settles(45)
            assert await scene.replicas() == 3, "no scale-down before the end of the window"
            await scene.settles(480)
            assert await scene.replicas() == 1

        events = [
            (event["reason"], event["note"])
            for event in await scene.call(kubectl.items, "events.events.k8s.io")
            if event["reason"].startswith("Scaled")
        ]
        ups = [note for reason, note in events if reason == "ScaledUp"]
        assert ups
        assert all("up from" in note and "requests/s" in note for note in ups)
        assert any(reason == "ScaledDown" for reason, _ in events)

    played(kubectl, kubeconfig, play)


@pytest.mark.slow
def test_without_metrics_the_number_stays(classes: Cluster, kubectl: Kubectl, kubeconfig: Path) -> None:
    async def play(scene: Scene) -> None:
        async with scene.operating():
            await scene.optimised()
            scene.load = 150
            await scene.settles(300)
            assert await scene.replicas() == 3

            for pod in scene.fleet.pods.values():
                pod.status = 503
            await scene.settles(900)
            assert await scene.replicas() == 3
            status, reason, message = await scene.condition()
            assert (status, reason) == ("False", "MetricsMissing")
            assert "answers 503" in message

            for pod in scene.fleet.pods.values():
                pod.status = 200
            await scene.settles(60)
            assert (await scene.condition())[:2] == ("True", "Read")

    played(kubectl, kubeconfig, play)


@pytest.mark.slow
def test_the_count_survives_the_change_to_an_hpa_and_the_scaler_owns_it(
    classes: Cluster, kubectl: Kubectl, kubeconfig: Path
) -> None:
    async def play(scene: Scene) -> None:
        async with scene.operating():
            await scene.optimised(minReplicas=2)
            scene.load = 100
            await scene.settles(60)
            assert await scene.replicas() == 2

            await scene.call(kubectl.apply, endpoint(mode="HPA", maxReplicas=6))
            await scene.settles(60)
            assert await scene.replicas() == 2, "without a handover the number would fall back to the default of 1"

            # As an HPA does.
            await scene.call(lambda: kubectl("scale", "deployment/emotion", "--replicas=4"))
            await scene.until(lambda: scene.deployment.wanted == 4)
            await scene.operator.rest()
            await scene.pods_serve()
            await scene.settles(60)
            assert await scene.replicas() == 4
            assert await scene.call(writers, kubectl) == {("kubectl", "scale")}
            scaler = await scene.call(kubectl.get, "horizontalpodautoscaler", "emotion")
            assert scaler["spec"]["behavior"]["scaleUp"]["stabilizationWindowSeconds"] == 0
            families = {family.name: family for family in scaling_metrics(scene.autoscaler.decisions())}
            (desired,) = families["penstock_operator_desired_replicas"].samples
            assert desired.labels == {"model_endpoint": "emotion", "model_endpoint_namespace": kubectl.namespace}
            status = (await scene.found())["status"]["scaling"]
            assert status["desired"] == desired.value

            # The operator takes over the number that another program wrote, and removes that program as its owner.
            await scene.call(lambda: kubectl("scale", "modelendpoint/emotion", "--replicas=4"))
            await scene.call(kubectl.apply, endpoint(mode="External"))
            await scene.until(lambda: scene.deployment.replicas_ours_alone)
            await scene.operator.rest()
            assert scene.deployment.wanted == 4
            assert await scene.call(writers, kubectl) == {("penstock-operator", "")}

            await scene.call(lambda: kubectl("scale", "modelendpoint/emotion", "--replicas=3"))
            await scene.until(lambda: scene.deployment.wanted == 3)
            await scene.operator.rest()
            assert await scene.call(writers, kubectl) == {("penstock-operator", "")}
            assert await scene.call(kubectl.items, "horizontalpodautoscalers") == []
            await scene.autoscaler.tick(scene.now)
            assert scene.autoscaler.decisions() == {}

    played(kubectl, kubeconfig, play)
