"""Clusters named by the environment, and the messages of the fixtures and the command line."""

from __future__ import annotations

from pathlib import Path

import pytest

from testbed.cluster import INSTANCE, OF_TESTS, OPERATOR, VARIABLES, Cluster, given_cluster
from testbed.control_plane import ControlPlane
from testbed.errors import BedError
from testbed.kubectl import Kubectl


@pytest.fixture(autouse=True)
def _nothing_given(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("variable", VARIABLES)
def test_named_cluster_is_used(variable: str, control_plane: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(variable, str(control_plane.kubeconfig))

    given = given_cluster()

    assert given is not None
    assert given.kubeconfig == control_plane.kubeconfig
    assert "kube-system" in given.kubectl("get", "namespaces", "--output", "name")


def test_file_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBECONFIG", "/nowhere")

    with pytest.raises(BedError, match=r"KUBECONFIG names /nowhere, and there is no such file\. Unset KUBECONFIG"):
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
