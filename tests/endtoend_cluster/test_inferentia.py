"""An endpoint on Inferentia, from `kubectl apply` to `kubectl delete`, with a device plugin for tests and the stand-in
for the Neuron SDK: a compile job, pods that own a device each, the measurement of their capacity, requests, scaling by
load from one replica to two and back, by hand to none and one, deletion.

Times and answers are those of the stand-in. Not yet run on a device.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from penstock.resources.shipped_classes import HARDWARE_CLASSES, INSTANCE_TYPE
from penstock_operator.facts.names import NAME, OPTIMIZED_MODEL, OPTIMIZER
from testbed.device_plugin import running_device_plugin
from testbed.kubectl import Kubectl
from tests.endtoend_cluster.inferentia import RUN_SECONDS, devices, write_interpreter
from tests.endtoend_cluster.installation import Endpoint, Installation, Json, is_ready
from tests.endtoend_cluster.load import constant_load, until_answered
from tests.endtoend_cluster.test_life import until_gone
from tests.optimizer.end_to_end.small_model import HIDDEN, write_small_bert

pytestmark = [pytest.mark.slow, pytest.mark.extended, pytest.mark.timeout(1800)]

RESOURCE = "aws.amazon.com/neuron"


@pytest.fixture
def neuron_nodes(installation: Installation, file_sources: Path, tmp_path: Path) -> Iterator[list[str]]:
    """The names of two nodes with a device each, and a HardwareClass `inf2-of-tests` with one CPU of the host for it:
    nodes of the test bed own one core each."""
    cluster, kubectl = installation.cluster, installation.cluster.kubectl
    assert cluster.machine is not None, "this needs the nodes of this machine"
    nodes = cluster.machine.nodes[:2]
    assert len(nodes) == 2
    write_interpreter(file_sources)
    write_small_bert(file_sources / "model")
    # The job runs as another user.
    for path in (file_sources / "model").rglob("*"):
        path.chmod(0o755 if path.is_dir() else 0o644)
    hardware: dict[str, Any] = copy.deepcopy(HARDWARE_CLASSES["inf2"].to_object())
    hardware["neuron"] |= {"hostCpusPerDevice": 1}
    name = "inf2-of-tests"
    kubectl.apply(
        {"apiVersion": "penstock.dev/v1alpha1", "kind": "HardwareClass", "metadata": {"name": name}, "spec": hardware}
    )
    with ExitStack() as stack:
        stack.callback(kubectl, "delete", "hardwareclass", name, "--ignore-not-found")
        for node in nodes:
            own, machine = tmp_path / node.name, tmp_path / node.name / "machine"
            machine.mkdir(parents=True)
            kubectl("label", "--overwrite", f"node/{node.name}", f"{INSTANCE_TYPE}=inf2.xlarge")
            stack.callback(kubectl, "label", f"node/{node.name}", f"{INSTANCE_TYPE}-")
            stack.enter_context(running_device_plugin(devices(node, machine, file_sources), own))
        for node in nodes:
            kubectl.wait(
                r"jsonpath={.status.allocatable.aws\.amazon\.com/neuron}=1", f"node/{node.name}", timeout_seconds=60
            )
        yield [node.name for node in nodes]


def uid(pod: Json) -> str:
    """What tells a pod from another one of the same endpoint."""
    return str(pod["metadata"]["uid"])


def until_replicas(one: Endpoint, count: int, *, without: Collection[str] = ()) -> list[Json]:
    """Until it has this number of pods that are not ending, all of them ready. `without`: pods that may not be among
    them."""
    found: list[Json] = []

    def is_scaled(_: Json) -> bool:
        found[:] = one.pods()
        settled = len(found) == count and all(map(is_ready, found))
        return settled and not set(map(uid, found)) & set(without)

    one.until(is_scaled, f"scaled to {count}", seconds=600)
    return found


def test_an_endpoint_is_compiled_without_a_device_and_each_of_its_pods_owns_one(
    endpoint: Callable[[str], Endpoint], neuron_nodes: list[str], file_sources: Path, shared_kubectl: Kubectl
) -> None:
    one = endpoint("inferentia")
    spec: Json = {
        "model": f"file://{file_sources}/model",
        "task": "feature-extraction",
        "hardwareClass": "inf2-of-tests",
        "cores": 2,
        "workload": {"sequenceLengths": [12]},
        "serving": {"maxInputTokens": 24},
        "optimization": {"budgetSeconds": 600},
    }
    one.apply(**spec)
    one.until(lambda body: bool(body.get("status", {}).get("optimizedModel")), "known")

    body = one.until_optimised(seconds=1200)
    assert "neuron" in body["status"]["plan"]["summary"]
    assert one.condition("CoresPinned", body)["reason"] == "NotNeeded"
    of_job = f"{NAME}={OPTIMIZER},{OPTIMIZED_MODEL}={body['status']['optimizedModel']}"
    (job,) = shared_kubectl.items("pods", of_job)
    assert RESOURCE not in job["spec"]["containers"][0]["resources"]["limits"]

    (pod,) = one.pods()
    assert pod["spec"]["nodeName"] in neuron_nodes
    assert pod["spec"]["containers"][0]["resources"]["limits"][RESOURCE] == "1"
    answer = until_answered(one.address(), seconds=300)
    assert (answer.status, len(answer.vector)) == (200, HIDDEN)

    # The first pod has measured what a replica takes, before it was ready.
    def is_measured(_: Json) -> bool:
        model = shared_kubectl.get("optimizedmodel", body["status"]["optimizedModel"])
        capacity = model["status"]["result"]["capacity"]
        return not capacity.get("provisional") and 5 < capacity.get("requestsPerSecond", 0) < 2 / RUN_SECONDS * 1.1

    one.until(is_measured, "measured", seconds=120)

    # More load than a replica takes: a second one takes the device of the other node. Less load: it goes again.
    one.apply(**spec, scaling={"mode": "Internal", "minReplicas": 1, "maxReplicas": 2, "scaleDownWindowSeconds": 30})
    with constant_load(one.address(), per_second=1) as few:
        few.more(5)
        with ExitStack() as stack:
            many = [stack.enter_context(constant_load(one.address(), per_second=20)) for _ in range(4)]
            both = until_replicas(one, 2)
            (second,) = [other["metadata"]["name"] for other in both if uid(other) != uid(pod)]
            # It learnt what the first one had measured.
            log = shared_kubectl("logs", second)
            print(log)
            assert "event=CapacityMeasured" not in log
            many[0].more(20)
        (left,) = until_replicas(one, 1)
        few.more(5)
    assert [failure for load in (few, *many) for failure in load.failures] == []
    assert one.condition("CurveCurrent")["reason"] in {"AsMeasured", "SlowerThanMeasured"}
    assert {other["spec"]["nodeName"] for other in both} == set(neuron_nodes)
    assert uid(pod) in set(map(uid, both))
    assert uid(left) in set(map(uid, both))
    one.apply(**spec)

    # The device is released, and taken again by another pod.
    for replicas in (0, 1):
        shared_kubectl("scale", f"modelendpoint/{one.name}", f"--replicas={replicas}")
        until_replicas(one, replicas, without=set(map(uid, both)))
    again = until_answered(one.address(), seconds=300)
    assert again.vector == pytest.approx(answer.vector, abs=1e-5)

    shared_kubectl("delete", "modelendpoint", one.name, "--timeout=60s")
    until_gone(shared_kubectl, one.name)
