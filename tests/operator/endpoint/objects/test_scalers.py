"""HPAs and ScaledObjects that scale instead of the operator: their conditions, their bounds, and one at a time."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.resources.endpoint_parts.scaling import Scaling, ScalingMode
from penstock_operator.endpoint.objects.scalers import SMALLEST_PREVENTED, HpaBounds, behaviour, hpa_bounds
from penstock_operator.endpoint.replica_count import in_force, left_over
from penstock_operator.facts.findings import no
from penstock_operator.facts.names import FIELD_MANAGER, Ref
from penstock_operator.facts.scaling import HPA, SCALED_OBJECT, DesiredScale, ScalerFacts
from penstock_operator.facts.workloads import replica_owners, scale_entries
from tests.operator.endpoint.kube import SETTINGS, Json, Kube
from tests.operator.endpoint.objects.test_gateway import gateway_up

KEDA = replace(SETTINGS, keda=True, prometheus_url="http://prometheus.monitoring:9090")
OURS = ScalerFacts(HPA, "emotion", owner="ModelEndpoint")
KEDAS = ScalerFacts(HPA, "keda-hpa-emotion", owner=SCALED_OBJECT)
SCALED = ScalerFacts(SCALED_OBJECT, "emotion", owner="ModelEndpoint")


def hpa(*conditions: Json, tolerance: bool = True, owner: str = "ModelEndpoint") -> Json:
    rules = behaviour()
    if not tolerance:
        for direction in rules.values():
            del direction["tolerance"]
    return {
        "metadata": {"name": "emotion", "ownerReferences": [{"kind": owner, "controller": True}]},
        "spec": {"behavior": rules},
        "status": {"conditions": list(conditions)},
    }


def condition(kube: Kube, kind: str = "MetricsAvailable") -> tuple[str, str, str]:
    (found,) = [one for one in kube.endpoint["status"]["conditions"] if one["type"] == kind]
    return found["status"], found["reason"], found["message"]


def test_the_facts_of_an_hpa_have_whether_it_scales_and_which_fields_the_api_server_kept() -> None:
    able = {"type": "AbleToScale", "status": "True", "reason": "SucceededGetScale"}
    failing = {"type": "ScalingActive", "status": "False", "reason": "FailedGetExternalMetric", "message": "no metrics"}

    assert ScalerFacts.from_object(hpa()) == ScalerFacts(HPA, "emotion", owner="ModelEndpoint", exact=True)
    assert ScalerFacts.from_object(hpa(able, failing, tolerance=False, owner=SCALED_OBJECT)) == ScalerFacts(
        HPA,
        "emotion",
        owner=SCALED_OBJECT,
        exact=False,
        working=False,
        reason="FailedGetExternalMetric",
        message="no metrics",
    )


def test_a_scaled_object_is_known_by_its_triggers_and_its_ready_condition() -> None:
    value = {
        "metadata": {"name": "emotion", "deletionTimestamp": "2026-11-21T19:00:00Z"},
        "spec": {"triggers": []},
        "status": {"conditions": [{"type": "Ready", "status": "Unknown"}, {"type": "Active", "status": "False"}]},
    }
    assert ScalerFacts.from_object(value) == ScalerFacts(SCALED_OBJECT, "emotion", deleting=True)


def test_keda_is_not_pointed_at_a_prometheus_that_the_operator_does_not_allow() -> None:
    scaling = {"mode": "KEDA", "metrics": {"prometheus": {"url": "http://metadata.internal"}}}
    kube = Kube(scaling=scaling).optimised()
    kube.settings = KEDA
    kube.reconcile()

    assert ("ScaledObject", "emotion") not in kube.objects
    assert condition(kube)[:2] == ("False", "NoPrometheus")
    assert "The operator does not query port 80 of the host metadata.internal" in condition(kube)[2]


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("HPA", (KEDAS, SCALED)),
        ("KEDA", (OURS,)),
        ("Internal", (OURS, KEDAS, SCALED)),
        ("External", (OURS, KEDAS, SCALED)),
        ("None", (OURS, KEDAS, SCALED)),
    ],
)
def test_scalers_left_over_from_another_mode_are_found(mode: str, expected: tuple[ScalerFacts, ...]) -> None:
    assert left_over((OURS, KEDAS, SCALED), ScalingMode(mode)) == expected


def test_the_writer_is_any_hpa_that_is_not_being_deleted() -> None:
    assert in_force((SCALED, KEDAS)) == KEDAS
    assert in_force((replace(OURS, deleting=True), SCALED)) is None


def controller(current: int, desired: int, between: HpaBounds) -> int:
    """An HPA of Kubernetes 1.34 with the tolerance of 10 %, over AverageValue 1 of the desired number."""
    if current < between.least:
        wanted = between.least
    elif current > between.most:
        wanted = between.most
    else:
        wanted = current if abs(1.0 - desired / current) <= 0.1 else desired
    return min(between.most, max(between.least, wanted))


@given(current=st.integers(1, 60), desired=st.integers(1, 60))
def test_an_hpa_with_its_tolerance_reaches_the_exact_number(current: int, desired: int) -> None:
    between = hpa_bounds(Scaling(min_replicas=1, max_replicas=60), DesiredScale(desired), (OURS,))

    assert controller(current, desired, between) == desired


@given(current=st.integers(1, 60), desired=st.integers(1, 60), late=st.integers(1, 60))
def test_a_lagging_metric_does_not_reverse_a_number_that_the_bounds_enforce(
    current: int, desired: int, late: int
) -> None:
    between = hpa_bounds(Scaling(min_replicas=1, max_replicas=60), DesiredScale(desired), (OURS,))
    if desired >= SMALLEST_PREVENTED:
        assert controller(current, late, between) == desired


@pytest.mark.parametrize(
    ("scale", "scalers", "expected"),
    [
        (DesiredScale(11), (OURS,), HpaBounds(11, 11)),
        (DesiredScale(9), (OURS,), HpaBounds(9, 9)),
        (DesiredScale(8), (OURS,), HpaBounds(2, 20)),
        (DesiredScale(11), (replace(OURS, exact=True),), HpaBounds(2, 20)),
        (DesiredScale(11), (SCALED, KEDAS), HpaBounds(11, 11)),
        (DesiredScale(11), (), HpaBounds(2, 20)),
        (None, (OURS,), HpaBounds(2, 20)),
        (DesiredScale(30), (OURS,), HpaBounds(20, 20)),
    ],
)
def test_bounds_are_the_specs_unless_the_tolerance_is_in_the_way(
    scale: DesiredScale | None, scalers: tuple[ScalerFacts, ...], expected: HpaBounds
) -> None:
    assert hpa_bounds(Scaling(min_replicas=2, max_replicas=20), scale, scalers) == expected


@pytest.mark.parametrize(("old", "new"), [("HPA", "KEDA"), ("KEDA", "HPA")])
def test_the_next_scaler_is_not_created_before_the_previous_one_is_gone(old: str, new: str) -> None:
    kinds = {"HPA": HPA, "KEDA": SCALED_OBJECT}
    kube = Kube(settings=KEDA, scaling={"mode": old}).optimised()
    kube.deployment["spec"]["replicas"] = 5
    kube.edit(scaling={"mode": new})

    made = kube.plan()

    assert Ref(kinds[old], "emotion") in made.delete
    assert made.object(kinds[new]) is None
    kube.reconcile()
    assert (kinds[new], "emotion") in kube.objects


def test_kedas_hpa_is_not_deleted_and_the_next_writer_waits_until_it_is_gone() -> None:
    kube = Kube(settings=KEDA, scaling={"mode": "KEDA"}).optimised()
    kube.kedas = [KEDAS]
    kube.reconcile()
    assert Ref(HPA, "keda-hpa-emotion") not in kube.deleted
    assert condition(kube)[1] == "NotRead"

    kube.edit(scaling={"mode": "Internal", "maxReplicas": 8})
    kube.deployment["spec"]["replicas"] = 5
    kube.scale = DesiredScale(3, "3 replicas: 120 requests/s.")
    kube.reconcile()
    status, reason, message = condition(kube)
    assert (status, reason) == ("Unknown", "HandingOver")
    assert "the HorizontalPodAutoscaler keda-hpa-emotion" in message
    assert "does its operator run?" in message
    assert kube.deployment["spec"]["replicas"] == 5

    kube.kedas = []
    kube.reconcile()
    assert kube.deployment["spec"]["replicas"] == 3


def test_a_count_that_is_kept_for_an_hpa_is_written_only_if_it_has_not_changed() -> None:
    kube = Kube().optimised()
    kube.deployment["metadata"]["managedFields"] = [
        {"manager": "penstock-operator", "operation": "Apply", "fieldsV1": {"f:spec": {"f:replicas": {}}}}
    ]
    assert kube.plan().guarded == frozenset()

    kube.edit(scaling={"mode": "HPA"})

    assert kube.plan().guarded == {Ref("Deployment", "emotion")}


@pytest.mark.parametrize(
    ("mode", "facts", "words"),
    [
        ("HPA", {}, ("external.metrics.k8s.io", "FailedGetExternalMetric: no metrics returned.")),
        ("KEDA", {"kind": SCALED_OBJECT}, ("its triggers", "FailedGetExternalMetric: no metrics returned.")),
    ],
)
def test_the_condition_has_the_message_of_a_scaler_that_cannot_scale(
    mode: str, facts: dict[str, Any], words: tuple[str, ...]
) -> None:
    kube = Kube(settings=KEDA, scaling={"mode": mode}).optimised()
    kube.scale = DesiredScale(2)
    kind = HPA if mode == "HPA" else SCALED_OBJECT
    failing = {"status": "False", "reason": "FailedGetExternalMetric", "message": "no metrics returned"}
    kind_of_condition = "ScalingActive" if mode == "HPA" else "Ready"
    kube.objects[kind, "emotion"]["status"] = {"conditions": [{"type": kind_of_condition, **failing}]}

    kube.reconcile()

    status, reason, message = condition(kube)
    assert (status, reason) == ("False", "ScalerFails")
    assert all(word in message for word in words)
    kube.scale = DesiredScale(2, metrics=no("MetricsMissing", "the load cannot be read"))
    kube.reconcile()
    assert condition(kube)[1] == "MetricsMissing", "a load that cannot be read is reported before the scaler's failure"


def test_an_endpoint_that_keda_has_scaled_to_zero_is_ready_while_its_gateway_answers() -> None:
    scaling = {"mode": "KEDA", "minReplicas": 0, "maxReplicas": 4}
    kube = Kube(settings=KEDA, scaling=scaling).optimised()
    gateway_up(kube)
    kube.reconcile()
    scaled_to_zero(kube)
    kube.reconcile()

    assert kube.deployment["spec"]["replicas"] == 0
    assert condition(kube, "Available")[:2] == ("True", "ScaledToZero")
    assert condition(kube, "Ready")[:2] == ("True", "ScaledToZero")
    assert condition(kube, "Progressing")[:2] == ("False", "Settled")


@pytest.mark.parametrize("ours", [False, True])
def test_a_deployment_without_replicas_starts_with_one_only_after_the_operator_had_suspended_it(ours: bool) -> None:
    kube = Kube(settings=KEDA, scaling={"mode": "HPA"}).optimised()
    if ours:
        kube.edit(suspend=True)
        kube.reconcile()
        kube.edit(suspend=False)
    scaled_to_zero(kube, by=FIELD_MANAGER if ours else "kubectl")
    kube.reconcile()

    assert condition(kube, "Available")[:2] == ("False", "Starting" if ours else "ScaledToZero")


def scaled_to_zero(kube: Kube, *, by: str = "keda-operator") -> None:
    """Another client has scaled the Deployment, through the scale subresource, and its pods are gone."""
    entry: Json = {"manager": by, "fieldsV1": {"f:spec": {"f:replicas": {}}}}
    kube.deployment["spec"]["replicas"] = 0
    kube.deployment["metadata"]["managedFields"] = [entry if by == FIELD_MANAGER else {**entry, "subresource": "scale"}]
    if by != FIELD_MANAGER:
        kube._replicas_ours.discard(("Deployment", kube.name))
    kube.pods.clear()
    kube.deployment_status(updated=0, available=0, replicas=0)


def test_an_hpa_that_is_disabled_at_zero_replicas_is_not_broken() -> None:
    resting = {"type": "ScalingActive", "status": "False", "reason": "ScalingDisabled", "message": "zero"}
    assert not ScalerFacts.from_object(hpa(resting)).broken


def test_without_keda_its_mode_creates_nothing_and_the_condition_names_the_cause() -> None:
    kube = Kube(settings=KEDA, scaling={"mode": "KEDA"})
    kube.unknown_kinds = {SCALED_OBJECT}
    kube.optimised()

    status, reason, message = condition(kube)

    assert (SCALED_OBJECT, "emotion") not in kube.objects
    assert (status, reason) == ("False", "NoKeda")
    assert "install KEDA" in message

    kube.unknown_kinds = set()
    kube.reconcile()
    assert (SCALED_OBJECT, "emotion") in kube.objects


def test_a_former_scaler_is_removed_from_the_owners_when_the_operator_takes_over() -> None:
    theirs = {"manager": "kube-controller-manager", "subresource": "scale", "fieldsV1": {"f:spec": {"f:replicas": {}}}}
    kube = Kube(scaling={"mode": "HPA"}).optimised()
    kube.deployment["metadata"]["managedFields"] = [theirs]
    assert kube.plan().taken_over == frozenset(), "the HPA owns the number"

    kube.edit(scaling={"mode": "Internal"})
    kube.act(kube.plan())
    kube.deployment["metadata"]["managedFields"] = [theirs]

    assert kube.plan().taken_over == {Ref("Deployment", "emotion")}
    kube.deployment["metadata"]["managedFields"] = []
    assert kube.plan().taken_over == frozenset()


def test_scale_entries_are_the_owners_of_the_number_through_the_scale_subresource() -> None:
    number: Json = {"f:spec": {"f:replicas": {}}}
    other: Json = {"f:spec": {"f:template": {}}}
    managed = [
        {"manager": "penstock-operator", "operation": "Apply", "fieldsV1": number},
        {"manager": "kube-controller-manager", "subresource": "scale", "fieldsV1": number},
        {"manager": "kubectl-edit", "operation": "Update", "fieldsV1": number},
        {"manager": "kube-controller-manager", "subresource": "status", "fieldsV1": other},
        {"manager": "kubectl", "subresource": "scale", "fieldsV1": number},
    ]
    assert scale_entries(managed) == (1, 4)
    assert replica_owners(managed) == {"penstock-operator", "kube-controller-manager", "kubectl-edit", "kubectl"}
