"""The PodDisruptionBudget: node drains take one replica at a time."""

from __future__ import annotations

from penstock_operator.plan.endpoint import Endpoint
from penstock_operator.plan.names import runtime_selector
from penstock_operator.plan.settings import Json


def disruption_budget(endpoint: Endpoint, replicas: int) -> Json | None:
    """The desired budget; None for a single replica (or none), where it would only block every node drain."""
    if replicas < 2:
        return None
    return endpoint.owned(
        "policy/v1",
        "PodDisruptionBudget",
        {
            "maxUnavailable": 1,
            "selector": {"matchLabels": runtime_selector(endpoint.name)},
            # Pods that are not ready serve nobody: they must not hold up a drain.
            "unhealthyPodEvictionPolicy": "AlwaysAllow",
        },
    )
