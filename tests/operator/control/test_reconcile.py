"""An operator killed at any write, before the request or before its answer: its successor reaches the same state."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from penstock_operator.cluster.api import JOB, NETWORK_POLICY, SERVICE, ClusterPort, Json, ListPage, ResourceKind
from penstock_operator.cluster.errors import ClusterError, Conflict, Forbidden, NotFound, Refused, Unavailable
from penstock_operator.cluster.store import ObjectKey
from penstock_operator.control.cache import ClusterCache
from penstock_operator.control.reconcile import Reconciler, ReconcileRequest
from penstock_operator.endpoint.snapshot import ReconcilePlan
from penstock_operator.facts.findings import Event
from penstock_operator.facts.names import Ref
from penstock_operator.limits.concurrency import Ask, SlotDecision, SlotKey
from penstock_operator.settings import PREFIX, Settings
from testbed.cluster import Cluster
from testbed.fixtures import install_crds
from testbed.kubectl import Kubectl
from tests.operator import kubelet
from tests.operator.objects import metadata
from tests.operator.running import Tripwire, running

LIVES = 4
"""At the same time, each in a namespace of its own: they wait more than they work."""
LASTING = {"Valid", "Resolved", "Optimized"}
"""Reasons of events that are posted at least once: the status, which records a transition, is written after its event.
Other events describe a state that ends by itself (a rollout): the next process may find it already over."""
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
def classes(nodeless: Cluster) -> Cluster:
    """Our resources, and the hardware class of the endpoints here."""
    install_crds(nodeless)
    nodeless.kubectl.apply(
        {"apiVersion": "penstock.dev/v1alpha1", "kind": "HardwareClass", "metadata": {"name": "any"}, "spec": {}}
    )
    return nodeless


async def live(kubeconfig: Path, kubectl: Kubectl, at: int = 0, *, sent: bool = False) -> list[str]:
    """From apply to the result of the optimisation being deployed; the writes of the first process.

    With `at`, that one is killed at that write; another one takes over.
    """
    wires: list[Tripwire] = []
    finished = False

    def trip(port: ClusterPort) -> ClusterPort:
        wires.append(Tripwire(port, at=0 if wires else at, sent=sent))
        return wires[-1]

    async def one_life() -> bool:
        """True when it came to the end."""
        nonlocal finished
        async with running(kubeconfig, kubectl.namespace, wrap=trip) as operator:
            if not await operator.rest():
                return False
            if not finished:
                pod = await asyncio.to_thread(kubelet.pod_of_job, kubectl)
                await asyncio.to_thread(kubelet.succeed, kubectl, pod)
                finished = True
                await asyncio.to_thread(kubectl.wait, "condition=Complete", "job", "--all")
            return await operator.rest()

    await asyncio.to_thread(kubectl.apply, ENDPOINT)
    assert await one_life() or await one_life(), "the second process ended, although no kill was set for it"
    return wires[0].writes


def state(kubectl: Kubectl) -> Any:
    """The objects of all kinds, without the values that differ from run to run."""
    found = {}
    for kind in KINDS:
        for item in kubectl.items(kind):
            metadata = item["metadata"]
            owners = sorted((owner["kind"], owner["name"]) for owner in metadata.get("ownerReferences", []))
            item["metadata"] = {"name": metadata["name"], "labels": metadata.get("labels"), "owners": owners}
            if kind in {"deployments", "jobs", "services", "poddisruptionbudgets"}:
                item.pop("status", None)  # the controllers write it
            found[kind, metadata["name"]] = item
    return _scrubbed(found, kubectl.namespace)


_POD = re.compile(r"emotion-[0-9a-f]+-[a-z0-9]{5}")
_ONCE = re.compile(
    # The hash is of the pod template, which names the store of the namespace and is compared itself.
    r"lastTransitionTime|lastUsed|clusterIPs?|.*controller-uid|resourceVersion|uid|penstock\.dev/template-hash"
)


def _scrubbed(value: Any, namespace: str) -> Any:
    if isinstance(value, dict):
        return {
            key: _scrubbed(one, namespace)
            for key, one in value.items()
            if not isinstance(key, str) or not _ONCE.fullmatch(key)
        }
    if isinstance(value, list):
        return [_scrubbed(one, namespace) for one in value]
    if isinstance(value, str):
        return _POD.sub("emotion-POD", value).replace(namespace, "NAMESPACE")
    return value


def reasons(kubectl: Kubectl) -> set[str]:
    return {event["reason"] for event in kubectl.items("events.events.k8s.io") if "penstock" in str(event)}


@pytest.mark.slow
def test_a_successor_of_an_operator_killed_at_any_write_converges(classes: Cluster) -> None:
    at_once = asyncio.Semaphore(LIVES)

    async def outcome(at: int = 0, *, sent: bool = False) -> tuple[list[str], Any, set[str]]:
        async with at_once:
            with classes.temporary_namespace("steps") as namespace:
                kubectl = classes.kubectl.within(namespace)
                writes = await live(classes.kubeconfig, kubectl, at, sent=sent)
                return writes, await asyncio.to_thread(state, kubectl), await asyncio.to_thread(reasons, kubectl)

    async def scenario() -> list[str]:
        writes, expected, events = await outcome()
        assert ("deployments", "emotion") in expected
        assert len(writes) > 8, writes
        assert events >= LASTING

        async def judged(at: int, *, sent: bool) -> list[str]:
            _, found, events = await outcome(at, sent=sent)
            problems = [] if found == expected else [_first_difference(expected, found)]
            problems += [f"no event with the reason {reason}" for reason in LASTING - events]
            when = "after" if sent else "before"
            return [f"killed {when} write {at}, {writes[at - 1]}: {problem}" for problem in problems]

        # A kill before a write is the same as a kill after the previous one.
        lives = [judged(1, sent=False), *(judged(at, sent=True) for at in range(1, len(writes) + 1))]
        return [problem for problems in await asyncio.gather(*lives) for problem in problems]

    problems = asyncio.run(scenario())

    assert not problems, "\n".join(problems)


def _first_difference(expected: Any, found: Any, path: str = "") -> str:
    if isinstance(expected, list) and isinstance(found, list) and len(expected) == len(found):
        one, other = next(pair for pair in zip(expected, found, strict=True) if pair[0] != pair[1])
        return _first_difference(one, other, f"{path}[]")
    if isinstance(expected, dict) and isinstance(found, dict):
        for key in expected.keys() | found.keys():
            if expected.get(key) != found.get(key):
                return _first_difference(expected.get(key), found.get(key), f"{path}/{key}")
    return f"{path}: {expected!r} and {found!r}"


@pytest.mark.slow
def test_nothing_is_written_without_a_change_and_changes_of_others_are_reverted(classes: Cluster) -> None:
    with classes.temporary_namespace("drift") as namespace:
        kubectl = classes.kubectl.within(namespace)
        asyncio.run(live(classes.kubeconfig, kubectl))
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
                for key in operator.cache.endpoints:
                    operator.controller.queue.add(ReconcileRequest("ModelEndpoint", key))
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
                    ("label", "service", "emotion", "app.kubernetes.io/instance=another", "--overwrite"),
                    (
                        "patch",
                        "deployment",
                        "emotion",
                        "--type=json",
                        "-p",
                        '[{"op":"remove","path":"/metadata/ownerReferences"}]',
                    ),
                ):
                    await asyncio.to_thread(kubectl, *change)
                    await asyncio.sleep(0)
                    await operator.rest()
                return at_rest, list(wires[0].writes)

        at_rest, repairs = asyncio.run(scenario())

        assert at_rest == []
        assert repairs != []
        assert state(kubectl) == expected


@pytest.mark.slow
def test_an_endpoint_in_a_namespace_that_its_class_does_not_select_gets_no_job_until_the_namespace_is_labelled(
    classes: Cluster, kubectl: Kubectl, kubeconfig: Path
) -> None:
    name = f"of-{kubectl.namespace}"
    restricted = {"allowedNamespaces": {"matchLabels": {"team": "search"}}}
    kubectl.apply(
        {"apiVersion": "penstock.dev/v1alpha1", "kind": "HardwareClass", "metadata": {"name": name}, "spec": restricted}
    )
    spec = {"model": "hf://org/model@main", "task": "text-classification", "hardwareClass": name}
    kubectl.apply({**ENDPOINT, "spec": spec})

    def accepted() -> str:
        found = kubectl.get("modelendpoint", "emotion")["status"]["conditions"]
        return str(next(one["reason"] for one in found if one["type"] == "Accepted"))

    async def scenario() -> None:
        async with running(kubeconfig, kubectl.namespace) as operator:
            assert await operator.rest()
            assert await asyncio.to_thread(accepted) == "HardwareClassNotAllowed"
            assert await asyncio.to_thread(kubectl.items, "jobs,deployments,optimizedmodels") == []
            labelled = asyncio.Event()
            operator.cache.namespaces.listen(
                lambda change: labelled.set() if change.key == ObjectKey("", kubectl.namespace) else None
            )
            await asyncio.to_thread(kubectl, "label", "namespace", kubectl.namespace, "team=search")
            async with asyncio.timeout(120):
                await labelled.wait()
            assert await operator.rest()
            assert await asyncio.to_thread(accepted) == "Valid"
            assert len(await asyncio.to_thread(kubectl.items, "jobs")) == 1

    try:
        asyncio.run(scenario())
    finally:
        kubectl("delete", "hardwareclass", name)


@pytest.mark.slow
def test_the_newest_endpoint_over_the_quota_gets_nothing_until_another_one_is_deleted(
    classes: Cluster, kubectl: Kubectl, kubeconfig: Path
) -> None:
    quota = [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": kubectl.namespace}}, "cores": 3}]
    settings = Settings.load({f"{PREFIX}QUOTAS": json.dumps(quota)})
    spec = {"model": "hf://org/model@main", "task": "text-classification", "cores": 2}
    kubectl.apply(*({**ENDPOINT, "metadata": {"name": name}, "spec": spec} for name in ("first", "second")))

    def accepted(name: str) -> str:
        found = kubectl.get("modelendpoint", name)["status"]["conditions"]
        return str(next(one["reason"] for one in found if one["type"] == "Accepted"))

    async def scenario() -> None:
        async with running(kubeconfig, kubectl.namespace, settings=settings) as operator:
            assert await operator.rest()
            assert await asyncio.to_thread(accepted, "first") == "Valid"
            assert await asyncio.to_thread(accepted, "second") == "QuotaExceeded"
            assert len(await asyncio.to_thread(kubectl.items, "jobs")) == 1
            deleted = asyncio.Event()
            operator.cache.endpoints.listen(lambda change: deleted.set() if change.new is None else None)
            await asyncio.to_thread(kubectl, "delete", "modelendpoint", "first")
            async with asyncio.timeout(120):
                await deleted.wait()
            # As after WAITING_SECONDS.
            operator.controller.queue.add(ReconcileRequest("ModelEndpoint", ObjectKey(kubectl.namespace, "second")))
            assert await operator.rest()
            assert await asyncio.to_thread(accepted, "second") == "Valid"

    asyncio.run(scenario())


@pytest.mark.slow
def test_a_deleted_model_is_measured_again_and_its_endpoint_can_be_suspended_meanwhile(
    classes: Cluster, kubectl: Kubectl, kubeconfig: Path
) -> None:
    asyncio.run(live(kubeconfig, kubectl))
    before = kubectl.get("deployment", "emotion")["spec"]
    (measured,) = (one["metadata"]["uid"] for one in kubectl.items("jobs"))
    wires: list[Tripwire] = []

    def count(port: ClusterPort) -> ClusterPort:
        wires.append(Tripwire(port))
        return wires[-1]

    async def scenario() -> None:
        async with running(kubeconfig, kubectl.namespace, wrap=count) as operator:
            assert await operator.rest()
            # What serves is known by its digest alone until it was optimised again.
            await asyncio.to_thread(kubectl, "delete", "optimizedmodels", "--all")
            assert await operator.rest()
            (job,) = await asyncio.to_thread(kubectl.items, "jobs")
            assert job["metadata"]["uid"] != measured
            suspend = json.dumps({"spec": {"suspend": True}})
            await asyncio.to_thread(kubectl, "patch", "modelendpoint", "emotion", "--type=merge", "-p", suspend)
            assert await operator.rest()

    asyncio.run(scenario())

    after = kubectl.get("deployment", "emotion")["spec"]
    assert wires[0].writes.count("scale Deployment") == 1
    assert after == {**before, "replicas": 0}


def test_a_job_is_not_created_when_its_network_policy_is_refused() -> None:
    applied: list[str] = []
    refused = {"NetworkPolicy"}

    class Port:
        async def apply(self, value: Json) -> Json:
            if value["kind"] in refused:
                raise Refused("a quota", status=403)
            applied.append(value["kind"])
            return value

    objects = [
        {"apiVersion": kind.api_version, "kind": kind.name, "metadata": metadata("emotion", 1)}
        for kind in (NETWORK_POLICY, JOB, SERVICE)
    ]
    port: Any = Port()
    reconciler = Reconciler(port, ClusterCache(Settings.load({}).plan_settings()), identity="test")

    def act() -> ClusterError | None:
        return asyncio.run(reconciler._act(ObjectKey("a", "emotion"), ReconcilePlan(apply=tuple(objects)), {}, {}))

    assert isinstance(act(), Refused)
    assert applied == ["Service"]
    refused.clear()
    assert act() is None
    assert applied == ["Service", "NetworkPolicy", "Job"]


def test_a_refused_rollout_goes_to_the_end_of_the_line_although_its_gateway_is_accepted() -> None:
    class Port:
        async def apply(self, value: Json) -> Json:
            if value["metadata"]["name"] == "emotion":
                raise Refused("a quota", status=422)
            return value

    port: Any = Port()
    cache = ClusterCache(Settings.load({}).plan_settings())
    reconciler = Reconciler(port, cache, identity="test")
    value = {"apiVersion": "apps/v1", "kind": "Deployment", "spec": {"template": {}}}
    both = tuple({**value, "metadata": metadata(name, 1)} for name in ("emotion", "emotion-gateway"))
    now = datetime.now(UTC)
    slot = SlotDecision(allowed=True, ask=Ask(now, SlotKey("a", "emotion")))
    asyncio.run(reconciler._act(ObjectKey("a", "emotion"), ReconcilePlan(apply=both, rollout=slot), {}, {}))

    assert set(cache.slots.lines(now)[1].refused) == {SlotKey("a", "emotion")}


@pytest.mark.parametrize(("there", "expected"), [("serves", {"t": "old"}), ("another", {"t": "new"})])
def test_the_template_of_a_replica_set_is_applied_if_that_exists(there: str, expected: Json) -> None:
    applied: list[Json] = []

    class Port:
        async def pages(self, kind: ResourceKind, namespace: str = "", *, labels: str = "") -> AsyncIterator[ListPage]:
            assert (kind.name, namespace, labels) == ("ReplicaSet", "a", "penstock.dev/endpoint=emotion")
            template = {"metadata": {"labels": {}}, "spec": {"t": "old"}}
            yield ListPage(({"metadata": {"name": there}, "spec": {"template": template}},), "1")

        async def apply(self, value: Json) -> Json:
            applied.append(value)
            return value

    port: Any = Port()
    reconciler = Reconciler(port, ClusterCache(Settings.load({}).plan_settings()), identity="test")
    spec = {"paused": True, "template": {"spec": {"t": "new"}}}
    value: Json = {"apiVersion": "apps/v1", "kind": "Deployment", "spec": spec}
    both = tuple({**value, "metadata": metadata(name, 1)} for name in ("emotion", "emotion-gateway"))
    made = ReconcilePlan(apply=both, template_of="serves")
    asyncio.run(reconciler._act(ObjectKey("a", "emotion"), made, {}, {}))

    own, gateway = applied
    assert own["spec"]["template"]["spec"] == expected
    assert ("paused" in own["spec"]) is (there != "serves")
    assert gateway["spec"] == spec


def test_a_refused_deletion_keeps_nothing_else_from_being_done() -> None:
    done: list[str] = []

    class Port:
        async def delete(self, kind: ResourceKind, name: str, *_: str, **__: str) -> bool:
            if kind is SERVICE:
                raise Forbidden("an admission policy", status=403)
            done.append(f"delete {kind}")
            return True

        async def apply(self, value: Json) -> Json:
            done.append(f"apply {value['kind']}")
            return value

    cache = ClusterCache(Settings.load({}).plan_settings())
    cache.services.put({"metadata": metadata("emotion", 1)})
    cache.policies.put({"metadata": metadata("emotion", 1)})
    cache.pods.put({"metadata": metadata("emotion-1", 1)})
    port: Any = Port()
    reconciler = Reconciler(port, cache, identity="test")
    job = {"apiVersion": JOB.api_version, "kind": JOB.name, "metadata": metadata("emotion", 1)}
    refs = (Ref("Service", "emotion"), Ref("NetworkPolicy", "emotion"), Ref("Pod", "emotion-1"), Ref("Pod", "gone"))
    made = ReconcilePlan(apply=(job,), delete=refs)
    problem = asyncio.run(reconciler._act(ObjectKey("a", "emotion"), made, {}, {}))

    assert done == ["delete NetworkPolicy", "delete Pod", "apply Job"]
    assert "an admission policy" in str(problem)


@pytest.mark.parametrize("error", [Unavailable("HTTP 429"), NotFound("no namespace"), Refused("no"), Conflict("again")])
def test_an_event_that_cannot_be_posted_keeps_no_status_from_being_written(error: ClusterError) -> None:
    class Port:
        async def create(self, _: Json) -> Json:
            raise error

    port: Any = Port()
    reconciler = Reconciler(port, ClusterCache(Settings.load({}).plan_settings()), identity="test")
    posted = reconciler._post_event(Event("Normal", "Valid", "It is valid."), {"metadata": metadata("emotion", 1)})

    assert asyncio.run(posted) is None
