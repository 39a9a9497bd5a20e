"""Replicas follow the load of a real endpoint, as a real Prometheus measures it; each pod owns its core.

The tests share one endpoint and its pods. Each test establishes the state that it needs, which is quick in this order.
"""

from __future__ import annotations

import http.client
import json
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from penstock.resources.base import API_VERSION
from testbed.daemon import Process
from testbed.kubectl import Kubectl, KubectlError
from tests.charts.helm import NAMESPACE
from tests.endtoend_cluster.installation import (
    CAPACITY_TOKENS,
    WITH_CAPACITY,
    Endpoint,
    Installation,
    Json,
    cpus,
    processes,
    remove_endpoints,
)
from tests.endtoend_cluster.load import constant_load, predict
from tests.endtoend_cluster.prometheus import Prometheus, load_image
from tests.endtoend_cluster.stream import Stream, streaming

pytestmark = pytest.mark.slow

NAME = "busy"
TEXT = " ".join(["river"] * (CAPACITY_TOKENS - 2))
OBJECTIVE_MILLISECONDS = WITH_CAPACITY["objective"]["latency"]["p95Milliseconds"]

CALM, PEAK = 0.25, 0.95
"""Shares of the capacity of one replica within the objective. The autoscaler plans three quarters of it; two replicas
need a core each."""
CLASS, CHEAPER_CLASS = "any", "cheaper-of-tests"
PRICE = 0.08
"""EUR of a core of CLASS for an hour."""
P95_SECONDS = 20
WINDOW_SECONDS = 12


def spec(prometheus: Prometheus) -> Json:
    """What differs from the example."""
    return {
        **WITH_CAPACITY,
        # No pods before the result exists: they would take the cores that it is measured on.
        "optimization": {**WITH_CAPACITY["optimization"], "serveWhileOptimizing": False},
        "scaling": {
            "mode": "Internal",
            "minReplicas": 1,
            "maxReplicas": 2,
            "scaleDownWindowSeconds": WINDOW_SECONDS,
            "metrics": {"prometheus": {"url": prometheus.url}},
        },
    }


@dataclass
class Scene:
    """The endpoint, its load and its Prometheus."""

    endpoint: Endpoint
    prometheus: Prometheus
    stream: Stream
    capacity: float
    """Requests/s that one replica handles within the objective, as the optimisation measured on its core."""

    @property
    def kubectl(self) -> Kubectl:
        return self.endpoint.kubectl

    def load(self, share: float) -> None:
        """From now on send this share of one replica's capacity."""
        self.stream.per_second = share * self.capacity

    def deployment(self) -> Json:
        found: Json = self.kubectl.get("deployment", NAME)
        return found

    def until(self, is_it: Callable[[], object], what: str, *, seconds: float = 600) -> None:
        """Wait until the condition holds. A pod that is starting or ending may not answer."""

        def now(_: Json) -> bool:
            with suppress(OSError, http.client.HTTPException):
                return bool(is_it())
            return False

        self.endpoint.until(now, what, seconds=seconds)

    def last_decision(self) -> Json:
        """The last decision in the endpoint's status."""
        found: Json = self.endpoint.read()["status"].get("scaling", {})
        return found

    def replicas(self) -> tuple[int, int]:
        """Those asked for, and those that are ready."""
        found = self.deployment()
        return found["spec"]["replicas"], found["status"].get("readyReplicas", 0)

    def p95(self) -> float | None:
        """Of the last seconds, in milliseconds, by Prometheus; None while nothing is answered."""
        buckets = f'rate(penstock_request_seconds_bucket{{penstock_dev_endpoint="{NAME}"}}[{P95_SECONDS}s])'
        seconds = self.prometheus.value(f"histogram_quantile(0.95, sum by (le) ({buckets}))")
        return None if seconds is None else seconds * 1000

    def at_peak(self) -> None:
        """Send more load than one replica handles, and wait for two pods that meet the objective."""
        self.watched()
        self.load(PEAK)
        self.until(lambda: self.replicas() == (2, 2), "served by two pods", seconds=600)
        self.until(lambda: (self.p95() or 1e9) <= OBJECTIVE_MILLISECONDS, "within its objective")

    def done_with_all(self) -> None:
        """Wait until all requests so far have been answered."""
        mark = self.stream.mark()
        self.until(lambda: self.stream.all_ended(mark), "done with those who came before")

    def lose_a_process(self) -> tuple[float, float]:
        """Kill the server in a pod, and wait until it serves again; returns the times of the kill and of its end."""
        # Choose one that was not killed yet: the kubelet delays the restart of containers that end repeatedly.
        name = min(self.endpoint.pods(), key=restarts_of)["metadata"]["name"]

        def restarts() -> int:
            return restarts_of(self.kubectl.get("pod", name))

        before = restarts()
        moments = killed(self.kubectl.get("pod", name))
        mark = self.stream.mark()
        self.until(lambda: restarts() > before and self.replicas() == (2, 2), "whole again")
        self.until(lambda: len(self.stream.since(mark)) > 5 * self.stream.per_second, "answering")
        return moments

    @contextmanager
    def gateway(self) -> Iterator[None]:
        """Requests go through the gateway while the block runs."""
        address = self.endpoint.address()
        try:
            self.endpoint.apply(**spec(self.prometheus), gateway={"mode": "Always"})
            self.until(lambda: who_refuses(address) == "gateway", "behind its gateway")
            yield
        finally:
            self.endpoint.apply(**spec(self.prometheus), gateway={"mode": "Never"})
            self.until(lambda: who_refuses(address) == "replica", "without its gateway")

    def watched(self) -> None:
        """A Prometheus runs, and the operator knows the load by it."""
        self.prometheus.start()
        self.until(lambda: self.endpoint.condition("MetricsAvailable").get("status") == "True", "watched")


@pytest.fixture(scope="module")
def scene(
    installation: Installation, shared_kubectl: Kubectl, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Scene]:
    """One optimised replica on its own core, with a low load, scraped by a Prometheus."""
    cluster = installation.cluster
    if cluster.machine is not None:
        load_image(cluster, tmp_path_factory.mktemp("prometheus"))
    prometheus = Prometheus(shared_kubectl)
    prometheus.start()
    endpoint = Endpoint(installation, shared_kubectl, NAME)
    endpoint.apply(**spec(prometheus))
    body = endpoint.until_optimised()
    model = shared_kubectl.get("optimizedmodel", body["status"]["optimizedModel"])
    capacity = model["status"]["result"]["capacity"].get("requestsPerSecond")
    assert capacity, f"no capacity was measured: {model['status']['result']}"
    address = endpoint.address()
    assert predict(address, TEXT).headers["x-compute-tokens"] == str(CAPACITY_TOKENS)
    with streaming(address, TEXT, per_second=CALM * capacity) as stream:
        yield Scene(endpoint, prometheus, stream, capacity)
    prometheus.kill()
    remove_endpoints(shared_kubectl, NAME)


def test_a_load_near_the_objective_gets_a_second_pod_that_restores_the_p95(scene: Scene) -> None:
    scene.watched()
    assert scene.replicas() == (1, 1)

    scene.at_peak()

    # The operator knew the load from Prometheus, and Prometheus the pods from the API server.
    # The decision came while the load still rose: the status at first is less than the peak.
    scene.until(
        lambda: scene.last_decision().get("requestsPerSecond", 0) > 0.5 * scene.capacity,
        "status of the load at its peak",
    )
    assert scene.last_decision()["desired"] == 2
    assert "requests/s" in scene.last_decision()["reason"]
    pods = scene.endpoint.pods()
    up = {pod["metadata"]["name"]: "up" for pod in pods}

    def health() -> dict[str, str]:
        return {target["labels"]["pod"]: target["health"] for target in scene.prometheus.targets()}

    scene.until(lambda: health() == up, "scraped, both pods and no other")
    first, second = (cpus(pod) for pod in pods)
    assert len(first) == len(second) == 1
    assert first != second
    assert scene.stream.failed() == []


@pytest.fixture
def priced(scene: Scene, tmp_path: Path) -> Iterator[Path]:
    """The class of the endpoint has a price, and there is a cheaper one; gives a file with measurements of that."""
    price = {"perCoreHour": PRICE, "currency": "EUR"}
    cheaper = {"price": {**price, "perCoreHour": PRICE / 4}}
    kubectl = scene.kubectl
    kubectl("patch", "hardwareclass", CLASS, "--type=merge", f"--patch={json.dumps({'spec': {'price': price}})}")
    kubectl.apply(
        {"apiVersion": API_VERSION, "kind": "HardwareClass", "metadata": {"name": CHEAPER_CLASS}, "spec": cheaper}
    )
    file = tmp_path / "measurements.yaml"
    point = {"requestsPerSecond": scene.capacity, "p95Milliseconds": OBJECTIVE_MILLISECONDS}
    file.write_text(
        json.dumps({"measurements": [{"hardwareClass": CHEAPER_CLASS, "source": "this test", "points": [point]}]})
    )
    yield file
    kubectl("delete", "hardwareclass", CHEAPER_CLASS)
    kubectl("patch", "hardwareclass", CLASS, "--type=merge", '--patch={"spec": {"price": null}}')


def test_costs_are_in_the_status_and_kubectl_penstock_plan_names_the_cheaper_class(scene: Scene, priced: Path) -> None:
    scene.watched()
    per_million = PRICE / (0.75 * scene.capacity * 3600) * 1e6

    def costs() -> Json:
        found: Json = scene.endpoint.read()["status"]["plan"]
        return found

    scene.until(lambda: costs().get("currency"), "priced")
    plan, (replicas, _) = costs(), scene.replicas()
    assert plan["currency"] == "EUR"
    assert plan["costPerMillion"] == pytest.approx(per_million, rel=1e-3)
    assert plan["costPerMonth"] == pytest.approx(PRICE * 730 * replicas, rel=1e-3)
    heads, row = scene.kubectl("get", "modelendpoint", NAME).splitlines()
    start = heads.index("$/M")
    assert row[start:].split()[0] == f"{plan['costPerMillion']:g}"

    def planned(*more: str) -> str:
        """What it prints. Prometheus needs the rates of a whole minute, and is not always ready on a busy machine."""
        words = ("--prometheus", scene.prometheus.address, "--measurements", str(priced), "--cores=1")
        found: list[subprocess.CompletedProcess[str]] = []

        def is_planned() -> bool:
            found[:] = [kubectl_penstock(scene.kubectl, "plan", NAME, *words, *more)]
            return found[0].returncode == 0 or "Prometheus" not in found[0].stderr

        scene.until(is_planned, "planned", seconds=180)
        assert found[0].returncode == 0, found[0].stderr
        return found[0].stdout

    shown = json.loads(planned("--output=json"))
    load, notes = shown["load"], "\n".join(shown["notes"])
    assert "load of the last week: " in notes
    assert 0 < load["mean_requests_per_second"] <= load["peak_requests_per_second"] < 1.5 * PEAK * scene.capacity
    best = shown["rows"][shown["chosen"]]
    (own,) = (one for one in shown["rows"] if (one["hardware_class"], one["cores"]) == (CLASS, 1))
    assert (shown["currency"], best["hardware_class"]) == ("EUR", CHEAPER_CLASS)
    # Of the results for this model the one that costs least, which may be another endpoint's.
    results = scene.kubectl("get", "optimizedmodels", "--output=name").split()
    basis = own["evidence"]["basis"]
    assert any(basis.startswith(f"OptimizedModel {name.partition('/')[2]}, ") for name in results), (basis, results)
    assert own["figures"]["reserved_per_month"] > best["figures"]["reserved_per_month"]
    cheaper = f"{CHEAPER_CLASS}, 1 core would be cheaper than the endpoint's {CLASS}, 1 core"
    assert f"{cheaper}: EUR " in notes
    assert cheaper in planned()


def kubectl_penstock(kubectl: Kubectl, *words: str, seconds: float = 120) -> subprocess.CompletedProcess[str]:
    """Run `kubectl penstock`. kubectl finds the program of this environment by its name."""
    folders = [Path(sys.executable).parent, kubectl.executable.parent, os.environ["PATH"]]
    settings = {"PATH": os.pathsep.join(map(str, folders)), "KUBECONFIG": str(kubectl.kubeconfig), "COLUMNS": "200"}
    command = [str(kubectl.executable), "penstock", *words, "--namespace", kubectl.namespace]
    return subprocess.run(
        command, env={**os.environ, **settings}, capture_output=True, text=True, timeout=seconds, check=False
    )


def test_a_killed_process_fails_only_the_requests_in_progress(scene: Scene) -> None:
    scene.at_peak()
    mark = scene.stream.mark()

    killed_at, gone_at = scene.lose_a_process()

    ended, failed = scene.stream.since(mark), scene.stream.failed(mark)
    # Requests that found no listening server went to the next replica.
    refused = sum(request.refused > 0 for request in ended)
    print(f"of {len(ended)} requests {len(failed)} were lost with a process, and {refused} first found no server")
    assert [request for request in failed if not request.under_way_during(killed_at, gone_at)] == []
    assert len(failed) < len(ended)


def test_behind_the_gateway_a_killed_process_fails_no_request(scene: Scene) -> None:
    scene.at_peak()
    mark = scene.stream.mark()

    with scene.gateway():
        # Earlier connections lead to a replica directly, and would fail with it.
        scene.done_with_all()
        scene.lose_a_process()

    scene.done_with_all()
    # Interrupted requests were sent again, and no request failed when the gateway was added and removed.
    assert scene.stream.failed(mark) == []
    assert scene.stream.since(mark)


def who_refuses(address: str) -> str:
    """Who answers invalid HTTP: a replica answers in JSON, the gateway by HAProxy's own page."""
    with socket.create_connection((address, 80), timeout=60) as connection:
        connection.sendall(b"nonsense\r\n\r\n")
        with http.client.HTTPResponse(connection) as answer:
            answer.begin()
            return {"application/json": "replica", "text/html": "gateway"}[answer.headers.get_content_type()]


def restarts_of(pod: Json) -> int:
    """How often the server in a pod was restarted."""
    return int(pod["status"]["containerStatuses"][0]["restartCount"])


def killed(pod: Json) -> tuple[float, float]:
    """Kill the server in a pod, as the kernel does when memory runs out; returns the times of the kill and of its end.

    Its connections close before its last event, and accept requests until then.
    """
    found = [process for pid in processes(pod) if (process := Process.of(pid))]
    assert found
    killed_at = time.monotonic()
    for process in found:
        process.end(grace_seconds=0)
    return killed_at, time.monotonic()


def test_without_prometheus_the_number_stays_also_after_the_loss_of_the_leading_operator(
    scene: Scene, installation: Installation
) -> None:
    scene.at_peak()
    generation = scene.deployment()["metadata"]["generation"]

    scene.prometheus.kill()
    scene.load(CALM)
    # That the status has it after a minute is tested without a cluster, in tests/operator/scaling.
    scene.until(lambda: load_known(installation) is False, "unwatched")
    begun = time.monotonic()
    # The next leader knows neither the present load nor the earlier one.
    lost = installation.leader()
    installation.system("delete", "pod", lost, "--grace-period=0", "--force")
    scene.until(
        lambda: installation.leader() != lost and load_known(installation) is False, "looked after by the next operator"
    )
    scene.until(lambda: time.monotonic() - begun > 1.5 * WINDOW_SECONDS, "unwatched for longer than the window")

    # No controller has changed it.
    assert scene.deployment()["metadata"]["generation"] == generation
    assert scene.replicas() == (2, 2)


def load_known(installation: Installation) -> bool | None:
    """Whether the leading operator knows the load, from its metrics; None while its metrics cannot be read."""
    try:
        metrics = installation.system(
            "get", "--raw", f"/api/v1/namespaces/{NAMESPACE}/pods/{installation.leader()}:9090/proxy/metrics"
        )
    except KubectlError:
        return None
    found = re.search(rf'load_known{{model_endpoint="{NAME}".*}} (\S+)', metrics)
    return None if found is None else float(found.group(1)) == 1


def test_scaling_down_after_the_window_fails_no_request(scene: Scene) -> None:
    if scene.replicas() != (2, 2):
        scene.at_peak()
    scene.watched()
    mark = scene.stream.mark()

    with constant_load(scene.endpoint.address(), per_second=4) as kept:
        scene.load(CALM)
        scene.until(lambda: len(pods_of_any_age(scene)) == 1, "down to one pod", seconds=600)

    assert scene.replicas() == (1, 1)
    assert scene.stream.failed(mark) == []
    assert scene.stream.since(mark)
    assert kept.failures == []
    assert kept.answered


def pods_of_any_age(scene: Scene) -> list[Json]:
    """Its pods, and those that finish their last requests."""
    return scene.kubectl.items("pods", f"app.kubernetes.io/name=penstock-runtime,penstock.dev/endpoint={NAME}")
