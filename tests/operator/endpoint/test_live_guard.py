"""What follows from the answers that pods compare with fp32: the condition AnswersAgree, and the return."""

from __future__ import annotations

import random
from typing import Any

import pytest

from penstock.evidence import MeanEvidence
from penstock.resources.endpoint_parts.guard import LiveGuard
from penstock_operator.endpoint.live_guard import MOST_REPLACED, REPLACED_WITHIN, guard_live
from penstock_operator.endpoint.snapshot import ReconcilePlan
from penstock_operator.facts.pods import HostReport, LiveReport
from penstock_operator.facts.scaling import DesiredScale
from tests.operator.endpoint.kube import Json, Kube, condition, info, result

RATE, SPEED_UP = 100.0, 4.0


def live(answers: int = 400, evidence: float = 0.5, check: float = 0.5) -> Json:
    return {"answers": answers, "evidence": evidence, "checks": 40, "check_evidence": check}


def serving(*reports: Json | None, load: float | None = 20.0, **guard: Any) -> Kube:
    """An endpoint with pods that report this."""
    count = len(reports)
    kube = Kube(guard={"live": guard}, scaling={"minReplicas": count, "maxReplicas": 8}, replicas=count)
    kube.reconcile()
    capacity = {"requestsPerSecond": RATE, "p95ObjectiveMilliseconds": 20, "points": []}
    kube.job_succeeds(result(speedUp=SPEED_UP, capacity=capacity))
    kube.scale = DesiredScale(count, requests_per_second=load)
    kube.reconcile()
    kube.pods_serve()
    say(kube, *reports)
    return kube


def say(kube: Kube, *reports: Json | None) -> None:
    for number, (name, report) in enumerate(zip(sorted(kube.infos), reports, strict=False)):
        cpus = range(4 * number, 4 * number + 4)
        kube.infos[name] = info(cpus) if report is None else {**info(cpus), "live_guard": report}


def environment(kube: Kube) -> dict[str, str]:
    containers = kube.deployment["spec"]["template"]["spec"]["containers"]
    return {one["name"]: one.get("value", "") for one in containers[0]["env"]}


def test_it_is_off_without_the_field() -> None:
    kube = Kube()
    kube.optimised()

    assert "PENSTOCK_LIVE_GUARD_SHARE" not in environment(kube)
    assert "AnswersAgree" not in {one["type"] for one in kube.endpoint["status"]["conditions"]}
    assert "guard" not in kube.endpoint["status"]


@pytest.mark.parametrize(
    ("reports", "expected"),
    [
        ([None], ("Unknown", "Watching")),
        ([live(20)], ("Unknown", "Watching")),
        ([live()], ("True", "Agrees")),
        ([live(evidence=30)], ("Unknown", "Watching")),
        ([live(evidence=130)], ("False", "Returned")),
        ([live(evidence=1e9, check=1e9)], ("Unknown", "ShadowUnreliable")),
        ([live(evidence=1e9), live()], ("False", "ReplicaDiffers")),
        # The other pod has not compared enough answers to clear the artefact, or has evidence too.
        ([live(evidence=1e9), live(20)], ("False", "Returned")),
        ([live(evidence=1e9), live(evidence=3)], ("False", "Returned")),
        ([live(evidence=150), live()], ("Unknown", "Watching")),
    ],
)
def test_the_condition_follows_from_the_reports(reports: list[Json | None], expected: tuple[str, str]) -> None:
    kube = serving(*reports)

    made = kube.plan()
    kube.act(made)
    assert condition(made, "AnswersAgree")[:2] == expected
    assert ("PENSTOCK_FP32" in environment(kube)) == (expected[1] == "Returned")


def deleted(made: ReconcilePlan) -> list[str]:
    return [ref.name for ref in made.delete if ref.kind == "Pod"]


def test_a_pod_that_differs_from_the_others_is_deleted_once_and_few_of_them_in_a_day() -> None:
    kube = serving(live(), live(), live())
    for number in range(1, MOST_REPLACED + 1):
        differs = min(kube.infos)
        say(kube, live(evidence=1e9), live(), live())
        made = kube.plan()
        assert deleted(made) == [differs]
        assert f"The answers of the pod {differs} on the node n" in condition(made, "AnswersAgree")[2]
        kube.endpoint["status"] = made.status
        assert deleted(kube.plan()) == [], "its end is not in the cache yet"
        kube.act(made)
        assert condition(kube.plan(), "AnswersAgree")[:2] == ("True", "Agrees"), "the others go on"
        kube.pods_serve()
        assert len(kube.endpoint["status"]["guard"]["replaced"]) == number
        for name in list(kube.infos):  # a Deployment makes pods of new names
            kube.pods[f"{name}-{number}"] = kube.pods.pop(name)
            kube.pods[f"{name}-{number}"]["metadata"]["name"] = f"{name}-{number}"
            kube.infos[f"{name}-{number}"] = kube.infos.pop(name)
    say(kube, live(evidence=1e9), live(), live())
    made = kube.plan()
    assert deleted(made) == []
    assert "3 pods were deleted for that within a day. Examine the node" in condition(made, "AnswersAgree")[2]

    kube.now += REPLACED_WITHIN
    assert len(deleted(kube.plan())) == 1
    kube.edit(guard={"live": {"action": "Report"}})
    made = kube.plan()
    assert deleted(made) == []
    assert condition(made, "AnswersAgree")[1] == "ReplicaDiffers"


def test_fp32_serves_after_an_alarm_until_another_artefact_is_made_or_the_spec_wants_another_action() -> None:
    kube = serving(live())
    memory = kube.deployment["spec"]["template"]["spec"]["containers"][0]["resources"]
    say(kube, live(500, 250))
    made = kube.plan()
    kube.act(made)

    assert [event.reason for event in made.events if event.type == "Warning"] == ["Returned"]
    [alarm] = kube.endpoint["status"]["guard"]["alarms"]
    assert (alarm["answers"], alarm["evidence"]) == (500, 250)
    assert kube.deployment["metadata"]["annotations"]["penstock.dev/fp32"] == "true"
    assert kube.deployment["spec"]["template"]["spec"]["containers"][0]["resources"] == memory

    # The new pods compare nothing, and the alarm stays.
    say(kube, None)
    kube.reconcile()
    kube.reconcile()
    assert condition(kube.plan(), "AnswersAgree")[:2] == ("False", "Returned")
    assert environment(kube)["PENSTOCK_FP32"] == "true"
    assert not kube.plan().apply or kube.plan().status == kube.endpoint["status"]

    kube.edit(guard={"live": {"action": "Report"}})
    kube.reconcile()
    assert "PENSTOCK_FP32" not in environment(kube)
    kube.edit(guard=None)
    kube.reconcile()
    assert "guard" not in kube.endpoint["status"]


@pytest.mark.parametrize(
    ("load", "guard", "why"),
    [
        (None, {}, "the load is not known"),
        (30.0, {}, "30 requests/s are more than fp32 takes on the present 1 replicas (25)"),
        (20.0, {"action": "Report"}, "action: Report"),
    ],
)
def test_the_plan_goes_on_serving_where_fp32_cannot_take_over(load: float | None, guard: Json, why: str) -> None:
    kube = serving(live(evidence=1e6), load=load, **guard)

    status, reason, message = condition(kube.plan(), "AnswersAgree")
    assert (status, reason) == ("False", "LiveTrafficDiffers")
    assert why in message
    assert "PENSTOCK_FP32" not in environment(kube)


def test_a_return_does_not_wait_for_a_canary() -> None:
    kube = serving(live())
    kube.edit(rollout={"canary": {"percent": 10, "minutes": 10}})
    kube.reconcile()
    say(kube, live(evidence=1e6))
    kube.reconcile()

    assert environment(kube)["PENSTOCK_FP32"] == "true"
    assert not kube.deployment["spec"].get("paused")


@pytest.mark.parametrize("report", [{"answers": -1}, {"evidence": "nan"}, {"evidence": -1}, {"answers": 10**30}, []])
def test_other_reports_are_refused(report: Any) -> None:
    with pytest.raises(ValueError, match="live_guard"):
        HostReport.from_info({**info(range(4)), "live_guard": report})


def test_reports_change_only_where_something_follows_from_them() -> None:
    found = HostReport.from_info({**info(range(4)), "live_guard": live(4321, 3.7, 0.2)})

    assert found is not None
    assert found.live == LiveReport(4000, 1.0, 0.0)


def test_pods_that_come_and_go_raise_false_alarms_as_rarely_as_stated() -> None:
    """Each pod begins with new evidence; four of them at a time, one is replaced after some 300 answers."""
    dice, alarms, limit = random.Random(3), 0, 0.02
    for _ in range(trials := 60):
        pods = [MeanEvidence.with_restarts(limit) for _ in range(4)]
        for step in range(2_000):
            if not dice.randrange(300):
                pods[dice.randrange(4)] = MeanEvidence.with_restarts(limit)
            pods[step % 4].add(float(dice.random() < limit))
            if sum(pod.value for pod in pods) / 4 >= 1 / 0.05:
                alarms += 1
                break

    assert alarms / trials <= 0.05


def test_nothing_serves() -> None:
    found = guard_live(LiveGuard(), None, Kube().observed(), None)

    assert (found.serving, found.finding.reason) == (None, "NothingServes")
