"""What is said of scaling: the last decision in the status, an Event when the number changes, and whether the load is
known."""

from __future__ import annotations

from datetime import datetime

from penstock.scaling import ScalingMode
from penstock.status import ScalingStatus, timestamp
from penstock_operator.plan.actions import Event
from penstock_operator.plan.autoscaling import prometheus_of
from penstock_operator.plan.conditions import Finding, clipped, no, unknown, yes
from penstock_operator.plan.endpoint import Endpoint
from penstock_operator.plan.observed import Scale
from penstock_operator.plan.replicas import DECIDED, Replicas
from penstock_operator.plan.settings import PlanSettings

WHAT_TO_DO = (
    "Do the pods answer on /metrics from where the operator runs (network policies), or does the Prometheus of "
    "scaling.metrics.prometheus scrape them? Nothing shrinks meanwhile."
)


def metrics_available(endpoint: Endpoint, scale: Scale | None, settings: PlanSettings) -> Finding:
    """Whether the load can be read, where the operator has to."""
    scaling = endpoint.spec.scaling
    mode = scaling.mode
    if mode not in DECIDED:
        return yes("NotNeeded", f"With scaling.mode {mode.value} the operator does not read the load.")
    if mode is ScalingMode.INTERNAL and scaling.min_replicas == scaling.max_replicas:
        return yes("NotNeeded", "minReplicas is maxReplicas: whatever the load is, the number stays.")
    if mode is ScalingMode.KEDA and settings.keda and not prometheus_of(endpoint, settings):
        return no(
            "NoPrometheus",
            "The mode KEDA needs a Prometheus that has the operator's metrics: name it in "
            "scaling.metrics.prometheus.url, or for all endpoints with the operator's --prometheus-url.",
        )
    if scale is None:
        return unknown("NotRead", "The load has not been read yet.")
    if scale.metrics_available:
        return yes("Read", "The load is read: status.scaling has the last decision.")
    why = scale.metrics_message or "The load cannot be read"
    return no(scale.metrics_reason or "MetricsMissing", f"{why[:1].upper()}{why[1:].rstrip('.')}. {WHAT_TO_DO}")


def curve_current(endpoint: Endpoint, scale: Scale | None) -> Finding:
    """Whether what serves is as fast as it was measured to be, as far as its traffic tells."""
    if endpoint.spec.scaling.mode not in DECIDED:
        return unknown("NotWatched", "In this scaling mode the operator does not look at the latency of the traffic.")
    if scale is None or scale.curve_current is None:
        return unknown("NotRead", "The latency of the traffic has not been read yet.")
    message = scale.curve_message or "The observed p95 was held against the measured one"
    said = f"{message[:1].upper()}{message[1:].rstrip('.')}."
    if scale.curve_current:
        return yes("AsMeasured", said)
    return no(scale.curve_reason or "SlowerThanMeasured", said)


def scaling_status(
    before: ScalingStatus | None, replicas: Replicas, scale: Scale | None, now: datetime
) -> ScalingStatus | None:
    """The last decision of the autoscaler; without a new one, the last stays as it was."""
    if scale is None:
        return before
    desired = replicas.wanted if replicas.written else scale.replicas
    changed = before is None or before.desired != desired
    return ScalingStatus(
        desired=desired,
        reason=clipped(scale.reason, 4096),
        last_scale_time=timestamp(now) if changed or before is None else before.last_scale_time,
        requests_per_second=scale.requests_per_second,
        capacity_per_replica=scale.capacity_per_replica,
        p95_milliseconds=scale.p95_milliseconds,
        slow_down=scale.slowdown,
    )


def scaled(
    before: ScalingStatus | None, after: ScalingStatus | None, replicas: Replicas, *, suspended: bool
) -> tuple[Event, ...]:
    """An event when the number changes that the operator writes: the decision in its own words."""
    if before is None or after is None or suspended or not replicas.written or after.desired == before.desired:
        return ()
    reason = "ScaledUp" if after.desired > before.desired else "ScaledDown"
    return (Event("Normal", reason, after.reason or f"{after.desired} replicas, {before.desired} before."),)
