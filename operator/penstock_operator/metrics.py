"""The operator's metrics. docs/reference/operator.md lists them from this module."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

REGISTRY = CollectorRegistry()
PREFIX = "penstock_operator_"

RECONCILE_SECONDS = Histogram(
    f"{PREFIX}reconcile_seconds",
    "Time of one reconcile: reading the caches, planning, and calls to the API server",
    ["outcome"],
    registry=REGISTRY,
    buckets=(0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0),
)
RECONCILE_ERRORS = Counter(
    f"{PREFIX}reconcile_errors_total", "Reconciles that failed and are retried", ["reason"], registry=REGISTRY
)
TASK_RESTARTS = Counter(
    f"{PREFIX}task_restarts_total",
    "Tasks of the leader that failed by a defect of the operator and were started again",
    ["task"],
    registry=REGISTRY,
)
QUEUE_DEPTH = Gauge(f"{PREFIX}queue_depth", "Endpoints that are waiting to be reconciled", ["lane"], registry=REGISTRY)
QUEUE_WAIT_SECONDS = Histogram(
    f"{PREFIX}queue_wait_seconds",
    "Time from an event to the start of its reconcile",
    ["lane"],
    registry=REGISTRY,
    buckets=(0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0),
)
LEADER = Gauge(f"{PREFIX}leader", "1 while this replica holds the lease", registry=REGISTRY)
API_REQUESTS = Counter(
    f"{PREFIX}api_requests_total", "Requests to the API server", ["verb", "kind", "code"], registry=REGISTRY
)
API_RETRIES = Counter(
    f"{PREFIX}api_retries_total", "Requests to the API server that were retried", ["kind", "code"], registry=REGISTRY
)
API_SECONDS = Histogram(
    f"{PREFIX}api_seconds",
    "Time until the API server's response headers",
    ["verb"],
    registry=REGISTRY,
    buckets=(0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0),
)
WATCH_RESTARTS = Counter(
    f"{PREFIX}watch_restarts_total",
    "Watches that were restarted after an error, by reason",
    ["kind", "reason"],
    registry=REGISTRY,
)
OBJECTS_SKIPPED = Counter(
    f"{PREFIX}objects_skipped_total", "Objects of a watch that could not be read", ["kind"], registry=REGISTRY
)
WRITES_SKIPPED = Counter(
    f"{PREFIX}writes_skipped_total", "Applies that were skipped because nothing would change", registry=REGISTRY
)
PROBES = Counter(f"{PREFIX}probes_total", "Reads of /info of runtime pods", ["outcome"], registry=REGISTRY)
MISSED = Counter(
    f"{PREFIX}events_missed_total",
    "ModelEndpoints, OptimizedModels and HardwareClasses that a resync found to differ from the watch",
    registry=REGISTRY,
)
COLLECTED = Counter(f"{PREFIX}optimized_models_deleted_total", "OptimizedModels deleted as unused", registry=REGISTRY)
COLLECTIONS = Counter(
    f"{PREFIX}store_collections_total",
    "Jobs that remove unreferenced artefacts from the store: begun, complete, failed",
    ["outcome"],
    registry=REGISTRY,
)
for _outcome in ("begun", "complete", "failed"):
    # An alert is about the increase, and a series that begins with 1 has none.
    COLLECTIONS.labels(_outcome)
SCRAPES = Counter(f"{PREFIX}scrapes_total", "Reads of /metrics of runtime pods", ["outcome"], registry=REGISTRY)
PROMETHEUS_QUERIES = Counter(
    f"{PREFIX}prometheus_queries_total", "Queries to a Prometheus about the load", ["outcome"], registry=REGISTRY
)
SCALING_SECONDS = Histogram(
    f"{PREFIX}scaling_seconds",
    "Time to read the load of all endpoints that scale",
    registry=REGISTRY,
    buckets=(0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0),
)
SCALING_DECISIONS = Counter(
    f"{PREFIX}scaling_decisions_total", "Decisions on the number of replicas, by cause", ["cause"], registry=REGISTRY
)
SCALING_ERRORS = Counter(
    f"{PREFIX}scaling_errors_total",
    "Scaling decisions that failed by a defect of the operator",
    ["reason"],
    registry=REGISTRY,
)
