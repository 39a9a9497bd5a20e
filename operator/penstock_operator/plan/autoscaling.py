"""The objects that scale in the modes HPA and KEDA: over the number that the operator has decided, each one replica.

An HPA takes no step while the ratio of what is to what should be is within 10 % of 1, so that from ten replicas on it
would not add one: the tolerance is set to nothing (behind the feature gate HPAConfigurableTolerance since Kubernetes
1.33; an API server without it drops the field, and steps of less than a tenth are left to the headroom). Its
stabilisation windows are set to nothing as well, since the number has been through the operator's own.
"""

from __future__ import annotations

from penstock_operator.plan.endpoint import Endpoint
from penstock_operator.plan.settings import Json, PlanSettings

METRIC = "penstock_operator_desired_replicas"
"""The operator's gauge, and the name under which an external metrics API offers it."""
POLLING_SECONDS = 15
COOLDOWN_SECONDS = 300


def labels(endpoint: Endpoint) -> dict[str, str]:
    """Of the gauge's series for this endpoint."""
    return {"model_endpoint": endpoint.name, "model_endpoint_namespace": endpoint.namespace}


def behaviour() -> Json:
    """At once, and to the last replica."""
    at_once = {"type": "Percent", "value": 100, "periodSeconds": 15}
    up = [at_once, {"type": "Pods", "value": 4, "periodSeconds": 15}]
    common = {"stabilizationWindowSeconds": 0, "tolerance": "0", "selectPolicy": "Max"}
    return {"scaleUp": {**common, "policies": up}, "scaleDown": {**common, "policies": [at_once]}}


def horizontal_pod_autoscaler(endpoint: Endpoint) -> Json:
    """Over an external metric: whatever serves external.metrics.k8s.io must offer the operator's gauge there."""
    scaling = endpoint.spec.scaling
    return endpoint.owned(
        "autoscaling/v2",
        "HorizontalPodAutoscaler",
        {
            "scaleTargetRef": {"apiVersion": "apps/v1", "kind": "Deployment", "name": endpoint.name},
            # 0 needs a feature gate of the API server that is off by default.
            "minReplicas": max(1, scaling.min_replicas),
            "maxReplicas": scaling.max_replicas,
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


def scaled_object(endpoint: Endpoint, prometheus_url: str) -> Json:
    """KEDA's, over the operator's gauge in this Prometheus."""
    scaling = endpoint.spec.scaling
    matchers = ",".join(f'{key}="{value}"' for key, value in sorted(labels(endpoint).items()))
    return endpoint.owned(
        "keda.sh/v1alpha1",
        "ScaledObject",
        {
            "scaleTargetRef": {"apiVersion": "apps/v1", "kind": "Deployment", "name": endpoint.name},
            "pollingInterval": POLLING_SECONDS,
            "cooldownPeriod": COOLDOWN_SECONDS,
            "minReplicaCount": scaling.min_replicas,
            "maxReplicaCount": scaling.max_replicas,
            "advanced": {"horizontalPodAutoscalerConfig": {"name": endpoint.name, "behavior": behaviour()}},
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
