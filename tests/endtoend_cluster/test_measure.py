"""`kubectl penstock plan NAME --measure`: a real job measures a hardware class, and leaves only its result."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from penstock.resources.base import API_VERSION
from testbed.kubectl import Kubectl
from tests.endtoend_cluster.installation import WITH_CAPACITY, Endpoint, is_ready
from tests.endtoend_cluster.test_scaling import kubectl_penstock

pytestmark = [pytest.mark.slow, pytest.mark.extended, pytest.mark.timeout(1800)]

CLASS, LABEL = "measured-of-tests", "penstock.dev/measured-of-tests"


@pytest.fixture
def node(shared_kubectl: Kubectl) -> Iterator[str]:
    """The name of the one node of the class."""
    name = next(str(one["metadata"]["name"]) for one in shared_kubectl.items("nodes") if is_ready(one))
    term = {"matchExpressions": [{"key": LABEL, "operator": "Exists"}]}
    spec = {"nodeSelectorTerms": [term], "price": {"perCoreHour": 0.05}}
    shared_kubectl("label", f"node/{name}", f"{LABEL}=yes")
    shared_kubectl.apply(
        {"apiVersion": API_VERSION, "kind": "HardwareClass", "metadata": {"name": CLASS}, "spec": spec}
    )
    yield name
    shared_kubectl("delete", "hardwareclass", CLASS)
    shared_kubectl("label", f"node/{name}", f"{LABEL}-")


def test_a_job_measures_the_class_and_the_plan_has_its_figures(
    endpoint: Callable[[str], Endpoint], node: str, shared_kubectl: Kubectl, tmp_path: Path
) -> None:
    endpoint("planned").apply(**WITH_CAPACITY, suspend=True)
    words = ("planned", "--measure", f"--classes={CLASS}", "--rate=1", f"--ledger={tmp_path / 'ledger'}")

    listed = kubectl_penstock(shared_kubectl, "plan", *words, "--dry-run")
    done = kubectl_penstock(shared_kubectl, "plan", *words, "--output=json", seconds=1500)

    assert listed.returncode == 0, listed.stderr
    assert f"{CLASS}, 1 core: on one of {node} " in listed.stdout
    assert done.returncode == 0, done.stderr
    print(done.stderr)
    assert f"{CLASS}, 1 core: measured: " in done.stderr
    shown = json.loads(done.stdout)
    (row,) = [one for one in shown["rows"] if (one["hardware_class"], one["cores"]) == (CLASS, 1)]
    assert row["evidence"]["origin"] == "measured on the class"
    assert row["figures"]["replicas_peak"] >= 1
    assert f"planned-{CLASS}-1" not in shared_kubectl("get", "modelendpoints", "--output=name")
    models = {one["spec"]["hardwareClass"]: one for one in shared_kubectl.items("optimizedmodels")}
    assert models[CLASS]["status"]["phase"] == "Ready"
    assert row["evidence"]["basis"].startswith(f"OptimizedModel {models[CLASS]['metadata']['name']}, ")
