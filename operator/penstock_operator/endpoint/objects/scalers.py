"""The objects that scale a Deployment in the modes HPA and KEDA.

An HPA scales on the number that the operator decided, with a target of one per replica. It does nothing while the ratio
of the metric to the target is within 10 % of 1, so from ten replicas on it would not add or remove a single one.
Therefore its tolerance is set to 0 (feature gate HPAConfigurableTolerance: since Kubernetes 1.33, on by default since
1.35). An API server without the feature drops the field; then minReplicas and maxReplicas are the decided number,
because an HPA enforces its bounds regardless of tolerance. Its stabilisation windows are 0: the operator has already
applied them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from penstock.resources.endpoint_parts.scaling import Scaling, ScalingMode
from penstock_operator.endpoint.replica_count import in_force, left_over, prometheus_of
from penstock_operator.endpoint.snapshot import EndpointSnapshot, Part
from penstock_operator.endpoint.spec import ParsedEndpoint
from penstock_operator.facts.names import Json, Ref
from penstock_operator.facts.scaling import HPA, METRIC, SCALED_OBJECT, DesiredScale, ScalerFacts

POLLING_SECONDS = 15
COOLDOWN_SECONDS = 300
SMALLEST_PREVENTED = 9
"""The smallest count that a tolerance of 10 % can prevent: 9 after 10."""


@dataclass(frozen=True)
class HpaBounds:
    """minReplicas and maxReplicas of an HPA."""

    least: int
    most: int


def hpa_bounds(
    scaling: Scaling,
    scale: DesiredScale | None,
    scalers: tuple[ScalerFacts, ...],
    *,
    present: int = 1,
    most: int | None = None,
) -> HpaBounds:
    """The bounds of the spec; the decided number itself where the HPA's tolerance could prevent it.

    While the HPA does not exist, it is not known whether the API server keeps the tolerance: it starts with the spec's
    bounds. In a namespace with a quota, which allows `most` replicas, the upper bound is the decided number (or the
    `present` one): other endpoints can count on the rest.
    """
    found, decided = HpaBounds(scaling.min_replicas, scaling.max_replicas), present if scale is None else scale.replicas
    number = min(found.most, max(found.least, decided))
    hpa = in_force(scalers)
    if scale is not None and hpa is not None and not hpa.exact and scale.replicas >= SMALLEST_PREVENTED:
        found = HpaBounds(number, number)
    if most is None:
        return found
    number = max(1, min(number, most))
    return HpaBounds(min(found.least, number), number)


def bounds(endpoint: ParsedEndpoint, observed: EndpointSnapshot, most: int | None) -> HpaBounds:
    """The bounds for this endpoint. `most`: the replicas that the quota allows; None: there is no quota."""
    present = 1 if observed.deployment is None else observed.deployment.wanted
    return hpa_bounds(endpoint.spec.scaling, observed.scale, observed.scalers, present=present, most=most)


def scaler_part(endpoint: ParsedEndpoint, observed: EndpointSnapshot, most: int | None) -> Part:
    """The object that scales in the modes HPA and KEDA. It is created only after the object of the previous mode (and
    KEDA's HPA) has disappeared: there is one writer of the replica count at any time."""
    mode, settings = endpoint.spec.scaling.mode, observed.settings
    wanted: Json | None = None
    if mode is ScalingMode.HPA and settings.hpa:
        wanted = horizontal_pod_autoscaler(endpoint, bounds(endpoint, observed, most))
    elif mode is ScalingMode.KEDA and settings.keda and (url := prometheus_of(endpoint, settings)):
        wanted = scaled_object(endpoint, url, bounds(endpoint, observed, most))
    if endpoint.spec.suspend or (wanted is not None and wanted["kind"] in observed.unknown_kinds):
        wanted = None
    left = without_scalers(endpoint, observed, kept="" if wanted is None else wanted["kind"])
    if wanted is None or left_over(observed.scalers, mode):
        return left
    return replace(left, apply=(wanted,))


def without_scalers(endpoint: ParsedEndpoint, observed: EndpointSnapshot, *, kept: str = "") -> Part:
    """Delete the objects that scale, except the object of the kind `kept`."""
    refs = (Ref(kind, endpoint.name) for kind in (HPA, SCALED_OBJECT) if kind != kept)
    return Part(delete=tuple(ref for ref in refs if ref in observed.present))


def labels(endpoint: ParsedEndpoint) -> dict[str, str]:
    """Labels of the gauge's series for this endpoint."""
    return {"model_endpoint": endpoint.name, "model_endpoint_namespace": endpoint.namespace}


def behaviour() -> Json:
    """Scale immediately, without stabilisation windows or tolerance."""
    at_once = {"type": "Percent", "value": 100, "periodSeconds": 15}
    up = [at_once, {"type": "Pods", "value": 4, "periodSeconds": 15}]
    common = {"stabilizationWindowSeconds": 0, "tolerance": "0", "selectPolicy": "Max"}
    return {"scaleUp": {**common, "policies": up}, "scaleDown": {**common, "policies": [at_once]}}


def horizontal_pod_autoscaler(endpoint: ParsedEndpoint, between: HpaBounds) -> Json:
    """The HPA over an external metric: the server of external.metrics.k8s.io must provide the operator's gauge."""
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


def scaled_object(endpoint: ParsedEndpoint, prometheus_url: str, between: HpaBounds) -> Json:
    """KEDA's ScaledObject over the operator's gauge in this Prometheus.

    The HPA that KEDA creates for it has KEDA's own name, so it never replaces another HPA, and this object's labels, by
    which the operator watches it.
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
                        # During a change of leader two operators may export the series: the larger number counts.
                        "query": f"max({METRIC}{{{matchers}}})",
                        "threshold": "1",
                        # A missing series must not be taken for zero load.
                        "ignoreNullValues": "false",
                    },
                }
            ],
        },
    )
