"""helm upgrades the custom resource definitions on a real control plane, and adopts those of an older chart."""

from __future__ import annotations

import json
import os
import re
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from testbed.control_plane import ControlPlane
from testbed.kubectl import Kubectl, KubectlError
from tests.charts.helm import CHART, NAMESPACE, ONE_NODE, Helm, Manifest
from tools.make_chart import template_of

ROOT = Path(__file__).parents[2]
DEFINITIONS = ROOT / "charts/penstock-crds"
RELEASE = "penstock-crds"
NEW_FIELD = "auth"
"""A field of the spec that the definitions of the older release of this test do not have."""
ENDPOINT: Manifest = {
    "apiVersion": "penstock.dev/v1alpha1",
    "kind": "ModelEndpoint",
    "metadata": {"name": "kept"},
    "spec": {"model": "hf://org/emotion", "task": "text-classification", "hardwareClass": "any", "cores": 1},
}


def older_chart(folder: Path) -> Path:
    """A chart as an older release has it: definitions in `crds/`, without the new field."""
    (folder / "crds").mkdir(parents=True)
    (folder / "templates").mkdir()
    (folder / "Chart.yaml").write_text("apiVersion: v2\nname: penstock\nversion: 0.1.0\n")
    (folder / "templates/settings.yaml").write_text(
        "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: settings}\ndata: {version: '0.1.0'}\n"
    )
    for file in sorted((ROOT / "crds").glob("*.yaml")):
        definition = yaml.safe_load(file.read_text())
        spec = schema_of(definition)["properties"]["spec"]
        if definition["spec"]["names"]["kind"] == "ModelEndpoint":
            del spec["properties"][NEW_FIELD]
        (folder / "crds" / file.name).write_text(yaml.safe_dump(definition))
    return folder


def schema_of(definition: Manifest) -> dict[str, Any]:
    (version,) = definition["spec"]["versions"]
    schema: dict[str, Any] = version["schema"]["openAPIV3Schema"]
    return schema


@pytest.fixture(scope="module")
def kubectl(private_control_plane: ControlPlane) -> Kubectl:
    return private_control_plane.kubectl


@pytest.fixture(scope="module")
def upgraded(
    helm: Path, private_control_plane: ControlPlane, kubectl: Kubectl, tmp_path_factory: pytest.TempPathFactory
) -> Helm:
    """helm for a cluster that has the older release and an endpoint; nothing is upgraded yet."""
    here = Helm(helm, kubeconfig=private_control_plane.kubeconfig)
    chart = older_chart(tmp_path_factory.mktemp("older") / "penstock")
    here.run("install", "penstock", str(chart), "--namespace", NAMESPACE, "--create-namespace")
    kubectl.wait("condition=Established", "crd/modelendpoints.penstock.dev")
    kubectl.apply(ENDPOINT)
    return here


def accepts_the_new_field(kubectl: Kubectl) -> bool:
    """Whether the definition in the cluster has the field."""
    live = kubectl.get("crd", "modelendpoints.penstock.dev")
    return NEW_FIELD in schema_of(live)["properties"]["spec"]["properties"]


def install(helm: Helm, *words: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    where = ("--namespace", NAMESPACE)
    return helm.run("upgrade", "--install", RELEASE, str(DEFINITIONS), *where, *words, check=check)


def test_definitions_of_an_older_chart_are_not_overwritten_without_consent(upgraded: Helm, kubectl: Kubectl) -> None:
    run = install(upgraded, check=False)

    assert run.returncode != 0
    assert "invalid ownership metadata" in run.stderr
    assert not accepts_the_new_field(kubectl)


def test_taking_ownership_upgrades_the_definitions_and_keeps_the_endpoints(upgraded: Helm, kubectl: Kubectl) -> None:
    before = kubectl.get("modelendpoint", "kept")

    install(upgraded, "--take-ownership")

    assert accepts_the_new_field(kubectl)
    after = kubectl.get("modelendpoint", "kept")
    assert (after["metadata"]["uid"], after["spec"]) == (before["metadata"]["uid"], before["spec"])
    changed = {**ENDPOINT, "spec": {**ENDPOINT["spec"], NEW_FIELD: {"secretName": "keys"}}}
    kubectl.apply(changed)
    assert kubectl.get("modelendpoint", "kept")["spec"][NEW_FIELD] == {"secretName": "keys"}


def test_later_upgrades_need_no_flag_and_the_main_chart_can_follow(upgraded: Helm, kubectl: Kubectl) -> None:
    install(upgraded)

    run = upgraded.run("upgrade", "penstock", str(CHART), "--namespace", NAMESPACE, check=False)
    assert run.returncode != 0
    assert "store: choose where optimised models are stored" in run.stderr

    upgraded.run("upgrade", "penstock", str(CHART), "--namespace", NAMESPACE, values={"store": ONE_NODE})

    assert accepts_the_new_field(kubectl)
    assert kubectl.within(NAMESPACE).get("deployment", "penstock-operator")["spec"]["replicas"] == 2
    assert kubectl.get("modelendpoint", "kept")["spec"][NEW_FIELD] == {"secretName": "keys"}


def test_a_rollback_of_the_main_chart_keeps_definitions_and_endpoints(upgraded: Helm, kubectl: Kubectl) -> None:
    upgraded.run("rollback", "penstock", "--namespace", NAMESPACE)

    assert accepts_the_new_field(kubectl)
    assert kubectl.get("modelendpoint", "kept")["spec"][NEW_FIELD] == {"secretName": "keys"}


def test_uninstalling_the_definitions_keeps_them_with_the_endpoints(upgraded: Helm, kubectl: Kubectl) -> None:
    run = upgraded.run("uninstall", RELEASE, "--namespace", NAMESPACE)

    assert "kept due to the resource policy" in run.stdout + run.stderr
    assert kubectl.get("modelendpoint", "kept")["spec"]["cores"] == 1


def test_the_documented_labels_replace_the_flag_for_an_older_helm(upgraded: Helm, kubectl: Kubectl) -> None:
    marks = ("meta.helm.sh/release-name-", "meta.helm.sh/release-namespace-", "helm.sh/resource-policy-")
    kubectl("annotate", "crd", "--all", *marks)
    kubectl("label", "crd", "--all", "app.kubernetes.io/managed-by-")
    assert install(upgraded, check=False).returncode != 0

    text = (ROOT / "docs/how-to/upgrade.md").read_text(encoding="utf-8")
    (commands,) = re.findall(r"```\n(kubectl label crd .*?)```", text, re.DOTALL)
    folder = kubectl.executable.parent
    environment = {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}", "KUBECONFIG": str(kubectl.kubeconfig)}
    subprocess.run(["bash", "-euc", commands], env=environment, check=True, capture_output=True, timeout=120)
    install(upgraded)

    live = kubectl.get("crd", "modelendpoints.penstock.dev")["metadata"]
    assert live["annotations"]["helm.sh/resource-policy"] == "keep"
    assert live["labels"]["app.kubernetes.io/name"] == "penstock-crds"
    assert kubectl.get("modelendpoint", "kept")["spec"]["cores"] == 1


def test_the_definitions_are_those_of_the_main_chart(helm: Path) -> None:
    def rendered(values: Manifest) -> dict[str, Manifest]:
        text = Helm(helm).run("template", RELEASE, str(DEFINITIONS), values=values).stdout
        return {one["metadata"]["name"]: one for one in yaml.safe_load_all(text) if one}

    kept = rendered({"commonLabels": {"team": "ml"}})
    files = [yaml.safe_load(file.read_text()) for file in sorted((CHART / "crds").glob("*.yaml"))]

    assert {name: one["spec"] for name, one in kept.items()} == {one["metadata"]["name"]: one["spec"] for one in files}
    for one in kept.values():
        assert one["metadata"]["annotations"] == {"helm.sh/resource-policy": "keep"}
        assert one["metadata"]["labels"]["team"] == "ml"
    assert all("annotations" not in one["metadata"] for one in rendered({"keep": False}).values())


def test_braces_in_a_description_are_text_in_the_template() -> None:
    made = template_of("kind: X\nmetadata:\n  name: a.b\nspec:\n  description: '{{ no instruction }}'\n")

    assert "description: '{{ `{{` }} no instruction }}'" in made
    assert '  name: a.b\n  {{- include "penstock-crds.metadata" . | nindent 2 }}\nspec:' in made
    with pytest.raises(ValueError, match="expected 1"):
        template_of("kind: X\n")


def test_helm_lint_accepts_the_chart_of_the_definitions(helm: Path) -> None:
    lines = Helm(helm).run("lint", "--strict", str(DEFINITIONS)).stdout.splitlines()

    assert [line for line in lines if line.startswith(("[WARNING]", "[ERROR]"))] == []


def test_a_second_version_with_the_same_schema_needs_no_webhook(upgraded: Helm, kubectl: Kubectl) -> None:
    """The plan of docs/explanation/versions.md, with its commands. The last test: afterwards the definitions have two
    versions."""
    assert accepts_the_new_field(kubectl)
    page = (ROOT / "docs/explanation/versions.md").read_text(encoding="utf-8")
    commands = page.partition("```\n")[2].partition("```")[0]
    names = ("modelendpoints", "optimizedmodels", "hardwareclasses")

    def serve(**versions: dict[str, bool]) -> None:
        """Versions of all definitions -> what they are."""
        for name in names:
            (first,) = yaml.safe_load((ROOT / "crds" / f"{name}.yaml").read_text())["spec"]["versions"]
            made = [{**first, "name": version, **fields} for version, fields in versions.items()]
            words = ("patch", "customresourcedefinition", f"{name}.penstock.dev", "--type=merge")
            kubectl(*words, "--patch", json.dumps({"spec": {"versions": made}}))

    def read(version: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(
            kubectl("get", f"modelendpoints.{version}.penstock.dev", "kept", "--output=json")
        )
        return found

    def until_served(version: str) -> dict[str, Any]:
        deadline = time.monotonic() + 60
        while True:
            try:
                return read(version)
            except KubectlError:
                assert time.monotonic() < deadline
                time.sleep(0.2)

    before = read("v1alpha1")
    serve(v1alpha1={"storage": True}, v1beta1={"storage": False})
    after = until_served("v1beta1")
    assert (after["apiVersion"], after["spec"]) == ("penstock.dev/v1beta1", before["spec"])

    serve(v1alpha1={"storage": False}, v1beta1={"storage": True})
    with pytest.raises(KubectlError, match="storedVersions"):
        serve(v1beta1={"storage": True})
    where = f'"{kubectl.executable}" --kubeconfig "{kubectl.kubeconfig}" "$@"'
    subprocess.run(["bash", "-euc", f"kubectl() {{ {where}; }}\n{commands}"], check=True, timeout=120)
    serve(v1beta1={"storage": True})

    assert until_served("v1beta1")["spec"] == before["spec"]
    assert read("v1beta1")["metadata"]["uid"] == before["metadata"]["uid"]
