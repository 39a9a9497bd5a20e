"""Input and output of one decision: observation, cause, conditions, decision. Values only."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from penstock_operator.decide.demand import Demand
from penstock_operator.decide.measurement import Metrics
from penstock_operator.decide.memory import Started


@dataclass(frozen=True, slots=True)
class Observation:
    """The endpoint at one moment."""

    replicas: int
    """`spec.replicas` of the Deployment; not the number of pods, which is higher during a rollout."""
    ready: int
    """Pods that take traffic."""
    metrics: Metrics
    rolling_out: bool = False
    """The Deployment is being rolled out: surge pods come and go, and start-up work looks like load."""
    started: tuple[Started, ...] = ()
    """Start-up times of ready pods, as far as known; earlier observations may be repeated."""


class Cause(StrEnum):
    """The cause of the number of replicas; the reason of the Event."""

    DEMAND = "Demand"
    """Demand over capacity gives this number, more or fewer or the same."""
    GUARD = "AnswersLate"
    """Answers are late although the curve predicts that they are not: one more."""
    BOUNDS = "Bounds"
    """The number was not between minReplicas and maxReplicas."""
    MAXIMUM = "AtMaximum"
    """More are wanted than maxReplicas allows."""
    WINDOW = "ShrinkWindow"
    """Fewer are enough now; more were needed within the shrink window."""
    HELD = "Held"
    """Fewer are enough; something forbids a scale-down now."""
    WOKEN = "Woken"
    """There was no replica, and a request is waiting."""
    IDLE = "Idle"
    """No request came for a whole shrink window: none."""
    UNKNOWN = "MetricsMissing"
    """The demand is unknown: the number stays."""
    FALLBACK = "Fallback"
    """The demand has been unknown for long: at least the fall-back."""
    NO_CURVE = "NoCapacityCurve"
    """The capacity of a replica is unknown: the number stays."""


@dataclass(frozen=True, slots=True)
class DecisionCondition:
    """A condition of the endpoint, with the fields of metav1.Condition."""

    status: bool
    reason: str
    message: str


@dataclass(frozen=True, slots=True)
class Decision:
    """The number of replicas, and the reason."""

    replicas: int
    cause: Cause
    reason: str
    """One sentence with the inputs, for the status, Events and logs."""
    wanted: int | None
    """The number from demand over capacity alone, without bounds and history; None if unknown."""
    demand: Demand | None
    capacity: float | None
    """Requests/s that each of these replicas takes within the objective, corrected, without headroom."""
    slowdown: float
    predicted_p95_milliseconds: float | None
    metrics_available: DecisionCondition
    curve_current: DecisionCondition
