"""How many replicas an endpoint needs: its demand over the measured capacity of a replica. Pure.

    measurement  three-state metrics: Value, Idle, Unknown
    interpret    Prometheus' answers -> metrics
    counters     samples of counters -> rates, for pods that the operator scrapes itself
    service      the capacity of replicas from the measured curve, and how much slower they are
    texts        the capacity for texts that are longer or shorter than the measured ones
    tokens       the load of text generation in requests of the measured workload
    demand       rates -> the demand at the time when new replicas have started, and the reserve beyond it
    state        what is kept between two decisions, and the handover snapshot for a new leader
    trial        counts of two plans -> whether a canary goes on, passes or is rejected
    memory       updates of the state: shrink window, holds, start-up times, slow-down
    decide       all of these -> a number of replicas and a sentence

A library without IO and clock: time is an argument. Of Kubernetes it knows only the number of replicas.
"""

from penstock_operator.decide.decision import Cause, Decision, DecisionCondition, Observation
from penstock_operator.decide.demand import Demand
from penstock_operator.decide.measurement import Idle, Measurement, Metrics, Unknown, Value, known
from penstock_operator.decide.replicas import decide, replicas_for_load
from penstock_operator.decide.service import Service
from penstock_operator.decide.settings import ScalingSettings, WhenMissing
from penstock_operator.decide.state import Peak, Started, State, dump_handover, restore_handover
from penstock_operator.decide.texts import MeasuredTexts
from penstock_operator.decide.tokens import in_measured_requests

__all__ = [
    "Cause",
    "Decision",
    "DecisionCondition",
    "Demand",
    "Idle",
    "MeasuredTexts",
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
    "decide",
    "dump_handover",
    "in_measured_requests",
    "known",
    "replicas_for_load",
    "restore_handover",
]
