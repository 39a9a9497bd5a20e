"""The use of a namespace's quota, counted from the caches while endpoints are planned and their objects appear."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from penstock_operator.cluster.store import ObjectKey
from penstock_operator.collectors import CacheCollector
from penstock_operator.control.cache import ClusterCache
from penstock_operator.facts.names import CORES
from penstock_operator.facts.tenants import NamespaceQuota
from penstock_operator.limits.quotas import Allocation, Amount, Limit
from penstock_operator.settings import Settings
from tests.operator import objects
from tests.operator.objects import Json

QUOTA = NamespaceQuota.model_validate({"namespaceSelector": {"matchLabels": {"team": "a"}}, "cores": 8, "replicas": 5})
LIMIT = Limit(8, 5)


def with_quota() -> ClusterCache:
    cache = ClusterCache(replace(Settings().plan_settings(), quotas=(QUOTA,)))
    labels = {"kubernetes.io/metadata.name": "a", "team": "a"}
    cache.namespaces.put({"metadata": {"name": "a", "resourceVersion": "1", "uid": "a", "labels": labels}})
    return cache


class Endpoint:
    """One endpoint whose plans, objects and statuses reach the caches one after the other."""

    def __init__(self, cache: ClusterCache, name: str) -> None:
        self.cache = cache
        self.key = ObjectKey("a", name)
        self.version = 0
        self.generation = 0
        self.spec: Json = {}
        self.status: Json = {}
        self.planned: tuple[int, int] | None = None
        """Replicas and cores of the Deployment that the last plan applies; None: it applies nothing."""

    def put(self) -> None:
        self.version += 1
        value = objects.endpoint(self.key.name, self.version, status=self.status, **self.spec)
        value["metadata"]["generation"] = self.generation
        self.cache.endpoints.put(value)

    def edit(self, cores: int, least: int) -> None:
        self.generation += 1
        self.spec = {"cores": cores, "scaling": {"minReplicas": least, "maxReplicas": 9}}
        self.put()

    def plan(self, wanted: int) -> None:
        """As a reconcile does: nothing else happens between the plan and the note of its grant."""
        use = self.cache.quotas.seen_by(self.key)
        assert use is not None
        share = use.share()
        replicas = max(use.own.least, min(wanted, share.most))
        self.cache.quotas.put(self.key, f"uid-{self.key.name}", share.allocation(replicas))
        self.planned = (replicas, self.spec["cores"]) if share.accepted else None
        found = {"status": str(share.accepted), "reason": "Valid" if share.accepted else "QuotaExceeded"}
        self.status = {"conditions": [{"type": "Accepted", "observedGeneration": self.generation, **found}]}

    def apply(self, *, older: bool) -> None:
        """The Deployment of the last plan; `older`: the pods of the earlier spec serve until the new model is ready."""
        if self.planned is None:
            return
        replicas, cores = self.planned
        present = self.cache.deployments.facts(self.key)
        self.version += 1
        value = objects.deployment(self.key.name, version=self.version, replicas=replicas)
        value["metadata"]["annotations"] = {CORES: str(present.cores if present is not None and older else cores)}
        self.cache.deployments.put(value)

    @property
    def accepted(self) -> bool:
        (found,) = self.status.get("conditions") or [{}]
        return bool(found.get("observedGeneration") == self.generation and found["status"] == "True")


STEPS = 200


@given(st.integers(0, 2**32))
def test_the_pods_of_a_namespace_never_exceed_its_quota(seed: int) -> None:
    """Each step is one of a user (edit, delete), of a reconcile (plan, apply) or of the watch (status)."""
    # Long sequences matter here, and hypothesis prefers short ones.
    chosen = random.Random(seed)
    cache = with_quota()
    there: dict[int, Endpoint] = {}
    for _ in range(STEPS):
        number, step = (
            chosen.randrange(4),
            chosen.choices(("edit", "delete", "plan", "apply", "status"), (3, 1, 6, 6, 6)),
        )
        endpoint = there.setdefault(number, Endpoint(cache, f"e{number}"))
        before = {one.key for one in there.values() if one.accepted} - {endpoint.key}
        if step == ["edit"] or not endpoint.generation:
            endpoint.edit(chosen.randint(1, 5), chosen.randint(0, 3))
        elif step == ["plan"]:
            kept = endpoint.accepted
            endpoint.plan(chosen.randint(0, 9))
            assert endpoint.accepted or not kept
        elif step == ["apply"]:
            endpoint.apply(older=chosen.random() < 0.5)
        elif step == ["status"]:
            endpoint.put()
        else:
            cache.endpoints.remove(endpoint.key)
            cache.deployments.remove(endpoint.key)
            del there[number]
        assert before == {one.key for one in there.values() if one.accepted} - {endpoint.key}
        pods = Amount()
        for key in cache.deployments:
            facts = cache.deployments.facts(key)
            assert facts is not None
            pods = pods.plus(Amount(facts.wanted * facts.cores, facts.wanted))
        assert LIMIT.holds(pods)


def added(cache: ClusterCache, name: str, **spec: Any) -> ObjectKey:
    cache.endpoints.put(objects.endpoint(name, **spec))
    return ObjectKey("a", name)


def test_what_a_plan_gave_counts_before_its_deployment_is_in_the_caches() -> None:
    cache = with_quota()
    first, second = added(cache, "first", cores=2), added(cache, "second", cores=2)
    use = cache.quotas.seen_by(first)
    assert use is not None
    cache.quotas.put(first, "uid-first", use.share().allocation(3))
    seen = cache.quotas.seen_by(second)

    assert seen is not None
    assert seen.share().used == Amount(6, 3)
    assert seen.share().most == 1


def test_a_grant_of_a_deleted_endpoint_does_not_count() -> None:
    cache = with_quota()
    first, second = added(cache, "first"), added(cache, "second")
    cache.quotas.put(first, "uid-first", Allocation(Amount(4, 4), 4))
    cache.endpoints.remove(first)
    again = objects.endpoint("first", 5)
    again["metadata"]["uid"] = "another"
    cache.endpoints.put(again)
    seen = cache.quotas.seen_by(second)

    assert seen is not None
    assert [claim.held for claim in seen.others] == [Amount()]


def test_a_namespace_that_no_quota_selects_is_not_limited() -> None:
    cache = with_quota()
    cache.namespaces.put({"metadata": {"name": "a", "resourceVersion": "2", "uid": "a", "labels": {}}})
    key = added(cache, "first", cores=200)

    assert cache.quotas.seen_by(key) is None
    assert cache.quotas.most(key) is None
    assert list(cache.quotas.namespaces()) == []


def test_the_upper_bound_of_an_hpa_counts_because_it_may_use_it() -> None:
    cache = with_quota()
    key = added(cache, "first", cores=2)
    cache.deployments.put(objects.deployment("first", replicas=1))
    hpa = {"metadata": objects.metadata("first", 1, {"penstock.dev/endpoint": "first"}), "spec": {"maxReplicas": 3}}
    cache.autoscalers.put(hpa)
    seen = cache.quotas.seen_by(key)

    assert seen is not None
    assert seen.own.held == Amount(6, 3)


def test_the_use_of_a_quota_is_exported_as_metrics() -> None:
    cache = with_quota()
    added(cache, "first", cores=2)
    cache.deployments.put(objects.deployment("first", replicas=3))
    (family,) = [one for one in CacheCollector(cache, dict).collect() if one.name.endswith("namespace_quota")]

    assert {(one.labels["resource"], one.labels["type"]): one.value for one in family.samples} == {
        ("cores", "hard"): 8,
        ("cores", "used"): 6,
        ("replicas", "hard"): 5,
        ("replicas", "used"): 3,
    }
    assert {one.labels["model_endpoint_namespace"] for one in family.samples} == {"a"}
