"""What endpoints may ask for: attacks are refused before anything is created, and the lists of the chart allow."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import SettingError, SpecError
from penstock.resources.core import ModelSource
from penstock_operator.endpoint.spec import ParsedEndpoint, allowed_folder, refusal
from penstock_operator.facts.tenants import AllowedSources, AllowList, is_allowed, is_covered
from penstock_operator.settings import PREFIX, Settings
from tests.operator.endpoint.kube import SETTINGS, Kube

DEFAULTS = AllowList()
EVERYTHING = AllowList(
    file_prefixes=("/models",),
    tolerations=("*",),
    node_selectors=("*",),
    labels=("*",),
    annotations=("*",),
    priority_classes=("*",),
    service_accounts=("*",),
)
CONTROL_PLANE = "node-role.kubernetes.io/control-plane"


def condition(kube: Kube) -> dict[str, Any]:
    (found,) = [one for one in kube.endpoint["status"]["conditions"] if one["type"] == "Accepted"]
    return dict(found)


FOLDERS = ["/etc/kubernetes", "/var/lib/kubelet/pods/uid/volumes", "/usr/bin", "/", "/models-of-others", "//etc"]


@pytest.mark.parametrize("folder", FOLDERS)
@pytest.mark.parametrize("allowed", [DEFAULTS, EVERYTHING], ids=["by default", "where /models is allowed"])
def test_a_folder_of_a_node_that_is_not_allowed_is_mounted_nowhere(folder: str, allowed: AllowList) -> None:
    kube = Kube(model=f"file://{folder}", settings=replace(SETTINGS, allowed=allowed))
    made = kube.reconcile()

    assert condition(kube)["reason"] == "SourceNotAllowed"
    assert "policy.fileSources" in condition(kube)["message"]
    assert made.apply == ()


@pytest.mark.parametrize(
    ("location", "expected"),
    [
        ("/models", ("/models", ".")),
        ("/models/bert", ("/models", "bert")),
        ("//models//./bert/", ("/models", "bert")),
        ("/models/team/bert", ("/models/team", "bert")),
        ("/modelsbert", None),
        ("/model", None),
    ],
)
def test_paths_are_compared_by_components_and_the_longest_prefix_is_mounted(
    location: str, expected: tuple[str, str] | None
) -> None:
    allowed = AllowList(file_prefixes=("/models", "/models/team"))

    assert allowed_folder(ModelSource.parse(f"file://{location}"), allowed) == expected


@given(st.lists(st.sampled_from(["models", "..", ".", "", "etc", "a"]), max_size=8))
def test_no_spelling_of_a_path_leads_out_of_the_allowed_folder(parts: list[str]) -> None:
    text = "file:///" + "/".join(parts)
    try:
        found = allowed_folder(ModelSource.parse(text), AllowList(file_prefixes=("/models",)))
    except SpecError:
        return
    if found is None:
        return
    assert next(part for part in parts if part not in {"", "."}) == "models"
    assert ".." not in parts


ATTACKS: dict[str, tuple[dict[str, Any], str]] = {
    "every taint": ({"tolerations": [{"operator": "Exists"}]}, "tolerations"),
    "the control plane's taint": ({"tolerations": [{"key": CONTROL_PLANE, "operator": "Exists"}]}, "tolerations"),
    "the control plane's nodes": ({"nodeSelector": {CONTROL_PLANE: ""}}, "nodeSelector"),
    "one node": ({"nodeSelector": {"kubernetes.io/hostname": "node-1"}}, "nodeSelector"),
    "the system's priority": ({"priorityClassName": "system-node-critical"}, "priorityClassName"),
    "another Service's endpoints": ({"labels": {"app": "payments"}}, "labels"),
    "a label of Kubernetes": ({"labels": {"app.kubernetes.io/part-of": "x"}}, "labels"),
    "no AppArmor": (
        {"annotations": {"container.apparmor.security.beta.kubernetes.io/penstock": "unconfined"}},
        "annotations",
    ),
}


@pytest.mark.parametrize("name", ATTACKS)
@pytest.mark.parametrize("allowed", [DEFAULTS, EVERYTHING], ids=["by default", "where * is allowed"])
def test_a_pod_setting_that_reaches_others_is_refused_before_anything_is_created(name: str, allowed: AllowList) -> None:
    pod, field = ATTACKS[name]
    kube = Kube(pod=pod, settings=replace(SETTINGS, allowed=allowed))
    made = kube.reconcile()

    assert (condition(kube)["status"], condition(kube)["reason"]) == ("False", "PodSettingNotAllowed")
    assert f"spec.pod.{field}" in condition(kube)["message"]
    assert "policy.pod." in condition(kube)["message"]
    assert made.apply == ()


@pytest.mark.parametrize(
    "pod",
    [
        {"serviceAccountName": "cloud-admin"},
        {"priorityClassName": "high"},
        {"labels": {"team": "search"}},
        {"annotations": {"note": "x"}},
        {"tolerations": [{"key": "dedicated", "operator": "Exists"}]},
    ],
)
def test_by_default_only_harmless_pod_settings_are_allowed(pod: dict[str, Any]) -> None:
    by_default = Kube(pod=pod, settings=replace(SETTINGS, allowed=DEFAULTS))
    by_default.reconcile()
    listed = Kube(pod=pod, settings=replace(SETTINGS, allowed=EVERYTHING))
    listed.reconcile()

    assert condition(by_default)["reason"] == "PodSettingNotAllowed"
    assert condition(listed)["reason"] == "Valid"


def test_the_default_service_account_and_the_zone_need_no_entry() -> None:
    kube = Kube(
        pod={
            "serviceAccountName": "default",
            "nodeSelector": {"topology.kubernetes.io/zone": "a"},
            "topologySpreadConstraints": [{"topologyKey": "topology.kubernetes.io/zone"}],
            "memory": "4Gi",
        },
        settings=replace(SETTINGS, allowed=DEFAULTS),
    )
    kube.reconcile()

    assert condition(kube)["reason"] == "Valid"


def test_an_endpoint_that_is_no_longer_allowed_keeps_its_pods_and_gets_no_new_job() -> None:
    kube = Kube().optimised()
    before = kube.deployment
    kube.edit(pod={"serviceAccountName": "cloud-admin"})
    made = kube.reconcile()

    assert condition(kube)["reason"] == "PodSettingNotAllowed"
    assert (made.apply, made.delete, kube.deployment) == ((), (), before)


@pytest.mark.parametrize(
    "key",
    [
        "azure.workload.identity/use",
        "iam.amazonaws.com/role",
        "k8s.v1.cni.cncf.io/networks",
        "sidecar.istio.io/inject",
        "vault.hashicorp.com/agent-inject",
        "karpenter.sh/do-not-disrupt",
        "container.apparmor.security.beta.kubernetes.io/penstock",
    ],
)
def test_an_asterisk_allows_no_annotation_that_others_read(key: str) -> None:
    def reason(*annotations: str) -> str:
        allowed = replace(DEFAULTS, annotations=annotations)
        kube = Kube(pod={"annotations": {key: "x"}}, settings=replace(SETTINGS, allowed=allowed))
        kube.reconcile()
        return str(condition(kube)["reason"])

    assert reason("*") == "PodSettingNotAllowed"
    assert reason(key) == "Valid"


@pytest.mark.parametrize(
    ("name", "patterns", "expected"),
    [
        ("team", ("team",), True),
        ("team-a", ("team",), False),
        ("team-a", ("team-*",), True),
        ("anything", ("*",), True),
        ("system-x", ("*",), False),
        ("system-x", ("s*",), False),
        ("system-x", ("system-*",), True),
        ("system-x", ("system-x",), True),
        ("x", (), False),
        ("", ("*",), True),
    ],
)
def test_patterns(name: str, patterns: tuple[str, ...], expected: bool) -> None:
    assert is_allowed(name, patterns, lambda text: text.startswith("system-")) is expected


@given(st.text(max_size=20), st.lists(st.text(max_size=20), max_size=4))
def test_a_reserved_name_needs_a_pattern_that_begins_like_one(name: str, patterns: list[str]) -> None:
    reserved = f"system-{name}"
    found = is_allowed(reserved, patterns, lambda text: text.startswith("system-"))

    assert not found or any(pattern.startswith("system-") for pattern in patterns)


@given(
    st.dictionaries(
        st.from_regex(r"[a-z]{1,5}(\.kubernetes\.io)?/[a-z]{1,5}", fullmatch=True), st.just("x"), max_size=4
    )
)
def test_what_is_refused_names_one_of_the_keys_and_nothing_else_is_refused(labels: dict[str, str]) -> None:
    spec = ParsedEndpoint.from_object(Kube(pod={"labels": labels}).endpoint).spec
    found = refusal(spec, replace(EVERYTHING, labels=("*",)), {})
    bad = [key for key in labels if key.partition("/")[0].endswith("kubernetes.io")]

    assert (found is not None) == bool(bad)
    assert found is None or any(repr(key) in found.message for key in bad)


@pytest.mark.parametrize("prefix", ["/", "//", "models", "/models/", "/models/../etc", "/a//b", "//models", "."])
def test_a_prefix_that_is_no_plain_folder_ends_the_operator_at_its_start(prefix: str) -> None:
    with pytest.raises(SettingError, match="allowed_file_prefixes"):
        Settings.load({f"{PREFIX}ALLOWED_FILE_PREFIXES": prefix})


TEAM_A, TEAM_B = {"team": "a"}, {"team": "b"}
SOURCES = (
    AllowedSources.model_validate(
        {"namespaceSelector": {"matchLabels": TEAM_A}, "sources": ["hf://our-org/", "pkg://x"]}
    ),
    AllowedSources.model_validate({"sources": ["s3://shared/models"]}),
)


@pytest.mark.parametrize(
    ("model", "labels", "expected"),
    [
        ("hf://our-org/bert@v1", TEAM_A, "Valid"),
        ("s3://shared/models/bert", TEAM_A, "Valid"),
        ("s3://shared/models/bert", TEAM_B, "Valid"),
        ("s3://shared/models", {}, "Valid"),
        ("hf://our-org/bert", TEAM_B, "SourceNotAllowed"),
        ("hf://our-org/bert", {}, "SourceNotAllowed"),
        ("hf://our-org-2/bert", TEAM_A, "SourceNotAllowed"),
        ("hf://other/bert@our-org/", TEAM_A, "SourceNotAllowed"),
        ("s3://shared/models-of-others/bert", TEAM_A, "SourceNotAllowed"),
        ("s3://shared//models/bert", TEAM_A, "SourceNotAllowed"),
        ("gs://shared/models/bert", TEAM_A, "SourceNotAllowed"),
        # Folders of nodes have their own list.
        ("file:///models/bert", TEAM_B, "Valid"),
        ("file:///etc", TEAM_A, "SourceNotAllowed"),
    ],
)
def test_an_endpoint_names_the_sources_that_the_rules_of_its_namespace_list(
    model: str, labels: dict[str, str], expected: str
) -> None:
    allowed = AllowList(sources=SOURCES, file_prefixes=("/models",))
    kube = Kube(model=model, settings=replace(SETTINGS, allowed=allowed))
    kube.namespace_labels = labels
    made = kube.reconcile()

    assert condition(kube)["reason"] == expected
    assert (made.apply != ()) is (expected == "Valid")


def test_the_message_about_a_source_lists_those_that_are_allowed_in_the_namespace() -> None:
    kube = Kube(model="hf://other/bert", settings=replace(SETTINGS, allowed=AllowList(sources=SOURCES)))
    kube.namespace_labels = TEAM_A
    kube.reconcile()

    assert "hf://our-org/, pkg://x, s3://shared/models" in condition(kube)["message"]
    assert "policy.allowedSources" in condition(kube)["message"]


@pytest.mark.parametrize(
    "model", ["hf://any/model", "s3://any/model", "pvc://claim/model", "pkg://any", "oci://r.io/x"]
)
def test_without_rules_every_source_but_folders_of_nodes_is_allowed(model: str) -> None:
    kube = Kube(model=model, settings=replace(SETTINGS, allowed=DEFAULTS))
    kube.reconcile()

    assert condition(kube)["reason"] == "Valid"


PARTS = st.sampled_from(["our-org", "our-org2", "our", "org", "..", ".", "", "x@our-org"])


@pytest.mark.parametrize(
    ("model", "covered"),
    [
        ("oci://ghcr.io/our-org/a:v1", True),
        (f"oci://ghcr.io/our-org/a/b@sha256:{'0' * 64}", True),
        ("oci://ghcr.io/our-org-2/a", False),
        ("oci://ghcr.io.example.com/our-org/a", False),
        ("oci://registry:5000/a:v1", True),
        ("oci://registry:50000/a", False),
        ("oci://registry/our-org:1", None),
    ],
)
def test_repositories_of_registries_are_covered_whatever_their_tag(model: str, *, covered: bool | None) -> None:
    prefixes = AllowedSources(sources=("oci://ghcr.io/our-org", "oci://registry:5000/")).sources
    if covered is None:
        with pytest.raises(SpecError):
            ModelSource.parse(model)
    else:
        assert is_covered(ModelSource.parse(model), prefixes) is covered


@given(st.sampled_from(["hf", "s3", "gs", "pvc"]), st.lists(PARTS, min_size=1, max_size=5))
def test_a_covered_source_is_below_the_prefix(scheme: str, parts: list[str]) -> None:
    try:
        source = ModelSource.parse(f"{scheme}://{'/'.join(parts)}")
    except SpecError:
        return
    if is_covered(source, ["hf://our-org", "s3://our-org/our/"]):
        assert ".." not in parts
        assert parts[0].partition("@")[0] == "our-org"
        assert scheme == "hf" or (scheme == "s3" and parts[1] == "our")


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("hf://our-org/", "is not JSON"),
        ('{"sources": ["hf://"]}', "is not a JSON list of rules"),
        ('[{"sources": []}]', r"allowed_sources\[0\]\.sources"),
        ('[{"sources": ["hf://"]}, {"sources": ["file:///models"]}]', r"allowed_sources\[1\]\.sources\[0\]"),
        ('[{"sources": ["hf://our-org/*"]}]', r"allowed_sources\[0\]\.sources\[0\]"),
        ('[{"sources": ["hf://org/model@v1"]}]', r"allowed_sources\[0\]\.sources\[0\]"),
        ('[{"namespaces": ["a"], "sources": ["hf://"]}]', r"allowed_sources\[0\]\.namespaces"),
        ("[" * 100_000, "is not JSON"),
    ],
)
def test_rules_that_cannot_be_read_end_the_operator_at_its_start(text: str, problem: str) -> None:
    with pytest.raises(SettingError, match=problem):
        Settings.load({f"{PREFIX}ALLOWED_SOURCES": text})


def test_settings_become_the_lists_of_plans() -> None:
    settings = Settings.load(
        {
            f"{PREFIX}ALLOWED_FILE_PREFIXES": "/srv/models,/data",
            f"{PREFIX}ALLOWED_LABELS": "team,cost/*",
            f"{PREFIX}ALLOWED_NODE_SELECTORS": "",
            f"{PREFIX}ALLOWED_SOURCES": '[{"sources": ["hf://our-org/"]}]',
        }
    )

    assert settings.plan_settings().allowed == AllowList(
        file_prefixes=("/srv/models", "/data"),
        sources=(AllowedSources(sources=("hf://our-org/",)),),
        labels=("team", "cost/*"),
        node_selectors=(),
    )
    with pytest.raises(SettingError, match=r"\* may only be the last character"):
        Settings.load({f"{PREFIX}ALLOWED_LABELS": "a*b"})
