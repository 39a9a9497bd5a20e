"""The limits on a real API server: one optimisation and one rollout at a time, namespace after namespace."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from penstock_operator.settings import Settings
from testbed.cluster import Cluster
from testbed.fixtures import install_crds
from testbed.kubectl import Kubectl
from tests.operator import kubelet
from tests.operator.running import Running, running

NAMES = ("first", "second")


def endpoint(name: str, **labels: str) -> dict[str, Any]:
    """An endpoint with a model of its own."""
    spec = {"model": f"hf://org/{name}@main", "task": "text-classification", "replicas": 1}
    return {
        "apiVersion": "penstock.dev/v1alpha1",
        "kind": "ModelEndpoint",
        "metadata": {"name": name},
        "spec": {**spec, "scaling": {"mode": "None"}, "pod": {"labels": labels}},
    }


def reasons(kubectl: Kubectl, kind: str) -> list[str]:
    """The reason of this condition of each endpoint."""
    found = []
    for name in NAMES:
        conditions = kubectl.get("modelendpoint", name)["status"]["conditions"]
        found.append(next(str(one["reason"]) for one in conditions if one["type"] == kind))
    return found


def paused(kubectl: Kubectl) -> list[bool]:
    return [bool(kubectl.get("deployment", name)["spec"].get("paused")) for name in NAMES]


async def finish_job(kubectl: Kubectl, operator: Running) -> None:
    """The one job of the namespace that has not ended succeeds."""
    done = {pod["metadata"]["name"] for pod in kubectl.items("pods") if pod["status"]["phase"] == "Succeeded"}
    while True:
        pods = kubectl.items("pods", "app.kubernetes.io/name=penstock-optimizer")
        names = {pod["metadata"]["name"] for pod in pods} - done
        if names:
            break
        await asyncio.sleep(0.05)
    (pod,) = names
    await asyncio.to_thread(kubelet.succeed, kubectl, pod)
    job = pod.rpartition("-")[0]
    await asyncio.to_thread(kubectl.wait, "condition=Complete", f"job/{job}")
    assert await operator.rest()


@pytest.mark.slow
def test_one_optimisation_and_one_rollout_at_a_time_the_oldest_first(nodeless: Cluster) -> None:
    install_crds(nodeless)
    kind = {"apiVersion": "penstock.dev/v1alpha1", "kind": "HardwareClass", "metadata": {"name": "any"}, "spec": {}}
    nodeless.kubectl.apply(kind)
    settings = Settings.load({"PENSTOCK_OPERATOR_ALLOWED_LABELS": "changed"})

    async def scenario(kubectl: Kubectl) -> None:
        async with running(nodeless.kubeconfig, kubectl.namespace, settings=settings) as operator:
            await asyncio.to_thread(kubectl.apply, endpoint("first"))
            assert await operator.rest()
            # It runs: a job that does not would lose its place after a while.
            await asyncio.to_thread(kubelet.run, kubectl, await asyncio.to_thread(kubelet.pod_of_job, kubectl))
            await asyncio.to_thread(kubectl.apply, endpoint("second"))
            assert await operator.rest()
            assert [reason == "OptimizationQueued" for reason in reasons(kubectl, "Optimized")] == [False, True]
            assert len(kubectl.items("jobs")) == 1
            await finish_job(kubectl, operator)
            assert reasons(kubectl, "Optimized")[0] == "Optimized"
            assert len(kubectl.items("jobs")) == 2
            await finish_job(kubectl, operator)
            assert reasons(kubectl, "Optimized") == ["Optimized", "Optimized"]

            # Both have one pod, which nothing runs; their rollouts do not end by themselves.
            assert paused(kubectl) == [False, False]
            for name in NAMES:
                await asyncio.to_thread(kubectl.apply, endpoint(name, changed="2"))
                assert await operator.rest()
            assert paused(kubectl) == [False, True]
            assert reasons(kubectl, "Progressing")[1] == "RolloutQueued"
            (old,) = kubectl.items("replicasets", "penstock.dev/endpoint=second")
            # A paused Deployment scales the pods that it has.
            await asyncio.to_thread(kubectl, "scale", "modelendpoint", "second", "--replicas=2")
            path = f"replicaset/{old['metadata']['name']}"
            await asyncio.to_thread(kubectl.wait, "jsonpath={.spec.replicas}=2", path)
            assert await operator.rest()
            assert paused(kubectl) == [False, True]

            # The first rollout has ended: its old pods are gone.
            (before,) = (
                one
                for one in kubectl.items("replicasets", "penstock.dev/endpoint=first")
                if "changed" not in one["spec"]["template"]["metadata"]["labels"]
            )
            await asyncio.to_thread(kubectl, "delete", "replicaset", before["metadata"]["name"])
            assert await operator.rest()
            assert paused(kubectl) == [False, False]

    with nodeless.temporary_namespace("limits") as namespace:
        asyncio.run(scenario(nodeless.kubectl.within(namespace)))


@pytest.mark.slow
def test_an_endpoint_does_not_wait_for_all_of_another_namespace_although_the_leader_changes(nodeless: Cluster) -> None:
    install_crds(nodeless)
    kind = {"apiVersion": "penstock.dev/v1alpha1", "kind": "HardwareClass", "metadata": {"name": "any"}, "spec": {}}
    nodeless.kubectl.apply(kind)

    def unfinished(kubectl: Kubectl) -> bool:
        return any(not job["status"].get("succeeded") for job in kubectl.items("jobs"))

    def has_slot(kubectl: Kubectl, name: str) -> bool:
        conditions = kubectl.get("modelendpoint", name)["status"]["conditions"]
        reason = next(str(one["reason"]) for one in conditions if one["type"] == "Optimized")
        return reason != "OptimizationQueued"

    async def scenario(one: Kubectl, many: Kubectl) -> None:
        async with running(nodeless.kubeconfig, one.namespace, many.namespace, settings=Settings.load({})) as operator:
            for name in ("a", "b", "c"):
                await asyncio.to_thread(many.apply, endpoint(name))
                assert await operator.rest()
            await asyncio.to_thread(one.apply, endpoint("x"))
            assert await operator.rest()
            assert [has_slot(many, name) for name in ("a", "b", "c")] == [True, False, False]
            assert not has_slot(one, "x")
            await finish_job(many, operator)
        async with running(nodeless.kubeconfig, one.namespace, many.namespace, settings=Settings.load({})) as operator:
            assert await operator.rest()
            # b, or x if it was applied in the second in which a got its slot.
            (second,) = [kubectl for kubectl in (one, many) if unfinished(kubectl)]
            await finish_job(second, operator)
            assert has_slot(many, "b")
            assert has_slot(one, "x")
            assert not has_slot(many, "c")

    with nodeless.temporary_namespace("alone") as alone, nodeless.temporary_namespace("many") as many:
        asyncio.run(scenario(nodeless.kubectl.within(alone), nodeless.kubectl.within(many)))
