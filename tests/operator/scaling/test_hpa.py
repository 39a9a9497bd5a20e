"""A real HorizontalPodAutoscaler over a real external metrics API scales to the operator's number, as the only writer.

The controller is kube-controller-manager's; from the operator's decision to its reading every program is a real one
(tests/operator/scaling/telemetry.py).
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Gauge

from penstock_operator.cluster.api import MODEL_ENDPOINT
from penstock_operator.decide import Decision
from testbed.aggregated import ROUTING_OFF
from testbed.cluster import Cluster
from testbed.control_plane import ControlPlane, running_control_plane
from testbed.fixtures import install_crds
from testbed.kubectl import Kubectl
from testbed.tools import EXTERNAL_METRICS, PROMETHEUS_ADAPTER, Tool
from tests.operator.scaling.prometheus_server import Server
from tests.operator.scaling.scene import TICK, Scene, endpoint, played
from tests.operator.scaling.telemetry import external_metrics, registry_of, scraped
from tests.operator.scaling.writers import HPA, OPERATOR, chronicle

WITHIN_SECONDS = 240.0
"""Enough for a scrape, a query and a sync of the controller: some three seconds on a quiet machine."""
PAUSE_SECONDS = 0.2
"""Between two reads of state that has no watch."""
QUICK = {**ROUTING_OFF, "kube-controller-manager": ("--horizontal-pod-autoscaler-sync-period=1s",)}
EXACT = {
    "kube-apiserver": (*QUICK["kube-apiserver"], "--feature-gates=HPAConfigurableTolerance=true"),
    "kube-controller-manager": (
        *QUICK["kube-controller-manager"],
        "--feature-gates=HPAConfigurableTolerance=true",
    ),
}

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


PLAIN, TOLERANT = "as Kubernetes 1.34 is", "with HPAConfigurableTolerance"


@pytest.fixture(scope="module")
def plane(request: pytest.FixtureRequest) -> Iterator[ControlPlane]:
    """A control plane whose HPA controller syncs every second."""
    with running_control_plane(extra=EXACT if request.param == TOLERANT else QUICK) as plane:
        install_crds(Cluster(plane.kubeconfig, plane.kubectl))
        any_class = {"apiVersion": "penstock.dev/v1alpha1", "kind": "HardwareClass"}
        plane.kubectl.apply({**any_class, "metadata": {"name": "any"}, "spec": {}})
        yield plane


@pytest.fixture
def kubectl(plane: ControlPlane) -> Iterator[Kubectl]:
    with Cluster(plane.kubeconfig, plane.kubectl).temporary_namespace() as name:
        yield plane.kubectl.within(name)


@asynccontextmanager
async def metrics_served(
    scene: Scene, plane: ControlPlane, folder: Path, tool: Tool = EXTERNAL_METRICS
) -> AsyncIterator[Server]:
    """The operator's decisions are on external.metrics.k8s.io."""
    registry = registry_of(scene.autoscaler.decisions)
    async with scraped(registry, folder) as prometheus, external_metrics(plane, prometheus, tool=tool):
        yield prometheus


async def followed(scene: Scene, number: int) -> None:
    """Wait until any program has scaled the Deployment to the number, and start its pods, at an unchanged clock."""
    await scene.until(lambda: scene.deployment.wanted == number, within=WITHIN_SECONDS)
    await scene.operator.rest()
    await scene.pods_serve()


async def decided(scene: Scene, number: int, *, seconds: float = 900.0) -> None:
    """Let the autoscaler's time pass until it decides on the number, with an unchanged number of replicas."""
    for _ in range(int(seconds / TICK)):
        await scene.passes(TICK)
        if decision(scene).replicas == number:
            return
    raise AssertionError(f"not {number}: {decision(scene)}")


async def scaled(scene: Scene, number: int, *, seconds: float = 900.0) -> None:
    """The same, with the HPA following each step."""
    for _ in range(int(seconds / TICK)):
        await scene.passes(TICK)
        step = decision(scene).replicas
        if step != scene.deployment.wanted:
            await followed(scene, step)
        if step == number:
            return
    raise AssertionError(f"not {number}: {decision(scene)}")


def decision(scene: Scene) -> Decision:
    (found,) = scene.autoscaler.decisions().values()
    return found


async def wait_for_reason(scene: Scene, reason: str) -> str:
    """Wait until MetricsAvailable has this reason, and return the message."""
    deadline = time.monotonic() + WITHIN_SECONDS
    while True:
        await scene.autoscaler.tick(scene.now)
        found = await scene.condition()
        if found[1] == reason:
            return found[2]
        assert time.monotonic() < deadline, f"expected the reason {reason}, found {found}"
        await asyncio.sleep(PAUSE_SECONDS)


async def hpa(scene: Scene) -> dict[str, Any]:
    value: dict[str, Any] = await scene.call(scene.kubectl.get, "horizontalpodautoscaler", "emotion")
    return value


@pytest.mark.parametrize(
    ("plane", "tool"),
    [
        (PLAIN, EXTERNAL_METRICS),
        pytest.param(PLAIN, PROMETHEUS_ADAPTER, marks=[pytest.mark.extended, pytest.mark.timeout(1800)]),
        pytest.param(TOLERANT, EXTERNAL_METRICS, marks=pytest.mark.extended),
    ],
    indirect=["plane"],
)
def test_an_hpa_follows_the_decision_as_the_only_writer_and_keeps_the_number_without_metrics(
    plane: ControlPlane, tool: Tool, kubectl: Kubectl, tmp_path: Path
) -> None:
    async def play(scene: Scene) -> None:
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(scene.operating())
            await scene.optimised(maxReplicas=4)
            prometheus = await stack.enter_async_context(metrics_served(scene, plane, tmp_path, tool))
            history = await stack.enter_async_context(chronicle(scene.wire, kubectl.namespace))
            scene.load = 100
            await scene.settles(240)
            assert await scene.replicas() == 2
            assert set(history.writers) == {frozenset({OPERATOR})}

            await scene.call(kubectl.apply, endpoint(mode="HPA", maxReplicas=4))
            await wait_for_reason(scene, "Read")
            scene.load = 200
            await scaled(scene, 4)
            scene.load = 10
            await scaled(scene, 1)
            assert history.writers == [frozenset({OPERATOR}), frozenset({HPA})]

            prometheus.kill()
            message = await wait_for_reason(scene, "ScalerFails")
            assert "FailedGetExternalMetric" in message
            assert "external.metrics.k8s.io" in message
            scene.load = 200
            await decided(scene, 4)
            assert await wait_for_reason(scene, "ScalerFails")
            assert await scene.replicas() == 1
            assert history.writers[-1] == {HPA}

            await scene.call(kubectl.apply, endpoint(mode="Internal", maxReplicas=4))
            await followed(scene, 4)
            assert await wait_for_reason(scene, "Read")
            assert await scene.call(kubectl.items, "horizontalpodautoscalers") == []
            assert history.writers == [frozenset({OPERATOR}), frozenset({HPA}), frozenset({OPERATOR})]
            # During the changes of mode the number only took decided values.
            first, second, *down, last = history.numbers[history.numbers.index(2) :]
            assert (first, second, down, last) == (2, 4, sorted(down, reverse=True), 4)

    played(kubectl, plane.kubeconfig, play)


CONTROL: dict[str, Any] = {
    "apiVersion": "apps/v1",
    "kind": "Deployment",
    "metadata": {"name": "control"},
    "spec": {
        "replicas": 10,
        "selector": {"matchLabels": {"app": "control"}},
        "template": {
            "metadata": {"labels": {"app": "control"}},
            "spec": {"containers": [{"name": "none", "image": "localhost/none:1"}]},
        },
    },
}


def hpa_over(metric: dict[str, Any], average: str, target: dict[str, Any]) -> dict[str, Any]:
    """An HPA as a user would write it: with the tolerance of 10 %."""
    wanted = {"type": "AverageValue", "averageValue": average}
    return {
        "apiVersion": "autoscaling/v2",
        "kind": "HorizontalPodAutoscaler",
        "metadata": {"name": "control"},
        "spec": {
            "scaleTargetRef": target,
            "minReplicas": 1,
            "maxReplicas": 20,
            "metrics": [{"type": "External", "external": {"metric": metric, "target": wanted}}],
        },
    }


def plain_hpa(namespace: str) -> dict[str, Any]:
    """An HPA over the operator's number, for another Deployment."""
    labels = {"model_endpoint": "emotion", "model_endpoint_namespace": namespace}
    metric = {"name": "penstock_operator_desired_replicas", "selector": {"matchLabels": labels}}
    return hpa_over(metric, "1", {"apiVersion": "apps/v1", "kind": "Deployment", "name": "control"})


# With the feature gate it takes another control plane, and the operator behaves the same.
@pytest.mark.parametrize("plane", [PLAIN, pytest.param(TOLERANT, marks=pytest.mark.extended)], indirect=True)
def test_an_hpa_scales_from_ten_to_eleven_in_spite_of_its_tolerance_of_ten_percent(
    plane: ControlPlane, kubectl: Kubectl, tmp_path: Path
) -> None:
    async def play(scene: Scene) -> None:
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(scene.operating())
            await scene.optimised(minReplicas=10, maxReplicas=11)
            await stack.enter_async_context(metrics_served(scene, plane, tmp_path))
            assert await scene.replicas() == 10
            await scene.call(kubectl.apply, endpoint(mode="HPA", minReplicas=10, maxReplicas=11))
            await scene.passes(120)
            await wait_for_reason(scene, "Read")
            await scene.call(kubectl.apply, CONTROL, plain_hpa(kubectl.namespace))
            history = await stack.enter_async_context(chronicle(scene.wire, kubectl.namespace))

            scene.load = 640
            await scaled(scene, 11)

            bounds = (await hpa(scene))["spec"]
            exact = "tolerance" in bounds["behavior"]["scaleUp"]
            assert (bounds["minReplicas"], bounds["maxReplicas"]) == ((10, 11) if exact else (11, 11))
            await saw(scene, "11")
            control = await scene.call(kubectl.get, "deployment", "control")
            assert control["spec"]["replicas"] == 10, "the tolerance of a plain HPA, which the operator's HPA avoids"

            scene.load = 100
            await scaled(scene, 10)
            assert history.numbers == [10, 11, 10]
            assert history.writers[-1] == {HPA}

    async def saw(scene: Scene, value: str) -> None:
        """Wait until the plain HPA has read the value and kept ten replicas."""
        deadline = time.monotonic() + WITHIN_SECONDS
        while True:
            status = (await scene.call(kubectl.get, "horizontalpodautoscaler", "control")).get("status") or {}
            if _read(status) == value and status.get("desiredReplicas") == 10:
                return
            assert time.monotonic() < deadline, f"the plain HPA has not read {value}: {status}"
            await asyncio.sleep(PAUSE_SECONDS)

    played(kubectl, plane.kubeconfig, play)


def _read(status: dict[str, Any]) -> str:
    """The whole number behind an average of an HPA over ten replicas."""
    for metric in status.get("currentMetrics") or []:
        if "external" not in metric:  # it has not read a metric yet
            continue
        average = metric["external"]["current"]["averageValue"]
        return f"{round(10 * (int(average[:-1]) / 1000 if average.endswith('m') else int(average)))}"
    return ""


@pytest.mark.parametrize("plane", [PLAIN], indirect=True)
def test_a_users_hpa_scales_the_endpoint_and_the_operator_writes_the_deployment(
    plane: ControlPlane, kubectl: Kubectl, tmp_path: Path
) -> None:
    async def play(scene: Scene) -> None:
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(scene.operating())
            await scene.optimised(mode="External")
            # The API server follows the owners of a number only from the first apply.
            applied = endpoint(mode="External")
            applied["spec"]["replicas"] = 1
            await scene.call(kubectl.apply, applied)
            # The user scales by a metric of their own.
            registry = CollectorRegistry()
            waiting = Gauge("shop_orders_waiting", "Orders", ["namespace"], registry=registry)
            waiting.labels(kubectl.namespace).set(55)
            prometheus = await stack.enter_async_context(scraped(registry, tmp_path))
            rule = {"seriesQuery": "shop_orders_waiting", "metricsQuery": "sum(<<.Series>>{<<.LabelMatchers>>})"}
            resources = {"overrides": {"namespace": {"resource": "namespace"}}}
            rules = {"externalRules": [{**rule, "resources": resources}]}
            await stack.enter_async_context(external_metrics(plane, prometheus, configuration=json.dumps(rules)))
            deployments = await stack.enter_async_context(chronicle(scene.wire, kubectl.namespace))
            endpoints = await stack.enter_async_context(chronicle(scene.wire, kubectl.namespace, kind=MODEL_ENDPOINT))
            target = {"apiVersion": "penstock.dev/v1alpha1", "kind": "ModelEndpoint", "name": "emotion"}
            users = hpa_over({"name": "shop_orders_waiting"}, "20", target)

            await scene.call(kubectl.apply, users)
            await followed(scene, 3)
            status = (await scene.call(kubectl.get, "horizontalpodautoscaler", "control"))["status"]
            assert {one["type"]: one["status"] for one in status["conditions"]}["AbleToScale"] == "True"
            assert endpoints.writers == [frozenset({("kubectl", "")}), frozenset({HPA})]
            assert (await scene.found())["status"]["replicas"] == 3

            await scene.call(lambda: kubectl("delete", "horizontalpodautoscaler", "control"))
            await scene.call(lambda: kubectl("scale", "modelendpoint/emotion", "--replicas=2"))
            await followed(scene, 2)
            assert endpoints.writers[-1] == {("kubectl", "scale")}
            assert set(deployments.writers) == {frozenset({OPERATOR})}
            assert deployments.numbers[-2:] == [3, 2]
            assert scene.autoscaler.decisions() == {}

    played(kubectl, plane.kubeconfig, play)
