"""How many replicas, and whether the operator writes the number: there is exactly one writer in each mode."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.resources.scaling import ScalingMode
from penstock_operator.plan.endpoint import Endpoint
from penstock_operator.plan.observed import DeploymentFacts, Scale

DECIDED = frozenset({ScalingMode.INTERNAL, ScalingMode.HPA, ScalingMode.KEDA})
"""The modes in which the autoscaler says a number."""


def written_here(mode: ScalingMode) -> bool:
    """Whether the operator writes what the autoscaler says; else it only tells an HPA."""
    return mode is ScalingMode.INTERNAL


@dataclass(frozen=True)
class Replicas:
    """The number."""

    wanted: int
    """How many there are to be."""
    written: bool
    """True: the operator writes it. False: the field stays out of what it applies, and belongs to the HPA."""
    kept: bool = False
    """It is written as it stands, until somebody else writes his own."""


def replicas(
    endpoint: Endpoint, deployment: DeploymentFacts | None, scale: Scale | None, *, others: bool = False
) -> Replicas:
    """Who decides, and what. `others`: something that scaled in a mode that is over is still there.

    A suspended endpoint has none, in every mode; an HPA leaves a Deployment of 0 replicas alone.
    """
    spec = endpoint.spec
    if spec.suspend:
        return Replicas(0, written=True)
    if others and deployment is not None:
        # It may yet write its number: two writers would have pods come and go.
        return _as_it_stands(deployment)
    match spec.scaling.mode:
        case ScalingMode.EXTERNAL | ScalingMode.NONE:
            return Replicas(spec.replicas, written=True)
        case ScalingMode.HPA | ScalingMode.KEDA:
            # A Deployment that an HPA has never seen begins with the API server's default of 1.
            if deployment is None or deployment.wanted == 0:
                return Replicas(1, written=False)
            return _as_it_stands(deployment)
        case ScalingMode.INTERNAL:
            return Replicas(_internal(endpoint, deployment, scale), written=True)


def _as_it_stands(deployment: DeploymentFacts) -> Replicas:
    """What only we have written goes back to 1 when we let go of it: the number stays ours, as it stands, until
    somebody else has written his own."""
    ours = deployment.replicas_ours_alone
    return Replicas(deployment.wanted, written=ours, kept=ours)


def _internal(endpoint: Endpoint, deployment: DeploymentFacts | None, scale: Scale | None) -> int:
    scaling = endpoint.spec.scaling
    least, most = scaling.min_replicas, scaling.max_replicas
    if scale is not None:
        return min(most, max(least, scale.replicas))
    if deployment is None:
        return max(1, least)
    if deployment.wanted == 0:
        # Idle, as the autoscaler once decided; or just resumed from being suspended, which wants a pod again.
        idle = (endpoint.status.get("scaling") or {}).get("desired") == 0
        return least if idle else max(1, least)
    return min(most, max(least, deployment.wanted))
