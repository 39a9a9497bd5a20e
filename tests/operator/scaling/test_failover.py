"""The operator killed at the peak, on a real API server: its successor does not scale down and does not flap.

Time is an argument of a tick, as in test_operator.py.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from penstock_operator.cluster.store import ObjectKey
from testbed.cluster import Cluster
from testbed.kubectl import Kubectl
from tests.operator.scaling.scene import TICK, WINDOW, Scene, played

PEAK, CALM = 150, 10


async def memory(scene: Scene) -> dict[str, Any]:
    """The snapshot that the status has for the next leader."""
    found: dict[str, Any] = json.loads((await scene.found())["status"]["scaling"]["memory"])
    return found


async def lowest(scene: Scene, seconds: float) -> int:
    """Let time pass; returns the fewest replicas during that time."""
    fewest = await scene.replicas()
    for _ in range(int(seconds / (2 * TICK))):
        await scene.settles(2 * TICK)
        fewest = min(fewest, await scene.replicas())
    return fewest


@pytest.mark.slow
def test_an_operator_killed_repeatedly_at_the_peak_neither_scales_down_nor_flaps(
    classes: Cluster, kubectl: Kubectl, kubeconfig: Path
) -> None:
    async def play(scene: Scene) -> None:
        async with scene.operating():
            await scene.optimised()
            scene.load = 40
            await scene.settles(150)
            scene.load = PEAK
            # Killed in the surge, before the requested replicas have started.
            await scene.passes(15)
            await scene.operator.rest()
            asked = await scene.replicas()
            assert asked >= 3

        for life in range(2):
            async with scene.operating():
                await scene.pods_serve()
                assert await lowest(scene, WINDOW - 2 * TICK) == asked, f"life {life}"
                assert await scene.replicas() == asked, f"life {life}"

        # An invalid snapshot counts as an empty one, and is replaced.
        for garbage in ("{{{", json.dumps({"windowFactor": -3})):
            patch = json.dumps({"status": {"scaling": {"memory": garbage}}})
            await scene.call(
                kubectl, "patch", "modelendpoint", "emotion", "--subresource=status", "--type=merge", "-p", patch
            )
            async with scene.operating():
                assert await lowest(scene, WINDOW - 2 * TICK) == asked
                assert (await memory(scene))["windowFactor"] == 1

        events = [event["reason"] for event in await scene.call(kubectl.items, "events.events.k8s.io")]
        assert "ScaledDown" not in events

    played(kubectl, kubeconfig, play)


@pytest.mark.slow
def test_a_learnt_window_survives_a_failover_and_start_up_times_are_read_from_the_pods(
    classes: Cluster, kubectl: Kubectl, kubeconfig: Path
) -> None:
    async def play(scene: Scene) -> None:
        async with scene.operating():
            await scene.optimised()
            for load in (PEAK, CALM, PEAK):
                scene.load = load
                await scene.settles(300)
            peak = await scene.replicas()
            assert peak >= 3
            learnt = (await memory(scene))["windowFactor"]
            assert learnt >= 2, "the second rise needed the replicas that the pause had removed"
            decision = scene.autoscaler.decisions()[ObjectKey(kubectl.namespace, "emotion")]
            assert decision.demand is not None
            assert decision.demand.ahead_seconds < 40, "the pods started sooner than the setting"

        # Killed at the peak; the load falls while no operator runs.
        scene.load = CALM
        async with scene.operating():
            assert await lowest(scene, (learnt - 0.5) * WINDOW) == peak
            assert (await memory(scene))["windowFactor"] == learnt
            await scene.settles(900)
            assert await scene.replicas() == 1, "a longer window ends as well"

        # The decisions as `kubectl describe` shows them.
        described = await scene.call(kubectl, "describe", "modelendpoint", "emotion")
        assert "requests/s now" in described
        assert "per replica at p95" in described
        assert "ScaledUp" in described
        assert "ScaledDown" in described

    played(kubectl, kubeconfig, play)
