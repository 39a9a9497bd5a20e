"""What an object that scales says of itself: the HorizontalPodAutoscaler of the mode HPA, KEDA's ScaledObject, and the
HorizontalPodAutoscaler that KEDA makes for it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from penstock.resources.scaling import ScalingMode
from penstock_operator.plan.pod_facts import Object

HPA = "HorizontalPodAutoscaler"
SCALED_OBJECT = "ScaledObject"


@dataclass(frozen=True)
class ScalerFacts:
    """One such object."""

    kind: str
    name: str
    owner: str = ""
    """Kind of its controller: `ModelEndpoint` for what the operator made, `ScaledObject` for KEDA's."""
    exact: bool = False
    """The API server kept the tolerance of 0 that was asked for (feature gate HPAConfigurableTolerance)."""
    working: bool | None = None
    """Whether it can scale: the condition ScalingActive of an HPA, Ready of a ScaledObject; None: it has not said."""
    reason: str = ""
    message: str = ""
    deleting: bool = False

    @property
    def ours(self) -> bool:
        """The operator made it, and deletes it; all else is its maker's business."""
        return self.owner == "ModelEndpoint"

    @property
    def broken(self) -> bool:
        """It says that it cannot scale. At no replicas an HPA rests, and says the same of that."""
        return self.working is False and self.reason != "ScalingDisabled"

    @classmethod
    def from_object(cls, value: Object) -> ScalerFacts:
        """Distil a HorizontalPodAutoscaler (autoscaling/v2) or a ScaledObject (keda.sh/v1alpha1)."""
        metadata, spec, status = value["metadata"], value.get("spec") or {}, value.get("status") or {}
        kind = SCALED_OBJECT if "triggers" in spec else HPA
        wanted = "Ready" if kind == SCALED_OBJECT else "ScalingActive"
        said: Object = next((entry for entry in status.get("conditions") or [] if entry.get("type") == wanted), {})
        owners = metadata.get("ownerReferences") or []
        return cls(
            kind=kind,
            name=metadata["name"],
            owner=next((str(owner["kind"]) for owner in owners if owner.get("controller")), ""),
            exact=_tolerance(spec.get("behavior") or {}),
            working={"True": True, "False": False}.get(said.get("status") or ""),
            reason=said.get("reason") or "",
            message=said.get("message") or "",
            deleting="deletionTimestamp" in metadata,
        )


def _tolerance(behaviour: Object) -> bool:
    """Both directions have one; it is ours, and nothing. An API server without the feature drops the field."""
    return all("tolerance" in (behaviour.get(direction) or {}) for direction in ("scaleUp", "scaleDown"))


def in_force(scalers: Iterable[ScalerFacts]) -> ScalerFacts | None:
    """The HorizontalPodAutoscaler that writes the number, whoever made it."""
    return next((one for one in scalers if one.kind == HPA and not one.deleting), None)


def left_over(scalers: Iterable[ScalerFacts], mode: ScalingMode) -> tuple[ScalerFacts, ...]:
    """Those of a mode that is over, KEDA's among them: until they are gone, they may write the number."""
    return tuple(one for one in scalers if not _belongs(one, mode))


def _belongs(scaler: ScalerFacts, mode: ScalingMode) -> bool:
    if mode is ScalingMode.HPA:
        return scaler.kind == HPA and scaler.ours
    return mode is ScalingMode.KEDA and SCALED_OBJECT in {scaler.kind, scaler.owner}
