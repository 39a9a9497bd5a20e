"""Failed optimisations: which are retried and when, which are not, and the condition that reports them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest

from penstock.resources.job_summary import Failure, Summary
from penstock_operator.endpoint.optimization.runs import backoff
from tests.operator.endpoint.kube import (
    BASELINE,
    SETTINGS,
    Kube,
    condition,
    container,
    guaranteed,
    reference,
    unscheduled,
)
from tests.operator.endpoint.objects.test_deployment import container_of, job_of


@dataclass(frozen=True)
class Case:
    """An event of a job, and the condition that follows."""

    name: str
    happens: Callable[[Kube], None]
    reason: str
    retried: bool
    message: str


def job_fails(reason: str, *, retryable: bool) -> Callable[[Kube], None]:
    return lambda kube: kube.job_fails(reason, f"{reason} it was", retryable=retryable, remedy="Do something")


def pod_fails(reason: str, message: str = "", **more: Any) -> Callable[[Kube], None]:
    return lambda kube: kube.job_pod_fails(reason, message, **more)


def disrupted(reason: str) -> Callable[[Kube], None]:
    return pod_fails("", conditions=[{"type": "DisruptionTarget", "status": "True", "reason": reason}])


def ended(code: int, reason: str = "", message: str = "") -> Callable[[Kube], None]:
    return lambda kube: kube.job_ends(message, code=code, reason=reason)


def deadline(kube: Kube) -> None:
    kube.pods.pop(f"{kube.job}-pod", None)
    kube._job_condition("Failed", "DeadlineExceeded")


def pod_lost(kube: Kube) -> None:
    kube.pods.pop(f"{kube.job}-pod", None)
    kube._job_condition("Failed", "BackoffLimitExceeded")


def result_lost(kube: Kube) -> None:
    kube.pods.pop(f"{kube.job}-pod", None)
    kube._job_condition("Complete", "")


CASES = [
    Case("wrong token", job_fails("ModelAccessDenied", retryable=False), "ModelAccessDenied", False, "Do something"),
    Case("not found", job_fails("ModelNotFound", retryable=False), "ModelNotFound", False, "ModelNotFound it was"),
    Case("corrupt", job_fails("CorruptModel", retryable=False), "CorruptModel", False, "kubectl delete optimizedmodel"),
    Case("unsafe", job_fails("UnsafeModel", retryable=False), "UnsafeModel", False, "Do something"),
    Case("unsupported", job_fails("UnsupportedModel", retryable=False), "UnsupportedModel", False, "Do something"),
    Case("none good", job_fails("NoCandidateWithinBudget", retryable=False), "NoCandidateWithinBudget", False, "Do"),
    Case("store closed", job_fails("StoreAccessDenied", retryable=False), "StoreAccessDenied", False, "Do something"),
    Case("network", job_fails("ModelUnavailable", retryable=True), "ModelUnavailable", True, "next one starts at"),
    Case("store away", job_fails("StoreUnavailable", retryable=True), "StoreUnavailable", True, "next one starts at"),
    Case("disk full", job_fails("OutOfDisk", retryable=True), "OutOfDisk", True, "next one starts at"),
    Case("interrupted", job_fails("Interrupted", retryable=True), "Interrupted", True, "next one starts at"),
    Case("its own memory", job_fails("OutOfMemory", retryable=False), "OutOfMemory", True, "next one starts at"),
    Case("killed for memory", ended(137, "OOMKilled"), "OutOfMemory", True, "spec.pod.memory"),
    Case("killed", ended(137), "OutOfMemory", True, "needed more memory"),
    Case("evicted", pod_fails("Evicted", "The node was low on resource: memory."), "Evicted", True, "low on resource"),
    Case("preempted", disrupted("PreemptionByScheduler"), "Evicted", True, "priorityClassName"),
    Case("node lost", pod_fails("NodeLost", "Node node-1 is gone"), "NodeGone", True, "node-1"),
    Case("node deleted", disrupted("DeletionByPodGC"), "NodeGone", True, "went away"),
    Case("node tainted", disrupted("DeletionByTaintManager"), "NodeGone", True, "went away"),
    Case(
        "kubelet refuses", pod_fails("OutOfcpu", "Node didn't have enough resource"), "RefusedByNode", True, "OutOfcpu"
    ),
    Case("half cores", pod_fails("SMTAlignmentError"), "SMTAlignmentError", False, "threadsPerCore"),
    Case("pod too long", pod_fails("DeadlineExceeded", "Pod was active too long"), "TimedOut", True, "budgetSeconds"),
    Case("job too long", deadline, "TimedOut", True, "budgetSeconds"),
    Case("pod gone", pod_lost, "Interrupted", True, "its pod is gone"),
    Case("result gone", result_lost, "ResultLost", True, "before its result was read"),
    Case("no message", ended(0), "ResultLost", True, "left no summary"),
    Case("no summary in the message", ended(0, message="Segmentation fault"), "ResultLost", True, "Segmentation fault"),
    Case("crash", ended(139, message="core dumped"), "JobCrashed", True, "code 139"),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_failure_is_in_the_condition_and_is_retried_if_a_retry_can_help(case: Case) -> None:
    kube = Kube()
    kube.reconcile()
    first = kube.job
    kube.job_runs()
    kube.reconcile()
    case.happens(kube)
    made = kube.reconcile()
    status, reason, message = condition(made, "Optimized")
    assert status == "False"
    assert reason == ("WaitingToRetry" if case.retried else case.reason)
    assert case.message in message
    model = kube.objects["OptimizedModel", kube.endpoint["status"]["optimizedModel"]]["status"]
    assert model["failure"]["reason"] == case.reason
    assert model["phase"] == ("Pending" if case.retried else "Failed")
    if case.retried:
        assert made.requeue_seconds == pytest.approx(SETTINGS.backoff_seconds, abs=1)
    kube.pass_by(SETTINGS.backoff_seconds + 1)
    kube.reconcile()
    assert (kube.job != first) is case.retried


def test_model_failures_make_model_resolved_false_and_others_do_not() -> None:
    for reason, expected in (("ModelNotFound", "False"), ("StoreAccessDenied", "Unknown")):
        kube = Kube()
        kube.reconcile()
        kube.job_fails(reason, retryable=False)
        assert condition(kube.reconcile(), "ModelResolved")[0] == expected


def test_waits_double_up_to_a_limit_and_runs_end_at_a_limit() -> None:
    settings = replace(SETTINGS, backoff_seconds=10, backoff_limit_seconds=35, max_attempts=5)
    assert [backoff(attempt, settings) for attempt in range(1, 6)] == [10, 20, 35, 35, 35]
    kube = Kube(settings=settings)
    kube.reconcile()
    for attempt in range(1, 6):
        assert kube.job.endswith(f"-{attempt}")
        kube.job_fails("ModelUnavailable", retryable=True)
        made = kube.reconcile()
        kube.pass_by(36)
        kube.reconcile()
    status, reason, message = condition(made, "Optimized")
    assert (status, reason) == ("False", "ModelUnavailable")
    assert "after 5 runs" in message
    assert kube.job.endswith("-5")


def test_each_run_after_running_out_of_memory_has_twice_as_much_up_to_eight_times() -> None:
    kube = Kube(settings=replace(SETTINGS, max_attempts=7, backoff_seconds=1, backoff_limit_seconds=1))
    kube.reconcile()
    memories = []
    for _ in range(6):
        memories.append(guaranteed(container_of(job_of(kube)))["memory"])
        kube.job_ends("", code=137, reason="OOMKilled")
        kube.reconcile()
        kube.pass_by(3)
        kube.reconcile()
    assert memories == ["4096Mi", "8192Mi", "16384Mi", "32768Mi", "32768Mi", "32768Mi"]


def test_other_failures_leave_the_memory_as_it_was() -> None:
    kube = Kube()
    kube.reconcile()
    kube.job_pod_fails("Evicted")
    kube.reconcile()
    kube.pass_by(20)
    kube.reconcile()
    assert kube.job.endswith("-2")
    resources = kube.objects["Job", kube.job]["spec"]["template"]["spec"]["containers"][0]["resources"]
    assert resources["limits"]["memory"] == "4096Mi"


def test_a_failed_run_may_have_published_the_fp32_graph_and_that_serves() -> None:
    kube = Kube()
    kube.reconcile()
    kube.job_runs(baseline=True)
    kube.reconcile()
    kube.job_fails("StoreAccessDenied", retryable=False)
    made = kube.reconcile()
    assert kube.artefact == BASELINE
    assert condition(made, "Ready")[:2] == ("False", "StoreAccessDenied")


def test_no_candidate_where_none_may_fail_does_not_bring_up_the_fp32_graph() -> None:
    kube = Kube(optimization={"whenNoCandidate": "Fail"})
    kube.reconcile()
    kube.job_runs(baseline=True)
    kube.job_fails("NoCandidateWithinBudget", retryable=False)
    made = kube.reconcile()
    assert ("Deployment", "emotion") not in kube.objects
    assert condition(made, "AccuracyWithinBudget")[:2] == ("False", "NoCandidateWithinBudget")


def test_no_candidate_does_not_take_down_an_fp32_graph_that_serves() -> None:
    kube = Kube(optimization={"whenNoCandidate": "Fail"})
    kube.reconcile()
    kube.job_runs(baseline=True)
    kube.reconcile()
    kube.pods_serve()
    kube.job_fails("NoCandidateWithinBudget", retryable=False)
    made = kube.reconcile()
    assert kube.artefact == BASELINE
    assert condition(made, "Available")[0] == "True"
    assert condition(made, "Ready")[:2] == ("False", "NoCandidateWithinBudget")


def test_a_job_that_was_deleted_by_hand_is_made_again_under_the_same_name() -> None:
    kube = Kube()
    kube.reconcile()
    kube.job_runs()
    kube.reconcile()
    job = kube.job
    del kube.objects["Job", job], kube.pods[f"{job}-pod"]
    kube.reconcile()
    assert ("Job", job) in kube.objects


def test_a_failed_job_that_is_gone_is_followed_by_the_next_at_its_time() -> None:
    kube = Kube()
    kube.reconcile()
    kube.job_fails("ModelUnavailable", retryable=True)
    kube.reconcile()
    job = kube.job
    del kube.objects["Job", job], kube.pods[f"{job}-pod"]
    kube.reconcile()
    assert not [kind for kind, _ in kube.objects if kind == "Job"]
    kube.pass_by(SETTINGS.backoff_seconds + 1)
    kube.reconcile()
    assert kube.job.endswith("-2")


def test_the_condition_of_a_job_without_a_node_names_what_is_missing() -> None:
    kube = Kube()
    kube.nodes = [
        {
            "metadata": {"name": "node-1", "labels": {}},
            "spec": {},
            "status": {"allocatable": {"cpu": "4", "memory": "16Gi", "ephemeral-storage": "40Gi", "pods": "110"}},
        }
    ]
    kube.reconcile()
    kube.job_pod(**unscheduled("0/1 nodes are available: 1 node(s) didn't match Pod's node affinity/selector."))
    made = kube.reconcile()
    status, reason, message = condition(made, "Optimized")
    assert (status, reason) == ("False", "NoNodeForClass")
    assert "penstock.dev/class" in message
    assert made.status["reason"] == "NoNodeForClass"


def test_nodes_with_too_little_disk_are_the_reason_for_a_job_and_for_a_serving_pod() -> None:
    kube = Kube()
    labels = {"penstock.dev/class": "icelake", "kubernetes.io/arch": "amd64"}
    room = {"cpu": "64", "memory": "64Gi", "ephemeral-storage": "500Mi", "pods": "110"}
    kube.nodes = [{"metadata": {"name": "node-1", "labels": labels}, "status": {"allocatable": room}}]
    waits = unscheduled("0/1 nodes are available: 1 Insufficient ephemeral-storage.")
    kube.reconcile()
    kube.job_pod(**waits)
    status, reason, message = condition(kube.reconcile(), "Optimized")
    assert (status, reason) == ("False", "NoNodeForClass")
    assert "8 GiB of disk are wanted, and the largest has 500 MiB of disk (node-1)" in message
    assert "Lower jobs.disk of the chart" in message

    kube.optimised()
    kube.deployment_status(updated=1, available=0, replicas=1)
    kube.pod_of("emotion-0", **waits)
    message = condition(kube.reconcile(), "Available")[2]
    assert "1.029 GiB of disk are wanted, and the largest has 500 MiB of disk (node-1)" in message
    assert "Lower jobs.servingDisk of the chart" in message


def test_the_condition_of_a_job_that_waits_for_a_busy_node_has_the_schedulers_message() -> None:
    kube = Kube()
    kube.reconcile()
    words = "0/1 nodes are available: 1 Insufficient cpu."
    kube.job_pod(**unscheduled(words))
    status, reason, message = condition(kube.reconcile(), "Optimized")
    assert (status, reason) == ("False", "Unschedulable")
    assert words in message


@pytest.mark.parametrize(
    ("waiting", "expected"),
    [
        (("ImagePullBackOff", "Back-off pulling image"), "imagePullSecrets"),
        (("CreateContainerConfigError", 'secret "hf-token" not found'), 'secret "hf-token" not found'),
    ],
)
def test_the_condition_of_a_job_whose_container_cannot_start_has_the_reason(
    waiting: tuple[str, str], expected: str
) -> None:
    kube = Kube()
    kube.reconcile()
    kube.job_pod(phase="Pending", containerStatuses=[container(waiting=waiting)])
    status, reason, message = condition(kube.reconcile(), "Optimized")
    assert (status, reason) == ("False", "JobWaiting")
    assert expected in message


def test_a_job_pod_that_is_being_deleted_counts_as_interrupted() -> None:
    kube = Kube()
    kube.reconcile()
    kube.job_runs()
    kube.pods[f"{kube.job}-pod"]["metadata"]["deletionTimestamp"] = "2026-11-21T12:00:00Z"
    kube.reconcile()
    model = kube.objects["OptimizedModel", kube.endpoint["status"]["optimizedModel"]]["status"]
    assert model["failure"]["reason"] == "Interrupted"


def test_the_fp32_graph_of_a_failed_runs_summary_serves() -> None:
    kube = Kube()
    kube.reconcile()
    failure = Failure(reason="StoreAccessDenied", message="no", remedy="Give a key")
    kube.job_ends(Summary(succeeded=False, failure=failure, baseline=reference(BASELINE)).to_message(), code=1)
    kube.reconcile()
    assert kube.artefact == BASELINE


def test_memory_grows_also_when_the_job_that_ran_out_of_it_is_gone() -> None:
    kube = Kube()
    kube.reconcile()
    kube.job_ends("", code=137, reason="OOMKilled")
    kube.reconcile()
    del kube.objects["Job", kube.job]
    kube.pass_by(20)
    kube.reconcile()
    resources = kube.objects["Job", kube.job]["spec"]["template"]["spec"]["containers"][0]["resources"]
    assert resources["limits"]["memory"] == "8192Mi"


@pytest.mark.parametrize(
    ("labels", "allowed"),
    [
        ({"team": "search"}, True),
        ({"team": "search", "stage": "test"}, False),
        ({"team": "payments"}, False),
        ({}, False),
    ],
)
def test_a_class_is_for_the_namespaces_that_it_selects(labels: dict[str, str], allowed: bool) -> None:
    kube = Kube()
    kube.classes["icelake"]["spec"]["allowedNamespaces"] = {
        "matchLabels": {"team": "search"},
        "matchExpressions": [{"key": "stage", "operator": "NotIn", "values": ["test"]}],
    }
    kube.namespace_labels = labels
    made = kube.reconcile()

    assert condition(made, "Accepted")[:2] == (("True", "Valid") if allowed else ("False", "HardwareClassNotAllowed"))
    assert bool(made.apply) is allowed, "a job or a pod would run on the nodes of the class"


def test_a_pinned_artefact_is_not_served_on_a_class_for_other_namespaces() -> None:
    digest = "sha256:" + "a" * 64
    kube = Kube(optimization={"mode": "Pinned", "artefact": digest})
    kube.classes["icelake"]["spec"]["allowedNamespaces"] = {"matchLabels": {"team": "search"}}
    made = kube.reconcile()

    assert made.apply == ()
    assert "is not for the namespace a" in condition(made, "Accepted")[2]


def test_what_serves_stays_when_its_class_is_taken_from_the_namespace() -> None:
    kube = Kube().optimised()
    kube.pods_serve()
    kube.reconcile()
    kube.classes["icelake"]["spec"]["allowedNamespaces"] = {"matchLabels": {"team": "search"}}
    made = kube.reconcile()

    assert (made.apply, made.delete) == ((), ())
    assert condition(made, "Accepted")[:2] == ("False", "HardwareClassNotAllowed")
    assert ("Deployment", "emotion") in kube.objects
