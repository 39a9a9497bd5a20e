"""Which program scales in which mode, and the conditions and events about it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from penstock_operator.decide import Cause
from penstock_operator.facts import names
from penstock_operator.facts.findings import no, yes
from penstock_operator.facts.names import Ref
from penstock_operator.facts.scaling import DesiredScale
from penstock_operator.facts.workloads import DeploymentFacts
from penstock_operator.limits.quotas import Limit
from tests.operator.endpoint.kube import SETTINGS, Json, Kube, result

OURS = {"manager": names.FIELD_MANAGER, "operation": "Apply", "fieldsV1": {"f:spec": {"f:replicas": {}}}}
HPAS = {
    "manager": "kube-controller-manager",
    "operation": "Update",
    "subresource": "scale",
    "fieldsV1": {"f:spec": {"f:replicas": {}}},
}
OTHERS = {"manager": "kube-controller-manager", "operation": "Update", "fieldsV1": {"f:status": {"f:replicas": {}}}}
KEDA = replace(SETTINGS, keda=True, prometheus_url="http://prometheus.monitoring:9090")


def environment(kube: Kube) -> dict[str, str]:
    container = kube.deployment["spec"]["template"]["spec"]["containers"][0]
    return {entry["name"]: entry.get("value", "") for entry in container["env"]}


def condition(kube: Kube, kind: str = "MetricsAvailable") -> tuple[str, str]:
    (found,) = [one for one in kube.endpoint["status"]["conditions"] if one["type"] == kind]
    return found["status"], found["reason"]


@pytest.mark.parametrize(
    ("managed", "alone"),
    [
        ([], False),
        ([OURS], True),
        ([OURS, OTHERS], True),
        ([OURS, HPAS], False),
        ([HPAS], False),
    ],
)
def test_the_owner_of_the_replica_count_is_read_from_the_managed_fields(managed: list[Json], alone: bool) -> None:
    value = {"metadata": {"managedFields": managed}, "spec": {"replicas": 3, "template": {}}}
    assert DeploymentFacts.from_object(value).replicas_ours_alone is alone


@pytest.mark.parametrize("mode", ["HPA", "KEDA"])
def test_the_operator_keeps_the_number_until_the_hpa_has_written_it(mode: str) -> None:
    kube = Kube().optimised()
    kube.deployment["spec"]["replicas"] = 5
    kube.deployment["metadata"]["managedFields"] = [OURS]
    kube.edit(scaling={"mode": mode})

    kept = kube.plan().object("Deployment")
    kube.deployment["metadata"]["managedFields"] = [OURS, HPAS]
    let_go = kube.plan().object("Deployment")

    assert kept is not None
    assert let_go is not None
    assert (kept["spec"].get("replicas"), let_go["spec"].get("replicas")) == (5, None)


def model_deleted(kube: Kube) -> None:
    """As the conditions advise, to measure again: until then only the digest of what serves is known."""
    for key in [key for key in kube.objects if key[0] in {"OptimizedModel", "Job"}]:
        del kube.objects[key]


def class_deleted(kube: Kube) -> None:
    del kube.classes["icelake"]


@pytest.mark.parametrize(
    ("change", "present", "decided", "expected"),
    [
        (model_deleted, 0, 1, 1),
        (model_deleted, 1, 3, 3),
        (model_deleted, 3, 0, 0),
        # Not accepted: the bounds of the spec may be what is not.
        (class_deleted, 0, 3, 1),
        (class_deleted, 1, 3, 1),
        (class_deleted, 3, 1, 3),
    ],
)
def test_what_serves_scales_while_its_template_is_not_known_and_wakes_while_the_spec_is_not_accepted(
    change: Callable[[Kube], None], present: int, decided: int, expected: int
) -> None:
    kube = Kube(scaling={"minReplicas": 0, "maxReplicas": 4}).optimised()
    kube.scale = DesiredScale(present, "as before", "Demand")
    kube.reconcile()
    change(kube)
    kube.reconcile()
    kube.scale = DesiredScale(decided, "a decision", "Demand")
    before = kube.deployment["spec"]["template"]
    made = kube.reconcile()

    assert kube.deployment["spec"]["replicas"] == expected
    assert kube.deployment["spec"]["template"] == before
    assert made.status["scaling"]["desired"] == expected


@pytest.mark.parametrize("mode", ["Internal", "HPA"])
@pytest.mark.parametrize("change", [model_deleted, class_deleted])
def test_a_suspended_endpoint_has_no_pods_whatever_is_known_of_it(change: Callable[[Kube], None], mode: str) -> None:
    kube = Kube(scaling={"mode": mode}).optimised()
    change(kube)
    kube.edit(suspend=True)
    kube.reconcile()

    assert kube.deployment["spec"]["replicas"] == 0
    assert ("HorizontalPodAutoscaler", kube.name) not in kube.objects


@pytest.mark.parametrize(("cores", "expected"), [(2, 1), (1, 0)])
def test_an_endpoint_that_is_not_accepted_wakes_only_within_the_quota(cores: int, expected: int) -> None:
    kube = Kube(scaling={"minReplicas": 0, "maxReplicas": 4}).optimised()
    kube.scale = DesiredScale(0, "idle", "Idle")
    kube.reconcile()
    class_deleted(kube)
    kube.reconcile()
    kube.quota = (Limit(cores), ())
    kube.scale = DesiredScale(1, "a request waits", "Woken")
    made = kube.plan()

    assert (made.scaled or 0) == expected
    assert (made.allocation is None) is (expected == 0)


def test_an_hpa_scales_to_the_operators_number_without_its_tolerance() -> None:
    kube = Kube(scaling={"mode": "HPA", "minReplicas": 0, "maxReplicas": 30}).optimised()
    spec = kube.objects["HorizontalPodAutoscaler", "emotion"]["spec"]

    assert (spec["minReplicas"], spec["maxReplicas"]) == (1, 30)
    assert spec["scaleTargetRef"] == {"apiVersion": "apps/v1", "kind": "Deployment", "name": "emotion"}
    external = spec["metrics"][0]["external"]
    assert external["metric"]["name"] == "penstock_operator_desired_replicas"
    assert external["metric"]["selector"]["matchLabels"] == {
        "model_endpoint": "emotion",
        "model_endpoint_namespace": "a",
    }
    assert external["target"] == {"type": "AverageValue", "averageValue": "1"}
    for direction in ("scaleUp", "scaleDown"):
        assert spec["behavior"][direction]["tolerance"] == "0"
        assert spec["behavior"][direction]["stabilizationWindowSeconds"] == 0


@pytest.mark.parametrize("change", [{"scaling": {"mode": "Internal"}}, {"suspend": True}])
@pytest.mark.parametrize(("mode", "kind"), [("HPA", "HorizontalPodAutoscaler"), ("KEDA", "ScaledObject")])
def test_a_scaler_is_deleted_when_the_mode_changes_and_while_suspended(mode: str, kind: str, change: Json) -> None:
    kube = Kube(settings=KEDA, scaling={"mode": mode}).optimised()
    assert (kind, "emotion") in kube.objects
    kube.edit(**change)
    kube.reconcile()
    assert Ref(kind, "emotion") in kube.deleted


@pytest.mark.parametrize("mode", ["Internal", "External", "None"])
def test_in_the_other_modes_nothing_else_scales(mode: str) -> None:
    kube = Kube(settings=KEDA, scaling={"mode": mode}).optimised()
    assert {"HorizontalPodAutoscaler", "ScaledObject"}.isdisjoint(kind for kind, _ in kube.objects)


def test_keda_asks_a_prometheus_for_the_operators_number() -> None:
    kube = Kube(settings=KEDA, scaling={"mode": "KEDA", "minReplicas": 2, "maxReplicas": 9}).optimised()
    spec = kube.objects["ScaledObject", "emotion"]["spec"]
    assert (spec["minReplicaCount"], spec["maxReplicaCount"]) == (2, 9)
    assert spec["triggers"] == [
        {
            "type": "prometheus",
            "metricType": "AverageValue",
            "metadata": {
                "serverAddress": "http://prometheus.monitoring:9090",
                "query": "max(penstock_operator_desired_replicas"
                '{model_endpoint="emotion",model_endpoint_namespace="a"})',
                "threshold": "1",
                "ignoreNullValues": "false",
            },
        }
    ]


def test_keda_without_a_prometheus_makes_the_condition_false() -> None:
    kube = Kube(settings=replace(SETTINGS, keda=True), scaling={"mode": "KEDA"}).optimised()
    assert ("ScaledObject", "emotion") not in kube.objects
    assert condition(kube) == ("False", "NoPrometheus")


@pytest.mark.parametrize(
    ("scaling", "scale", "expected"),
    [
        ({"mode": "Internal"}, None, ("Unknown", "NotRead")),
        ({"mode": "HPA"}, None, ("Unknown", "NotRead")),
        ({"mode": "HPA"}, DesiredScale(2), ("True", "Read")),
        ({"mode": "Internal", "minReplicas": 2, "maxReplicas": 2}, None, ("True", "NotNeeded")),
        ({"mode": "External"}, None, ("True", "NotNeeded")),
        (
            {"mode": "Internal"},
            DesiredScale(2, metrics=no("PartialScrape", "half of the replicas were read")),
            ("False", "PartialScrape"),
        ),
    ],
)
def test_metrics_available_is_computed_where_the_load_is_needed(
    scaling: Json, scale: DesiredScale | None, expected: tuple[str, str]
) -> None:
    kube = Kube(scaling=scaling).optimised()
    kube.scale = scale
    kube.reconcile()
    assert condition(kube) == expected


@pytest.mark.parametrize(
    ("scaling", "scale", "expected"),
    [
        ({}, None, ("Unknown", "NotRead")),
        ({"mode": "None"}, None, ("Unknown", "NotWatched")),
        ({}, DesiredScale(2, curve=yes("AsMeasured", "fits")), ("True", "AsMeasured")),
        (
            {},
            DesiredScale(2, curve=no("SlowerThanMeasured", "1.4 times slower")),
            ("False", "SlowerThanMeasured"),
        ),
        ({}, DesiredScale(2, curve=no("NoCurve", "none")), ("False", "NoCurve")),
    ],
)
def test_replicas_slower_than_their_curve_make_curve_current_false(
    scaling: Json, scale: DesiredScale | None, expected: tuple[str, str]
) -> None:
    kube = Kube(scaling=scaling).optimised()
    kube.scale = scale
    kube.reconcile()
    assert condition(kube, "CurveCurrent") == expected


def test_a_change_of_the_number_is_an_event_with_the_decision_and_the_same_number_is_none() -> None:
    kube = Kube(scaling={"maxReplicas": 8}).optimised()

    def scaled(scale: DesiredScale) -> list[tuple[str, str]]:
        kube.scale = scale
        events = kube.plan().events
        kube.reconcile()
        return [(event.reason, event.message) for event in events if event.reason in {"ScaledUp", "ScaledDown"}]

    assert scaled(DesiredScale(2, "2 replicas: 120 requests/s.")) == [], "the previous number is not known"
    assert scaled(DesiredScale(5, "5 replicas, up from 2: 300 requests/s.")) == [
        ("ScaledUp", "5 replicas, up from 2: 300 requests/s.")
    ]
    assert scaled(DesiredScale(5, "5 replicas: 310 requests/s.")) == []
    assert scaled(DesiredScale(3, "3 replicas, down from 5: 100 requests/s.")) == [
        ("ScaledDown", "3 replicas, down from 5: 100 requests/s.")
    ]


def test_a_number_limited_by_the_maximum_is_one_warning() -> None:
    kube = Kube(scaling={"maxReplicas": 5}).optimised()

    def warned(scale: DesiredScale) -> list[tuple[str, str]]:
        kube.scale = scale
        events = kube.plan().events
        kube.reconcile()
        return [(event.type, event.message) for event in events if event.reason == "ScalingLimited"]

    limited = DesiredScale(5, "5 replicas: 900 requests/s; 14 are wanted, maxReplicas is 5.", cause=Cause.MAXIMUM.value)
    assert warned(DesiredScale(5, "5 replicas: 300 requests/s.", cause=Cause.DEMAND.value)) == []
    assert warned(limited) == [("Warning", limited.reason)]
    assert warned(limited) == []


def test_in_the_mode_hpa_the_event_has_the_decision_and_its_reason() -> None:
    kube = Kube(scaling={"mode": "HPA", "maxReplicas": 8}).optimised()
    reasons = []
    for scale in (
        DesiredScale(2, "2 replicas."),
        DesiredScale(4, "4 replicas, up from 2."),
        DesiredScale(3, "3 replicas, down from 4."),
    ):
        kube.scale = scale
        reasons += [(event.reason, event.message) for event in kube.plan().events if "Wanted" in event.reason]
        kube.reconcile()

    assert reasons == [
        ("MoreReplicasWanted", "4 replicas, up from 2."),
        ("FewerReplicasWanted", "3 replicas, down from 4."),
    ]


def test_in_the_mode_hpa_the_status_has_what_the_operator_asks_for() -> None:
    kube = Kube(scaling={"mode": "HPA"}).optimised()
    kube.scale = DesiredScale(3, "3 replicas: 200 requests/s.", slowdown=1.2, p95_milliseconds=14.0)
    kube.reconcile()
    scaling = kube.endpoint["status"]["scaling"]
    assert (scaling["desired"], scaling["slowDown"], scaling["p95Milliseconds"]) == (3, 1.2, 14)
    assert "replicas" not in (kube.plan().object("Deployment") or {})["spec"]


@pytest.mark.parametrize(
    ("spec", "capacity", "expected"),
    [
        ({"objective": {"latency": {"p95Milliseconds": 12.5}}}, None, "12.5"),
        ({}, {"requestsPerSecond": 88.0, "p95ObjectiveMilliseconds": 27.3}, "27.3"),
        ({}, {}, None),
    ],
)
def test_the_histogram_has_a_bound_on_the_objective_that_the_plan_keeps(
    spec: Json, capacity: Json | None, expected: str | None
) -> None:
    kube = Kube(**spec)
    kube.reconcile()
    if capacity is not None:
        kube.job_succeeds(result(capacity=capacity))
    else:
        kube.job_succeeds(result(capacity={}))
    kube.reconcile()
    kube.reconcile()
    assert environment(kube).get("PENSTOCK_OBJECTIVE_P95_MILLISECONDS") == expected
