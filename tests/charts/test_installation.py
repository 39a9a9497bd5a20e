"""A real helm installs the chart on a real control plane, upgrades it and uninstalls it."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from penstock_operator.facts.names import API_VERSION
from testbed.control_plane import ControlPlane
from testbed.kubectl import Kubectl, KubectlError
from tests.charts.helm import CHART, NAMESPACE, ONE_NODE, RELEASE, Helm
from tests.charts.operator_writes import ATTACKS, ENDPOINTS, VALUES, changed, made, made_for_the_store, one, refusal

EXAMPLE = Path(__file__).parents[2] / "examples/sentence-embedding.yaml"
ACCOUNT = f"system:serviceaccount:{NAMESPACE}:penstock-operator"


@pytest.fixture(scope="module")
def kubectl(private_control_plane: ControlPlane) -> Kubectl:
    return private_control_plane.kubectl.within(NAMESPACE)


@pytest.fixture(scope="module")
def installed(chart: Helm, private_control_plane: ControlPlane) -> Helm:
    """helm for that control plane, where the chart is installed."""
    here = replace(chart, kubeconfig=private_control_plane.kubeconfig)
    here.run(
        "install",
        RELEASE,
        str(CHART),
        "--namespace",
        NAMESPACE,
        "--create-namespace",
        values={**VALUES, "store": ONE_NODE},
    )
    return here


@pytest.fixture(scope="module")
def operator(installed: Helm, private_control_plane: ControlPlane) -> Kubectl:
    """kubectl as the operator's service account, once the admission policies have an effect."""
    groups = ("system:serviceaccounts", f"system:serviceaccounts:{NAMESPACE}")
    found = private_control_plane.kubectl.using(private_control_plane.user(ACCOUNT, *groups))
    value, message = ATTACKS["no label"]
    deadline = time.monotonic() + 60
    while message not in refusal(found.kubeconfig, value):
        assert time.monotonic() < deadline, "the policies have no effect"
        time.sleep(0.2)
    return found


def can(kubectl: Kubectl, verb: str, resource: str, namespace: str = "default", account: str = ACCOUNT) -> bool:
    """Whether an account, by default the operator's service account, has this right."""
    try:
        name, _, part = resource.partition("/")
        only = [f"--subresource={part}"] if part else []
        kubectl.within(namespace)("auth", "can-i", verb, name, *only, "--as", account, "--quiet")
    except KubectlError:
        return False
    return True


@pytest.mark.usefixtures("installed")
def test_the_api_server_knows_the_resources_and_serves_the_classes(kubectl: Kubectl) -> None:
    classes = {one["metadata"]["name"] for one in kubectl.items("hardwareclasses")}

    assert classes == set(yaml.safe_load((CHART / "values.yaml").read_text())["hardwareClasses"])
    kubectl("apply", "--namespace", "default", "--dry-run=server", "--filename", str(EXAMPLE))


@pytest.mark.usefixtures("installed")
def test_two_operators_are_deployed_with_a_service_account_of_their_own(kubectl: Kubectl) -> None:
    deployment = kubectl.get("deployment", "penstock-operator")

    assert deployment["spec"]["replicas"] == 2
    assert deployment["spec"]["template"]["spec"]["serviceAccountName"] == "penstock-operator"
    assert kubectl.get("poddisruptionbudget", "penstock-operator")["spec"]["maxUnavailable"] == 1
    assert kubectl.get("networkpolicy", "penstock-operator")["spec"]["policyTypes"] == ["Ingress"]


def qualified(resource: str) -> str:
    """The resource with its API group: `modelendpoints.penstock.dev/status`."""
    name, slash, part = resource.partition("/")
    return f"{name}.penstock.dev{slash}{part}"


@pytest.mark.usefixtures("installed")
def test_people_use_penstock_with_the_roles_of_the_cluster_and_only_in_their_namespace(kubectl: Kubectl) -> None:
    for role in ("view", "edit", "admin"):
        words = (f"people-{role}", f"--clusterrole={role}", f"--user=of-{role}")
        kubectl.within("default")("create", "rolebinding", *words)
    # The controller of the API server's aggregated roles has its own pace.
    deadline = time.monotonic() + 60
    while not can(kubectl, "create", "modelendpoints.penstock.dev", account="of-edit"):
        assert time.monotonic() < deadline
        time.sleep(0.2)
    found = {
        (role, verb, resource)
        for role in ("view", "edit", "admin")
        for verb in ("get", "create", "patch", "delete")
        for resource in ("modelendpoints", "modelendpoints/status", "optimizedmodels", "optimizedmodels/status")
        if can(kubectl, verb, qualified(resource), account=f"of-{role}")
    }

    reads = {("get", "modelendpoints"), ("get", "optimizedmodels")}
    writes = {(verb, "modelendpoints") for verb in ("create", "patch", "delete")} | {("delete", "optimizedmodels")}
    assert found == {
        *(("view", *one) for one in reads),
        *((role, *one) for role in ("edit", "admin") for one in reads | writes),
    }
    assert not can(kubectl, "get", "modelendpoints.penstock.dev", NAMESPACE, account="of-admin")
    assert not can(kubectl, "create", "hardwareclasses.penstock.dev", account="of-admin")


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    ("verb", "resource", "namespace", "expected"),
    [
        ("patch", "modelendpoints.penstock.dev/status", "default", True),
        ("create", "jobs.batch", "default", True),
        ("patch", "deployments.apps", "default", True),
        ("create", "leases.coordination.k8s.io", NAMESPACE, True),
        ("update", "leases.coordination.k8s.io", NAMESPACE, False),
        ("get", "leases.coordination.k8s.io", "default", False),
        ("create", "roles.rbac.authorization.k8s.io", "default", False),
        ("get", "secrets", "default", False),
        ("list", "secrets", NAMESPACE, False),
        ("create", "pods", "default", False),
        ("delete", "pods", "default", True),
        ("delete", "modelendpoints.penstock.dev", "default", False),
        ("create", "clusterroles.rbac.authorization.k8s.io", "default", False),
        ("patch", "nodes", "default", False),
    ],
)
def test_the_operators_account_has_its_documented_rights_and_no_others(
    kubectl: Kubectl, verb: str, resource: str, namespace: str, expected: bool
) -> None:
    assert can(kubectl, verb, resource, namespace) is expected


@pytest.mark.parametrize("name", ENDPOINTS)
def test_the_operators_account_may_write_all_that_plans_make(operator: Kubectl, name: str) -> None:
    refused = {(value["kind"], value["metadata"]["name"]): refusal(operator.kubeconfig, value) for value in made(name)}

    assert {what: why for what, why in refused.items() if why} == {}
    assert [refusal(operator.kubeconfig, value) for value in made_for_the_store()] == ["", ""]


@pytest.mark.parametrize("name", ATTACKS)
def test_the_operators_account_may_not_write(operator: Kubectl, name: str) -> None:
    value, message = ATTACKS[name]
    refused = refusal(operator.kubeconfig, value)

    assert "ValidatingAdmissionPolicy" in refused
    assert message in refused


def test_the_operators_account_may_not_touch_objects_of_others(operator: Kubectl, kubectl: Kubectl) -> None:
    admin, why = kubectl.within("default"), "may only change and delete objects that it created"
    values = (
        one("ServiceAccount", "-gateway"),
        one("RoleBinding", "-gateway-slices"),
        *(one(kind, "emotion") for kind in ("Service", "NetworkPolicy", "PodDisruptionBudget", "Deployment")),
        one("Job", "-1"),
    )
    for value in values:
        kind, name = value["kind"], f"foreign-{value['metadata']['name']}"
        foreign = {"name": name, "labels": {"app.kubernetes.io/managed-by": "someone"}}
        admin.apply({**value, "metadata": foreign})
        with pytest.raises(KubectlError, match=why):
            operator("delete", kind, name)
        assert why in refusal(operator.kubeconfig, changed(value, "metadata.name", name))
        assert admin.get(kind.lower(), name)["metadata"]["labels"] == foreign["labels"]


def test_the_operators_account_may_delete_pods_of_endpoints_and_no_others(operator: Kubectl, kubectl: Kubectl) -> None:
    admin = kubectl.within("default")
    pod = {"automountServiceAccountToken": False, "containers": [{"name": "a", "image": "a"}]}
    for name, owner in (("foreign", "someone"), ("replica", "penstock")):
        labels = {"app.kubernetes.io/managed-by": owner}
        admin.apply(
            {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, "labels": labels}, "spec": dict(pod)}
        )
    with pytest.raises(KubectlError, match="may only change and delete objects that it created"):
        operator("delete", "pod", "foreign")
    operator("delete", "pod", "replica", "--wait=false")
    admin("delete", "pod", "foreign", "--wait=false")


def test_the_operator_puts_labels_and_owners_back_that_a_user_removed(operator: Kubectl, kubectl: Kubectl) -> None:
    admin, value = kubectl.within("default"), one("NetworkPolicy", "emotion")
    spec = {"model": "hf://org/model@main", "task": "text-classification"}
    endpoint = {"apiVersion": API_VERSION, "kind": "ModelEndpoint", "metadata": {"name": "emotion"}, "spec": spec}
    admin.apply(endpoint)
    value["metadata"]["ownerReferences"][0]["uid"] = admin.get("modelendpoint", "emotion")["metadata"]["uid"]
    for removed in ("labels", "ownerReferences"):
        admin.apply(changed(value, f"metadata.{removed}", None))

        assert refusal(operator.kubeconfig, value) == ""
        admin("delete", "networkpolicy", "emotion")
    admin.delete(endpoint)


def test_the_policies_bind_the_operators_account_only(operator: Kubectl, kubectl: Kubectl) -> None:
    for name in ("no label", "job: root", "Service: other pods", "account: a cloud role", "HPA: another Deployment"):
        assert refusal(kubectl.kubeconfig, ATTACKS[name][0]) == ""


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    ("verb", "named", "expected"),
    [
        ("update", "leases.coordination.k8s.io/penstock-operator", True),
        ("update", "leases.coordination.k8s.io/kube-scheduler", False),
        ("bind", "clusterroles.rbac.authorization.k8s.io/penstock-operator-gateway", True),
        ("bind", "clusterroles.rbac.authorization.k8s.io/cluster-admin", False),
    ],
)
def test_a_right_on_one_object_is_no_right_on_others(kubectl: Kubectl, verb: str, named: str, expected: bool) -> None:
    try:
        kubectl("auth", "can-i", verb, named, "--as", ACCOUNT, "--quiet")
        found = True
    except KubectlError:
        found = False

    assert found is expected


def test_an_upgrade_changes_what_its_values_change(installed: Helm, kubectl: Kubectl) -> None:
    installed.run(
        "upgrade",
        RELEASE,
        str(CHART),
        "--namespace",
        NAMESPACE,
        values={"replicas": 1, "hardwareClasses": {"inf1": False}, "store": ONE_NODE},
    )

    assert kubectl.get("deployment", "penstock-operator")["spec"]["replicas"] == 1
    assert "inf1" not in {one["metadata"]["name"] for one in kubectl.items("hardwareclasses")}
    with pytest.raises(KubectlError, match="not found"):
        kubectl.get("poddisruptionbudget", "penstock-operator")


def test_the_notes_say_what_to_do_next(installed: Helm) -> None:
    notes = installed.run("get", "notes", RELEASE, "--namespace", NAMESPACE).stdout

    assert "kubectl apply -f examples/sentence-embedding.yaml" in notes
    assert "helm upgrade --install penstock-crds" in notes
    assert "This cluster has" not in notes


def test_the_notes_warn_of_a_folder_of_the_node_on_a_cluster_with_several_nodes(
    installed: Helm, kubectl: Kubectl
) -> None:
    for name in ("one", "two"):
        kubectl.apply({"apiVersion": "v1", "kind": "Node", "metadata": {"name": name}})
    try:
        words = ("upgrade", RELEASE, str(CHART), "--namespace", NAMESPACE, "--dry-run=server")
        notes = installed.run(*words, values={"store": ONE_NODE}).stdout
    finally:
        kubectl("delete", "node", "one", "two")

    assert "This cluster has 2 nodes. If they do not share this folder" in notes


def test_the_definitions_can_be_upgraded_as_the_notes_say(installed: Helm, kubectl: Kubectl) -> None:
    definitions = installed.run("show", "crds", str(CHART)).stdout

    kubectl("apply", "--server-side", "--force-conflicts", "--filename", "-", text=definitions)

    assert len([one for one in yaml.safe_load_all(definitions) if one]) == 3


def test_invalid_values_are_refused_without_a_change(installed: Helm, kubectl: Kubectl) -> None:
    before = kubectl.get("deployment", "penstock-operator")["metadata"]["generation"]

    run = installed.run(
        "upgrade", RELEASE, str(CHART), "--namespace", NAMESPACE, values={"replicas": "many"}, check=False
    )

    assert run.returncode != 0
    assert "replicas" in run.stderr
    assert kubectl.get("deployment", "penstock-operator")["metadata"]["generation"] == before


def test_uninstalling_keeps_the_definitions_and_the_users_endpoints(installed: Helm, kubectl: Kubectl) -> None:
    kubectl("apply", "--namespace", "default", "--filename", str(EXAMPLE))

    installed.run("uninstall", RELEASE, "--namespace", NAMESPACE)

    left = json.loads(kubectl("get", "modelendpoints", "--all-namespaces", "--output", "json"))["items"]
    assert [one["metadata"]["name"] for one in left] == ["sentence-embedding"]
    assert kubectl.items("hardwareclasses") == []
    assert not can(kubectl, "create", "jobs.batch")
