"""The last decision about each endpoint as metrics: what an HPA or KEDA scales by, and what dashboards show."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from penstock_operator.autoscaler import Decision
from penstock_operator.cluster.store import Key
from penstock_operator.metrics import PREFIX
from penstock_operator.plan.autoscaling import METRIC

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
    for key, decision in sorted(decisions.items()):
        desired.add_metric([*key], decision.replicas)
        known.add_metric([*key], int(decision.demand is not None))
        if decision.demand is not None:
            demand.add_metric([*key], decision.demand.now)
        if decision.capacity is not None:
            capacity.add_metric([*key], decision.capacity)
    yield from (desired, demand, capacity, known)


class Figures(Collector):
    """For the registry."""

    def __init__(self, decisions: Callable[[], Mapping[Key, Decision]]) -> None:
        self._decisions = decisions

    def collect(self) -> Iterator[Metric]:
        """The families, now."""
        return figures(self._decisions())
