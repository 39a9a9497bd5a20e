"""A tick over what the caches hold: who is looked at, where the load is read, and which Secrets are."""

from __future__ import annotations

import asyncio
import base64
from typing import Any, cast

import pytest

from penstock_operator.cluster.errors import ClusterError, Forbidden, Unavailable
from penstock_operator.cluster.port import ClusterPort
from penstock_operator.cluster.store import Key
from penstock_operator.plan import names
from penstock_operator.plan.observed import Scale
from penstock_operator.process import make_autoscaler
from penstock_operator.scaling.loop import Autoscaler
from penstock_operator.settings import ScalingSettings, Settings
from penstock_operator.watch.cluster_cache import World
from tests.operator import objects
from tests.operator.scaling.pods import fleet

START = 1_700_000_000.0
PROMETHEUS = {"url": "http://127.0.0.1:9", "secretName": "access"}
"""Nobody listens on that port."""


class Secrets:
    """A cluster of which only Secrets are read."""

    def __init__(self, answer: dict[str, Any] | ClusterError | None) -> None:
        self.answer = answer
        self.asked = 0

    async def get(self, kind: object, name: str, namespace: str = "") -> dict[str, Any] | None:
        assert (str(kind), namespace, name) == ("Secret", "a", "access")
        self.asked += 1
        if isinstance(self.answer, ClusterError):
            raise self.answer
        return self.answer


def secret(*, labels: dict[str, str] | None = None, **data: str) -> dict[str, Any]:
    encoded = {key: base64.b64encode(value.encode()).decode() for key, value in data.items()}
    return {"metadata": {"name": "access", "labels": labels or {}}, "data": encoded}


def deployment(name: str, replicas: int) -> dict[str, Any]:
    return {
        "metadata": objects.metadata(name, 3, names.runtime_labels(name), generation=1),
        "spec": {"replicas": replicas, "template": {}},
        "status": {"observedGeneration": 1, "replicas": replicas, "updatedReplicas": replicas},
    }


def world_of(replicas: int = 2, **spec: Any) -> World:
    world = World(Settings().plan_settings())
    world.endpoints.put(objects.endpoint("e", **spec))
    world.deployments.put(deployment("e", replicas))
    return world


async def ticked(port: object, world: World, seconds: float, **settings: Any) -> Autoscaler:
    """Ticks of five seconds."""
    autoscaler = make_autoscaler(cast("ClusterPort", port), world, ScalingSettings(**settings), pod_port=1)
    async with autoscaler:
        for index in range(int(seconds / 5)):
            await autoscaler.tick(START + 5 * index)
    return autoscaler


def scale_of(world: World) -> Scale:
    return world.scales[Key("a", "e")]


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (None, "there is no Secret access"),
        (secret(token="t"), "give it the label penstock.dev/prometheus: 'true'"),
        (secret(labels={"penstock.dev/prometheus": "false"}, token="t"), "give it the label"),
        (secret(labels={"penstock.dev/prometheus": "true"}), "none of the keys"),
        (secret(labels={"penstock.dev/prometheus": "true"}, token="t"), "cannot be reached"),
        (Forbidden("no"), "prometheus.readSecrets"),
        (Unavailable("away"), "cannot be read"),
    ],
)
def test_a_secret_is_used_only_when_it_agrees_and_all_else_is_said(answer: Any, why: str) -> None:
    world = world_of(scaling={"metrics": {"prometheus": PROMETHEUS}})
    port = Secrets(answer)

    asyncio.run(ticked(port, world, 120))

    scale = scale_of(world)
    assert (scale.replicas, scale.metrics_available, scale.metrics_reason) == (2, False, "MetricsMissing")
    assert why in scale.metrics_message
    assert port.asked <= 3, "it is not read with every tick"


def test_a_secret_without_a_url_is_said() -> None:
    world = world_of(scaling={"metrics": {"prometheus": {"secretName": "access"}}})
    asyncio.run(ticked(Secrets(None), world, 120))
    assert "no url" in scale_of(world).metrics_message


def test_the_fall_back_is_gone_up_to_and_never_down() -> None:
    missing = {"whenMetricsMissing": "Fallback", "fallbackReplicas": 3}
    low, high = world_of(2, scaling=missing), world_of(4, scaling=missing)
    for world in (low, high):
        world.models.put(objects.optimized_model("m"))
        asyncio.run(ticked(Secrets(None), world, 200))
    # Nothing is known of what a replica takes either: then the number stays in any case.
    assert (scale_of(low).cause, scale_of(high).replicas) == ("NoCapacityCurve", 4)


@pytest.mark.parametrize(
    "spec",
    [
        {"suspend": True},
        {"scaling": {"mode": "None"}},
        {"scaling": {"mode": "External"}},
        {"scaling": {"minReplicas": 2, "maxReplicas": 2}},
        {"scaling": {"mode": "Sometimes"}},
    ],
)
def test_where_nothing_is_to_be_decided_nobody_is_asked(spec: dict[str, Any]) -> None:
    async def scenario() -> tuple[int, World]:
        async with fleet() as pods:
            pod = await pods.add("127.0.0.2")
            world = world_of(**spec)
            world.pods.put(objects.runtime_pod("p", "e", ip="127.0.0.2", ready=True))
            autoscaler = make_autoscaler(
                cast("ClusterPort", Secrets(None)), world, ScalingSettings(), pod_port=pods.port
            )
            async with autoscaler:
                await autoscaler.tick(START)
            return pod.scrapes, world

    scrapes, world = asyncio.run(scenario())
    assert (scrapes, world.scales) == (0, {})


def test_what_was_decided_is_forgotten_when_somebody_else_scales_or_the_endpoint_goes() -> None:
    async def scenario(end: Any) -> dict[Key, Scale]:
        world = world_of(2)
        autoscaler = make_autoscaler(cast("ClusterPort", Secrets(None)), world, ScalingSettings(), pod_port=1)
        async with autoscaler:
            for index in range(20):
                await autoscaler.tick(START + 5 * index)
            assert Key("a", "e") in world.scales
            end(world)
            await autoscaler.tick(START + 200)
        assert autoscaler.decisions() == {}
        return world.scales

    assert asyncio.run(scenario(lambda world: world.endpoints.put(objects.endpoint("e", 9, suspend=True)))) == {}
    assert asyncio.run(scenario(lambda world: world.endpoints.remove(Key("a", "e")))) == {}


def test_one_endpoint_that_cannot_be_decided_upon_does_not_keep_the_others_from_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    world = world_of(2)
    world.endpoints.put(objects.endpoint("d"))
    world.deployments.put(deployment("d", 1))
    find = "penstock_operator.scaling.read.target.scaling_settings"
    from penstock_operator.scaling.read import target

    real = target.scaling_settings

    def broken(endpoint: Any, **more: Any) -> Any:
        if endpoint.name == "d":
            raise ZeroDivisionError
        return real(endpoint, **more)

    monkeypatch.setattr(find, broken)
    asyncio.run(ticked(Secrets(None), world, 120))

    assert set(world.scales) == {Key("a", "e")}
    assert "this is a defect of the operator" in caplog.text
