"""Decides how many replicas an endpoint needs: its demand over the measured capacity of a replica. Pure.

    measurement  readings of pods, three-state metrics (Value, Idle, Unknown), shares of histograms
    service      the capacity of replicas, and the load in requests of the measured workload
    demand       rates -> the demand at the time when new replicas have started, and the reserve beyond it
    memory       the state between two decisions and its updates: shrink window, holds, start-up times, slow-down
    replicas     all of these -> a number of replicas
    explain      the sentence with the inputs of a decision

A library without IO and clock: time is an argument. Of Kubernetes it knows only the number of replicas.
"""

from penstock_operator.decide.decision import Cause, Decision, DecisionCondition, Observation
from penstock_operator.decide.demand import Demand
from penstock_operator.decide.measurement import Idle, Measurement, Metrics, Unknown, Value, known
from penstock_operator.decide.memory import Peak, Started, State, dump_handover, restore_handover
from penstock_operator.decide.replicas import decide, replicas_for_load
from penstock_operator.decide.service import MeasuredTexts, Service, in_measured_requests
from penstock_operator.decide.settings import ScalingSettings, WhenMissing

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
