"""Two releases of the chart on a real control plane: each looks after its own namespaces, and the API server refuses
what the policy of each does not allow there."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

import penstock
from penstock.resources.base import API_VERSION
from penstock.resources.core import ModelSource
from penstock_operator.facts.tenants import AllowedSources, allowed_sources, is_covered, read_rules
from testbed.control_plane import ControlPlane
from testbed.kubectl import Kubectl, KubectlError
from tests.charts.helm import CHART, NAMESPACE, ONE_NODE, RELEASE, Helm, Manifest
from tests.operator.test_process import LONG_LEASE, Operator, started, until

pytestmark = pytest.mark.slow

EXAMPLE = Path(__file__).parents[2] / "examples/sentence-embedding.yaml"
SECOND = "team"
OF_SECOND = ("team-a", "team-b")
"""Namespaces that the second release looks after."""


@pytest.fixture(scope="module")
def kubectl(private_control_plane: ControlPlane) -> Kubectl:
    return private_control_plane.kubectl


@pytest.fixture(scope="module")
def releases(chart: Helm, private_control_plane: ControlPlane) -> Helm:
    """helm for that control plane, where one release looks after two namespaces, and another one after all others."""
    here = replace(chart, kubeconfig=private_control_plane.kubeconfig)
    for name in (*OF_SECOND, "team-c"):
        private_control_plane.kubectl("create", "namespace", name)
    install = ("install", RELEASE, str(CHART), "--namespace", NAMESPACE, "--create-namespace")
    here.run(*install, values={"ignoreNamespaces": [*OF_SECOND], "store": ONE_NODE})
    values = {
        "watchNamespaces": [*OF_SECOND],
        "store": ONE_NODE,
        "hardwareClasses": None,
        "images": {"optimizer": {"repository": "registry.example/of-the-team"}},
    }
    here.run("install", SECOND, str(CHART), "--namespace", f"{SECOND}-system", "--create-namespace", values=values)
    return here


@contextmanager
def operator_of(release: str, namespace: str, helm: Helm, plane: ControlPlane, folder: Path) -> Iterator[Operator]:
    """A process with the settings and the rights of a release's Deployment."""
    manifests = list(yaml.safe_load_all(helm.run("get", "manifest", release, "--namespace", namespace).stdout))
    (pod,) = (one["spec"]["template"]["spec"] for one in manifests if one["kind"] == "Deployment")
    (container,) = pod["containers"]
    variables = {entry["name"]: entry["value"] for entry in container["env"] if "value" in entry}
    settings = {name.removeprefix("PENSTOCK_OPERATOR_"): value for name, value in variables.items()}
    written = plane.user(f"system:serviceaccount:{namespace}:{pod['serviceAccountName']}")
    settings["MAX_CONCURRENT_OPTIMIZATIONS"] = "100"  # no job ends here
    # KUBECONFIG is a list of files with colons between them.
    kubeconfig = Path(shutil.copy(written, folder / f"{release}.kubeconfig"))
    operator = Operator(
        kubeconfig, folder / f"{release}.log", **{**settings, **LONG_LEASE, "OPERATOR_NAMESPACE": namespace}
    )
    with started(operator):
        yield operator


def images_of_jobs(kubectl: Kubectl, namespace: str) -> set[str]:
    """The images of the jobs in a namespace: each release has another one."""
    return {
        one["spec"]["template"]["spec"]["containers"][0]["image"] for one in kubectl.within(namespace).items("jobs")
    }


def test_of_two_releases_each_reconciles_its_own_namespaces(
    releases: Helm, private_control_plane: ControlPlane, kubectl: Kubectl, tmp_path: Path
) -> None:
    spaces = (*OF_SECOND, "team-c")
    with (
        operator_of(RELEASE, NAMESPACE, releases, private_control_plane, tmp_path) as first,
        operator_of(SECOND, f"{SECOND}-system", releases, private_control_plane, tmp_path) as second,
    ):
        until(lambda: first.leads() and second.leads(), what="both releases have a leader of their own")
        for space in spaces:
            kubectl("apply", "--namespace", space, "--filename", str(EXAMPLE))
        until(lambda: all(images_of_jobs(kubectl, space) for space in spaces), what="all have jobs")
        # The first release's watch reported the endpoint of team-c after those of the second release's namespaces.
        found = kubectl("get", "modelendpoints", "--all-namespaces", "--output", "name").split()
        assert (known(first), known(second)) == (len(found) - len(OF_SECOND), len(OF_SECOND))
        for operator in (first, second):
            assert operator.end() == 0

    second_image = f"registry.example/of-the-team:{penstock.__version__}"
    expected = {"team-a": second_image, "team-b": second_image}
    expected["team-c"] = f"localhost/penstock-optimizer:{penstock.__version__}"
    assert {space: images_of_jobs(kubectl, space) for space in spaces} == {
        space: {image} for space, image in expected.items()
    }


def known(operator: Operator) -> float:
    """The number of ModelEndpoints in an operator's caches."""
    lines = operator.get("/metrics").splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith("penstock_operator_endpoints{"))


@pytest.mark.usefixtures("releases")
@pytest.mark.parametrize(
    ("verb", "resource", "namespace", "expected"),
    [
        ("create", "jobs.batch", "team-a", True),
        ("create", "jobs.batch", "team-c", False),
        ("list", "modelendpoints.penstock.dev", "team-c", False),
        ("list", "modelendpoints.penstock.dev", "team-b", True),
        ("update", "leases.coordination.k8s.io", NAMESPACE, False),
        ("patch", "modelendpoints.penstock.dev/status", "default", False),
    ],
)
def test_the_release_of_two_namespaces_has_rights_in_these_only(
    kubectl: Kubectl, verb: str, resource: str, namespace: str, expected: bool
) -> None:
    account = f"system:serviceaccount:{SECOND}-system:{SECOND}-penstock-operator"
    name, _, part = resource.partition("/")
    words = ("auth", "can-i", verb, name, f"--subresource={part}", "--as", account, "--quiet")
    try:
        kubectl.within(namespace)(*words)
        found = True
    except KubectlError:
        found = False

    assert found is expected


def test_a_release_with_a_name_that_is_taken_changes_nothing(releases: Helm) -> None:
    install = ("install", RELEASE, str(CHART), "--namespace", "another", "--create-namespace")
    run = releases.run(*install, values={"watchNamespaces": ["team-c"], "store": ONE_NODE}, check=False)

    assert run.returncode != 0
    assert "cannot be imported into the current release" in run.stderr


POLICY: Manifest = {
    "allowedSources": [
        {"namespaceSelector": {"matchLabels": {"team": "c"}}, "sources": ["hf://our-org/", "pkg://penstock"]},
        {
            "namespaceSelector": {
                "matchExpressions": [
                    {"key": "team", "operator": "In", "values": ["c", "d"]},
                    {"key": "closed", "operator": "DoesNotExist"},
                    {"key": "kubernetes.io/metadata.name", "operator": "Exists"},
                    {"key": "team", "operator": "NotIn", "values": ["d"]},
                ]
            },
            "sources": ["gs://of-c", "oci://ghcr.io/org/model", "oci://registry:5000/"],
        },
        {"sources": ["s3://shared/models"]},
    ],
    "quotas": [{"namespaceSelector": {"matchLabels": {"team": "c"}}, "cores": 8}, {"replicas": 3}],
}
MODEL = {"model": "s3://shared/models/bert", "task": "text-classification"}
LABELS = {"team-c": {"team": "c"}, "default": {}}


def refusal(kubectl: Kubectl, namespace: str, **spec: Any) -> str:
    """Why the API server refuses a ModelEndpoint; empty: it accepts it."""
    value = {"apiVersion": API_VERSION, "kind": "ModelEndpoint", "metadata": {"name": "new"}, "spec": {**MODEL, **spec}}
    try:
        kubectl("create", "--dry-run=server", "--namespace", namespace, "--filename", "-", text=json.dumps(value))
    except KubectlError as error:
        return str(error)
    return ""


@pytest.fixture(scope="module")
def limited(releases: Helm, private_control_plane: ControlPlane, kubectl: Kubectl) -> Kubectl:
    """kubectl, where the first release limits sources and has quotas, and an endpoint of before is there."""
    before = yaml.safe_load(EXAMPLE.read_text())
    before["metadata"] = {"name": "before", "namespace": "default"}
    kubectl("apply", "--namespace", "default", "--filename", "-", text=json.dumps(before))
    kubectl("label", "namespace", "team-c", "team=c")
    values = {"ignoreNamespaces": [*OF_SECOND], "store": ONE_NODE, "policy": POLICY}
    releases.run("upgrade", RELEASE, str(CHART), "--namespace", NAMESPACE, values=values)
    # Policies take effect some time after they are written; each release has its own.
    until(lambda: refusal(kubectl, "default", model="hf://other/bert"), what="the first release's policy")
    until(lambda: refusal(kubectl, "team-a", model="file:///etc"), what="the second release's policy")
    return kubectl


@pytest.mark.parametrize(
    ("namespace", "spec", "expected"),
    [
        ("default", {"model": "file:///etc/kubernetes"}, "policy.fileSources"),
        ("default", {"model": "hf://other/bert"}, "allows these sources in the namespace default: s3://shared/models."),
        ("team-c", {"model": "hf://other/bert"}, "hf://our-org/, pkg://penstock, gs://of-c, oci://"),
        (
            "team-c",
            {"cores": 9},
            "The endpoint needs 9 cores (its smallest number of replicas, 1, with spec.cores each)",
        ),
        ("team-c", {"cores": 3, "scaling": {"minReplicas": 3}}, "needs 9 cores"),
        ("team-c", {"cores": 3, "scaling": {"mode": "External"}, "replicas": 3}, "needs 9 cores"),
        ("team-c", {"cores": 4, "scaling": {"minReplicas": 2}}, ""),
        ("team-c", {"cores": 8, "scaling": {"minReplicas": 0}}, ""),
        ("team-c", {"cores": 9, "suspend": True}, ""),
        ("default", {"cores": 9}, ""),
        ("default", {"scaling": {"minReplicas": 4}}, "needs 4 replicas, and the quota of the namespace is 3"),
        # Another release looks after these.
        ("team-a", {"model": "hf://other/bert", "cores": 9}, ""),
        ("team-a", {"model": "file:///etc/kubernetes"}, "policy.fileSources"),
    ],
)
def test_the_api_server_refuses_what_the_policy_of_the_chart_does_not_allow(
    limited: Kubectl, namespace: str, spec: dict[str, Any], expected: str
) -> None:
    found = refusal(limited, namespace, **spec)

    assert expected in found
    assert bool(found) is bool(expected)


@pytest.mark.parametrize("namespace", LABELS)
def test_the_api_server_and_the_operator_allow_the_same_sources(limited: Kubectl, namespace: str) -> None:
    models = (
        "hf://our-org/bert", "hf://our-org/bert@v1", "hf://our-org", "hf://our-org-2/bert", "hf://other/bert@our-org",
        "s3://shared/models", "s3://shared/models/", "s3://shared/models-2/bert", "s3://shared//models/bert",
        "gs://of-c/bert", "gs://of-c-2/bert", "gs://other/of-c@x", "az://shared/models/bert", "pkg://penstock.x",
        "oci://ghcr.io/org/model", "oci://ghcr.io/org/model:v1", f"oci://ghcr.io/org/model:v1@sha256:{'0' * 64}",
        "oci://ghcr.io/org/model-2", "oci://ghcr.io/org/model/part", "oci://registry:5000/a", "oci://registry:50000/a",
        "oci://registry:5000/a:v1", "oci://ghcr.io/org:model",
    )  # fmt: skip
    rules = read_rules("allowed_sources", json.dumps(POLICY["allowedSources"]), AllowedSources)
    prefixes = allowed_sources(rules, {"kubernetes.io/metadata.name": namespace, **LABELS[namespace]})

    assert {model: not refusal(limited, namespace, model=model) for model in models} == {
        model: is_covered(ModelSource.parse(model), prefixes) for model in models
    }


def test_an_endpoint_of_before_a_policy_changes_in_other_fields_only(limited: Kubectl) -> None:
    def patch(spec: dict[str, Any]) -> None:
        text = json.dumps({"spec": spec})
        limited("patch", "modelendpoint", "before", "--namespace", "default", "--type=merge", "--patch", text)

    limited("label", "modelendpoint", "before", "--namespace", "default", "team=x")
    patch({"cores": 2})
    with pytest.raises(KubectlError, match=r"policy\.allowedSources"):
        patch({"model": "hf://other/bert"})
    with pytest.raises(KubectlError, match=r"policy\.quotas"):
        patch({"scaling": {"minReplicas": 4, "maxReplicas": 4}})
