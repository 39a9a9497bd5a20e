"""Fake nodes accept pods according to their labels, taints and resources."""

from __future__ import annotations

from typing import Any

from testbed.kubectl import Kubectl
from testbed.kwok import TOLERATION, FakeNode, FakeNodes


def pod(name: str, *, limits: dict[str, str] | None = None, selector: dict[str, str] | None = None) -> dict[str, Any]:
    container = {"name": "main", "image": "localhost/none:1", "resources": {"limits": limits or {}}}
    spec = {"containers": [container], "nodeSelector": selector or {}, "tolerations": [dict(TOLERATION)]}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": spec}


def test_pod_runs_on_the_node_that_has_its_device(kubectl: Kubectl, fake_nodes: FakeNodes) -> None:
    fake_nodes.add(
        [
            FakeNode("plain"),
            FakeNode("inferentia", labels={"class": "inf1"}, resources={"aws.amazon.com/neuron": "4"}),
        ]
    )

    kubectl.apply(pod("neuron", limits={"aws.amazon.com/neuron": "1"}, selector={"class": "inf1"}))

    kubectl.wait("jsonpath={.status.phase}=Running", "pod/neuron")
    assert kubectl.get("pod", "neuron")["spec"]["nodeName"] == "inferentia"


def test_pod_without_a_node_for_its_device_stays_pending_with_the_reason(
    kubectl: Kubectl, fake_nodes: FakeNodes
) -> None:
    fake_nodes.add([FakeNode("plain")])

    kubectl.apply(pod("neuron", limits={"aws.amazon.com/neuron": "64"}))

    kubectl.wait("condition=PodScheduled=False", "pod/neuron")
    conditions = kubectl.get("pod", "neuron")["status"]["conditions"]
    message = next(condition["message"] for condition in conditions if condition["type"] == "PodScheduled")
    assert "Insufficient aws.amazon.com/neuron" in message
