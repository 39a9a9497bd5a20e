"""How the number of replicas is decided."""

from __future__ import annotations

from enum import StrEnum
from typing import ClassVar

from pydantic import Field

from penstock.resources.base import Spec
from penstock.resources.fields.rules import ObjectName, Rule
from penstock.resources.fields.text_fields import PrometheusUrl

MOST_REPLICAS = 1000


class ScalingMode(StrEnum):
    """What sets the number of replicas."""

    INTERNAL = "Internal"
    HPA = "HPA"
    KEDA = "KEDA"
    EXTERNAL = "External"
    NONE = "None"


class WhenMetricsMissing(StrEnum):
    """What happens to the number of replicas while the load is unknown."""

    HOLD = "Hold"
    FALLBACK = "Fallback"


class PrometheusQueries(Spec):
    """PromQL queries, where the metrics do not come directly from the runtime's pods. `$namespace` and `$endpoint` are
    replaced by those of this endpoint. Each query must return one number. They need `url` and `secretName`: the
    operator's own access is for its own queries only."""

    request_rate: str | None = Field(
        default=None, min_length=1, max_length=2048, description="Requests per second of all replicas together."
    )
    good_latency_ratio: str | None = Field(
        default=None,
        min_length=1,
        max_length=2048,
        description="The share of requests that are answered within objective.latency, 0 to 1.",
    )
    in_flight: str | None = Field(
        default=None, min_length=1, max_length=2048, description="Requests that are being answered or waiting."
    )


class Prometheus(Spec):
    """The Prometheus server that scrapes the endpoint's pods."""

    url: PrometheusUrl | None = Field(
        default=None,
        description="Such as http://prometheus.monitoring:9090, on a host that the operator's setting "
        "prometheus_hosts allows. None: the operator's own setting.",
    )
    secret_name: ObjectName | None = Field(
        default=None,
        description="A Secret of this namespace with `token`, or with `username` and `password`. Its annotation "
        "penstock.dev/prometheus-url has the URL that it is for.",
    )
    queries: PrometheusQueries = PrometheusQueries()


class ScalingMetrics(Spec):
    """Where the load metrics are read."""

    prometheus: Prometheus = Prometheus()


class Scaling(Spec):
    """How the number of replicas is decided."""

    mode: ScalingMode = Field(
        default=ScalingMode.INTERNAL,
        description="What decides the number of replicas. `Internal`: the operator, from the measured capacity and the "
        "live traffic. `HPA` and `KEDA`: an object of that kind that the operator manages. `External`: any client that "
        "writes spec.replicas through the scale subresource. `None`: spec.replicas, as written here.",
    )
    min_replicas: int = Field(
        default=1,
        ge=0,
        le=MOST_REPLICAS,
        description="Lower limit; 0 lets an idle endpoint end all its pods (docs/reference/gateway.md).",
    )
    max_replicas: int = Field(default=4, ge=1, le=MOST_REPLICAS, description="Upper limit.")
    headroom: float = Field(
        default=0.75, gt=0, le=1, description="The share of its measured capacity that a replica is planned to serve."
    )
    scale_down_window_seconds: int | None = Field(
        default=None,
        ge=0,
        le=3600,
        description="Fewer replicas only when every number that was wanted within this time was lower, as with an "
        "HPA's stabilizationWindowSeconds. None: the window of the autoscaler, 120 s, 60 s while the load is "
        "falling, and up to 16 minutes after a scale-down that was too early (docs/explanation/autoscaling.md).",
    )
    metrics: ScalingMetrics = ScalingMetrics()
    when_metrics_missing: WhenMetricsMissing = Field(
        default=WhenMetricsMissing.HOLD,
        description="While the load cannot be read: `Hold` keeps the number of replicas; `Fallback` raises it to "
        "fallbackReplicas, and never lowers it.",
    )
    fallback_replicas: int | None = Field(
        default=None, ge=1, le=MOST_REPLICAS, description="The number of replicas for whenMetricsMissing: Fallback."
    )

    RULES: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "self.minReplicas <= self.maxReplicas",
            lambda it: it.min_replicas <= it.max_replicas,
            "minReplicas {minReplicas} is over maxReplicas {maxReplicas}: raise maxReplicas or lower minReplicas",
        ),
        Rule(
            "self.whenMetricsMissing != 'Fallback' || has(self.fallbackReplicas)",
            lambda it: it.when_metrics_missing is not WhenMetricsMissing.FALLBACK or it.fallback_replicas is not None,
            "whenMetricsMissing: Fallback needs fallbackReplicas: add it, or write whenMetricsMissing: Hold",
        ),
        Rule(
            "!has(self.fallbackReplicas) || self.fallbackReplicas <= self.maxReplicas",
            lambda it: it.fallback_replicas is None or it.fallback_replicas <= it.max_replicas,
            "fallbackReplicas {fallbackReplicas} is over maxReplicas {maxReplicas}: "
            "raise maxReplicas or lower fallbackReplicas",
        ),
    )
