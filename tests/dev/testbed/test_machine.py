"""A whole cluster on this machine: pods own their cores, Services and names work."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest

from testbed.cluster import Cluster
from testbed.kubectl import Kubectl
from testbed.layout import core_list, parse_core_list
from testbed.machine import BUSYBOX_IMAGE

SERVE = "mkdir /tmp/site; hostname >/tmp/site/index.html; exec httpd -f -p 8080 -h /tmp/site"


def pod_spec(command: str, *, cores: int | None = None) -> dict[str, Any]:
    """A pod that runs a shell command: Guaranteed, so pinned, with `cores`; BestEffort without."""
    limits = {"resources": {"limits": {"cpu": str(cores), "memory": "64Mi"}}} if cores else {}
    container = {"name": "main", "image": BUSYBOX_IMAGE, "command": ["sh", "-c", command], **limits}
    return {"containers": [container], "terminationGracePeriodSeconds": 1}


def pod(
    name: str, command: str, *, cores: int | None = None, labels: Mapping[str, str] | None = None
) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "labels": dict(labels or {})},
        "spec": pod_spec(command, cores=cores),
    }


def service(name: str) -> dict[str, Any]:
    spec = {"selector": {"app": name}, "ports": [{"port": 80, "targetPort": 8080}]}
    return {"apiVersion": "v1", "kind": "Service", "metadata": {"name": name}, "spec": spec}


def allowed_cores(kubectl: Kubectl, name: str) -> frozenset[int]:
    """The cores that the pod's first process may run on, from its kernel."""
    status = kubectl("exec", name, "--", "cat", "/proc/1/status")
    return parse_core_list(
        next(line.split()[1] for line in status.splitlines() if line.startswith("Cpus_allowed_list"))
    )


def test_pinned_pods_own_a_core_each(full_cluster: Cluster, full_kubectl: Kubectl) -> None:
    nodes = full_kubectl.items("nodes")
    free = sum(int(node["status"]["allocatable"]["cpu"]) for node in nodes)
    names = [f"pinned-{index}" for index in range(min(free, 3))]

    full_kubectl.apply(*(pod(name, "sleep 1000", cores=1) for name in names))
    full_kubectl.wait("condition=Ready", *(f"pod/{name}" for name in names))

    cores = [allowed_cores(full_kubectl, name) for name in names]
    assert [len(each) for each in cores] == [1] * len(names)
    assert len(frozenset().union(*cores)) == len(names)
    if full_cluster.machine:
        owned = frozenset().union(*(node.owned for node in full_cluster.machine.nodes))
        assert frozenset().union(*cores) <= owned


def test_an_unpinned_pod_does_not_run_on_the_core_of_a_pinned_one(full_kubectl: Kubectl) -> None:
    full_kubectl.apply(pod("pinned", "sleep 1000", cores=1))
    full_kubectl.wait("condition=Ready", "pod/pinned")
    node = full_kubectl.get("pod", "pinned")["spec"]["nodeName"]
    unpinned = pod("unpinned", "sleep 1000")
    unpinned["spec"]["nodeName"] = node
    full_kubectl.apply(unpinned)
    full_kubectl.wait("condition=Ready", "pod/unpinned")

    assert not allowed_cores(full_kubectl, "pinned") & allowed_cores(full_kubectl, "unpinned")


def test_service_is_found_by_its_name_and_answers(full_kubectl: Kubectl) -> None:
    full_kubectl.apply(pod("web", SERVE, labels={"app": "web"}), service("web"), pod("client", "sleep 1000"))
    full_kubectl.wait("condition=Ready", "pod/web", "pod/client")
    get = "until printf 'GET / HTTP/1.0\\r\\n\\r\\n' | nc -w 1 web 80; do sleep 0.1; done"

    answer = full_kubectl("exec", "client", "--", "timeout", "30", "sh", "-c", get)

    assert answer.splitlines()[-1] == "web"


def test_nodes_report_which_cores_they_allocate(full_cluster: Cluster, full_kubectl: Kubectl) -> None:
    if full_cluster.machine is None:
        pytest.skip("only our nodes' files can be read")
    for node in full_cluster.machine.nodes:
        state = json.loads((node.folder / "kubelet" / "cpu_manager_state").read_text())
        allocatable = full_kubectl.get("node", node.name)["status"]["allocatable"]["cpu"]

        assert state["policyName"] == "static"
        assert allocatable == str(len(node.owned)), core_list(node.owned)
