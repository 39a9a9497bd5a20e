"""Killed at any write, before it was sent or before its answer was seen, the next one arrives at the same state."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import pytest

from penstock_operator.cluster.port import ClusterPort
from penstock_operator.reconcile import Subject
from testbed.cluster import Cluster
from testbed.kubectl import Kubectl
from tests.operator.rim import kubelet
from tests.operator.rim.running import Tripwire, running

KINDS = (
    "modelendpoints",
    "optimizedmodels",
    "deployments",
    "services",
    "networkpolicies",
    "poddisruptionbudgets",
    "jobs",
)
ENDPOINT = {
    "apiVersion": "penstock.dev/v1alpha1",
    "kind": "ModelEndpoint",
    "metadata": {"name": "emotion"},
    "spec": {"model": "hf://org/model@main", "task": "text-classification", "replicas": 2},
}


@pytest.fixture(scope="module")
def classes(crds: Cluster) -> Cluster:
    """The hardware class of the endpoints here."""
    crds.kubectl.apply(
        {"apiVersion": "penstock.dev/v1alpha1", "kind": "HardwareClass", "metadata": {"name": "any"}, "spec": {}}
    )
    return crds


def live(kubeconfig: Path, kubectl: Kubectl, at: int = 0, *, sent: bool = False) -> list[str]:
    """From apply to the result of the optimisation being deployed; the writes of the life that was not cut short.

    With `at`, the first process is killed at that write; another one takes over.
    """
    wires: list[Tripwire] = []

    def trip(port: ClusterPort) -> ClusterPort:
        wires.append(Tripwire(port, at=0 if wires else at, sent=sent))
        return wires[-1]

    async def one_life(finished: list[bool]) -> bool:
        """True when it came to the end."""
        async with running(kubeconfig, kubectl.namespace, wrap=trip) as operator:
            if not await operator.rest():
                return False
            if not finished:
                pod = await asyncio.to_thread(kubelet.pod_of_job, kubectl)
                await asyncio.to_thread(kubelet.succeed, kubectl, pod)
                finished.append(True)
                await asyncio.to_thread(kubectl.wait, "condition=Complete", "job", "--all")
            return await operator.rest()

    async def scenario() -> None:
        finished: list[bool] = []
        for _ in range(2):
            if await one_life(finished):
                return
        raise AssertionError("the second process was not told to die")

    kubectl.apply(ENDPOINT)
    asyncio.run(scenario())
    return wires[0].writes


def state(kubectl: Kubectl) -> Any:
    """Everything that matters, without what is of one run only."""
    found = {}
    for kind in KINDS:
        for item in kubectl.items(kind):
            metadata = item["metadata"]
            owners = sorted((owner["kind"], owner["name"]) for owner in metadata.get("ownerReferences", []))
            item["metadata"] = {"name": metadata["name"], "labels": metadata.get("labels"), "owners": owners}
            if kind in {"deployments", "jobs", "services", "poddisruptionbudgets"}:
                item.pop("status", None)  # what the controllers say of it
            found[kind, metadata["name"]] = item
    return _scrubbed(found, kubectl.namespace)


_ONCE = re.compile(r"lastTransitionTime|lastUsed|clusterIPs?|.*controller-uid|resourceVersion|uid")


def _scrubbed(value: Any, namespace: str) -> Any:
    if isinstance(value, dict):
        return {
            key: _scrubbed(one, namespace)
            for key, one in value.items()
            if not isinstance(key, str) or not _ONCE.fullmatch(key)
        }
    if isinstance(value, list):
        return [_scrubbed(one, namespace) for one in value]
    return value.replace(namespace, "NAMESPACE") if isinstance(value, str) else value


def reasons(kubectl: Kubectl) -> set[str]:
    return {event["reason"] for event in kubectl.items("events.events.k8s.io") if "penstock" in str(event)}


@pytest.mark.slow
def test_killed_at_every_write_it_converges(classes: Cluster) -> None:
    with classes.temporary_namespace("steps") as namespace:
        kubectl = classes.kubectl.within(namespace)
        writes = live(classes.kubeconfig, kubectl)
        expected, told = state(kubectl), reasons(kubectl)
    assert ("deployments", "emotion") in expected
    assert len(writes) > 8, writes
    assert told

    different = []
    for at in range(1, len(writes) + 1):
        for sent in (False, True):
            with classes.temporary_namespace("steps") as namespace:
                kubectl = classes.kubectl.within(namespace)
                live(classes.kubeconfig, kubectl, at, sent=sent)
                if (found := state(kubectl)) != expected:
                    different.append((at, writes[at - 1], sent, _first_difference(expected, found)))
                if missing := told - reasons(kubectl):
                    different.append((at, writes[at - 1], sent, f"nothing said of {missing}"))

    assert different == []


def _first_difference(expected: Any, found: Any, path: str = "") -> str:
    if isinstance(expected, dict) and isinstance(found, dict):
        for key in expected.keys() | found.keys():
            if expected.get(key) != found.get(key):
                return _first_difference(expected.get(key), found.get(key), f"{path}/{key}")
    return f"{path}: {expected!r} and {found!r}"


@pytest.mark.slow
def test_at_rest_nothing_is_written_and_whatever_is_changed_by_others_is_put_back(classes: Cluster) -> None:
    with classes.temporary_namespace("drift") as namespace:
        kubectl = classes.kubectl.within(namespace)
        live(classes.kubeconfig, kubectl)
        expected = state(kubectl)
        wires: list[Tripwire] = []

        def count(port: ClusterPort) -> ClusterPort:
            wires.append(Tripwire(port))
            return wires[-1]

        async def scenario() -> tuple[list[str], list[str]]:
            async with running(classes.kubeconfig, namespace, wrap=count) as operator:
                await operator.rest()
                # A new process applies everything once. From then on:
                wires[0].writes.clear()
                for key in operator.world.endpoints:
                    operator.controller.queue.add(Subject("ModelEndpoint", key))
                await operator.rest()
                at_rest = list(wires[0].writes)
                for change in (
                    ("delete", "service", "emotion"),
                    (
                        "patch",
                        "networkpolicy",
                        "emotion",
                        "--type=json",
                        "-p",
                        '[{"op":"remove","path":"/spec/ingress"}]',
                    ),
                    ("scale", "deployment", "emotion", "--replicas=7"),
                    ("label", "deployment", "emotion", "app.kubernetes.io/managed-by-"),
                ):
                    await asyncio.to_thread(kubectl, *change)
                    await asyncio.sleep(0)
                    await operator.rest()
                return at_rest, list(wires[0].writes)

        at_rest, repairs = asyncio.run(scenario())

        assert at_rest == []
        assert repairs != []
        assert state(kubectl) == expected
