"""OptimizedModels: their keys, the endpoints that share them, their deletion."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import timedelta

import pytest

from penstock_operator.endpoint.optimization.model import optimized_model_object, read_state, wanted_name, wanted_spec
from penstock_operator.endpoint.optimization.unused import UnusedModelAction, unused_model_action
from penstock_operator.endpoint.spec import ParsedEndpoint
from penstock_operator.facts.names import Ref
from penstock_operator.facts.workloads import ModelUser, OptimizedModelFacts
from tests.operator.endpoint.kube import BEGIN, SETTINGS, Json, Kube

GRACE = timedelta(seconds=SETTINGS.unused_grace_seconds)
USER = ModelUser("emotion", "uid")


def name_of(kube: Kube) -> str:
    return wanted_name(ParsedEndpoint.from_object(kube.endpoint).spec, kube.settings, kube.texts)


@pytest.mark.parametrize(
    "change",
    [
        {"model": "hf://org/other@main"},
        {"cores": 3},
        {"hardwareClass": "any"},
        {"objective": {"latency": {"p95Milliseconds": 20.0}}},
        {"workload": {"sequenceLengths": [128]}},
        {"optimization": {"engines": ["onnxruntime"]}},
        {"serving": {"maxInputTokens": 256}},
        {"modelCredentials": {"secretName": "token"}},
    ],
)
def test_a_field_that_changes_the_result_makes_another_optimized_model(change: Json) -> None:
    assert name_of(Kube(**change)) != name_of(Kube())


@pytest.mark.parametrize(
    "change",
    [
        {"replicas": 3},
        {"scaling": {"maxReplicas": 9}},
        {"rollout": {"drainSeconds": 1}},
        {"pod": {"labels": {"a": "b"}}},
        {"suspend": True},
        {"optimization": {"serveWhileOptimizing": False}},
        {"optimization": {"engines": ["openvino", "native", "onnxruntime"]}},
    ],
)
def test_a_field_that_does_not_change_the_result_keeps_the_optimized_model(change: Json) -> None:
    assert name_of(Kube(**change)) == name_of(Kube())


def test_endpoints_with_the_same_key_share_an_optimized_model_and_a_newer_toolchain_makes_another() -> None:
    assert name_of(Kube(name="one")) == name_of(Kube(name="two"))
    assert name_of(Kube(settings=replace(SETTINGS, toolchain="0.3.0"))) != name_of(Kube())


def test_an_endpoint_that_finds_a_result_serves_it_without_a_job() -> None:
    first = Kube(name="one").optimised()
    model = first.endpoint["status"]["optimizedModel"]
    second = Kube(name="two")
    second.objects["OptimizedModel", model] = first.objects["OptimizedModel", model]
    second.reconcile()
    assert second.artefact == first.artefact
    assert not [kind for kind, _ in second.objects if kind == "Job"]


def test_two_endpoints_write_the_same_status_of_the_model_that_they_share() -> None:
    first = Kube(name="one")
    first.reconcile()
    first.job_runs(baseline=True)
    second = Kube(name="two")
    second.objects = first.objects
    second.pods, second.job_reports = first.pods, first.job_reports
    one, two = first.plan(), second.plan()
    assert one.optimized_status == two.optimized_status


def model(**more: object) -> OptimizedModelFacts:
    values: Json = {"name": "m", "spec": {}, "created": BEGIN, "status": {"phase": "Ready"}}
    return OptimizedModelFacts(**{**values, **more})


def test_an_unused_result_is_deleted_after_the_grace_time() -> None:
    now = BEGIN + timedelta(days=1)
    marked = unused_model_action(model(), now=now, settings=SETTINGS)
    assert not marked.delete
    assert marked.status is not None
    assert marked.requeue_seconds == GRACE.total_seconds()
    later = model(status=marked.status.status)
    early = unused_model_action(later, now=now + GRACE / 2, settings=SETTINGS)
    assert not early.delete
    assert early.requeue_seconds == pytest.approx(GRACE.total_seconds() / 2)
    assert unused_model_action(later, now=now + GRACE, settings=SETTINGS).delete


def test_a_result_that_is_used_again_is_no_longer_marked_unused() -> None:
    unused = model(status={"phase": "Ready", "lastUsed": "2026-11-21T12:00:00Z"}, users=(USER,))
    again = unused_model_action(unused, now=BEGIN + 2 * GRACE, settings=SETTINGS)
    assert not again.delete
    assert again.status is not None
    assert "lastUsed" not in again.status.status


def test_a_result_in_use_is_left_alone() -> None:
    swept = unused_model_action(model(users=(USER,)), now=BEGIN + 10 * GRACE, settings=SETTINGS)
    assert (swept.delete, swept.status, swept.requeue_seconds) == (False, None, None)


@pytest.mark.parametrize("phase", ["Pending", "Optimizing", "Failed"])
def test_an_optimized_model_without_result_and_user_is_deleted_at_once_unless_it_is_new(phase: str) -> None:
    facts = model(status={"phase": phase}, owned=True)
    assert not unused_model_action(facts, now=BEGIN + timedelta(seconds=5), settings=SETTINGS).delete
    assert unused_model_action(facts, now=BEGIN + timedelta(seconds=60), settings=SETTINGS).delete


def action(seconds: float, **more: object) -> UnusedModelAction:
    """What is done so long after it was created."""
    return unused_model_action(model(**more), now=BEGIN + timedelta(seconds=seconds), settings=SETTINGS)


def test_an_optimized_model_that_is_restored_before_its_status_is_kept_for_the_grace_time() -> None:
    grace = GRACE.total_seconds()
    found = action(60, status={})
    assert not found.delete
    # Its status may come late: nothing is written to it before.
    assert found.status is None
    assert found.requeue_seconds == grace - 60
    assert not action(grace - 1, status={}).delete
    assert action(grace, status={}).delete
    # The operator creates its own with owners.
    assert action(60, status={}, owned=True).delete
    shorter = replace(SETTINGS, unused_grace_seconds=1)
    assert not unused_model_action(model(status={}), now=BEGIN + timedelta(seconds=29), settings=shorter).delete


@pytest.mark.parametrize("owners", [(), ({"kind": "ModelEndpoint", "name": "e", "uid": "1"},)])
def test_owners_are_read_from_the_object(owners: tuple[Json, ...]) -> None:
    value = {"metadata": {"name": "m", "ownerReferences": list(owners)}}
    assert OptimizedModelFacts.from_object(value).owned is bool(owners)
    assert not OptimizedModelFacts.from_object({"metadata": {"name": "m"}}).owned


def test_the_grace_time_of_a_restored_result_does_not_begin_before_it_was_restored() -> None:
    """It was unused when the backup was made, days ago."""
    found = action(60, status={"phase": "Ready", "lastUsed": "2026-11-01T12:00:00Z"})
    assert not found.delete
    assert found.requeue_seconds == GRACE.total_seconds()
    assert found.status is not None
    assert found.status.status["lastUsed"] == "2026-11-21T12:01:00Z"


def jobs(kube: Kube) -> list[str]:
    return [name for kind, name in kube.objects if kind == "Job"]


def test_an_endpoint_that_comes_between_a_restored_model_and_its_status_serves_the_result_without_its_job() -> None:
    before = Kube().optimised()
    name = before.endpoint["status"]["optimizedModel"]
    kube = Kube()
    restored = before.objects["OptimizedModel", name]
    kube.objects["OptimizedModel", name] = {**restored, "status": {}}
    kube.reconcile()
    kube.job_runs(baseline=False)
    kube.reconcile()
    assert jobs(kube) == [f"{name}-1"]

    kube.objects["OptimizedModel", name]["status"] = restored["status"]
    kube.reconcile()
    assert jobs(kube) == []
    assert kube.artefact == before.artefact
    assert "ownerReferences" not in kube.objects["OptimizedModel", name]["metadata"]


def test_the_job_of_a_result_is_kept_for_its_log() -> None:
    kube = Kube().optimised()
    kube.reconcile()
    assert len(jobs(kube)) == 1


def test_an_unused_optimized_model_that_is_being_deleted_is_left_alone() -> None:
    assert not unused_model_action(model(deleting=True, status={}), now=BEGIN + 10 * GRACE, settings=SETTINGS).delete


def test_a_spec_of_another_version_is_not_acted_upon() -> None:
    assert read_state(model(spec={"model": 3})) is None


def test_a_field_of_a_later_release_is_read_as_if_it_were_absent() -> None:
    kube = Kube().optimised()
    stored = kube.objects["OptimizedModel", kube.endpoint["status"]["optimizedModel"]]
    facts = model(spec=stored["spec"])
    later: Json = json.loads(json.dumps({**facts.spec, "later": {"x": 1}}))
    later["toolchain"]["later"] = later["optimization"]["later"] = "yes"
    known, same = (read_state(one) for one in (facts, replace(facts, spec=later)))
    assert known is not None
    assert same == known

    before = kube.plan()
    stored["spec"] = later
    made = kube.plan()
    kept = [value["spec"] for value in made.apply if value["kind"] == "OptimizedModel"]
    assert kept == [later], "what a later release wrote is not removed"
    for plan in (before, made):
        assert [value["kind"] for value in plan.apply].count("Deployment") == 1
    assert [value for value in made.apply if value["kind"] != "OptimizedModel"] == [
        value for value in before.apply if value["kind"] != "OptimizedModel"
    ]


def test_an_unreadable_optimized_model_of_the_name_that_is_wanted_leaves_what_serves() -> None:
    kube = Kube().optimised()
    name = kube.endpoint["status"]["optimizedModel"]
    kube.objects["OptimizedModel", name]["spec"] = {"model": 3}
    made = kube.plan()
    assert all(value["kind"] not in {"OptimizedModel", "Job"} for value in made.apply)
    assert made.delete == ()
    assert made.requeue_seconds is not None


def test_an_optimized_model_that_is_being_deleted_is_waited_for() -> None:
    kube = Kube()
    kube.reconcile()
    name = kube.endpoint["status"]["optimizedModel"]
    kube.objects["OptimizedModel", name]["metadata"]["deletionTimestamp"] = "2026-11-21T12:00:00Z"
    made = kube.plan()
    assert all(value["kind"] not in {"OptimizedModel", "Job"} for value in made.apply)
    assert made.requeue_seconds is not None


def test_an_invalid_status_is_rebuilt_from_the_jobs() -> None:
    kube = Kube()
    kube.reconcile()
    kube.job_succeeds()
    name = kube.endpoint["status"]["optimizedModel"]
    kube.objects["OptimizedModel", name]["status"] = {"phase": "Done"}
    kube.reconcile()
    assert kube.objects["OptimizedModel", name]["status"]["phase"] == "Ready"


def test_a_baseline_whose_digest_is_none_is_not_served() -> None:
    kube = Kube()
    kube.reconcile()
    kube.job_runs()
    kube.job_reports[kube.job] = replace(kube.job_reports[kube.job], baseline_digest="latest", baseline_uri="file:///x")
    kube.reconcile()
    assert ("Deployment", "emotion") not in kube.objects


def test_an_endpoint_whose_texts_are_missing_has_no_optimized_model() -> None:
    assert name_of(Kube(workload={"textsFrom": {"configMapName": "texts", "key": "texts"}})) == ""


def test_a_result_without_figures_of_another_version_is_replaced() -> None:
    kube = Kube().optimised()
    name = kube.endpoint["status"]["optimizedModel"]
    del kube.objects["OptimizedModel", name]["status"]["result"]
    kube.edit(cores=4)
    kube.reconcile()
    kube.job_succeeds(artefact="sha256:" + "c" * 64)
    kube.reconcile()
    assert kube.artefact == "sha256:" + "c" * 64


def _as_the_api_server_returns(number: str) -> int | float:
    return int(float(number)) if float(number).is_integer() else float(number)


@pytest.mark.parametrize("more", [{}, {"later": 1}], ids=["the same", "of a later version"])
def test_a_spec_is_applied_as_it_was_at_first_or_as_another_version_has_written_it(more: Json) -> None:
    kube = Kube(objective={"latency": {"p95Milliseconds": 20.0}}, optimization={"budgetSeconds": 90.0})
    endpoint = ParsedEndpoint.from_object(kube.endpoint)
    spec = wanted_spec(endpoint.spec, kube.settings, kube.texts)
    assert spec is not None
    first = optimized_model_object(None, spec, endpoint, ready=False)
    stored = json.loads(json.dumps({**first["spec"], **more}), parse_float=_as_the_api_server_returns)
    assert json.dumps(stored) != json.dumps(first["spec"])

    again = optimized_model_object(OptimizedModelFacts(name_of(kube), spec=stored), spec, endpoint, ready=False)

    assert json.dumps(again["spec"]) == json.dumps(stored if more else first["spec"])


def test_the_job_of_a_deleted_optimized_model_is_not_taken_over() -> None:
    """`kubectl delete optimizedmodel` asks for another measurement, and the old job has the old result."""
    kube = Kube().optimised()
    name, job = kube.endpoint["status"]["optimizedModel"], kube.job
    del kube.objects["OptimizedModel", name]
    kube.act(kube.plan())
    made = kube.plan()

    assert Ref("Job", job) in made.delete
    assert made.object("Job") is None
    assert "OptimizationStarted" not in [event.reason for event in made.events]
    assert made.requeue_seconds is not None
    kube.act(made)
    assert kube.objects["OptimizedModel", name]["status"]["phase"] == "Pending"
    assert kube.plan().object("Job", job) is not None
