"""What endpoints may ask for: attacks are refused before anything is created, and the lists of the chart allow."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import SettingError, SpecError
from penstock.resources.source import ModelSource
from penstock_operator.plan.endpoint import ParsedEndpoint, allowed_folder, is_allowed, refusal
from penstock_operator.plan.installation import AllowList
from penstock_operator.settings import PREFIX, Settings
from tests.operator.plan.kube import SETTINGS, Kube

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
    found = refusal(spec, replace(EVERYTHING, labels=("*",)))
    bad = [key for key in labels if key.partition("/")[0].endswith("kubernetes.io")]

    assert (found is not None) == bool(bad)
    assert found is None or any(repr(key) in found.message for key in bad)


@pytest.mark.parametrize("prefix", ["/", "//", "models", "/models/", "/models/../etc", "/a//b", "//models", "."])
def test_a_prefix_that_is_no_plain_folder_ends_the_operator_at_its_start(prefix: str) -> None:
    with pytest.raises(SettingError, match="allowed_file_prefixes"):
        Settings.load({f"{PREFIX}ALLOWED_FILE_PREFIXES": prefix})


def test_settings_become_the_lists_of_plans() -> None:
    settings = Settings.load(
        {
            f"{PREFIX}ALLOWED_FILE_PREFIXES": "/srv/models,/data",
            f"{PREFIX}ALLOWED_LABELS": "team,cost/*",
            f"{PREFIX}ALLOWED_NODE_SELECTORS": "",
        }
    )

    assert settings.plan_settings().allowed == AllowList(
        file_prefixes=("/srv/models", "/data"), labels=("team", "cost/*"), node_selectors=()
    )
    with pytest.raises(SettingError, match=r"\* may only be the last character"):
        Settings.load({f"{PREFIX}ALLOWED_LABELS": "a*b"})
