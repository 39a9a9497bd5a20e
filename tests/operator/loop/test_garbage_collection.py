"""Collection of the artefact store: once in a period, and never of a referenced artefact."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from penstock.resources.pod import Pod
from penstock_operator.cluster.api import ClusterPort, Json
from penstock_operator.cluster.informer import Informer
from penstock_operator.cluster.kubernetes import KubernetesPort, load_configuration
from penstock_operator.loop.garbage_collection import AT_ONCE, StoreCollection, referred
from penstock_operator.plan import names
from penstock_operator.plan.collection import CollectionHome, CollectionTarget, job
from penstock_operator.settings import Settings
from penstock_operator.watch.cluster_cache import ClusterCache
from penstock_runtime.store.__main__ import main
from testbed.cluster import Cluster
from testbed.kubectl import Kubectl
from tests.operator import objects

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

    async def apply(self, value: Json, *, subresource: str = "") -> Json:
        assert not subresource
        self.applied.append(value)
        version = str(1000 + len(self.applied))
        return {**value, "metadata": {**value["metadata"], "uid": f"uid-{version}", "resourceVersion": version}}

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
        self.cache.endpoints.put(objects.endpoint("emotion"))
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
    assert scene.cluster.names("ConfigMap") == scene.cluster.names("Job")


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


def test_an_endpoint_that_is_not_accepted_lends_its_service_account_to_no_job() -> None:
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
    assert referred(world_of_references()) == set(DIGESTS.values())


@pytest.mark.slow
def test_the_api_server_accepts_the_job_and_its_controllers_delete_it(crds: Cluster, kubectl: Kubectl) -> None:
    kubectl("label", "namespace", kubectl.namespace, "pod-security.kubernetes.io/enforce=restricted")
    namespace = kubectl.namespace
    chosen = replace(settings().plan_settings(), store_uri="s3://models/here", store_secret="s3")

    async def scenario() -> Json:
        configuration = await load_configuration(str(crds.kubeconfig))
        async with KubernetesPort(configuration) as port:
            cache = ClusterCache(chosen)
            value = objects.endpoint("emotion")
            cache.endpoints.put({**value, "metadata": {**value["metadata"], "namespace": namespace}})
            cluster: ClusterPort = port
            collector = StoreCollection(cluster, cache, caches_current=lambda: True, clock=lambda: DAY)
            watch = asyncio.create_task(Informer(port, cache.pods, namespace=namespace).run())
            there = asyncio.Event()
            cache.pods.listen(lambda _: there.set())
            assert await collector.collect() is False
            # The Job controller has created its pod, so admission accepts it.
            async with asyncio.timeout(120):
                await there.wait()
            watch.cancel()
            await asyncio.gather(watch, return_exceptions=True)
            (key,) = cache.jobs
            await port.delete(cache.jobs.kind, key.name, namespace)
        return {"name": key.name}

    made = asyncio.run(scenario())

    kubectl("wait", "--for=delete", f"configmap/{made['name']}", "--timeout=60s")
    assert json.loads(kubectl("get", "jobs", "-o", "json"))["items"] == []


def test_the_command_of_the_job_exists_in_the_image(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (container,) = job(CollectionTarget(CollectionHome("a", Pod())), 1, settings().plan_settings())["spec"]["template"][
        "spec"
    ]["containers"]
    keep = tmp_path / "keep.json"
    keep.write_text('{"keep": []}')
    (tmp_path / "store").mkdir()
    words = [
        str(keep) if word.startswith("/etc/") else word for word in (*container["command"][5:], *container["args"])
    ]

    assert container["command"][:5] == ["python", "-I", "-u", "-m", "penstock_runtime.store"]
    assert main(["--store", f"file://{tmp_path / 'store'}", *words]) == 0
