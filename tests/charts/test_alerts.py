"""The alerts: each fires for what it is about and not otherwise, in the engine of a real Prometheus."""

from __future__ import annotations

import asyncio
import re
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client import generate_latest

from penstock.tasks import TaskName
from penstock_operator.metrics import REGISTRY
from penstock_operator.supervision import supervised
from penstock_runtime.http.api.core.service import ModelService
from penstock_runtime.http.route_table import routes
from penstock_runtime.serving.metrics import ServerMetrics
from penstock_runtime.serving.status import ServerPhase, ServerStatus
from penstock_runtime.settings import Settings
from penstock_runtime.tasks.base import RequestLimits
from testbed.build import binary
from testbed.tools import PROMTOOL
from tests.charts.helm import CHART, Helm, Manifest, of_kind
from tests.charts.prometheus import running_prometheus

ROOT = Path(__file__).parents[2]
FILE = CHART / "files/alerts.yaml"
RULES: dict[str, Manifest] = {
    rule["alert"]: rule for group in yaml.safe_load(FILE.read_text())["groups"] for rule in group["rules"]
}
OF = 'namespace="a",penstock_dev_endpoint="e"'
SCALED = 'model_endpoint_namespace="a",model_endpoint="e"'
PROBES = "/(healthz?|readyz|ping|metrics|info)|/v2/.*/(live|ready)"
"""Routes of probes and scrapes: there are as many as time passes, and 503 is the right answer of a pod that starts."""
BY_STATUS = '{namespace="$namespace",penstock_dev_endpoint="$endpoint"}'
"""The dashboard's panel of all requests by status."""
Series = dict[str, str]
"""Series of promtool: name with labels -> values at each minute, as `0+60x30`."""
CASES: dict[str, tuple[Series, Series]] = {
    "PenstockOperatorDown": (
        {'penstock_operator_leader{pod="a"}': "0x60", 'penstock_operator_leader{pod="b"}': "0x60"},
        {'penstock_operator_leader{pod="a"}': "0x60", 'penstock_operator_leader{pod="b"}': "1x60"},
    ),
    "PenstockReconcilesFail": (
        {'penstock_operator_reconcile_errors_total{reason="Forbidden"}': "0+6x60"},
        {'penstock_operator_reconcile_errors_total{reason="Forbidden"}': "0x20 1x40"},
    ),
    "PenstockReconcilesLate": (
        {
            'penstock_operator_queue_wait_seconds_bucket{lane="urgent",le="10.0"}': "0+10x60",
            'penstock_operator_queue_wait_seconds_bucket{lane="urgent",le="100.0"}': "0+60x60",
            'penstock_operator_queue_wait_seconds_bucket{lane="urgent",le="+Inf"}': "0+60x60",
        },
        {
            'penstock_operator_queue_wait_seconds_bucket{lane="urgent",le="10.0"}': "0+60x60",
            'penstock_operator_queue_wait_seconds_bucket{lane="urgent",le="100.0"}': "0+60x60",
            'penstock_operator_queue_wait_seconds_bucket{lane="urgent",le="+Inf"}': "0+60x60",
        },
    ),
    "PenstockOperatorDefect": (
        {'penstock_operator_task_restarts_total{task="probes"}': "0x50 1x10"},
        {'penstock_operator_task_restarts_total{task="probes"}': "1x60"},
    ),
    "PenstockStoreCollectionFails": (
        {'penstock_operator_store_collections_total{outcome="failed"}': "0x30 1x30"},
        {'penstock_operator_store_collections_total{outcome="complete"}': "0x30 1x30"},
    ),
    "PenstockEndpointsNotReady": (
        {'penstock_operator_endpoints{ready="False",reason="ModelNotFound"}': "2x60"},
        {
            'penstock_operator_endpoints{ready="False",reason="RolloutQueued"}': "2x60",
            'penstock_operator_endpoints{ready="False",reason="CanaryRunning"}': "2x60",
            'penstock_operator_endpoints{ready="True",reason="Serving"}': "2x60",
        },
    ),
    "PenstockSlotsExhausted": (
        {'penstock_operator_endpoints{ready="False",reason="RolloutQueued"}': "2x800"},
        {'penstock_operator_endpoints{ready="False",reason="RolloutQueued"}': "2x700 0x100"},
    ),
    "PenstockEndpointDown": (
        {f'penstock_ready{{{OF},pod="x"}}': "0x60", f'penstock_ready{{{OF},pod="y"}}': "0x60"},
        {f'penstock_ready{{{OF},pod="x"}}': "0x60", f'penstock_ready{{{OF},pod="y"}}': "1x60"},
    ),
    "PenstockServerCrashed": (
        {f'penstock_server_crashes_total{{{OF},pod="x"}}': "_x40 1x20"},
        {f'penstock_server_crashes_total{{{OF},pod="x"}}': "0x5 2x55"},
    ),
    "PenstockRequestsFail": (
        {
            f'penstock_requests_total{{{OF},route="/predict",code="200"}}': "0+80x60",
            f'penstock_requests_total{{{OF},route="/predict",code="503"}}': "0+1x60",
            f'penstock_requests_total{{{OF},route="/readyz",code="200"}}': "0+90x60",
        },
        {
            f'penstock_requests_total{{{OF},route="/predict",code="200"}}': "0+90x60",
            f'penstock_requests_total{{{OF},route="/predict",code="422"}}': "0+90x60",
            f'penstock_requests_total{{{OF},route="/predict",code="500"}}': "0x60",
            f'penstock_requests_total{{{OF},route="/readyz",code="503"}}': "0+90x60",
        },
    ),
    "PenstockRequestsRefused": (
        {
            f'penstock_requests_total{{{OF},route="/predict",code="200"}}': "0+90x60",
            f'penstock_requests_total{{{OF},route="/predict",code="429"}}': "0+10x60",
            f'penstock_requests_total{{{OF},route="/metrics",code="200"}}': "0+900x60",
        },
        {
            f'penstock_requests_total{{{OF},route="/predict",code="200"}}': "0+90x60",
            f'penstock_requests_total{{{OF},route="/predict",code="429"}}': "0+1x60",
        },
    ),
    "PenstockRequestsUnclassified": (
        {
            f'penstock_classifications_total{{{OF},outcome="classified"}}': "0+90x60",
            f'penstock_classifications_total{{{OF},outcome="abstained"}}': "0+8x60",
            f'penstock_classifications_total{{{OF},outcome="refused"}}': "0+2x60",
        },
        {
            f'penstock_classifications_total{{{OF},outcome="classified"}}': "0+1x60",
            f'penstock_classifications_total{{{OF},outcome="refused"}}': "0+40x60",
            f'penstock_classifications_total{{{OF},outcome="late"}}': "0x60",
        },
    ),
    "PenstockGatewayRefuses": (
        {
            f"penstock_gateway_requests_total{{{OF}}}": "0+90x60",
            f'penstock_gateway_refused_requests_total{{{OF},reason="late"}}': "0+10x60",
        },
        {
            f"penstock_gateway_requests_total{{{OF}}}": "0+90x60",
            f'penstock_gateway_refused_requests_total{{{OF},reason="unauthorized"}}': "0+50x60",
        },
    ),
    "PenstockAnswersDiffer": (
        {f'penstock_shadow_evidence_log10{{{OF},arm="answers",pod="x"}}': "0x30 2.1x30"},
        {
            f'penstock_shadow_evidence_log10{{{OF},arm="answers",pod="x"}}': "1.9x60",
            f'penstock_shadow_evidence_log10{{{OF},arm="check",pod="x"}}': "1x60",
        },
    ),
    "PenstockAnswersNotCompared": (
        {f'penstock_shadow_evidence_log10{{{OF},arm="check",pod="x"}}': "0x30 3x30"},
        {f'penstock_shadow_evidence_log10{{{OF},arm="answers",pod="x"}}': "1x60"},
    ),
    "PenstockReplicasSlow": (
        {f"penstock_operator_replica_slow_down{{{SCALED}}}": "2x60"},
        {f"penstock_operator_replica_slow_down{{{SCALED}}}": "1.2x60"},
    ),
    "PenstockLoadUnknown": (
        {f"penstock_operator_load_known{{{SCALED}}}": "0x60"},
        {f"penstock_operator_load_known{{{SCALED}}}": "1x60"},
    ),
    "PenstockCoresThrottled": (
        {f"penstock_cpu_throttled_seconds_total{{{OF}}}": "0+6x60"},
        {f"penstock_cpu_throttled_seconds_total{{{OF}}}": "0+0.6x60"},
    ),
}
"""Series that make an alert fire, and similar ones that do not."""
LEADS: Series = {'penstock_operator_leader{pod="leads"}': "1x800"}


def unit_test(alert: str, series: Series, *, fires: bool) -> Manifest:
    """A test of promtool, at the end of the series."""
    minutes = 800 if alert == "PenstockSlotsExhausted" else 60
    present = series if alert == "PenstockOperatorDown" else {**LEADS, **series}
    return {
        "interval": "1m",
        "input_series": [{"series": name, "values": values} for name, values in present.items()],
        "promql_expr_test": [
            {
                "expr": f'count(ALERTS{{alertname="{alert}",alertstate="firing"}})',
                "eval_time": f"{minutes}m",
                "exp_samples": [{"labels": "{}", "value": 1}] if fires else [],
            },
            {
                "expr": f'count(ALERTS{{alertname!="{alert}",alertstate="firing"}})',
                "eval_time": f"{minutes}m",
                "exp_samples": [],
            },
        ],
    }


def promtool(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([binary(PROMTOOL), *words], capture_output=True, text=True, check=False, timeout=300)


def test_each_alert_fires_for_what_it_is_about_alone_and_not_otherwise(tmp_path: Path) -> None:
    assert CASES.keys() == RULES.keys()
    tests = [
        unit_test(alert, series, fires=fires)
        for alert, pair in CASES.items()
        for series, fires in zip(pair, (True, False), strict=True)
    ]
    file = tmp_path / "tests.yaml"
    file.write_text(yaml.safe_dump({"rule_files": [str(FILE)], "evaluation_interval": "1m", "tests": tests}))

    run = promtool("test", "rules", str(file))

    assert run.returncode == 0, run.stdout + run.stderr


async def _nothing() -> None:
    """A task that ends at once."""


def test_counters_whose_first_event_is_an_alert_begin_with_zero() -> None:
    """`increase` of a series that begins with 1 is 0."""
    asyncio.run(supervised("a task that was just started", _nothing))
    metrics = generate_latest(REGISTRY).decode()

    for name in CASES["PenstockOperatorDefect"][0] | CASES["PenstockStoreCollectionFails"][0]:
        assert re.search(
            rf"^{re.escape(name.replace('probes', 'a task that was just started'))} ", metrics, re.MULTILINE
        )


def test_the_rule_file_passes_the_checks_of_promtool() -> None:
    run = promtool("check", "rules", "--lint=all", "--lint-fatal", str(FILE))

    assert run.returncode == 0, run.stdout + run.stderr


def test_every_metric_of_an_alert_is_one_that_penstock_has() -> None:
    documents = "".join(
        (ROOT / "docs/reference" / name).read_text() for name in ("operator.md", "metrics.md", "gateway.md")
    )
    used = {name for rule in RULES.values() for name in re.findall(r"penstock_(?!dev_)[a-z0-9_]+", rule["expr"])}

    missing = {name for name in used if re.sub(r"_bucket$", "", name) not in documents}

    assert used
    assert missing == set()


def test_shares_of_requests_count_the_routes_of_the_model_and_no_probe() -> None:
    """In every alert and dashboard. A pod that starts answers probes with 503, and nothing is wrong."""
    status = ServerStatus("e", TaskName.FEATURE_EXTRACTION, ServerPhase.READY)
    table = routes(ModelService(status, Settings(), ServerMetrics(status)), RequestLimits())
    model = {route.path for route in table if route.inference}
    probes = {route.path for route in table if route.public and route.method == "GET"} - {"/", "/docs"}

    left_out = {path for path in model | probes | {"/info"} if re.fullmatch(PROBES, path)}

    assert left_out == probes | {"/info"}
    texts = [rule["expr"] for rule in RULES.values()]
    texts += [path.read_text().replace('\\"', '"') for path in (CHART / "files/dashboards").glob("*.json")]
    series = re.findall(r"penstock_requests_total(\{[^}]*\})?\[", "\n".join(texts))
    assert {one for one in series if f'route!~"{PROBES}"' not in one} <= {BY_STATUS}


def test_a_prometheus_evaluates_every_expression(tmp_path: Path) -> None:
    config = {"global": {"evaluation_interval": "1s"}, "rule_files": [str(FILE)]}
    with running_prometheus(tmp_path, config) as prometheus:
        deadline = time.monotonic() + 60
        while True:
            groups = prometheus.get("rules")["groups"]
            found = {rule["name"]: rule["health"] for group in groups for rule in group["rules"]}
            if found and "unknown" not in found.values():
                break
            assert time.monotonic() < deadline, found
            time.sleep(0.1)

    assert found == dict.fromkeys(RULES, "ok")


def test_each_alert_has_a_runbook_that_it_links_to(chart: Helm) -> None:
    page = (ROOT / "docs/how-to/answer-an-alert.md").read_text(encoding="utf-8")
    url = "https://docs.example/answer-an-alert.html"
    values: Manifest = {"alerts": {"enabled": True, "runbookUrl": url, "ruleLabels": {"team": "ml"}}}
    rule = of_kind(chart.template(values), "PrometheusRule")
    made = {one["alert"]: one for group in rule["spec"]["groups"] for one in group["rules"]}

    assert re.findall(r"^## (Penstock\w+)$", page, re.MULTILINE) == list(RULES)
    assert made.keys() == RULES.keys()
    for name, one in made.items():
        assert one["annotations"]["runbook_url"] == f"{url}#{name.lower()}"
        assert one["labels"] == {**RULES[name]["labels"], "team": "ml"}
        assert (one["expr"], one.get("for")) == (RULES[name]["expr"], RULES[name].get("for"))


def test_alerts_are_off_by_default_and_single_ones_can_be_left_out(chart: Helm) -> None:
    def names(**values: Any) -> set[str]:
        made = [one for one in chart.template({"alerts": values}) if one["kind"] == "PrometheusRule"]
        return {rule["alert"] for one in made for group in one["spec"]["groups"] for rule in group["rules"]}

    assert names() == set()
    assert names(enabled=True) == RULES.keys()
    assert names(enabled=True, disabled=["PenstockSlotsExhausted"]) == RULES.keys() - {"PenstockSlotsExhausted"}
    rule = of_kind(chart.template({"alerts": {"enabled": True, "labels": {"release": "prom"}}}), "PrometheusRule")
    assert rule["metadata"]["labels"]["release"] == "prom"
    assert "runbook_url" not in str(rule)
    with pytest.raises(AssertionError, match="PenstockNoSuchAlert is not an alert"):
        names(enabled=True, disabled=["PenstockNoSuchAlert"])
