"""Direct requests give the answers of kubectl, and errors come from kubectl."""

from __future__ import annotations

import json

import pytest

from testbed.api import Api, api_of
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
