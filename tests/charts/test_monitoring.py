"""A real API server accepts the objects of typical values and the monitors, and promtool accepts the rules."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from testbed import modules
from testbed.build import binary
from testbed.control_plane import ControlPlane
from testbed.kubectl import Kubectl, KubectlError
from testbed.tools import PROMTOOL
from tests.charts.helm import CHART, NAMESPACE, Helm, Manifest, of_kind

DEFINITIONS = ("podmonitors", "prometheusrules")


@pytest.fixture(scope="module")
def kubectl(private_control_plane: ControlPlane) -> Kubectl:
    """Of a control plane that has the prometheus-operator's definitions."""
    folder = modules.files(modules.PROMETHEUS_OPERATOR) / "example" / "prometheus-operator-crd"
    plain = private_control_plane.kubectl
    for name in DEFINITIONS:
        file = folder / f"monitoring.coreos.com_{name}.yaml"
        plain("apply", "--server-side", "--filename", str(file))
        kind = yaml.safe_load(file.read_text())["spec"]["names"]["kind"]
        plain.wait(f"jsonpath={{.status.acceptedNames.kind}}={kind}", f"crd/{name}.monitoring.coreos.com")
        plain.wait("condition=Established", f"crd/{name}.monitoring.coreos.com")
    plain("apply", "--server-side", "--filename", str(CHART / "crds"))
    plain("wait", "--for=condition=Established", "--timeout=60s", "--filename", str(CHART / "crds"))
    plain("create", "namespace", NAMESPACE)
    return plain.within(NAMESPACE)


def monitoring(chart: Helm, **values: Any) -> list[Manifest]:
    labels = {"enabled": True, "labels": {"release": "monitoring"}}
    made = chart.template({"podMonitor": labels, "alerts": labels, **values})
    return [one for one in made if one["apiVersion"] == "monitoring.coreos.com/v1"]


@pytest.mark.parametrize(
    "namespaces", [{}, {"watchNamespaces": ["team-a", "team-b"]}, {"ignoreNamespaces": ["team-a", "team-b"]}]
)
def test_the_prometheus_operators_definitions_accept_every_field(
    namespaces: dict[str, list[str]], chart: Helm, kubectl: Kubectl
) -> None:
    objects = monitoring(chart, **namespaces)
    assert sorted(one["kind"] for one in objects) == ["PodMonitor"] * 3 + ["PrometheusRule"] * 2

    for value in objects:
        # Strict: a field that the definition does not know is an error, and not dropped.
        shown = kubectl(
            "create",
            "--dry-run=server",
            "--validate=strict",
            "--output=json",
            "--filename=-",
            text=json.dumps(value),
        )
        assert json.loads(shown)["spec"] == value["spec"]


def test_pods_that_another_release_scrapes_are_left_out(chart: Helm) -> None:
    """A load that is counted twice gets twice the replicas."""
    for value in monitoring(chart, ignoreNamespaces=["team-a", "team-b"]):
        if value["kind"] == "PodMonitor" and "namespaceSelector" in value["spec"]:
            (place,) = value["spec"]["podMetricsEndpoints"]
            (rule,) = place["relabelings"]
            assert (rule["sourceLabels"], rule["action"]) == (["__meta_kubernetes_namespace"], "drop")
            # Prometheus anchors the expression.
            assert [bool(re.fullmatch(rule["regex"], name)) for name in ("team-a", "team-b", "team-abc")] == [
                True,
                True,
                False,
            ]


@pytest.mark.parametrize(
    ("kind", "spoil"),
    [
        ("PodMonitor", lambda spec: spec["podMetricsEndpoints"][0].update(interval="soon")),
        ("PodMonitor", lambda spec: spec["podMetricsEndpoints"][0].update(porrt="http")),
        ("PrometheusRule", lambda spec: spec["groups"][0]["rules"][0].pop("expr")),
    ],
    ids=["an interval that is none", "an unknown field", "a rule without an expression"],
)
def test_the_definitions_refuse_wrong_monitors(
    kind: str, spoil: Callable[[Any], object], chart: Helm, kubectl: Kubectl
) -> None:
    value = next(one for one in monitoring(chart) if one["kind"] == kind)
    spoil(value["spec"])

    with pytest.raises(KubectlError, match=r"podMetricsEndpoints|expr"):
        kubectl("create", "--dry-run=server", "--validate=strict", "--filename=-", text=json.dumps(value))


S3: Manifest = {"hostPath": {"enabled": False}, "s3": {"enabled": True, "uri": "s3://models", "secretName": "store"}}
CLAIM: Manifest = {"hostPath": {"enabled": False}, "claim": {"enabled": True}}
VALUE_SETS: dict[str, Manifest] = {
    "defaults": {},
    "one node": {
        "replicas": 1,
        "podDisruptionBudget": {"enabled": False},
        "operator": {"resources": {"requests": None}},
    },
    "some namespaces with a claim": {"watchNamespaces": [NAMESPACE, "default"], "store": CLAIM},
    "an object store": {"store": {**S3, "collect": {"mode": "Always", "serviceAccountAnnotations": {"role": "x"}}}},
    "own registry and digests": {
        "images": {
            "registry": "registry.example:5000/team",
            "operator": {"digest": "sha256:" + "a" * 64},
            "pullSecrets": ["registry"],
            "pullPolicy": "Always",
        }
    },
    "OpenShift": {
        "podUser": 0,
        "store": CLAIM,
        "operator": {"podSecurityContext": {"runAsUser": None, "runAsGroup": None, "fsGroup": None}},
    },
    "company network": {
        "extraEnv": {"HTTPS_PROXY": "http://proxy:3128", "NO_PROXY": "localhost,10.0.0.0/8"},
        "caBundle": {"configMapName": "cas", "key": "bundle.pem"},
        "commonLabels": {"team": "ml", "cost-centre": "4711"},
    },
    "monitoring and KEDA": {
        "podMonitor": {"enabled": True, "labels": {"release": "prom"}},
        "alerts": {
            "enabled": True,
            "runbookUrl": "https://docs.example/alerts",
            "disabled": ["PenstockSlotsExhausted"],
        },
        "keda": {"enabled": True},
        "prometheus": {"secretNames": ["thanos"], "allowedHosts": ["*.monitoring.svc"]},
        "networkPolicy": {"scrapeFrom": [{"podSelector": {"matchLabels": {"app": "prometheus"}}}]},
    },
    "placement of the operator": {
        "operator": {
            "nodeSelector": {"pool": "system"},
            "tolerations": [{"key": "system", "operator": "Exists", "effect": "NoSchedule"}],
            "priorityClassName": "system-cluster-critical",
            "podAnnotations": {"note": "x"},
            "podLabels": {"sidecar": "no"},
            "extraEnv": [{"name": "TZ", "value": "UTC"}],
            "extraVolumes": [{"name": "token", "secret": {"secretName": "prometheus"}}],
            "extraVolumeMounts": [{"name": "token", "mountPath": "/token"}],
            "settings": {"PROMETHEUS_URL": "https://prometheus", "PROMETHEUS_TOKEN_FILE": "/token/token"},
        }
    },
    "strict": {
        "policy": {"pod": {"nodeSelectors": [], "labels": ["team"]}},
        "userRoles": {"enabled": False},
        "hardwareClasses": {"graviton3": False, "inf1": False, "inf2": False},
        "networkPolicy": {"monitoringLabels": []},
        "maxConcurrentOptimizations": 4,
        "maxConcurrentRollouts": 2,
        "serviceAccount": {"name": "penstock", "annotations": {"note": "x"}},
    },
}
"""Values as installations have them."""


@pytest.mark.parametrize("values", VALUE_SETS.values(), ids=VALUE_SETS.keys())
def test_the_api_server_accepts_all_objects_of_typical_values(values: Manifest, chart: Helm, kubectl: Kubectl) -> None:
    by_namespace: dict[str, list[Manifest]] = {}
    for one in chart.template(values):
        by_namespace.setdefault(one["metadata"].get("namespace", NAMESPACE), []).append(one)

    for namespace, objects in by_namespace.items():
        # Strict: a field that the API does not know is an error.
        words = ("--dry-run=server", "--validate=strict", "--filename=-")
        kubectl.within(namespace)("apply", *words, text=yaml.safe_dump_all(objects))


def test_promtool_accepts_the_rules(chart: Helm, tmp_path: Path) -> None:
    rule = of_kind(chart.template({"podMonitor": {"enabled": True}}), "PrometheusRule")
    file = tmp_path / "rules.yaml"
    file.write_text(yaml.safe_dump(rule["spec"]))

    run = subprocess.run(
        [binary(PROMTOOL), "check", "rules", "--lint=all", "--lint-fatal", file],
        capture_output=True,
        text=True,
        check=False,
    )

    assert run.returncode == 0, f"{run.stdout}{run.stderr}"
    assert f"{len(rule['spec']['groups'][0]['rules'])} rules found" in run.stdout
