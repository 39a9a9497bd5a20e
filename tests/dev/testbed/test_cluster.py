"""Clusters named by the environment, and the messages of the fixtures and the command line."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from testbed import fixtures
from testbed.cluster import INSTANCE, OF_TESTS, OPERATOR, VARIABLES, Cluster, given_cluster
from testbed.control_plane import ControlPlane
from testbed.errors import BedError
from testbed.kubectl import Kubectl, KubectlError


@pytest.fixture(autouse=True)
def _nothing_given(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


def test_without_a_name_there_is_no_cluster() -> None:
    assert given_cluster() is None


@pytest.mark.parametrize("variable", VARIABLES)
def test_named_cluster_is_used(variable: str, control_plane: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(variable, str(control_plane.kubeconfig))

    given = given_cluster()

    assert given is not None
    assert given.kubeconfig == control_plane.kubeconfig
    assert "kube-system" in given.kubectl("get", "namespaces", "--output", "name")


def test_penstocks_own_variable_comes_first(control_plane: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBECONFIG", "/nowhere")
    monkeypatch.setenv("PENSTOCK_TEST_KUBECONFIG", str(control_plane.kubeconfig))

    given = given_cluster()

    assert given is not None
    assert given.kubeconfig == control_plane.kubeconfig


def test_file_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBECONFIG", "/nowhere")

    with pytest.raises(BedError, match=r"KUBECONFIG names /nowhere, and there is no such file\. Unset KUBECONFIG"):
        given_cluster()


def test_cluster_that_does_not_answer_is_named(
    control_plane: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = tmp_path / "elsewhere"
    lines = control_plane.kubeconfig.read_text().splitlines()
    servers = ("    server: https://127.0.0.1:1" if "server:" in line else line for line in lines)
    elsewhere.write_text("\n".join(servers))
    monkeypatch.setenv("KUBECONFIG", str(elsewhere))

    with pytest.raises(BedError, match=f"the cluster of KUBECONFIG={elsewhere} does not answer"):
        given_cluster()


@pytest.mark.parametrize(("annotations", "refused"), [({}, True), ({OF_TESTS: "yes"}, False)])
def test_an_existing_penstock_is_neither_tested_nor_removed(
    private_control_plane: ControlPlane, annotations: dict[str, str], refused: bool
) -> None:
    cluster = Cluster(private_control_plane.kubeconfig, private_control_plane.kubectl)
    name, value = OPERATOR.split("=")
    pod = {
        "metadata": {"labels": {name: value}, "annotations": annotations},
        "spec": {"containers": [{"name": "operator", "image": "localhost/penstock-operator:1"}]},
    }
    spec = {"replicas": 0, "selector": {"matchLabels": {name: value}}, "template": pod}
    metadata = {"name": "penstock-operator", "labels": {name: value, INSTANCE: "mine"}}
    deployment = {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": metadata, "spec": spec}

    cluster.require_free_of_penstock()
    cluster.kubectl.apply(deployment)
    try:
        if refused:
            with pytest.raises(BedError, match="helm uninstall mine --namespace default"):
                cluster.require_free_of_penstock()
        else:
            cluster.require_free_of_penstock()
    finally:
        cluster.kubectl.delete(deployment)


def test_images_are_not_loaded_into_a_cluster_of_the_user(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path / "config", Kubectl(Path("kubectl"), tmp_path / "config"))

    with pytest.raises(BedError, match="Load it into its nodes yourself"):
        cluster.load_image(tmp_path / "image.tar")


def test_error_of_kubectl_has_its_output(kubectl: Kubectl) -> None:
    with pytest.raises(KubectlError, match=r'kubectl get pod missing .*: .*pods "missing" not found'):
        kubectl.get("pod", "missing")


def test_every_fixture_is_described() -> None:
    text = fixtures.__doc__ or ""
    names = [name for name, value in vars(fixtures).items() if type(value).__name__ == "FixtureFunctionDefinition"]
    assert "control_plane" in names

    assert [name for name in names if not name.startswith("_") and f"\n    {name} " not in text] == []


def test_command_line_names_the_remedy_where_no_cluster_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PENSTOCK_TESTBED_STATE", str(tmp_path))

    result = subprocess.run(
        [sys.executable, "-m", "testbed", "kubectl", "get", "pods", "--all-namespaces"],
        capture_output=True,
        text=True,
        check=False,
    )

    assert result.returncode == 1
    assert result.stderr == "Error: no cluster runs on this machine. `make cluster` starts one\n"


def test_command_line_down_does_nothing_where_no_cluster_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PENSTOCK_TESTBED_STATE", str(tmp_path))

    result = subprocess.run([sys.executable, "-m", "testbed", "down"], capture_output=True, text=True, check=True)

    assert result.stderr == "no cluster runs on this machine\n"
