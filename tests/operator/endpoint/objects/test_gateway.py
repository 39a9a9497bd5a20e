"""The plan of the gateway: it is deployed if needed, used only while it is available, and deleted completely."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

import pytest

from penstock.resources.endpoint_parts.rollout import Gateway
from penstock.resources.fields.text_fields import parse_quantity
from penstock_gateway.config import BUFFER_BYTES
from penstock_gateway.settings import GatewaySettings
from penstock_operator.endpoint.objects.gateway import BASE_BYTES, memory_bytes
from penstock_operator.facts import names
from penstock_operator.facts.names import Ref
from penstock_operator.facts.scaling import DesiredScale
from tests.operator.endpoint.kube import SETTINGS, Json, Kube, condition
from tools.operator_rights import GATEWAY, rules

ZERO = {"minReplicas": 0, "maxReplicas": 3}
ALL = {
    Ref("ServiceAccount", "emotion-gateway"),
    Ref("RoleBinding", "emotion-gateway-slices"),
    Ref("Service", "emotion-pods"),
    Ref("NetworkPolicy", "emotion-gateway"),
    Ref("Deployment", "emotion-gateway"),
    Ref("PodDisruptionBudget", "emotion-gateway"),
}


def gateway_of(kube: Kube) -> set[Ref]:
    return {Ref(kind, name) for kind, name in kube.objects if Ref(kind, name) in ALL or "-gateway" in name}


def gateway_up(kube: Kube, available: int = 2) -> None:
    """The Deployment of the gateway is complete and its pods are ready."""
    deployment = kube.objects["Deployment", "emotion-gateway"]
    deployment["status"] = {
        "observedGeneration": deployment["metadata"]["generation"],
        "replicas": 2,
        "updatedReplicas": 2,
        "availableReplicas": available,
    }


def leads_to(kube: Kube) -> str:
    return str(kube.objects["Service", "emotion"]["spec"]["selector"][names.NAME])


def environment(kube: Kube) -> dict[str, str]:
    container = kube.objects["Deployment", "emotion-gateway"]["spec"]["template"]["spec"]["containers"][0]
    return {entry["name"]: entry["value"] for entry in container["env"]}


@pytest.mark.parametrize(
    ("spec", "there"),
    [
        ({}, False),
        ({"scaling": ZERO}, True),
        ({"scaling": {**ZERO, "mode": "KEDA"}}, True),
        ({"gateway": {"mode": "Always"}}, True),
        ({"scaling": ZERO, "gateway": {"mode": "Never"}}, False),
        ({"scaling": ZERO, "suspend": True}, False),
    ],
)
def test_a_gateway_is_deployed_if_the_spec_requires_one(spec: Json, there: bool) -> None:
    kube = Kube().optimised()
    kube.edit(**spec)
    kube.reconcile()

    assert gateway_of(kube) == (ALL if there else set())


def test_requests_go_through_the_gateway_only_while_it_is_available() -> None:
    kube = Kube(scaling=ZERO).optimised()
    kube.pods_serve()
    kube.reconcile()
    assert leads_to(kube) == names.RUNTIME
    gateway_up(kube, available=1)
    made = kube.reconcile()
    assert leads_to(kube) == names.GATEWAY
    assert "gateway" not in condition(made, "Available")[2]
    gateway_up(kube, available=0)
    made = kube.reconcile()
    assert leads_to(kube) == names.RUNTIME
    assert condition(made, "Available")[:2] == ("True", "Answering")
    assert "No pod of its gateway is up: requests go to the pods directly." in condition(made, "Available")[2]


def test_a_gateway_that_is_no_longer_wanted_is_deleted_with_all_its_objects() -> None:
    kube = Kube(scaling=ZERO).optimised()
    kube.reconcile()
    gateway_up(kube)
    kube.reconcile()
    kube.edit(scaling={"minReplicas": 1})
    kube.reconcile()

    assert gateway_of(kube) == set()
    assert leads_to(kube) == names.RUNTIME
    assert set(kube.deleted) == ALL


def test_the_binding_of_version_0_2_0_is_deleted() -> None:
    kube = Kube(scaling=ZERO).optimised()
    kube.reconcile()
    present = kube.objects["RoleBinding", "emotion-gateway-slices"]
    old = {**present, "metadata": {**present["metadata"], "name": "emotion-gateway"}}
    kube.objects["RoleBinding", "emotion-gateway"] = old
    kube.reconcile()

    assert kube.deleted == [Ref("RoleBinding", "emotion-gateway")]
    assert gateway_of(kube) == ALL


def test_one_pod_has_no_disruption_budget_that_would_block_a_drain() -> None:
    kube = Kube(scaling=ZERO, gateway={"replicas": 1}).optimised()
    kube.reconcile()
    assert gateway_of(kube) == ALL - {Ref("PodDisruptionBudget", "emotion-gateway")}
    kube.edit(gateway={"replicas": 2})
    kube.reconcile()
    assert gateway_of(kube) == ALL


def test_gateway_pods_are_restricted_and_may_read_endpoint_slices_only() -> None:
    kube = Kube(scaling=ZERO).optimised()
    kube.reconcile()
    pod = kube.objects["Deployment", "emotion-gateway"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]

    assert pod["securityContext"]["runAsNonRoot"] is True
    assert container["securityContext"]["readOnlyRootFilesystem"] is True
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    binding = kube.objects["RoleBinding", "emotion-gateway-slices"]
    assert (binding["roleRef"]["kind"], binding["roleRef"]["name"]) == ("ClusterRole", "penstock-operator-gateway")
    assert rules(GATEWAY) == [
        {"apiGroups": ["discovery.k8s.io"], "resources": ["endpointslices"], "verbs": ["list", "watch"]}
    ]
    assert binding["subjects"] == [{"kind": "ServiceAccount", "name": "emotion-gateway", "namespace": "a"}]
    assert pod["serviceAccountName"] == "emotion-gateway"
    # The pods of the runtime have no token.
    assert kube.deployment["spec"]["template"]["spec"]["automountServiceAccountToken"] is False


def test_the_gateways_process_accepts_the_environment_of_its_pod() -> None:
    kube = Kube(
        scaling=ZERO, gateway={"maxHeldRequests": 7, "holdSeconds": 33}, rollout={"drainSeconds": 4}
    ).optimised()
    kube.reconcile()
    found = GatewaySettings.from_environment(environment(kube))

    assert found == GatewaySettings(
        endpoint="emotion",
        service="emotion-pods",
        namespace="a",
        max_held=7,
        max_connections=1038,
        max_connections_per_client=259,
        hold_seconds=33,
        concurrency=32,
        drain_seconds=4,
        finish_seconds=93,
    )
    known = {f"PENSTOCK_GATEWAY_{field.name.upper()}" for field in fields(GatewaySettings)}
    assert environment(kube).keys() <= known
    deployment = kube.objects["Deployment", "emotion-gateway"]
    grace = deployment["spec"]["template"]["spec"]["terminationGracePeriodSeconds"]
    assert grace > found.drain_seconds + found.finish_seconds


@pytest.mark.parametrize(("cores", "concurrency"), [(1, 32), (2, 32), (4, 64), (16, 256)])
def test_the_concurrency_of_a_replica_grows_with_its_cores(cores: int, concurrency: int) -> None:
    kube = Kube(scaling=ZERO, cores=cores).optimised()
    kube.reconcile()

    assert environment(kube)["PENSTOCK_GATEWAY_CONCURRENCY"] == str(concurrency)


def test_the_memory_of_a_gateway_covers_its_held_requests() -> None:
    def memory(held: int) -> Mapping[str, Any]:
        kube = Kube(scaling=ZERO, gateway={"maxHeldRequests": held}).optimised()
        kube.reconcile()
        container = kube.objects["Deployment", "emotion-gateway"]["spec"]["template"]["spec"]["containers"][0]
        found: Json = container["resources"]
        assert found["requests"]["memory"] == found["limits"]["memory"]
        return found

    assert memory(0)["limits"]["memory"] == "192Mi"
    assert memory(512)["limits"]["memory"] == "256Mi"
    assert "cpu" not in memory(512)["limits"]
    assert memory(512)["requests"]["cpu"] == "100m"


def test_a_gateway_behind_a_proxy_may_accept_all_connections_from_one_address() -> None:
    kube = Kube(scaling=ZERO, gateway={"maxConnections": 4096, "maxConnectionsPerClient": 4096}).optimised()
    kube.reconcile()

    assert environment(kube)["PENSTOCK_GATEWAY_MAX_CONNECTIONS"] == "4096"
    assert environment(kube)["PENSTOCK_GATEWAY_MAX_CONNECTIONS_PER_CLIENT"] == "4096"


def test_the_planned_memory_has_a_buffer_for_each_connection_and_a_second_one_for_each_waiting_request() -> None:
    spec = Gateway(max_connections=3000, max_held_requests=1000)

    assert memory_bytes(spec) > BASE_BYTES + (3000 + 2 * 1000) * BUFFER_BYTES


def test_a_changed_image_rolls_out_and_nothing_else_does() -> None:
    kube = Kube(scaling=ZERO).optimised()
    kube.reconcile()
    before = kube.objects["Deployment", "emotion-gateway"]["metadata"]["generation"]
    kube.pass_by(3600)
    kube.reconcile()
    assert kube.objects["Deployment", "emotion-gateway"]["metadata"]["generation"] == before
    kube.settings = replace(SETTINGS, gateway_image="localhost/penstock-gateway:9")
    kube.reconcile()
    assert kube.objects["Deployment", "emotion-gateway"]["metadata"]["generation"] == before + 1


def at_zero(**spec: Any) -> Kube:
    kube = Kube(scaling=ZERO, **spec).optimised()
    kube.pods_serve()
    kube.reconcile()
    gateway_up(kube)
    kube.scale = DesiredScale(replicas=0, reason="0 replicas, down from 1: no requests.")
    kube.reconcile()
    kube.pods_serve()
    kube.reconcile()
    return kube


def test_an_endpoint_at_zero_replicas_is_ready_with_the_reason_scaled_to_zero() -> None:
    kube = at_zero()
    made = kube.plan()

    assert kube.deployment["spec"]["replicas"] == 0
    assert condition(made, "Available")[:2] == ("True", "ScaledToZero")
    assert condition(made, "Ready")[:2] == ("True", "ScaledToZero")
    assert "holds the next one" in condition(made, "Ready")[2]


def test_an_endpoint_that_scales_from_zero_has_the_reason_starting() -> None:
    kube = at_zero()
    kube.scale = DesiredScale(replicas=1, reason="1 replica, up from 0: a request waits.")
    made = kube.reconcile()

    assert kube.deployment["spec"]["replicas"] == 1
    assert condition(made, "Ready")[:2] == ("False", "Starting")


def test_an_endpoint_at_zero_without_a_gateway_that_is_up_is_not_available() -> None:
    kube = at_zero()
    gateway_up(kube, available=0)
    made = kube.reconcile()

    assert condition(made, "Available")[:2] == ("False", "GatewayUnavailable")
    assert condition(made, "Ready")[:2] == ("False", "GatewayUnavailable")


def test_another_programs_object_with_a_gateways_name_is_not_taken_over() -> None:
    kube = Kube(scaling=ZERO)
    kube.conflicting = {Ref("Deployment", "emotion-gateway")}
    made = kube.reconcile()

    assert condition(made, "Accepted")[:2] == ("False", "NameTaken")
    assert "a Deployment named emotion-gateway" in condition(made, "Accepted")[2]
    assert made.apply == ()


def test_long_names_stay_within_what_a_service_may_be_called() -> None:
    name = "e" * 63
    assert len(names.gateway_name(name)) <= 63
    assert len(names.pods_service_name(name)) <= 63
    assert names.gateway_name(name) != names.gateway_name("e" * 62 + "f")


def test_the_gateway_of_an_endpoint_with_a_certificate_serves_https() -> None:
    gateway = {"mode": "Always", "maxConnections": 16_384}
    plain = Kube(gateway=gateway).optimised()
    kube = Kube(gateway=gateway, tls={"secretName": "emotion-tls"}).optimised()
    (container,), (without,) = (
        one.objects["Deployment", "emotion-gateway"]["spec"]["template"]["spec"]["containers"] for one in (kube, plain)
    )
    (mount,) = [entry for entry in container["volumeMounts"] if entry["name"] == "tls"]
    environment = {entry["name"]: entry["value"] for entry in container["env"]}
    limits = [parse_quantity(one["resources"]["limits"]["memory"]) for one in (container, without)]

    assert environment["PENSTOCK_GATEWAY_TLS_FOLDER"] == mount["mountPath"]
    assert limits[0] - limits[1] == 16_384 * 64 * 1024
    assert "tls" not in {entry["name"] for entry in without["volumeMounts"]}
