"""What a user of kubectl sees: explanations, defaults, columns, scaling, refusals."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from penstock.resources.endpoint import ModelEndpoint
from penstock.resources.files.reading import from_file
from testbed.cluster import Cluster
from testbed.kubectl import Kubectl, KubectlError

EXAMPLE = Path(__file__).parents[2] / "examples" / "sentence-embedding.yaml"
ENDPOINT: dict[str, Any] = {
    "apiVersion": "penstock.dev/v1alpha1",
    "kind": "ModelEndpoint",
    "metadata": {"name": "emotion"},
    "spec": {"model": "hf://org/emotion", "task": "text-classification", "hardwareClass": "icelake", "cores": 2},
}
OPTIMIZED: dict[str, Any] = {
    "apiVersion": "penstock.dev/v1alpha1",
    "kind": "OptimizedModel",
    "metadata": {"name": "0123456789abcdef"},
    "spec": {"model": "hf://org/emotion", "task": "fill-mask", "toolchain": {"image": "x:1", "version": "0.1.0"}},
}
STATUS: dict[str, Any] = {
    "observedGeneration": 1,
    "reason": "Serving",
    "replicas": 3,
    "readyReplicas": 3,
    "selector": "penstock.dev/endpoint=emotion",
    "p95": "14 ms",
    "speedUp": "4.7x",
    "plan": {"summary": "openvino-int8, 1x2 threads", "costPerMillion": 0.36},
    "conditions": [
        {"type": "Ready", "status": "True", "reason": "Serving", "message": "All is well.", "observedGeneration": 1,
         "lastTransitionTime": "2026-11-21T10:00:00Z"},
    ],
}  # fmt: skip


@pytest.fixture(scope="module")
def discovered(crds: Cluster) -> Cluster:
    """Wait until short names and explanations are published, a moment after a CRD is established."""
    deadline = time.monotonic() + 60
    for short in ("mep", "om", "hwc"):
        while True:
            try:
                crds.kubectl("explain", short)
                break
            except KubectlError:
                assert time.monotonic() < deadline, f"{short} is not published after a minute"
                time.sleep(0.2)  # there is no event to wait for
    return crds


@pytest.fixture
def kube(discovered: Cluster, kubectl: Kubectl) -> Kubectl:
    """kubectl in a namespace of this test's own, on a cluster that knows our resources."""
    assert discovered.kubeconfig == kubectl.kubeconfig
    return kubectl


def explained(kube: Kubectl, path: str) -> str:
    return " ".join(kube("explain", path).split())


@pytest.mark.parametrize(
    ("path", "words"),
    [
        (
            "mep",
            "One model and one task as one HTTP service: Penstock optimises the model on the hardware that will serve",
        ),
        ("mep.spec.model", "Where the model comes from: `hf://organisation/name@revision`"),
        ("mep.spec", "cores <integer> Physical cores of one replica; NeuronCores on a class that has them."),
        ("mep.spec", "model <string> -required-"),
        ("mep.spec.objective", "What to optimise for. Latency and throughput: the highest rate within the latency."),
        ("mep.spec.scaling.mode", "What decides the number of replicas. `Internal`: the operator, from the measured"),
        ("mep.spec.scaling.mode", "ENUM: Internal HPA KEDA External None"),
        ("mep.spec.pod.memory", "Memory of one pod, requested and limited, such as 2Gi."),
        ("mep.spec.optimization.budgetSeconds", "Time limit of the whole optimisation."),
        ("mep.status.conditions", "Conditions, each with the reason and what to do."),
        ("om", "One optimisation and its result."),
        ("om.status.result.capacity", "What one replica takes, through the real HTTP server."),
        ("hwc", "A kind of node: which nodes belong to it, the resources that pods request on them"),
        ("hwc.spec.threadsPerCore", "CPUs of one physical core: 2 where SMT is on."),
    ],
)
def test_kubectl_explain_describes_the_fields(kube: Kubectl, path: str, words: str) -> None:
    assert words in explained(kube, path)


def test_the_example_is_accepted_and_gets_its_defaults(kube: Kubectl) -> None:
    kube("apply", "--filename", str(EXAMPLE))
    stored = kube.get("modelendpoint", "sentence-embedding")
    spec = stored["spec"]
    assert spec["hardwareClass"] == "any"
    assert spec["replicas"] == 1
    assert spec["suspend"] is False
    assert spec["rollout"] == {"maxSurge": 1, "drainSeconds": 20}
    assert spec["optimization"] == {
        "mode": "Auto",
        "accuracy": {},
        "whenNoCandidate": "ServeFP32",
        "serveWhileOptimizing": True,
    }
    assert spec["scaling"] == {
        "mode": "Internal",
        "minReplicas": 1,
        "maxReplicas": 4,
        "headroom": 0.75,
        "metrics": {"prometheus": {"queries": {}}},
        "whenMetricsMissing": "Hold",
    }
    # Omitted fields have the defaults of the reader of files.
    assert ModelEndpoint.from_object(stored).spec == from_file(ModelEndpoint, EXAMPLE).spec


def patch_status(kube: Kubectl, kind: str, name: str, status: dict[str, Any]) -> None:
    kube("patch", kind, name, "--subresource=status", "--type=merge", "--patch", json.dumps({"status": status}))


def columns(kube: Kubectl, *arguments: str) -> tuple[list[str], list[str]]:
    heads, row = kube("get", *arguments).splitlines()
    starts = [
        index
        for index, letter in enumerate(heads)
        if letter != " " and (index == 0 or heads[index - 2 : index] == "  ")
    ]
    ends = [*starts[1:], max(len(heads), len(row))]
    return heads.split(), [row[start:end].strip() for start, end in zip(starts, ends, strict=True)]


def test_kubectl_get_shows_the_columns_of_an_endpoint(kube: Kubectl) -> None:
    kube.apply(ENDPOINT)
    patch_status(kube, "mep", "emotion", STATUS)
    heads, row = columns(kube, "mep")
    assert heads == [
        "NAME", "MODEL", "CLASS", "CORES", "PLAN", "READY", "REASON", "REPLICAS", "P95", "SPEED-UP", "$/M", "AGE",
    ]  # fmt: skip
    assert row[:-1] == [
        "emotion", "hf://org/emotion", "icelake", "2", "openvino-int8, 1x2 threads", "True", "Serving", "3",
        "14 ms", "4.7x", "0.36",
    ]  # fmt: skip
    assert "All is well." in kube("get", "mep", "-o", "wide")


def test_kubectl_get_shows_the_columns_of_an_optimized_model(kube: Kubectl) -> None:
    kube.apply(OPTIMIZED)
    patch_status(kube, "om", "0123456789abcdef", {"phase": "Optimizing", "progress": "7/23"})
    heads, row = columns(kube, "om")
    assert heads[:6] == ["NAME", "MODEL", "CLASS", "CORES", "PHASE", "PROGRESS"]
    assert row[:6] == ["0123456789abcdef", "hf://org/emotion", "any", "1", "Optimizing", "7/23"]


def test_all_kinds_of_penstock_can_be_listed_by_category(kube: Kubectl) -> None:
    kube.apply(ENDPOINT, OPTIMIZED)
    assert set(kube("get", "penstock", "-o", "name").split()) >= {
        "modelendpoint.penstock.dev/emotion",
        "optimizedmodel.penstock.dev/0123456789abcdef",
    }


def test_an_endpoint_can_be_scaled(kube: Kubectl) -> None:
    kube.apply(ENDPOINT)
    patch_status(kube, "mep", "emotion", STATUS)
    kube("scale", "mep/emotion", "--replicas=5")
    assert kube.get("mep", "emotion")["spec"]["replicas"] == 5
    path = f"/apis/penstock.dev/v1alpha1/namespaces/{kube.namespace}/modelendpoints/emotion/scale"
    scale = json.loads(kube("get", "--raw", path))
    assert scale["spec"] == {"replicas": 5}
    assert scale["status"] == {"replicas": 3, "selector": "penstock.dev/endpoint=emotion"}


def test_a_status_is_not_written_with_a_spec(kube: Kubectl) -> None:
    kube.apply({**ENDPOINT, "status": STATUS})
    assert "status" not in kube.get("mep", "emotion")


def test_an_optimized_model_cannot_be_changed(kube: Kubectl) -> None:
    kube.apply(OPTIMIZED)
    kube.apply(OPTIMIZED)
    changed = {**OPTIMIZED, "spec": {**OPTIMIZED["spec"], "cores": 2}}
    with pytest.raises(
        KubectlError, match="an OptimizedModel cannot be changed, because its name is a hash of its spec"
    ):
        kube.apply(changed)


def test_a_rejection_has_a_remedy(kube: Kubectl) -> None:
    scaling = {"minReplicas": 4, "maxReplicas": 2}
    with pytest.raises(KubectlError) as caught:
        kube.apply({**ENDPOINT, "spec": {**ENDPOINT["spec"], "scaling": scaling}})
    message = "minReplicas 4 is over maxReplicas 2: raise maxReplicas or lower minReplicas"
    assert message in str(caught.value)
    assert "spec.scaling" in str(caught.value)


def test_two_writers_of_conditions_do_not_overwrite_each_other(kube: Kubectl) -> None:
    kube.apply(ENDPOINT)
    for writer, kind in (("one", "Ready"), ("two", "Theirs")):
        status = {"conditions": [{**STATUS["conditions"][0], "type": kind}]}
        resource = {key: ENDPOINT[key] for key in ("apiVersion", "kind", "metadata")}
        kube(
            "apply", "--server-side", "--subresource=status", f"--field-manager={writer}", "--filename", "-",
            text=json.dumps({**resource, "status": status}),
        )  # fmt: skip
    assert {one["type"] for one in kube.get("mep", "emotion")["status"]["conditions"]} == {"Ready", "Theirs"}
