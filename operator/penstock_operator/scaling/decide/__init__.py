"""How many replicas: demand over measured capacity. A pure library: no IO, no clock; time is an argument.

    measurement  three-state metrics: Value, Idle, Unknown
    interpret    what Prometheus answered -> metrics
    counters     samples of counters -> rates, for whoever scrapes by itself
    service      the capacity of one replica from its curve, and how much slower it is
    demand       rates -> what replicas have to meet when they are there
    reserve      what is kept beyond it
    start_up     how long a new replica takes, from those that were seen to start
    memory       what the past forbids
    legacy       the little of it that a new leader goes on from
    correction   the curve held against the observed p95
    decide       all of it -> a number and a sentence

It knows nothing of Kubernetes but the number of replicas.
"""

from penstock_operator.scaling.decide.decision import Cause, Condition, Decision, Observation
from penstock_operator.scaling.decide.demand import Demand
from penstock_operator.scaling.decide.handover import bequeathed, inherited
from penstock_operator.scaling.decide.measurement import Idle, Measurement, Metrics, Unknown, Value, known
from penstock_operator.scaling.decide.replicas import decide
from penstock_operator.scaling.decide.service import Service
from penstock_operator.scaling.decide.settings import ScalingSettings, WhenMissing
from penstock_operator.scaling.decide.start_up import Started
from penstock_operator.scaling.decide.state import Peak, State

__all__ = [
    "Cause",
    "Condition",
    "Decision",
    "Demand",
    "Idle",
    "Measurement",
    "Metrics",
    "Observation",
    "Peak",
    "ScalingSettings",
    "Service",
    "Started",
    "State",
    "Unknown",
    "Value",
    "WhenMissing",
    "bequeathed",
    "decide",
    "inherited",
    "known",
]
