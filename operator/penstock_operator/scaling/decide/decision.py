"""What the autoscaler sees and what it says. Values only."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from penstock_operator.scaling.decide.demand import Demand
from penstock_operator.scaling.decide.measurement import Metrics
from penstock_operator.scaling.decide.start_up import Started


@dataclass(frozen=True, slots=True)
class Observation:
    """The endpoint at one moment."""

    replicas: int
    """What is asked for now: `spec.replicas` of the Deployment. Never the number of pods, which rollouts raise."""
    ready: int
    """Pods that take traffic."""
    metrics: Metrics
    rolling_out: bool = False
    """A new plan is being rolled out: surge pods come and go, and start-up work looks like load."""
    started: tuple[Started, ...] = ()
    """Of the ready pods, those that tell how long they took to start. They may be told again and again."""


class Cause(StrEnum):
    """Why the number is what it is; the Event's reason."""

    DEMAND = "Demand"
    """What demand over capacity asks for, up or down or as it is."""
    GUARD = "AnswersLate"
    """Answers are late although the curve says that they are not: one more."""
    BOUNDS = "Bounds"
    """The number was outside minReplicas and maxReplicas."""
    MAXIMUM = "AtMaximum"
    """More are wanted than maxReplicas allows."""
    WINDOW = "ShrinkWindow"
    """Fewer would do now; more were wanted within the window."""
    HELD = "Held"
    """Fewer would do; something forbids to shrink just now."""
    WOKEN = "Woken"
    """There was no replica, and somebody waits for one."""
    IDLE = "Idle"
    """Nobody has asked for a whole window: none."""
    UNKNOWN = "MetricsMissing"
    """Nobody knows the demand: as it is."""
    FALLBACK = "Fallback"
    """Nobody has known the demand for long: at least the fall-back."""
    NO_CURVE = "NoCapacityCurve"
    """Nobody knows what a replica can take: as it is."""


@dataclass(frozen=True, slots=True)
class Condition:
    """A condition of the endpoint in metav1's words."""

    status: bool
    reason: str
    message: str


@dataclass(frozen=True, slots=True)
class Decision:
    """How many replicas, and why."""

    replicas: int
    cause: Cause
    reason: str
    """One sentence with its inputs, for status, Events and people."""
    wanted: int | None
    """What demand over capacity alone asks for, without bounds and history; None when unknown."""
    demand: Demand | None
    capacity: float | None
    """Requests/s that each of these replicas takes within the objective, as corrected, without headroom."""
    slowdown: float
    predicted_p95_milliseconds: float | None
    metrics_available: Condition
    curve_current: Condition
