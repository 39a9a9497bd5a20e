"""The objects that scale in the modes HPA and KEDA: over the number that the operator has decided, each one replica.

An HPA takes no step while the ratio of what is to what should be is within 10 % of 1, so that from ten replicas on it
would not add one, nor take one away. The tolerance is set to nothing, behind the feature gate HPAConfigurableTolerance
of Kubernetes: there since 1.33, on by default since 1.35. An API server without it drops the field. Then the bounds of
a number that the tolerance could hold back are the number itself: an HPA keeps to its bounds whatever its tolerance.

Its stabilisation windows are set to nothing as well, since the number has been through the operator's own.
"""

from __future__ import annotations

from dataclasses import dataclass

from penstock.resources.scaling import Scaling
from penstock_operator.plan.endpoint import Endpoint
from penstock_operator.plan.observed import Scale
from penstock_operator.plan.scalers import ScalerFacts, in_force
from penstock_operator.plan.settings import Json, PlanSettings

METRIC = "penstock_operator_desired_replicas"
"""The operator's gauge, and the name under which an external metrics API offers it."""
POLLING_SECONDS = 15
COOLDOWN_SECONDS = 300
LEAST_HELD_BACK = 9
"""The smallest number that a tolerance of 10 % can keep from coming about: as 9 after 10."""


@dataclass(frozen=True)
class Bounds:
    """Between which numbers an HPA may choose."""

    least: int
    most: int


def bounds(scaling: Scaling, scale: Scale | None, scalers: tuple[ScalerFacts, ...]) -> Bounds:
    """Those of the spec; narrowed to the number that was decided where the HPA's tolerance could hold it back.

    While the HPA is not there yet nobody knows what the API server keeps of it: it begins with the spec's.
    """
    present = in_force(scalers)
    if scale is None or present is None or present.exact or scale.replicas < LEAST_HELD_BACK:
        return Bounds(scaling.min_replicas, scaling.max_replicas)
    number = min(scaling.max_replicas, max(scaling.min_replicas, scale.replicas))
    return Bounds(number, number)


def labels(endpoint: Endpoint) -> dict[str, str]:
    """Of the gauge's series for this endpoint."""
    return {"model_endpoint": endpoint.name, "model_endpoint_namespace": endpoint.namespace}


def behaviour() -> Json:
    """At once, and to the last replica."""
    at_once = {"type": "Percent", "value": 100, "periodSeconds": 15}
    up = [at_once, {"type": "Pods", "value": 4, "periodSeconds": 15}]
    common = {"stabilizationWindowSeconds": 0, "tolerance": "0", "selectPolicy": "Max"}
    return {"scaleUp": {**common, "policies": up}, "scaleDown": {**common, "policies": [at_once]}}


def horizontal_pod_autoscaler(endpoint: Endpoint, between: Bounds) -> Json:
    """Over an external metric: whatever serves external.metrics.k8s.io must offer the operator's gauge there."""
    return endpoint.owned(
        "autoscaling/v2",
        "HorizontalPodAutoscaler",
        {
            "scaleTargetRef": {"apiVersion": "apps/v1", "kind": "Deployment", "name": endpoint.name},
            # 0 needs a feature gate of the API server that is off by default.
            "minReplicas": max(1, between.least),
            "maxReplicas": between.most,
            "metrics": [
                {
                    "type": "External",
                    "external": {
                        "metric": {"name": METRIC, "selector": {"matchLabels": labels(endpoint)}},
                        "target": {"type": "AverageValue", "averageValue": "1"},
                    },
                }
            ],
            "behavior": behaviour(),
        },
    )


def prometheus_of(endpoint: Endpoint, settings: PlanSettings) -> str:
    """Where KEDA is to ask for the operator's gauge; empty: nobody has said."""
    return endpoint.spec.scaling.metrics.prometheus.url or settings.prometheus_url


def scaled_object(endpoint: Endpoint, prometheus_url: str, between: Bounds) -> Json:
    """KEDA's, over the operator's gauge in this Prometheus.

    The HPA that KEDA makes of it gets KEDA's own name for it, so that it never takes the place of another, and the
    labels of this object, by which the operator follows it.
    """
    matchers = ",".join(f'{key}="{value}"' for key, value in sorted(labels(endpoint).items()))
    return endpoint.owned(
        "keda.sh/v1alpha1",
        "ScaledObject",
        {
            "scaleTargetRef": {"apiVersion": "apps/v1", "kind": "Deployment", "name": endpoint.name},
            "pollingInterval": POLLING_SECONDS,
            "cooldownPeriod": COOLDOWN_SECONDS,
            "minReplicaCount": between.least,
            "maxReplicaCount": between.most,
            "advanced": {"horizontalPodAutoscalerConfig": {"behavior": behaviour()}},
            "triggers": [
                {
                    "type": "prometheus",
                    "metricType": "AverageValue",
                    "metadata": {
                        "serverAddress": prometheus_url,
                        # Two operators, for a moment: the one that knows asks for more.
                        "query": f"max({METRIC}{{{matchers}}})",
                        "threshold": "1",
                        # No answer is no load only for those who believe it.
                        "ignoreNullValues": "false",
                    },
                }
            ],
        },
    )
