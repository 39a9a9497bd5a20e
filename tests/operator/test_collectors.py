"""The last decision as metrics."""

from __future__ import annotations

from penstock_operator.cluster.store import ObjectKey
from penstock_operator.collectors import scaling_metrics
from penstock_operator.decide import Metrics
from tests.operator.decide.cases import Replay, traffic

ENDPOINT_LABELS = {"model_endpoint": "emotion", "model_endpoint_namespace": "shop"}


def samples_of(metrics: Metrics) -> dict[str, tuple[dict[str, str], float]]:
    """Samples of one endpoint with two replicas, by metric name: labels without the endpoint's own, and the value."""
    decision = Replay(replicas=2).tick(metrics)
    found = {}
    for family in scaling_metrics({ObjectKey("shop", "emotion"): decision}):
        for sample in family.samples:
            assert sample.labels.items() >= ENDPOINT_LABELS.items()
            labels = {key: value for key, value in sample.labels.items() if key not in ENDPOINT_LABELS}
            found[sample.name.removeprefix("penstock_operator_")] = (labels, sample.value)
    return found


def test_a_decision_is_exported_with_its_inputs() -> None:
    found = samples_of(traffic(12))

    assert found == {
        "desired_replicas": ({}, 2),
        "demand_requests_per_second": ({}, 12),
        "forecast_requests_per_second": ({}, 12),
        "replica_capacity_requests_per_second": ({}, 10),
        "replica_slow_down": ({}, 1),
        "predicted_p95_milliseconds": ({}, 120),
        "scaling_cause": ({"cause": "Demand"}, 1),
        "load_known": ({}, 1),
    }


def test_unknown_values_are_not_exported() -> None:
    found = samples_of(Metrics.unknown("no pod answers"))

    assert {name: found[name] for name in ("scaling_cause", "load_known")} == {
        "scaling_cause": ({"cause": "MetricsMissing"}, 1),
        "load_known": ({}, 0),
    }
    assert {"demand_requests_per_second", "forecast_requests_per_second"}.isdisjoint(found)
