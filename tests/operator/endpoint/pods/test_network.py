"""The pods of jobs reach no metadata service, and nothing reaches them."""

from __future__ import annotations

from dataclasses import replace
from ipaddress import ip_address, ip_network
from typing import Any

import pytest

from penstock_operator.endpoint.optimization.collection import CollectionHome, CollectionTarget, job, policy
from penstock_operator.endpoint.pods.network import WITHOUT_IDENTITY
from penstock_operator.facts.installation import PlanSettings
from tests.operator.endpoint.kube import SETTINGS, Json, Kube

S3 = replace(SETTINGS, store_uri="s3://models/here")
METADATA = ["169.254.169.254", "168.63.129.16", "100.100.100.200", "fd00:ec2::254", "fd20:ce::254"]
OTHERS = ["1.1.1.1", "10.96.0.10", "169.254.20.10", "169.254.170.23", "2606:4700::1111", "fd00:ec2::23"]


def reaches(policy: Json, address: str) -> bool:
    """Whether a network plugin lets a pod with this policy connect to an address outside of the cluster."""
    if "Egress" not in policy["spec"]["policyTypes"]:
        return True
    for rule in policy["spec"].get("egress", []):
        for block in (peer["ipBlock"] for peer in rule["to"] if "ipBlock" in peer):
            excepted = [ip_network(cidr) for cidr in block.get("except", [])]
            if ip_address(address) in ip_network(block["cidr"]) and not any(ip_address(address) in e for e in excepted):
                return True
    return False


def selects(policy: Json, pod: Json) -> bool:
    labels: dict[str, str] = pod["metadata"]["labels"]
    selector: dict[str, str] = policy["spec"]["podSelector"]["matchLabels"]
    return selector.items() <= labels.items()


def variables(template: Json) -> dict[str, str]:
    (container,) = template["spec"]["containers"]
    return {entry["name"]: entry["value"] for entry in container["env"] if "value" in entry}


def of_job(kube: Kube) -> tuple[Json, Json]:
    """Policy and pod template of the optimisation job."""
    template = kube.objects["Job", kube.job]["spec"]["template"]
    (found,) = [
        value for (kind, _), value in kube.objects.items() if kind == "NetworkPolicy" and selects(value, template)
    ]
    return found, template


def of_collection(pod: dict[str, Any], settings: PlanSettings) -> tuple[Json, Json]:
    settings = replace(settings, store_collect_account=pod.get("serviceAccountName", ""))
    made = job(CollectionTarget(CollectionHome("a")), 7, settings, ["0" * 16])
    return policy("a", settings), made["spec"]["template"]


def cases(pod: dict[str, Any], settings: PlanSettings) -> list[tuple[Json, Json]]:
    kube = Kube(pod=pod, settings=settings).optimised()
    serving = kube.objects["NetworkPolicy", "emotion"], kube.deployment["spec"]["template"]
    return [of_job(kube), of_collection(pod, settings), serving]


@pytest.mark.parametrize("pod", [{}, {"serviceAccountName": "default"}, {"serviceAccountName": "reader"}], ids=str)
def test_pods_reach_no_metadata_service_and_everything_else(pod: dict[str, Any]) -> None:
    for found, template in cases(pod, S3):
        assert selects(found, template)
        assert [address for address in METADATA if reaches(found, address)] == []
        assert [address for address in OTHERS if not reaches(found, address)] == []
        assert {"namespaceSelector": {}} in found["spec"]["egress"][0]["to"]


@pytest.mark.parametrize("pod", [{}, {"serviceAccountName": "default"}], ids=str)
def test_without_a_service_account_the_clients_do_not_look_for_an_identity(pod: dict[str, Any]) -> None:
    for _, template in cases(pod, S3):
        assert WITHOUT_IDENTITY.items() <= variables(template).items()
    for _, template in cases({"serviceAccountName": "reader"}, S3):
        assert not WITHOUT_IDENTITY.keys() & variables(template).keys()


def test_the_administrator_may_open_the_metadata_service_to_pods_with_a_service_account() -> None:
    settings = replace(S3, metadata_for_accounts=True)
    for found, _ in cases({"serviceAccountName": "reader"}, settings):
        assert [address for address in METADATA if not reaches(found, address)] == []
    for found, _ in cases({}, settings):
        assert [address for address in METADATA if reaches(found, address)] == []


def test_only_the_operator_connects_to_a_job_and_nothing_to_a_collection() -> None:
    (job, _), (collection, _) = of_job(Kube().optimised()), of_collection({}, S3)
    operator = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "penstock-system"}}}

    assert "Ingress" in job["spec"]["policyTypes"]
    assert job["spec"]["ingress"] == [{"ports": [{"port": 8081, "protocol": "TCP"}], "from": [operator]}]
    assert "Ingress" in collection["spec"]["policyTypes"]
    assert "ingress" not in collection["spec"]


def test_the_policy_is_applied_before_the_job_and_deleted_with_the_optimized_model() -> None:
    kube = Kube()
    names: list[tuple[str, str]] = []
    for _ in range(8):
        made = kube.plan()
        kube.act(made)
        names += [(value["kind"], value["metadata"]["name"]) for value in made.apply]
    found, _ = of_job(kube)

    assert names.index(("NetworkPolicy", found["metadata"]["name"])) < names.index(("Job", kube.job))
    (owner,) = found["metadata"]["ownerReferences"]
    assert owner["kind"] == "OptimizedModel"
