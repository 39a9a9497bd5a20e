"""Metrics that are computed at each scrape: endpoints by readiness, cache sizes, ages of watches, scaling decisions."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from penstock_operator.cluster.store import ObjectKey
from penstock_operator.control.cache import ClusterCache
from penstock_operator.decide import Decision
from penstock_operator.facts.scaling import METRIC
from penstock_operator.metrics import PREFIX


class CacheCollector(Collector):
    """Collects the sizes of the caches and the ages of activities."""

    def __init__(self, cache: ClusterCache, ages: Callable[[], dict[str, float]]) -> None:
        self._cache = cache
        self._ages = ages

    def collect(self) -> Iterator[Metric]:
        """The metric families."""
        endpoints = GaugeMetricFamily(
            f"{PREFIX}endpoints", "ModelEndpoints by the status and reason of Ready", labels=["ready", "reason"]
        )
        for (_, status, reason), count in sorted(self._cache.endpoints.sizes("ready").items()):
            endpoints.add_metric([status, reason], count)
        yield endpoints
        objects = GaugeMetricFamily(f"{PREFIX}objects", "Objects in the caches", labels=["kind"])
        for kind, store in self._cache.stores.items():
            objects.add_metric([kind.name], len(store))
        yield objects
        quota = GaugeMetricFamily(
            f"{PREFIX}namespace_quota",
            "Cores and replicas of the endpoints of a namespace: the limit of its quota (hard), and what is used",
            labels=[LABELS[0], "resource", "type"],
        )
        for namespace, limit, used in self._cache.quotas.namespaces():
            for resource, hard, taken in (
                ("cores", limit.cores, used.cores),
                ("replicas", limit.replicas, used.replicas),
            ):
                if hard is not None:
                    quota.add_metric([namespace, resource, "hard"], hard)
                quota.add_metric([namespace, resource, "used"], taken)
        yield quota
        silence = GaugeMetricFamily(
            f"{PREFIX}silence_seconds",
            "Seconds since the last event, bookmark or progress of each activity; liveness fails above the limit",
            labels=["what"],
        )
        for what, age in sorted(self._ages().items()):
            silence.add_metric([what], age)
        yield silence


LABELS = ("model_endpoint_namespace", "model_endpoint")
"""Not `namespace` and `endpoint`: Prometheus sets these labels to the operator's own and would rename these."""


def scaling_metrics(decisions: Mapping[ObjectKey, Decision]) -> Iterator[Metric]:
    """The metric families of these decisions: an HPA or KEDA scales on them, and dashboards show them."""
    desired = GaugeMetricFamily(METRIC, "Desired replicas of an endpoint", labels=LABELS)
    demand = GaugeMetricFamily(
        f"{PREFIX}demand_requests_per_second", "Load of an endpoint at the last decision", labels=LABELS
    )
    capacity = GaugeMetricFamily(
        f"{PREFIX}replica_capacity_requests_per_second",
        "Capacity of one replica within the objective, corrected by the observed latency",
        labels=LABELS,
    )
    known = GaugeMetricFamily(
        f"{PREFIX}load_known", "1 while the load of an endpoint can be read, else 0", labels=LABELS
    )
    forecast = GaugeMetricFamily(
        f"{PREFIX}forecast_requests_per_second",
        "Forecast load of an endpoint at the time when a replica requested now would serve",
        labels=LABELS,
    )
    slowdown = GaugeMetricFamily(
        f"{PREFIX}replica_slow_down", "How many times slower replicas are than measured", labels=LABELS
    )
    predicted = GaugeMetricFamily(
        f"{PREFIX}predicted_p95_milliseconds",
        "p95 that the capacity curve predicts for this load and replica count",
        labels=LABELS,
    )
    cause = GaugeMetricFamily(
        f"{PREFIX}scaling_cause", "1 for the cause of the last decision on an endpoint", labels=(*LABELS, "cause")
    )
    for key, decision in sorted(decisions.items()):
        desired.add_metric([*key], decision.replicas)
        cause.add_metric([*key, decision.cause.value], 1)
        slowdown.add_metric([*key], decision.slowdown)
        known.add_metric([*key], int(decision.demand is not None))
        if decision.demand is not None:
            demand.add_metric([*key], decision.demand.now)
            forecast.add_metric([*key], decision.demand.forecast)
        if decision.predicted_p95_milliseconds is not None:
            predicted.add_metric([*key], decision.predicted_p95_milliseconds)
        if decision.capacity is not None:
            capacity.add_metric([*key], decision.capacity)
    yield from (desired, demand, forecast, capacity, slowdown, predicted, cause, known)


class ScalingCollector(Collector):
    """Collects the last decision on each endpoint."""

    def __init__(self, decisions: Callable[[], Mapping[ObjectKey, Decision]]) -> None:
        self._decisions = decisions

    def collect(self) -> Iterator[Metric]:
        """The metric families, now."""
        return scaling_metrics(self._decisions())
