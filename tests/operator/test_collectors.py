"""The last decision as metrics."""

from __future__ import annotations

from penstock_operator.cluster.store import ObjectKey
from penstock_operator.collectors import scaling_metrics
from penstock_operator.scaling.decide import Metrics
from tests.operator.scaling.decide.cases import Replay, traffic

PLACE = {"model_endpoint": "emotion", "model_endpoint_namespace": "shop"}


def said(metrics: Metrics) -> dict[str, tuple[dict[str, str], float]]:
    """Of one endpoint with two replicas: name -> labels beyond its place, and the value."""
    decision = Replay(replicas=2).tick(metrics)
    found = {}
    for family in scaling_metrics({ObjectKey("shop", "emotion"): decision}):
        for sample in family.samples:
            assert sample.labels.items() >= PLACE.items()
            labels = {key: value for key, value in sample.labels.items() if key not in PLACE}
            found[sample.name.removeprefix("penstock_operator_")] = (labels, sample.value)
    return found


def test_a_decision_is_there_with_its_inputs() -> None:
    found = said(traffic(12))

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


def test_what_is_not_known_is_not_there() -> None:
    found = said(Metrics.unknown("nobody answers"))

    assert {name: found[name] for name in ("scaling_cause", "load_known")} == {
        "scaling_cause": ({"cause": "MetricsMissing"}, 1),
        "load_known": ({}, 0),
    }
    assert {"demand_requests_per_second", "forecast_requests_per_second"}.isdisjoint(found)
