"""A real helm installs the chart on a real control plane, upgrades it and uninstalls it."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from testbed.control_plane import ControlPlane
from testbed.kubectl import Kubectl, KubectlError
from tests.charts.helm import CHART, NAMESPACE, RELEASE, Helm

EXAMPLE = Path(__file__).parents[2] / "examples/sentence-embedding.yaml"
ACCOUNT = f"system:serviceaccount:{NAMESPACE}:penstock-operator"


@pytest.fixture(scope="module")
def kubectl(private_control_plane: ControlPlane) -> Kubectl:
    return private_control_plane.kubectl.within(NAMESPACE)


@pytest.fixture(scope="module")
def installed(chart: Helm, private_control_plane: ControlPlane) -> Helm:
    """helm for that control plane, where the chart is installed."""
    here = replace(chart, kubeconfig=private_control_plane.kubeconfig)
    here.run("install", RELEASE, str(CHART), "--namespace", NAMESPACE, "--create-namespace")
    return here


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
        ("update", "leases.coordination.k8s.io", NAMESPACE, True),
        ("update", "leases.coordination.k8s.io", "default", False),
        ("get", "secrets", "default", False),
        ("list", "secrets", NAMESPACE, False),
        ("create", "pods", "default", False),
        ("delete", "modelendpoints.penstock.dev", "default", False),
        ("create", "clusterroles.rbac.authorization.k8s.io", "default", False),
        ("patch", "nodes", "default", False),
    ],
)
def test_the_operators_account_has_its_documented_rights_and_no_others(
    kubectl: Kubectl, verb: str, resource: str, namespace: str, expected: bool
) -> None:
    assert can(kubectl, verb, resource, namespace) is expected


def test_an_upgrade_changes_what_its_values_change(installed: Helm, kubectl: Kubectl) -> None:
    installed.run(
        "upgrade",
        RELEASE,
        str(CHART),
        "--namespace",
        NAMESPACE,
        values={"replicas": 1, "hardwareClasses": {"inf1": False}},
    )

    assert kubectl.get("deployment", "penstock-operator")["spec"]["replicas"] == 1
    assert "inf1" not in {one["metadata"]["name"] for one in kubectl.items("hardwareclasses")}
    with pytest.raises(KubectlError, match="not found"):
        kubectl.get("poddisruptionbudget", "penstock-operator")


def test_the_notes_say_what_to_do_next(installed: Helm) -> None:
    notes = installed.run("get", "notes", RELEASE, "--namespace", NAMESPACE).stdout

    assert "kubectl apply -f examples/sentence-embedding.yaml" in notes
    assert "helm upgrade --install penstock-crds" in notes


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
