"""The reasons of conditions and Events."""

from __future__ import annotations

from enum import StrEnum


class Reason(StrEnum):
    """Reasons of conditions and Events that the operator gives itself. docs/reference/conditions.md explains each.

    Failures of an optimisation job or of a runtime bring other reasons: the names of their errors (`ModelNotFound`).
    """

    AGREES = "Agrees"
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
    COMPATIBLE = "Compatible"
    CORES_NOT_PINNED = "CoresNotPinned"
    CRASH_LOOPING = "CrashLooping"
    DISABLED = "Disabled"
    EVICTED = "Evicted"
    EXPOSED = "Exposed"
    FEWER_REPLICAS_WANTED = "FewerReplicasWanted"
    GATEWAY_UNAVAILABLE = "GatewayUnavailable"
    HANDING_OVER = "HandingOver"
    HARDWARE_CLASS_INVALID = "HardwareClassInvalid"
    HARDWARE_CLASS_NOT_ALLOWED = "HardwareClassNotAllowed"
    HARDWARE_CLASS_NOT_FOUND = "HardwareClassNotFound"
    HOST_NOT_ALLOWED = "HostNotAllowed"
    HOST_TAKEN = "HostTaken"
    IMAGE_PULL_FAILED = "ImagePullFailed"
    INTERRUPTED = "Interrupted"
    INVALID_CORES = "InvalidCores"
    INVALID_SPEC = "InvalidSpec"
    JOB_CRASHED = "JobCrashed"
    JOB_WAITING = "JobWaiting"
    KEPT_PREVIOUS = "KeptPrevious"
    LIVE_TRAFFIC_DIFFERS = "LiveTrafficDiffers"
    MEASURED = "Measured"
    MEASURED_UNPINNED = "MeasuredUnpinned"
    METRICS_MISSING = "MetricsMissing"
    MORE_REPLICAS_WANTED = "MoreReplicasWanted"
    NAME_TAKEN = "NameTaken"
    NEEDS_ADAPTER = "NeedsAdapter"
    NEEDS_REEMBEDDING = "NeedsReembedding"
    NOT_CERTIFIED = "NotCertified"
    NODE_GONE = "NodeGone"
    NOTHING_SERVES = "NothingServes"
    NOTHING_TO_SERVE = "NothingToServe"
    NOT_ACCEPTED = "NotAccepted"
    NOT_ASKED = "NotAsked"
    NOT_GUARANTEED = "NotGuaranteed"
    NOT_KNOWN = "NotKnown"
    NOT_MEASURED = "NotMeasured"
    NOT_NEEDED = "NotNeeded"
    NOT_READ = "NotRead"
    NOT_REPORTED = "NotReported"
    NOT_WATCHED = "NotWatched"
    NOT_WHOLE_CORES = "NotWholeCores"
    NO_CANDIDATE_WITHIN_BUDGET = "NoCandidateWithinBudget"
    NO_CURVE = "NoCurve"
    NO_GATEWAY_API = "NoGatewayApi"
    NO_KEDA = "NoKeda"
    NO_KEYS = "NoKeys"
    NO_NODE_FOR_CLASS = "NoNodeForClass"
    NO_OBJECTIVE = "NoObjective"
    NO_PODS = "NoPods"
    NO_PROMETHEUS = "NoPrometheus"
    NO_ROOM_FOR_SURGE = "NoRoomForSurge"
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
    PODS_REFUSED = "PodsRefused"
    POD_CANNOT_START = "PodCannotStart"
    POD_FAILED = "PodFailed"
    POD_SETTING_NOT_ALLOWED = "PodSettingNotAllowed"
    PROVISIONAL = "Provisional"
    PUBLISHED = "Published"
    QUOTA_EXCEEDED = "QuotaExceeded"
    READ = "Read"
    REFUSED_BY_NODE = "RefusedByNode"
    REPLICA_DIFFERS = "ReplicaDiffers"
    RESOLVED = "Resolved"
    RESOLVING = "Resolving"
    RESTARTING = "Restarting"
    RESULT_LOST = "ResultLost"
    RETURNED = "Returned"
    ROLLING_OUT = "RollingOut"
    ROLLOUT_QUEUED = "RolloutQueued"
    ROLLOUT_STUCK = "RolloutStuck"
    ROUTE_REFUSED = "RouteRefused"
    SAME = "Same"
    SCALED_DOWN = "ScaledDown"
    SCALED_TO_ZERO = "ScaledToZero"
    SCALED_UP = "ScaledUp"
    SCALER_FAILS = "ScalerFails"
    SCALING = "Scaling"
    SCALING_LIMITED = "ScalingLimited"
    SERVING = "Serving"
    SETTLED = "Settled"
    SHADOW_UNRELIABLE = "ShadowUnreliable"
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
    WATCHING = "Watching"
    WITHIN_BUDGET = "WithinBudget"


UNFINISHED = {
    Reason.ROLLING_OUT,
    Reason.ROLLOUT_QUEUED,
    Reason.NO_ROOM_FOR_SURGE,
    Reason.ROLLOUT_STUCK,
    Reason.CANARY_RUNNING,
    Reason.CANARY_REJECTED,
    Reason.NAME_TAKEN,
}
"""Reasons of Progressing with which the pods do not, or not all, serve the present spec."""
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
    Reason.PROVISIONAL,
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
MODEL_FAILURES = {
    "ModelNotFound",
    "ModelAccessDenied",
    "ModelUnavailable",
    "ModelUnusable",
    "UnsafeModel",
    "CorruptModel",
    "UnsupportedModel",
}
"""Failures caused by the model itself or by its download."""
