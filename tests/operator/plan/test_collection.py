"""The jobs that collect the artefact store: where they run, what they may write, which artefacts they keep."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from penstock.resources.pod import Pod
from penstock_operator.plan.collection import (
    CollectionHome,
    CollectionTarget,
    is_collection,
    job,
    keep_list,
    name_of,
    targets,
)
from penstock_operator.plan.installation import PlanSettings, StoreVolume
from penstock_runtime.store.store import KeepList
from tests.operator.plan.kube import SETTINGS, Json

A, B = CollectionHome("a", Pod()), CollectionHome("b", Pod())
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
        ([B, A], S3, (CollectionTarget(A),)),
        ([B, A], CLAIM, (CollectionTarget(A), CollectionTarget(B))),
        ([B, A], FOLDER, (CollectionTarget(A, "n1"), CollectionTarget(A, "n2"))),
        ([A], replace(SETTINGS, store_volume=None), (CollectionTarget(A, "n1"), CollectionTarget(A, "n2"))),
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
    pod: Json = job(target, 7, settings)["spec"]["template"]["spec"]
    return pod


@pytest.mark.parametrize("settings", [S3, CLAIM, FOLDER])
def test_a_collection_pod_has_no_token_no_privileges_and_no_whole_core(settings: PlanSettings) -> None:
    pod = pod_of(CollectionTarget(A, "n1"), settings)
    (container,) = pod["containers"]

    assert pod["automountServiceAccountToken"] is False
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert container["securityContext"]["readOnlyRootFilesystem"] is True
    assert set(container["resources"]["requests"]) == {"memory"}


def test_a_collection_pod_writes_only_to_the_store() -> None:
    (container,) = pod_of(CollectionTarget(A), CLAIM)["containers"]

    assert {mount["mountPath"]: mount.get("readOnly", False) for mount in container["volumeMounts"]} == {
        "/var/lib/penstock/artefacts": False,
        "/etc/penstock": True,
        "/tmp": False,
    }


def test_a_collection_of_a_nodes_store_tolerates_all_taints_of_the_node() -> None:
    pod = pod_of(CollectionTarget(A, "n1"), FOLDER)
    (term,) = pod["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]

    assert term == {"matchFields": [{"key": "metadata.name", "operator": "In", "values": ["n1"]}]}
    assert pod["tolerations"] == [{"operator": "Exists"}]
    assert "affinity" not in pod_of(CollectionTarget(A), S3)


def test_a_collection_pod_has_the_store_access_of_the_endpoint() -> None:
    pod = pod_of(CollectionTarget(CollectionHome("a", Pod.model_validate({"serviceAccountName": "reader"}))), S3)
    (container,) = pod["containers"]

    assert pod["serviceAccountName"] == "reader"
    assert container["envFrom"] == [{"secretRef": {"name": "s3"}}]
    assert {"name": "PENSTOCK_STORE_URI", "value": "s3://models/here"} in container["env"]


def test_the_keep_list_has_the_format_that_the_store_reads() -> None:
    digests = [f"sha256:{letter * 64}" for letter in "ab"]
    made = {"metadata": {"name": "penstock-store-7-x", "namespace": "a", "uid": "u"}}

    found = keep_list(made, digests)

    assert KeepList.of(json.loads(found["data"]["keep.json"])["keep"]) == KeepList.of(digests)
    assert found["metadata"]["ownerReferences"][0]["uid"] == "u"


def test_ten_thousand_artefacts_fit_into_a_config_map() -> None:
    made = {"metadata": {"name": "x", "namespace": "a", "uid": "u"}}
    digests = (f"sha256:{number:016x}{'0' * 48}" for number in range(10_000))

    assert len(json.dumps(keep_list(made, digests))) < 2**20 / 2
