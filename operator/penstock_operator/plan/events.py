"""Events: what changed, once. A condition that stays as it is says nothing, however often it is looked at."""

from __future__ import annotations

from collections.abc import Iterable

from penstock.resources.status import Condition, ConditionStatus, ConditionType, find_condition
from penstock_operator.plan.actions import Event

SPOKEN = (
    ConditionType.ACCEPTED,
    ConditionType.MODEL_RESOLVED,
    ConditionType.OPTIMIZED,
    ConditionType.ACCURACY_WITHIN_BUDGET,
    ConditionType.CORES_PINNED,
    ConditionType.AVAILABLE,
    ConditionType.OBJECTIVE_MET,
    ConditionType.METRICS_AVAILABLE,
    ConditionType.CURVE_CURRENT,
    ConditionType.PROGRESSING,
)
"""Not Ready: it repeats what another has said."""
ORDINARY = {
    "Optimizing",
    "OptimizationPending",
    "Starting",
    "NothingToServe",
    "Suspended",
    "ScaledToZero",
    "RollingOut",
    "Scaling",
    "Settled",
    "NoCurve",
}
"""Reasons that are no trouble, though something does not hold (yet)."""
UNSAID = {
    "OptimizationPending",
    "Starting",
    "NothingToServe",
    "Settled",
    "Scaling",
    "NotNeeded",
    "NoObjective",
    "AsMeasured",
    "NoCurve",
}
"""What everybody expects."""


def events(before: Iterable[Condition], after: Iterable[Condition]) -> tuple[Event, ...]:
    """One event for each condition whose status or reason is another than before."""
    old = tuple(before)
    said: dict[tuple[str, str], Event] = {}
    for condition in after:
        last = find_condition(old, condition.type)
        if condition.type not in SPOKEN or condition.status is ConditionStatus.UNKNOWN or condition.reason in UNSAID:
            continue
        if last is not None and (last.status, last.reason) == (condition.status, condition.reason):
            continue
        fine = condition.status is ConditionStatus.TRUE or condition.reason in ORDINARY
        event = Event("Normal" if fine else "Warning", condition.reason, condition.message)
        # Two conditions may say the same for the same reason (a model that is not there).
        said.setdefault((event.reason, event.message), event)
    return tuple(said.values())
