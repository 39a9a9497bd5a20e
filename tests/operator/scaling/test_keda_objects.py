"""A real API server with KEDA's definitions accepts the ScaledObject; and the behaviour without KEDA."""

from __future__ import annotations

import json
from typing import Any

import pytest

from penstock_operator.endpoint.objects.scalers import HpaBounds, scaled_object
from penstock_operator.endpoint.spec import ParsedEndpoint
from testbed import keda
from testbed.cluster import Cluster
from testbed.control_plane import ControlPlane
from testbed.fixtures import install_crds
from testbed.kubectl import Kubectl, KubectlError
from tests.operator.scaling.scene import Scene, endpoint, played

WITHIN_SECONDS = 240.0
PROMETHEUS = "http://127.0.0.1:9"


@pytest.fixture(scope="module")
def plane(private_control_plane: ControlPlane) -> ControlPlane:
    """At first without KEDA."""
    install_crds(Cluster(private_control_plane.kubeconfig, private_control_plane.kubectl))
    any_class = {"apiVersion": "penstock.dev/v1alpha1", "kind": "HardwareClass"}
    private_control_plane.kubectl.apply({**any_class, "metadata": {"name": "any"}, "spec": {}})
    return private_control_plane


@pytest.fixture
def kubectl(plane: ControlPlane) -> Any:
    with Cluster(plane.kubeconfig, plane.kubectl).temporary_namespace() as name:
        yield plane.kubectl.within(name)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_keda_may_be_installed_later_and_accepts_the_scaled_object(plane: ControlPlane, kubectl: Kubectl) -> None:
    async def play(scene: Scene) -> None:
        async with scene.operating(keda=True, prometheus_url=PROMETHEUS):
            await scene.optimised(mode="KEDA", minReplicas=2, maxReplicas=9)
            status, reason, message = await scene.condition()
            assert (status, reason) == ("False", "NoKeda")
            assert "install KEDA" in message
            assert (await scene.found())["status"]["reason"] != "ApplyFailed"

            await scene.call(keda.install_definitions, kubectl)
            await scene.until(lambda: len(scene.operator.cache.scaled_objects) == 1, within=WITHIN_SECONDS)
            found = await scene.call(kubectl.get, "scaledobject", "emotion")
            assert found["spec"]["minReplicaCount"] == 2
            assert found["spec"]["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]["scaleUp"]["tolerance"] == "0"
            assert await undropped(scene, found)

            await scene.call(kubectl.apply, endpoint(mode="Internal"))
            await scene.until(lambda: not len(scene.operator.cache.scaled_objects))

            await scene.call(kubectl.apply, endpoint(mode="KEDA"))
            await scene.until(lambda: len(scene.operator.cache.scaled_objects) == 1)
            await scene.call(keda.remove_definitions, kubectl)
            await scene.until(lambda: not scene.operator.cache.scaled_objects.served, within=WITHIN_SECONDS)
            await scene.operator.rest()
            assert (await scene.condition())[1] == "NoKeda"
            assert await scene.replicas() == 1

    async def undropped(scene: Scene, found: dict[str, Any]) -> bool:
        """Whether the API server has kept every field that was written."""
        made = ParsedEndpoint.from_object(await scene.found())
        wanted = scaled_object(made, PROMETHEUS, HpaBounds(2, 9))["spec"]
        return bool(contains(found["spec"], wanted))

    played(kubectl, plane.kubeconfig, play)


def contains(found: Any, wanted: Any) -> bool:
    if isinstance(wanted, dict):
        return isinstance(found, dict) and all(contains(found.get(key), value) for key, value in wanted.items())
    if isinstance(wanted, list):
        return len(found) == len(wanted) and all(map(contains, found, wanted))
    return bool(found == wanted)


@pytest.mark.slow
def test_kedas_definition_refuses_a_scaled_object_with_a_mistake(plane: ControlPlane, kubectl: Kubectl) -> None:
    keda.install_definitions(kubectl)
    value = ParsedEndpoint.from_object({**endpoint(mode="KEDA"), "metadata": {"name": "emotion", "uid": "u"}})
    made = json.loads(json.dumps(scaled_object(value, PROMETHEUS, HpaBounds(1, 4))))
    made["metadata"] = {"name": "emotion"}
    kubectl("apply", "--server-side", "--dry-run=server", "--filename", "-", text=json.dumps(made))
    made["spec"]["triggers"][0]["metadata"]["threshold"] = 1

    with pytest.raises(KubectlError, match="threshold"):
        kubectl("apply", "--server-side", "--dry-run=server", "--filename", "-", text=json.dumps(made))
