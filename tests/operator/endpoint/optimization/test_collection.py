"""The jobs that collect the artefact store: where they run, what they may write, which artefacts they keep."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from penstock.resources.endpoint_parts.pod import Pod
from penstock_operator.endpoint.optimization.collection import (
    CollectionHome,
    CollectionTarget,
    is_collection,
    job,
    keep_arguments,
    name_of,
    targets,
)
from penstock_operator.facts.installation import PlanSettings, StoreVolume
from penstock_operator.facts.tenants import AllowList
from penstock_runtime.store.store import KeepList
from tests.operator.endpoint.kube import SETTINGS, Json

A, B = CollectionHome("a"), CollectionHome("b")
OWN = CollectionHome(SETTINGS.operator_namespace)
DIGESTS = tuple(f"sha256:{letter * 64}" for letter in "ab")
CLAIM = replace(SETTINGS, store_volume=StoreVolume(claim="shared"))
FOLDER = replace(SETTINGS, store_volume=StoreVolume(host_path="/srv/artefacts"))
S3 = replace(SETTINGS, store_uri="s3://models/here", store_secret="s3")


def node(name: str, ready: str = "True") -> Json:
    return {"metadata": {"name": name}, "status": {"conditions": [{"type": "Ready", "status": ready}]}}


NODES = [node("n2"), node("n1"), node("lost", "Unknown"), {"metadata": {"name": "new"}}]


@pytest.mark.parametrize(
    ("homes", "settings", "expected"),
    [
        ([], S3, ()),
        ([B, A], S3, (CollectionTarget(OWN),)),
        ([B, A], CLAIM, (CollectionTarget(A), CollectionTarget(B))),
        ([B, A], FOLDER, (CollectionTarget(OWN, "n1"), CollectionTarget(OWN, "n2"))),
        ([A], replace(SETTINGS, store_volume=None), (CollectionTarget(OWN, "n1"), CollectionTarget(OWN, "n2"))),
    ],
    ids=["no endpoint", "a service", "a claim in each namespace", "a folder of each node", "a folder by the address"],
)
def test_a_collection_runs_in_every_place_of_the_store(
    homes: list[CollectionHome], settings: PlanSettings, expected: tuple[CollectionTarget, ...]
) -> None:
    assert targets(homes, NODES, settings) == expected


def test_a_name_is_unique_for_target_and_period() -> None:
    names = [
        name_of(target, period)
        for target in (CollectionTarget(A), CollectionTarget(B), CollectionTarget(A, "n1"))
        for period in (1, 2)
    ]

    assert len(set(names)) == len(names)
    assert all(map(is_collection, names))
    assert name_of(CollectionTarget(A), 1) == names[0]
    assert not is_collection("emotion-1")


def pod_of(target: CollectionTarget, settings: PlanSettings) -> Json:
    pod: Json = job(target, 7, settings, keep_arguments({"a": DIGESTS}))["spec"]["template"]["spec"]
    return pod


@pytest.mark.parametrize("settings", [S3, CLAIM, FOLDER])
def test_a_collection_pod_has_no_token_no_privileges_and_no_whole_core(settings: PlanSettings) -> None:
    pod = pod_of(CollectionTarget(A, "n1"), settings)
    (container,) = pod["containers"]

    assert pod["automountServiceAccountToken"] is False
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert container["securityContext"]["readOnlyRootFilesystem"] is True
    assert set(container["resources"]["requests"]) == {"memory", "ephemeral-storage"}


def test_a_collection_pod_writes_only_to_the_store() -> None:
    (container,) = pod_of(CollectionTarget(A), CLAIM)["containers"]

    assert {mount["mountPath"]: mount.get("readOnly", False) for mount in container["volumeMounts"]} == {
        "/var/lib/penstock/artefacts/namespaces/a": False,
        "/tmp": False,
    }


@pytest.mark.parametrize(
    ("settings", "folder"),
    [
        (FOLDER, ""),
        (CLAIM, "namespaces/a"),
        (replace(CLAIM, allowed=AllowList(shared_artefacts=True)), ""),
    ],
    ids=["all stores of a node", "the store of the claim's namespace", "one store for all"],
)
def test_a_collection_pod_has_the_stores_that_it_is_for(settings: PlanSettings, folder: str) -> None:
    (container,) = pod_of(CollectionTarget(A), settings)["containers"]
    (mount,) = [mount for mount in container["volumeMounts"] if mount["name"] == "store"]
    path = "/var/lib/penstock/artefacts" + (f"/{folder}" if folder else "")

    assert (mount["mountPath"], mount.get("subPath", "")) == (path, folder)
    assert {"name": "PENSTOCK_STORE_URI", "value": f"file://{path}"} in container["env"]


def test_a_collection_of_a_nodes_store_tolerates_the_taints_of_that_node_and_no_others() -> None:
    tainted = node("n1") | {
        "spec": {
            "taints": [
                {"key": "models", "value": "only", "effect": "NoSchedule"},
                {"key": "soft", "effect": "PreferNoSchedule"},
            ]
        }
    }
    (target,) = targets([A], [tainted], FOLDER)
    pod = pod_of(target, FOLDER)
    (term,) = pod["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]

    assert term == {"matchFields": [{"key": "metadata.name", "operator": "In", "values": ["n1"]}]}
    assert pod["tolerations"] == [{"key": "models", "operator": "Equal", "value": "only", "effect": "NoSchedule"}]
    assert "tolerations" not in pod_of(CollectionTarget(OWN, "n2"), FOLDER)
    assert "affinity" not in pod_of(CollectionTarget(OWN), S3)


def test_a_collection_pod_has_the_credentials_of_the_store() -> None:
    (container,) = pod_of(CollectionTarget(OWN), S3)["containers"]

    assert "envFrom" not in container
    secrets = {entry["valueFrom"]["secretKeyRef"]["name"] for entry in container["env"] if "valueFrom" in entry}
    assert secrets == {"s3"}
    assert {"name": "PENSTOCK_STORE_URI", "value": "s3://models/here"} in container["env"]


def test_a_node_that_is_cordoned_or_short_of_disk_is_skipped() -> None:
    taint = {"key": "node.kubernetes.io/disk-pressure", "effect": "NoSchedule"}

    assert targets([A], [node("n1") | {"spec": {"taints": [taint]}}], FOLDER) == ()


def test_a_shared_store_is_collected_with_the_account_and_secret_of_the_installation() -> None:
    users = CollectionHome(
        "a", Pod.model_validate({"serviceAccountName": "users", "imagePullSecrets": [{"name": "users"}]})
    )
    settings = replace(S3, store_collect_account="penstock-store", store_collect_secret="s3-admin")
    (target,) = targets([users], [], settings)
    made = job(target, 7, settings, keep_arguments({"a": DIGESTS}))
    pod = made["spec"]["template"]["spec"]

    assert made["metadata"]["namespace"] == SETTINGS.operator_namespace
    assert pod["serviceAccountName"] == "penstock-store"
    assert '"users"' not in json.dumps(made)
    assert '"s3-admin"' in json.dumps(pod["containers"])


def test_a_claim_is_collected_in_its_namespace_without_the_account_of_an_endpoint() -> None:
    users = CollectionHome("a", Pod.model_validate({"serviceAccountName": "users"}))
    pod = pod_of(CollectionTarget(users), replace(CLAIM, store_collect_account="penstock-store"))

    assert "serviceAccountName" not in pod


def test_the_list_of_what_to_keep_is_in_the_arguments() -> None:
    (container,) = pod_of(CollectionTarget(OWN), S3)["containers"]

    assert container["args"][0] == f"--keep=a/{'a' * 16},{'b' * 16}"
    assert KeepList.parse([container["args"][0].partition("=")[2]]) == KeepList.of(f"a/{digest}" for digest in DIGESTS)


def test_a_job_that_keeps_nothing_is_not_made() -> None:
    with pytest.raises(ValueError, match="would delete the whole store"):
        job(CollectionTarget(OWN), 7, S3, ())


def test_forty_thousand_artefacts_fit_into_a_job_and_more_are_refused() -> None:
    digests = [f"sha256:{number:016x}{'0' * 48}" for number in range(40_001)]
    references = {f"{number:04}" + "a" * 59: digests[10 * number : 10 * (number + 1)] for number in range(4_000)}
    made = job(CollectionTarget(OWN), 7, S3, keep_arguments(references))
    one = job(CollectionTarget(OWN), 7, S3, keep_arguments({"a": digests[1:]}))
    (container,) = made["spec"]["template"]["spec"]["containers"]

    # The API server takes 1.5 MiB; Linux takes 2 MiB of arguments, of 128 KiB each.
    assert len(json.dumps(made)) < 1.2 * 2**20
    assert max(len(word) for word in one["spec"]["template"]["spec"]["containers"][0]["args"]) < 2**17
    assert (
        len(KeepList.parse([word[7:] for word in container["args"] if word.startswith("--keep=")]).beginnings) == 40_000
    )
    with pytest.raises(ValueError, match="40001 artefacts are referenced"):
        keep_arguments({"a": digests[:1], "b": digests[1:]})
