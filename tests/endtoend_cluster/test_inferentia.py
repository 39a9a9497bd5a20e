"""An endpoint on Inferentia, from `kubectl apply` to `kubectl delete`, with a device plugin for tests and the stand-in
for the Neuron SDK: a compile job, a pod that owns the device, requests, scaling, deletion.

Times and answers are those of the stand-in. Not yet run on a device.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.resources.shipped_classes import HARDWARE_CLASSES, INSTANCE_TYPE
from penstock_operator.plan.names import NAME, OPTIMIZED_MODEL, OPTIMIZER
from testbed.device_plugin import running_device_plugin
from testbed.kubectl import Kubectl
from tests.endtoend_cluster.inferentia import devices, write_interpreter
from tests.endtoend_cluster.installation import Endpoint, Installation, Json, is_ready
from tests.endtoend_cluster.load import until_answered
from tests.endtoend_cluster.test_life import until_gone
from tests.optimizer.end_to_end.small_model import HIDDEN, write_small_bert

pytestmark = [pytest.mark.slow, pytest.mark.extended, pytest.mark.timeout(1800)]

RESOURCE = "aws.amazon.com/neuron"


@pytest.fixture
def neuron_node(installation: Installation, file_sources: Path, tmp_path: Path) -> Iterator[str]:
    """The name of a node with one device, and a HardwareClass `inf2-of-tests` with one CPU of the host for it."""
    cluster, kubectl = installation.cluster, installation.cluster.kubectl
    assert cluster.machine is not None, "this needs the nodes of this machine"
    node = cluster.machine.nodes[-1]
    write_interpreter(file_sources)
    write_small_bert(file_sources / "model")
    # The job runs as another user.
    for path in (file_sources / "model").rglob("*"):
        path.chmod(0o755 if path.is_dir() else 0o644)
    folder = tmp_path / "machine"
    folder.mkdir()
    hardware: dict[str, Any] = copy.deepcopy(HARDWARE_CLASSES["inf2"].to_object())
    hardware["neuron"] |= {"hostCpusPerDevice": 1}
    name = "inf2-of-tests"
    kubectl.apply(
        {"apiVersion": "penstock.dev/v1alpha1", "kind": "HardwareClass", "metadata": {"name": name}, "spec": hardware}
    )
    kubectl("label", "--overwrite", f"node/{node.name}", f"{INSTANCE_TYPE}=inf2.xlarge")
    try:
        with running_device_plugin(devices(node, folder, file_sources), tmp_path):
            kubectl.wait(
                r"jsonpath={.status.allocatable.aws\.amazon\.com/neuron}=1", f"node/{node.name}", timeout_seconds=60
            )
            yield node.name
    finally:
        kubectl("label", f"node/{node.name}", f"{INSTANCE_TYPE}-")
        kubectl("delete", "hardwareclass", name, "--ignore-not-found")


def test_an_endpoint_is_compiled_without_a_device_and_answers_from_a_pod_that_owns_one(
    endpoint: Callable[[str], Endpoint], neuron_node: str, file_sources: Path, shared_kubectl: Kubectl
) -> None:
    one = endpoint("inferentia")
    one.apply(
        model=f"file://{file_sources}/model",
        task="feature-extraction",
        hardwareClass="inf2-of-tests",
        cores=2,
        workload={"sequenceLengths": [12]},
        serving={"maxInputTokens": 24},
        optimization={"budgetSeconds": 600},
    )
    one.until(lambda body: bool(body.get("status", {}).get("optimizedModel")), "known")

    body = one.until_optimised(seconds=1200)
    assert "neuron" in body["status"]["plan"]["summary"]
    assert one.condition("CoresPinned", body)["reason"] == "NotNeeded"
    of_job = f"{NAME}={OPTIMIZER},{OPTIMIZED_MODEL}={body['status']['optimizedModel']}"
    (job,) = shared_kubectl.items("pods", of_job)
    assert RESOURCE not in job["spec"]["containers"][0]["resources"]["limits"]

    (pod,) = one.pods()
    assert pod["spec"]["nodeName"] == neuron_node
    assert pod["spec"]["containers"][0]["resources"]["limits"][RESOURCE] == "1"
    answer = until_answered(one.address(), seconds=300)
    assert (answer.status, len(answer.vector)) == (200, HIDDEN)

    # The device is released, and taken again by another pod.
    shared_kubectl("scale", f"modelendpoint/{one.name}", "--replicas=0")
    one.until(lambda _: not one.pods(), "without pods")
    shared_kubectl("scale", f"modelendpoint/{one.name}", "--replicas=1")

    def is_replaced(_: Json) -> bool:
        # The first pod, which ends, answers until it has drained.
        ready = [other for other in one.pods() if is_ready(other)]
        return len(ready) == 1 and ready[0]["metadata"]["uid"] != pod["metadata"]["uid"]

    one.until(is_replaced, "served by another pod", seconds=600)
    again = until_answered(one.address(), seconds=300)
    assert again.vector == pytest.approx(answer.vector, abs=1e-5)

    shared_kubectl("delete", "modelendpoint", one.name, "--timeout=60s")
    until_gone(shared_kubectl, one.name)
