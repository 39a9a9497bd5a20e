"""HorizontalPodAutoscalers and ScaledObjects of endpoints, and the autoscaler's decisions, as plain values."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from penstock_operator.facts.findings import Finding, no, stopped, unknown
from penstock_operator.facts.names import Object
from penstock_operator.facts.reasons import Reason

HPA = "HorizontalPodAutoscaler"
SCALED_OBJECT = "ScaledObject"
METRIC = "penstock_operator_desired_replicas"
"""The operator's gauge, and its name in an external metrics API."""


@dataclass(frozen=True)
class ScalerFacts:
    """A HorizontalPodAutoscaler or ScaledObject of the endpoint: the operator's, or the HPA that KEDA creates."""

    kind: str
    name: str
    owner: str = ""
    """Kind of its controller: `ModelEndpoint` when the operator created it, `ScaledObject` when KEDA did."""
    exact: bool = False
    """The API server kept the requested tolerance of 0 (feature gate HPAConfigurableTolerance)."""
    working: bool | None = None
    """Whether it can scale: the condition ScalingActive of an HPA, Ready of a ScaledObject; None: not reported yet."""
    reason: str = ""
    message: str = ""
    deleting: bool = False
    most: int = 0
    """The largest number of replicas that it may set."""

    @property
    def ours(self) -> bool:
        """Whether the operator created it, and so deletes it."""
        return self.owner == "ModelEndpoint"

    @property
    def broken(self) -> bool:
        """Whether it reports that it cannot scale. At zero replicas an HPA reports ScalingDisabled, which is normal."""
        return self.working is False and self.reason != "ScalingDisabled"

    @classmethod
    def from_object(cls, value: Object) -> ScalerFacts:
        """Extract the facts of a HorizontalPodAutoscaler (autoscaling/v2) or a ScaledObject (keda.sh/v1alpha1)."""
        metadata, spec, status = value["metadata"], value.get("spec") or {}, value.get("status") or {}
        kind = SCALED_OBJECT if "triggers" in spec else HPA
        wanted = "Ready" if kind == SCALED_OBJECT else "ScalingActive"
        condition: Object = next((entry for entry in status.get("conditions") or [] if entry.get("type") == wanted), {})
        owners = metadata.get("ownerReferences") or []
        return cls(
            kind=kind,
            name=metadata["name"],
            owner=next((str(owner["kind"]) for owner in owners if owner.get("controller")), ""),
            exact=_tolerance(spec.get("behavior") or {}),
            working={"True": True, "False": False}.get(condition.get("status") or ""),
            reason=condition.get("reason") or "",
            message=condition.get("message") or "",
            deleting="deletionTimestamp" in metadata,
            most=int(spec.get("maxReplicaCount" if kind == SCALED_OBJECT else "maxReplicas") or 0),
        )


def _tolerance(behaviour: Object) -> bool:
    """Whether both directions have the tolerance that the operator sets. API servers without the feature drop the
    field."""
    return all("tolerance" in (behaviour.get(direction) or {}) for direction in ("scaleUp", "scaleDown"))


def handing_over(old: tuple[ScalerFacts, ...]) -> Finding:
    """Scalers of another mode still write the replica count."""
    names = ", ".join(f"the {one.kind} {one.name}" for one in old)
    keda = any(SCALED_OBJECT in {one.kind, one.owner} for one in old)
    hint = " KEDA has to remove it: does its operator run?" if keda else ""
    return unknown(Reason.HANDING_OVER, f"The number of replicas stays until {names} of the mode before is gone.{hint}")


def cannot_scale(scaler: ScalerFacts) -> Finding:
    """The operator decided, but the scaler that should follow the decision cannot."""
    where = (
        "its triggers"
        if SCALED_OBJECT in {scaler.kind, scaler.owner}
        else f"external.metrics.k8s.io, which has to have {METRIC}: docs/how-to/scale-with-hpa-or-keda.md has the rule "
        "for an adapter"
    )
    message = stopped(f"{scaler.reason}: {scaler.message}" if scaler.message else scaler.reason)
    return no(
        Reason.SCALER_FAILS,
        f"The {scaler.kind} {scaler.name} cannot scale: {message} The number of replicas stays as it is. "
        f"Look at {where}.",
    )


@dataclass(frozen=True)
class DesiredScale:
    """The autoscaler's last published decision, in the modes Internal, HPA and KEDA."""

    replicas: int
    reason: str = ""
    """The figures of the decision in one sentence."""
    cause: str = ""
    """The kind of decision, as one CamelCase word."""
    metrics: Finding | None = None
    """Whether the load can be read, for the condition MetricsAvailable; None: it can."""
    requests_per_second: float | None = None
    """The measured load."""
    capacity_per_replica: float | None = None
    """Requests per second."""
    p95_milliseconds: float | None = None
    """As observed."""
    curve: Finding | None = None
    """Whether replicas are as fast as their capacity curve, for the condition CurveCurrent; None: not known."""
    slowdown: float | None = None
    """How many times slower the replicas are than their capacity curve."""
    memory: str = ""
    """The autoscaler's state that a new leader continues from."""


class CanaryOutcome(StrEnum):
    """The next step of a rollout with a canary."""

    CONTINUE = "Continue"
    PASS = "Pass"  # noqa: S105 - no password
    REJECT = "Reject"


class CanaryReason(StrEnum):
    """Why a canary passed or was rejected."""

    NOT_WORSE = "NotWorse"
    FEW_REQUESTS = "FewRequests"
    """It passed: few requests came, and they show nothing worse."""
    MORE_ERRORS = "MoreErrors"
    SLOWER = "Slower"
    NO_METRICS = "NoMetrics"
    """The pods of one of the plans could not be read."""
    POD_FAILS = "PodFails"
    """A new pod crashed, or none became ready."""


@dataclass(frozen=True)
class CanaryReport:
    """The last look at a canary."""

    template: str
    """The hash of the pod template that it tries."""
    outcome: CanaryOutcome
    reason: CanaryReason | None = None
    """None while it continues."""
    message: str = ""
    """The figures of both plans, as a clause."""
    requests: int = 0
    """Answered by its pods."""
    errors: int = 0
