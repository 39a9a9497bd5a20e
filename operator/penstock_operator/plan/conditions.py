"""Findings, and the conditions and Kubernetes Events that they become.

A plan computes each condition as a `Finding`: status, stable CamelCase reason, and a message with the next action.
`conditions` turns findings into the conditions of the status; `events` reports the conditions that changed.
`penstock.resources.status` has the types of the conditions and keeps their transition times.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import Any, Literal

from pydantic import ValidationError

from penstock.resources.status import (
    Condition,
    ConditionStatus,
    ConditionType,
    find_condition,
    timestamp,
    updated_conditions,
)
from penstock_operator.pod_data import unprintable_as_spaces

MESSAGE_LIMIT = 2048
"""Characters; the API allows 32,768, but people read these."""
_REASON = re.compile(r"[A-Z][A-Za-z0-9]*")

TRUE, FALSE, UNKNOWN = ConditionStatus.TRUE, ConditionStatus.FALSE, ConditionStatus.UNKNOWN


class Reason(StrEnum):
    """Reasons of conditions and Events that the operator gives itself. docs/reference/conditions.md explains each.

    Failures of an optimisation job or of a runtime bring other reasons: the names of their errors (`ModelNotFound`).
    """

    ANNOTATION_NOT_ALLOWED = "AnnotationNotAllowed"
    ANSWERING = "Answering"
    APPLY_FAILED = "ApplyFailed"
    ARTEFACT_NOT_ALLOWED = "ArtefactNotAllowed"
    ARTEFACT_NOT_FOR_CLASS = "ArtefactNotForClass"
    ARTEFACT_NOT_FOR_VERSION = "ArtefactNotForVersion"
    AS_MEASURED = "AsMeasured"
    BASELINE = "Baseline"
    CANARY_PASSED = "CanaryPassed"
    CANARY_REJECTED = "CanaryRejected"
    CANARY_RUNNING = "CanaryRunning"
    CORES_NOT_PINNED = "CoresNotPinned"
    CRASH_LOOPING = "CrashLooping"
    DISABLED = "Disabled"
    EVICTED = "Evicted"
    EXPOSED = "Exposed"
    FEWER_REPLICAS_WANTED = "FewerReplicasWanted"
    GATEWAY_UNAVAILABLE = "GatewayUnavailable"
    HANDING_OVER = "HandingOver"
    HARDWARE_CLASS_INVALID = "HardwareClassInvalid"
    HARDWARE_CLASS_NOT_FOUND = "HardwareClassNotFound"
    HOST_NOT_ALLOWED = "HostNotAllowed"
    HOST_TAKEN = "HostTaken"
    IMAGE_PULL_FAILED = "ImagePullFailed"
    INTERRUPTED = "Interrupted"
    INVALID_CORES = "InvalidCores"
    HARDWARE_CLASS_NOT_ALLOWED = "HardwareClassNotAllowed"
    INVALID_SPEC = "InvalidSpec"
    JOB_CRASHED = "JobCrashed"
    JOB_WAITING = "JobWaiting"
    KEPT_PREVIOUS = "KeptPrevious"
    MEASURED = "Measured"
    MEASURED_UNPINNED = "MeasuredUnpinned"
    METRICS_MISSING = "MetricsMissing"
    MORE_REPLICAS_WANTED = "MoreReplicasWanted"
    NAME_TAKEN = "NameTaken"
    NO_CANDIDATE_WITHIN_BUDGET = "NoCandidateWithinBudget"
    NO_CURVE = "NoCurve"
    NO_GATEWAY_API = "NoGatewayApi"
    NODE_GONE = "NodeGone"
    NO_KEDA = "NoKeda"
    NO_KEYS = "NoKeys"
    NO_NODE_FOR_CLASS = "NoNodeForClass"
    NO_OBJECTIVE = "NoObjective"
    NO_PODS = "NoPods"
    NO_PROMETHEUS = "NoPrometheus"
    NO_ROOM_FOR_SURGE = "NoRoomForSurge"
    NOT_ACCEPTED = "NotAccepted"
    NOT_ASKED = "NotAsked"
    NOT_GUARANTEED = "NotGuaranteed"
    NOTHING_SERVES = "NothingServes"
    NOTHING_TO_SERVE = "NothingToServe"
    NOT_KNOWN = "NotKnown"
    NOT_MEASURED = "NotMeasured"
    NOT_NEEDED = "NotNeeded"
    NOT_READ = "NotRead"
    NOT_REPORTED = "NotReported"
    NOT_WATCHED = "NotWatched"
    NOT_WHOLE_CORES = "NotWholeCores"
    OBJECTIVE_MISSED = "ObjectiveMissed"
    OPTIMIZATION_PENDING = "OptimizationPending"
    OPTIMIZATION_QUEUED = "OptimizationQueued"
    OPTIMIZATION_STARTED = "OptimizationStarted"
    OPTIMIZED = "Optimized"
    OPTIMIZING = "Optimizing"
    OTHER_PROCESSOR = "OtherProcessor"
    OUT_OF_MEMORY = "OutOfMemory"
    OVER_BUDGET = "OverBudget"
    PENDING = "Pending"
    PINNED = "Pinned"
    POD_CANNOT_START = "PodCannotStart"
    POD_FAILED = "PodFailed"
    POD_SETTING_NOT_ALLOWED = "PodSettingNotAllowed"
    PODS_REFUSED = "PodsRefused"
    PUBLISHED = "Published"
    QUOTA_EXCEEDED = "QuotaExceeded"
    READ = "Read"
    REFUSED_BY_NODE = "RefusedByNode"
    RESOLVED = "Resolved"
    RESOLVING = "Resolving"
    RESTARTING = "Restarting"
    RESULT_LOST = "ResultLost"
    ROLLING_OUT = "RollingOut"
    ROLLOUT_QUEUED = "RolloutQueued"
    ROLLOUT_STUCK = "RolloutStuck"
    ROUTE_REFUSED = "RouteRefused"
    SCALED_DOWN = "ScaledDown"
    SCALED_TO_ZERO = "ScaledToZero"
    SCALED_UP = "ScaledUp"
    SCALER_FAILS = "ScalerFails"
    SCALING = "Scaling"
    SCALING_LIMITED = "ScalingLimited"
    SERVING = "Serving"
    SETTLED = "Settled"
    SHARED_CORES = "SharedCores"
    SLOWER_THAN_MEASURED = "SlowerThanMeasured"
    SMT_ALIGNMENT_ERROR = "SMTAlignmentError"
    SOURCE_NOT_ALLOWED = "SourceNotAllowed"
    STARTING = "Starting"
    SUSPENDED = "Suspended"
    TASK_NOT_SUPPORTED = "TaskNotSupported"
    TEXTS_EMPTY = "TextsEmpty"
    TEXTS_NOT_FOUND = "TextsNotFound"
    THROTTLED = "Throttled"
    TIMED_OUT = "TimedOut"
    TOO_FEW_CORES = "TooFewCores"
    UNSCHEDULABLE = "Unschedulable"
    VALID = "Valid"
    WAITING_TO_RETRY = "WaitingToRetry"
    WITHIN_BUDGET = "WithinBudget"


@dataclass(frozen=True)
class Event:
    """A Kubernetes Event to post on the endpoint. Only transitions post one: the same state twice posts nothing."""

    type: Literal["Normal", "Warning"]
    reason: str
    """CamelCase, stable: a `Reason`, or the reason of a job's or runtime's failure."""
    message: str


@dataclass(frozen=True)
class Finding:
    """Status, reason and message of a condition. Three-valued: an unknown status is not false."""

    status: ConditionStatus
    reason: str
    """A `Reason`, or the reason of a job's or runtime's failure."""
    message: str

    def __post_init__(self) -> None:
        """Reject an invalid reason or an empty message: a programming error, which the tests detect."""
        if _REASON.fullmatch(self.reason) is None:
            raise ValueError(f"{self.reason!r} is not a CamelCase reason")
        if not self.message.strip():
            raise ValueError(f"{self.reason}: the message is empty")

    @property
    def true(self) -> bool:
        """Whether the status is True."""
        return self.status is TRUE

    @property
    def false(self) -> bool:
        """Whether the status is False (not Unknown)."""
        return self.status is FALSE


def yes(reason: str, message: str) -> Finding:
    """A finding with the status True."""
    return Finding(TRUE, reason, message)


def no(reason: str, message: str) -> Finding:
    """A finding with the status False."""
    return Finding(FALSE, reason, message)


def unknown(reason: str, message: str) -> Finding:
    """A finding with the status Unknown."""
    return Finding(UNKNOWN, reason, message)


def conditions(
    findings: Mapping[str, Finding], *, before: Iterable[Mapping[str, Any]], generation: int, now: datetime
) -> tuple[Condition, ...]:
    """The conditions to write, with the time when the status of each last changed."""
    fresh = [
        Condition(
            type=kind,
            status=finding.status,
            reason=str(finding.reason),
            message=clipped(finding.message),
            observed_generation=generation,
            last_transition_time=timestamp(now),
        )
        for kind, finding in findings.items()
    ]
    kept = [condition for condition in map(_parsed, before) if condition is not None and condition.type in findings]
    return updated_conditions(kept, fresh)


def _parsed(entry: Mapping[str, Any]) -> Condition | None:
    """A condition of the present status; None if it is not valid."""
    try:
        return Condition.model_validate(entry)
    except ValidationError:
        return None


WITH_EVENTS = (
    ConditionType.ACCEPTED,
    ConditionType.MODEL_RESOLVED,
    ConditionType.OPTIMIZED,
    ConditionType.ACCURACY_WITHIN_BUDGET,
    ConditionType.CORES_PINNED,
    ConditionType.AVAILABLE,
    ConditionType.EXPOSED,
    ConditionType.OBJECTIVE_MET,
    ConditionType.METRICS_AVAILABLE,
    ConditionType.CURVE_CURRENT,
    ConditionType.PROGRESSING,
)
"""Conditions whose changes post an Event. Ready is left out: it repeats another condition."""
NORMAL = {
    Reason.OPTIMIZING,
    Reason.OPTIMIZATION_PENDING,
    Reason.OPTIMIZATION_QUEUED,
    Reason.STARTING,
    Reason.NOTHING_TO_SERVE,
    Reason.SUSPENDED,
    Reason.SCALED_TO_ZERO,
    Reason.ROLLING_OUT,
    Reason.ROLLOUT_QUEUED,
    Reason.SCALING,
    Reason.SETTLED,
    Reason.NO_CURVE,
}
"""Reasons of false conditions that are not a problem: their Events have the type Normal."""
WITHOUT_EVENTS = {
    Reason.OPTIMIZATION_PENDING,
    Reason.STARTING,
    Reason.NOTHING_TO_SERVE,
    Reason.SETTLED,
    Reason.SCALING,
    Reason.NOT_NEEDED,
    Reason.NO_OBJECTIVE,
    Reason.AS_MEASURED,
    Reason.NO_CURVE,
}
"""Reasons that post no Event: every endpoint passes through them."""


def events(before: Iterable[Condition], after: Iterable[Condition]) -> tuple[Event, ...]:
    """One Event for each condition whose status or reason changed."""
    old = tuple(before)
    found: dict[tuple[str, str], Event] = {}
    for condition in after:
        last = find_condition(old, condition.type)
        if condition.type not in WITH_EVENTS or condition.status is UNKNOWN or condition.reason in WITHOUT_EVENTS:
            continue
        if last is not None and (last.status, last.reason) == (condition.status, condition.reason):
            continue
        normal = condition.status is TRUE or condition.reason in NORMAL
        event = Event("Normal" if normal else "Warning", condition.reason, condition.message)
        # Two conditions may have the same reason and message (a model that was not found): one Event suffices.
        found.setdefault((event.reason, event.message), event)
    return tuple(found.values())


def clipped(message: str, limit: int = MESSAGE_LIMIT) -> str:
    """The message without control characters, shortened to `limit` characters: parts of it come from pods."""
    message = unprintable_as_spaces(message)
    return message if len(message) <= limit else f"{message[: limit - 4].rstrip()} ..."


def stopped(text: str) -> str:
    """The text with a full stop at its end."""
    text = text.strip()
    return f"{text}{'' if text.endswith(('.', '!', '?', '…')) else '.'}" if text else ""


def sentence(text: str) -> str:
    """The text with a capital letter at its start and a full stop at its end."""
    text = stopped(text)
    return f"{text[:1].upper()}{text[1:]}"
