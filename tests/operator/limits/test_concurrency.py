"""Concurrency limits over the cluster, the order of the line, and that nothing keeps the others waiting for ever."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock_operator.facts.names import Owner
from penstock_operator.facts.pods import JobFacts, PodFacts
from penstock_operator.facts.scaling import DesiredScale
from penstock_operator.facts.workloads import DeploymentFacts, ReplicaSetFacts, rollout_has_slot
from penstock_operator.limits.concurrency import SHOWN, START_SECONDS, Ask, Line, SlotDecision, SlotKey, job_has_slot
from penstock_operator.limits.waiting import WaitingList
from tests.examples import examples
from tests.operator.endpoint.kube import BEGIN, Json, Kube
from tests.operator.endpoint.test_properties import HAPPENINGS, LIVES, check

A, B, C = (SlotKey("team", name) for name in "abc")
OTHER, SECOND = SlotKey("other", "x"), SlotKey("other", "y")


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
        # One that has a slot does not wait.
        (Line(2, frozenset({B}), waiting=(Ask(at(0), B),)), 1, True, 0),
        (Line(1, waiting=(Ask(at(1), B),), refused={A: at(2)}), 0, False, 1),
        (Line(1, ready=False), 0, False, 0),
        # Other namespaces: the time of the last slot counts if it is later.
        (Line(1, waiting=(Ask(at(0), OTHER),)), 1, False, 1),
        (Line(1, waiting=(Ask(at(0), OTHER),), last_slots={"other": at(2)}), 1, True, 0),
        (Line(1, waiting=(Ask(at(0), OTHER),), last_slots={"other": at(2), "team": at(3)}), 1, False, 1),
        (Line(1, waiting=(Ask(at(0), OTHER),), last_slots={"team": at(0.5)}), 1, False, 1),
        # The second one of a namespace comes after the first ones of all.
        (Line(1, waiting=(Ask(at(0), B), Ask(at(9), OTHER))), 1, False, 2),
        (Line(1, waiting=(Ask(at(0), OTHER), Ask(at(0.5), SECOND))), 1, False, 1),
    ],
)
def test_a_slot_is_given_to_the_first_while_a_slot_is_free(line: Line, since: float, allowed: bool, ahead: int) -> None:
    slot = line.slot(A, at(since))

    assert (slot.allowed, slot.ahead) == (allowed, ahead)


def test_asking_anew_gives_the_own_place_to_those_that_wait() -> None:
    line = Line(1, frozenset({A}), waiting=(Ask(at(0), B),))

    assert line.slot(A, at(1)).allowed
    assert not line.slot(A, at(1), anew=True).allowed
    assert Line(1, frozenset({A})).slot(A, at(1), anew=True).allowed


def test_the_message_counts_those_before_and_names_none_of_them() -> None:
    waiting = tuple(Ask(at(number), SlotKey(f"secret-team-{number}", "secret")) for number in range(SHOWN + 5))

    def message(count: int, limit: int = 1) -> str:
        return (
            Line(limit, frozenset({C}), waiting[:count]).slot(A, at(99)).waits_for("rollout", "maxConcurrentRollouts")
        )

    rule = "at most one rollout may run at a time in this cluster (maxConcurrentRollouts)."
    assert message(0) == f"It is the next one in the line: {rule}"
    assert "with 3 before it: at most 2 rollouts may run at a time" in message(3, 2)
    assert f"with more than {SHOWN} before it" in message(SHOWN + 5)
    assert "secret" not in message(4)
    new = Line(1, ready=False).slot(A, at(0))
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
    assert job_has_slot(job, at(0)) is expected


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
    assert rollout_has_slot(deployment, [replica_set]) is expected


@dataclass
class Slots:
    """Those that wait and those that have a slot, in virtual time. Plans come in any order."""

    limit: int
    line: WaitingList = field(default_factory=WaitingList)
    waits: dict[SlotKey, datetime] = field(default_factory=dict)
    running: list[SlotKey] = field(default_factory=list)
    served: list[SlotKey] = field(default_factory=list)
    seconds: float = 0.0

    def arrive(self, *subjects: SlotKey) -> None:
        for subject in subjects:
            self.seconds += 1
            self.waits[subject] = at(self.seconds)

    def plan(self, subject: SlotKey) -> SlotDecision:
        """One plan of a subject that waits. If it gets a slot, its job is created."""
        slot = self.line.line(self.limit, self.running).slot(subject, self.waits[subject])
        self.line.put(subject, slot)
        assert len(self.line.line(self.limit, self.running).active) <= self.limit
        if slot.allowed:
            self.begin(subject)
        self.line.finish(subject)
        return slot

    def begin(self, subject: SlotKey) -> None:
        self.seconds += 1
        self.line.answered(subject)
        self.line.got_slot(subject.namespace, at(self.seconds))
        del self.waits[subject]
        self.running.append(subject)
        self.served.append(subject)

    def plan_all(self, dice: random.Random) -> None:
        """Plan until all that wait have planned, and no slot is left to give."""
        for subject in (*self.waits, *self.waits):
            if subject in self.waits:
                self.plan(subject)
        while any(self.plan(one).allowed for one in dice.sample(sorted(self.waits), len(self.waits))):
            pass

    def ends(self, dice: random.Random) -> None:
        self.running.remove(dice.choice(sorted(self.running)))


def test_a_namespace_with_one_endpoint_waits_for_one_slot_of_one_with_a_hundred() -> None:
    dice, slots = random.Random(0), Slots(1)
    slots.arrive(*(SlotKey("many", f"{number:03}") for number in range(100)))
    slots.plan_all(dice)
    slots.arrive(SlotKey("few", "a"), SlotKey("few", "b"), SlotKey("one", "a"))
    while slots.waits:
        slots.ends(dice)
        slots.plan_all(dice)

    assert [f"{one.namespace} {one.name}" for one in slots.served[:8]] == [
        "many 000",
        "many 001",  # its namespace waits since the first slot, which was before the others came
        "few a",
        "one a",
        "many 002",
        "few b",
        "many 003",
        "many 004",
    ]
    assert len(slots.served) == 103


def test_a_new_leader_goes_on_with_the_namespace_that_waits_longest() -> None:
    """It knows the last slots by the jobs and Deployments: without them the oldest of all would be first."""
    old, new = (Ask(at(number), SlotKey("many", str(number))) for number in range(2))
    other = Ask(at(5), SlotKey("one", "a"))
    line = WaitingList()
    line.got_slot("many", at(9))
    for ask in (old, new, other):
        line.put(ask.subject, SlotDecision(allowed=False, ask=ask))

    assert line.line(1, []).waiting == (other, old, new)
    assert [endpoint.namespace for endpoint in line.next(1, refused=True)] == ["one"]
    # An older Job that is listed later is not the last slot.
    line.got_slot("many", at(2))
    assert line.line(1, []).waiting == (other, old, new)
    line.forget("many")
    assert line.line(1, []).waiting == (old, other, new)


def test_a_slot_of_a_plan_that_is_being_carried_out_is_the_last_one_of_its_namespace() -> None:
    first, second, other = SlotKey("many", "a"), SlotKey("many", "b"), SlotKey("one", "a")
    line = WaitingList()
    for number, subject in enumerate((first, second, other)):
        line.put(subject, SlotDecision(allowed=False, ask=Ask(at(number), subject)))
    line.put(first, line.line(2, []).slot(first, at(0)))

    assert not line.line(2, []).slot(second, at(1)).allowed
    assert line.line(2, []).slot(other, at(2)).allowed
    # It failed: the namespace keeps its position.
    line.finish(first)
    assert line.line(1, []).slot(second, at(1)).allowed


def test_a_refused_job_used_a_slot_of_its_namespace() -> None:
    """A quota that refuses all jobs of a namespace would otherwise keep the others waiting until each was tried."""
    first, second, other = SlotKey("full", "a"), SlotKey("full", "b"), SlotKey("one", "a")
    line = WaitingList()
    for number, subject in enumerate((second, other)):
        line.put(subject, SlotDecision(allowed=False, ask=Ask(at(number), subject)))
    line.answered(first, at(9))

    assert not line.line(1, []).slot(second, at(0)).allowed
    assert line.line(1, []).slot(other, at(1)).allowed


def test_endpoints_that_share_an_optimized_model_wait_as_one() -> None:
    line, model = WaitingList(), SlotKey("team", "model")
    names = [SlotKey("team", f"endpoint-{number}") for number in range(3)]
    ask = SlotDecision(allowed=False, ask=Ask(at(0), model))
    for name in names:
        line.put(name, ask)

    assert line.line(1, [C]).slot(A, at(1)).ahead == 1
    assert len(line) == 1
    assert set(line.next(1, refused=True)) == set(names)
    line.put(names[0], None)
    assert line.line(1, [C]).slot(A, at(1)).ahead == 1
    # Its job runs; the other endpoints have not been planned since.
    assert line.line(2, [model]).slot(A, at(1)).allowed
    for name in names:
        line.put(name, None)
    assert line.line(1, [C]).slot(A, at(1)).ahead == 0
    assert len(line) == 0
    assert set(line.next(9, refused=True)) == set()


ARRIVALS = st.lists(st.sampled_from(["many", "few", "one", "ends", "plans"]), max_size=60)


@settings(max_examples=examples(300), deadline=None)
@given(life=ARRIVALS, limit=st.integers(1, 4), seed=st.integers(0, 2**32))
def test_a_subject_waits_for_one_slot_of_each_other_namespace_for_each_of_its_own(
    life: list[str], limit: int, seed: int
) -> None:
    dice, slots = random.Random(seed), Slots(limit)
    began: dict[SlotKey, tuple[int, int]] = {}
    for number, happening in enumerate([*life, *["plans", "ends"] * len(life)]):
        if happening == "ends" and slots.running:
            slots.ends(dice)
        elif happening == "plans":
            slots.plan_all(dice)
        elif happening not in {"ends", "plans"}:
            subject = SlotKey(happening, f"{number:03}")
            before = sum(1 for one in slots.waits if one.namespace == happening)
            slots.arrive(subject)
            began[subject] = len(slots.served), before
            slots.plan(subject)

    assert set(slots.served) == set(began), "some never got a slot"
    for subject, (since, before) in began.items():
        until = slots.served.index(subject)
        for other in {"many", "few", "one"} - {subject.namespace}:
            assert sum(1 for one in slots.served[since:until] if one.namespace == other) <= before + 1
        own = [one for one in slots.served if one.namespace == subject.namespace]
        assert own == sorted(own), "the oldest of a namespace comes first"


@settings(max_examples=examples(200), deadline=None)
@given(
    namespaces=st.lists(st.integers(0, 5), min_size=1, max_size=SHOWN + 4),
    limit=st.integers(1, 3),
    seed=st.integers(0, 2**32),
)
def test_as_many_are_served_first_as_the_status_counts(namespaces: list[int], limit: int, seed: int) -> None:
    dice, slots = random.Random(seed), Slots(limit)
    slots.arrive(*(SlotKey("before", str(number)) for number in range(limit)))
    slots.plan_all(dice)
    slots.arrive(*(SlotKey(str(number), f"{position:03}") for position, number in enumerate(namespaces)))
    served = len(slots.served)
    while slots.waits:
        for subject in dice.sample(sorted(slots.waits), len(slots.waits)):
            slots.plan(subject)
        shown = {subject: slots.plan(subject).ahead for subject in list(slots.waits)}
        slots.ends(dice)
        slots.plan_all(dice)
        (now,) = slots.served[served:]
        served += 1
        assert shown[now] == 0
        for subject in slots.waits:
            assert slots.plan(subject).ahead == min(shown[subject] - 1, SHOWN + 1) or shown[subject] > SHOWN


@settings(max_examples=examples(200), deadline=None)
@given(data=st.data(), limit=st.integers(1, 3))
def test_the_line_finds_the_place_that_all_that_wait_give(data: st.DataObject, limit: int) -> None:
    """The line has the first ones only; here the position is found among all."""
    dice = random.Random(data.draw(st.integers(0, 2**32)))
    line, asks, last = WaitingList(), dict[SlotKey, Ask](), dict[str, datetime]()
    several = data.draw(st.integers(1, 40))
    for number in range(data.draw(st.integers(0, 120))):
        subject = SlotKey(str(dice.randrange(several) * dice.randrange(2)), str(number % 50))
        ask = Ask(at(dice.randrange(30)), subject)
        line.put(subject, SlotDecision(allowed=False, ask=ask))
        asks[subject] = ask
        if dice.random() < 0.1:
            last[subject.namespace] = max(at(dice.randrange(30)), last.get(subject.namespace, at(-1)))
            line.got_slot(subject.namespace, last[subject.namespace])
    active = {one for one in asks if dice.random() < 0.05}
    subject = SlotKey(str(dice.randrange(several)), str(dice.randrange(50)))
    ask = Ask(at(dice.randrange(30)), subject)
    slot = line.line(limit, active - {subject}).slot(subject, ask.since)

    rows: dict[str, list[Ask]] = {}
    for one in sorted({**asks, subject: ask}.values()):
        if one.subject not in active - {subject}:
            rows.setdefault(one.subject.namespace, []).append(one)

    def order(one: Ask) -> tuple[int, datetime, str]:
        namespace = one.subject.namespace
        row = rows[namespace]
        return row.index(one), max(row[0].since, last.get(namespace, row[0].since)), namespace

    found = [one for row in rows.values() for one in row if order(one) < order(ask)]
    assert slot.ahead == min(len(found), SHOWN + 1)
    assert slot.allowed is (len(found) < limit - len(active - {subject}))


@pytest.mark.parametrize("namespaces", [1, 50, 5000])
def test_a_line_of_thousands_is_cut_to_what_a_plan_needs(namespaces: int) -> None:
    line = WaitingList()
    for number in range(5000):
        subject = SlotKey(f"n{number % namespaces}", str(number))
        line.put(subject, SlotDecision(allowed=False, ask=Ask(at(number), subject)))

    full = line.line(1, [C])
    assert len(full.waiting) < 3 * SHOWN
    assert full.slot(A, at(9999)).ahead == min(namespaces, SHOWN + 1)
    last = SlotKey("n0", "last")
    assert [line.line(limit, [C]).slot(last, at(9999)).allowed for limit in (5001, 5002)] == [False, True]


def simulate(seed: int, limit: int, count: int) -> None:
    """A leader plans endpoints in any order, some are refused, some never run; each event is checked."""
    dice = random.Random(seed)
    slots = Slots(limit)
    slots.waits = {SlotKey("ab"[number % 2], str(number)): at(dice.randrange(5)) for number in range(count)}
    slots.seconds = 10
    for _ in range(count * 60):
        if not slots.waits and not slots.running:
            break
        slots.seconds += 1
        if slots.running and dice.random() < 0.3:
            slots.ends(dice)
        if not slots.waits:
            continue
        subject = dice.choice(sorted(slots.waits))
        slot = slots.line.line(limit, slots.running).slot(subject, slots.waits[subject])
        slots.line.put(subject, slot)
        assert len(slots.line.line(limit, slots.running).active) <= limit
        if slot.allowed and dice.random() < 0.2:
            slots.line.answered(subject, at(slots.seconds))
        elif slot.allowed:
            slots.begin(subject)
        slots.line.finish(subject)
        if dice.random() < 0.1:
            slots.line.put(subject, None)  # its reconcile failed
    assert not slots.waits, f"{len(slots.waits)} of {count} never got a slot"
    assert len(slots.served) == count


@settings(max_examples=examples(200), deadline=None)
@given(seed=st.integers(0, 2**32), limit=st.integers(1, 4), count=st.integers(1, 12))
def test_the_limit_holds_and_all_get_a_slot_although_some_are_refused(seed: int, limit: int, count: int) -> None:
    simulate(seed, limit, count)


class LimitedKube(Kube):
    """A cluster whose plans wait for slots."""

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


BUSY = Line(1, frozenset({SlotKey("other", "x")}))


def test_an_optimisation_waits_for_a_slot_with_a_reason() -> None:
    kube = LimitedKube()
    kube.optimizations = BUSY
    made = kube.reconcile()

    assert not any(kind == "Job" for kind, _ in kube.objects)
    found = condition(kube, "Optimized")
    assert (found["status"], found["reason"]) == ("False", "OptimizationQueued")
    assert "maxConcurrentOptimizations" in found["message"]
    assert made.optimization is not None
    assert made.optimization.ask == Ask(BEGIN, SlotKey("a", kube.endpoint["status"]["optimizedModel"]))
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
    kube.edit(pod={"labels": {"changed": "1"}})
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
    kube.edit(pod={"labels": {"changed": "1"}})
    kube.reconcile()
    kube.rollouts = replace(BUSY, active=frozenset({SlotKey("a", "emotion")}), waiting=(Ask(BEGIN, B),))
    kube.reconcile()
    assert "paused" not in kube.deployment["spec"]

    # Its additional pod keeps a core, which the next endpoint in the line may need.
    kube.pass_by(899)
    kube.edit(pod={"labels": {"changed": "2"}})
    kube.reconcile()
    assert "paused" not in kube.deployment["spec"]
    kube.pass_by(1)
    kube.edit(pod={"labels": {"changed": "3"}})
    kube.reconcile()
    assert kube.deployment["spec"]["paused"] is True
    # Its next slot is a new one.
    kube.rollouts = Line(1)
    kube.reconcile()
    kube.rollouts = replace(BUSY, active=frozenset({SlotKey("a", "emotion")}), waiting=(Ask(BEGIN, B),))
    kube.pass_by(600)
    kube.edit(pod={"labels": {"changed": "4"}})
    kube.reconcile()
    assert "paused" not in kube.deployment["spec"]


def test_a_waiting_rollout_that_is_taken_back_needs_no_slot() -> None:
    kube = LimitedKube(replicas=1)
    old = serving(kube)
    kube.rollouts = BUSY
    kube.edit(pod={"labels": {"changed": "1"}})
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
    kube.edit(pod={"labels": {"changed": "1"}})
    kube.reconcile()

    assert kube.template_hash != old
    assert "paused" not in kube.deployment["spec"]


@pytest.mark.parametrize("text", ["", "soon", "2026-11-21T12:00:00"])
def test_an_annotation_of_another_form_is_no_time(text: str) -> None:
    kube = LimitedKube(replicas=1)
    serving(kube)
    kube.rollouts = BUSY
    kube.edit(pod={"labels": {"changed": "1"}})
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
