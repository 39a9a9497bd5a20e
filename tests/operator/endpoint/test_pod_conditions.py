"""The states of pods, and the conditions Available, CoresPinned, ObjectiveMet and Ready."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from penstock.resources.job_summary import Failure
from penstock_operator.endpoint.status import vector_spaces
from penstock_operator.facts.findings import no
from penstock_operator.facts.names import Ref
from penstock_operator.facts.pods import HostReport, Neighbour, PodFacts, RuntimePod
from penstock_operator.facts.scaling import DesiredScale
from tests.operator.endpoint.kube import ZEN3, Json, Kube, condition, container, info, result, token_result

UNSCHEDULABLE = {
    "type": "PodScheduled",
    "status": "False",
    "reason": "Unschedulable",
    "message": "0/3 nodes are available: 3 Insufficient cpu.",
}


def deployed() -> Kube:
    """An endpoint with a result and without pods."""
    kube = Kube()
    kube.reconcile()
    kube.job_succeeds()
    kube.reconcile()
    return kube


@dataclass(frozen=True)
class Case:
    """A pod that does not serve, and the condition that is expected."""

    name: str
    status: Json
    reason: str
    expected: str


def crashed(message: str = "", code: int = 1, reason: str = "Error", restarts: int = 5) -> Json:
    last = {"exitCode": code, "reason": reason, "message": message}
    return {
        "containerStatuses": [container(restarts=restarts, waiting=("CrashLoopBackOff", "back-off 40s"), last=last)]
    }


def words(reason: str, message: str, remedy: str) -> str:
    return Failure(reason=reason, message=message, remedy=remedy).model_dump_json(by_alias=True)


CASES = [
    Case("message of another program", crashed("Segmentation fault", code=139), "CrashLooping", "code 139"),
    Case("starting", {"phase": "Pending"}, "Starting", "fetch the artefact"),
    Case(
        "no room", {"phase": "Pending", "node": "", "conditions": [UNSCHEDULABLE]}, "Unschedulable", "Insufficient cpu"
    ),
    Case("crash", crashed(), "CrashLooping", "kubectl logs"),
    Case("memory", crashed(reason="OOMKilled", code=137), "OutOfMemory", "spec.pod.memory"),
    Case(
        "artefact gone",
        crashed(words("ArtefactNotFound", "the store has none of it", "Delete the OptimizedModel")),
        "ArtefactNotFound",
        "Delete the OptimizedModel",
    ),
    Case(
        "another processor",
        crashed(words("OtherInstructionSet", "the plan was measured on avx512-vnni, this is avx2", "Narrow the class")),
        "OtherInstructionSet",
        "Narrow the class",
    ),
    Case(
        "no image",
        {"phase": "Pending", "containerStatuses": [container(waiting=("ErrImagePull", "not found"))]},
        "ImagePullFailed",
        "cannot be pulled",
    ),
    Case(
        "no secret",
        {"containerStatuses": [container(waiting=("CreateContainerConfigError", 'secret "s3" not found'))]},
        "PodCannotStart",
        'secret "s3" not found',
    ),
    Case("half a core", {"phase": "Failed", "reason": "SMTAlignmentError"}, "PodFailed", "threadsPerCore"),
    Case(
        "restarted once", {"containerStatuses": [container(restarts=1, last={"exitCode": 2})]}, "Restarting", "code 2"
    ),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_pod_that_does_not_serve_makes_the_endpoint_unready_with_the_reason(case: Case) -> None:
    kube = deployed()
    kube.deployment_status(updated=1, available=0, replicas=1)
    kube.pod_of("emotion-0", **case.status)
    made = kube.reconcile()
    for kind in ("Available", "Ready"):
        status, reason, message = condition(made, kind)
        assert (status, reason) == ("False", case.reason)
        assert case.expected in message
    assert "p95" not in made.status or not made.status["p95"]


@pytest.mark.parametrize("tokens", [None, 0, 2])
def test_a_pod_without_keys_names_the_secret(tokens: int | None) -> None:
    kube = Kube(auth={"secretName": "keys"}).optimised()
    kube.deployment_status(updated=1, available=0, replicas=1)
    kube.pod_of("emotion-0", containerStatuses=[container(running=True)])
    kube.infos["emotion-0"] = info(range(4, 8), tokens=tokens)
    made = kube.reconcile()

    for kind in ("Available", "Ready"):
        status, reason, message = condition(made, kind)
        assert status == "False"
        assert (reason == "NoKeys") == (tokens == 0)
        if tokens == 0:
            assert "the Secret keys, which spec.auth names" in message
            assert "kubectl create secret generic keys" in message


def test_an_endpoint_with_keys_becomes_ready() -> None:
    kube = Kube(auth={"secretName": "keys"}).optimised()
    kube.pods_serve()
    kube.infos = {name: {**value, "access": {"tokens": 2}} for name, value in kube.infos.items()}

    assert condition(kube.reconcile(), "Ready")[0] == "True"


def test_ready_is_false_while_one_of_two_pods_crash_loops() -> None:
    kube = Kube(scaling={"mode": "None"}, replicas=2).optimised()
    name = sorted(name for name in kube.pods if name.startswith("emotion-"))[1]
    kube.pods[name]["status"] |= {"conditions": [], **crashed()}
    kube.deployment_status(updated=2, available=1, replicas=2)
    made = kube.reconcile()
    assert condition(made, "Available")[0] == "True"
    assert "1 of 2 replicas" in condition(made, "Available")[2]
    assert condition(made, "Ready")[:2] == ("False", "CrashLooping")


def test_a_quota_that_allows_no_pod_is_reported() -> None:
    kube = deployed()
    kube.deployment["status"] = {
        "observedGeneration": 1,
        "conditions": [
            {"type": "ReplicaFailure", "status": "True", "reason": "FailedCreate", "message": "exceeded quota: cpu=4"}
        ],
    }
    status, reason, message = condition(kube.reconcile(), "Available")
    assert (status, reason) == ("False", "PodsRefused")
    assert "exceeded quota" in message


def test_a_rollout_over_its_deadline_is_stuck() -> None:
    kube = Kube().optimised()
    kube.deployment_status(updated=0, available=1, replicas=1, reason="ProgressDeadlineExceeded")
    assert condition(kube.reconcile(), "Progressing")[:2] == ("False", "RolloutStuck")


def test_scaling_is_reported_in_the_condition_progressing() -> None:
    kube = Kube(scaling={"mode": "None"}, replicas=1).optimised()
    kube.edit(replicas=3)
    kube.reconcile()
    kube.deployment_status(updated=3, available=1, replicas=3)
    made = kube.reconcile()
    assert condition(made, "Progressing")[:2] == ("True", "Scaling")
    assert condition(made, "Ready")[0] == "True"


@pytest.mark.parametrize(
    ("seen", "reason", "expected"),
    [
        (info(range(64), pinned=False), "SharedCores", "shared CPUs"),
        (info(range(4, 9)), "SharedCores", "4-8, more than its 4 CPUs"),
        (info(range(4, 6)), "TooFewCores", "2 CPUs (4-5)"),
        (info(range(4, 8), quota=2.0), "Throttled", "quota of 2 CPUs"),
        (
            info((2, 3, 4, 5), pinned=False, findings=("CPUs 6 run on the same cores but belong to others",)),
            "NotWholeCores",
            "belong to others",
        ),
    ],
    ids=["the shared pool", "one too many", "too few", "a quota", "half cores"],
)
def test_cores_that_are_not_the_pods_own_make_the_endpoint_not_ready_and_hide_the_figures(
    seen: Json, reason: str, expected: str
) -> None:
    kube = Kube(objective={"latency": {"p95Milliseconds": 20.0}}).optimised()
    assert kube.endpoint["status"]["p95"]
    kube.infos = dict.fromkeys(kube.infos, seen)
    made = kube.reconcile()
    assert condition(made, "CoresPinned")[:2] == ("False", reason)
    assert expected in condition(made, "CoresPinned")[2]
    assert condition(made, "Ready")[:2] == ("False", reason)
    assert condition(made, "ObjectiveMet")[0] == "Unknown"
    assert (made.status["p95"], made.status["speedUp"]) == ("", "")
    assert condition(made, "Available")[0] == "True"
    assert made.status["pods"][0]["pinned"] is False


def test_a_pod_that_lost_its_guaranteed_class_is_not_pinned_whatever_it_reports() -> None:
    kube = Kube().optimised()
    for pod in kube.pods.values():
        pod["status"]["qosClass"] = "Burstable"
    assert condition(kube.reconcile(), "CoresPinned")[:2] == ("False", "NotGuaranteed")


@pytest.mark.parametrize(("node", "shared"), [("node-1", True), ("node-2", False)])
def test_sharing_cpus_with_another_endpoint_on_the_same_node_is_not_pinned(node: str, shared: bool) -> None:
    kube = Kube().optimised()
    kube.neighbours = [Neighbour("other-0", "a", node, (7, 8))]
    made = kube.reconcile()
    assert condition(made, "CoresPinned")[:2] == (("False", "SharedCores") if shared else ("True", "Pinned"))
    assert ("other-0" in condition(made, "CoresPinned")[2]) is shared


@pytest.mark.parametrize("own_name", [False, True])
def test_a_pod_of_another_namespace_that_shares_cpus_is_not_named(own_name: bool) -> None:
    kube = Kube().optimised()
    (own,) = (name for name in kube.pods if name.startswith("emotion-") and name in kube.infos)
    name = own if own_name else "secret-project-0"
    kube.neighbours = [Neighbour(name, "b", "node-1", (7, 8))]

    made = kube.reconcile()

    assert condition(made, "CoresPinned")[:2] == ("False", "SharedCores")
    assert "with a pod of another namespace" in condition(made, "CoresPinned")[2]
    assert "secret-project-0" not in str(made.status)


def test_two_replicas_on_the_same_cpus_of_a_node_are_not_pinned() -> None:
    kube = Kube(scaling={"mode": "None"}, replicas=2).optimised()
    kube.infos = dict.fromkeys(kube.infos, info(range(4, 8)))
    assert condition(kube.reconcile(), "CoresPinned")[:2] == ("False", "SharedCores")


def test_a_node_with_another_processor_than_the_plans_is_reported() -> None:
    kube = Kube().optimised()
    kube.infos = dict.fromkeys(kube.infos, info(range(4, 8), cpu=ZEN3))
    made = kube.reconcile()
    status, reason, message = condition(made, "ObjectiveMet")
    assert (status, reason) == ("False", "OtherProcessor")
    assert "avx512-vnni" in message
    assert "node-1" in message
    assert condition(made, "Ready")[0] == "False"


def test_figures_of_a_job_that_did_not_own_its_cores_are_not_shown() -> None:
    kube = Kube(objective={"latency": {"p95Milliseconds": 20.0}})
    kube.reconcile()
    kube.job_succeeds(result(pinned=False))
    kube.reconcile()
    kube.pods_serve()
    made = kube.reconcile()
    assert condition(made, "ObjectiveMet")[:2] == ("Unknown", "MeasuredUnpinned")
    assert (made.status["p95"], made.status["speedUp"]) == ("", "")


@pytest.mark.parametrize(
    ("objective", "capacity", "expected"),
    [
        ({}, {}, ("True", "NoObjective")),
        ({"latency": {"p95Milliseconds": 20.0}}, {}, ("True", "Measured")),
        ({"throughput": {"requestsPerSecond": 80.0}}, {}, ("True", "Measured")),
        ({"throughput": {"requestsPerSecond": 90.0}}, {}, ("False", "ObjectiveMissed")),
        ({"latency": {"p95Milliseconds": 5.0}}, {"requestsPerSecond": None}, ("False", "ObjectiveMissed")),
        (
            {"latency": {"p95Milliseconds": 5.0}},
            {"requestsPerSecond": None, "p95ObjectiveMilliseconds": None},
            ("Unknown", "NotMeasured"),
        ),
        # The search ended before its capacity curve: the objective is known, nothing else.
        (
            {"latency": {"p95Milliseconds": 5.0}},
            {"requestsPerSecond": None, "points": []},
            ("Unknown", "NotMeasured"),
        ),
    ],
)
def test_the_objective_is_compared_with_the_measured_capacity(
    objective: Json, capacity: Json, expected: tuple[str, str]
) -> None:
    kube = Kube(objective=objective)
    kube.reconcile()
    whole = result().capacity.to_object()
    kube.job_succeeds(result(capacity={**whole, **capacity}))
    kube.reconcile()
    kube.pods_serve()
    made = kube.reconcile()
    assert condition(made, "ObjectiveMet")[:2] == expected
    assert condition(made, "Ready")[0] == ("False" if expected[0] == "False" else "True")


@pytest.mark.parametrize(
    ("objective", "capacity", "expected", "words"),
    [
        ({"timeToFirstToken": {"p95Milliseconds": 500}}, {}, ("True", "Measured"), "300 tokens/s for 8 clients"),
        (
            {"tokensPerSecond": 400},
            {},
            ("False", "ObjectiveMissed"),
            "asks for 400, and it reaches 300",
        ),
        (
            {"throughput": {"requestsPerSecond": 6}},
            {},
            ("False", "ObjectiveMissed"),
            "objective.throughput asks for 6, and it reaches 5",
        ),
        (
            {"timeToFirstToken": {"p95Milliseconds": 50}},
            {"firstTokenObjectiveMilliseconds": 50.0},
            ("False", "ObjectiveMissed"),
            "One client alone does not get the first token within 50 ms",
        ),
        ({"tokensPerSecond": 4}, {"points": []}, ("Unknown", "NotMeasured"), "the time budget was too short"),
    ],
)
def test_the_objective_of_text_generation_is_compared_with_the_capacity_in_tokens(
    objective: Json, capacity: Json, expected: tuple[str, str], words: str
) -> None:
    kube = Kube(task="text-generation", objective=objective)
    kube.reconcile()
    kube.job_succeeds(token_result(**capacity))
    kube.reconcile()
    kube.pods_serve()
    found = condition(kube.reconcile(), "ObjectiveMet")
    assert found[:2] == expected
    assert words in found[2]


@pytest.mark.parametrize(
    ("change", "reason", "expected"),
    [
        ({"hardwareClass": "icelak"}, "HardwareClassNotFound", "there are: any, icelake. Did you mean icelake?"),
        ({"workload": {"textsFrom": {"configMapName": "texts", "key": "texts"}}}, "TextsNotFound", "ConfigMap texts"),
        ({"cores": 0}, "InvalidSpec", "cores"),
        ({"model": "org/model"}, "InvalidSpec", "hf://org/model"),
    ],
)
def test_a_spec_that_cannot_be_acted_upon_is_not_accepted_and_leaves_what_serves(
    change: Json, reason: str, expected: str
) -> None:
    kube = Kube().optimised()
    kept = dict(kube.objects)
    kube.edit(**change)
    made = kube.reconcile()
    status, found, message = condition(made, "Accepted")
    assert (status, found) == ("False", reason)
    assert expected in message
    assert condition(made, "Ready")[:2] == ("False", reason)
    assert (made.apply, made.delete) == ((), ())
    assert kube.objects == kept
    assert made.status["observedGeneration"] == 2


def test_fields_of_a_later_release_are_ignored() -> None:
    """After a rollback the definitions of the later release stay, and its defaults are in the objects."""
    kube = Kube()
    kube.edit(serving={"truncate": True, "ofALaterRelease": {"size": 1}}, alsoLater=False)
    kube.classes["icelake"]["spec"]["ofALaterRelease"] = "some"

    assert condition(kube.reconcile(), "Accepted")[0] == "True"


def test_a_service_of_another_program_is_not_taken_over() -> None:
    kube = Kube()
    kube.conflicting = {Ref("Service", "emotion"), Ref("Service", "other")}
    made = kube.reconcile()
    assert condition(made, "Accepted")[:2] == ("False", "NameTaken")
    assert made.apply == ()


def test_neuron_cores_that_are_no_whole_devices_are_not_accepted() -> None:
    kube = Kube(hardwareClass="inf1", cores=3)
    kube.classes["inf1"] = {
        **kube.classes["any"],
        "metadata": {"name": "inf1"},
        "spec": {"neuron": {"target": "inf1", "coresPerDevice": 4}, "schedulerName": "my-scheduler"},
    }
    made = kube.reconcile()
    assert condition(made, "Accepted")[:2] == ("False", "InvalidCores")
    kube.edit(cores=8)
    kube.optimised()
    limits = kube.deployment["spec"]["template"]["spec"]["containers"][0]["resources"]["limits"]
    assert (limits["aws.amazon.com/neuron"], limits["cpu"]) == ("2", "4")


def test_an_unreadable_hardware_class_is_reported() -> None:
    kube = Kube()
    kube.classes["icelake"]["spec"]["threadsPerCore"] = "two"
    assert condition(kube.reconcile(), "Accepted")[:2] == ("False", "HardwareClassInvalid")


def test_a_hardware_class_that_vanishes_leaves_the_pods() -> None:
    kube = Kube().optimised()
    del kube.classes["icelake"]
    made = kube.reconcile()
    assert made.delete == ()
    assert condition(made, "Available")[0] == "True"
    assert condition(made, "Ready")[:2] == ("False", "HardwareClassNotFound")


@pytest.mark.parametrize(
    ("scale", "expected"),
    [
        (None, ("Unknown", "NotRead")),
        (DesiredScale(2, "2 replicas: 120 requests/s"), ("True", "Read")),
        (DesiredScale(2, metrics=no("MetricsMissing", "Prometheus does not answer.")), ("False", "MetricsMissing")),
        (DesiredScale(2, metrics=no("MetricsMissing", "metrics are missing")), ("False", "MetricsMissing")),
    ],
)
def test_missing_metrics_are_reported_and_do_not_make_an_endpoint_unready(
    scale: DesiredScale | None, expected: tuple[str, str]
) -> None:
    kube = Kube().optimised()
    kube.scale = scale
    kube.reconcile()
    kube.pods_serve()
    made = kube.reconcile()
    assert condition(made, "MetricsAvailable")[:2] == expected
    assert condition(made, "Ready")[0] == "True"


def test_the_autoscalers_figures_are_in_the_status_and_its_time_moves_with_the_number() -> None:
    kube = Kube().optimised()
    kube.scale = DesiredScale(3, "3 replicas: 200 requests/s", requests_per_second=200.0, capacity_per_replica=88.0)
    kube.reconcile()
    before = kube.endpoint["status"]["scaling"]
    assert (before["desired"], before["requestsPerSecond"]) == (3, 200.0)
    kube.pass_by(60)
    kube.scale = DesiredScale(3, "3 replicas: 210 requests/s")
    kube.reconcile()
    assert kube.endpoint["status"]["scaling"]["lastScaleTime"] == before["lastScaleTime"]
    kube.scale = DesiredScale(4, "4 replicas")
    kube.reconcile()
    assert kube.endpoint["status"]["scaling"]["lastScaleTime"] != before["lastScaleTime"]


def test_figures_of_the_autoscaler_are_removed_when_an_external_scaler_scales() -> None:
    kube = Kube().optimised()
    kube.scale = DesiredScale(2, "2 replicas")
    kube.reconcile()
    assert kube.endpoint["status"]["scaling"]["desired"] == 2
    kube.scale = None
    kube.edit(scaling={"mode": "None"})
    kube.reconcile()
    assert "scaling" not in kube.endpoint["status"]


def test_transition_times_move_only_with_the_status() -> None:
    kube = Kube().optimised()

    def times() -> dict[str, str]:
        return {entry["type"]: entry["lastTransitionTime"] for entry in kube.endpoint["status"]["conditions"]}

    before = times()
    kube.pass_by(3600)
    kube.reconcile()
    assert times() == before
    kube.infos = dict.fromkeys(kube.infos, info(range(64), pinned=False))
    kube.reconcile()
    moved = {kind for kind, at in times().items() if at != before[kind]}
    assert moved == {"CoresPinned", "Ready"}


def test_an_invalid_status_is_replaced() -> None:
    kube = Kube().optimised()
    good = kube.endpoint["status"]["conditions"]
    kube.endpoint["status"] = {"conditions": [{"type": "Ready", "status": "Perhaps"}], "pods": 3}
    kube.reconcile()
    found = kube.endpoint["status"]["conditions"]
    assert [entry["type"] for entry in found] == [entry["type"] for entry in good]


def test_pods_that_are_being_deleted_are_no_problem() -> None:
    kube = Kube().optimised()
    old = kube.pod_of("emotion-old", **crashed())
    old["metadata"]["deletionTimestamp"] = "2026-11-21T12:00:00Z"
    made = kube.reconcile()
    assert condition(made, "Ready")[0] == "True"
    assert [pod["name"] for pod in made.status["pods"]] != ["emotion-old"]


def test_an_invalid_report_has_no_processor() -> None:
    kube = Kube().optimised()
    kube.infos = dict.fromkeys(kube.infos, info(range(4, 8), cpu={"isa": "z80"}))
    made = kube.reconcile()
    assert condition(made, "CoresPinned")[0] == "True"
    assert made.status["pods"][0]["cpu"] == ""


def test_a_pod_that_succeeded_is_no_problem() -> None:
    kube = Kube().optimised()
    kube.pod_of("emotion-done", phase="Succeeded")
    assert condition(kube.reconcile(), "Ready")[0] == "True"


def test_a_class_that_no_longer_fits_the_cores_of_what_serves_leaves_its_pods() -> None:
    kube = Kube(cores=3).optimised()
    template = kube.template_hash
    kube.classes["icelake"]["spec"] = {"neuron": {"coresPerDevice": 2}}
    kube.edit(cores=2)
    made = kube.reconcile()
    assert kube.template_hash == template
    assert condition(made, "Available")[0] == "True"


A, B = "vs1-00000000000000aa", "vs1-00000000000000bb"


@pytest.mark.parametrize(
    ("pods", "shown"),
    [
        ([(True, A), (True, A)], (A,)),
        ([(True, B), (True, A)], (A, B)),
        ([(True, A), (False, B)], (A,)),
        ([(False, B)], (B, A)),
        ([], (B, A)),
        ([(True, "")], ()),
    ],
)
def test_the_vector_spaces_are_those_of_the_ready_pods(pods: list[tuple[bool, str]], shown: tuple[str, ...]) -> None:
    found = [RuntimePod(PodFacts("p", ready=ready), HostReport(space=space)) for ready, space in pods]

    assert vector_spaces(found, before=(B, A)) == shown
