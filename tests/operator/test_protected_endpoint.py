"""An endpoint with keys, on a real API server: the operator, a real serving process, and the kubelet's part by hand."""

from __future__ import annotations

import asyncio
import base64
import json
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from penstock_operator.cluster.store import ObjectKey
from penstock_operator.control.pod_reports import PodInfoReader
from penstock_operator.facts.names import CONTAINER
from penstock_runtime.app import server
from penstock_runtime.host import CoreGrant, read_host
from testbed.cluster import Cluster
from testbed.fixtures import install_crds
from testbed.kubectl import Kubectl
from tests.operator import kubelet
from tests.operator.running import Running, running
from tests.runtime.http.serving import Endpoint, Gate, serving

ENDPOINT = {
    "apiVersion": "penstock.dev/v1alpha1",
    "kind": "ModelEndpoint",
    "metadata": {"name": "emotion"},
    "spec": {
        "model": "hf://org/model@main",
        "task": "text-classification",
        "auth": {"secretName": "keys"},
        "scaling": {"mode": "None"},
    },
}
KEY = "a-key-of-alice"
NODE = "node-of-keys"


class Kubelet:
    """Runs the one pod of the endpoint: mounts its Secret, probes it, and reports its status."""

    def __init__(self, kubectl: Kubectl, process: Endpoint, keys: Path) -> None:
        self._kubectl = kubectl
        self._process = process
        self._keys = keys
        self.pod = ""
        self._since: dict[bool, str] = {}
        """When the pod became ready or not ready: a Deployment counts a pod that was ready for some seconds."""

    def sync(self) -> None:
        """Once."""
        (pod,) = self._kubectl.items("pods", "app.kubernetes.io/name=penstock-runtime")
        self.pod = pod["metadata"]["name"]
        if "nodeName" not in pod["spec"]:
            self._bind()
        container = pod["spec"]["containers"][0]
        (volume,) = [entry["secret"] for entry in pod["spec"]["volumes"] if "secret" in entry]
        names = [one["metadata"]["name"] for one in self._kubectl.items("secrets")]
        if volume["secretName"] in names:
            secret = self._kubectl.get("secret", volume["secretName"])
            for name, value in secret["data"].items():
                (self._keys / name).write_bytes(base64.b64decode(value))
        else:
            assert volume["optional"]
        cpus = tuple(range(4, 4 + int(container["resources"]["requests"]["cpu"])))
        status = self._process.server.status
        status.host = replace(read_host(), online=cpus, affinity=cpus, cpuset=cpus, quota=None)
        status.grant = CoreGrant(cpus[:1], cpus[1:], (0,), pinned=True, keep=True, findings=())
        port = container["readinessProbe"]["httpGet"]["port"]
        assert port == "internal"
        url = f"http://127.0.0.1:{self._process.server.internal_port}/readyz"
        self._report(ready=httpx.get(url, timeout=60).status_code == 200)

    def _bind(self) -> None:
        """The scheduler's part."""
        binding = {
            "apiVersion": "v1",
            "kind": "Binding",
            "metadata": {"name": self.pod},
            "target": {"apiVersion": "v1", "kind": "Node", "name": NODE},
        }
        path = f"/api/v1/namespaces/{self._kubectl.namespace}/pods/{self.pod}/binding"
        self._kubectl("create", "--raw", path, "--filename", "-", text=json.dumps(binding))

    def _report(self, *, ready: bool) -> None:
        now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        self._since = {ready: self._since.get(ready, now)}
        state = {"running": {"startedAt": now}}
        container = {"name": CONTAINER, "image": "x", "imageID": "x", "ready": ready, "restartCount": 0, "state": state}
        conditions = [
            {"type": kind, "status": "True" if value else "False", "lastTransitionTime": self._since[ready]}
            for kind, value in (("PodScheduled", True), ("Ready", ready))
        ]
        status: dict[str, Any] = {
            "phase": "Running",
            "podIP": "127.0.0.1",
            "podIPs": [{"ip": "127.0.0.1"}],
            "conditions": conditions,
            "containerStatuses": [container],
        }
        patch = json.dumps({"status": status})
        self._kubectl("patch", "pod", self.pod, "--subresource=status", "--type=merge", "-p", patch)


async def reaches(kubectl: Kubectl, operator: Running, node: Kubelet, wanted: tuple[str, str]) -> str:
    """Wait until the condition Ready has this status and reason; its message."""
    found: dict[str, str] = {}
    for _ in range(30):
        await asyncio.to_thread(node.sync)  # again and again: the scheduler writes that it finds no node
        await operator.rest()
        value = await asyncio.to_thread(kubectl.get, "modelendpoint", "emotion")
        (found,) = [entry for entry in value["status"]["conditions"] if entry["type"] == "Ready"]
        if (found["status"], found["reason"]) == wanted:
            return found["message"]
        await asyncio.sleep(0.5)
    raise AssertionError(found)


@pytest.mark.slow
def test_an_endpoint_with_a_key_becomes_ready(
    nodeless: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without its Secret a condition names what is missing, and no request is answered; with it, it becomes ready."""
    monkeypatch.setattr(server, "REFRESH_SECONDS", 0.05)
    install_crds(nodeless)
    nodeless.kubectl.apply(
        {"apiVersion": "penstock.dev/v1alpha1", "kind": "HardwareClass", "metadata": {"name": "any"}, "spec": {}},
        # Without it the pod would be collected as one of a node that is gone. No other pod is scheduled to it.
        {"apiVersion": "v1", "kind": "Node", "metadata": {"name": NODE}, "spec": {"unschedulable": True}},
    )
    gate = Gate()
    gate.open()

    async def scenario(kubectl: Kubectl, process: Endpoint) -> tuple[str, list[int]]:
        node = Kubelet(kubectl, process, tmp_path)
        async with running(nodeless.kubeconfig, kubectl.namespace) as operator:
            reader = PodInfoReader(operator.cache, timeout_seconds=30, concurrency=1, port=process.server.internal_port)
            reading = asyncio.create_task(reader.run())
            try:
                await asyncio.to_thread(kubectl.apply, ENDPOINT)
                await operator.rest()
                await asyncio.to_thread(lambda: kubelet.succeed(kubectl, kubelet.pod_of_job(kubectl)))
                place = ObjectKey(kubectl.namespace, "emotion")
                while operator.cache.deployments.facts(place) is None:  # noqa: ASYNC110 - the cache has no event for it
                    await asyncio.sleep(0.05)
                await asyncio.to_thread(kubectl.wait, "create", "pod", "-l", "app.kubernetes.io/name=penstock-runtime")
                message = await reaches(kubectl, operator, node, ("False", "NoKeys"))
                statuses = [ask(process, KEY)]
                secret = {
                    "apiVersion": "v1",
                    "kind": "Secret",
                    "metadata": {"name": "keys"},
                    "stringData": {"alice": KEY},
                }
                await asyncio.to_thread(kubectl.apply, secret)
                await reaches(kubectl, operator, node, ("True", "Serving"))
                return message, [*statuses, ask(process, KEY), ask(process, "another")]
            finally:
                reading.cancel()
                with suppress(asyncio.CancelledError):
                    await reading

    try:
        with (
            nodeless.temporary_namespace("keys") as namespace,
            serving(gate, internal_port=0, auth_token_folder=tmp_path) as process,
        ):
            message, statuses = asyncio.run(scenario(nodeless.kubectl.within(namespace), process))
    finally:
        nodeless.kubectl("delete", "node", NODE)

    assert "the Secret keys, which spec.auth names" in message
    assert "kubectl create secret generic keys" in message
    assert statuses == [401, 200, 401]


def ask(process: Endpoint, key: str) -> int:
    headers = {"authorization": f"Bearer {key}"}
    return httpx.post(f"{process.url}/predict", json={"inputs": "x"}, headers=headers, timeout=60).status_code
