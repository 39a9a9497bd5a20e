"""The Grafana dashboards of the chart: panels and their queries. dev/tools/make_chart.py writes their files."""

from __future__ import annotations

import json

from tools.grafana import Dashboard, Panel, dashboard

OF = "namespace, penstock_dev_endpoint"
"""Labels of serving pods and gateways, as the chart's PodMonitors set them."""
SCALED = "model_endpoint_namespace, model_endpoint"
"""Labels of the operator's metrics of an endpoint."""
ENDPOINT = "{{namespace}}/{{penstock_dev_endpoint}}"
SCALED_ENDPOINT = "{{model_endpoint_namespace}}/{{model_endpoint}}"


def _quantile(quantile: float, metric: str, labels: str, selector: str = "") -> str:
    by = f"le, {labels}" if labels else "le"
    return f"histogram_quantile({quantile}, sum by ({by}) (rate({metric}_bucket{selector}[$__rate_interval])))"


def _mean(metric: str, selector: str = "") -> str:
    rates = (f"sum(rate({metric}_{part}{selector}[$__rate_interval]))" for part in ("sum", "count"))
    return " / ".join(rates)


def _rate(metric: str, labels: str = "", selector: str = "") -> str:
    by = f" by ({labels})" if labels else ""
    return f"sum{by} (rate({metric}{selector}[$__rate_interval]))"


def _replica(metric: str, labels: str, selector: str = "") -> str:
    """A value of the operator, of which each replica may report one."""
    return f"max by ({labels}) (penstock_operator_{metric}{selector})"


def _endpoints(selector: str) -> str:
    return f"sum({_replica('endpoints', 'ready, reason', selector)}) or vector(0)"


PROBES = "/(healthz?|readyz|ping|metrics|info)|/v2/.*/(live|ready)"
"""Routes of probes and scrapes: there are as many as time passes, and 503 is the right answer of a pod that starts."""
_ASKED = f'{{route!~"{PROBES}"}}'
_FAILED = f'{{code=~"5..",route!~"{PROBES}"}}'
_REFUSED = f'{{code="429",route!~"{PROBES}"}}'

FLEET = Dashboard(
    "penstock-fleet",
    "Penstock / Fleet",
    {
        "Now": [
            Panel("Endpoints ready", {"": _endpoints('{ready="True"}')}, kind="stat", width=4),
            Panel("Endpoints not ready", {"": _endpoints('{ready!="True"}')}, kind="stat", width=4),
            Panel("Requests", {"": _rate("penstock_request_seconds_count")}, "reqps", "stat", 4),
            Panel(
                "Share of answers with 5xx",
                {
                    "": f"({_rate('penstock_requests_total', selector=_FAILED)} or vector(0))"
                    f" / {_rate('penstock_requests_total', selector=_ASKED)}"
                },
                "percentunit",
                "stat",
                4,
            ),
            Panel("Pods ready", {"": "sum(penstock_ready)"}, kind="stat", width=4),
            Panel("Cores of serving pods", {"": 'sum(penstock_cores{kind="granted"})'}, kind="stat", width=4),
        ],
        "Endpoints": [
            Panel(
                "Endpoints that are not ready, by reason",
                {"{{reason}}": _replica("endpoints", "reason", '{ready!="True"}')},
                description="docs/reference/conditions.md explains each reason.",
            ),
            Panel("Requests", {ENDPOINT: f"topk(10, {_rate('penstock_request_seconds_count', OF)})"}, "reqps"),
            Panel("p95 latency", {ENDPOINT: f"topk(10, {_quantile(0.95, 'penstock_request_seconds', OF)})"}, "s"),
            Panel(
                "Share of answers with 5xx",
                {
                    ENDPOINT: _rate("penstock_requests_total", OF, _FAILED)
                    + f" / {_rate('penstock_requests_total', OF, _ASKED)}"
                },
                "percentunit",
            ),
            Panel(
                "Share of requests refused for load (429)",
                {
                    ENDPOINT: _rate("penstock_requests_total", OF, _REFUSED)
                    + f" / {_rate('penstock_requests_total', OF, _ASKED)}"
                },
                "percentunit",
            ),
            Panel("Replicas wanted", {SCALED_ENDPOINT: _replica("desired_replicas", SCALED)}),
        ],
        "Hardware": [
            Panel(
                "Replicas slower than measured",
                {SCALED_ENDPOINT: _replica("replica_slow_down", SCALED)},
                description="1: as fast as the capacity curve states. Above 1.5 for long: the node is not what it was.",
            ),
            Panel(
                "Cores that are not pinned",
                {
                    ENDPOINT: f'sum by ({OF}) (penstock_cores{{kind="granted"}}) '
                    f'- sum by ({OF}) (penstock_cores{{kind="pinned"}})'
                },
            ),
            Panel(
                "Time throttled by the CPU quota",
                {ENDPOINT: f"max by ({OF}) (rate(penstock_cpu_throttled_seconds_total[$__rate_interval]))"},
                "percentunit",
            ),
            Panel(
                "Use of quotas",
                {
                    "{{model_endpoint_namespace}} {{resource}}": _replica(
                        "namespace_quota", "model_endpoint_namespace, resource", '{type="used"}'
                    )
                    + " / "
                    + _replica("namespace_quota", "model_endpoint_namespace, resource", '{type="hard"}')
                },
                "percentunit",
            ),
            Panel(
                "What is served",
                {"": f"count by ({OF}, task, recipe, isa, version) (penstock_served_info)"},
                kind="table",
                width=16,
            ),
        ],
    },
)

_THIS = '{namespace="$namespace",penstock_dev_endpoint="$endpoint"}'
_SCALING = '{model_endpoint_namespace="$namespace",model_endpoint="$endpoint"}'


def _this(metric: str, labels: str = "") -> str:
    return _rate(metric, labels, _THIS)


def _with(label: str) -> str:
    """The endpoint's series with one label more."""
    return f"{_THIS[:-1]},{label}}}"


ONE_ENDPOINT = Dashboard(
    "penstock-endpoint",
    "Penstock / Endpoint",
    {
        "Requests": [
            Panel("Requests by status", {"{{code}}": _this("penstock_requests_total", "code")}, "reqps"),
            Panel(
                "Latency",
                {f"p{q * 100:g}": _quantile(q, "penstock_request_seconds", "", _THIS) for q in (0.5, 0.95, 0.99)}
                | {
                    "p95 that the capacity curve predicts": _replica("predicted_p95_milliseconds", SCALED, _SCALING)
                    + " / 1000"
                },
                "s",
            ),
            Panel(
                "Mean time of a request",
                {
                    "queue": _mean("penstock_queue_seconds", _THIS),
                    "tokenise": _mean("penstock_tokenization_seconds", _THIS),
                    "infer": _mean("penstock_inference_seconds", _THIS),
                },
                "s",
                description="The parts of an answered request. A long queue: too few replicas, or too large batches.",
            ),
            Panel("Errors by type", {"{{reason}}": _this("penstock_rejected_total", "reason")}, "reqps"),
            Panel("Requests in flight", {"{{pod}}": f"penstock_in_flight_requests{_THIS}"}),
            Panel("Connections of clients", {"{{pod}}": f"penstock_connections{_THIS}"}),
        ],
        "Work": [
            Panel("Tokens computed per second", {"tokens": _this("penstock_tokens_total")}),
            Panel(
                "Share of padding",
                {
                    "padding": _rate("penstock_batch_tokens_total", "", _with('kind="padding"'))
                    + f" / {_this('penstock_batch_tokens_total')}"
                },
                "percentunit",
            ),
            Panel("Mean rows of a batch", {"rows": _mean("penstock_batch_rows", _THIS)}),
            Panel("Rows that wait", {"{{pod}}": f"penstock_queue_rows{_THIS}"}),
            Panel(
                "Tokens of a request",
                {f"p{q * 100:g}": _quantile(q, "penstock_request_tokens", "", _THIS) for q in (0.5, 0.95)},
            ),
            Panel(
                "Cache hits",
                {
                    "{{cache}}": _rate("penstock_cache_total", "cache", _with('result="hit"'))
                    + f" / {_this('penstock_cache_total', 'cache')}"
                },
                "percentunit",
            ),
        ],
        "Replicas": [
            Panel(
                "Replicas",
                {
                    "ready": f"sum(penstock_ready{_THIS})",
                    "wanted": _replica("desired_replicas", SCALED, _SCALING),
                },
            ),
            Panel(
                "Load and capacity",
                {
                    "load": _replica("demand_requests_per_second", SCALED, _SCALING),
                    "forecast": _replica("forecast_requests_per_second", SCALED, _SCALING),
                    "capacity of one replica": _replica("replica_capacity_requests_per_second", SCALED, _SCALING),
                },
                "reqps",
            ),
            Panel("Cause of the last decision", {"{{cause}}": _replica("scaling_cause", "cause", _SCALING)}),
            Panel("Slower than measured", {"times": _replica("replica_slow_down", SCALED, _SCALING)}),
            Panel(
                "Cores",
                {
                    "granted": "sum(penstock_cores" + _with('kind="granted"') + ")",
                    "pinned": "sum(penstock_cores" + _with('kind="pinned"') + ")",
                },
            ),
            Panel("CPU of the pods", {"{{pod}}": f"rate(process_cpu_seconds_total{_THIS}[$__rate_interval])"}),
            Panel("Memory of the pods", {"{{pod}}": f"process_resident_memory_bytes{_THIS}"}, "bytes"),
            Panel(
                "What is served",
                {"": f"count by (task, recipe, short_recipe, isa, verdict, version) (penstock_served_info{_THIS})"},
                kind="table",
                width=16,
            ),
        ],
        "Gateway": [
            Panel("Requests", {"requests": _this("penstock_gateway_requests_total")}, "reqps"),
            Panel(
                "Requests that wait",
                {
                    "held: no replica runs": f"sum(penstock_gateway_held_requests{_THIS})",
                    "queued: all replicas are busy": f"sum(penstock_gateway_queued_requests{_THIS})",
                },
            ),
            Panel("Refused", {"{{reason}}": _this("penstock_gateway_refused_requests_total", "reason")}, "reqps"),
        ],
    },
    {
        "namespace": "label_values(penstock_ready, namespace)",
        "endpoint": 'label_values(penstock_ready{namespace="$namespace"}, penstock_dev_endpoint)',
    },
)


def _of_recipe(metric: str) -> str:
    """The rate of pods by the recipe that they serve."""
    rates = f"rate({metric}[$__rate_interval])"
    return f"sum by (recipe) ({rates} * on (job, instance) group_left (recipe) penstock_served_info)"


OPTIMISATIONS = Dashboard(
    "penstock-optimisations",
    "Penstock / Optimisations",
    {
        "Now": [
            Panel("Being optimised", {"": _endpoints('{reason="Optimizing"}')}, kind="stat", width=4),
            Panel(
                "Wait for their turn",
                {"": _endpoints('{reason=~"OptimizationQueued|RolloutQueued"}')},
                kind="stat",
                width=4,
                description="maxConcurrentOptimizations and maxConcurrentRollouts of the chart.",
            ),
            Panel("Roll out a result", {"": _endpoints('{reason="RollingOut"}')}, kind="stat", width=4),
            Panel("Results", {"": _replica("objects", "kind", '{kind="OptimizedModel"}')}, kind="stat", width=4),
            Panel("Jobs", {"": _replica("objects", "kind", '{kind="Job"}')}, kind="stat", width=4),
            Panel(
                "Deleted as unused, last day",
                {"": "sum(increase(penstock_operator_optimized_models_deleted_total[1d]))"},
                kind="stat",
                width=4,
            ),
        ],
        "Progress": [
            Panel(
                "Endpoints on their way to a plan",
                {"{{reason}}": _replica("endpoints", "reason", '{reason=~"Optimi.*|Roll.*|Starting|Job.*"}')},
                width=12,
            ),
            Panel(
                "Endpoints without a result, by reason",
                {
                    "{{reason}}": _replica(
                        "endpoints", "reason", '{ready="False",reason!~"Optimi.*|Roll.*|Starting|Job.*|New|Suspended"}'
                    )
                },
                width=12,
                description="docs/reference/conditions.md explains each reason.",
            ),
        ],
        "Results": [
            Panel("Pods by recipe", {"{{recipe}}": "count by (recipe) (penstock_served_info)"}),
            Panel(
                "Pods by verdict of the guard",
                {"{{verdict}}": "count by (verdict) (penstock_served_info)"},
                description="none: the fp32 model, or a plan that was not measured.",
            ),
            Panel("Pods by instruction set", {"{{isa}}": "count by (isa) (penstock_served_info)"}),
            Panel(
                "Mean time of inference by recipe",
                {
                    "{{recipe}}": _of_recipe("penstock_inference_seconds_sum")
                    + f" / {_of_recipe('penstock_inference_seconds_count')}"
                },
                "s",
            ),
            Panel(
                "Slower than measured",
                {SCALED_ENDPOINT: f"topk(10, {_replica('replica_slow_down', SCALED)})"},
                description="The capacity curve of an optimisation is no longer true for these endpoints.",
            ),
            Panel(
                "Jobs that clean the store",
                {"{{outcome}}": "sum by (outcome) (increase(penstock_operator_store_collections_total[1d]))"},
            ),
        ],
    },
)

OPERATOR = Dashboard(
    "penstock-operator",
    "Penstock / Operator",
    {
        "Now": [
            Panel("Leaders", {"": "sum(penstock_operator_leader)"}, kind="stat", width=6),
            Panel("Endpoints", {"": _endpoints("")}, kind="stat", width=6),
            Panel("Waiting to be reconciled", {"": "sum(penstock_operator_queue_depth)"}, kind="stat", width=6),
            Panel(
                "Restarts of parts, last day",
                {"": "sum(increase(penstock_operator_task_restarts_total[1d])) or vector(0)"},
                kind="stat",
                width=6,
                description="Above 0: a defect. The log has a traceback.",
            ),
        ],
        "Reconciles": [
            Panel("Reconciles", {"{{outcome}}": _rate("penstock_operator_reconcile_seconds_count", "outcome")}, "ops"),
            Panel(
                "Time of a reconcile",
                {f"p{q * 100:g}": _quantile(q, "penstock_operator_reconcile_seconds", "") for q in (0.5, 0.9, 0.99)},
                "s",
            ),
            Panel("Errors", {"{{reason}}": _rate("penstock_operator_reconcile_errors_total", "reason")}, "ops"),
            Panel(
                "p90 of the wait for a reconcile",
                {"{{lane}}": _quantile(0.9, "penstock_operator_queue_wait_seconds", "lane")},
                "s",
            ),
            Panel(
                "Writes skipped: nothing would change",
                {"writes": _rate("penstock_operator_writes_skipped_total")},
                "ops",
            ),
            Panel("Objects in the caches", {"{{kind}}": _replica("objects", "kind")}),
        ],
        "API server": [
            Panel(
                "Requests", {"{{verb}} {{code}}": _rate("penstock_operator_api_requests_total", "verb, code")}, "reqps"
            ),
            Panel("p90 latency", {"{{verb}}": _quantile(0.9, "penstock_operator_api_seconds", "verb")}, "s"),
            Panel(
                "Requests that were retried",
                {"{{kind}} {{code}}": _rate("penstock_operator_api_retries_total", "kind, code")},
                "reqps",
            ),
            Panel(
                "Watches restarted",
                {"{{kind}} {{reason}}": _rate("penstock_operator_watch_restarts_total", "kind, reason")},
                "ops",
            ),
            Panel(
                "Events that a resync found missing", {"events": _rate("penstock_operator_events_missed_total")}, "ops"
            ),
            Panel(
                "Seconds since the last sign of progress",
                {"{{what}}": "max by (what) (penstock_operator_silence_seconds)"},
                "s",
            ),
        ],
        "Scaling and probes": [
            Panel(
                "Decisions by cause", {"{{cause}}": _rate("penstock_operator_scaling_decisions_total", "cause")}, "ops"
            ),
            Panel(
                "p90 of the time to read the load",
                {"p90": _quantile(0.9, "penstock_operator_scaling_seconds", "")},
                "s",
            ),
            Panel(
                "Endpoints whose load is not known",
                {"endpoints": f"count({_replica('load_known', SCALED)} == 0) or vector(0)"},
            ),
            Panel(
                "Reads of pods' metrics", {"{{outcome}}": _rate("penstock_operator_scrapes_total", "outcome")}, "ops"
            ),
            Panel("Reads of pods' /info", {"{{outcome}}": _rate("penstock_operator_probes_total", "outcome")}, "ops"),
            Panel(
                "Queries to a Prometheus",
                {"{{outcome}}": _rate("penstock_operator_prometheus_queries_total", "outcome")},
                "ops",
            ),
        ],
    },
)

DASHBOARDS = (FLEET, ONE_ENDPOINT, OPTIMISATIONS, OPERATOR)


def files() -> dict[str, str]:
    """Name of a file -> its text."""
    return {f"{one.name}.json": json.dumps(dashboard(one), indent=1) + "\n" for one in DASHBOARDS}
