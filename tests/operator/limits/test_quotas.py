"""Quotas: which endpoints are accepted, how far they scale, and what is reported."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import SettingError
from penstock.resources.endpoint_parts.scaling import Scaling, ScalingMode
from penstock_operator.endpoint.objects.scalers import HpaBounds, hpa_bounds
from penstock_operator.facts.scaling import DesiredScale
from penstock_operator.facts.tenants import NamespaceQuota
from penstock_operator.limits.quotas import (
    Amount,
    Claim,
    ClaimState,
    Limit,
    NamespaceUse,
    claim_of,
    least_replicas,
    limit_of,
)
from penstock_operator.settings import PREFIX, Settings
from tests.operator import objects
from tests.operator.endpoint.kube import Kube, condition

ACCEPTED, WAITING, REFUSED = ClaimState.ACCEPTED, ClaimState.WAITING, ClaimState.REFUSED


def claim(name: str, cores: int = 1, least: int = 1, state: ClaimState = WAITING, **more: Any) -> Claim:
    """A claim whose name is also its age."""
    return Claim(name, created=name, cores=cores, least=least, state=state, **more)


def held(replicas: int, cores: int = 1) -> Amount:
    return Amount(replicas * cores, replicas)


@pytest.mark.parametrize(
    ("own", "others", "limit", "expected"),
    [
        pytest.param(claim("a", 4), [], Limit(4), (True, 1), id="it fits exactly"),
        pytest.param(claim("a", 5), [], Limit(4), (False, 1), id="one replica has too many cores"),
        pytest.param(claim("a", 2, 3), [], Limit(4), (False, 3), id="the smallest number of replicas does not fit"),
        pytest.param(claim("a", 1, 3), [], Limit(replicas=2), (False, 3), id="too many replicas"),
        pytest.param(claim("b", 2), [claim("a", 3, state=ACCEPTED)], Limit(4), (False, 1), id="another one is there"),
        pytest.param(claim("a", 2), [claim("b", 3, state=ACCEPTED)], Limit(4), (False, 1), id="a newer one is there"),
        pytest.param(claim("b", 2), [claim("a", 3)], Limit(4), (False, 1), id="an older one waits"),
        pytest.param(claim("a", 2), [claim("b", 3)], Limit(4), (True, 2), id="a newer one waits"),
        pytest.param(claim("b", 2), [claim("a", 5)], Limit(4), (True, 2), id="an older one can never fit"),
        pytest.param(claim("b", 2), [claim("a", 4, state=REFUSED)], Limit(4), (True, 2), id="an older one is refused"),
        pytest.param(
            claim("b", 2), [claim("a", 1, state=REFUSED, held=held(3))], Limit(4), (False, 1), id="its pods count"
        ),
        pytest.param(
            claim("b", 2), [claim("a", 1, state=ACCEPTED, held=held(3))], Limit(4), (False, 1), id="scaled replicas"
        ),
        pytest.param(
            claim("a", 1, 1, ACCEPTED, held=held(2)),
            [claim("b", 1, state=ACCEPTED)],
            Limit(5),
            (True, 4),
            id="it grows",
        ),
        pytest.param(claim("a", 2, state=ACCEPTED), [], Limit(7, 2), (True, 2), id="the smaller of both limits"),
        pytest.param(
            claim("a", 1, 1, ACCEPTED, held=held(5)), [claim("b", 1, state=ACCEPTED)], Limit(2), (True, 5), id="lowered"
        ),
        pytest.param(claim("a", 4, 2, ACCEPTED), [], Limit(2), (True, 2), id="lowered, and it has no pods yet"),
        pytest.param(claim("a", 2, held=held(8)), [], Limit(8), (True, 4), id="more cores for each replica"),
        pytest.param(claim("a", 2, 5, held=held(8)), [], Limit(8), (False, 5), id="and more than there are"),
        pytest.param(claim("a", least=0), [claim("b", 9, state=ACCEPTED)], Limit(8), (True, 0), id="suspended"),
    ],
)
def test_what_a_quota_allows(own: Claim, others: list[Claim], limit: Limit, expected: tuple[bool, int]) -> None:
    share = NamespaceUse(limit, own, tuple(others)).share()

    assert (share.accepted, share.most) == expected


claims = st.builds(
    Claim,
    name=st.sampled_from("abcdefgh"),
    created=st.sampled_from("123"),
    cores=st.integers(1, 4),
    least=st.integers(0, 3),
    state=st.sampled_from(ClaimState),
    held=st.builds(held, st.integers(0, 3), st.integers(1, 4)),
)
limits = st.one_of(
    st.builds(Limit, st.integers(0, 20)),
    st.builds(Limit, st.none(), st.integers(0, 10)),
    st.builds(Limit, st.integers(0, 20), st.integers(0, 10)),
)


@given(st.lists(claims, min_size=1, max_size=6, unique_by=lambda one: one.name), limits)
def test_what_all_endpoints_get_together_is_within_the_quota(several: list[Claim], limit: Limit) -> None:
    """All new endpoints are planned from the same state, and each takes its smallest number."""
    before, taken = Amount(), Amount()
    for own in several:
        share = NamespaceUse(limit, own, tuple(one for one in several if one is not own)).share()
        before = before.plus(own.reserved)
        gets = share.accepted and own.state is not REFUSED
        taken = taken.plus(own.reserved.at_least(own.needed) if gets else own.reserved)

    assert limit.holds(taken) or taken == before


@given(claims, st.lists(claims, max_size=5, unique_by=lambda one: one.name), limits, claims)
def test_a_newer_endpoint_does_not_displace_an_accepted_one(
    own: Claim, others: list[Claim], limit: Limit, newer: Claim
) -> None:
    newer = replace(newer, name="z", created="9", state=WAITING, held=Amount())
    alone = NamespaceUse(limit, own, tuple(others)).share()
    both = NamespaceUse(limit, own, (*others, newer)).share()

    assert (both.accepted, both.most) == (alone.accepted, alone.most)


@given(claims, st.lists(claims, max_size=5, unique_by=lambda one: one.name), limits)
def test_an_endpoint_does_not_grow_beyond_the_quota(own: Claim, others: list[Claim], limit: Limit) -> None:
    share = NamespaceUse(limit, own, tuple(others)).share()
    whole = share.used.plus(Amount(share.most * own.cores, share.most))

    grows = share.most > max(own.least, min(own.held.replicas, own.held.cores // own.cores))
    assert limit.holds(whole) or not grows


@pytest.mark.parametrize(
    ("labels", "expected"),
    [({"team": "a"}, Limit(4, 8)), ({"team": "b"}, Limit(replicas=8)), ({}, Limit(replicas=8))],
)
def test_the_smallest_numbers_of_the_quotas_that_select_a_namespace_count(
    labels: dict[str, str], expected: Limit
) -> None:
    quotas = [
        NamespaceQuota.model_validate({"namespaceSelector": {"matchLabels": {"team": "a"}}, "cores": 4}),
        NamespaceQuota.model_validate({"namespaceSelector": {"matchLabels": {"team": "a"}}, "cores": 6}),
        NamespaceQuota(replicas=8),
    ]

    assert limit_of(quotas, labels) == expected
    assert limit_of(quotas[:2], {}) is None


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ({}, 1),
        ({"scaling": {"minReplicas": 3, "mode": "Internal"}, "replicas": 7}, 3),
        ({"scaling": {"minReplicas": 0}}, 1),
        ({"scaling": {"minReplicas": 2, "mode": "HPA"}}, 2),
        ({"scaling": {"mode": "External"}, "replicas": 7}, 7),
        ({"scaling": {"mode": "None"}, "replicas": 0}, 0),
        ({"scaling": {"minReplicas": 3}, "suspend": True}, 0),
    ],
)
def test_the_replicas_that_an_endpoint_needs(spec: dict[str, Any], expected: int) -> None:
    assert least_replicas(spec) == expected


@pytest.mark.parametrize(
    ("found", "deleting", "expected"),
    [
        (None, False, WAITING),
        ({"status": "True", "reason": "Valid", "observedGeneration": 1}, False, ACCEPTED),
        ({"status": "True", "reason": "Valid", "observedGeneration": 0}, False, WAITING),
        ({"status": "False", "reason": "QuotaExceeded", "observedGeneration": 1}, False, WAITING),
        ({"status": "False", "reason": "SourceNotAllowed", "observedGeneration": 1}, False, REFUSED),
        ({"status": "True", "reason": "Valid", "observedGeneration": 1}, True, REFUSED),
    ],
)
def test_an_acceptance_counts_for_the_spec_that_was_accepted(
    found: dict[str, Any] | None, deleting: bool, expected: ClaimState
) -> None:
    status = {"conditions": [{"type": "Accepted", **found}]} if found is not None else {}
    value = objects.endpoint("emotion", cores=3, status=status)
    if deleting:
        value["metadata"]["deletionTimestamp"] = "2026-11-21T19:00:00Z"

    assert claim_of(value) == Claim("emotion", "2026-11-21T19:00:00Z", 3, 1, expected)


def accepted(kube: Kube) -> tuple[str, str, str]:
    """Status, reason and message of the condition Accepted."""
    return condition(kube.plan(), "Accepted")


def with_quota(kube: Kube, limit: Limit, *others: Claim) -> Kube:
    """Its namespace has a quota, and other endpoints use it."""
    kube.quota = (limit, others)
    return kube


def test_an_endpoint_over_the_quota_is_refused_before_anything_is_created() -> None:
    kube = with_quota(Kube(), Limit(3, 5), claim("other", 2, state=ACCEPTED))
    made = kube.reconcile()

    status, reason, message = accepted(kube)
    assert (status, reason) == ("False", "QuotaExceeded")
    assert "needs 2 cores and 1 replica." in message
    assert "is 3 cores and 5 replicas, and its other endpoints use 2 cores and 1 replica" in message
    assert "policy.quotas" in message
    assert (made.apply, made.allocation) == ((), None)
    assert made.requeue_seconds is not None


@pytest.mark.parametrize(("ahead", "seconds"), [(0, 15), (9, 15), (10, 30), (1000, 1515)])
def test_those_far_back_among_many_that_wait_are_planned_less_often(ahead: int, seconds: float) -> None:
    """Each plan looks at all endpoints of the namespace: a thousand that all do so every 15 s are too many."""
    others = [claim(f"2026-11-20-{number}") for number in range(ahead)]
    kube = with_quota(Kube(), Limit(1), claim("2025", 1, state=ACCEPTED), claim("2027"), *others)
    kube.endpoint["metadata"]["creationTimestamp"] = "2026-11-21"

    assert kube.reconcile().requeue_seconds == seconds


def test_a_refused_endpoint_is_accepted_as_soon_as_it_fits() -> None:
    kube = with_quota(Kube(), Limit(3), claim("other", 2, state=ACCEPTED))
    kube.reconcile()
    made = with_quota(kube, Limit(3)).reconcile()

    assert accepted(kube)[1] == "Valid"
    assert made.allocation is not None
    assert made.allocation.amount == Amount(2, 1)


def test_a_larger_spec_that_does_not_fit_leaves_what_serves_unchanged() -> None:
    kube = with_quota(Kube(), Limit(3)).optimised()
    before = kube.deployment
    kube.edit(cores=4)
    made = kube.reconcile()

    assert accepted(kube)[1] == "QuotaExceeded"
    assert (made.apply, made.delete, kube.deployment) == ((), (), before)


def test_the_operator_does_not_scale_above_the_quota() -> None:
    kube = with_quota(Kube(), Limit(8), claim("other", 1, 3, state=ACCEPTED)).optimised()
    kube.scale = DesiredScale(4)
    made = kube.reconcile()

    assert kube.deployment["spec"]["replicas"] == 2
    assert made.allocation is not None
    assert (made.allocation.amount, made.allocation.most) == (Amount(4, 2), 2)
    assert made.requeue_seconds is not None
    with_quota(kube, Limit(8)).reconcile()
    assert kube.deployment["spec"]["replicas"] == 4


@pytest.mark.parametrize(
    ("decided", "most", "expected"),
    [(3, None, (1, 10)), (3, 5, (1, 3)), (9, 5, (1, 5)), (0, 5, (1, 1)), (None, 5, (1, 2)), (None, 1, (1, 1))],
)
def test_with_a_quota_the_upper_bound_of_an_hpa_is_the_decided_number(
    decided: int | None, most: int | None, expected: tuple[int, int]
) -> None:
    scaling = Scaling(mode=ScalingMode.HPA, max_replicas=10)
    scale = None if decided is None else DesiredScale(decided)

    assert hpa_bounds(scaling, scale, (), present=2, most=most) == HpaBounds(*expected)


def test_the_bound_of_the_hpa_is_what_the_endpoint_gets() -> None:
    kube = with_quota(Kube(scaling={"mode": "HPA", "maxReplicas": 10}), Limit(8)).optimised()
    kube.scale = DesiredScale(7)
    made = kube.reconcile()

    assert kube.objects["HorizontalPodAutoscaler", kube.name]["spec"]["maxReplicas"] == 4
    assert made.allocation is not None
    assert made.allocation.amount == Amount(8, 4)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('[{"cores": -1}]', r"quotas\[0\]\.cores"),
        ("[{}]", "write cores, replicas or both"),
        ('[{"cores": 1}, {"core": 1}]', r"quotas\[1\]\.core"),
        ("16", "is not a JSON list of rules"),
    ],
)
def test_quotas_that_cannot_be_read_end_the_operator_at_its_start(text: str, problem: str) -> None:
    with pytest.raises(SettingError, match=problem):
        Settings.load({f"{PREFIX}QUOTAS": text})


def test_quotas_are_read_from_the_settings() -> None:
    settings = Settings.load({f"{PREFIX}QUOTAS": '[{"cores": 16, "replicas": 8}]'}).plan_settings()

    assert settings.quotas == (NamespaceQuota(cores=16, replicas=8),)
    assert Settings().plan_settings().quotas == ()
