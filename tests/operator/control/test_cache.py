"""The snapshot of an endpoint from the cluster cache."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from penstock_operator.cluster.store import ObjectKey
from penstock_operator.control.cache import ClusterCache
from penstock_operator.control.unused_models import is_awaited
from penstock_operator.endpoint.optimization.model import OWNERS, wanted_name
from penstock_operator.endpoint.snapshot import EndpointSnapshot
from penstock_operator.endpoint.spec import ParsedEndpoint
from penstock_operator.facts.names import Ref
from penstock_operator.facts.pods import HostReport, JobProgress, JobReport
from penstock_operator.policy_settings import PolicySettings
from penstock_operator.settings import Settings
from tests.operator import objects
from tests.operator.objects import Json

KEY = ObjectKey("a", "emotion")


def texts(text: str, version: int = 1) -> Json:
    return {"metadata": objects.metadata("texts", version, {}), "data": {"t": text}}


@pytest.fixture
def cache() -> ClusterCache:
    found = ClusterCache(Settings().plan_settings())
    status = {"optimizedModel": "new", "plan": {"optimizedModel": "old"}}
    found.endpoints.put(objects.endpoint("emotion", status=status))
    return found


def seen(cache: ClusterCache) -> EndpointSnapshot:
    observed = cache.observe(KEY)
    assert observed is not None
    return observed


def test_an_unknown_endpoint_is_none(cache: ClusterCache) -> None:
    assert cache.observe(ObjectKey("a", "other")) is None
    assert cache.observe(ObjectKey("b", "emotion")) is None


def test_the_model_of_the_spec_and_the_one_that_serves_are_both_seen(cache: ClusterCache) -> None:
    wanted = wanted_name(ParsedEndpoint.from_object(objects.endpoint("emotion")).spec, cache.settings, None)
    for name in ("new", "old", wanted, "strange"):
        cache.models.put(objects.optimized_model(name))

    assert {model.name for model in seen(cache).optimized_models} == {"new", "old", wanted}


def test_the_models_that_have_a_pinned_artefact_are_seen_and_no_others(cache: ClusterCache) -> None:
    digest = f"sha256:{'e' * 64}"
    cache.endpoints.put(objects.endpoint("emotion", 2, optimization={"mode": "Pinned", "artefact": digest}))
    for name, status in {
        "result": {"artefact": {"digest": digest}},
        "graph": {"baseline": {"digest": digest}},
        "other": {"artefact": {"digest": f"sha256:{'f' * 64}"}},
    }.items():
        cache.models.put(objects.optimized_model(name, status=status))
    foreign = objects.optimized_model("foreign", status={"artefact": {"digest": digest}})
    foreign["metadata"]["namespace"] = "b"
    cache.models.put(foreign)

    assert {model.name for model in seen(cache).optimized_models} == {"result", "graph"}


def test_a_job_comes_with_its_newest_pod_and_that_pods_report(cache: ClusterCache) -> None:
    cache.models.put(objects.optimized_model("new"))
    cache.jobs.put(objects.job("new", 2))
    cache.jobs.put(objects.job("new", 1, version=2))
    evicted = objects.job_pod("p-old", "new", 2)
    evicted["metadata"]["creationTimestamp"] = "2026-11-21T18:00:00Z"
    cache.pods.put(evicted)
    cache.pods.put(objects.job_pod("p-new", "new", 2))
    report = JobReport(JobProgress(7, 23))
    cache.put_job_report(ObjectKey("a", "p-new"), "uid-p-new", report)

    (model,) = seen(cache).optimized_models

    assert [job.attempt for job in model.jobs] == [1, 2]
    assert model.jobs[0].pod is None
    assert model.jobs[1].pod is not None
    assert model.jobs[1].pod.name == "p-new"
    assert model.jobs[1].report == report


def test_pods_come_with_their_reports_and_neighbours_are_those_on_the_same_node(cache: ClusterCache) -> None:
    for name in ("emotion", "other"):
        cache.endpoints.put(objects.endpoint(name, 2))
        cache.deployments.put(objects.deployment(name))
        cache.replica_sets.put(objects.replica_set(name))
    cache.pods.put(objects.runtime_pod("mine", "emotion", ip="10.0.0.1", node="n1"))
    cache.pods.put(objects.runtime_pod("theirs", "other", ip="10.0.0.2", node="n1"))
    cache.pods.put(objects.runtime_pod("far", "other", ip="10.0.0.3", node="n2"))
    cache.put_report(ObjectKey("a", "mine"), "uid-mine", (HostReport(cpus=(1,)), ""))
    cache.put_report(ObjectKey("a", "theirs"), "uid-theirs", (HostReport(cpus=(2, 3)), ""))

    observed = seen(cache)

    assert [(pod.pod.name, pod.report and pod.report.cpus) for pod in observed.pods] == [("mine", (1,))]
    assert [(neighbour.name, neighbour.cpus) for neighbour in observed.neighbours] == [("theirs", (2, 3))]


def test_present_objects_are_listed_by_kind_and_name(cache: ClusterCache) -> None:
    labels = {"penstock.dev/endpoint": "emotion"}
    cache.services.put({"metadata": objects.metadata("emotion", 1, labels)})
    cache.policies.put({"metadata": objects.metadata("someone-else", 1, {"penstock.dev/endpoint": "x"})})
    cache.models.put(objects.optimized_model("new"))
    cache.jobs.put(objects.job("new", 1))

    assert seen(cache).present == {Ref("Service", "emotion"), Ref("OptimizedModel", "new"), Ref("Job", "new-1")}


def test_a_nodes_heartbeat_is_not_a_change(cache: ClusterCache) -> None:
    def node(version: int, heartbeat: str, ready: str = "True") -> Json:
        return {
            "metadata": {"name": "n", "resourceVersion": str(version), "uid": "u", "generation": 1},
            "status": {
                "allocatable": {"cpu": "4"},
                "images": [heartbeat],
                "conditions": [{"type": "Ready", "status": ready, "lastHeartbeatTime": heartbeat}],
            },
        }

    assert cache.nodes.put(node(1, "19:00"))
    assert cache.nodes.put(node(2, "19:05")) is False
    assert cache.nodes.put(node(3, "19:10", ready="Unknown"))


def test_the_number_of_users_of_a_model_in_a_plan_is_bounded(cache: ClusterCache) -> None:
    cache.models.put(objects.optimized_model("new"))
    for number in range(100):
        cache.endpoints.put(objects.endpoint(f"e{number:03}", status={"optimizedModel": "new"}))

    (model,) = seen(cache).optimized_models

    assert len(model.users) == OWNERS
    assert len(cache.users("a", "new")) == 101


def test_a_ready_endpoint_does_not_wait_for_nodes(cache: ClusterCache) -> None:
    assert [key for key, _ in cache.endpoints.of(("unready",))] == [KEY]

    ready = {"conditions": [{"type": "Ready", "status": "True"}]}
    cache.endpoints.put(objects.endpoint("emotion", 2, status=ready))

    assert cache.endpoints.of(("unready",)) == []


def test_an_unchanged_report_calls_no_listener(cache: ClusterCache) -> None:
    changes: list[object] = []
    cache.listen_reports(changes.append)
    cache.pods.put(objects.runtime_pod("mine", "emotion", ip="10.0.0.1", node="n1"))

    for _ in range(2):
        cache.put_report(ObjectKey("a", "mine"), "uid-mine", (None, "is not up yet"))

    assert changes == [(("endpoint", "a", "emotion"), ("node", "n1"))]


def test_texts_are_those_of_the_config_map_once_it_was_read(cache: ClusterCache) -> None:
    source = {"workload": {"textsFrom": {"configMapName": "texts", "key": "t"}}}
    cache.endpoints.put(objects.endpoint("emotion", 2, **source))
    before = seen(cache).workload_texts
    assert cache.put_texts(ObjectKey("a", "texts"), texts("one\n\ntwo\n"))

    assert before is None
    assert seen(cache).workload_texts == ("one", "two")


def test_texts_changed_during_a_read_are_read_again(cache: ClusterCache) -> None:
    source = {"workload": {"textsFrom": {"configMapName": "texts", "key": "t"}}}
    cache.endpoints.put(objects.endpoint("emotion", 2, **source))
    place = ObjectKey("a", "texts")
    cache.put_texts(place, texts("one"))
    cache.text_sources.put(texts("", 3))

    assert cache.put_texts(place, texts("two", 2)) is False
    assert cache.put_texts(place, texts("three", 3)) is True
    assert seen(cache).workload_texts == ("three",)


def test_a_config_map_that_no_endpoint_names_is_ignored(cache: ClusterCache) -> None:
    assert cache.text_sources.put(texts("one")) is False
    assert len(cache.text_sources) == 0


def test_endpoints_and_models_of_ignored_namespaces_are_not_seen() -> None:
    cache = ClusterCache(replace(Settings().plan_settings(), ignored_namespaces=frozenset({"a"})))

    assert not cache.endpoints.put(objects.endpoint("emotion"))
    assert not cache.models.put(objects.optimized_model("emotion"))
    assert cache.observe(KEY) is None


HOST = "emotion.example.com"


def ingress(name: str, version: int = 2, *, namespace: str = "a", owner: str = "", host: str = HOST) -> Json:
    metadata = objects.metadata(name, version, {"penstock.dev/endpoint": name}, namespace=namespace)
    metadata["ownerReferences"] = objects.controller(owner or name)
    return {"metadata": metadata, "spec": {"rules": [{"host": host}]}}


def exposed(name: str, version: int = 2, *, namespace: str = "a", host: str = HOST) -> Json:
    value = objects.endpoint(name, version, exposure={"host": host, "ingress": {}})
    value["metadata"]["namespace"] = namespace
    return value


@pytest.fixture
def shared() -> ClusterCache:
    """All namespaces but `outside` may use the host."""
    selector = {"matchExpressions": [{"key": "closed", "operator": "DoesNotExist"}]}
    rule = json.dumps([{"hosts": ["*.example.com"], "namespaceSelector": selector}])
    found = ClusterCache(Settings(policy=PolicySettings(exposure_hosts=rule)).plan_settings())
    outside = objects.metadata("outside", 1, {"closed": "yes"})
    del outside["namespace"]
    found.namespaces.put({"metadata": outside})
    found.endpoints.put(exposed("emotion"))
    return found


def test_the_other_endpoints_with_the_host_are_seen_if_they_may_use_it(shared: ClusterCache) -> None:
    for name, namespace, host in (
        ("rival", "b", HOST),
        ("elsewhere", "b", "other.example.com"),
        ("rival", "outside", HOST),
    ):
        shared.endpoints.put(exposed(name, namespace=namespace, host=host))
    shared.ingresses.put(ingress("rival", namespace="b"))

    (claim,) = seen(shared).host_claims
    assert (claim.namespace, claim.name, claim.path) == ("b", "rival", "/")
    assert claim.routed_since is not None


def test_an_ingress_that_the_operator_did_not_create_holds_no_host(shared: ClusterCache) -> None:
    shared.endpoints.put(exposed("rival", namespace="b"))
    shared.ingresses.put(ingress("rival", namespace="b", owner="something-else"))
    shared.ingresses.put(ingress("emotion", owner="something-else"))

    assert [claim.routed_since for claim in seen(shared).host_claims] == [None]
    assert seen(shared).route is None


def test_an_ingress_for_another_host_holds_not_this_one(shared: ClusterCache) -> None:
    shared.endpoints.put(exposed("rival", namespace="b"))
    shared.ingresses.put(ingress("rival", namespace="b", host="before.example.com"))

    assert [claim.routed_since for claim in seen(shared).host_claims] == [None]


def test_an_endpoint_that_still_has_a_route_to_the_host_is_seen(shared: ClusterCache) -> None:
    shared.endpoints.put(exposed("rival", namespace="b", host="after.example.com"))
    shared.ingresses.put(ingress("rival", namespace="b"))

    assert [claim.routed_since is not None for claim in seen(shared).host_claims] == [True]


def test_the_route_of_the_endpoint_is_seen(shared: ClusterCache) -> None:
    shared.ingresses.put(ingress("emotion"))

    route = seen(shared).route
    assert route is not None
    assert (route.kind, route.host) == ("Ingress", HOST)
    assert Ref("Ingress", "emotion") in seen(shared).present


PLANNED: Json = {"observedGeneration": 1}


@pytest.mark.parametrize(
    ("endpoints", "owners", "expected"),
    [
        ({}, [], False),
        ({"one": PLANNED, "two": PLANNED}, [], False),
        ({"one": PLANNED, "two": {}}, [], True),
        ({"one": PLANNED, "two": {"observedGeneration": 0}}, [], True),
        # Another endpoint of the namespace does not count where the owners are known.
        ({"one": PLANNED, "two": {}}, ["one"], False),
        ({"one": PLANNED, "two": {}}, ["two"], True),
        ({}, ["gone"], False),
    ],
)
def test_an_optimized_model_is_awaited_while_an_endpoint_that_may_use_it_has_no_status_of_its_spec(
    endpoints: dict[str, Json], owners: list[str], expected: bool
) -> None:
    found = ClusterCache(Settings().plan_settings())
    value = objects.optimized_model("m")
    value["metadata"]["ownerReferences"] = [{"name": name, "uid": f"uid-{name}"} for name in owners]
    found.models.put(value)
    for name, status in endpoints.items():
        found.endpoints.put(objects.endpoint(name, status=status))

    assert is_awaited(found, ObjectKey("a", "m")) is expected


def test_an_endpoint_that_is_being_deleted_awaits_nothing() -> None:
    found = ClusterCache(Settings().plan_settings())
    found.models.put(objects.optimized_model("m"))
    ends = objects.endpoint("ends")
    ends["metadata"]["deletionTimestamp"] = "2026-11-21T20:00:00Z"
    found.endpoints.put(ends)

    assert not is_awaited(found, ObjectKey("a", "m"))
