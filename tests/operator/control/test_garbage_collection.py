"""Collection of the artefact store: once in a period, and never of a referenced artefact."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from penstock.artefact_store import StoreUri
from penstock_operator.cluster.api import ClusterPort, Json
from penstock_operator.cluster.errors import Conflict, Refused
from penstock_operator.cluster.informer import Informer
from penstock_operator.cluster.kubernetes import KubernetesPort, load_configuration
from penstock_operator.control.cache import ClusterCache
from penstock_operator.control.garbage_collection import AT_ONCE, StoreCollection, referred
from penstock_operator.endpoint.optimization.collection import (
    CollectionHome,
    CollectionTarget,
    job,
    keep_arguments,
    name_of,
)
from penstock_operator.facts import names
from penstock_operator.settings import Settings
from penstock_runtime.store import open_store
from penstock_runtime.store.__main__ import main
from testbed.cluster import Cluster
from testbed.kubectl import Kubectl
from tests.operator import objects
from tests.runtime.store.artefacts import write_artefact

DAY = 86_400.0
DIGESTS = {
    name: f"sha256:{number:064x}" for number, name in enumerate(("pinned", "base", "best", "shown", "old", "pod"))
}


def settings() -> Settings:
    return Settings.load({"PENSTOCK_OPERATOR_STORE_COLLECT_SECONDS": str(DAY)})


class Recording:
    """A cluster that accepts every object and records it."""

    def __init__(self) -> None:
        self.applied: list[Json] = []
        self.taken = ""
        """Objects whose names begin with this exist already."""

    async def create(self, value: Json) -> Json:
        if self.taken and value["metadata"]["name"].startswith(self.taken):
            raise Conflict("it exists", status=409)
        self.applied.append(value)
        version = str(1000 + len(self.applied))
        return {**value, "metadata": {**value["metadata"], "uid": f"uid-{version}", "resourceVersion": version}}

    async def apply(self, value: Json) -> Json:
        self.applied.append(value)
        return value

    def names(self, kind: str) -> list[str]:
        return [value["metadata"]["name"] for value in self.applied if value["kind"] == kind]


class Scene:
    """Endpoints, nodes, a clock."""

    def __init__(self, nodes: int = 1) -> None:
        self.cache = ClusterCache(settings().plan_settings())
        self.cluster = Recording()
        self.now = 10 * DAY + 5
        self.caches_current = True
        port: Any = self.cluster
        self.collector = StoreCollection(
            port, self.cache, caches_current=lambda: self.caches_current, clock=lambda: self.now
        )
        self.cache.endpoints.put(objects.endpoint("emotion", status={"plan": {"artefact": DIGESTS["shown"]}}))
        for number in range(nodes):
            status = {"conditions": [{"type": "Ready", "status": "True"}]}
            name = f"n{number}"
            self.cache.nodes.put({"metadata": {"name": name, "resourceVersion": "1", "uid": name}, "status": status})

    def collect(self) -> bool:
        return asyncio.run(self.collector.collect())

    def end(self, condition: str = "Complete") -> None:
        """All jobs that run."""
        for made in [value for value in self.cluster.applied if value["kind"] == "Job"]:
            self.now += 1
            version = str(int(self.now) + 10_000)
            ended = [{"type": condition, "status": "True", "lastTransitionTime": "2026-11-21T19:00:00Z"}]
            metadata = {**made["metadata"], "resourceVersion": version, "uid": "u"}
            self.cache.jobs.put({**made, "metadata": metadata, "status": {"conditions": ended}})


def test_a_collection_runs_once_in_a_period_also_after_a_change_of_leader() -> None:
    scene = Scene()

    assert scene.collect() is False
    assert scene.collect() is False
    assert len(scene.cluster.names("Job")) == 1
    port: Any = scene.cluster
    next_leader = StoreCollection(port, scene.cache, caches_current=lambda: True, clock=lambda: scene.now)
    assert asyncio.run(next_leader.collect()) is False
    assert len(scene.cluster.names("Job")) == 1
    scene.end()
    scene.now += DAY
    scene.collect()
    assert len(set(scene.cluster.names("Job"))) == 2
    assert [value["kind"] for value in scene.cluster.applied] == ["NetworkPolicy", "Job"] * 2


def test_no_job_starts_without_its_network_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene()
    apply = scene.cluster.apply

    async def refuse(value: Json) -> Json:
        raise Refused("a quota", status=403)

    monkeypatch.setattr(scene.cluster, "apply", refuse)
    with pytest.raises(Refused):
        scene.collect()
    assert scene.cluster.applied == []
    monkeypatch.setattr(scene.cluster, "apply", apply)
    scene.collect()

    assert len(scene.cluster.names("Job")) == 1


def test_collections_on_many_nodes_run_a_few_at_a_time() -> None:
    scene = Scene(nodes=AT_ONCE + 2)

    assert scene.collect() is True
    assert scene.collect() is True
    assert len(scene.cluster.names("Job")) == AT_ONCE
    scene.end()
    assert scene.collect() is False
    assert len(scene.cluster.names("Job")) == AT_ONCE + 2


def test_no_job_starts_while_the_caches_may_be_outdated() -> None:
    scene = Scene()
    scene.caches_current = False

    assert scene.collect() is True
    assert scene.cluster.applied == []


def test_without_endpoints_no_job_starts() -> None:
    scene = Scene()
    scene.cache.endpoints.remove(next(iter(scene.cache.endpoints)))

    assert scene.collect() is False
    assert scene.cluster.applied == []


def test_no_job_starts_for_an_endpoint_that_is_not_accepted() -> None:
    scene = Scene()
    endpoint = objects.endpoint("emotion")
    endpoint["spec"]["pod"] = {"serviceAccountName": "cloud-admin"}
    endpoint["metadata"]["resourceVersion"] = "99"
    scene.cache.endpoints.put(endpoint)

    scene.collect()

    assert scene.cluster.names("Job") == []


def test_a_failed_job_is_logged_and_not_repeated_at_once(caplog: pytest.LogCaptureFixture) -> None:
    scene = Scene()
    scene.collect()
    scene.end("Failed")

    assert scene.collect() is False
    (record,) = (record for record in caplog.records if record.__dict__.get("event") == "CollectionFailed")
    assert record.levelname == "WARNING"
    assert "see kubectl logs" in record.message


def world_of_references() -> ClusterCache:
    """A cluster in which each kind of reference names another artefact."""
    cache = ClusterCache(settings().plan_settings())
    cache.endpoints.put(objects.endpoint("pinned", optimization={"mode": "Pinned", "artefact": DIGESTS["pinned"]}))
    cache.endpoints.put(objects.endpoint("emotion", status={"plan": {"artefact": DIGESTS["shown"]}}))
    status = {"baseline": {"digest": DIGESTS["base"]}, "artefact": {"digest": DIGESTS["best"]}}
    cache.models.put(objects.optimized_model("m", status=status))
    template = {"metadata": {"annotations": {names.ARTEFACT: DIGESTS["old"]}}}
    labels = names.runtime_labels("emotion")
    cache.replica_sets.put({"metadata": objects.metadata("r", 1, labels), "spec": {"template": template}})
    pod = objects.runtime_pod("p", "emotion")
    pod["metadata"]["annotations"] = {names.ARTEFACT: DIGESTS["pod"]}
    cache.pods.put(pod)
    return cache


def test_every_referenced_artefact_is_kept() -> None:
    assert referred(world_of_references()) == {"a": set(DIGESTS.values())}


def test_only_references_of_a_namespace_count_for_its_own_store() -> None:
    cache = world_of_references()
    other = objects.endpoint("other", optimization={"mode": "Pinned", "artefact": "sha256:" + "f" * 64})
    other["metadata"]["namespace"] = "b"
    cache.endpoints.put(other)

    assert referred(cache) == {"a": set(DIGESTS.values()), "b": {"sha256:" + "f" * 64}}


def test_no_job_starts_while_nothing_is_referenced() -> None:
    scene = Scene()
    scene.cache.endpoints.put(objects.endpoint("emotion", 9))

    assert scene.collect() is False
    assert scene.cluster.applied == []


def test_a_job_of_that_name_that_another_client_created_is_not_used(caplog: pytest.LogCaptureFixture) -> None:
    scene = Scene(nodes=2)
    scene.cluster.taken = "penstock-store-"

    assert scene.collect() is False
    assert scene.collect() is False
    assert scene.cluster.names("Job") == []
    events = [record.__dict__["event"] for record in caplog.records if "event" in record.__dict__]
    assert events == ["CollectionNotStarted"] * 2, "once for each node"


def test_jobs_in_the_namespaces_of_users_neither_delay_collection_nor_are_reported(
    caplog: pytest.LogCaptureFixture,
) -> None:
    scene = Scene()
    for number in range(AT_ONCE):
        labels = {"app.kubernetes.io/managed-by": "penstock"}
        scene.cache.jobs.put({"metadata": objects.metadata(f"penstock-store-10-{number}", 1, labels), "status": {}})
        ended = [{"type": "Failed", "status": "True", "lastTransitionTime": "2026-11-21T19:00:00Z"}]
        metadata = objects.metadata(f"penstock-store-9-{number}", 2, labels)
        scene.cache.jobs.put({"metadata": metadata, "status": {"conditions": ended}})
    scene.collect()

    assert len(scene.cluster.names("Job")) == 1
    assert "CollectionFailed" not in caplog.text


@pytest.mark.slow
def test_a_tenant_cannot_forge_what_a_collection_keeps(
    crds: Cluster, kubectl: Kubectl, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """On a real API server, where the tenant's namespace has an immutable ConfigMap and a Job of the expected names."""
    kubectl("label", "namespace", kubectl.namespace, "pod-security.kubernetes.io/enforce=restricted")
    tenant = f"{kubectl.namespace}-tenant"
    kubectl("create", "namespace", tenant)
    chosen = replace(
        settings().plan_settings(),
        store_uri="s3://models/here",
        store_secret="s3",
        operator_namespace=kubectl.namespace,
    )
    forged: list[Json] = []
    for home in (tenant, kubectl.namespace):
        name = name_of(CollectionTarget(CollectionHome(home)), 1)
        forged.append(
            {
                "apiVersion": "v1",
                "kind": "ConfigMap",
                "metadata": {"name": name, "namespace": tenant},
                "immutable": True,
                "data": {"keep.json": '{"keep": []}'},
            }
        )
    forged.append(
        {
            "apiVersion": "batch/v1",
            "kind": "Job",
            "metadata": {"name": forged[0]["metadata"]["name"], "namespace": tenant},
            "spec": {
                "suspend": True,
                "template": {"spec": {"restartPolicy": "Never", "containers": [{"name": "c", "image": "x"}]}},
            },
        }
    )
    kubectl.within(tenant).apply(*forged)

    async def scenario() -> None:
        configuration = await load_configuration(str(crds.kubeconfig))
        async with KubernetesPort(configuration) as port:
            cache = ClusterCache(chosen)
            value = objects.endpoint("emotion", status={"plan": {"artefact": DIGESTS["shown"]}})
            cache.endpoints.put({**value, "metadata": {**value["metadata"], "namespace": tenant}})
            cluster: ClusterPort = port
            collector = StoreCollection(cluster, cache, caches_current=lambda: True, clock=lambda: DAY)
            watch = asyncio.create_task(Informer(port, cache.pods, namespace=kubectl.namespace).run())
            there = asyncio.Event()
            cache.pods.listen(lambda _: there.set())
            assert await collector.collect() is False
            # The Job controller has created its pod, so admission accepts it.
            async with asyncio.timeout(120):
                await there.wait()
            watch.cancel()
            await asyncio.gather(watch, return_exceptions=True)

    try:
        asyncio.run(scenario())

        (made,) = json.loads(kubectl("get", "jobs", "-o", "json"))["items"]
        jobs = json.loads(kubectl("get", "jobs", "-n", tenant, "-o", "json"))["items"]
        assert [one["spec"]["suspend"] for one in jobs] == [True], "the operator has no job in the tenant's namespace"
    finally:
        kubectl("delete", "namespace", tenant, "--wait=false")
    pod = made["spec"]["template"]["spec"]
    assert [volume["name"] for volume in pod["volumes"]] == ["tmp"]
    (container,) = pod["containers"]
    store = open_store(StoreUri.parse(f"file://{tmp_path / 'store'}"))
    (tmp_path / "store").mkdir()
    published = store.publish(write_artefact(tmp_path / "artefact")).digest
    words = [word.replace(DIGESTS["shown"][7:23], published.hexadecimal[:16]) for word in container["args"]]
    words[words.index("--older-than-seconds") + 1] = "-60"
    assert main(["--store", str(store.uri), "collect", *words]) == 0
    assert [one.digest for one in store.entries()] == [published]


def test_the_command_of_the_job_exists_in_the_image(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target, kept = CollectionTarget(CollectionHome("a")), keep_arguments({"a": DIGESTS.values()})
    (container,) = job(target, 1, settings().plan_settings(), kept)["spec"]["template"]["spec"]["containers"]
    (tmp_path / "store").mkdir()

    assert container["command"] == ["python", "-I", "-u", "-m", "penstock_runtime.store", "collect"]
    assert main(["--store", f"file://{tmp_path / 'store'}", "collect", *container["args"]]) == 0
