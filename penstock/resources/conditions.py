"""Conditions in the form of metav1.Condition, each with the time when its status last changed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from enum import StrEnum

from pydantic import Field

from penstock.resources.base import Facts
from penstock.resources.fields.text_fields import Time


class ConditionType(StrEnum):
    """The conditions of an endpoint."""

    ACCEPTED = "Accepted"
    """The spec is valid and the hardware class exists."""
    MODEL_RESOLVED = "ModelResolved"
    """The model was found and can be read."""
    OPTIMIZED = "Optimized"
    """The optimisation has a result."""
    ACCURACY_WITHIN_BUDGET = "AccuracyWithinBudget"
    """The answers of the served plan are within the accuracy budget."""
    INDEX_COMPATIBLE = "IndexCompatible"
    """The result fits the index of `spec.vectorSpace`. Only with that."""
    ANSWERS_AGREE = "AnswersAgree"
    """Live answers are as they were when the plan was judged. Only with `spec.guard.live`."""
    CORES_PINNED = "CoresPinned"
    """Every pod has exclusive cores."""
    AVAILABLE = "Available"
    """Pods are ready."""
    EXPOSED = "Exposed"
    """Requests from outside the cluster are routed to the endpoint. Only with `spec.exposure`."""
    OBJECTIVE_MET = "ObjectiveMet"
    """The objective is met, as far as it was measured."""
    CURVE_CURRENT = "CurveCurrent"
    """Replicas are as fast as in the capacity curve of the plan."""
    METRICS_AVAILABLE = "MetricsAvailable"
    """The load metrics can be read."""
    PROGRESSING = "Progressing"
    """An optimisation or a rollout is running."""
    READY = "Ready"
    """The summary: the endpoint serves as its spec requires."""


class ConditionStatus(StrEnum):
    """Status of a condition."""

    TRUE = "True"
    FALSE = "False"
    UNKNOWN = "Unknown"


class Condition(Facts):
    """One condition, in the form of metav1.Condition."""

    type: str = Field(max_length=316, description="Such as Ready.")
    status: ConditionStatus
    reason: str = Field(
        min_length=1,
        max_length=1024,
        pattern=r"^[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?$",
        description="The reason, as one word.",
    )
    message: str = Field(default="", max_length=32_768, description="The reason, with what to do next.")
    observed_generation: int | None = Field(
        default=None, ge=0, description="The generation that the condition is about."
    )
    last_transition_time: Time = Field(description="When the status last changed.")


def timestamp(at: datetime) -> str:
    """A time in the format of the API server."""
    return at.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def find_condition(conditions: Iterable[Condition], kind: str) -> Condition | None:
    """The condition of this type."""
    return next((one for one in conditions if one.type == kind), None)


def updated_conditions(before: Sequence[Condition], now: Iterable[Condition]) -> tuple[Condition, ...]:
    """The conditions `now`, each with the time when its status last changed; conditions of other types are kept.

    The order is by first appearance, so that it is stable in `kubectl describe`.
    """
    fresh = {one.type: one for one in now}
    result = []
    for old in before:
        new = fresh.pop(old.type, None)
        if new is None:
            result.append(old)
        elif new.status is old.status:
            result.append(new.model_copy(update={"last_transition_time": old.last_transition_time}))
        else:
            result.append(new)
    return (*result, *fresh.values())
