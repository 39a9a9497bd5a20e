"""The lines for optimisations and rollouts, counted from the caches."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from penstock_operator.cluster.store import ObjectKey
from penstock_operator.control.cache import ClusterCache
from penstock_operator.facts.names import ROLLOUT_BEGAN, TEMPLATE_HASH
from penstock_operator.limits.concurrency import START_SECONDS, Ask, Line, SlotDecision, SlotKey
from penstock_operator.limits.waiting import CANARY_SECONDS, LEADER_SECONDS
from penstock_operator.settings import Settings
from tests.operator import objects
from tests.operator.objects import Json

CREATED = datetime(2026, 11, 21, 19, tzinfo=UTC)
NOW = CREATED + timedelta(seconds=1)


def cache() -> ClusterCache:
    return ClusterCache(Settings().plan_settings())


def lines(of: ClusterCache, now: datetime = NOW) -> tuple[Line, Line]:
    return of.slots.lines(now)


def ended(job: Json, kind: str = "Complete") -> Json:
    return {**job, "status": {"conditions": [{"type": kind, "status": "True"}]}}


def that_waits(name: str) -> SlotDecision:
    return SlotDecision(allowed=False, ask=Ask(CREATED, SlotKey("a", name)))


def test_a_job_has_a_slot_until_it_ends_and_its_end_plans_those_that_wait() -> None:
    found = cache()
    woken: list[set[ObjectKey]] = []
    found.slots.listen(woken.append)
    found.models.put(objects.optimized_model("m"))
    found.jobs.put(objects.job("m"))
    found.slots.planned(ObjectKey("a", "waits"), that_waits("w"), None)

    assert lines(found)[0].active == {SlotKey("a", "m")}
    assert woken == []
    found.jobs.put(ended(objects.job("m", version=2)))
    assert lines(found)[0].active == frozenset()
    assert woken == [{ObjectKey("a", "waits")}]


def test_a_job_that_nothing_runs_loses_its_slot_and_gets_it_again_when_it_runs() -> None:
    found = cache()
    found.models.put(objects.optimized_model("m"))
    found.jobs.put(objects.job("m"))
    late = CREATED + timedelta(seconds=START_SECONDS)

    found.pods.put(objects.job_pod("p", "m", phase="Pending"))
    assert lines(found, late)[0].active == frozenset()
    found.pods.put(objects.job_pod("p", "m", version=2))
    assert lines(found, late)[0].active == {SlotKey("a", "m")}


def test_a_job_that_a_user_created_with_the_operators_labels_has_no_slot() -> None:
    found = cache()
    found.models.put(objects.optimized_model("m"))
    job = objects.job("m")
    job["metadata"]["ownerReferences"][0]["uid"] = "another"
    found.jobs.put(job)

    assert lines(found)[0].active == frozenset()


def deployment(template: str, version: int, **spec: object) -> Json:
    value = objects.deployment("e", version=version)
    value["spec"] |= {"template": {"metadata": {"annotations": {TEMPLATE_HASH: template}}}, **spec}
    return value


def replica_set(template: str, replicas: int, version: int) -> Json:
    value = objects.replica_set("e", version)
    value["metadata"]["labels"] = objects.deployment("e")["metadata"]["labels"]
    value["spec"] = {"replicas": replicas, "template": {"metadata": {"annotations": {TEMPLATE_HASH: template}}}}
    return value


def test_a_rollout_has_a_slot_from_the_new_template_until_the_old_pods_are_gone() -> None:
    found = cache()
    woken: list[set[ObjectKey]] = []
    found.slots.listen(woken.append)

    def rolling() -> bool:
        return lines(found)[1].active == {SlotKey("a", "e")}

    found.endpoints.put(objects.endpoint("e"))
    found.deployments.put(deployment("old", 1))
    found.replica_sets.put(replica_set("old", 1, 2))
    assert not rolling()
    found.deployments.put(deployment("new", 3, paused=True))
    assert not rolling()
    found.deployments.put(deployment("new", 4))
    assert rolling()
    assert woken == []
    found.replica_sets.put(replica_set("old", 0, 5))
    assert not rolling()
    assert len(woken) == 1


def test_a_rollout_of_which_a_new_leader_learns_before_its_endpoint_has_a_slot() -> None:
    found = cache()
    found.deployments.put(deployment("new", 1))
    found.replica_sets.put(replica_set("old", 1, 2))
    assert lines(found)[1].active == frozenset()
    found.endpoints.put(objects.endpoint("e"))
    assert lines(found)[1].active == {SlotKey("a", "e")}


def test_a_deployment_with_the_name_of_a_canary_has_a_slot_only_if_it_is_the_endpoints_own() -> None:
    found = cache()
    for name in ("e", "e-canary"):
        found.endpoints.put(objects.endpoint(name))
    # Of another endpoint, which has this name.
    found.deployments.put(objects.deployment("e-canary"))
    found.deployments.put(deployment("old", 4))
    assert lines(found)[1].active == frozenset()
    observed = found.observe(ObjectKey("a", "e"))
    assert observed is not None
    assert observed.canary is None

    found.deployments.remove(ObjectKey("a", "e-canary"))
    value = objects.deployment("e-canary", of="e", version=5)
    value["metadata"]["labels"] = objects.deployment("e")["metadata"]["labels"]
    found.deployments.put(value)
    assert lines(found)[1].active == {SlotKey("a", "e")}


def test_a_canary_that_takes_hours_or_is_changed_all_the_time_keeps_others_waiting_for_one_hour() -> None:
    found = cache()
    found.endpoints.put(objects.endpoint("e"))
    present = deployment("new", 1, paused=True)
    present["metadata"]["annotations"] = {ROLLOUT_BEGAN: "2026-11-21T19:00:00Z"}
    found.deployments.put(present)
    canary = objects.deployment("e-canary", of="e", version=2)
    canary["metadata"]["labels"] = objects.deployment("e")["metadata"]["labels"]
    found.deployments.put(canary)

    assert lines(found, CREATED + timedelta(seconds=CANARY_SECONDS))[1].active == {SlotKey("a", "e")}
    assert lines(found, CREATED + timedelta(seconds=CANARY_SECONDS + 1))[1].active == frozenset()
    # Its rollout has a slot again: it has passed.
    found.deployments.put(
        {
            **present,
            "spec": {**present["spec"], "paused": False},
            "metadata": {**present["metadata"], "resourceVersion": "3"},
        }
    )
    found.replica_sets.put(replica_set("old", 1, 4))
    assert lines(found, CREATED + timedelta(seconds=2 * CANARY_SECONDS))[1].active == {SlotKey("a", "e")}


def test_a_rollout_that_a_user_created_with_the_operators_labels_has_no_slot() -> None:
    found = cache()
    found.endpoints.put(objects.endpoint("e"))
    forged = deployment("new", 1)
    forged["metadata"]["ownerReferences"][0]["uid"] = "another"
    found.deployments.put(forged)
    found.replica_sets.put(replica_set("old", 1, 2))

    assert lines(found)[1].active == frozenset()


def test_an_endpoint_that_is_gone_keeps_no_other_waiting_and_is_forgotten() -> None:
    found = cache()
    woken: list[set[ObjectKey]] = []
    found.slots.listen(woken.append)
    for name in ("gone", "stays"):
        found.endpoints.put(objects.endpoint(name))
        ask = SlotDecision(allowed=False, ask=Ask(CREATED, SlotKey("a", name)))
        found.slots.planned(ObjectKey("a", name), that_waits(f"model-{name}"), ask)
    found.slots.answered(found.slots.rollouts, SlotDecision(allowed=True, ask=ask.ask), NOW)
    woken.clear()
    found.endpoints.remove(ObjectKey("a", "gone"))

    for line in lines(found):
        assert [one.subject.name.removeprefix("model-") for one in line.waiting] == ["stays"]
    assert woken == [{ObjectKey("a", "stays")}]
    # Deleted and created again, with one event for both.
    again = objects.endpoint("stays", 2)
    again["metadata"]["uid"] = "another"
    found.endpoints.put(again)
    assert all(line.waiting == () and line.refused == {} for line in lines(found))


def test_a_refused_job_of_a_deleted_optimized_model_is_forgotten() -> None:
    found = cache()
    found.models.put(objects.optimized_model("m"))
    asked = SlotDecision(allowed=True, ask=Ask(CREATED, SlotKey("a", "m")))
    found.slots.answered(found.slots.optimizations, asked, NOW)
    assert set(lines(found)[0].refused) == {SlotKey("a", "m")}
    found.models.remove(ObjectKey("a", "m"))
    assert lines(found)[0].refused == {}


def test_a_new_leader_waits_for_the_plans_of_all_endpoints_but_not_for_ever() -> None:
    found = cache()
    keys = {ObjectKey("a", "e1"), ObjectKey("a", "e2")}
    found.slots.begin(set(keys), NOW)

    assert not lines(found)[0].ready
    assert lines(found, NOW + timedelta(seconds=LEADER_SECONDS + 1))[0].ready
    for key in keys:
        found.slots.plans(key)
    assert lines(found)[0].ready


def test_a_slot_that_is_given_counts_until_its_plan_is_carried_out() -> None:
    found = cache()
    key = ObjectKey("a", "e")
    ask = Ask(CREATED, SlotKey("a", "m"))
    found.slots.planned(key, SlotDecision(allowed=True, ask=ask), None)

    assert lines(found)[0].active == {ask.subject}
    found.slots.carried_out(key)
    assert lines(found)[0].active == frozenset()


def test_after_a_refused_job_the_next_one_is_tried_at_once_and_the_refused_one_when_a_slot_is_free() -> None:
    found = cache()
    woken: list[set[ObjectKey]] = []
    found.slots.listen(woken.append)
    asked = SlotDecision(allowed=True, ask=Ask(CREATED, SlotKey("a", "refused")))
    found.slots.planned(ObjectKey("a", "refused"), asked, None)
    found.slots.answered(found.slots.optimizations, asked, NOW)
    assert woken == [set()]
    assert lines(found)[0].active == frozenset()
    for name in ("refused", "other", "third"):
        found.slots.planned(ObjectKey("a", name), that_waits(name), None)
    found.slots.answered(found.slots.optimizations, asked, NOW)
    assert woken[1:] == [{ObjectKey("a", "other")}]
    found.jobs.put(objects.job("m"))
    found.jobs.put(ended(objects.job("m", version=2)))
    assert woken[2:] == [{ObjectKey("a", "other"), ObjectKey("a", "third"), ObjectKey("a", "refused")}]


def test_a_refused_job_goes_to_the_end_of_the_line_and_a_failed_reconcile_leaves_it() -> None:
    found = cache()
    for name in ("refused", "other"):
        found.slots.planned(ObjectKey("a", name), that_waits(name), None)
    asked = SlotDecision(allowed=True, ask=Ask(CREATED, SlotKey("a", "refused")))
    found.slots.answered(found.slots.optimizations, asked, NOW)

    line, _ = lines(found)
    assert not line.slot(SlotKey("a", "refused"), CREATED).allowed
    found.slots.carried_out(ObjectKey("a", "other"), failed=True)
    line, _ = lines(found)
    assert line.slot(SlotKey("a", "refused"), CREATED).allowed
    found.slots.answered(found.slots.optimizations, asked, None)
    assert lines(found)[0].refused == {}


def test_the_last_slot_of_a_namespace_is_that_of_its_newest_job() -> None:
    found = cache()
    assert lines(found)[0].last_slots == {}
    found.jobs.put(objects.job("m"))
    assert lines(found)[0].last_slots == {"a": CREATED}
    older = objects.job("n", version=2)
    older["metadata"]["creationTimestamp"] = "2026-11-21T18:00:00Z"
    found.jobs.put(older)
    found.jobs.put(ended(objects.job("m", version=3)))
    assert lines(found)[0].last_slots == {"a": CREATED}
    assert lines(found)[1].last_slots == {}


def test_a_job_that_collects_artefacts_gets_no_slot() -> None:
    found = cache()
    collects = objects.job("m")
    del collects["metadata"]["labels"]["penstock.dev/attempt"]
    found.jobs.put(collects)

    assert lines(found)[0].last_slots == {}


def test_the_last_rollout_of_a_namespace_is_that_of_its_deployments_and_not_in_the_future() -> None:
    """Anyone may write the annotation."""
    found = cache()
    present = deployment("new", 1)
    present["metadata"]["annotations"] = {ROLLOUT_BEGAN: "2026-11-21T19:00:00Z"}
    found.deployments.put(present)
    assert lines(found)[1].last_slots == {"a": CREATED}

    later = deployment("newer", 2)
    later["metadata"]["annotations"] = {ROLLOUT_BEGAN: "9999-01-01T00:00:00Z"}
    found.deployments.put(later)
    assert CREATED < lines(found)[1].last_slots["a"] <= datetime.now(UTC)


def test_the_last_slot_of_a_namespace_without_endpoints_is_forgotten() -> None:
    found = cache()
    for name in ("one", "two"):
        found.endpoints.put(objects.endpoint(name))
    found.jobs.put(objects.job("m"))
    found.endpoints.remove(ObjectKey("a", "one"))
    assert lines(found)[0].last_slots == {"a": CREATED}
    found.endpoints.remove(ObjectKey("a", "two"))
    assert lines(found)[0].last_slots == {}


def test_a_second_plan_of_the_same_reconcile_asks_again_and_keeps_the_slot() -> None:
    """The first one found an object of another owner. The job of neither is in the caches yet."""
    found = cache()
    key, model = ObjectKey("a", "e"), SlotKey("a", "m")
    for _ in range(2):
        found.slots.plans(key)
        slot = lines(found)[0].slot(model, CREATED)
        assert slot.ask is not None
        found.slots.planned(key, slot, None)
        assert lines(found)[0].active == {model}
