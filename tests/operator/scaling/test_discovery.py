"""A real Prometheus finds the pods through a real API server, and the operator scales by its answers."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

from testbed.build import binary
from testbed.cluster import Cluster
from testbed.kubectl import Kubectl
from testbed.tools import PROMETHEUS
from tests.operator.scaling.prometheus_server import Server
from tests.operator.scaling.scene import Scene, played

WITHIN_SECONDS = 240.0


def discovery(kubeconfig: Path, namespace: str, port: int) -> dict[str, object]:
    """The scrape configuration of a PodMonitor of the serving pods, except for the port, which is the tests'."""
    meta = "__meta_kubernetes_pod"
    return {
        "job_name": "penstock",
        "kubernetes_sd_configs": [
            {"role": "pod", "kubeconfig_file": str(kubeconfig), "namespaces": {"names": [namespace]}}
        ],
        "relabel_configs": [
            {
                "source_labels": [f"{meta}_label_app_kubernetes_io_name"],
                "regex": "penstock-runtime",
                "action": "keep",
            },
            {
                "source_labels": [f"{meta}_ip"],
                "regex": "(.+)",
                "replacement": f"$1:{port}",
                "target_label": "__address__",
            },
            {"source_labels": ["__meta_kubernetes_namespace"], "target_label": "namespace"},
            {"source_labels": [f"{meta}_name"], "target_label": "pod"},
        ],
    }


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.usefixtures("classes")
def test_replicas_follow_prometheus_and_stay_when_it_is_killed(
    crds: Cluster, kubectl: Kubectl, kubeconfig: Path, tmp_path: Path
) -> None:
    program = binary(PROMETHEUS)

    async def play(scene: Scene) -> None:
        server = Server(program, tmp_path, [discovery(kubeconfig, kubectl.namespace, scene.fleet.port)])
        secret = {
            "apiVersion": "v1",
            "kind": "Secret",
            "metadata": {
                "name": "prometheus-access",
                "labels": {"penstock.dev/prometheus": "true"},
                "annotations": {"penstock.dev/prometheus-url": server.url},
            },
            "data": server.secret,
        }
        try:
            await scene.call(kubectl.apply, secret)
            async with scene.operating(
                prometheus_interval_seconds=1.0, prometheus_hosts=("127.0.0.1:*",), prometheus_networks=("127.0.0.0/8",)
            ):
                where = {"prometheus": {"url": server.url, "secretName": "prometheus-access"}}
                await scene.optimised(metrics=where)
                deadline, scene.now = time.monotonic() + WITHIN_SECONDS, time.time()
                while scene.deployment.wanted < 3:
                    await asyncio.sleep(1)
                    # Prometheus uses real time: send the requests of the time since the last tick.
                    scene.fleet.share(round(150 * (time.time() - scene.now)), scene.addresses.values())
                    scene.now = time.time()
                    await scene.autoscaler.tick(scene.now)
                    if scene.operator.controller.queue.busy:
                        await scene.operator.rest()
                        await scene.pods_serve()
                    log = (tmp_path / "log").read_text()[-2000:]
                    assert time.monotonic() < deadline, f"{scene.autoscaler.decisions()}\n{log}"
                peak = await scene.replicas()
                scaling = (await scene.found())["status"]["scaling"]
                assert "requests/s" in scaling["reason"]

                server.kill()
                for _ in range(120):
                    scene.now += 5
                    await scene.autoscaler.tick(scene.now)
                await scene.operator.rest()
                assert await scene.replicas() == peak
                status, reason, message = await scene.condition()
                assert (status, reason) == ("False", "MetricsMissing")
                assert "cannot be reached" in message
        finally:
            server.kill()

    played(kubectl, kubeconfig, play)
