"""A tick over the caches: which endpoints are decided upon, where their load is read, which Secrets are used."""

from __future__ import annotations

import asyncio
import base64
import json
from pathlib import Path
from typing import Any, cast

import pytest

from penstock_operator.cluster.api import ClusterPort
from penstock_operator.cluster.errors import ClusterError, Forbidden, Unavailable
from penstock_operator.cluster.store import ObjectKey
from penstock_operator.control.cache import ClusterCache
from penstock_operator.decide import Metrics, Value, decide, known
from penstock_operator.facts import names
from penstock_operator.facts.scaling import DesiredScale
from penstock_operator.process import make_autoscaler
from penstock_operator.scaling import loop
from penstock_operator.scaling.loop import Autoscaler
from penstock_operator.scaling.read import sources
from penstock_operator.scaling.read.sources import PrometheusSources
from penstock_operator.scaling.read.target import DEFAULT_OBJECTIVE_SECONDS
from penstock_operator.settings import LoadSettings, Settings
from tests.operator import objects
from tests.operator.scaling.pods import fleet
from tests.operator.scaling.recording_server import RecordingServer, recording

START = 1_700_000_000.0
PROMETHEUS = {"url": "http://127.0.0.1:9", "secretName": "access"}
"""No server listens on that port."""
LOOPBACK = {"prometheus_hosts": ("127.0.0.1:*",), "prometheus_networks": ("127.0.0.0/8",)}
"""Settings that allow the servers of these tests."""
CONSENT = {"penstock.dev/prometheus": "true"}


class Secrets:
    """A cluster of which only Secrets are read."""

    def __init__(self, answer: dict[str, Any] | ClusterError | None) -> None:
        self.answer = answer
        self.asked = 0

    async def get(self, kind: object, name: str, namespace: str = "") -> dict[str, Any] | None:
        assert (str(kind), namespace, name) == ("Secret", "a", "access")
        self.asked += 1
        if isinstance(self.answer, ClusterError):
            raise self.answer
        return self.answer


def secret(*, labels: dict[str, str] | None = None, url: str = "", **data: str) -> dict[str, Any]:
    encoded = {key: base64.b64encode(value.encode()).decode() for key, value in data.items()}
    annotations = {"penstock.dev/prometheus-url": url} if url else {}
    return {"metadata": {"name": "access", "labels": labels or {}, "annotations": annotations}, "data": encoded}


def deployment(name: str, replicas: int) -> dict[str, Any]:
    return {
        "metadata": objects.metadata(
            name, 3, names.runtime_labels(name), generation=1, ownerReferences=objects.controller(name)
        ),
        "spec": {"replicas": replicas, "template": {}},
        "status": {"observedGeneration": 1, "replicas": replicas, "updatedReplicas": replicas},
    }


def cluster_with(replicas: int = 2, settings: LoadSettings | None = None, **spec: Any) -> ClusterCache:
    cache = ClusterCache(Settings(scaling=settings or LoadSettings()).plan_settings())
    cache.endpoints.put(objects.endpoint("e", **spec))
    cache.deployments.put(deployment("e", replicas))
    cache.replica_sets.put(objects.replica_set("e"))
    return cache


async def ticked(port: object, cache: ClusterCache, seconds: float, **settings: Any) -> Autoscaler:
    """Ticks of five seconds."""
    autoscaler = make_autoscaler(cast("ClusterPort", port), cache, LoadSettings(**settings), pod_port=1)
    async with autoscaler:
        for index in range(int(seconds / 5)):
            await autoscaler.tick(START + 5 * index)
    return autoscaler


def scale_of(cache: ClusterCache) -> DesiredScale:
    return cache.scales[ObjectKey("a", "e")]


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (None, "there is no Secret access"),
        (secret(token="t"), "give it the label penstock.dev/prometheus: 'true'"),
        (secret(labels={"penstock.dev/prometheus": "false"}, token="t"), "give it the label"),
        (secret(labels={"penstock.dev/prometheus": "true"}), "none of the keys"),
        (secret(labels=CONSENT, token="t"), "is not for this URL"),
        (secret(labels=CONSENT, token="t", url="http://127.0.0.1:8"), "prometheus-url: http://127.0.0.1:9"),
        (secret(labels=CONSENT, token="t", url="http://127.0.0.1:9/"), "cannot be reached"),
        (Forbidden("no"), "prometheus.secretNames"),
        (Unavailable("away"), "cannot be read"),
    ],
)
def test_a_secret_is_used_only_with_the_consent_label_and_other_problems_are_reported(answer: Any, why: str) -> None:
    cache = cluster_with(settings=LoadSettings(**LOOPBACK), scaling={"metrics": {"prometheus": PROMETHEUS}})
    port = Secrets(answer)

    asyncio.run(ticked(port, cache, 120, **LOOPBACK))

    scale = scale_of(cache)
    assert scale.metrics is not None
    assert (scale.replicas, scale.metrics.true, scale.metrics.reason) == (2, False, "MetricsMissing")
    assert why in scale.metrics.message
    assert port.asked <= 3, "the Secret is not read at every tick"


def test_a_secret_without_a_url_is_reported() -> None:
    cache = cluster_with(scaling={"metrics": {"prometheus": {"secretName": "access"}}})
    asyncio.run(ticked(Secrets(None), cache, 120))
    metrics = scale_of(cache).metrics
    assert metrics is not None
    assert "no url" in metrics.message


def attacked(
    server: RecordingServer, prometheus: dict[str, Any], answer: dict[str, Any] | None = None, **settings: Any
) -> str:
    """The message of MetricsAvailable after two minutes of an endpoint that names `{server}` in some way."""

    async def scenario() -> str:
        async with recording(server):
            place = f"127.0.0.1:{server.port}"
            asked = {key: value.format(server=place) if key == "url" else value for key, value in prometheus.items()}
            chosen = {
                key: value.format(server=place) if isinstance(value, str) else value for key, value in settings.items()
            }
            cache = cluster_with(settings=LoadSettings(**chosen), scaling={"metrics": {"prometheus": asked}})
            await ticked(Secrets(answer), cache, 120, **chosen)
            metrics = scale_of(cache).metrics
            assert metrics is not None
            assert not metrics.true
            return metrics.message

    return asyncio.run(scenario())


def test_no_request_is_sent_to_a_host_that_is_not_allowed() -> None:
    server = RecordingServer()
    message = attacked(server, {"url": "http://{server}/admin"}, prometheus_networks=("127.0.0.0/8",))

    assert server.paths == []
    assert "of the host 127.0.0.1: name one that its setting prometheus_hosts allows" in message


def test_an_allowed_host_on_loopback_gets_no_request() -> None:
    server = RecordingServer()
    message = attacked(server, {"url": "http://{server}"}, prometheus_hosts=("127.0.0.1:*",))

    assert server.paths == []
    assert "cannot be reached" in message


def test_a_secret_is_not_sent_to_another_url_than_its_own() -> None:
    server = RecordingServer()
    answer = secret(labels=CONSENT, token="t", url="https://prometheus.monitoring.svc")
    message = attacked(server, {"url": "http://{server}", "secretName": "access"}, answer, **LOOPBACK)

    assert server.paths == []
    assert "the Secret access is not for this URL: give it the annotation penstock.dev/prometheus-url" in message
    assert "monitoring.svc" not in message


@pytest.mark.parametrize("where", [{}, {"url": "http://{server}"}, {"secretName": "access"}])
def test_queries_of_an_endpoint_are_not_sent_with_the_operators_own_access(
    where: dict[str, str], tmp_path: Path
) -> None:
    server = RecordingServer()
    token = tmp_path / "token"
    token.write_text("of-the-operator")
    stolen = {"requestRate": 'sum(rate(secret_requests_total{namespace="other"}[1m]))'}
    message = attacked(
        server,
        {**where, "queries": stolen},
        secret(labels=CONSENT, token="t"),
        prometheus_url="http://{server}",
        prometheus_token_file=str(token),
        **LOOPBACK,
    )

    assert server.queries == []
    assert "queries need the endpoint's own access: add url and secretName" in message


def test_queries_of_an_endpoint_are_sent_with_its_own_secret() -> None:
    async def scenario() -> RecordingServer:
        async with recording(RecordingServer()) as server:
            url = f"http://127.0.0.1:{server.port}"
            prometheus = {"url": url, "secretName": "access", "queries": {"requestRate": "mine"}}
            cache = cluster_with(settings=LoadSettings(**LOOPBACK), scaling={"metrics": {"prometheus": prometheus}})
            await ticked(Secrets(secret(labels=CONSENT, token="t", url=url)), cache, 60, **LOOPBACK)
        return server

    server = asyncio.run(scenario())
    assert "mine" in server.queries
    assert set(server.credentials) == {"Bearer t"}


def test_the_fallback_scales_up_and_never_down() -> None:
    missing = {"whenMetricsMissing": "Fallback", "fallbackReplicas": 3}
    low, high = cluster_with(2, scaling=missing), cluster_with(4, scaling=missing)
    for cache in (low, high):
        cache.models.put(objects.optimized_model("m"))
        asyncio.run(ticked(Secrets(None), cache, 200))
    # The capacity of a replica is unknown as well: then the number stays in any case.
    assert (scale_of(low).cause, scale_of(high).replicas) == ("NoCapacityCurve", 4)


@pytest.mark.parametrize(
    "spec",
    [
        {"suspend": True},
        {"scaling": {"mode": "None"}},
        {"scaling": {"mode": "External"}},
        {"scaling": {"minReplicas": 2, "maxReplicas": 2}},
        {"scaling": {"mode": "Sometimes"}},
    ],
)
def test_pods_of_endpoints_that_do_not_scale_are_not_scraped(spec: dict[str, Any]) -> None:
    async def scenario() -> tuple[int, ClusterCache]:
        async with fleet() as pods:
            pod = await pods.add("127.0.0.2")
            cache = cluster_with(**spec)
            cache.pods.put(objects.runtime_pod("p", "e", ip="127.0.0.2", ready=True))
            autoscaler = make_autoscaler(cast("ClusterPort", Secrets(None)), cache, LoadSettings(), pod_port=pods.port)
            async with autoscaler:
                await autoscaler.tick(START)
            return pod.scrapes, cache

    scrapes, cache = asyncio.run(scenario())
    assert (scrapes, cache.scales) == (0, {})


def test_a_decision_is_withdrawn_when_another_scaler_scales_or_the_endpoint_is_deleted() -> None:
    async def scenario(end: Any) -> dict[ObjectKey, DesiredScale]:
        cache = cluster_with(2)
        autoscaler = make_autoscaler(cast("ClusterPort", Secrets(None)), cache, LoadSettings(), pod_port=1)
        async with autoscaler:
            for index in range(20):
                await autoscaler.tick(START + 5 * index)
            assert ObjectKey("a", "e") in cache.scales
            end(cache)
            await autoscaler.tick(START + 200)
        assert autoscaler.decisions() == {}
        return cache.scales

    assert asyncio.run(scenario(lambda cache: cache.endpoints.put(objects.endpoint("e", 9, suspend=True)))) == {}
    assert asyncio.run(scenario(lambda cache: cache.endpoints.remove(ObjectKey("a", "e")))) == {}


def test_an_error_of_one_endpoint_does_not_stop_the_decisions_of_others(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    cache = cluster_with(2)
    cache.endpoints.put(objects.endpoint("d"))
    cache.deployments.put(deployment("d", 1))
    find = "penstock_operator.scaling.read.target.scaling_settings"
    from penstock_operator.scaling.read import target

    real = target.scaling_settings

    def broken(endpoint: Any, **more: Any) -> Any:
        if endpoint.name == "d":
            raise ZeroDivisionError
        return real(endpoint, **more)

    monkeypatch.setattr(find, broken)
    asyncio.run(ticked(Secrets(None), cache, 120))

    assert set(cache.scales) == {ObjectKey("a", "e")}
    assert "this is a defect of the operator" in caplog.text


def test_secrets_that_users_name_do_not_fill_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    class Port:
        async def get(self, *_: object) -> None:
            """There is no such Secret."""

    monkeypatch.setattr(sources, "MAX_SECRETS", 3)

    async def scenario() -> int:
        port = cast("ClusterPort", Port())
        known = PrometheusSources(port, cluster_with(), None)
        for number in range(10):
            assert "there is no Secret" in str(await known._access(ObjectKey("a", f"s{number}"), START))
        return len(known._secrets)

    assert asyncio.run(scenario()) <= 3


def test_a_decision_on_an_endpoint_that_was_deleted_meanwhile_is_not_published(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Another endpoint may have its name: it would begin with the replicas of the old one."""
    cache = cluster_with(replicas=2, scaling={"minReplicas": 3, "maxReplicas": 8})

    async def scenario() -> None:
        autoscaler = make_autoscaler(cast("ClusterPort", Secrets(None)), cache, LoadSettings(), pod_port=1)
        scraped = autoscaler._scraped

        async def deleted_while_read(*words: Any) -> Any:
            if words[-1] == START + 60:
                # Nothing is published before the load has been unknown for this long.
                again = objects.endpoint("e", 9, scaling={"minReplicas": 3, "maxReplicas": 8})
                again["metadata"]["uid"] = "another"
                cache.endpoints.put(again)
            return await scraped(*words)

        monkeypatch.setattr(autoscaler, "_scraped", deleted_while_read)
        async with autoscaler:
            for index in range(20):
                await autoscaler.tick(START + 5 * index)

    cache.put_scale(ObjectKey("a", "e"), DesiredScale(7, "of the old one", "Demand"))
    asyncio.run(scenario())
    assert cache.scales == {}


class SlowPrometheus(RecordingServer):
    """Answers as a Prometheus that has seen 3 requests/s for a long time."""

    def answer(self, query: str) -> str:
        if query == "time()":
            return json.dumps({"status": "success", "data": {"resultType": "scalar", "result": [0, str(START)]}})
        values = {"": "3"}
        if query.startswith("sum by (le)"):
            values = {f"{DEFAULT_OBJECTIVE_SECONDS:g}": "2.94", "+Inf": "3"}
        elif query.startswith("timestamp"):
            values = {"": str(START)}
        result = [{"metric": {"pod": "p", "le": bound}, "value": [0, value]} for bound, value in values.items()]
        return json.dumps({"status": "success", "data": {"resultType": "vector", "result": result}})


@pytest.mark.parametrize("readable", [True, False])
def test_the_load_comes_from_the_pods_and_the_latency_from_prometheus_where_both_answer(
    readable: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prometheus shows a rise of the load up to three of its intervals later."""
    seen: list[tuple[float, Metrics]] = []

    def recorded(settings: Any, service: Any, observation: Any, state: Any, now: float) -> Any:
        seen.append((now - START, observation.metrics))
        return decide(settings, service, observation, state, now)

    monkeypatch.setattr(loop, "decide", recorded)

    async def scenario() -> RecordingServer:
        async with recording(SlowPrometheus()) as server, fleet() as pods:
            pod = await pods.add("127.0.0.2")
            pod.status = 200 if readable else 503
            url = {"prometheus": {"url": f"http://127.0.0.1:{server.port}"}}
            settings = LoadSettings(**LOOPBACK, prometheus_interval_seconds=30)
            cache = cluster_with(1, settings=settings, scaling={"metrics": url})
            cache.pods.put(objects.runtime_pod("p", "e", ip="127.0.0.2", ready=True))
            autoscaler = make_autoscaler(cast("ClusterPort", Secrets(None)), cache, settings, pod_port=pods.port)
            async with autoscaler:
                for second in range(0, 60, 2):
                    await autoscaler.tick(START + second)
                    pod.answer(100 if second >= 40 else 6)
        return server

    server = asyncio.run(scenario())
    assert server.queries.count("time()") == 2
    rates = {int(now): round(known(metrics.arrivals_fast) or 0) for now, metrics in seen}
    if readable:
        # The rate of two scrapes is known from the second one on.
        assert rates == {0: 3} | {now: 50 if now > 40 else 3 for now in range(2, 60, 2)}
    else:
        assert rates == {0: 3, 30: 3}
    assert {metrics.good_share for _, metrics in seen} == {Value(0.98)}
