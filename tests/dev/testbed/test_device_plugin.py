"""A device plugin for tests: the calls of the kubelet, and a real kubelet that gives its devices to pods."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from testbed.cluster import Cluster
from testbed.device_plugin import API, REGISTRATION, Configuration, message, running_device_plugin
from testbed.kubectl import Kubectl
from tests.dev.testbed.test_machine import pod

RESOURCE = "aws.amazon.com/neuron"
LONGEST_SECONDS = 240.0


def configuration(registry: Path, mounts: tuple[tuple[str, str, bool], ...] = ()) -> Configuration:
    return Configuration(
        RESOURCE, str(registry), {"neuron0": (0, 1), "neuron1": (2, 3)}, {"STANDIN_MACHINE": "/machine.json"}, mounts
    )


@pytest.fixture
def socket(tmp_path: Path) -> Iterator[Path]:
    config = configuration(tmp_path, (("/here", "/there", True),))
    with running_device_plugin(config, tmp_path):
        deadline = time.monotonic() + LONGEST_SECONDS
        while not config.socket.exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        yield config.socket
    assert not config.socket.exists()


def call(channel: Any, package: str, name: str, request: Any, answer: str) -> Any:
    made = channel.unary_unary(
        name,
        request_serializer=lambda given: given.SerializeToString(),
        response_deserializer=message(package, answer).FromString,
    )
    return made(request, timeout=LONGEST_SECONDS, wait_for_ready=True)


def test_a_configuration_is_what_was_written(tmp_path: Path) -> None:
    config = configuration(tmp_path, (("/here", "/there", True),))
    assert Configuration.read(config.write()) == config


def test_containers_get_the_cores_of_their_devices(socket: Path) -> None:
    import grpc

    with grpc.insecure_channel(f"unix:{socket}") as channel:
        info = call(
            channel,
            REGISTRATION,
            f"/{REGISTRATION}.Registration/GetInfo",
            message(REGISTRATION, "InfoRequest")(),
            "PluginInfo",
        )
        assert (info.type, info.name, list(info.supported_versions)) == ("DevicePlugin", RESOURCE, ["v1beta1"])
        assert info.endpoint == str(socket)

        watch = channel.unary_stream(
            f"/{API}.DevicePlugin/ListAndWatch",
            request_serializer=lambda given: given.SerializeToString(),
            response_deserializer=message(API, "ListAndWatchResponse").FromString,
        )(message(API, "Empty")(), timeout=LONGEST_SECONDS)
        assert {device.ID: device.health for device in next(watch).devices} == {
            "neuron0": "Healthy",
            "neuron1": "Healthy",
        }
        watch.cancel()

        request = message(API, "AllocateRequest")()
        request.container_requests.add(devices_ids=["neuron1", "neuron0"])
        answer = call(channel, API, f"/{API}.DevicePlugin/Allocate", request, "AllocateResponse")
    (container,) = answer.container_responses
    assert {one.key: one.value for one in container.envs} == {
        "NEURON_RT_VISIBLE_CORES": "0,1,2,3",
        "STANDIN_MACHINE": "/machine.json",
    }
    assert [(one.host_path, one.container_path, one.read_only) for one in container.mounts] == [
        ("/here", "/there", True)
    ]


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
