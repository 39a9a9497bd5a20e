"""Invariants of plans after random sequences of events."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.resources.conditions import ConditionType
from penstock.resources.status import EndpointStatus
from penstock_operator.endpoint.plan import plan
from penstock_operator.endpoint.snapshot import ReconcilePlan
from penstock_operator.facts.pods import Neighbour
from penstock_operator.facts.scaling import DesiredScale
from tests.examples import examples
from tests.operator.endpoint.kube import SETTINGS, ZEN3, Json, Kube, container, digest, guaranteed, info, result

LETTERS = "acdef"


def has_job(kube: Kube) -> bool:
    model = kube.endpoint["status"].get("optimizedModel")
    return bool(model) and any(kind == "Job" and name.startswith(f"{model}-") for kind, name in kube.objects)


def job_is_open(kube: Kube) -> bool:
    return has_job(kube) and not kube.objects["Job", kube.job].get("status")


def deployed(kube: Kube) -> bool:
    return ("Deployment", kube.name) in kube.objects


def on(condition: Callable[[Kube], bool], act: Callable[[Kube, random.Random], None]) -> Callable[..., None]:
    def happen(kube: Kube, dice: random.Random) -> None:
        if condition(kube):
            act(kube, dice)

    return happen


def crash(kube: Kube, dice: random.Random) -> None:
    kube.pod_of(
        f"{kube.name}-crash{dice.randrange(3)}",
        containerStatuses=[
            container(restarts=dice.randrange(9), waiting=("CrashLoopBackOff", ""), last={"exitCode": 1})
        ],
    )
    kube.deployment_status(updated=1, available=dice.randrange(2), replicas=2)


def pending(kube: Kube, dice: random.Random) -> None:
    unschedulable = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/1 nodes"}
    kube.pod_of(f"{kube.name}-pending", node="", phase="Pending", conditions=[unschedulable])
    kube.deployment_status(updated=1, available=1, replicas=2)


def edit(kube: Kube, dice: random.Random) -> None:
    changes: list[Json] = [
        {"cores": dice.randint(1, 4)},
        {"model": f"hf://org/{dice.choice('xyz')}@main"},
        {"replicas": dice.randrange(4)},
        {"suspend": dice.random() < 0.5},
        {"hardwareClass": dice.choice(["icelake", "any", "nosuch"])},
        {"scaling": {"mode": dice.choice(["Internal", "HPA", "KEDA", "External", "None"]), "maxReplicas": 5}},
        {"optimization": {"mode": "Pinned", "artefact": digest(dice.choice(LETTERS))}},
        {"optimization": {"mode": dice.choice(["Auto", "Disabled"]), "serveWhileOptimizing": dice.random() < 0.7}},
        {"optimization": {"whenNoCandidate": "Fail"}},
        {"pod": {"labels": {"changed": str(dice.randrange(9))}}},
        {"exposure": {"host": f"{dice.choice('xyz')}.example.com", "ingress": {}}},
        {"exposure": {"host": "x.example.com", "httpRoute": {"parentRefs": [{"name": "public"}]}}},
        {"exposure": None},
        {"cores": 0},
    ]
    kube.edit(**dice.choice(changes))


def upgrade(kube: Kube, dice: random.Random) -> None:
    kube.settings = replace(kube.settings, toolchain=f"0.{dice.randrange(4)}.0")


def report(kube: Kube, dice: random.Random) -> None:
    reports = [info(range(4, 8)), info(range(64), pinned=False), info(range(4, 8), cpu=ZEN3), info((4,))]
    kube.infos = {name: dice.choice(reports) for name in kube.infos if dice.random() < 0.8}


def succeed(kube: Kube, dice: random.Random) -> None:
    budget = {"withinBudget": dice.random() < 0.8, "reason": "so it is"}
    capacity = {"requestsPerSecond": float(dice.randint(20, 100)), "p95ObjectiveMilliseconds": 20.0}
    kube.job_succeeds(result(accuracy=budget, capacity=capacity), digest(dice.choice(LETTERS)))


def fail(kube: Kube, dice: random.Random) -> None:
    reason = dice.choice(["ModelNotFound", "StoreUnavailable", "NoCandidateWithinBudget", "OutOfMemory"])
    kube.job_fails(reason, retryable=reason == "StoreUnavailable")


def forget_job(kube: Kube, _: random.Random) -> None:
    job = kube.job
    del kube.objects["Job", job]
    kube.pods.pop(f"{job}-pod", None)


def forget_models(kube: Kube, _: random.Random) -> None:
    for key in [key for key in kube.objects if key[0] in {"OptimizedModel", "Job"}]:
        del kube.objects[key]


HAPPENINGS: dict[str, Callable[..., None]] = {
    "job runs": on(job_is_open, lambda kube, dice: kube.job_runs(dice.randrange(23), 23, baseline=dice.random() < 0.7)),
    "job succeeds": on(job_is_open, succeed),
    "job fails": on(job_is_open, fail),
    "job is evicted": on(job_is_open, lambda kube, _: kube.job_pod_fails("Evicted")),
    "job is gone": on(has_job, forget_job),
    "models are gone": forget_models,
    "pods serve": on(deployed, lambda kube, _: kube.pods_serve()),
    "a pod crashes": on(deployed, crash),
    "a pod is pending": on(deployed, pending),
    "pods report": report,
    "a neighbour": lambda kube, _: setattr(kube, "neighbours", [Neighbour("n", "b", "node-1", (5,))]),
    "no neighbour": lambda kube, _: setattr(kube, "neighbours", []),
    "time": lambda kube, dice: kube.pass_by(dice.choice([1, 10, 600, 90_000])),
    "edit": edit,
    "upgrade": upgrade,
    "scale": lambda kube, dice: setattr(kube, "scale", dice.choice([None, DesiredScale(dice.randrange(6), "so")])),
}
LIVES = st.lists(st.sampled_from(sorted(HAPPENINGS)), max_size=16)


def check(made: ReconcilePlan, *, exposed: bool) -> None:
    """Check the invariants of every plan. `exposed`: the spec has `exposure`."""
    EndpointStatus.model_validate(made.status)
    found = made.status["conditions"]
    assert sorted(entry["type"] for entry in found) == sorted(
        kind.value
        for kind in ConditionType
        if kind not in {ConditionType.INDEX_COMPATIBLE, ConditionType.ANSWERS_AGREE}
        and (exposed or kind is not ConditionType.EXPOSED)
    )
    for entry in found:
        assert entry["message"].strip()
        assert entry["reason"]
        assert entry["lastTransitionTime"]
    truth = {entry["type"]: entry["status"] for entry in found}
    if truth["Ready"] == "True":
        assert {truth[kind] for kind in ("Accepted", "Optimized", "Available", "CoresPinned")} == {"True"}
        assert "False" not in {truth[kind] for kind in ("ModelResolved", "AccuracyWithinBudget", "ObjectiveMet")}
    if truth["CoresPinned"] != "True":
        assert not made.status.get("p95")
        assert not made.status.get("speedUp")
    for event in made.events:
        assert event.message.strip()
    assert all(ref.kind in {"PodDisruptionBudget", "Job"} for ref in made.delete), "no serving object is deleted"
    for value in made.apply:
        assert len(value["metadata"]["name"]) <= 63
        if value["kind"] in {"Deployment", "Job"}:
            for one in value["spec"]["template"]["spec"]["containers"]:
                assert guaranteed(one)["cpu"].isdigit()
            volumes = value["spec"]["template"]["spec"]["volumes"]
            assert all("sizeLimit" in one["emptyDir"] for one in volumes if "emptyDir" in one)
    assert made.requeue_seconds is None or made.requeue_seconds > 0


def vouched(kube: Kube) -> set[str]:
    """Every artefact that may serve: those in the status of an OptimizedModel of the namespace."""
    found: set[str] = set()
    for (kind, _), value in kube.objects.items():
        if kind == "OptimizedModel":
            status = value.get("status") or {}
            found |= {(status.get(name) or {}).get("digest", "") for name in ("artefact", "baseline")}
    return found


@settings(max_examples=examples(60), deadline=None)
@given(LIVES, st.randoms(use_true_random=False))
def test_after_any_sequence_of_events_plans_settle_and_keep_their_invariants(
    life: list[str], dice: random.Random
) -> None:
    kube = Kube(settings=replace(SETTINGS, max_attempts=3))
    kube.reconcile()
    for name in life:
        serving = kube.artefact if deployed(kube) else ""
        HAPPENINGS[name](kube, dice)
        observed = kube.observed()
        first, second = plan(observed), plan(observed)
        exposed = bool(kube.spec.get("exposure"))
        assert first == second, "the same observation gives the same plan"
        check(first, exposed=exposed)
        check(kube.reconcile(), exposed=exposed)
        if serving:
            assert deployed(kube), "a serving Deployment is never deleted"
            assert kube.artefact == serving or kube.artefact in vouched(kube)


@settings(max_examples=examples(25), deadline=None)
@given(LIVES, st.randoms(use_true_random=False))
def test_an_applied_plan_is_followed_by_an_empty_one(life: list[str], dice: random.Random) -> None:
    kube = Kube()
    kube.reconcile()
    for name in life:
        HAPPENINGS[name](kube, dice)
        kube.reconcile()
    made = kube.plan()
    before = kube.picture()
    kube.act(made)
    assert kube.picture() == before
    assert made.events == ()
    assert made.delete == ()


@settings(max_examples=examples(20), deadline=None)
@given(LIVES, st.randoms(use_true_random=False))
def test_a_failed_optimisation_never_changes_what_serves(life: list[str], dice: random.Random) -> None:
    kube = Kube().optimised()
    for name in life:
        HAPPENINGS[name](kube, dice)
        kube.reconcile()
    kube.edit(model="hf://org/another@main", optimization={}, suspend=False, hardwareClass="icelake", cores=2)
    kube.reconcile()
    before = kube.deployment["spec"]["template"]
    if job_is_open(kube):
        kube.job_runs()
        kube.reconcile()
        kube.job_fails("CorruptModel", retryable=False)
        kube.reconcile()
        assert kube.deployment["spec"]["template"] == before
