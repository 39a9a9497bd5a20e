"""What is said of scaling: the last decision in the status, an Event when the number changes, and whether the load is
known."""

from __future__ import annotations

from datetime import datetime

from penstock.resources.scaling import ScalingMode
from penstock.resources.status import ScalingStatus, timestamp
from penstock_operator.plan.actions import Event
from penstock_operator.plan.autoscaling import METRIC, prometheus_of
from penstock_operator.plan.conditions import Finding, clipped, no, stopped, unknown, yes
from penstock_operator.plan.endpoint import Endpoint
from penstock_operator.plan.observed import Observed, Scale
from penstock_operator.plan.replicas import DECIDED, Replicas
from penstock_operator.plan.scalers import SCALED_OBJECT, ScalerFacts, left_over
from penstock_operator.scaling.decide import Cause

WHAT_TO_DO = (
    "Do the pods answer on /metrics from where the operator runs (network policies), or does the Prometheus of "
    "scaling.metrics.prometheus scrape them? Nothing shrinks meanwhile."
)


def metrics_available(observed: Observed, endpoint: Endpoint) -> Finding:
    """Whether the load can be read, where the operator has to, and the number that follows from it by what scales."""
    scaling, scale = endpoint.spec.scaling, observed.scale
    mode = scaling.mode
    old = left_over(observed.scalers, mode)
    if old and not endpoint.spec.suspend:
        return _handing_over(old)
    if mode not in DECIDED:
        return yes("NotNeeded", f"With scaling.mode {mode.value} the operator does not read the load.")
    if mode is ScalingMode.INTERNAL and scaling.min_replicas == scaling.max_replicas:
        return yes("NotNeeded", "minReplicas is maxReplicas: whatever the load is, the number stays.")
    if mode is ScalingMode.KEDA and observed.settings.keda:
        if SCALED_OBJECT in observed.unknown_kinds:
            return no(
                "NoKeda",
                "The mode KEDA needs KEDA, and the API server has no scaledobjects.keda.sh: install KEDA, or choose "
                "another scaling.mode, such as Internal. The number of replicas stays as it is.",
            )
        if not prometheus_of(endpoint, observed.settings):
            return no(
                "NoPrometheus",
                "The mode KEDA needs a Prometheus that has the operator's metrics: name it in "
                "scaling.metrics.prometheus.url, or for all endpoints with the operator's --prometheus-url.",
            )
    if scale is None:
        return unknown("NotRead", "The load has not been read yet.")
    if not scale.metrics_available:
        why = scale.metrics_message or "The load cannot be read"
        return no(scale.metrics_reason or "MetricsMissing", f"{why[:1].upper()}{why[1:].rstrip('.')}. {WHAT_TO_DO}")
    broken = next((one for one in observed.scalers if one.broken and not one.deleting), None)
    if broken is not None:
        return _cannot_scale(broken)
    return yes("Read", "The load is read: status.scaling has the last decision.")


def _handing_over(old: tuple[ScalerFacts, ...]) -> Finding:
    names = ", ".join(f"the {one.kind} {one.name}" for one in old)
    keda = any(SCALED_OBJECT in {one.kind, one.owner} for one in old)
    hint = " KEDA has to let go of it: does its operator run?" if keda else ""
    return unknown("HandingOver", f"The number of replicas stays until {names} of the mode before is gone.{hint}")


def _cannot_scale(scaler: ScalerFacts) -> Finding:
    """The operator has decided, and what is to follow it does not."""
    where = (
        "its triggers"
        if SCALED_OBJECT in {scaler.kind, scaler.owner}
        else f"external.metrics.k8s.io, which has to have {METRIC}: docs/how-to/scale-with-hpa-or-keda.md has the rule "
        "for an adapter"
    )
    said = stopped(f"{scaler.reason}: {scaler.message}" if scaler.message else scaler.reason)
    return no(
        "ScalerFails",
        f"The {scaler.kind} {scaler.name} cannot scale: {said} The number of replicas stays as it is. Look at {where}.",
    )


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
        cause=scale.cause,
        memory=scale.memory,
    )


def scaled(
    before: ScalingStatus | None, after: ScalingStatus | None, replicas: Replicas, *, suspended: bool
) -> tuple[Event, ...]:
    """Events when the number changes, and when maxReplicas begins to hold it down: the decision in its own words."""
    if before is None or after is None or suspended:
        return ()
    said = after.reason or f"{after.desired} replicas, {before.desired} before."
    events = []
    if after.desired != before.desired:
        up = after.desired > before.desired
        # An HPA follows, and has an event of its own about it; it does not know why.
        reasons = ("ScaledUp", "ScaledDown") if replicas.written else ("MoreReplicasWanted", "FewerReplicasWanted")
        events.append(Event("Normal", reasons[0 if up else 1], said))
    if after.cause == Cause.MAXIMUM.value != before.cause:
        events.append(Event("Warning", "ScalingLimited", said))
    return tuple(events)
