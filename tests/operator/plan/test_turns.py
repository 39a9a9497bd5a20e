"""Turns: limits over the cluster, the order of the line, and that nothing keeps the others waiting for ever."""

from __future__ import annotations

import random
from dataclasses import replace
from datetime import datetime, timedelta

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock_operator.plan.observed import DeploymentFacts, DesiredScale, ReplicaSetFacts, rollout_has_place
from penstock_operator.plan.turns import SHOWN, START_SECONDS, Ask, Line, TurnKey, WaitingList, job_has_place
from penstock_operator.plan.workloads import JobFacts, Owner, PodFacts
from tests.examples import examples
from tests.operator.plan.kube import BEGIN, Json, Kube
from tests.operator.plan.test_properties import HAPPENINGS, LIVES, check

A, B, C = (TurnKey("team", name) for name in "abc")


def at(seconds: float) -> datetime:
    return BEGIN + timedelta(seconds=seconds)


@pytest.mark.parametrize(
    ("line", "since", "allowed", "ahead"),
    [
        (Line(1), 0, True, 0),
        (Line(1, frozenset({B})), 0, False, 0),
        (Line(2, frozenset({B})), 0, True, 0),
        (Line(1, frozenset({A})), 0, True, 0),
        (Line(1, waiting=(Ask(at(0), B),)), 1, False, 1),
        (Line(1, waiting=(Ask(at(2), B),)), 1, True, 0),
        (Line(1, waiting=(Ask(at(1), A), Ask(at(1), B))), 1, True, 0),
        (Line(2, waiting=(Ask(at(0), B),)), 1, True, 1),
        (Line(2, frozenset({C}), waiting=(Ask(at(0), B),)), 1, False, 1),
        # The same subject twice counts once, and one that has a place does not wait.
        (Line(2, waiting=(Ask(at(0), B), Ask(at(0.5), B))), 1, True, 1),
        (Line(2, frozenset({B}), waiting=(Ask(at(0), B),)), 1, True, 0),
        (Line(1, waiting=(Ask(at(1), B),), refused={A: at(2)}), 0, False, 1),
        (Line(1, ready=False), 0, False, 0),
    ],
)
def test_a_turn_is_given_to_the_oldest_while_a_place_is_free(
    line: Line, since: float, allowed: bool, ahead: int
) -> None:
    turn = line.turn(A, at(since))

    assert (turn.allowed, turn.ahead) == (allowed, ahead)


def test_asking_anew_gives_the_own_place_to_those_that_wait() -> None:
    line = Line(1, frozenset({A}), waiting=(Ask(at(0), B),))

    assert line.turn(A, at(1)).allowed
    assert not line.turn(A, at(1), anew=True).allowed
    assert Line(1, frozenset({A})).turn(A, at(1), anew=True).allowed


def test_the_message_counts_those_before_and_names_none_of_them() -> None:
    waiting = tuple(Ask(at(number), TurnKey("secret-team", f"secret-{number}")) for number in range(SHOWN + 5))

    def message(count: int, limit: int = 1) -> str:
        return (
            Line(limit, frozenset({C}), waiting[:count]).turn(A, at(99)).waits_for("rollout", "maxConcurrentRollouts")
        )

    rule = "at most one rollout may run at a time in this cluster (maxConcurrentRollouts)."
    assert message(0) == f"It is the next one in the line: {rule}"
    assert "with 3 before it: at most 2 rollouts may run at a time" in message(3, 2)
    assert f"with more than {SHOWN} before it" in message(SHOWN + 5)
    assert "secret" not in message(4)
    new = Line(1, ready=False).turn(A, at(0))
    assert "has just started" in new.waits_for("rollout", "maxConcurrentRollouts")
    assert new.requeue_seconds == 2


@pytest.mark.parametrize(
    ("job", "expected"),
    [
        (JobFacts("j", 1, created=at(0)), True),
        (JobFacts("j", 1, created=at(-START_SECONDS)), False),
        (JobFacts("j", 1, created=at(-START_SECONDS), pod=PodFacts("p", phase="Pending")), False),
        (JobFacts("j", 1, created=at(-9999), pod=PodFacts("p", phase="Running")), True),
        (JobFacts("j", 1, created=at(0), complete=True), False),
        (JobFacts("j", 1, created=at(0), failed="DeadlineExceeded"), False),
    ],
)
def test_a_job_has_a_place_while_it_runs_or_may_soon(job: JobFacts, expected: bool) -> None:
    assert job_has_place(job, at(0)) is expected


DEPLOYMENT = DeploymentFacts(uid="d", template="new", progressing="ReplicaSetUpdated")
OLD = ReplicaSetFacts("old", Owner("x", "d"), template="old", wanted=1)


@pytest.mark.parametrize(
    ("deployment", "replica_set", "expected"),
    [
        (DEPLOYMENT, OLD, True),
        (DEPLOYMENT, replace(OLD, wanted=0), False),
        (DEPLOYMENT, replace(OLD, template="new"), False),
        (DEPLOYMENT, replace(OLD, owner=Owner("x", "other")), False),
        (replace(DEPLOYMENT, paused=True), OLD, False),
        (replace(DEPLOYMENT, progressing="ProgressDeadlineExceeded"), OLD, False),
    ],
)
def test_a_rollout_has_a_place_while_old_pods_are_replaced_and_it_is_not_stuck(
    deployment: DeploymentFacts, replica_set: ReplicaSetFacts, expected: bool
) -> None:
    assert rollout_has_place(deployment, [replica_set]) is expected


def simulate(seed: int, limit: int, count: int) -> None:
    """A leader plans endpoints in any order, some are refused, some never run; each event is checked."""
    dice = random.Random(seed)
    line = WaitingList()
    waits = {TurnKey("n", str(number)): at(dice.randrange(5)) for number in range(count)}
    running: set[TurnKey] = set()
    done: list[TurnKey] = []
    now = 10.0
    for _ in range(count * 60):
        if not waits and not running:
            break
        now += 1
        if running and dice.random() < 0.3:
            ended = dice.choice(sorted(running))
            running.remove(ended)
            done.append(ended)
        if not waits:
            continue
        subject = dice.choice(sorted(waits))
        turn = line.line(limit, running).turn(subject, waits[subject])
        line.put(subject, turn)
        assert len(line.line(limit, running).active) <= limit
        if turn.allowed:
            older = [one for one in waits if (waits[one], one) < (waits[subject], subject)]
            places = limit - len(running)
            known = [one for one in older if one in {ask.subject for ask in line.line(limit, running).waiting}]
            assert len(known) < places or any(one in line.line(limit, running).refused for one in older)
            if dice.random() < 0.2:
                line.answered(subject, at(now))
            else:
                line.answered(subject)
                running.add(subject)
                del waits[subject]
        line.finish(subject)
        if dice.random() < 0.1:
            line.put(subject, None)  # its reconcile failed
    assert not waits, f"{len(waits)} of {count} never had their turn"
    assert len(done) + len(running) == count


@settings(max_examples=examples(200), deadline=None)
@given(seed=st.integers(0, 2**32), limit=st.integers(1, 4), count=st.integers(1, 12))
def test_the_limit_holds_the_oldest_come_first_and_all_have_their_turn(seed: int, limit: int, count: int) -> None:
    simulate(seed, limit, count)


class LimitedKube(Kube):
    """A cluster whose plans wait for their turn."""

    optimizations = Line(1)
    rollouts = Line(1)

    def observed(self):  # type: ignore[no-untyped-def]
        return replace(super().observed(), optimizations=self.optimizations, rollouts=self.rollouts)

    def replica_set(self, template: str, wanted: int = 1) -> None:
        owner = {"kind": "Deployment", "uid": self.deployment["metadata"]["uid"], "name": self.name, "controller": True}
        self.objects["ReplicaSet", f"rs-{template}"] = {
            "metadata": {"name": f"rs-{template}", "ownerReferences": [owner]},
            "spec": {
                "replicas": wanted,
                "template": {"metadata": {"annotations": {"penstock.dev/template-hash": template}}},
            },
            "status": {"readyReplicas": wanted},
        }


def condition(kube: Kube, kind: str) -> Json:
    found: Json = {one["type"]: one for one in kube.endpoint["status"]["conditions"]}[kind]
    return found


BUSY = Line(1, frozenset({TurnKey("other", "x")}))


def test_an_optimisation_waits_for_its_turn_with_a_reason() -> None:
    kube = LimitedKube()
    kube.optimizations = BUSY
    made = kube.reconcile()

    assert not any(kind == "Job" for kind, _ in kube.objects)
    found = condition(kube, "Optimized")
    assert (found["status"], found["reason"]) == ("False", "OptimizationQueued")
    assert "maxConcurrentOptimizations" in found["message"]
    assert made.optimization is not None
    assert made.optimization.ask == Ask(BEGIN, TurnKey("a", kube.endpoint["status"]["optimizedModel"]))
    assert made.requeue_seconds is not None

    kube.optimizations = Line(1)
    kube.reconcile()
    assert kube.job.endswith("-1")
    assert condition(kube, "Optimized")["reason"] == "OptimizationPending"


def test_a_retry_waits_since_it_is_due_and_keeps_its_number() -> None:
    kube = LimitedKube()
    kube.reconcile()
    kube.job_fails("StoreUnavailable", retryable=True)
    kube.reconcile()
    kube.optimizations = BUSY
    kube.pass_by(3600)
    first = kube.reconcile().optimization
    kube.pass_by(3600)
    second = kube.reconcile().optimization

    assert first is not None
    assert second is not None
    assert first.ask == second.ask
    assert first.ask is not None
    assert BEGIN < first.ask.since < BEGIN + timedelta(seconds=60)
    kube.optimizations = Line(1)
    kube.reconcile()
    assert kube.job.endswith("-2")


def test_a_suspended_or_refused_endpoint_does_not_ask() -> None:
    kube = LimitedKube(suspend=True)
    kube.optimizations = BUSY
    assert kube.reconcile().optimization is None
    kube.edit(suspend=False)
    assert kube.reconcile().optimization is not None
    kube.edit(hardwareClass="nosuch")
    assert kube.reconcile().optimization is None


def serving(kube: LimitedKube) -> str:
    """Bring it to serve its result; the template's hash."""
    kube.reconcile()
    kube.job_runs(baseline=False)
    kube.job_succeeds()
    kube.reconcile()
    kube.pods_serve()
    kube.replica_set(kube.template_hash)
    made = kube.reconcile()
    assert made.rollout is None, "a new endpoint does not wait"
    return kube.template_hash


def test_a_rollout_waits_as_a_paused_deployment_that_still_scales() -> None:
    kube = LimitedKube(replicas=1)
    old = serving(kube)
    kube.rollouts = BUSY
    kube.edit(pod={"labels": {"turn": "1"}})
    kube.reconcile()

    assert kube.deployment["spec"]["paused"] is True
    assert kube.template_hash != old
    progress = condition(kube, "Progressing")
    assert (progress["status"], progress["reason"]) == ("False", "RolloutQueued")
    assert "maxConcurrentRollouts" in progress["message"]
    assert condition(kube, "Ready")["reason"] == "RolloutQueued"
    assert condition(kube, "Available")["status"] == "True"
    since = kube.deployment["metadata"]["annotations"]["penstock.dev/rollout-waits-since"]
    kube.pass_by(600)
    kube.scale = DesiredScale(3)
    kube.reconcile()
    assert kube.deployment["spec"]["replicas"] == 3
    assert kube.deployment["metadata"]["annotations"]["penstock.dev/rollout-waits-since"] == since

    kube.rollouts = Line(1)
    kube.reconcile()
    assert "paused" not in kube.deployment["spec"]
    assert "penstock.dev/rollout-waits-since" not in kube.deployment["metadata"].get("annotations", {})


def test_a_rollout_that_is_changed_goes_on_for_a_while_and_then_gives_way_to_others() -> None:
    kube = LimitedKube(replicas=1)
    serving(kube)
    kube.rollouts = Line(1)
    kube.edit(pod={"labels": {"turn": "1"}})
    kube.reconcile()
    kube.rollouts = replace(BUSY, active=frozenset({TurnKey("a", "emotion")}), waiting=(Ask(BEGIN, B),))
    kube.reconcile()
    assert "paused" not in kube.deployment["spec"]

    # Its additional pod keeps a core, which the next endpoint in the line may need.
    kube.pass_by(899)
    kube.edit(pod={"labels": {"turn": "2"}})
    kube.reconcile()
    assert "paused" not in kube.deployment["spec"]
    kube.pass_by(1)
    kube.edit(pod={"labels": {"turn": "3"}})
    kube.reconcile()
    assert kube.deployment["spec"]["paused"] is True
    # Its next turn is a new one.
    kube.rollouts = Line(1)
    kube.reconcile()
    kube.rollouts = replace(BUSY, active=frozenset({TurnKey("a", "emotion")}), waiting=(Ask(BEGIN, B),))
    kube.pass_by(600)
    kube.edit(pod={"labels": {"turn": "4"}})
    kube.reconcile()
    assert "paused" not in kube.deployment["spec"]


def test_a_waiting_rollout_that_is_taken_back_needs_no_turn() -> None:
    kube = LimitedKube(replicas=1)
    old = serving(kube)
    kube.rollouts = BUSY
    kube.edit(pod={"labels": {"turn": "1"}})
    kube.reconcile()
    kube.edit(pod={})
    made = kube.reconcile()

    assert kube.template_hash == old
    assert made.rollout is None
    assert "paused" not in kube.deployment["spec"]


def test_an_endpoint_without_pods_replaces_none_and_does_not_wait() -> None:
    kube = LimitedKube(replicas=1)
    old = serving(kube)
    kube.replica_set(old, wanted=0)
    kube.rollouts = BUSY
    kube.edit(pod={"labels": {"turn": "1"}})
    kube.reconcile()

    assert kube.template_hash != old
    assert "paused" not in kube.deployment["spec"]


@pytest.mark.parametrize("text", ["", "soon", "2026-11-21T12:00:00"])
def test_an_annotation_of_another_form_is_no_time(text: str) -> None:
    kube = LimitedKube(replicas=1)
    serving(kube)
    kube.rollouts = BUSY
    kube.edit(pod={"labels": {"turn": "1"}})
    kube.reconcile()
    kube.deployment["metadata"]["annotations"]["penstock.dev/rollout-waits-since"] = text
    kube.deployment["metadata"]["annotations"]["penstock.dev/rollout-began"] = text

    found = DeploymentFacts.from_object(kube.deployment)
    assert (found.waits_since, found.rollout_began) == (None, None)
    kube.reconcile()


@settings(max_examples=examples(100), deadline=None)
@given(life=LIVES, seed=st.integers(0, 2**32))
def test_plans_settle_in_any_life_with_limits(life: list[str], seed: int) -> None:
    dice = random.Random(seed)
    kube = LimitedKube()
    for happening in life:
        kube.optimizations, kube.rollouts = dice.choice([BUSY, Line(1)]), dice.choice([BUSY, Line(1)])
        HAPPENINGS[happening](kube, dice)
        if ("Deployment", kube.name) in kube.objects and dice.random() < 0.5:
            kube.replica_set(dice.choice(["older", kube.template_hash]), wanted=dice.randrange(2))
        begun = {name for kind, name in kube.objects if kind == "Job"}
        made = kube.reconcile()
        check(made, exposed=bool(kube.spec.get("exposure")))
        if kube.optimizations is BUSY:
            assert {name for kind, name in kube.objects if kind == "Job"} <= begun
        if made.rollout is not None:
            assert kube.deployment["spec"].get("paused", False) is not made.rollout.allowed
