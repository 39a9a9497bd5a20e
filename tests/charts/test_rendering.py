"""The objects that helm renders from the chart's values."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from penstock_operator.facts.names import ENDPOINT, gateway_labels, runtime_labels
from penstock_operator.settings import Settings
from tests.charts.helm import CHART, NAMESPACE, Helm, Manifest, of_kind
from tools import make_chart
from tools.operator_rights import (
    CLUSTER,
    COLLECTION,
    GATEWAY,
    GATEWAY_API,
    HPA,
    KEDA,
    NAMESPACED,
    OWN,
    SCALERS,
    SECRETS,
    rules,
)

ROOT = Path(__file__).parents[2]


def environment(manifests: list[Manifest]) -> dict[str, str]:
    """The operator's environment variables, without those that the kubelet fills in."""
    (container,) = of_kind(manifests, "Deployment")["spec"]["template"]["spec"]["containers"]
    return {entry["name"]: entry["value"] for entry in container["env"] if "value" in entry}


DIGEST = "sha256:" + "0123456789ab" + "c" * 52


@pytest.mark.parametrize(
    ("registry", "repository", "expected"),
    [
        ("", "localhost/penstock-operator", "localhost/penstock-operator"),
        ("registry.example:5000/team", "localhost/penstock-operator", "registry.example:5000/team/penstock-operator"),
        ("registry.example", "ghcr.io/org/penstock-operator", "registry.example/org/penstock-operator"),
        ("registry.example/", "penstock-operator", "registry.example/penstock-operator"),
        ("registry.example", "org/penstock-operator", "registry.example/org/penstock-operator"),
    ],
)
def test_one_value_replaces_the_registry_of_every_image(
    chart: Helm, registry: str, repository: str, expected: str
) -> None:
    operator: Manifest = {"operator": {"repository": repository}}
    for values in ({"images": {"registry": registry, **operator}}, {"global": {"imageRegistry": registry}}):
        made = chart.template({"images": operator, **values} if registry else {"images": operator})
        (container,) = of_kind(made, "Deployment")["spec"]["template"]["spec"]["containers"]
        assert container["image"] == f"{expected}:0.2.0"
        if registry:
            images = [value for name, value in environment(made).items() if name.endswith("_IMAGE")]
            # Runtime, optimizer and gateway, and the first two for both generations of Inferentia.
            assert len(images) == 7
            assert all(image.startswith(registry.rstrip("/") + "/penstock-") for image in images)


def test_a_digest_names_the_image_and_the_toolchain(chart: Helm) -> None:
    values: Manifest = {"images": {"optimizer": {"digest": DIGEST, "tag": "2.0"}, "operator": {"digest": DIGEST}}}
    made = chart.template(values)
    given = environment(made)

    (container,) = of_kind(made, "Deployment")["spec"]["template"]["spec"]["containers"]
    assert container["image"] == f"localhost/penstock-operator@{DIGEST}"
    assert given["PENSTOCK_OPERATOR_OPTIMIZER_IMAGE"] == f"localhost/penstock-optimizer@{DIGEST}"
    assert given["PENSTOCK_OPERATOR_TOOLCHAIN"] == "sha256-0123456789ab"
    kept = environment(chart.template({**values, "toolchain": "mine"}))
    assert kept["PENSTOCK_OPERATOR_TOOLCHAIN"] == "mine"


def test_common_labels_are_on_every_object_and_pod_of_the_release_but_in_no_selector(chart: Helm) -> None:
    made = chart.template({"commonLabels": {"team": "ml"}, "alerts": {"enabled": True}})

    assert [one["metadata"]["name"] for one in made if one["metadata"].get("labels", {}).get("team") != "ml"] == []
    for one in (of_kind(made, "Deployment"), of_kind(made, "DaemonSet")):
        assert one["spec"]["template"]["metadata"]["labels"]["team"] == "ml"
        assert "team" not in one["spec"]["selector"]["matchLabels"]


def test_security_contexts_volumes_and_variables_of_the_operator_can_be_set(chart: Helm) -> None:
    operator: Manifest = {
        "podSecurityContext": {"runAsUser": None, "runAsGroup": None, "fsGroup": None},
        "extraEnv": [{"name": "TOKEN", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}}],
        "extraVolumes": [{"name": "token", "secret": {"secretName": "s"}}],
        "extraVolumeMounts": [{"name": "token", "mountPath": "/token"}],
        "settings": {"PROMETHEUS_TOKEN_FILE": "/token/k"},
    }
    made = chart.template({"operator": operator, "caBundle": {"configMapName": "cas"}})
    pod = of_kind(made, "Deployment")["spec"]["template"]["spec"]
    (container,) = pod["containers"]

    assert pod["securityContext"] == {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}
    assert operator["extraEnv"][0] in container["env"]
    assert {"name": "SSL_CERT_FILE", "value": "/etc/penstock/ca/ca.crt"} in container["env"]
    assert [one["name"] for one in pod["volumes"]] == ["ca", "token", "tmp"]
    assert [one["mountPath"] for one in container["volumeMounts"]] == ["/tmp", "/etc/penstock/ca", "/token"]


def test_helm_lint_accepts_the_chart(chart: Helm) -> None:
    lines = chart.run("lint", "--strict", str(CHART)).stdout.splitlines()

    assert [line for line in lines if line.startswith(("[WARNING]", "[ERROR]"))] == []


def test_generated_files_equal_the_code() -> None:
    assert make_chart.differences(make_chart.generated()) == []


def test_the_roles_are_the_rights_that_the_operator_needs(chart: Helm) -> None:
    manifests = chart.template()

    assert of_kind(manifests, "ClusterRole", "penstock-operator")["rules"] == rules(
        [*CLUSTER, *NAMESPACED, *SCALERS, *HPA]
    )
    assert of_kind(manifests, "ClusterRole", "penstock-operator-gateway")["rules"] == rules(GATEWAY)
    assert of_kind(manifests, "Role")["rules"] == rules(OWN)
    assert environment(manifests)["PENSTOCK_OPERATOR_GATEWAY_ROLE"] == "penstock-operator-gateway"


def test_with_watched_namespaces_the_rights_are_limited_to_them(chart: Helm) -> None:
    manifests = chart.template({"watchNamespaces": ["team-a", "team-b"]})

    assert of_kind(manifests, "ClusterRole", "penstock-operator")["rules"] == rules(CLUSTER)
    watched = {one["metadata"]["namespace"]: one["rules"] for one in manifests if one["kind"] == "Role"}
    assert watched == {
        NAMESPACE: rules(OWN),
        "team-a": rules([*NAMESPACED, *SCALERS, *HPA]),
        "team-b": rules([*NAMESPACED, *SCALERS, *HPA]),
    }
    bound = {one["metadata"]["namespace"] for one in manifests if one["kind"] == "RoleBinding"}
    assert bound == {NAMESPACE, "team-a", "team-b"}
    assert environment(manifests)["PENSTOCK_OPERATOR_NAMESPACES"] == "team-a,team-b"
    ignoring = chart.template({"ignoreNamespaces": ["team-a", "team-b"]})
    assert environment(ignoring)["PENSTOCK_OPERATOR_IGNORED_NAMESPACES"] == "team-a,team-b"


def test_the_operators_pod_meets_the_restricted_pod_security_standard(chart: Helm) -> None:
    pod = of_kind(chart.template(), "Deployment")["spec"]["template"]["spec"]
    (container,) = pod["containers"]

    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (
            {},
            {
                "PENSTOCK_OPERATOR_STORE_URI": "file:///var/lib/penstock/artefacts",
                "PENSTOCK_OPERATOR_STORE_HOST_PATH": "/var/lib/penstock/artefacts",
                "PENSTOCK_OPERATOR_RUNTIME_IMAGE": "localhost/penstock-runtime:0.2.0",
                "PENSTOCK_OPERATOR_OPTIMIZER_IMAGE": "localhost/penstock-optimizer:0.2.0",
                "PENSTOCK_OPERATOR_TOOLCHAIN": "0.2.0",
            },
        ),
        (
            {"store": {"hostPath": {"enabled": False}, "claim": {"enabled": True, "name": "shared"}}},
            {
                "PENSTOCK_OPERATOR_STORE_URI": "file:///var/lib/penstock/artefacts",
                "PENSTOCK_OPERATOR_STORE_CLAIM": "shared",
            },
        ),
        (
            {
                "store": {
                    "hostPath": {"enabled": False},
                    "s3": {
                        "enabled": True,
                        "uri": "s3://models/penstock",
                        "endpointUrl": "https://s3.example",
                        "secretName": "s3",
                        "readSecretName": "s3-read",
                    },
                },
                "policy": {"sharedArtefacts": True},
            },
            {
                "PENSTOCK_OPERATOR_STORE_READ_SECRET": "s3-read",
                "PENSTOCK_OPERATOR_SHARED_ARTEFACTS": "true",
                "PENSTOCK_OPERATOR_STORE_URI": "s3://models/penstock",
                "PENSTOCK_OPERATOR_STORE_SECRET": "s3",
                "PENSTOCK_OPERATOR_STORE_ENDPOINT_URL": "https://s3.example",
            },
        ),
        (
            {
                "images": {
                    "optimizer": {"repository": "registry.example:5000/team/optimizer", "tag": "2.0"},
                    "pullSecrets": ["a", "b"],
                    "pullPolicy": "Always",
                },
                "extraEnv": {"HF_ENDPOINT": "https://hub.example/", "NO_PROXY": "cluster.local,10.0.0.0/8"},
                "caBundle": {"configMapName": "company-cas", "key": "bundle.pem"},
                "podUser": 0,
                "operator": {"settings": {"WORKERS": 16}},
                "policy": {
                    "fileSources": ["/srv/models", "/data"],
                    "allowedSources": [
                        {"namespaceSelector": {"matchLabels": {"team": "a"}}, "sources": ["hf://our-org/"]}
                    ],
                    "quotas": [{"cores": 16}],
                    "metadataForServiceAccounts": True,
                    "exposure": {
                        "hosts": [{"hosts": ["*.a.example.com"], "namespaceSelector": {"matchLabels": {"team": "a"}}}],
                        "annotations": ["cert-manager.io/*", "example.com/note"],
                    },
                    "pod": {"labels": ["team", "cost/*"], "nodeSelectors": [], "serviceAccounts": ["reader"]},
                },
                "prometheus": {"allowedHosts": ["*.monitoring.svc", "thanos:9090"]},
            },
            {
                "PENSTOCK_OPERATOR_OPTIMIZER_IMAGE": "registry.example:5000/team/optimizer:2.0",
                "PENSTOCK_OPERATOR_TOOLCHAIN": "2.0",
                "PENSTOCK_OPERATOR_IMAGE_PULL_SECRETS": "a,b",
                "PENSTOCK_OPERATOR_IMAGE_PULL_POLICY": "Always",
                "PENSTOCK_OPERATOR_EXTRA_ENV": r"HF_ENDPOINT=https://hub.example/,NO_PROXY=cluster.local\,10.0.0.0/8",
                "PENSTOCK_OPERATOR_CA_CONFIG_MAP": "company-cas",
                "PENSTOCK_OPERATOR_CA_KEY": "bundle.pem",
                "PENSTOCK_OPERATOR_POD_USER": "0",
                "PENSTOCK_OPERATOR_WORKERS": "16",
                "PENSTOCK_OPERATOR_ALLOWED_FILE_PREFIXES": "/srv/models,/data",
                "PENSTOCK_OPERATOR_ALLOWED_SOURCES": (
                    '[{"namespaceSelector":{"matchLabels":{"team":"a"}},"sources":["hf://our-org/"]}]'
                ),
                "PENSTOCK_OPERATOR_QUOTAS": '[{"cores":16}]',
                "PENSTOCK_OPERATOR_METADATA_FOR_ACCOUNTS": "true",
                "PENSTOCK_OPERATOR_EXPOSURE_HOSTS": (
                    '[{"hosts":["*.a.example.com"],"namespaceSelector":{"matchLabels":{"team":"a"}}}]'
                ),
                "PENSTOCK_OPERATOR_ALLOWED_INGRESS_ANNOTATIONS": "cert-manager.io/*,example.com/note",
                "PENSTOCK_OPERATOR_ALLOWED_LABELS": "team,cost/*",
                "PENSTOCK_OPERATOR_ALLOWED_NODE_SELECTORS": "",
                "PENSTOCK_OPERATOR_ALLOWED_SERVICE_ACCOUNTS": "reader",
                "PENSTOCK_OPERATOR_PROMETHEUS_HOSTS": "*.monitoring.svc,thanos:9090",
            },
        ),
    ],
)
def test_values_become_settings_that_the_operator_accepts(
    chart: Helm, values: Manifest, expected: dict[str, str]
) -> None:
    given = environment(chart.template(values))

    assert expected.items() <= given.items()
    Settings.load(given)  # refuses unknown names, and values that contradict each other


WATCHED: Manifest = {"watchNamespaces": ["team-a"]}
BUCKET: Manifest = {"hostPath": {"enabled": False}, "s3": {"enabled": True, "uri": "s3://models"}}


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({}, ("86400", "604800")),
        (WATCHED, ()),
        ({"store": BUCKET}, ()),
        ({"store": {**BUCKET, "collect": {"mode": "Always", "everySeconds": 3600}}}, ("3600", "604800")),
        ({**WATCHED, "store": {"collect": {"mode": "Always"}}}, ("86400", "604800")),
        ({"store": {"collect": {"mode": "Never"}}}, ()),
        ({"ignoreNamespaces": ["team-a"]}, ()),
    ],
)
def test_a_store_that_may_be_shared_is_collected_only_if_a_value_states_that_it_is_not(
    chart: Helm, values: Manifest, expected: tuple[str, ...]
) -> None:
    given = environment(chart.template(values))
    found = (given.get(f"PENSTOCK_OPERATOR_STORE_{name}_SECONDS") for name in ("COLLECT", "UNUSED"))

    assert tuple(one for one in found if one is not None) == expected


def test_people_get_rights_by_the_roles_that_they_have(chart: Helm) -> None:
    made = chart.template()
    label = "rbac.authorization.k8s.io/aggregate-to-"
    granted: dict[str, set[tuple[str, str]]] = {"view": set(), "edit": set(), "admin": set()}
    for role in (one for one in made if one["kind"] == "ClusterRole"):
        for name in granted:
            if role["metadata"]["labels"].get(label + name) == "true":
                granted[name] |= {
                    (it, verb) for rule in role["rules"] for it in rule["resources"] for verb in rule["verbs"]
                }

    assert {verb for _, verb in granted["view"]} == {"get", "list", "watch"}
    assert granted["view"] < granted["edit"] == granted["admin"]
    # What serves is decided from the status.
    assert not any("status" in resource for resource, _ in granted["admin"])
    assert ("optimizedmodels", "create") not in granted["admin"]
    without = chart.template({"userRoles": {"enabled": False}})
    assert [one["metadata"]["name"] for one in without if one["kind"] == "ClusterRole"] == [
        "penstock-operator",
        "penstock-operator-gateway",
    ]


def test_a_collection_has_an_account_and_a_secret_of_the_releases_namespace(chart: Helm) -> None:
    collect = {"mode": "Always", "serviceAccountAnnotations": {"role": "cleaner"}, "secretName": "s3-admin"}
    values: Manifest = {**WATCHED, "store": {**BUCKET, "collect": collect}}
    made = chart.template(values)
    account = of_kind(made, "ServiceAccount", "penstock-operator-store")

    assert account["metadata"]["annotations"] == {"role": "cleaner"}
    assert account["automountServiceAccountToken"] is False
    assert environment(made)["PENSTOCK_OPERATOR_STORE_COLLECT_ACCOUNT"] == "penstock-operator-store"
    assert environment(made)["PENSTOCK_OPERATOR_STORE_COLLECT_SECRET"] == "s3-admin"
    # With namespaces to watch, the operator has rights for these jobs in its own namespace.
    assert of_kind(made, "Role", "penstock-operator-lease")["rules"] == rules([*OWN, *COLLECTION])
    never = chart.template({"store": {"collect": {"mode": "Never"}}})
    assert "penstock-operator-store" not in {
        one["metadata"]["name"] for one in never if one["kind"] == "ServiceAccount"
    }


def test_the_defaults_of_the_chart_are_those_of_the_operator(chart: Helm) -> None:
    ours = Settings.load(environment(chart.template())).plan_settings()
    its = Settings.load({}).plan_settings()

    assert {
        name: (getattr(ours, name), getattr(its, name))
        for name in (
            "max_attempts",
            "max_concurrent_optimizations",
            "max_concurrent_rollouts",
            "job_overtime_seconds",
            "unused_grace_seconds",
            "image_pull_policy",
            "store_uri",
            "allowed",
            "quotas",
            "metadata_for_accounts",
            "pod_user",
            "ca_config_map",
            "ca_key",
        )
        if getattr(ours, name) != getattr(its, name)
    } == {}


def test_a_drain_keeps_one_of_two_operators_and_a_single_operator_does_not_block_it(chart: Helm) -> None:
    assert of_kind(chart.template(), "PodDisruptionBudget")["spec"]["maxUnavailable"] == 1
    assert [one for one in chart.template({"replicas": 1}) if one["kind"] == "PodDisruptionBudget"] == []


def test_the_classes_are_those_of_the_code_and_can_be_left_out(chart: Helm) -> None:
    in_file = {one["metadata"]["name"]: one["spec"] for one in yaml.safe_load_all(_classes_file()) if one}
    values = yaml.safe_load((CHART / "values.yaml").read_text())["hardwareClasses"]

    rendered = [one for one in chart.template() if one["kind"] == "HardwareClass"]
    without = [one for one in chart.template({"hardwareClasses": {"inf1": False}}) if one["kind"] == "HardwareClass"]

    assert set(values) == set(in_file)
    assert {one["metadata"]["name"]: one["spec"] for one in rendered} == in_file
    assert {one["metadata"]["name"] for one in without} == set(in_file) - {"inf1"}


def _classes_file() -> str:
    return (CHART / "files/hardware-classes.yaml").read_text()


def test_only_the_store_of_one_node_is_prepared_as_root(chart: Helm) -> None:
    with_folder = of_kind(chart.template(), "DaemonSet")
    s3 = {"store": {"hostPath": {"enabled": False}, "s3": {"enabled": True, "uri": "s3://models"}}}

    (prepare,) = with_folder["spec"]["template"]["spec"]["initContainers"]
    assert prepare["securityContext"]["capabilities"] == {"drop": ["ALL"], "add": ["CHOWN", "FOWNER"]}
    assert [one for one in chart.template(s3) if one["kind"] == "DaemonSet"] == []


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can change owners")
@pytest.mark.parametrize(("chosen", "user"), [(65532, 65532), (2000, 2000), (0, 65532)])
def test_a_prepared_folder_takes_folders_that_the_kubelet_creates_and_has_no_links_to_those_of_others(
    chart: Helm, tmp_path: Path, chosen: int, user: int
) -> None:
    rendered = chart.template({"podUser": chosen})
    (prepare,) = of_kind(rendered, "DaemonSet")["spec"]["template"]["spec"]["initContainers"]
    shell, option, script = prepare["command"]
    store = tmp_path / "store"
    (store / "namespaces" / "a").mkdir(parents=True)
    (store / "namespaces" / "b").symlink_to("a")
    for path in (store, store / "namespaces", store / "namespaces" / "a"):  # as the kubelet creates them
        path.chmod(0o755)
    capabilities = ",".join(f"+{name.lower()}" for name in prepare["securityContext"]["capabilities"]["add"])
    group = str(prepare["securityContext"]["runAsGroup"])
    as_container = ["setpriv", "--regid", group, "--clear-groups", f"--bounding-set=-all,{capabilities}"]

    def run() -> dict[str, tuple[int, int, int]]:
        command = [*as_container, shell, option, script.replace("/store", str(store))]
        subprocess.run(command, check=True, capture_output=True, text=True)
        paths = (path for path in (store, *store.rglob("*")))
        facts = ((path.name, path.stat()) for path in paths)
        return {name: (stat.st_uid, stat.st_gid, stat.st_mode & 0o7777) for name, stat in facts}

    expected = (user, user, 0o2775)
    assert run() == {"store": expected, "namespaces": expected, "a": expected}
    (store / "namespaces" / "c").mkdir()
    (store / "namespaces" / "c").chmod(0o2775)
    assert (store / "namespaces" / "c").stat().st_gid == user
    (store / "namespaces").rename(store / "moved")
    (store / "namespaces").symlink_to("moved")
    assert set(run()) == {"store", "moved", "a", "c"}
    assert run()["store"] == expected


def test_the_pods_that_prepare_the_store_have_no_network(chart: Helm) -> None:
    made = chart.template()
    (policy,) = [one for one in made if one["kind"] == "NetworkPolicy" and one["metadata"]["name"].endswith("-store")]

    assert policy["spec"]["podSelector"] == of_kind(made, "DaemonSet")["spec"]["selector"]
    assert {name for name in policy["spec"] if name != "podSelector"} == {"policyTypes"}
    assert policy["spec"]["policyTypes"] == ["Ingress", "Egress"]


def test_metrics_are_closed_to_all_but_the_release_and_monitoring(chart: Helm) -> None:
    def peers(values: dict[str, Any]) -> tuple[list[Any], str]:
        made = chart.template({"networkPolicy": values})
        (container,) = of_kind(made, "Deployment")["spec"]["template"]["spec"]["containers"]
        env = {one["name"]: one.get("value") for one in container["env"]}
        (rule,) = of_kind(made, "NetworkPolicy", "penstock-operator")["spec"]["ingress"]
        return rule["from"], env["PENSTOCK_OPERATOR_MONITORING_LABELS"]

    def labelled(**labels: str) -> dict[str, Any]:
        return {"namespaceSelector": {"matchLabels": labels}}

    (own, monitoring), labels = peers({})
    assert own["namespaceSelector"]["matchLabels"].keys() == {"kubernetes.io/metadata.name"}
    assert monitoring == labelled(**{"penstock.dev/monitoring": "true"})
    assert labels == "penstock.dev/monitoring=true"
    further = {"podSelector": {"matchLabels": {"app": "scraper"}}}
    found, labels = peers({"monitoringLabels": ["team=sre", "zone=a"], "scrapeFrom": [further]})
    assert found == [own, labelled(team="sre", zone="a"), further]
    assert labels == "team=sre,zone=a"
    assert peers({"monitoringLabels": []}) == ([own], "")


def test_a_pod_monitor_is_rendered_if_the_value_is_set(chart: Helm) -> None:
    made = chart.template({"podMonitor": {"enabled": True, "interval": "10s"}})
    monitor, gateway, runtime = (one for one in made if one["kind"] == "PodMonitor")

    assert monitor["spec"]["podMetricsEndpoints"] == [{"port": "metrics", "interval": "10s"}]
    assert monitor["spec"]["selector"] == of_kind(chart.template(), "Deployment")["spec"]["selector"]
    assert runtime["spec"]["podMetricsEndpoints"] == [{"port": "internal", "path": "/metrics", "interval": "10s"}]
    assert runtime["spec"]["selector"]["matchLabels"].items() <= runtime_labels("any").items()
    assert gateway["spec"]["podMetricsEndpoints"] == [{"port": "status", "path": "/metrics", "interval": "10s"}]
    assert gateway["spec"]["selector"]["matchLabels"].items() <= gateway_labels("any").items()
    for one in (gateway, runtime):
        assert one["spec"]["podTargetLabels"] == [ENDPOINT]
        assert one["spec"]["namespaceSelector"] == {"any": True}


def test_the_pod_monitor_covers_the_watched_namespaces(chart: Helm) -> None:
    made = chart.template({"podMonitor": {"enabled": True}, "watchNamespaces": ["team-a"]})
    _, *pods = (one for one in made if one["kind"] == "PodMonitor")

    assert [one["spec"]["namespaceSelector"] for one in pods] == [{"matchNames": ["team-a"]}] * 2


def test_recording_rules_come_with_the_monitors(chart: Helm) -> None:
    rule = of_kind(chart.template({"podMonitor": {"enabled": True}}), "PrometheusRule")
    (group,) = rule["spec"]["groups"]

    assert {one["record"] for one in group["rules"]} >= {"penstock:requests:rate2m", "penstock:request_seconds:p95_2m"}
    assert [one for one in chart.template() if one["apiVersion"].startswith("monitoring")] == []


def test_optional_rights_are_granted_if_their_values_are_set(chart: Helm) -> None:
    values: Manifest = {
        "keda": {"enabled": True},
        "gatewayApi": {"enabled": True},
        "prometheus": {"secretNames": ["prometheus", "thanos"]},
    }
    secrets = [{**rule, "resourceNames": ["prometheus", "thanos"]} for rule in rules(SECRETS)]
    everywhere = chart.template(values)
    in_one = chart.template({**values, "watchNamespaces": ["team-a"]})

    all_rules = of_kind(everywhere, "ClusterRole", "penstock-operator")["rules"]
    assert all_rules == [*rules([*CLUSTER, *NAMESPACED, *SCALERS, *HPA, *KEDA, *GATEWAY_API]), *secrets]
    assert of_kind(in_one, "ClusterRole", "penstock-operator")["rules"] == rules(CLUSTER)
    watched = {one["metadata"]["namespace"]: one["rules"] for one in in_one if one["kind"] == "Role"}
    assert watched["team-a"] == [*rules([*NAMESPACED, *SCALERS, *HPA, *KEDA, *GATEWAY_API]), *secrets]
    assert environment(everywhere)["PENSTOCK_OPERATOR_KEDA"] == "true"
    assert environment(everywhere)["PENSTOCK_OPERATOR_GATEWAY_API"] == "true"
    assert environment(chart.template()).keys().isdisjoint({"PENSTOCK_OPERATOR_KEDA", "PENSTOCK_OPERATOR_GATEWAY_API"})


def test_without_hpa_the_operator_has_no_right_to_hpas_and_makes_none(chart: Helm) -> None:
    made = chart.template({"hpa": {"enabled": False}})

    assert of_kind(made, "ClusterRole", "penstock-operator")["rules"] == rules([*CLUSTER, *NAMESPACED])
    assert environment(made)["PENSTOCK_OPERATOR_HPA"] == "false"
    assert "PENSTOCK_OPERATOR_HPA" not in environment(chart.template())
    with_keda = chart.template({"hpa": {"enabled": False}, "keda": {"enabled": True}})
    assert of_kind(with_keda, "ClusterRole", "penstock-operator")["rules"] == rules(
        [*CLUSTER, *NAMESPACED, *SCALERS, *KEDA]
    )


WRITES = {"create", "update", "patch", "delete"}
UNBOUND = {"modelendpoints", "optimizedmodels", "events", "leases"}
"""Kinds that no policy covers: Penstock's own, and those of which nothing depends on the content."""


def test_all_kinds_that_the_operator_writes_are_covered_by_an_admission_policy(chart: Helm) -> None:
    made = chart.template({"keda": {"enabled": True}})
    policy = of_kind(made, "ValidatingAdmissionPolicy", "penstock-operator-objects")
    covered = {
        (group, resource)
        for rule in policy["spec"]["matchConstraints"]["resourceRules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
    }
    written = {
        (grant.kind.group, grant.kind.plural)
        for grant in (*NAMESPACED, *HPA, *KEDA, *GATEWAY_API, *OWN, *COLLECTION)
        if WRITES & {*grant.verbs} and grant.kind.plural not in UNBOUND
    }

    assert written == covered


def test_every_admission_policy_is_bound_and_concerns_the_operators_account_only(chart: Helm) -> None:
    made = chart.template({"serviceAccount": {"name": "own"}})
    policies = [one for one in made if one["kind"] == "ValidatingAdmissionPolicy"]
    bindings = [one["spec"] for one in made if one["kind"] == "ValidatingAdmissionPolicyBinding"]

    assert [one["policyName"] for one in bindings] == [one["metadata"]["name"] for one in policies]
    assert [one["validationActions"] for one in bindings] == [["Deny"]] * len(policies)
    only = f"request.userInfo.username == 'system:serviceaccount:{NAMESPACE}:own'"
    for policy in policies:
        assert policy["spec"]["failurePolicy"] == "Fail"
        assert only in {one["expression"] for one in policy["spec"]["matchConditions"]}
    without = chart.template({"admissionPolicies": {"enabled": False}})
    assert [one for one in without if one["kind"].startswith("ValidatingAdmissionPolicy")] == []


BAD: list[tuple[Manifest, str]] = [
    ({"replica": 2}, "replica"),
    ({"replicas": "two"}, "replicas"),
    ({"replicas": 0}, "replicas"),
    ({"images": {"runtime": {"tagg": "1"}}}, "tagg"),
    ({"images": {"runtime": {"tag": "spaces are none"}}}, "tag"),
    ({"images": {"pullPolicy": "Sometimes"}}, "pullPolicy"),
    ({"watchNamespaces": "team-a"}, "watchNamespaces"),
    ({"watchNamespaces": ["Team_A"]}, "watchNamespaces"),
    ({"store": {"hostPath": {"path": "relative/path"}}}, "path"),
    ({"store": {"s3": {"enabled": True}}}, "uri"),
    ({"store": {"s3": {"enabled": True, "uri": "https://bucket"}}}, "uri"),
    ({"store": {"claim": {"enabled": True, "name": ""}}}, "name"),
    ({"hardwareClasses": {"icelak": True}}, "icelak"),
    ({"jobs": {"maxAttempts": 0}}, "maxAttempts"),
    ({"maxConcurrentOptimizations": 0}, "maxConcurrentOptimizations"),
    ({"maxConcurrentRollouts": 1.5}, "maxConcurrentRollouts"),
    ({"extraEnv": {"NO_PROXY": "a\\b"}}, "NO_PROXY"),
    ({"images": {"runtime": {"digest": "sha256:short"}}}, "digest"),
    ({"images": {"registry": "https://registry.example"}}, "registry"),
    ({"podUser": -1}, "podUser"),
    ({"operator": {"extraVolumes": [{"emptyDir": {}}]}}, "extraVolumes"),
    ({"caBundle": {"key": "a/b"}}, "key"),
    ({"operator": {"settings": {"workers": 1}}}, "workers"),
    ({"operator": {"logLevel": "loud"}}, "logLevel"),
    ({"operator": {"resources": {"limits": {"memory": "plenty"}}}}, "memory"),
    ({"podMonitor": {"interval": "often"}}, "interval"),
    ({"policy": {"fileSources": ["/"]}}, "fileSources"),
    ({"policy": {"allowedSources": [{"sources": ["file:///models"]}]}}, "sources"),
    ({"policy": {"allowedSources": [{"sources": ["hf://"], "namespaces": ["a"]}]}}, "namespaces"),
    ({"policy": {"quotas": [{"namespaceSelector": {}}]}}, "quotas"),
    ({"policy": {"quotas": [{"cores": 1.5}]}}, "cores"),
    ({"policy": {"exposure": {"hosts": [{"hosts": ["a.example.com"]}]}}}, "namespaceSelector"),
    ({"policy": {"pod": {"labels": ["a,b"]}}}, "labels"),
    ({"policy": {"pod": {"tolerations": ["a*b"]}}}, "tolerations"),
    ({"prometheus": {"allowedHosts": ["http://prometheus"]}}, "allowedHosts"),
]


@pytest.mark.parametrize(("values", "word"), BAD, ids=str)
def test_bad_values_are_refused_by_name(chart: Helm, values: Manifest, word: str) -> None:
    run = chart.run("template", "penstock", str(CHART), values=values, check=False)

    assert run.returncode != 0
    assert "don't meet the specifications of the schema" in run.stderr
    assert word in run.stderr


@pytest.mark.parametrize(
    ("store", "word"),
    [
        ({"hostPath": {"enabled": True}, "claim": {"enabled": True}}, "not hostPath and claim"),
        ({"s3": {"enabled": True, "uri": "s3://models"}, "claim": {"enabled": True}}, "not claim and s3"),
    ],
)
def test_exactly_one_store_must_be_set(chart: Helm, store: Manifest, word: str) -> None:
    run = chart.run("template", "penstock", str(CHART), values={"store": store}, check=False)

    assert run.returncode != 0
    assert f"exactly one of hostPath, claim and s3 is enabled, {word}" in run.stderr


def test_an_installation_without_a_store_lists_the_choices_and_each_of_them_works(chart: Helm) -> None:
    run = chart.run("template", "penstock", str(CHART), check=False)
    choices = re.findall(r"^ *--set (\S+)", run.stderr, re.MULTILINE)

    assert run.returncode != 0
    assert "store: choose where optimised models are stored" in run.stderr
    assert [choice.split(".")[1] for choice in choices] == ["hostPath", "claim", "s3"]
    for choice in choices:
        made = chart.run("template", "penstock", str(CHART), "--set", choice.replace("NAME", "artefacts")).stdout
        Settings.load(environment([one for one in yaml.safe_load_all(made) if one]))


def test_values_and_schema_have_the_same_keys() -> None:
    import json

    schema = json.loads((CHART / "values.schema.json").read_text())
    values = yaml.safe_load((CHART / "values.yaml").read_text())

    assert set(_paths(values)) == set(_schema_paths(schema, schema["definitions"])) - {"global"}


OPEN_OBJECTS = {
    "operator.resources.requests",
    "operator.resources.limits",
    "operator.podSecurityContext",
    "operator.securityContext",
    "dashboards.labels",
}
"""Values with the fields of Kubernetes, and labels."""


def _paths(value: Any, path: str = "") -> list[str]:
    if not isinstance(value, dict) or not value or path in OPEN_OBJECTS:
        return [path]
    return [found for name, inner in value.items() for found in _paths(inner, f"{path}.{name}".strip("."))]


def _schema_paths(schema: Manifest, definitions: Manifest, path: str = "") -> list[str]:
    if "$ref" in schema:
        schema = definitions[schema["$ref"].rsplit("/", 1)[1]]
    inner = schema.get("properties")
    if not inner:
        return [path]
    return [
        found for name, part in inner.items() for found in _schema_paths(part, definitions, f"{path}.{name}".strip("."))
    ]


def test_the_generator_reports_outdated_files(tmp_path: Path) -> None:
    wanted = make_chart.generated()
    for path, text in wanted.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    assert make_chart.differences(wanted, tmp_path) == []

    (tmp_path / make_chart.CHART / "files/rbac.yaml").write_text("cluster: []\n")
    (tmp_path / make_chart.CHART / "crds/gone.yaml").write_text("kind: CustomResourceDefinition\n")

    assert make_chart.differences(wanted, tmp_path) == [
        "charts/penstock/files/rbac.yaml differs from what the code generates: run make crds",
        "charts/penstock/crds/gone.yaml is no longer in crds/: remove it",
    ]


ADMISSION = "admissionregistration.k8s.io/v1/ValidatingAdmissionPolicy"


def test_endpoints_are_checked_by_the_api_server_where_it_can_and_only_for_the_releases_namespaces(chart: Helm) -> None:
    def bound(values: Manifest, *words: str) -> list[Manifest]:
        made = [one for one in chart.template(values, *words) if one["metadata"]["name"].endswith("-endpoints")]
        assert [one["kind"] for one in made] in ([], ["ValidatingAdmissionPolicy", "ValidatingAdmissionPolicyBinding"])
        return [one["spec"].get("matchResources", {}) for one in made[1:]]

    served = ("--api-versions", ADMISSION)
    selector = {"key": "kubernetes.io/metadata.name", "operator": "In", "values": ["team-a"]}
    assert bound({}, *served) == [{}]
    assert bound({}) == []
    assert bound({"admissionPolicies": {"enabled": False}}, *served) == []
    assert bound({"policy": {"fileSources": ["/srv"]}}, *served) == []
    assert bound({"policy": {"fileSources": ["/srv"], "quotas": [{"cores": 0}]}}, *served) == [{}]
    assert bound(WATCHED, *served) == [{"namespaceSelector": {"matchExpressions": [selector]}}]
