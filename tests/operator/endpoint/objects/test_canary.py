"""The plan of a canary: new pods next to the others, the outcome in condition, status and events, and what is kept."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest

from penstock_operator.endpoint.objects.rollout import with_template_of
from penstock_operator.endpoint.snapshot import EndpointSnapshot
from penstock_operator.facts import names
from penstock_operator.facts.names import Ref
from penstock_operator.facts.scaling import CanaryOutcome, CanaryReason, CanaryReport
from penstock_operator.limits.concurrency import Line, SlotKey
from tests.operator.endpoint.kube import OTHER, Json, Kube, condition, container, result
from tests.operator.endpoint.objects.test_gateway import gateway_up

CANARY = "emotion-canary"
ROLLOUT = {"canary": {"percent": 20, "minutes": 5}}
COUNTS = "1 of 900 requests to new pods had an error, and 9 of 8100 to the others"


class CanaryKube(Kube):
    """A cluster whose Deployment controller keeps the pods of a paused Deployment."""

    def __init__(self, **spec: Any) -> None:
        super().__init__(
            rollout=ROLLOUT,
            scaling={"mode": "None"},
            replicas=spec.pop("replicas", 3),
            **spec,
        )
        self.optimised()
        gateway_up(self)
        self.gateway_current()
        self.serving = self.template_hash
        self.replica_set()
        self.reconcile()

    def gateway_current(self) -> None:
        gateway = self.objects["Deployment", "emotion-gateway"]
        gateway["status"] |= {
            "replicas": 2,
            "updatedReplicas": 2,
            "observedGeneration": gateway["metadata"]["generation"],
        }

    def replica_set(self) -> None:
        """The ReplicaSet of the pods that serve."""
        if not self.deployment["spec"].get("paused"):
            self.serving = self.template_hash
            self.template = copy.deepcopy(self.deployment["spec"]["template"])
        self.objects["ReplicaSet", "emotion-1"] = {
            "metadata": {
                "name": "emotion-1",
                "ownerReferences": [{"uid": self.deployment["metadata"]["uid"], "controller": True, "name": "emotion"}],
            },
            "spec": {
                "replicas": self.deployment["spec"]["replicas"],
                "template": self.template,
            },
        }

    def new_plan(self) -> None:
        """Another result: a changed spec is optimised."""
        self.edit(objective={"latency": {"p95Milliseconds": 10}})
        self.reconcile()
        self.job_succeeds(result(speedUp=5.0), OTHER)
        self.reconcile()

    @property
    def canary(self) -> Json:
        return self.objects["Deployment", CANARY]

    def canary_serves(self) -> None:
        self.canary["status"] = {
            "observedGeneration": self.canary["metadata"]["generation"],
            "replicas": 1,
            "updatedReplicas": 1,
            "availableReplicas": 1,
        }

    def report(self, outcome: CanaryOutcome, reason: CanaryReason | None = None, *, template: str = "") -> None:
        annotations = self.canary["spec"]["template"]["metadata"]["annotations"]
        self.canary_report = CanaryReport(
            template or annotations[names.TEMPLATE_HASH], outcome, reason, COUNTS, requests=900, errors=1
        )

    @property
    def percent(self) -> str | None:
        labels: dict[str, str] = self.objects["Service", "emotion-pods"]["metadata"]["labels"]
        return labels.get(names.CANARY_PERCENT)


def assert_went_back(kube: CanaryKube) -> None:
    """The Deployment has the template of the pods that serve."""
    assert kube.deployment["spec"]["template"] == kube.template
    assert "paused" not in kube.deployment["spec"]


def test_a_new_plan_gets_its_share_first_and_the_present_pods_stay() -> None:
    kube = CanaryKube()
    kube.new_plan()
    made = kube.plan()

    assert kube.deployment["spec"]["paused"] is True
    assert kube.canary["spec"]["replicas"] == 1
    assert kube.percent == "20"
    template = kube.canary["spec"]["template"]
    assert template["metadata"]["annotations"][names.ARTEFACT] == OTHER
    assert template["metadata"]["annotations"][names.TEMPLATE_HASH] == kube.template_hash
    assert kube.canary["spec"]["selector"]["matchLabels"].items() <= template["metadata"]["labels"].items()
    assert condition(made, "Progressing")[:2] == ("True", "CanaryRunning")
    assert condition(made, "Ready")[:2] == ("False", "CanaryRunning")
    assert condition(made, "Available")[0] == "True"
    assert made.status["canary"]["phase"] == "Running"
    assert made.status["canary"]["digest"] == OTHER


@pytest.mark.parametrize(
    ("replicas", "percent", "count"), [(1, 50, 1), (3, 20, 1), (10, 20, 2), (11, 20, 3), (20, 50, 10)]
)
def test_the_canary_has_as_many_pods_as_its_share_needs(replicas: int, percent: int, count: int) -> None:
    kube = CanaryKube(replicas=replicas)
    kube.edit(rollout={"canary": {"percent": percent}})
    kube.new_plan()

    assert kube.canary["spec"]["replicas"] == count


def test_a_canary_that_passes_lets_the_rollout_begin_and_ends() -> None:
    kube = CanaryKube()
    kube.new_plan()
    kube.canary_serves()
    kube.report(CanaryOutcome.PASS, CanaryReason.NOT_WORSE)
    made = kube.plan()
    kube.act(made)

    assert made.delete == ()
    assert ("Normal", "CanaryPassed") in [(event.type, event.reason) for event in made.events]
    assert "paused" not in kube.deployment["spec"]
    assert kube.percent is None
    assert kube.plan().delete == (Ref("Deployment", CANARY),)
    kube.canary_report = None
    after = kube.reconcile()
    assert (after.status["canary"]["phase"], after.status["canary"]["reason"]) == ("Passed", "NotWorse")
    assert ("Deployment", CANARY) not in kube.objects
    kube.replica_set()
    kube.pods_serve()
    assert condition(kube.reconcile(), "Ready")[0] == "True"


def test_a_rejected_canary_ends_and_the_present_pods_serve_on_until_the_spec_changes() -> None:
    kube = CanaryKube()
    before = kube.endpoint["status"]["plan"]
    kube.new_plan()
    kube.canary_serves()
    kube.report(CanaryOutcome.REJECT, CanaryReason.SLOWER)
    made = kube.plan()
    kube.act(made)
    kube.canary_report = None
    for _ in range(3):
        kube.pass_by(3600)
        made = kube.reconcile()

    status, reason, message = condition(made, "Progressing")
    assert (status, reason) == ("False", "CanaryRejected")
    assert "(Slower): 1 of 900" in message
    assert "remove spec.rollout.canary" in message
    assert condition(made, "Ready")[:2] == ("False", "CanaryRejected")
    assert condition(made, "Available")[0] == "True"
    assert ("Deployment", CANARY) not in kube.objects
    assert_went_back(kube)
    assert kube.percent is None
    assert made.status["plan"] == before
    kube.edit(objective={"latency": {"p95Milliseconds": 30}})
    kube.reconcile()
    kube.job_succeeds(result(), "sha256:" + "e" * 64)
    kube.reconcile()
    assert kube.canary["spec"]["template"]["metadata"]["annotations"][names.ARTEFACT] == "sha256:" + "e" * 64


@pytest.mark.parametrize("outcome", [CanaryOutcome.PASS, CanaryOutcome.REJECT])
def test_the_outcome_is_not_lost_when_the_status_cannot_be_written(outcome: CanaryOutcome) -> None:
    kube = CanaryKube()
    kube.new_plan()
    kube.canary_serves()
    kube.report(outcome, CanaryReason.SLOWER if outcome is CanaryOutcome.REJECT else CanaryReason.NOT_WORSE)
    before = kube.endpoint["status"]
    kube.act(replace(kube.plan(), status=before))
    # The report exists as long as the Deployment of the canary.
    assert kube.canary["spec"]["replicas"] == 1
    kube.act(replace(kube.plan(), status=before))
    made = kube.reconcile()

    rejected = outcome is CanaryOutcome.REJECT
    assert "paused" not in kube.deployment["spec"]
    assert (kube.template_hash == kube.serving) is rejected
    assert made.status.get("canary", {}).get("phase") == ("Rejected" if rejected else None)
    assert ("Deployment", CANARY) not in kube.objects


def test_an_endpoint_with_the_name_of_the_canary_keeps_its_deployment() -> None:
    kube = CanaryKube()
    kube.conflicting = {Ref("Deployment", CANARY)}
    kube.new_plan()
    made = kube.plan()

    assert made.object("Deployment", CANARY) is None
    assert kube.deployment["spec"]["paused"] is True
    assert condition(made, "Accepted")[0] == "True"
    assert condition(made, "Progressing")[:2] == ("False", "NameTaken")
    assert condition(made, "Ready")[:2] == ("False", "NameTaken")
    assert "another one named emotion-canary" in condition(made, "Progressing")[2]
    kube.conflicting = set()
    kube.reconcile()
    assert kube.canary["spec"]["replicas"] == 1


def rejected(**spec: Any) -> CanaryKube:
    kube = CanaryKube(**spec)
    kube.new_plan()
    kube.report(CanaryOutcome.REJECT, CanaryReason.SLOWER)
    kube.reconcile()
    kube.canary_report = None
    kube.reconcile()
    return kube


def test_after_a_rejected_canary_the_deployment_is_scaled_and_nothing_else_is_written() -> None:
    kube = rejected()
    assert kube.plan().object("Deployment", "emotion") is None
    assert kube.plan().scaled is None
    for number in (5, 0, 1):
        kube.spec["replicas"] = number
        made = kube.plan()
        kube.act(made)
        assert made.scaled == number
        assert kube.deployment["spec"]["replicas"] == number
        kube.objects["ReplicaSet", "emotion-1"]["spec"]["replicas"] = number
        assert_went_back(kube)
        assert condition(made, "Progressing")[:2] == ("False", "CanaryRejected")
    kube.edit(suspend=True)
    kube.reconcile()
    assert kube.deployment["spec"]["replicas"] == 0
    assert_went_back(kube)


def test_a_spec_that_is_taken_back_after_a_rejected_canary_replaces_no_pod() -> None:
    kube = rejected()
    kube.edit(objective=None)
    kube.reconcile()

    assert_went_back(kube)
    assert kube.plan().object("Deployment", "emotion") is not None
    kube.deployment_status(updated=3, available=3, replicas=3)
    assert condition(kube.reconcile(), "Ready")[0] == "True"
    assert "canary" not in kube.endpoint["status"]


def test_a_deployment_whose_pods_have_two_templates_stays_paused_after_a_rejected_canary() -> None:
    kube = CanaryKube()
    kube.new_plan()
    older = copy.deepcopy(kube.objects["ReplicaSet", "emotion-1"])
    older["metadata"]["name"] = "emotion-2"
    kube.objects["ReplicaSet", "emotion-2"] = older
    kube.report(CanaryOutcome.REJECT, CanaryReason.SLOWER)
    kube.reconcile()
    kube.reconcile()
    assert kube.deployment["spec"]["paused"] is True

    older["spec"]["replicas"] = 0
    kube.reconcile()
    assert_went_back(kube)


def test_the_template_of_a_replica_set_is_applied_without_what_kubernetes_adds() -> None:
    desired: Json = {
        "metadata": {"name": "e", "annotations": {names.CORES: "4", names.ROLLOUT_BEGAN: "then"}},
        "spec": {"paused": True, "replicas": 2, "template": {"spec": "new"}},
    }
    found: Json = {
        "metadata": {"annotations": {names.CORES: "2", "deployment.kubernetes.io/revision": "3"}},
        "spec": {
            "template": {
                "metadata": {"creationTimestamp": None, "labels": {"a": "b", "pod-template-hash": "1"}},
                "spec": "old",
            }
        },
    }
    assert with_template_of(desired, found) == {
        "metadata": {"name": "e", "annotations": {names.CORES: "2", names.ROLLOUT_BEGAN: "then"}},
        "spec": {"replicas": 2, "template": {"metadata": {"labels": {"a": "b"}, "annotations": {}}, "spec": "old"}},
    }


def test_without_a_canary_in_the_spec_a_rejected_plan_rolls_out() -> None:
    kube = CanaryKube()
    kube.new_plan()
    kube.report(CanaryOutcome.REJECT, CanaryReason.MORE_ERRORS)
    kube.reconcile()
    kube.edit(rollout={})
    kube.reconcile()

    assert "paused" not in kube.deployment["spec"]
    assert "canary" not in kube.endpoint["status"]


def test_a_rejected_plan_is_not_rolled_out_because_no_pod_serves_for_a_moment() -> None:
    kube = CanaryKube()
    kube.new_plan()
    kube.report(CanaryOutcome.REJECT, CanaryReason.SLOWER)
    kube.reconcile()
    kube.canary_report = None
    kube.deployment_status(updated=0, available=0, replicas=3)
    kube.reconcile()

    assert_went_back(kube)


def test_a_crashing_canary_is_rejected_without_waiting_for_requests() -> None:
    kube = CanaryKube()
    kube.new_plan()
    pod = kube.pod_of("emotion-canary-1", containerStatuses=[container(restarts=4, waiting=("CrashLoopBackOff", ""))])
    pod["metadata"]["labels"] = dict(kube.canary["spec"]["template"]["metadata"]["labels"])
    made = kube.reconcile()

    assert condition(made, "Progressing")[:2] == ("False", "CanaryRejected")
    assert made.status["canary"]["reason"] == "PodFails"
    assert "emotion-canary-1" in made.status["canary"]["message"]


def test_a_canary_whose_pods_do_not_become_ready_is_rejected() -> None:
    kube = CanaryKube()
    kube.new_plan()
    kube.canary["status"] = {
        "conditions": [{"type": "Progressing", "status": "False", "reason": "ProgressDeadlineExceeded"}]
    }

    assert kube.reconcile().status["canary"]["reason"] == "PodFails"


def test_the_outcome_of_another_template_does_not_count() -> None:
    kube = CanaryKube()
    kube.new_plan()
    kube.report(CanaryOutcome.PASS, CanaryReason.NOT_WORSE, template="of-another")
    made = kube.reconcile()

    assert kube.deployment["spec"]["paused"] is True
    assert made.status["canary"]["phase"] == "Running"


def test_a_canary_waits_until_all_pods_of_the_gateway_are_of_the_present_version() -> None:
    kube = CanaryKube()
    gateway = kube.objects["Deployment", "emotion-gateway"]
    gateway["status"]["updatedReplicas"] = 1
    kube.new_plan()
    made = kube.plan()

    assert ("Deployment", CANARY) not in kube.objects
    assert kube.deployment["spec"]["paused"] is True
    assert "waits until all pods of the gateway run" in condition(made, "Progressing")[2]
    kube.gateway_current()
    kube.reconcile()
    assert kube.canary["spec"]["replicas"] == 1


def test_a_canary_waits_for_a_slot_and_its_rollout_needs_no_other() -> None:
    kube = CanaryKube()
    busy = Line(1, frozenset({SlotKey("b", "other")}))
    observed, kube.observed = kube.observed, lambda: replace_line(observed(), busy)  # type: ignore[method-assign]
    kube.new_plan()
    made = kube.plan()

    assert ("Deployment", CANARY) not in kube.objects
    assert condition(made, "Progressing")[:2] == ("False", "RolloutQueued")
    kube.observed = observed  # type: ignore[method-assign]
    kube.reconcile()
    kube.observed = lambda: replace_line(observed(), busy)  # type: ignore[method-assign]
    kube.report(CanaryOutcome.PASS, CanaryReason.NOT_WORSE)
    kube.reconcile()
    assert "paused" not in kube.deployment["spec"]


def test_the_first_plan_and_an_endpoint_without_pods_have_no_canary() -> None:
    kube = Kube(rollout=ROLLOUT).optimised()
    assert ("Deployment", CANARY) not in kube.objects

    asleep = CanaryKube()
    asleep.edit(replicas=0)
    asleep.reconcile()
    asleep.replica_set()
    asleep.new_plan()
    assert ("Deployment", CANARY) not in asleep.objects
    assert "paused" not in asleep.deployment["spec"]


def test_a_suspended_endpoint_ends_its_canary() -> None:
    kube = CanaryKube()
    kube.new_plan()
    kube.edit(suspend=True)
    kube.reconcile()

    assert ("Deployment", CANARY) not in kube.objects


@pytest.mark.parametrize("length", [1, 48, 50, 57, 63])
def test_names_of_the_pods_of_a_canary_begin_with_the_name_of_its_deployment(length: int) -> None:
    name = names.canary_name("e" * length)
    # What the API server makes of a ReplicaSet's name: at most 58 characters, and five random ones.
    pod = f"{name}-6d4b8c9f7d-"[:58] + "x7k2p"

    assert pod.startswith(f"{name}-")
    assert len(pod) <= 63
    assert names.canary_name("f" * length) != name


def replace_line(observed: EndpointSnapshot, line: Line) -> EndpointSnapshot:
    return replace(observed, rollouts=line)
