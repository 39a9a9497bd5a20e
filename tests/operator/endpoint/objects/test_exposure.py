"""Ingress and HTTPRoute of an endpoint: the objects, and what one tenant must not take from another."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.resources.hardware_class import NamespaceSelector
from penstock_operator.endpoint.objects.exposure import may_use
from penstock_operator.facts.installation import PlanSettings
from penstock_operator.facts.names import Ref
from penstock_operator.facts.routes import HostClaim
from penstock_operator.facts.tenants import AllowList, HostRule
from tests.operator.endpoint.kube import BEGIN, SETTINGS, Kube

HOST = "emotion.a.example.com"
TEAM_A = HostRule(hosts=("*.a.example.com",), namespace_selector=NamespaceSelector(match_labels={"team": "a"}))
TEAM_B = HostRule(hosts=("*.b.example.com",), namespace_selector=NamespaceSelector(match_labels={"team": "b"}))


def settings(**allowed: Any) -> PlanSettings:
    return replace(SETTINGS, allowed=AllowList(**{"hosts": (TEAM_A, TEAM_B), **allowed}))


def kube(exposure: dict[str, Any] | None = None, *, of: PlanSettings | None = None, **spec: Any) -> Kube:
    value = {"host": HOST, "ingress": {}} if exposure is None else exposure
    found = Kube(settings=of or settings(), exposure=value, **spec)
    found.namespace_labels = {"team": "a"}
    found.endpoint["metadata"]["creationTimestamp"] = BEGIN.isoformat()
    return found


def condition(cluster: Kube) -> dict[str, Any]:
    (found,) = [one for one in cluster.endpoint["status"]["conditions"] if one["type"] == "Exposed"]
    return dict(found)


def routes(cluster: Kube) -> list[tuple[str, str]]:
    return [key for key in cluster.objects if key[0] in {"Ingress", "HTTPRoute"}]


def http_route(**fields: Any) -> dict[str, Any]:
    return {"host": HOST, "httpRoute": {"parentRefs": [{"name": "public", "namespace": "gateways"}]}, **fields}


class TestObjects:
    def test_an_ingress_routes_the_host_to_the_service(self) -> None:
        issuer = {"cert-manager.io/cluster-issuer": "letsencrypt"}
        cluster = kube(
            {
                "host": HOST,
                "ingress": {"className": "nginx", "tlsSecretName": "emotion-tls", "annotations": issuer},
            }
        ).optimised()
        cluster.reconcile()
        made = cluster.objects["Ingress", "emotion"]

        assert made["metadata"]["annotations"] == issuer
        assert made["metadata"]["ownerReferences"][0]["uid"] == "uid-endpoint"
        assert made["spec"] == {
            "ingressClassName": "nginx",
            "rules": [
                {
                    "host": HOST,
                    "http": {
                        "paths": [
                            {
                                "path": "/",
                                "pathType": "Prefix",
                                "backend": {"service": {"name": "emotion", "port": {"number": 80}}},
                            }
                        ]
                    },
                }
            ],
            "tls": [{"hosts": [HOST], "secretName": "emotion-tls"}],
        }
        assert cluster.endpoint["status"]["publicUrl"] == f"https://{HOST}"
        assert (condition(cluster)["status"], condition(cluster)["reason"]) == ("True", "Exposed")

    def test_without_a_tls_secret_the_public_url_is_http(self) -> None:
        cluster = kube()
        cluster.reconcile()

        assert cluster.endpoint["status"]["publicUrl"] == f"http://{HOST}"
        assert set(cluster.objects["Ingress", "emotion"]["spec"]) == {"rules"}

    def test_an_http_route_removes_the_prefix(self) -> None:
        cluster = kube(http_route(path="/nlp/emotion"))
        cluster.reconcile()
        (rule,) = cluster.objects["HTTPRoute", "emotion"]["spec"]["rules"]

        assert rule["matches"] == [{"path": {"type": "PathPrefix", "value": "/nlp/emotion"}}]
        assert rule["filters"][0]["urlRewrite"]["path"] == {"type": "ReplacePrefixMatch", "replacePrefixMatch": "/"}
        assert rule["backendRefs"] == [{"name": "emotion", "port": 80}]
        assert cluster.objects["HTTPRoute", "emotion"]["spec"]["parentRefs"] == [
            {"name": "public", "namespace": "gateways"}
        ]
        assert cluster.endpoint["status"]["publicUrl"] == f"https://{HOST}/nlp/emotion"

    def test_the_route_is_deleted_with_the_field_and_replaced_with_its_kind(self) -> None:
        cluster = kube()
        cluster.reconcile()
        assert routes(cluster) == [("Ingress", "emotion")]
        cluster.edit(exposure=http_route())
        cluster.reconcile()
        assert routes(cluster) == [("HTTPRoute", "emotion")]
        del cluster.endpoint["spec"]["exposure"]
        cluster.edit()
        cluster.reconcile()

        assert routes(cluster) == []
        assert "publicUrl" not in cluster.endpoint["status"] or cluster.endpoint["status"]["publicUrl"] == ""
        assert "Exposed" not in {one["type"] for one in cluster.endpoint["status"]["conditions"]}

    def test_the_addresses_of_the_load_balancer_are_shown(self) -> None:
        cluster = kube()
        cluster.reconcile()
        cluster.objects["Ingress", "emotion"]["status"] = {"loadBalancer": {"ingress": [{"ip": "192.0.2.7"}]}}
        cluster.reconcile()

        assert "192.0.2.7" in condition(cluster)["message"]

    def test_a_route_that_every_gateway_refuses_makes_the_endpoint_not_ready(self) -> None:
        cluster = kube(http_route()).optimised()
        cluster.pods_serve()
        cluster.reconcile()
        refused = {"type": "Accepted", "status": "False", "reason": "NotAllowedByListeners", "message": "not allowed"}
        cluster.objects["HTTPRoute", "emotion"]["status"] = {"parents": [{"conditions": [refused]}]}
        cluster.reconcile()

        assert (condition(cluster)["status"], condition(cluster)["reason"]) == ("False", "RouteRefused")
        assert "not allowed" in condition(cluster)["message"]
        assert cluster.endpoint["status"]["reason"] == "RouteRefused"
        assert routes(cluster) == [("HTTPRoute", "emotion")]

    @pytest.mark.parametrize("how", ["not enabled", "not served"])
    def test_without_the_gateway_api_the_condition_is_false_and_the_endpoint_serves(self, how: str) -> None:
        cluster = kube(http_route(), of=replace(settings(), gateway_api=how != "not enabled"))
        cluster.unknown_kinds = {"HTTPRoute"}
        cluster.reconcile()

        assert condition(cluster)["reason"] == "NoGatewayApi"
        assert "spec.exposure.ingress" in condition(cluster)["message"]
        assert routes(cluster) == []
        assert ("Service", "emotion") in cluster.objects

    def test_a_foreign_ingress_with_the_name_is_left_alone(self) -> None:
        cluster = kube()
        cluster.conflicting = {Ref("Ingress", "emotion")}
        cluster.reconcile()

        assert condition(cluster)["reason"] == "NameTaken"
        assert routes(cluster) == []

    def test_a_route_stays_while_a_changed_spec_is_not_accepted(self) -> None:
        cluster = kube()
        cluster.reconcile()
        cluster.edit(hardwareClass="missing")
        cluster.reconcile()

        assert routes(cluster) == [("Ingress", "emotion")]
        assert condition(cluster)["reason"] == "NotAccepted"
        assert cluster.endpoint["status"]["publicUrl"] == f"http://{HOST}"

    def test_a_route_to_the_host_of_an_earlier_spec_does_not_stay_while_the_spec_is_not_accepted(self) -> None:
        """Else another namespace could get the host, and requests for it would reach both."""
        cluster = kube()
        cluster.reconcile()
        cluster.edit(hardwareClass="missing", exposure={"host": "other.a.example.com", "ingress": {}})
        cluster.reconcile()

        assert routes(cluster) == []
        assert not cluster.endpoint["status"].get("publicUrl")


class TestHosts:
    @pytest.mark.parametrize(
        "host", ["emotion.b.example.com", "a.example.com", "evila.example.com", "emotion.a.example.com.evil.org"]
    )
    def test_a_host_that_the_namespace_may_not_use_is_not_routed(self, host: str) -> None:
        cluster = kube({"host": host, "ingress": {}})
        cluster.reconcile()

        assert (condition(cluster)["status"], condition(cluster)["reason"]) == ("False", "HostNotAllowed")
        assert "policy.exposure.hosts" in condition(cluster)["message"]
        assert "*.a.example.com" in condition(cluster)["message"]
        assert "*.b.example.com" not in condition(cluster)["message"]
        assert routes(cluster) == []
        assert ("Service", "emotion") in cluster.objects

    def test_by_default_no_host_is_allowed(self) -> None:
        cluster = kube(of=replace(SETTINGS, allowed=AllowList()))
        cluster.reconcile()

        assert condition(cluster)["reason"] == "HostNotAllowed"
        assert routes(cluster) == []

    def test_the_route_is_deleted_when_the_host_is_no_longer_allowed(self) -> None:
        cluster = kube()
        cluster.reconcile()
        cluster.namespace_labels = {"team": "c"}
        cluster.reconcile()

        assert condition(cluster)["reason"] == "HostNotAllowed"
        assert routes(cluster) == []

    @given(st.text("abc.-*", max_size=20), st.sampled_from(["*.a.b", "a.b", "*.c"]))
    def test_a_pattern_includes_the_names_of_its_domain_only(self, host: str, pattern: str) -> None:
        labels = pattern.removeprefix("*.").split(".")
        parts = host.split(".")
        below = len(parts) > len(labels) and parts[-len(labels) :] == labels

        assert may_use(host, [pattern]) == (below if pattern.startswith("*.") else host == pattern)


class TestAnnotations:
    ATTACKS = (
        "nginx.ingress.kubernetes.io/configuration-snippet",
        "nginx.ingress.kubernetes.io/auth-url",
        "nginx.ingress.kubernetes.io/server-alias",
        "external-dns.alpha.kubernetes.io/hostname",
        "kubernetes.io/ingress.class",
        "traefik.ingress.kubernetes.io/router.middlewares",
    )

    @pytest.mark.parametrize("key", ATTACKS)
    @pytest.mark.parametrize("allowed", [("cert-manager.io/*",), ("*",)], ids=["by default", "where * is allowed"])
    def test_an_annotation_that_configures_the_shared_controller_is_refused(
        self, key: str, allowed: tuple[str, ...]
    ) -> None:
        cluster = kube(
            {"host": HOST, "ingress": {"annotations": {key: "return 200;"}}}, of=settings(ingress_annotations=allowed)
        )
        cluster.reconcile()

        assert (condition(cluster)["status"], condition(cluster)["reason"]) == ("False", "AnnotationNotAllowed")
        assert "policy.exposure.annotations" in condition(cluster)["message"]
        assert routes(cluster) == []

    def test_an_annotation_that_the_administrator_lists_is_written(self) -> None:
        key = "nginx.ingress.kubernetes.io/proxy-body-size"
        cluster = kube({"host": HOST, "ingress": {"annotations": {key: "8m"}}}, of=settings(ingress_annotations=(key,)))
        cluster.reconcile()

        assert cluster.objects["Ingress", "emotion"]["metadata"]["annotations"] == {key: "8m"}


def claim(
    namespace: str = "b", name: str = "rival", path: str = "/", *, routed: float | None = None, created: float = 0.0
) -> HostClaim:
    """Another endpoint with the same host; times are seconds after this one was created."""
    return HostClaim(
        namespace,
        name,
        path,
        None if routed is None else BEGIN + timedelta(seconds=routed),
        BEGIN + timedelta(seconds=created),
    )


class TestSharedHosts:
    def test_a_host_of_another_namespace_is_not_taken_and_the_namespace_is_not_named(self) -> None:
        cluster = kube()
        cluster.host_claims = [claim("secret-project", routed=100.0, created=90.0)]
        cluster.reconcile()

        assert condition(cluster)["reason"] == "HostTaken"
        assert "secret-project" not in condition(cluster)["message"]
        assert "rival" not in condition(cluster)["message"]
        assert routes(cluster) == []

    def test_another_path_of_the_host_of_another_namespace_is_refused_too(self) -> None:
        cluster = kube(http_route(path="/v1"))
        cluster.host_claims = [claim(path="/", routed=100.0, created=90.0)]
        cluster.reconcile()

        assert condition(cluster)["reason"] == "HostTaken"

    def test_the_first_route_is_kept_when_an_older_endpoint_asks_for_its_host_later(self) -> None:
        cluster = kube()
        cluster.reconcile()
        cluster.host_claims = [claim(created=-1000.0)]
        cluster.reconcile()

        assert condition(cluster)["reason"] == "Exposed"
        assert routes(cluster) == [("Ingress", "emotion")]

    def test_an_endpoint_that_changes_its_host_brings_the_age_of_its_old_route_to_no_other_host(self) -> None:
        cluster = kube({"host": "old.a.example.com", "ingress": {}})
        cluster.reconcile()
        cluster.edit(exposure={"host": HOST, "ingress": {}})
        cluster.host_claims = [claim(routed=3600.0, created=3000.0)]
        cluster.reconcile()

        assert condition(cluster)["reason"] == "HostTaken"
        assert routes(cluster) == []

    def test_of_two_that_ask_at_the_same_time_the_older_endpoint_gets_the_host(self) -> None:
        older, younger = kube(), kube()
        older.host_claims = [claim(created=1.0)]
        younger.host_claims = [claim(created=-1.0)]
        older.reconcile()
        younger.reconcile()

        assert condition(older)["reason"] == "Exposed"
        assert condition(younger)["reason"] == "HostTaken"

    def test_paths_of_one_host_are_shared_within_a_namespace(self) -> None:
        cluster = kube(http_route(path="/emotion"))
        cluster.host_claims = [claim("a", "topics", "/topics", routed=-5.0), claim("b", created=-3600.0)]
        cluster.reconcile()
        assert condition(cluster)["reason"] == "Exposed"

        cluster.host_claims.append(claim("a", "sentiment", "/emotion", routed=-5.0))
        cluster.reconcile()

        assert condition(cluster)["reason"] == "HostTaken"
        assert "sentiment" in condition(cluster)["message"]

    @given(
        st.lists(
            st.tuples(
                st.sampled_from("abc"),
                st.sampled_from("xyz"),
                st.sampled_from(["/", "/p"]),
                st.none() | st.floats(-9, 9),
                st.floats(-9, 9),
            ),
            max_size=5,
            unique_by=lambda one: one[:2],
        )
    )
    def test_no_two_namespaces_and_no_two_endpoints_of_one_path_get_a_host(
        self, endpoints: list[tuple[str, str, str, float | None, float]]
    ) -> None:
        """Each endpoint is planned from what the others ask for: at most one namespace is exposed."""
        exposed = []
        claims = [claim(ns, name, path, routed=since, created=at) for ns, name, path, since, at in endpoints]
        for own, (namespace, name, path, since, at) in zip(claims, endpoints, strict=True):
            cluster = kube(http_route(path=path), name=name)
            cluster.endpoint["metadata"] |= {
                "namespace": namespace,
                "creationTimestamp": (BEGIN + timedelta(seconds=at)).isoformat(),
            }
            if since is not None:
                cluster.reconcile()
                cluster.objects["HTTPRoute", name]["metadata"]["creationTimestamp"] = (
                    BEGIN + timedelta(seconds=since)
                ).isoformat()
            cluster.host_claims = [one for one in claims if one is not own]
            cluster.act(cluster.plan())
            if condition(cluster)["status"] == "True":
                exposed.append((namespace, path))

        assert len({namespace for namespace, _ in exposed}) == min(1, len(endpoints))
        assert len(set(exposed)) == len(exposed)


def test_a_time_without_a_creation_is_the_last() -> None:
    """An object of a test or of a dry run."""
    cluster = kube()
    del cluster.endpoint["metadata"]["creationTimestamp"]
    cluster.host_claims = [HostClaim("b", "rival", "/", None, datetime(2026, 1, 1, tzinfo=UTC))]
    cluster.reconcile()

    assert condition(cluster)["reason"] == "HostTaken"
