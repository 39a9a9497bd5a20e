"""The Grafana dashboards: a real Prometheus has data for every query, and they fit Grafana's published schema."""

from __future__ import annotations

import json
import math
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import dashboard as schema
from prometheus_client import CollectorRegistry, generate_latest

from penstock.manifest import LiveLimits
from penstock.tasks import TaskName
from penstock_operator import metrics
from penstock_operator.cluster.store import ObjectKey
from penstock_operator.collectors import CacheCollector, ScalingCollector
from penstock_operator.control.cache import ClusterCache
from penstock_operator.decide import Decision
from penstock_operator.decide.decision import Cause, DecisionCondition
from penstock_operator.decide.demand import Demand
from penstock_runtime.generation.loop import LoopState
from penstock_runtime.generation.scheduler import PlannedRow, Sequence, Step
from penstock_runtime.host import read_host
from penstock_runtime.serving.metrics import ServerMetrics
from penstock_runtime.serving.shadow import LiveEvidence, ShadowState
from penstock_runtime.serving.status import ServerPhase, ServerStatus
from tests.charts.helm import CHART, NAMESPACE, Helm
from tests.charts.prometheus import Prometheus, Series, running_prometheus
from tests.gateway.rig import running_rig
from tests.operator import objects
from tests.operator.limits.test_quota_use import with_quota
from tests.optimizer.report.sample import sample_manifest

Json = dict[str, Any]
FILES = {path.stem: json.loads(path.read_text()) for path in sorted((CHART / "files/dashboards").glob("*.json"))}
VARIABLES = {"$__rate_interval": "30s", "$namespace": "a", "$endpoint": "e"}
REASONS = (
    ("True", "Serving"),
    ("False", "Optimizing"),
    ("False", "OptimizationQueued"),
    ("False", "RollingOut"),
    ("False", "ModelNotFound"),
)
"""Of the endpoints in the operator's caches."""


def filled_in(query: str) -> str:
    """The query with values for the dashboard's variables."""
    for name, value in VARIABLES.items():
        query = query.replace(name, value)
    return query


@contextmanager
def exposed(exposition: Callable[[], bytes]) -> Iterator[str]:
    """The address of a server whose /metrics answers with this."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = exposition()
            self.send_response(200)
            self.send_header("content-type", "text/plain; version=0.0.4")
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            return

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def of_the_runtime() -> Callable[[], bytes]:
    """The metrics of a server that answers some requests between two scrapes."""
    manifest = sample_manifest()
    host = read_host()
    status = ServerStatus("e", TaskName.TEXT_CLASSIFICATION, ServerPhase.READY, host=host, grant=host.usable_cores())
    status.manifest, status.plan = manifest, manifest.chosen.plan
    found = ServerMetrics(status, objective_p95_milliseconds=20)
    # As if one server had both kinds of tasks: its metrics are those of all panels.
    found.generation.state = lambda: (LoopState(running=1, blocks_in_use=2), 8)
    state = ShadowState(LiveEvidence(LiveLimits(texts=1, divergence=0.1, severe=0.1)))
    found.live_guard = lambda: state
    sequence = Sequence(0, [1], 2)

    def exposition() -> bytes:
        for status in (200, 429, 503):
            found.finished("/predict", status, 0.01, inference=True)
            found.guard.classified("", status)
        found.guard.verdict("pass")
        found.refused("overloaded")
        found.request_tokens.observe(7)
        found.tokens += 7
        for parts in (found.queue_seconds, found.tokenization_seconds, found.inference_seconds):
            parts.observe(0.001)
        found.batch(rows=3, real_tokens=30, padded_tokens=33)
        found.cache("tokens", hit=True)
        found.generation.first_token(0.2)
        found.generation.next_token(0.02)
        found.generation.reused(16)
        found.generation.step(Step((PlannedRow(sequence, 1, samples=True),), 16, preempted=1), 0.02)
        return found.exposition("")[0]

    return exposition


def decision(*, demand: Demand | None) -> Decision:
    condition = DecisionCondition(status=True, reason="Read", message="")
    return Decision(2, Cause.DEMAND, "", 2, demand, 100.0, 1.0, 12.0, condition, condition)


def of_the_operator() -> Callable[[], bytes]:
    """The operator's own metrics, with something in every family."""
    cache: ClusterCache = with_quota()
    for number, (status, reason) in enumerate(REASONS):
        ready = {"type": "Ready", "status": status, "reason": reason, "message": "", "lastTransitionTime": "x"}
        cache.endpoints.put(objects.endpoint(f"e{number}", status={"conditions": [ready]}))
    demand = Demand(now=50.0, forecast=60.0, ahead_seconds=40.0, backlog=0.0)
    decisions = {ObjectKey("a", "e"): decision(demand=demand), ObjectKey("a", "unknown"): decision(demand=None)}
    computed = CollectorRegistry()
    computed.register(CacheCollector(cache, lambda: {"Pod": 3.0}))
    computed.register(ScalingCollector(lambda: decisions))

    def exposition() -> bytes:
        metrics.LEADER.set(1)
        metrics.RECONCILE_SECONDS.labels("ok").observe(0.01)
        metrics.RECONCILE_ERRORS.labels("Forbidden").inc()
        metrics.TASK_RESTARTS.labels("probes").inc()
        metrics.QUEUE_DEPTH.labels("urgent").set(0)
        metrics.QUEUE_WAIT_SECONDS.labels("urgent").observe(0.01)
        metrics.API_REQUESTS.labels("GET", "Pod", "200").inc()
        metrics.API_RETRIES.labels("Pod", "500").inc()
        metrics.API_SECONDS.labels("GET").observe(0.01)
        metrics.WATCH_RESTARTS.labels("Pod", "expired").inc()
        metrics.COLLECTIONS.labels("complete").inc()
        metrics.SCALING_DECISIONS.labels("Demand").inc()
        metrics.SCALING_SECONDS.observe(0.01)
        for counter in (metrics.PROBES, metrics.SCRAPES, metrics.PROMETHEUS_QUERIES):
            counter.labels("ok").inc()
        return generate_latest(metrics.REGISTRY) + generate_latest(computed)

    return exposition


@pytest.fixture(scope="module")
def prometheus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    """A Prometheus that scrapes a runtime, a gateway and an operator, with the labels of the chart's PodMonitors."""
    with ExitStack() as stack:
        rig = stack.enter_context(running_rig())
        rig.start("replica")
        gateway = rig.gateway()
        targets = {
            "runtime": stack.enter_context(exposed(of_the_runtime())),
            "gateway": f"127.0.0.1:{gateway.status_port}",
            "operator": stack.enter_context(exposed(of_the_operator())),
        }
        endpoint = {"namespace": "a", "penstock_dev_endpoint": "e", "pod": "e-1"}
        jobs = [
            {
                "job_name": name,
                "static_configs": [{"targets": [target], "labels": {} if name == "operator" else endpoint}],
            }
            for name, target in targets.items()
        ]
        folder = tmp_path_factory.mktemp("prometheus")
        config = {"global": {"scrape_interval": "1s", "scrape_timeout": "1s"}, "scrape_configs": jobs}
        found = stack.enter_context(running_prometheus(folder, config))
        # A rate needs two scrapes of each target.
        results(found, f"count(sum_over_time(up[1m]) >= 2) == {len(targets)}")
        yield found


def results(prometheus: Prometheus, query: str) -> list[Series]:
    """The series of a query, once there are some: after a scrape that failed there are none for a moment."""
    deadline = time.monotonic() + 60
    while not (found := prometheus.query(query)):
        assert time.monotonic() < deadline, (query, prometheus.get("targets"))
        time.sleep(0.2)
    return found


@pytest.mark.parametrize("name", FILES)
def test_every_query_finds_data_and_every_legend_names_a_label_of_it(name: str, prometheus: Prometheus) -> None:
    targets = [target for panel in FILES[name]["panels"] for target in panel.get("targets", [])]
    assert targets
    for target in targets:
        query = filled_in(target["expr"])
        found = results(prometheus, query.replace(" or vector(0)", ""))
        # The operator's registry has series of earlier tests of this process, too, which get no new values.
        assert any(math.isfinite(float(series["value"][1])) for series in found), query
        for series in found:
            assert set(re.findall(r"{{(\w+)}}", target["legendFormat"])) <= series["metric"].keys(), query


@pytest.mark.parametrize("name", FILES)
def test_the_variables_of_a_dashboard_find_the_endpoint(name: str, prometheus: Prometheus) -> None:
    source, *variables = FILES[name]["templating"]["list"]
    assert source["type"] == "datasource"
    for variable in variables:
        match = re.fullmatch(r"label_values\((.+), (\w+)\)", filled_in(variable["query"]["query"]))
        assert match
        found = results(prometheus, f"count by ({match[2]}) ({match[1]})")
        assert {series["metric"][match[2]] for series in found} == {VARIABLES[f"${variable['name']}"]}


def differences(ours: Any, theirs: Any, path: str = "") -> list[str]:
    """Where a part of the first value is not in the second."""
    if isinstance(ours, dict) and isinstance(theirs, dict):
        return [
            found for name, value in ours.items() for found in differences(value, theirs.get(name), f"{path}.{name}")
        ]
    if isinstance(ours, list) and isinstance(theirs, list) and len(ours) == len(theirs):
        pairs = zip(ours, theirs, strict=True)
        return [found for number, pair in enumerate(pairs) for found in differences(*pair, f"{path}.{number}")]
    return [] if ours == theirs else [f"{path}: {ours!r} became {theirs!r}"]


@pytest.mark.parametrize("name", FILES)
def test_a_dashboard_has_only_fields_of_grafanas_schema(name: str) -> None:
    """The types are generated from the schema that Grafana publishes: what they do not know is lost."""
    loaded = schema.Dashboard.from_json(FILES[name])
    written = json.loads(JSONEncoder().encode(loaded))

    assert differences(FILES[name], written) == []


def test_an_unknown_field_would_be_found() -> None:
    wrong = json.loads(json.dumps(FILES["penstock-fleet"]))
    wrong["panels"][1]["titel"] = "x"
    written = json.loads(JSONEncoder().encode(schema.Dashboard.from_json(wrong)))

    assert differences(wrong, written) == [".panels.1.titel: 'x' became None"]


def test_panels_do_not_overlap_and_have_a_title_and_an_id_of_their_own() -> None:
    assert {*FILES} == {"penstock-fleet", "penstock-endpoint", "penstock-optimisations", "penstock-operator"}
    for value in FILES.values():
        cells: list[tuple[int, int]] = []
        for panel in value["panels"]:
            area = panel["gridPos"]
            assert area["x"] + area["w"] <= 24
            assert panel["title"]
            cells += [
                (area["x"] + column, area["y"] + line) for column in range(area["w"]) for line in range(area["h"])
            ]
        assert len(cells) == len(set(cells))
        assert len({panel["id"] for panel in value["panels"]}) == len(value["panels"])


def test_the_chart_makes_a_config_map_for_each_dashboard_if_the_value_is_set(chart: Helm) -> None:
    def made(**values: Any) -> list[Json]:
        return [one for one in chart.template({"dashboards": values}) if one["kind"] == "ConfigMap"]

    assert made() == []
    maps = made(enabled=True, annotations={"grafana_folder": "Penstock"})
    assert {file: json.loads(text) for one in maps for file, text in one["data"].items()} == {
        f"{name}.json": value for name, value in FILES.items()
    }
    for one in maps:
        assert one["metadata"]["namespace"] == NAMESPACE
        assert one["metadata"]["labels"]["grafana_dashboard"] == "1"
        assert one["metadata"]["annotations"] == {"grafana_folder": "Penstock"}
    elsewhere = made(enabled=True, namespace="monitoring", labels={"dashboards": "yes"})
    assert {one["metadata"]["namespace"] for one in elsewhere} == {"monitoring"}
    assert all(one["metadata"]["labels"]["dashboards"] == "yes" for one in elsewhere)
