"""A real API server accepts everything that plans make, in a namespace with restricted pod security."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from penstock_operator.facts import names
from penstock_operator.facts.installation import StoreVolume
from testbed.cluster import Cluster
from testbed.kubectl import Kubectl, KubectlError
from tests.operator.endpoint.kube import SETTINGS, Json, Kube, container, digest, hardware_class, info, result

OPTIONS = ("apply", "--server-side", "--force-conflicts", f"--field-manager={names.FIELD_MANAGER}", "-f", "-")


@pytest.fixture
def restricted(crds: Cluster, kubectl: Kubectl) -> Kubectl:
    """kubectl in a namespace that enforces restricted pod security."""
    labels = [f"pod-security.kubernetes.io/{mode}=restricted" for mode in ("enforce", "warn", "audit")]
    kubectl("label", "namespace", kubectl.namespace, *labels)
    return kubectl


def sent(kubectl: Kubectl, value: Json, *more: str) -> None:
    kubectl(*OPTIONS, "--validate=strict", *more, text=json.dumps(value))


def placed(value: Json, kubectl: Kubectl) -> Json:
    """In the namespace of the test."""
    return {**value, "metadata": {**value["metadata"], "namespace": kubectl.namespace}}


def pods_of(kube: Kube) -> Iterator[Json]:
    """The pods that the Deployment and the Job would make: pod security is enforced on these."""
    for (kind, name), value in kube.objects.items():
        if kind in {"Deployment", "Job"}:
            template = value["spec"]["template"]
            metadata = {"name": f"{name}-pod", **template["metadata"]}
            spec = {"restartPolicy": "Always", **template["spec"]}
            yield {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}


def rich() -> Kube:
    """An endpoint that sets every field that has an effect on pods."""
    kube = Kube(
        settings=replace(SETTINGS, store_uri="s3://models/here", store_secret="s3", image_pull_secrets=("ours",)),
        hardwareClass="special",
        cores=4,
        objective={"latency": {"p95Milliseconds": 20.0}, "throughput": {"requestsPerSecond": 50.0}},
        workload={"textsFrom": {"configMapName": "texts", "key": "texts"}},
        optimization={"engines": ["openvino"], "accuracy": {"minAgreement": 0.99}, "budgetSeconds": 90.0},
        modelCredentials={"secretName": "hf-token"},
        serving={"maxInputTokens": 256, "truncate": False},
        scaling={"mode": "None"},
        replicas=3,
        rollout={"maxSurge": 2, "drainSeconds": 7},
        gateway={"mode": "Always"},
        pod={
            "memory": "3Gi",
            "labels": {"team": "search"},
            "annotations": {"note": "x"},
            "nodeSelector": {"zone": "a"},
            "tolerations": [{"key": "spot", "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 30}],
            "serviceAccountName": "default",
            "topologySpreadConstraints": [{"topologyKey": "topology.kubernetes.io/zone"}],
            "imagePullSecrets": [{"name": "mine"}],
        },
    )
    kube.texts = ("I like you",)
    kube.classes["special"] = hardware_class(
        "special",
        architecture="amd64",
        threadsPerCore=2,
        schedulerName="other-scheduler",
        resources={"example.com/fast": 1},
        nodeSelectorTerms=[{"matchExpressions": [{"key": "generation", "operator": "Gt", "values": ["3"]}]}],
        tolerations=[{"key": "dedicated", "operator": "Equal", "value": "models", "effect": "NoSchedule"}],
    )
    return kube


MADE: dict[str, Callable[[], Kube]] = {
    "the smallest": lambda: Kube(settings=replace(SETTINGS, store_volume=StoreVolume(claim="store"))),
    "the richest": rich,
    "an HPA": lambda: Kube(
        scaling={"mode": "HPA"}, settings=replace(SETTINGS, store_volume=StoreVolume(claim="store"))
    ),
    "a model in a claim": lambda: Kube(
        model="pvc://models/bert", settings=replace(SETTINGS, store_volume=StoreVolume(claim="store"))
    ),
}


@pytest.mark.parametrize("name", sorted(MADE))
def test_the_api_server_accepts_every_desired_object_under_restricted_pod_security(
    name: str, restricted: Kubectl
) -> None:
    kube = MADE[name]().optimised()
    sent_kinds = set()
    for (kind, _), value in kube.objects.items():
        desired = {part: value[part] for part in value if part != "status"}
        # The operator does not apply fields that the API server has added.
        metadata = {
            part: value["metadata"][part]
            for part in ("name", "labels", "annotations", "ownerReferences")
            if part in value["metadata"]
        }
        # The API server accepts a pod only after its service account.
        really = [] if kind == "ServiceAccount" else ["--dry-run=server"]
        if not really:
            del metadata["ownerReferences"]
        sent(restricted, placed({**desired, "metadata": metadata}, restricted), *really)
        sent_kinds.add(kind)
    assert sent_kinds >= {"Deployment", "Job", "OptimizedModel", "Service", "NetworkPolicy"}
    for pod in pods_of(kube):
        sent(restricted, placed(pod, restricted), "--dry-run=server")


def test_a_store_in_a_folder_of_the_nodes_is_refused_by_restricted_security(restricted: Kubectl) -> None:
    pod = next(pods_of(Kube().optimised()))
    with pytest.raises(KubectlError, match="hostPath"):
        sent(restricted, placed(pod, restricted), "--dry-run=server")


def lives() -> Iterator[Kube]:
    """An endpoint at each stage of its life."""
    kube = Kube(objective={"latency": {"p95Milliseconds": 20.0}})
    kube.reconcile()
    yield kube
    kube.job_runs(baseline=True)
    kube.reconcile()
    kube.pods_serve()
    kube.reconcile()
    yield kube
    kube.job_fails("ModelUnavailable", retryable=True)
    kube.reconcile()
    yield kube
    kube.pass_by(60)
    kube.reconcile()
    kube.job_succeeds()
    kube.reconcile()
    yield kube
    kube.pods_serve()
    kube.reconcile()
    yield kube
    kube.infos = dict.fromkeys(kube.infos, info(range(64), pinned=False))
    kube.pod_of("emotion-x", containerStatuses=[container(restarts=9, waiting=("CrashLoopBackOff", "x" * 5000))])
    kube.reconcile()
    yield kube
    kube.edit(optimization={"mode": "Pinned", "artefact": digest("e")})
    kube.reconcile()
    yield kube
    kube.publish("earlier", digest("e"))
    kube.reconcile()
    kube.pods_serve()
    kube.reconcile()
    yield kube
    kube.edit(optimization={}, model="hf://org/gone@main")
    kube.reconcile()
    kube.job_fails("ModelNotFound", "m" * 2000, retryable=False)
    kube.reconcile()
    yield kube
    kube.edit(hardwareClass="nosuch")
    kube.reconcile()
    yield kube


def test_the_api_server_accepts_every_status_and_prunes_nothing(restricted: Kubectl) -> None:
    for kube in lives():
        value = {"apiVersion": names.API_VERSION, "kind": "ModelEndpoint", "metadata": {"name": kube.name}}
        sent(restricted, placed({**value, "spec": kube.spec}, restricted))
        sent(restricted, placed({**value, "status": kube.endpoint["status"]}, restricted), "--subresource=status")
        written = restricted.get("modelendpoint", kube.name)["status"]
        assert written == kube.endpoint["status"]
        for (kind, name), found in kube.objects.items():
            if kind != "OptimizedModel":
                continue
            value = {"apiVersion": names.API_VERSION, "kind": kind, "metadata": {"name": name}}
            sent(restricted, placed({**value, "spec": found["spec"]}, restricted))
            sent(restricted, placed({**value, "status": found["status"]}, restricted), "--subresource=status")
            assert restricted.get("optimizedmodel", name)["status"] == found["status"]


def test_an_applied_deployment_keeps_replicas_that_another_manager_has_set(restricted: Kubectl) -> None:
    kube = Kube(
        scaling={"mode": "HPA"}, settings=replace(SETTINGS, store_volume=StoreVolume(claim="store"))
    ).optimised()

    def applied() -> int:
        desired = kube.reconcile().object("Deployment")
        assert desired is not None
        sent(restricted, placed({**desired, "metadata": {"name": "emotion"}}, restricted))
        return int(restricted.get("deployment", "emotion")["spec"]["replicas"])

    assert applied() == 1
    restricted("scale", "deployment/emotion", "--replicas=3")
    assert applied() == 3, "another field manager owns the number"
    kube.edit(suspend=True)
    assert applied() == 0
    kube.edit(suspend=False)
    assert applied() == 1


def test_a_repeated_apply_changes_nothing(restricted: Kubectl) -> None:
    kube = Kube(
        settings=replace(SETTINGS, store_volume=StoreVolume(claim="store")), scaling={"mode": "None"}, replicas=2
    )
    kube.reconcile()
    kube.job_succeeds(result())
    made = kube.plan()
    kube.act(made)
    wanted = [*kube.plan().apply, *(kube.objects[key] for key in kube.objects if key[0] == "Job")]
    assert {value["kind"] for value in wanted} == {
        "OptimizedModel", "Job", "Service", "NetworkPolicy", "PodDisruptionBudget", "Deployment",
    }  # fmt: skip
    for value in wanted:
        metadata = {part: value["metadata"][part] for part in ("name", "labels")}
        desired = {part: value[part] for part in value if part != "status"}
        versions = []
        for _ in range(3):
            sent(restricted, placed({**desired, "metadata": metadata}, restricted))
            found = restricted.get(value["kind"].lower(), metadata["name"])["metadata"]
            # Controllers may write a status meanwhile; the generation counts changes of the spec only.
            versions.append(found.get("generation") or found["resourceVersion"])
        assert versions == versions[:1] * 3, value["kind"]
