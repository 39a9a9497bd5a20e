"""Direct requests give the answers of kubectl, and errors come from kubectl."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from testbed.api import Api, NotAnswered, api_of
from testbed.cluster import Cluster
from testbed.kubectl import Kubectl, KubectlError

CONFIG_MAP = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "one", "labels": {"a": "1"}}, "data": {}}


@pytest.fixture
def api(control_plane: Cluster) -> Api:
    found = api_of(control_plane.kubeconfig)
    if found is None:
        pytest.skip("a cluster of the user has another authentication, and kubectl is used for it")
    return found


@pytest.mark.parametrize(
    ("kinds", "selector"),
    [
        ("configmaps", ""),
        ("configmap", "a=1"),
        ("cm", "a!=1"),
        ("deployments,services", ""),
        ("deployments.apps", ""),
        ("hpa", ""),
        ("Event", ""),
        ("events.events.k8s.io", ""),
        ("namespaces", "kubernetes.io/metadata.name=default"),
    ],
)
def test_lists_are_those_of_kubectl(api: Api, kubectl: Kubectl, kinds: str, selector: str) -> None:
    kubectl.apply(CONFIG_MAP)
    # The cluster creates one in a new namespace too, which must not happen between the two lists.
    kubectl.wait("create", "configmap/kube-root-ca.crt")

    found = api.items(kinds, kubectl.namespace, selector)

    assert found == json.loads(kubectl("get", kinds, "--selector", selector, "--output", "json"))["items"]


def test_an_object_is_that_of_kubectl(kubectl: Kubectl) -> None:
    kubectl.apply(CONFIG_MAP)

    assert kubectl.get("cm", "one") == json.loads(kubectl("get", "configmap", "one", "--output", "json"))


def test_a_field_has_the_manager_that_kubectl_would_have_set(kubectl: Kubectl) -> None:
    kubectl.apply(CONFIG_MAP)

    shown = json.loads(kubectl("get", "configmap", "one", "--output", "json", "--show-managed-fields"))
    assert {(one["manager"], one["operation"]) for one in shown["metadata"]["managedFields"]} == {("kubectl", "Apply")}


def test_errors_have_the_message_of_kubectl(kubectl: Kubectl) -> None:
    with pytest.raises(KubectlError, match=r'\(NotFound\): configmaps "none" not found'):
        kubectl.get("configmap", "none")
    with pytest.raises(KubectlError, match="the server doesn't have a resource type"):
        kubectl.items("nonsense")
    with pytest.raises(KubectlError, match='unknown field "datum"'):
        kubectl.apply({**CONFIG_MAP, "datum": {}})


def test_a_kind_that_is_defined_later_is_learnt(api: Api, control_plane: Cluster) -> None:
    names = {"plural": "laters", "singular": "later", "kind": "Later"}
    schema = {"openAPIV3Schema": {"type": "object", "x-kubernetes-preserve-unknown-fields": True}}
    version = {"name": "v1", "served": True, "storage": True, "schema": schema}
    definition = {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": "laters.test.penstock.dev"},
        "spec": {"group": "test.penstock.dev", "names": names, "scope": "Cluster", "versions": [version]},
    }
    with pytest.raises(NotAnswered):
        api.items("laters", "default", "")

    control_plane.kubectl.apply(definition)
    try:
        control_plane.kubectl.wait("condition=Established", "customresourcedefinition/laters.test.penstock.dev")
        assert control_plane.kubectl.items("laters") == []
    finally:
        control_plane.kubectl.delete(definition)


def test_a_user_with_a_credential_plugin_is_left_to_kubectl(tmp_path: Path) -> None:
    kubeconfig = tmp_path / "config"
    kubeconfig.write_text(
        "clusters: [{name: a, cluster: {server: 'https://example.invalid'}}]\n"
        "users: [{name: a, user: {exec: {command: aws}}}]\n"
    )

    assert api_of(kubeconfig) is None
