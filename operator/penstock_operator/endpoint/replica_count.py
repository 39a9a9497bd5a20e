"""The replica count, and the conditions and Events about scaling.

In each mode there is exactly one writer of `spec.replicas`: the operator in the modes Internal, External and None, an
HPA in the modes HPA and KEDA.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from datetime import datetime

from penstock.resources.conditions import timestamp
from penstock.resources.endpoint_parts.scaling import ScalingMode
from penstock.resources.status import ScalingStatus
from penstock_operator.decide import Cause
from penstock_operator.endpoint.prometheus_urls import url_problem
from penstock_operator.endpoint.snapshot import EndpointSnapshot
from penstock_operator.endpoint.spec import ParsedEndpoint
from penstock_operator.facts.findings import Event, Finding, clipped, no, sentence, unknown, yes
from penstock_operator.facts.installation import PlanSettings
from penstock_operator.facts.reasons import Reason
from penstock_operator.facts.scaling import HPA, SCALED_OBJECT, DesiredScale, ScalerFacts, cannot_scale, handing_over
from penstock_operator.facts.workloads import DeploymentFacts

DECIDED = frozenset({ScalingMode.INTERNAL, ScalingMode.HPA, ScalingMode.KEDA})
"""The modes in which the autoscaler decides the replica count."""
SCALER_MODES = frozenset({ScalingMode.HPA, ScalingMode.KEDA})
"""The modes in which an object besides the operator writes the replica count."""


def operator_writes(mode: ScalingMode) -> bool:
    """Whether the operator writes the decided count itself; otherwise an HPA does."""
    return mode is ScalingMode.INTERNAL


@dataclass(frozen=True)
class ReplicaTarget:
    """The replica count of the Deployment and its writer."""

    wanted: int
    written: bool
    """True: the operator applies `spec.replicas`. False: it leaves the field out, and an HPA owns it."""
    kept: bool = False
    """The operator applies the present count until an HPA has written one."""

    @property
    def chosen(self) -> bool:
        """The operator chooses the count, which no other scaler writes."""
        return self.written and not self.kept


def replica_target(
    endpoint: ParsedEndpoint,
    deployment: DeploymentFacts | None,
    scale: DesiredScale | None,
    *,
    others: bool = False,
    most: int | None = None,
) -> ReplicaTarget:
    """The replica count. `others`: a scaler of a previous mode still exists. `most`: the number that the quota of the
    namespace allows; None: it has none.

    A suspended endpoint has 0 in every mode; an HPA ignores a Deployment with 0 replicas.
    """
    spec = endpoint.spec
    if spec.suspend:
        return ReplicaTarget(0, written=True)
    if others and deployment is not None:
        # It may still write its count: two writers would make pods come and go.
        return _present_count(deployment)
    match spec.scaling.mode:
        case ScalingMode.EXTERNAL | ScalingMode.NONE:
            return ReplicaTarget(spec.replicas, written=True)
        case ScalingMode.HPA | ScalingMode.KEDA:
            # A Deployment that no HPA has scaled yet starts with the API server's default of 1. So does one that the
            # operator had suspended; another one without replicas was scaled to zero, by KEDA or a user.
            if deployment is None or deployment.wanted == 0:
                ours = deployment is None or deployment.replicas_ours_alone
                return ReplicaTarget(1 if ours else 0, written=False)
            return _present_count(deployment)
        case ScalingMode.INTERNAL:
            number = _internal(endpoint, deployment, scale)
            return ReplicaTarget(number if most is None else min(number, most), written=True)


def _present_count(deployment: DeploymentFacts) -> ReplicaTarget:
    """Keep the present count. When the operator is the only owner of the field it keeps applying it until another
    client has written a count: a field without an owner would return to the default of 1."""
    ours = deployment.replicas_ours_alone
    return ReplicaTarget(deployment.wanted, written=ours, kept=ours)


def _internal(endpoint: ParsedEndpoint, deployment: DeploymentFacts | None, scale: DesiredScale | None) -> int:
    scaling = endpoint.spec.scaling
    least, most = scaling.min_replicas, scaling.max_replicas
    if scale is not None:
        return min(most, max(least, scale.replicas))
    if deployment is None:
        return max(1, least)
    if deployment.wanted == 0:
        # Idle by the autoscaler's decision; or just resumed after suspension, which needs a pod again.
        idle = (endpoint.status.get("scaling") or {}).get("desired") == 0
        return least if idle else max(1, least)
    return min(most, max(least, deployment.wanted))


def in_force(scalers: Iterable[ScalerFacts]) -> ScalerFacts | None:
    """The HorizontalPodAutoscaler that writes the count."""
    return next((one for one in scalers if one.kind == HPA and not one.deleting), None)


def left_over(scalers: Iterable[ScalerFacts], mode: ScalingMode) -> tuple[ScalerFacts, ...]:
    """Scalers of a previous mode (including KEDA's): until they are gone they may write the count."""
    return tuple(one for one in scalers if not _belongs(one, mode))


def _belongs(scaler: ScalerFacts, mode: ScalingMode) -> bool:
    if mode is ScalingMode.HPA:
        return scaler.kind == HPA and scaler.ours
    return mode is ScalingMode.KEDA and SCALED_OBJECT in {scaler.kind, scaler.owner}


def prometheus_of(endpoint: ParsedEndpoint, settings: PlanSettings) -> str:
    """The Prometheus that KEDA queries for the operator's gauge; empty: not configured, or not allowed."""
    url = endpoint.spec.scaling.metrics.prometheus.url
    if url is None:
        return settings.prometheus_url
    return "" if url_problem(url, settings) else url


METRICS_REMEDY = (
    "Do the pods answer on /metrics from where the operator runs (network policies), or does the Prometheus of "
    "scaling.metrics.prometheus scrape them? Nothing shrinks meanwhile."
)


def metrics_available(observed: EndpointSnapshot, endpoint: ParsedEndpoint) -> Finding:
    """The condition MetricsAvailable: the load can be read where the operator needs it, and the scaler follows the
    decision."""
    scaling, scale = endpoint.spec.scaling, observed.scale
    mode = scaling.mode
    old = left_over(observed.scalers, mode)
    if old and not endpoint.spec.suspend:
        return handing_over(old)
    if mode not in DECIDED:
        return yes(Reason.NOT_NEEDED, f"With scaling.mode {mode.value} the operator does not read the load.")
    if mode is ScalingMode.INTERNAL and scaling.min_replicas == scaling.max_replicas:
        return yes(Reason.NOT_NEEDED, "minReplicas is maxReplicas: whatever the load is, the number stays.")
    if mode is ScalingMode.KEDA and observed.settings.keda:
        if SCALED_OBJECT in observed.unknown_kinds:
            return no(
                Reason.NO_KEDA,
                "The mode KEDA needs KEDA, and the API server has no scaledobjects.keda.sh: install KEDA, or choose "
                "another scaling.mode, such as Internal. The number of replicas stays as it is.",
            )
        url = scaling.metrics.prometheus.url
        if url is not None and (problem := url_problem(url, observed.settings)):
            return no(Reason.NO_PROMETHEUS, f"{sentence(problem)} The number of replicas stays as it is.")
        if not prometheus_of(endpoint, observed.settings):
            return no(
                Reason.NO_PROMETHEUS,
                "The mode KEDA needs a Prometheus that has the operator's metrics: name it in "
                "scaling.metrics.prometheus.url, or for all endpoints with the operator's --prometheus-url.",
            )
    if scale is None:
        return unknown(Reason.NOT_READ, "The load has not been read yet.")
    if scale.metrics is not None and scale.metrics.false:
        return no(scale.metrics.reason, f"{sentence(scale.metrics.message)} {METRICS_REMEDY}")
    broken = next((one for one in observed.scalers if one.broken and not one.deleting), None)
    if broken is not None:
        return cannot_scale(broken)
    return yes(Reason.READ, "The load is read: status.scaling has the last decision.")


def curve_current(endpoint: ParsedEndpoint, scale: DesiredScale | None) -> Finding:
    """The condition CurveCurrent: the replicas are as fast as measured, judged by the latency of their traffic."""
    if endpoint.spec.scaling.mode not in DECIDED:
        return unknown(
            Reason.NOT_WATCHED, "In this scaling mode the operator does not look at the latency of the traffic."
        )
    if scale is None or scale.curve is None:
        return unknown(Reason.NOT_READ, "The latency of the traffic has not been read yet.")
    return replace(scale.curve, message=sentence(scale.curve.message))


def scaling_status(
    before: ScalingStatus | None, replicas: ReplicaTarget, scale: DesiredScale | None, now: datetime
) -> ScalingStatus | None:
    """`status.scaling`: the autoscaler's last decision. Without a new decision the previous one stays."""
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


def scaling_events(
    before: ScalingStatus | None, after: ScalingStatus | None, replicas: ReplicaTarget, *, suspended: bool
) -> tuple[Event, ...]:
    """Events when the count changes, and when maxReplicas begins to limit it, with the reason of the decision."""
    if before is None or after is None or suspended:
        return ()
    message = after.reason or f"{after.desired} replicas, {before.desired} before."
    events = []
    if after.desired != before.desired:
        up = after.desired > before.desired
        # An HPA follows and posts its own event, which does not have the reason of the decision.
        reasons = (
            (Reason.SCALED_UP, Reason.SCALED_DOWN)
            if replicas.written
            else (Reason.MORE_REPLICAS_WANTED, Reason.FEWER_REPLICAS_WANTED)
        )
        events.append(Event("Normal", reasons[0 if up else 1], message))
    if after.cause == Cause.MAXIMUM.value != before.cause:
        events.append(Event("Warning", Reason.SCALING_LIMITED, message))
    return tuple(events)
