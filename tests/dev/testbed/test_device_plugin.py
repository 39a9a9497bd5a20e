"""A device plugin for tests: the calls of the kubelet, and a real kubelet that gives its devices to pods."""

from __future__ import annotations

from pathlib import Path

from testbed.cluster import Cluster
from testbed.device_plugin import Configuration, running_device_plugin
from testbed.kubectl import Kubectl
from tests.dev.testbed.test_machine import pod

RESOURCE = "aws.amazon.com/neuron"


def configuration(registry: Path, mounts: tuple[tuple[str, str, bool], ...] = ()) -> Configuration:
    return Configuration(
        RESOURCE, str(registry), {"neuron0": (0, 1), "neuron1": (2, 3)}, {"STANDIN_MACHINE": "/machine.json"}, mounts
    )


def test_a_kubelet_gives_the_devices_of_its_node_to_pods(
    full_cluster: Cluster, full_kubectl: Kubectl, tmp_path: Path
) -> None:
    machine = full_cluster.machine
    assert machine is not None, "this needs the nodes of this machine"
    node = machine.nodes[-1]
    shared = tmp_path / "shared"
    shared.mkdir()
    (shared / "word").write_text("mounted")
    config = configuration(node.folder / "kubelet" / "plugins_registry", ((str(shared), "/shared", True),))

    with running_device_plugin(config, tmp_path):
        full_kubectl.wait(
            r"jsonpath={.status.allocatable.aws\.amazon\.com/neuron}=2", f"node/{node.name}", timeout_seconds=60
        )
        value = pod("device", "echo $NEURON_RT_VISIBLE_CORES $(cat /shared/word); sleep 1000")
        value["spec"]["containers"][0]["resources"] = {"limits": {RESOURCE: "2"}}
        more = pod("more", "sleep 1000")
        more["spec"]["containers"][0]["resources"] = {"limits": {RESOURCE: "1"}}
        full_kubectl.apply(value)
        full_kubectl.wait("condition=Ready", "pod/device")
        full_kubectl.apply(more)
        full_kubectl.wait("condition=PodScheduled=False", "pod/more")

        assert full_kubectl.get("pod", "device")["spec"]["nodeName"] == node.name
        assert full_kubectl("logs", "device").split() == ["0,1,2,3", "mounted"]
        (condition,) = [
            one for one in full_kubectl.get("pod", "more")["status"]["conditions"] if one["type"] == "PodScheduled"
        ]
        assert f"Insufficient {RESOURCE}" in condition["message"]
    full_kubectl.wait(
        r"jsonpath={.status.allocatable.aws\.amazon\.com/neuron}=0", f"node/{node.name}", timeout_seconds=60
    )
