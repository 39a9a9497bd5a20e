"""The plans of an endpoint, from its first apply to later changes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from penstock.resources.optimized_model import RESULT_FORMAT
from penstock_operator.facts import names
from penstock_operator.facts.names import Ref
from penstock_operator.facts.tenants import AllowList
from penstock_operator.facts.workloads import ModelUser
from tests.operator.endpoint.kube import (
    BASELINE,
    OTHER,
    RESULT,
    SETTINGS,
    Kube,
    condition,
    container,
    digest,
    info,
    result,
    unscheduled,
)


def test_the_first_plan_makes_the_optimized_model_and_a_stable_address_but_no_pods() -> None:
    kube = Kube()
    made = kube.plan()
    assert [value["kind"] for value in made.apply] == ["OptimizedModel", "Service", "NetworkPolicy"]
    assert made.status["url"] == "http://emotion.a.svc"
    assert condition(made, "Available")[1] == "NothingToServe"


def test_the_job_is_made_once_its_optimized_model_is_there_to_own_it() -> None:
    kube = Kube()
    kube.reconcile()
    job = kube.objects["Job", kube.job]
    model = next(value for (kind, _), value in kube.objects.items() if kind == "OptimizedModel")
    assert job["metadata"]["name"] == f"{model['metadata']['name']}-1"
    assert job["metadata"]["ownerReferences"][0]["uid"] == model["metadata"]["uid"]
    assert kube.plan().apply[0]["kind"] == "OptimizedModel"
    assert all(value["kind"] != "Job" for value in kube.plan().apply)


def test_the_fp32_graph_serves_while_the_job_runs() -> None:
    kube = Kube()
    kube.reconcile()
    kube.job_runs(7, 23, baseline=True)
    made = kube.reconcile()
    assert kube.artefact == BASELINE
    assert made.status["plan"]["baseline"] is True
    assert made.status["reason"] == "Optimizing 7/23"
    assert condition(made, "Ready")[:2] == ("False", "Optimizing")
    assert made.requeue_seconds is not None


def test_nothing_serves_before_the_result_if_serve_while_optimizing_is_off() -> None:
    kube = Kube(optimization={"serveWhileOptimizing": False})
    kube.reconcile()
    kube.job_runs(baseline=True)
    kube.reconcile()
    assert ("Deployment", "emotion") not in kube.objects
    kube.job_succeeds()
    kube.reconcile()
    assert kube.artefact == RESULT


def test_the_result_takes_over_from_the_fp32_graph_by_a_rolling_update() -> None:
    kube = Kube()
    kube.reconcile()
    kube.job_runs(baseline=True)
    kube.reconcile()
    kube.pods_serve()
    kube.job_succeeds()
    made = kube.reconcile()
    assert kube.artefact == RESULT
    assert condition(made, "Ready")[1] == "RollingOut"
    assert made.status["plan"]["digest"] == BASELINE, "the old artefact still serves"
    kube.pods_serve()
    made = kube.reconcile()
    assert condition(made, "Ready")[:2] == ("True", "Serving")
    assert made.status["plan"]["digest"] == RESULT
    assert [entry["digest"] for entry in made.status["history"]] == [BASELINE]


def test_a_ready_endpoint_shows_plan_p95_and_speed() -> None:
    status = Kube().optimised().endpoint["status"]
    assert (status["plan"]["summary"], status["p95"], status["speedUp"]) == (
        "openvino-int8, 2x1 threads",
        "14 ms",
        "4.7x",
    )
    assert status["selector"] == "app.kubernetes.io/name=penstock-runtime,penstock.dev/endpoint=emotion"
    assert (status["replicas"], status["readyReplicas"]) == (1, 1)


def test_the_plan_has_its_cost_where_the_class_has_a_price() -> None:
    kube = Kube().optimised()
    assert "costPerMillion" not in kube.endpoint["status"]["plan"]
    kube.classes["icelake"]["spec"]["price"] = {"perCoreHour": 0.0425, "currency": "USD"}
    plan = kube.reconcile().status["plan"]
    # Two cores for 0.085 an hour; 88 requests/s with a headroom of 0.75.
    assert plan["costPerMillion"] == pytest.approx(0.085 / (88 * 0.75 * 3600) * 1e6, rel=1e-3)
    assert (plan["costPerMonth"], plan["currency"]) == (62.05, "USD")


def node(instance_type: str, of: str = "icelake") -> dict[str, object]:
    labels = {"node.kubernetes.io/instance-type": instance_type, "penstock.dev/class": of}
    return {"metadata": {"name": instance_type, "labels": labels}}


def test_without_a_price_the_instance_type_of_the_classs_nodes_gives_the_cost() -> None:
    kube = Kube().optimised()
    # The dearest of the class's own nodes counts: 0.17 an hour for one of two cores, not 0.34 for three of four.
    kube.nodes = [node("c6i.xlarge"), node("c6i.2xlarge"), node("c7i.8xlarge", "other"), node("m1.small"), {}]
    plan = kube.reconcile().status["plan"]
    assert plan["costPerMonth"] == pytest.approx(2 * 0.17 * 730, rel=1e-3)
    assert plan["currency"] == "USD"
    assert plan["costPerMillion"] == pytest.approx(0.34 / (88 * 0.75 * 3600) * 1e6, rel=1e-3)
    kube.nodes = [node("c7i.8xlarge", "other"), node("m1.small")]
    assert "costPerMillion" not in kube.reconcile().status["plan"]
    # The price of the class counts before.
    kube.nodes = [node("c6i.xlarge")]
    kube.classes["icelake"]["spec"]["price"] = {"perCoreHour": 0.0425}
    assert kube.reconcile().status["plan"]["costPerMonth"] == 62.05


def test_the_fp32_graph_has_a_cost_of_a_month_and_none_of_requests() -> None:
    kube = Kube()
    kube.classes["icelake"]["spec"]["price"] = {"perCoreHour": 0.0425}
    kube.reconcile()
    kube.job_runs(baseline=True)
    kube.reconcile()
    kube.pods_serve()
    plan = kube.reconcile().status["plan"]
    assert plan["costPerMonth"] == 62.05
    assert "costPerMillion" not in plan


def test_a_changed_spec_is_optimised_anew_while_the_old_plan_serves_on_its_old_cores() -> None:
    kube = Kube().optimised()
    template = kube.template_hash
    kube.edit(cores=4)
    made = kube.reconcile()
    assert kube.artefact == RESULT
    assert kube.template_hash == template, "the old plan keeps its cores"
    assert condition(made, "Available")[0] == "True"
    assert condition(made, "Ready")[:2] == ("False", "OptimizationPending")
    kube.job_runs(baseline=True)
    kube.reconcile()
    assert kube.artefact == RESULT, "an optimised plan is not replaced by an fp32 graph"
    kube.job_succeeds(artefact=OTHER)
    kube.reconcile()
    assert (kube.artefact, kube.cpus) == (OTHER, 8)


def test_a_change_that_the_result_does_not_depend_on_rolls_without_a_new_optimisation() -> None:
    kube = Kube().optimised()
    model = kube.endpoint["status"]["optimizedModel"]
    template = kube.template_hash
    kube.edit(pod={"labels": {"team": "search"}})
    kube.reconcile()
    assert kube.endpoint["status"]["optimizedModel"] == model
    assert kube.template_hash != template
    assert kube.artefact == RESULT


def test_a_failed_optimisation_of_a_changed_spec_leaves_what_serves() -> None:
    kube = Kube().optimised()
    kube.edit(model="hf://org/gone@main")
    kube.reconcile()
    kube.job_fails("ModelNotFound", "hf://org/gone is not there", retryable=False)
    made = kube.reconcile()
    assert kube.artefact == RESULT
    assert condition(made, "Available")[0] == "True"
    assert condition(made, "Ready")[:2] == ("False", "ModelNotFound")
    assert "goes on serving" in condition(made, "Optimized")[2]


def test_a_result_out_of_its_budget_does_not_replace_one_within() -> None:
    kube = Kube().optimised()
    kube.edit(objective={"latency": {"p95Milliseconds": 10.0}})
    kube.reconcile()
    kube.job_succeeds(result(accuracy={"withinBudget": False, "reason": "argmax_agreement 0.9 is under 0.99"}), OTHER)
    made = kube.reconcile()
    assert kube.artefact == RESULT
    status, reason, message = condition(made, "Optimized")
    assert (status, reason) == ("False", "KeptPrevious")
    assert "argmax_agreement 0.9" in message


NEW_IMAGES = replace(SETTINGS, toolchain="0.3.0", optimizer_image="localhost/optimizer:0.3.0")


def models(kube: Kube) -> list[str]:
    return sorted(name for kind, name in kube.objects if kind == "OptimizedModel")


def test_new_images_search_only_what_is_asked_for() -> None:
    kube = Kube().optimised()
    [first] = models(kube)

    kube.settings = NEW_IMAGES
    made = kube.reconcile()
    assert models(kube) == [first]
    assert kube.endpoint["status"]["optimizedModel"] == first
    assert condition(made, "Optimized")[:2] == ("True", "Optimized")
    assert kube.plan().apply == made.apply, "nothing more to do"

    # A changed spec is searched with the new images, and what serves stays until then.
    kube.edit(objective={"latency": {"p95Milliseconds": 10.0}})
    kube.reconcile()
    [second] = set(models(kube)) - {first}
    assert kube.objects["OptimizedModel", second]["spec"]["toolchain"] == {
        "image": NEW_IMAGES.optimizer_image,
        "version": "0.3.0",
        "format": RESULT_FORMAT,
        "revision": SETTINGS.search_revision,
    }
    assert kube.artefact == RESULT


@pytest.mark.parametrize("why", ["a higher revision", "an older result", "outside the accuracy budget", "deleted"])
def test_new_images_search_again(why: str) -> None:
    kube = Kube().optimised()
    [first] = models(kube)
    found = kube.objects["OptimizedModel", first]
    kube.settings = NEW_IMAGES
    match why:
        case "a higher revision":
            kube.settings = replace(NEW_IMAGES, search_revision=SETTINGS.search_revision + 1)
        case "an older result":
            del found["spec"]["toolchain"]["revision"]
        case "outside the accuracy budget":
            found["status"]["result"]["accuracy"] |= {"withinBudget": False, "reason": "argmax_agreement 0.9"}
        case "deleted":
            del kube.objects["OptimizedModel", first]
    kube.reconcile()

    [second] = set(models(kube)) - {first}
    assert kube.endpoint["status"]["optimizedModel"] == second
    assert kube.artefact == RESULT, "it serves until there is another"


def test_a_result_that_new_images_have_made_for_another_endpoint_takes_over() -> None:
    faster = result(capacity={"requestsPerSecond": 95.0, "p95ObjectiveMilliseconds": 20.0})
    other = Kube(settings=NEW_IMAGES)
    other.reconcile()
    other.job_succeeds(faster, OTHER)
    other.reconcile()
    [name] = models(other)
    kube = Kube().optimised()
    kube.settings = NEW_IMAGES
    kube.objects["OptimizedModel", name] = other.objects["OptimizedModel", name]
    kube.reconcile()
    assert kube.artefact == OTHER


def test_a_slower_result_of_a_newer_optimiser_does_not_replace_what_serves_and_ready_stays_true() -> None:
    kube = Kube().optimised()
    kube.settings = replace(NEW_IMAGES, search_revision=SETTINGS.search_revision + 1)
    kube.reconcile()
    slower = result(capacity={"requestsPerSecond": 40.0, "p95ObjectiveMilliseconds": 20.0})
    kube.job_succeeds(slower, OTHER)
    made = kube.reconcile()
    assert kube.artefact == RESULT
    assert condition(made, "Optimized")[:2] == ("True", "KeptPrevious")
    assert condition(made, "Ready")[0] == "True"


def test_after_a_rollback_a_result_of_a_later_format_is_replaced_by_the_own_result_even_if_that_is_slower() -> None:
    kube = Kube().optimised()
    later = kube.endpoint["status"]["optimizedModel"]
    kube.objects["OptimizedModel", later]["spec"]["toolchain"]["format"] = RESULT_FORMAT + 1
    before = kube.objects["Deployment", "emotion"]
    kube.settings = replace(kube.settings, toolchain="0.0.9")
    kube.reconcile()
    assert kube.objects["Deployment", "emotion"] == before, "until there is an own result nothing changes"

    kube.job_succeeds(result(capacity={"requestsPerSecond": 40.0, "p95ObjectiveMilliseconds": 20.0}), OTHER)
    made = kube.reconcile()

    assert kube.artefact == OTHER
    assert condition(made, "Optimized")[0] == "True"


def test_a_faster_result_of_a_newer_optimiser_takes_over() -> None:
    kube = Kube().optimised()
    kube.settings = replace(NEW_IMAGES, search_revision=SETTINGS.search_revision + 1)
    kube.reconcile()
    kube.job_succeeds(result(capacity={"requestsPerSecond": 95.0, "p95ObjectiveMilliseconds": 20.0}), OTHER)
    kube.reconcile()
    assert kube.artefact == OTHER


def test_a_pinned_artefact_serves_without_any_optimisation() -> None:
    shared = replace(SETTINGS, allowed=AllowList(shared_artefacts=True))
    kube = Kube(optimization={"mode": "Pinned", "artefact": digest("e")}, settings=shared)
    kube.reconcile()
    kube.pods_serve()
    made = kube.reconcile()
    assert kube.artefact == digest("e")
    assert not [kind for kind, _ in kube.objects if kind in {"OptimizedModel", "Job"}]
    assert condition(made, "Ready")[0] == "True"
    assert condition(made, "AccuracyWithinBudget")[0] == "Unknown"


def test_going_back_to_a_pinned_artefact_after_a_result() -> None:
    kube = Kube().optimised()
    kube.edit(optimization={"mode": "Pinned", "artefact": BASELINE})
    kube.reconcile()
    assert kube.artefact == BASELINE
    kube.pods_serve()
    assert [entry["digest"] for entry in kube.reconcile().status["history"]] == [RESULT]


def test_a_deleted_optimized_model_is_made_again_and_what_serves_is_not_touched() -> None:
    kube = Kube().optimised()
    name = kube.endpoint["status"]["optimizedModel"]
    for key in [key for key in kube.objects if key[0] in {"OptimizedModel", "Job"}]:
        del kube.objects[key]
    template = kube.template_hash
    made = kube.reconcile()
    assert ("OptimizedModel", name) in kube.objects
    assert ("Job", f"{name}-1") in kube.objects
    assert kube.template_hash == template
    assert condition(made, "Available")[0] == "True"


def test_a_suspended_endpoint_has_no_pods_and_no_job_and_keeps_its_result() -> None:
    kube = Kube().optimised()
    kube.edit(suspend=True)
    made = kube.reconcile()
    assert kube.deployment["spec"]["replicas"] == 0
    assert condition(made, "Ready")[:2] == ("False", "Suspended")
    kube.edit(suspend=False)
    kube.reconcile()
    assert kube.deployment["spec"]["replicas"] == 1
    assert kube.artefact == RESULT


def test_suspending_ends_a_running_job_and_resuming_starts_it_again() -> None:
    kube = Kube()
    kube.reconcile()
    kube.job_runs()
    kube.reconcile()
    job = kube.job
    kube.edit(suspend=True)
    kube.reconcile()
    assert Ref("Job", job) in kube.deleted
    kube.edit(suspend=False)
    kube.reconcile()
    assert kube.job == job


def test_suspending_leaves_a_job_alone_that_another_endpoint_waits_for() -> None:
    kube = Kube()
    kube.reconcile()
    kube.job_runs()
    kube.reconcile()
    kube.other_users[kube.endpoint["status"]["optimizedModel"]] = [ModelUser("other", "uid-other")]
    kube.edit(suspend=True)
    kube.reconcile()
    assert not kube.deleted


def test_a_job_whose_result_is_no_longer_wanted_ends_while_its_fp32_graph_serves_on() -> None:
    kube = Kube()
    kube.reconcile()
    kube.job_runs(baseline=True)
    kube.reconcile()
    kube.pods_serve()
    old = kube.job
    kube.edit(model="hf://org/another@main")
    kube.reconcile()
    assert Ref("Job", old) in kube.deleted
    assert kube.artefact == BASELINE
    assert kube.job != old


def test_an_endpoint_that_is_being_deleted_is_left_to_the_garbage_collector() -> None:
    kube = Kube().optimised()
    kube.endpoint["metadata"]["deletionTimestamp"] = "2026-11-21T12:00:00Z"
    made = kube.plan()
    assert (made.apply, made.delete, made.events) == ((), (), ())
    assert made.status == kube.endpoint["status"]


def test_waiting_endpoints_own_an_optimized_model_and_a_result_has_no_owner() -> None:
    kube = Kube()
    kube.reconcile()
    name = kube.endpoint["status"]["optimizedModel"]
    kube.other_users[name] = [ModelUser("other", "uid-other")]
    kube.reconcile()
    owners = kube.objects["OptimizedModel", name]["metadata"]["ownerReferences"]
    assert [owner["uid"] for owner in owners] == ["uid-endpoint", "uid-other"]
    kube.job_succeeds()
    kube.reconcile()
    assert "ownerReferences" not in kube.objects["OptimizedModel", name]["metadata"]


def test_history_holds_the_last_five_plans_each_once() -> None:
    kube = Kube().optimised()
    for letter in "cdef":
        kube.publish(f"model-{letter}", digest(letter))
    for letter in "cdefacde":
        kube.edit(optimization={"mode": "Pinned", "artefact": digest(letter)})
        kube.reconcile()
        kube.pods_serve()
        kube.reconcile()
    digests = [entry["digest"] for entry in kube.endpoint["status"]["history"]]
    assert digests == [digest(letter) for letter in "dcaf"]


def test_the_condition_of_a_rollout_without_room_for_the_new_pod_has_the_next_action() -> None:
    kube = Kube().optimised()
    kube.edit(pod={"labels": {"team": "search"}})
    kube.reconcile()
    kube.deployment_status(updated=1, available=1, replicas=2)
    kube.pod_of("emotion-new", **unscheduled("0/1 nodes are available: 1 Insufficient cpu."))
    made = kube.reconcile()
    status, reason, message = condition(made, "Progressing")
    assert (status, reason) == ("False", "NoRoomForSurge")
    assert "4 free CPUs" in message
    assert "spec.suspend" in message
    assert condition(made, "Ready")[:2] == ("False", "NoRoomForSurge")
    assert condition(made, "Available")[0] == "True"


def test_a_rollout_whose_new_pods_crash_keeps_the_old_ones_and_is_reported() -> None:
    kube = Kube().optimised()
    kube.edit(rollout={"drainSeconds": 5})
    kube.reconcile()
    kube.deployment_status(updated=1, available=1, replicas=2)
    kube.pod_of(
        "emotion-new",
        containerStatuses=[
            container(restarts=4, waiting=("CrashLoopBackOff", "back-off"), last={"exitCode": 1, "message": ""})
        ],
    )
    made = kube.reconcile()
    assert condition(made, "Progressing")[1] == "RolloutStuck"
    assert condition(made, "Available")[0] == "True"
    assert condition(made, "Ready")[0] == "False"


def test_each_change_posts_one_event() -> None:
    kube = Kube()
    seen: list[tuple[str, str]] = []
    for step in (None, kube.job_runs, kube.job_succeeds, kube.pods_serve, None, None):
        if step is not None:
            step()
        for _ in range(3):
            made = kube.plan()
            kube.act(made)
            seen += [(event.type, event.reason) for event in made.events]
    assert seen == [
        ("Normal", "Valid"),
        ("Normal", "OptimizationStarted"),
        ("Normal", "Optimizing"),
        ("Normal", "Resolved"),
        ("Normal", "Optimized"),
        ("Normal", "WithinBudget"),
        ("Normal", "RollingOut"),
        ("Normal", "Pinned"),
        ("Normal", "Answering"),
    ]
    assert len(seen) == len(set(seen))


def test_a_pod_that_has_not_reported_is_asked_again_soon() -> None:
    kube = Kube().optimised()
    kube.infos.clear()
    made = kube.plan()
    assert condition(made, "CoresPinned")[:2] == ("Unknown", "NotReported")
    assert condition(made, "Ready")[0] == "False"
    assert made.requeue_seconds is not None
    assert made.requeue_seconds <= 5
    assert "p95" not in made.status or made.status["p95"] == ""


def test_replicas_on_two_nodes_may_have_the_same_cpu_numbers() -> None:
    kube = Kube(scaling={"mode": "None"}, replicas=2).optimised()
    first, second = sorted(name for name in kube.pods if name.startswith("emotion-"))
    kube.pods[second]["spec"]["nodeName"] = "node-2"
    kube.infos[second] = info(range(4, 8))
    assert kube.infos[first] == kube.infos[second]
    assert condition(kube.plan(), "CoresPinned")[0] == "True"


@pytest.mark.parametrize("label", [names.OPTIMIZED_MODEL, names.ENDPOINT, names.INSTANCE, names.NAME, names.MANAGED_BY])
def test_runtime_pods_carry_the_agreed_labels(label: str) -> None:
    kube = Kube().optimised()
    assert kube.deployment["spec"]["template"]["metadata"]["labels"][label]
