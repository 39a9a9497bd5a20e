"""A real control plane starts, decides as Kubernetes does, and leaves nothing behind."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from testbed import state
from testbed.cluster import Cluster
from testbed.control_plane import ControlPlane, running_control_plane
from testbed.daemon import Process
from testbed.kubectl import Kubectl, KubectlError


def config_map(name: str, **data: str) -> dict[str, object]:
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name}, "data": data}


def deployment(name: str, replicas: int) -> dict[str, object]:
    labels = {"app": name}
    pod = {"metadata": {"labels": labels}, "spec": {"containers": [{"name": "main", "image": "localhost/pause:1"}]}}
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": name},
        "spec": {"replicas": replicas, "selector": {"matchLabels": labels}, "template": pod},
    }


def test_objects_are_kept_as_they_were_applied(kubectl: Kubectl) -> None:
    kubectl.apply(config_map("settings", colour="green"))

    assert kubectl.get("configmap", "settings")["data"] == {"colour": "green"}


def test_controllers_work(kubectl: Kubectl) -> None:
    kubectl.apply(deployment("web", replicas=2))

    # Without nodes the pod is not started.
    kubectl.wait("jsonpath={.status.unavailableReplicas}=2", "deployment/web")
    assert [pod["status"]["phase"] for pod in kubectl.items("pods", "app=web")] == ["Pending", "Pending"]


def test_objects_of_a_deleted_owner_are_collected(kubectl: Kubectl) -> None:
    kubectl.apply(config_map("owner"))
    uid = kubectl.get("configmap", "owner")["metadata"]["uid"]
    owned = config_map("owned")
    owned["metadata"] = {
        "name": "owned",
        "ownerReferences": [{"apiVersion": "v1", "kind": "ConfigMap", "name": "owner", "uid": uid}],
    }
    kubectl.apply(owned)

    kubectl("delete", "configmap", "owner")

    kubectl.wait("delete", "configmap/owned", timeout_seconds=120)


def test_rbac_refuses_a_user_without_rights(private_control_plane: ControlPlane) -> None:
    stranger = private_control_plane.kubectl.using(private_control_plane.user("stranger"))

    with pytest.raises(KubectlError, match='User "stranger" cannot list resource "pods"'):
        stranger("get", "pods")


def test_server_keeps_its_objects_over_a_kill(private_control_plane: ControlPlane) -> None:
    private_control_plane.kubectl.apply(config_map("survivor", kept="yes"))

    private_control_plane.restart("kube-apiserver", grace_seconds=0)

    assert private_control_plane.kubectl.get("configmap", "survivor")["data"] == {"kept": "yes"}


def test_two_control_planes_run_independently(control_plane: Cluster, private_control_plane: ControlPlane) -> None:
    private_control_plane.kubectl.apply(config_map("only-here"))

    with pytest.raises(KubectlError, match="not found"):
        control_plane.kubectl.get("configmap", "only-here")


def test_extra_arguments_reach_the_program() -> None:
    with running_control_plane(extra={"kube-apiserver": ("--max-requests-inflight=77",)}) as plane:
        process = plane.daemon("kube-apiserver").process
        assert process is not None
        command = Path(f"/proc/{process.pid}/cmdline").read_bytes().decode().split("\0")

    assert "--max-requests-inflight=77" in command


def test_the_next_run_cleans_up_after_an_interrupted_one(tmp_path: Path) -> None:
    code = (
        "import os, signal\n"
        "from testbed.control_plane import running_control_plane\n"
        "with running_control_plane() as plane:\n"
        "    print(plane.settings.folder, flush=True)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    killed = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, check=False)
    folder = Path(killed.stdout.strip())
    records = [json.loads(record.read_text()) for record in (folder / "pids").glob("*.json")]
    left = [Process(record["pid"], record["started_ticks"]) for record in records]
    assert len(left) == 4
    assert all(process.alive for process in left)

    swept = state.sweep(folder.parent)

    assert folder in swept
    assert not folder.exists()
    assert not any(process.alive for process in left)
