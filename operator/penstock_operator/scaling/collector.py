"""The last decision about each endpoint as metrics: what an HPA or KEDA scales by, and what dashboards show."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from penstock_operator.cluster.store import Key
from penstock_operator.metrics import PREFIX
from penstock_operator.plan.autoscaling import METRIC
from penstock_operator.scaling.decide import Decision

LABELS = ("model_endpoint_namespace", "model_endpoint")
"""Not `namespace` and `endpoint`: scrapers give these names to the operator's own place, and would rename ours."""


def figures(decisions: Mapping[Key, Decision]) -> Iterator[Metric]:
    """The families."""
    desired = GaugeMetricFamily(METRIC, "Replicas that an endpoint is to have", labels=LABELS)
    demand = GaugeMetricFamily(
        f"{PREFIX}demand_requests_per_second", "Load of an endpoint, as it was last decided upon", labels=LABELS
    )
    capacity = GaugeMetricFamily(
        f"{PREFIX}replica_capacity_requests_per_second",
        "What one replica takes within the objective, as corrected by what is observed",
        labels=LABELS,
    )
    known = GaugeMetricFamily(
        f"{PREFIX}load_known", "1 while the load of an endpoint can be read, 0 while it cannot", labels=LABELS
    )
    forecast = GaugeMetricFamily(
        f"{PREFIX}forecast_requests_per_second",
        "Load of an endpoint when a replica that is asked for now would serve",
        labels=LABELS,
    )
    slowdown = GaugeMetricFamily(
        f"{PREFIX}replica_slow_down", "How many times slower replicas are than they were measured to be", labels=LABELS
    )
    predicted = GaugeMetricFamily(
        f"{PREFIX}predicted_p95_milliseconds", "p95 that the curve has for this load and replicas", labels=LABELS
    )
    cause = GaugeMetricFamily(
        f"{PREFIX}scaling_cause", "1 for the kind of the last decision about an endpoint", labels=(*LABELS, "cause")
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


class Figures(Collector):
    """For the registry."""

    def __init__(self, decisions: Callable[[], Mapping[Key, Decision]]) -> None:
        self._decisions = decisions

    def collect(self) -> Iterator[Metric]:
        """The families, now."""
        return figures(self._decisions())
