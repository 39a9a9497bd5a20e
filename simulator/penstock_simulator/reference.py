"""The endpoint that is simulated when none is given: invented, of a common shape, and slow enough to simulate quickly.

Two servers, 150 ms for a text on average (the longest twentieth over 300 ms), p95 objective 600 ms. Built-in traces are
in multiples of what a replica takes, so that only the ratio of service time to start-up time matters.
"""

from __future__ import annotations

from functools import lru_cache

from penstock.capacity import CapacityCurve
from penstock_simulator.replica import ReplicaModel, measured

MODEL = ReplicaModel(servers=2, mean_service_seconds=0.15, sigma=0.5, fixed_seconds=0.005)
P95_OBJECTIVE_MILLISECONDS = 600.0
RATES = [1.0, 2.5, 4.0, 5.5, 7.0, 8.5, 9.5, 10.5, 11.5, 12.5, 13.2, 14.5]
"""Requests/s; the last is over what it can answer, as a measurement would go."""


@lru_cache(maxsize=1)
def reference_curve() -> CapacityCurve:
    """Its capacity curve, measured on the modelled queue."""
    return measured(MODEL, RATES, p95_objective_milliseconds=P95_OBJECTIVE_MILLISECONDS)
