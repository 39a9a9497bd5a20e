"""Reads of pods that answer with attacks, and pods that only pretend to be the operator's."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Callable
from typing import Any, cast

import pytest

from penstock_operator.cluster.api import POD, ClusterPort
from penstock_operator.cluster.errors import Backoff
from penstock_operator.cluster.informer import Informer
from penstock_operator.cluster.store import ObjectKey, Store
from penstock_operator.control import pod_reports
from penstock_operator.control.cache import ClusterCache
from penstock_operator.control.pod_reports import JobProgressReader, PodInfoReader
from penstock_operator.decide import Metrics, Unknown
from penstock_operator.decide.measurement import PodReading
from penstock_operator.facts import names
from penstock_operator.facts.pods import HostReport, JobReport
from penstock_operator.metrics import REGISTRY
from penstock_operator.process import make_autoscaler
from penstock_operator.scaling.read import gateways, scrape
from penstock_operator.scaling.read.gateways import DemandWatcher
from penstock_operator.scaling.read.prometheus import PrometheusClient, PrometheusSource
from penstock_operator.scaling.read.queries import EndpointPods, Windows
from penstock_operator.scaling.read.scrape import PodAddress, PodScraper
from penstock_operator.scaling.read.target import ScalingTargets
from penstock_operator.settings import LoadSettings, Settings
from testbed.ports import some_free_ports
from tests.operator import objects
from tests.operator.endpoint.kube import Kube, container
from tests.operator.hostile import ATTACKS, MEBIBYTE, Answer, body, hostile_pods
from tests.operator.objects import Json
from tests.operator.running import become_true
from tests.operator.scripted_api import listing, scripted, stream, thing

INFO = {"host": {"cpus_allowed": [1, 2], "cores": {"granted": 1, "pinned": True}}}
KEY = ObjectKey("a", "e")


@pytest.fixture(autouse=True)
def _short_delays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pod_reports, "BACKOFF", Backoff(first_seconds=0.01, limit_seconds=0.02))
    monkeypatch.setattr(gateways, "PAUSE_SECONDS", 0.01)


def cache_with_endpoint() -> ClusterCache:
    """An endpoint with its Deployment and its gateway."""
    cache = ClusterCache(Settings().plan_settings())
    cache.endpoints.put(objects.endpoint("e", scaling={"minReplicas": 0}))
    cache.endpoints_listed = True
    cache.deployments.put(objects.deployment("e"))
    cache.deployments.put(objects.deployment("e-gateway", of="e"))
    for name in ("e", "e-gateway"):
        cache.replica_sets.put(objects.replica_set(name))
    return cache


async def read_info(cache: ClusterCache, port: int, pods: list[Json], until: Callable[[], bool]) -> None:
    """Read /info of these pods until it is so."""
    reader = PodInfoReader(cache, timeout_seconds=30, concurrency=4, port=port)
    task = asyncio.create_task(reader.run())
    for pod in pods:
        cache.pods.put(pod)
    try:
        await become_true(until, task)
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def report(cache: ClusterCache, name: str) -> tuple[HostReport | None, str]:
    return cache.reports.get(f"uid-{name}") or (None, "")


@pytest.mark.parametrize("attack", ATTACKS)
def test_an_attack_on_info_is_a_failed_read_and_the_other_pods_are_read(attack: str) -> None:
    (port,) = some_free_ports(1)
    answers = {("127.0.0.2", port): ATTACKS[attack], ("127.0.0.3", port): body(json.dumps(INFO).encode())}
    cache = cache_with_endpoint()
    pods = [
        objects.runtime_pod("bad", "e", ip="127.0.0.2", node="n"),
        objects.runtime_pod("good", "e", ip="127.0.0.3", node="n"),
    ]
    with hostile_pods(answers) as servers:
        asyncio.run(
            read_info(cache, port, pods, lambda: bool(report(cache, "bad")[1]) and report(cache, "good")[0] is not None)
        )
        assert servers["127.0.0.2", port].sent_bytes < 16 * MEBIBYTE

    found, why = report(cache, "bad")
    assert found is None
    assert why.isprintable()
    assert len(why) < 500


def test_a_defect_of_the_operator_while_it_reads_a_pod_is_a_failed_read_too(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(HostReport, "from_info", broken)
    (port,) = some_free_ports(1)
    cache = cache_with_endpoint()
    pod = objects.runtime_pod("p", "e", ip="127.0.0.2", node="n")
    with hostile_pods({("127.0.0.2", port): body(b"{}")}), caplog.at_level(logging.ERROR):
        asyncio.run(read_info(cache, port, [pod], lambda: bool(report(cache, "p")[1])))

    assert "ZeroDivisionError" in report(cache, "p")[1]
    assert {record.__dict__["event"] for record in caplog.records} == {"PodReadDefect"}


def with_owner(pod: Json, **owner: Any) -> Json:
    (reference,) = pod["metadata"]["ownerReferences"]
    pod["metadata"]["ownerReferences"] = [{**reference, **owner}] if owner else []
    return pod


def with_reference(value: Json, **owner: Any) -> Json:
    value["metadata"]["resourceVersion"] = "9"
    return with_owner(value, **owner)


def in_namespace(namespace: str, pod: Json) -> Json:
    pod["metadata"]["namespace"] = namespace
    return pod


def fake() -> Json:
    return objects.runtime_pod("fake", "e", ip="127.0.0.2", node="n", ready=True)


FORGERIES: dict[str, tuple[Callable[[ClusterCache], object], Callable[[], Json]]] = {
    "labels alone": (lambda _: None, lambda: with_owner(fake())),
    "the name of the ReplicaSet with another uid": (lambda _: None, lambda: with_owner(fake(), uid="uid-guessed")),
    "an owner that is not the controller": (lambda _: None, lambda: with_owner(fake(), controller=False)),
    "another namespace": (lambda _: None, lambda: in_namespace("b", fake())),
    "a ReplicaSet of its own": (
        lambda cache: cache.replica_sets.put(with_reference(objects.replica_set("e"), uid="uid-other")),
        fake,
    ),
    "a Deployment of its own": (
        lambda cache: cache.deployments.put(with_reference(objects.deployment("e"), uid="uid-other")),
        fake,
    ),
    "an endpoint that was deleted": (lambda cache: cache.endpoints.remove(KEY), fake),
    "the ReplicaSet of the gateway": (
        lambda _: None,
        lambda: with_owner(fake(), name="e-gateway-1", uid="uid-e-gateway-1"),
    ),
}
"""What a user makes who may create pods, ReplicaSets and Deployments: a change to the cluster, and the pod."""


@pytest.mark.parametrize("forgery", FORGERIES)
def test_a_pod_with_the_operator_s_labels_that_it_did_not_create_is_not_read_and_not_believed(forgery: str) -> None:
    prepare, make = FORGERIES[forgery]
    (port,) = some_free_ports(1)
    cache = cache_with_endpoint()
    cache.endpoints.put(objects.endpoint("neighbour"))
    cache.deployments.put(objects.deployment("neighbour"))
    cache.replica_sets.put(objects.replica_set("neighbour"))
    prepare(cache)
    own = objects.runtime_pod("own", "neighbour", ip="127.0.0.3", node="n")
    good = body(json.dumps(INFO).encode())
    with hostile_pods({("127.0.0.2", port): good, ("127.0.0.3", port): good}) as servers:
        asyncio.run(read_info(cache, port, [make(), own], lambda: report(cache, "own")[0] is not None))
        assert servers["127.0.0.2", port].connections == 0

    # Even if it were read.
    namespace = make()["metadata"]["namespace"]
    cache.put_report(ObjectKey(namespace, "fake"), "uid-fake", (HostReport(cpus=(1, 2)), ""))
    seen = cache.observe(KEY)
    assert seen is None or seen.pods == ()
    target = ScalingTargets(cache).find(KEY)
    assert target is None or (target.pods, target.ready, target.started) == ((), (), ())
    other = cache.observe(ObjectKey("a", "neighbour"))
    assert other is not None
    assert other.neighbours == ()


def test_a_pod_with_the_labels_of_a_gateway_that_the_operator_did_not_create_is_not_asked() -> None:
    cache = cache_with_endpoint()
    labels = names.gateway_labels("e")
    for name, owner in (("fake", "uid-guessed"), ("own", "uid-e-gateway-1")):
        pod = objects.runtime_pod(name, "e", ip="127.0.0.2", ready=True)
        pod["metadata"]["labels"] = labels
        cache.pods.put(with_owner(pod, name="e-gateway-1", uid=owner))

    target = ScalingTargets(cache).find(KEY)

    assert target is not None
    assert target.gateways == (PodAddress("own", "127.0.0.2"),)
    assert target.gateways_ready == ("own",)


def test_a_new_leader_reads_pods_before_it_has_listed_the_endpoints() -> None:
    cache = cache_with_endpoint()
    cache.endpoints.remove(KEY)
    cache.pods.put(objects.runtime_pod("p", "e", ip="127.0.0.2"))

    assert not cache.is_runtime_pod(ObjectKey("a", "p"))
    cache.endpoints_listed = False
    assert cache.is_runtime_pod(ObjectKey("a", "p"))


@pytest.mark.parametrize("attack", ATTACKS)
@pytest.mark.parametrize("reader", [scrape.parse_metrics, gateways.parse_gateway_metrics])
def test_an_attack_on_metrics_is_a_failed_scrape(attack: str, reader: Any) -> None:
    (port,) = some_free_ports(1)

    async def scraped() -> object:
        async with PodScraper(timeout_seconds=30, concurrency=4, port=port, reader=reader) as scraper:
            return (await scraper.scrape([PodAddress("p", "127.0.0.2")]))["p"]

    with hostile_pods({("127.0.0.2", port): ATTACKS[attack]}) as servers:
        found = asyncio.run(scraped())
        assert servers["127.0.0.2", port].sent_bytes < 16 * MEBIBYTE

    assert isinstance(found, str)
    assert found.isprintable()


@pytest.mark.parametrize(
    ("days", "count", "read"), [(0, 1e9, True), (0, 9e15, False), (30, 1e12, True), (30, 1e14, False)]
)
@pytest.mark.parametrize("name", ["requests_total", "request_seconds_bucket", "request_seconds_count", "tokens_total"])
def test_a_counter_that_no_pod_can_reach_is_a_failed_scrape(days: float, count: float, read: bool, name: str) -> None:
    (port,) = some_free_ports(1)
    counts = {
        'penstock_request_seconds_bucket{le="+Inf"}': 1.0, "penstock_request_seconds_count": 1.0,
        "penstock_in_flight_requests": 1.0, 'penstock_requests_total{code="500"}': 1.0, "penstock_tokens_total": 1.0,
    }  # fmt: skip
    counts |= {series: count for series in counts if series.startswith(f"penstock_{name}")}
    text = "\n".join(f"{series} {value:.0f}" for series, value in counts.items())

    async def scraped() -> object:
        async with PodScraper(timeout_seconds=30, concurrency=4, port=port) as scraper:
            pod = PodAddress("p", "127.0.0.2", time.time() - days * 86_400)
            return (await scraper.scrape([pod]))["p"]

    with hostile_pods({("127.0.0.2", port): body(text.encode())}):
        found = asyncio.run(scraped())

    if read:
        assert isinstance(found, PodReading)
    else:
        assert f"it counts {count:.3g}, more than a pod reaches in {days * 86_400:.0f} s" in str(found)


@pytest.mark.parametrize("attack", ATTACKS)
def test_an_attack_of_a_prometheus_is_a_failed_query(attack: str) -> None:
    (port,) = some_free_ports(1)
    source = PrometheusSource(f"http://127.0.0.2:{port}")

    async def asked() -> Metrics:
        async with PrometheusClient(timeout_seconds=30, concurrency=4) as client:
            pods = EndpointPods("a", "e", ("p",))
            return await client.metrics(source, pods, Windows.of(15.0), objective_seconds=0.02)

    with hostile_pods({("127.0.0.2", port): ATTACKS[attack]}) as servers:
        found = asyncio.run(asked())
        assert servers["127.0.0.2", port].sent_bytes < 32 * MEBIBYTE

    assert isinstance(found.arrivals_fast, Unknown)
    assert found.arrivals_fast.reason.isprintable()


DEMAND_ATTACKS: dict[str, Answer] = {**ATTACKS, "a negative number": body(b"-1"), "no number": body(b"many")}


@pytest.mark.parametrize("attack", DEMAND_ATTACKS)
def test_an_attack_of_a_gateway_on_the_question_for_demand_wakes_nothing_and_the_next_answer_counts(
    attack: str,
) -> None:
    (port,) = some_free_ports(1)
    woken: list[ObjectKey] = []

    async def scenario(until: Callable[[], bool]) -> None:
        async def wake(key: ObjectKey) -> None:
            woken.append(key)

        async with DemandWatcher(wake, port=port) as watcher:
            watcher.watch({KEY: (PodAddress("good", "127.0.0.3"), PodAddress("bad", "127.0.0.2"))})
            await become_true(until)

    answers = {("127.0.0.2", port): DEMAND_ATTACKS[attack], ("127.0.0.3", port): body(b"0\n")}
    with hostile_pods(answers) as servers:
        bad = servers["127.0.0.2", port]
        asyncio.run(scenario(lambda: bad.connections >= 3))
        assert bad.sent_bytes < bad.connections * 16 * MEBIBYTE
    assert woken == []

    with hostile_pods({("127.0.0.2", port): body(b"2\n")}):
        asyncio.run(scenario(lambda: bool(woken)))
    assert woken[0] == KEY


def test_a_defect_while_a_gateway_is_asked_does_not_end_the_questions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock_operator.supervision.BACKOFF", Backoff(first_seconds=0.01, limit_seconds=0.02))
    (port,) = some_free_ports(1)
    calls = 0

    async def scenario() -> None:
        async def wake(_: ObjectKey) -> None:
            nonlocal calls
            calls += 1
            raise ZeroDivisionError

        async with DemandWatcher(wake, port=port) as watcher:
            watcher.watch({KEY: (PodAddress("g", "127.0.0.2"),)})
            await become_true(lambda: calls >= 3)

    with hostile_pods({("127.0.0.2", port): body(b"1\n")}):
        asyncio.run(scenario())


def test_the_autoscaler_goes_on_whatever_its_pods_answer() -> None:
    (port, gateway_port) = some_free_ports(2)
    cache = cache_with_endpoint()
    answers = {("127.0.0.2", gateway_port): ATTACKS["600 MiB"]}
    for number, attack in enumerate(ATTACKS.values(), 3):
        answers[f"127.0.0.{number}", port] = attack
        cache.pods.put(objects.runtime_pod(f"p{number}", "e", ip=f"127.0.0.{number}", ready=True))
    pod = objects.runtime_pod("g", "e", ip="127.0.0.2", ready=True)
    pod["metadata"]["labels"] = names.gateway_labels("e")
    cache.pods.put(with_owner(pod, name="e-gateway-1", uid="uid-e-gateway-1"))
    defects = REGISTRY.get_sample_value

    async def scenario() -> None:
        autoscaler = make_autoscaler(
            cast("ClusterPort", object()), cache, LoadSettings(), pod_port=port, gateway_port=gateway_port
        )
        async with autoscaler:
            for step in range(30):
                await autoscaler.tick(1_800_000_000.0 + 10 * step)

    before = defects("penstock_operator_scaling_errors_total", {"reason": "RecursionError"})
    with hostile_pods(answers):
        asyncio.run(scenario())

    assert defects("penstock_operator_scaling_errors_total", {"reason": "RecursionError"}) == before
    metrics = cache.scales[KEY].metrics
    assert metrics is not None
    assert not metrics.true
    assert metrics.message.isprintable()


PROGRESS = {"done": 7, "of": 23, "stage": "measuring", "message": ""}


def progress_of(cache: ClusterCache) -> JobReport | None:
    return cache.job_reports.get("uid-good")


async def read_progress(cache: ClusterCache, port: int, pods: list[Json], until: Callable[[], bool]) -> None:
    """Read /progress of these pods until it is so."""
    reader = JobProgressReader(cache, interval_seconds=0.01, timeout_seconds=30, concurrency=4, port=port)
    task = asyncio.create_task(reader.run())
    for name in ("bad", "good"):
        cache.models.put(objects.optimized_model(name))
        cache.jobs.put(objects.job(name))
    for pod in pods:
        cache.pods.put(pod)
    try:
        await become_true(until, task)
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


JOB_ATTACKS: dict[str, Answer] = {
    **ATTACKS,
    "a huge number": body(b'{"done": ' + b"9" * 4000 + b', "of": 1}'),
    "a negative number": body(b'{"done": -1, "of": 2}'),
    "a long message": body(json.dumps({**PROGRESS, "message": "x" * 9000}).encode()),
    "a list": body(b"[]"),
    "a baseline without a digest": body(json.dumps({**PROGRESS, "baseline": {"uri": "file:///etc"}}).encode()),
}


@pytest.mark.parametrize("attack", JOB_ATTACKS)
def test_an_attack_on_the_progress_of_a_job_is_a_failed_read_and_the_other_jobs_are_read(attack: str) -> None:
    (port,) = some_free_ports(1)
    answers = {("127.0.0.2", port): JOB_ATTACKS[attack], ("127.0.0.3", port): body(json.dumps(PROGRESS).encode())}
    cache = ClusterCache(Settings().plan_settings())
    pods = [objects.job_pod("bad", "bad", ip="127.0.0.2"), objects.job_pod("good", "good", ip="127.0.0.3")]
    with hostile_pods(answers) as servers:
        bad = servers["127.0.0.2", port]
        asyncio.run(read_progress(cache, port, pods, lambda: len(bad.asked) > 1 and progress_of(cache) is not None))
        assert bad.sent_bytes < 16 * MEBIBYTE * len(bad.asked)

    assert cache.job_reports.get("uid-bad") is None
    report = progress_of(cache)
    assert report is not None
    assert report.progress is not None
    assert report.progress.summary == "7/23"


def test_control_characters_of_a_progress_do_not_reach_a_status() -> None:
    (port,) = some_free_ports(1)
    message = json.dumps({**PROGRESS, "message": "no\x1b[2J\n\x9b\u202e"}).encode()
    cache = ClusterCache(Settings().plan_settings())
    pods = [objects.job_pod("good", "good", ip="127.0.0.3")]
    with hostile_pods({("127.0.0.3", port): body(message)}):
        asyncio.run(read_progress(cache, port, pods, lambda: progress_of(cache) is not None))

    report = progress_of(cache)
    assert report is not None
    assert report.progress is not None
    assert report.progress.message.isprintable()


def test_a_pod_that_no_job_of_the_operator_created_is_not_asked_for_its_progress() -> None:
    (port,) = some_free_ports(1)
    answers = {(ip, port): body(json.dumps(PROGRESS).encode()) for ip in ("127.0.0.2", "127.0.0.3")}
    cache = ClusterCache(Settings().plan_settings())
    fake = with_owner(objects.job_pod("fake", "good", ip="127.0.0.2"), uid="uid-guessed")
    with hostile_pods(answers) as servers:
        pods = [fake, objects.job_pod("good", "good", ip="127.0.0.3")]
        asyncio.run(read_progress(cache, port, pods, lambda: progress_of(cache) is not None))
        assert servers["127.0.0.2", port].asked == []
        assert set(servers["127.0.0.3", port].asked) == {"/progress"}


def test_the_result_of_a_pod_or_job_that_the_operator_did_not_create_does_not_count() -> None:
    cache = ClusterCache(Settings().plan_settings())
    cache.models.put(objects.optimized_model("m"))
    cache.jobs.put(objects.job("m"))
    forged = objects.job("m", 7)
    forged["metadata"]["ownerReferences"][0]["uid"] = "uid-guessed"
    cache.jobs.put(forged)
    cache.pods.put(with_owner(objects.job_pod("fake", "m"), uid="uid-guessed"))

    model = cache.model(ObjectKey("a", "m"))

    assert model is not None
    assert [(job.attempt, job.pod) for job in model.jobs] == [(1, None)]


def test_texts_of_pods_have_no_control_characters_in_a_status() -> None:
    kube = Kube().optimised()
    (name,) = kube.infos
    escape = "\x1b[2J\n\x9b\u202e"
    kube.infos[name]["host"]["cores"] |= {"pinned": False, "findings": [f"shared{escape}"]}
    kube.infos[name]["plan"] = {"summary": f"plan{escape}"}
    waiting = container(restarts=5, waiting=("CreateContainerError", f"no{escape}"))
    kube.pods[name]["status"]["containerStatuses"] = [waiting]

    status = kube.reconcile().status

    assert "shared" in str(status["conditions"])
    assert "no " in status["pods"][0]["reason"]
    texts = [one["message"] for one in status["conditions"]] + [status["pods"][0]["reason"], status["plan"]["summary"]]
    assert all(text.isprintable() for text in texts)


def test_an_object_that_cannot_be_read_does_not_end_the_watch(caplog: pytest.LogCaptureFixture) -> None:
    def distil(value: Json) -> None:
        if value["metadata"]["name"].startswith("bad"):
            raise ZeroDivisionError

    async def scenario() -> set[str]:
        listed = listing(10, thing("bad-1", 1), thing("y", 2))
        changes = stream(
            {"type": "ADDED", "object": thing("bad-2", 11)}, {"type": "ADDED", "object": thing("z", 12)}, end="hang"
        )
        async with scripted(listed, changes) as api, api.port() as port:
            store: Store[None] = Store(POD, distil)
            task = asyncio.create_task(Informer(port, store).run())
            await become_true(lambda: store.get(ObjectKey("a", "z")) is not None, task)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            return {key.name for key in store}

    with caplog.at_level(logging.ERROR):
        assert asyncio.run(scenario()) == {"y", "z"}
    assert [record.__dict__["event"] for record in caplog.records] == ["ObjectSkipped"] * 2
