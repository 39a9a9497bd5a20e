"""The rights of the operator, as data."""

from __future__ import annotations

from penstock_operator.cluster.api import KINDS
from penstock_operator.control.cache import ClusterCache
from penstock_operator.facts.names import FIELD_MANAGER
from penstock_operator.settings import Settings
from tools import operator_rights as rbac

ALL = (*rbac.CLUSTER, *rbac.NAMESPACED, *rbac.SCALERS, *rbac.HPA, *rbac.KEDA, *rbac.GATEWAY_API, *rbac.OWN)


def test_every_kind_that_is_touched_is_granted_and_no_other() -> None:
    # The ClusterRole is bound only.
    assert {grant.kind.name for grant in ALL} - {"ClusterRole"} == set(KINDS)


def test_every_grant_has_a_reason_and_nothing_is_granted_twice() -> None:
    pairs = [(grant.kind.group, grant.resource, verb) for grant in ALL for verb in grant.verbs]

    assert len(pairs) == len(set(pairs))
    assert [grant.resource for grant in ALL if not grant.why.startswith("to ")] == []


def test_no_grant_has_a_wildcard() -> None:
    assert [grant for grant in ALL if "*" in grant.verbs or "deletecollection" in grant.verbs] == []
    assert "secrets" not in {grant.kind.plural for grant in ALL}


def test_every_cached_kind_may_be_listed_and_watched() -> None:
    seen = {grant.kind for grant in ALL if {"list", "watch"} <= set(grant.verbs)}

    assert set(ClusterCache(Settings().plan_settings()).stores) <= seen


def test_rules_are_in_the_form_of_a_role() -> None:
    assert rbac.rules(rbac.OWN) == [
        {"apiGroups": ["coordination.k8s.io"], "resources": ["leases"], "verbs": ["create"]},
        {
            "apiGroups": ["coordination.k8s.io"],
            "resources": ["leases"],
            "verbs": ["get", "update"],
            "resourceNames": ["penstock-operator"],
        },
    ]
    assert FIELD_MANAGER == "penstock-operator"


def test_secrets_are_read_on_request_only_and_by_name() -> None:
    assert [(grant.resource, grant.verbs) for grant in rbac.SECRETS] == [("secrets", ("get",))]


def test_the_only_role_that_may_be_bound_is_that_of_gateways() -> None:
    bound = [grant for grant in ALL if {"bind", "escalate", "impersonate"} & {*grant.verbs}]

    assert [(grant.resource, grant.names) for grant in bound] == [("clusterroles", ("{operator}-gateway",))]
    assert "roles" not in {grant.kind.plural for grant in ALL}
