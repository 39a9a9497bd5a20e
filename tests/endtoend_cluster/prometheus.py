"""A Prometheus in the cluster, which discovers the pods of a namespace through the API server."""

from __future__ import annotations

import json
import urllib.parse
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from testbed.build import binary
from testbed.cluster import Cluster
from testbed.images import Image
from testbed.kubectl import Kubectl
from testbed.tools import PROMETHEUS
from tests.charts.helm import CHART

IMAGE = "localhost/penstock-testbed-prometheus:1"
NAME = "prometheus"
PORT = 9090
SCRAPE_SECONDS = 2

Json = dict[str, Any]


def load_image(cluster: Cluster, folder: Path) -> None:
    """Give the nodes the test bed's build of it."""
    archive = folder / "prometheus.oci.tar"
    archive.write_bytes(Image(IMAGE, {"bin/prometheus": binary(PROMETHEUS).read_bytes()}, {}, ["prometheus"]).archive())
    cluster.load_image(archive)
    archive.unlink()


@dataclass(frozen=True)
class Prometheus:
    """A Prometheus in a namespace, for its pods. Its data is lost with its pod."""

    kubectl: Kubectl

    @property
    def url(self) -> str:
        """For the operator, by the cluster's DNS."""
        return f"http://{NAME}.{self.kubectl.namespace}.svc:{PORT}"

    @property
    def address(self) -> str:
        """For this machine."""
        return f"http://{self.kubectl.get('service', NAME)['spec']['clusterIP']}:{PORT}"

    def start(self) -> None:
        """Run it, with no more rights than to look at the pods of its namespace, and wait until it answers."""
        self.kubectl.apply(*_rights(self.kubectl.namespace), _settings(self.kubectl.namespace), _service(), _pod())
        self.kubectl.wait("condition=Ready", f"pod/{NAME}")

    def kill(self) -> None:
        """Kill it at once, as when its node is lost; no controller makes another."""
        self.kubectl("delete", "pod", NAME, "--grace-period=0", "--force", "--ignore-not-found")

    def targets(self) -> list[Json]:
        """What it scrapes, from its own API."""
        found: list[Json] = self._asked("targets?state=active")["activeTargets"]
        return found

    def value(self, query: str) -> float | None:
        """Of a query that gives one number; None while it gives none."""
        result = self._asked(f"query?{urllib.parse.urlencode({'query': query})}")["result"]
        return float(result[0]["value"][1]) if result else None

    def _asked(self, what: str) -> Any:
        with urllib.request.urlopen(f"{self.address}/api/v1/{what}", timeout=60) as response:
            return json.load(response)["data"]


def _rights(namespace: str) -> list[Json]:
    group = "rbac.authorization.k8s.io"
    rule = {"apiGroups": [""], "resources": ["pods"], "verbs": ["get", "list", "watch"]}
    return [
        {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": NAME}},
        {"apiVersion": f"{group}/v1", "kind": "Role", "metadata": {"name": NAME}, "rules": [rule]},
        {
            "apiVersion": f"{group}/v1",
            "kind": "RoleBinding",
            "metadata": {"name": NAME},
            "roleRef": {"apiGroup": group, "kind": "Role", "name": NAME},
            "subjects": [{"kind": "ServiceAccount", "name": NAME, "namespace": namespace}],
        },
    ]


def _settings(namespace: str) -> Json:
    """What a prometheus-operator makes of the chart's PodMonitor of the serving pods, and the chart's rules."""
    meta = "__meta_kubernetes_pod"
    job = {
        "job_name": "penstock-runtime",
        "kubernetes_sd_configs": [{"role": "pod", "namespaces": {"names": [namespace]}}],
        "relabel_configs": [
            {"source_labels": [f"{meta}_label_app_kubernetes_io_name"], "regex": "penstock-runtime", "action": "keep"},
            {"source_labels": [f"{meta}_container_port_name"], "regex": "internal", "action": "keep"},
            # A pod that has ended is no target.
            {"source_labels": [f"{meta}_phase"], "regex": "Failed|Succeeded", "action": "drop"},
            {"source_labels": ["__meta_kubernetes_namespace"], "target_label": "namespace"},
            {"source_labels": [f"{meta}_name"], "target_label": "pod"},
            {"source_labels": [f"{meta}_label_penstock_dev_endpoint"], "target_label": "penstock_dev_endpoint"},
        ],
    }
    times = dict.fromkeys(("scrape_interval", "scrape_timeout", "evaluation_interval"), f"{SCRAPE_SECONDS}s")
    rules = yaml.safe_load((CHART / "files/recording-rules.yaml").read_text())["rules"]
    files = {
        # JSON is YAML.
        "prometheus.yml": json.dumps({"global": times, "scrape_configs": [job], "rule_files": ["/settings/rules.yml"]}),
        "rules.yml": json.dumps({"groups": [{"name": "penstock", "rules": rules}]}),
    }
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": NAME}, "data": files}


def _service() -> Json:
    spec = {"selector": {"app": NAME}, "ports": [{"port": PORT}]}
    return {"apiVersion": "v1", "kind": "Service", "metadata": {"name": NAME}, "spec": spec}


def _pod() -> Json:
    container = {
        "name": NAME,
        "image": IMAGE,
        "args": ["--config.file=/settings/prometheus.yml", "--storage.tsdb.path=/data"],
        "readinessProbe": {"httpGet": {"path": "/-/ready", "port": PORT}, "periodSeconds": 1},
        "volumeMounts": [{"name": "settings", "mountPath": "/settings"}, {"name": "data", "mountPath": "/data"}],
    }
    spec = {
        "serviceAccountName": NAME,
        "securityContext": {"runAsUser": 65534, "runAsNonRoot": True},
        "containers": [container],
        "volumes": [{"name": "settings", "configMap": {"name": NAME}}, {"name": "data", "emptyDir": {}}],
        "terminationGracePeriodSeconds": 1,
    }
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": NAME, "labels": {"app": NAME}}, "spec": spec}
