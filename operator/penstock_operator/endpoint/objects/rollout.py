"""When the Deployment replaces its pods: the limit on concurrent rollouts, and pausing."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta

from penstock.resources.conditions import timestamp
from penstock.resources.rollout_status import CanaryStatus
from penstock_operator.endpoint.objects.canary import NO_CANARY, CanaryPlan, plan_canary
from penstock_operator.endpoint.objects.deployment import PROGRESS_DEADLINE_SECONDS
from penstock_operator.endpoint.replica_count import ReplicaTarget
from penstock_operator.endpoint.snapshot import EndpointSnapshot, Part
from penstock_operator.endpoint.spec import ParsedEndpoint
from penstock_operator.facts.names import CORES, ROLLOUT_BEGAN, ROLLOUT_SINCE, Json, Object
from penstock_operator.facts.workloads import DeploymentFacts, replaced
from penstock_operator.limits.concurrency import SlotDecision, SlotKey


@dataclass(frozen=True)
class RolloutPlan:
    """The Deployment with its canary."""

    part: Part = Part()  # noqa: RUF009 - frozen
    decision: SlotDecision | None = None
    """Whether the rollout may begin; None: there is none, or no limit."""
    canary: CanaryPlan = NO_CANARY
    scaled: int | None = None
    """Replicas of a Deployment that is only scaled."""


def roll_out(
    endpoint: ParsedEndpoint,
    observed: EndpointSnapshot,
    desired: Json,
    template: str,
    digest: str,
    *,
    count: ReplicaTarget,
    before: CanaryStatus | None,
) -> RolloutPlan:
    """The Deployment `desired`, and the canary's. A rollout, with its canary, begins when the limit on concurrent
    rollouts allows it. `before`: the canary in the present status."""
    present, scaled, decision = observed.deployment, None, None
    canary = plan_canary(endpoint, observed, desired, template=template, digest=digest, before=before)
    if canary.begins or not (canary.holds or canary.passed):
        decision = rollout_decision(endpoint, observed, template)
    desired = noting_start(desired, present, decision, observed.now)
    apply: tuple[Json, ...] = ()
    requeue: tuple[float, ...] = ()
    if canary.went_back:
        if present is not None and count.chosen and count.wanted != present.wanted:
            scaled = count.wanted
    elif decision is not None and not decision.allowed:
        canary = canary.without_slot()
        apply = (paused(desired, decision),)
        requeue = () if decision.requeue_seconds is None else (decision.requeue_seconds,)
    else:
        apply = (paused(desired) if canary.holds else desired,)
    if canary.deployment is not None:
        apply = (*apply, canary.deployment)
    part = Part(apply=apply, delete=canary.delete, events=canary.events, requeue=requeue)
    return RolloutPlan(part, decision, canary, scaled)


def rollout_decision(endpoint: ParsedEndpoint, observed: EndpointSnapshot, template: str) -> SlotDecision | None:
    """The slot of the rollout to the pod template with this hash; None: no pod is to be replaced, or
    rollouts have no limit.

    A rollout that has begun goes on, also with another template: its additional pods keep cores until it ends, which
    the next rollout may need. When `PROGRESS_DEADLINE_SECONDS` have passed since it began, another template goes to the
    end of the line: otherwise an endpoint that is changed all the time would keep all other rollouts waiting.
    """
    present, line = observed.deployment, observed.rollouts
    if present is None or line is None or not replaced(present, observed.replica_sets, template):
        return None
    if template == present.template and not present.paused:
        return None
    since = present.waits_since if present.paused else None
    began = present.rollout_began
    is_recent = began is not None and observed.now - began < timedelta(seconds=PROGRESS_DEADLINE_SECONDS)
    return line.slot(SlotKey(endpoint.namespace, endpoint.name), since or observed.now, anew=not is_recent)


def noting_start(desired: Json, present: DeploymentFacts | None, slot: SlotDecision | None, now: datetime) -> Json:
    """The Deployment with the time when its rollout got a slot: now, if this plan gives it."""
    has_slot = slot is not None and slot.allowed and slot.ask is not None
    began = now if has_slot else None if present is None else present.rollout_began
    if began is None:
        return desired
    annotations = {**desired["metadata"].get("annotations", {}), ROLLOUT_BEGAN: timestamp(began)}
    return {**desired, "metadata": {**desired["metadata"], "annotations": annotations}}


def paused(desired: Json, slot: SlotDecision | None = None) -> Json:
    """The Deployment with a new template that waits for a slot, or for a canary. Kubernetes scales the present pods
    meanwhile."""
    annotations = dict(desired["metadata"].get("annotations", {}))
    if slot is not None:
        annotations[ROLLOUT_SINCE] = "" if slot.ask is None else timestamp(slot.ask.since)
    return {
        **desired,
        "metadata": {**desired["metadata"], "annotations": annotations},
        "spec": {**desired["spec"], "paused": True},
    }


def with_template_of(desired: Json, replica_set: Object) -> Json:
    """The Deployment with the pod template of one of its ReplicaSets instead of a new one: its pods stay."""
    source = replica_set["spec"]["template"]
    labels = {key: value for key, value in source["metadata"]["labels"].items() if key != "pod-template-hash"}
    annotations = dict(desired["metadata"].get("annotations", {}))
    # Kubernetes copies the annotations of a Deployment to its ReplicaSet.
    known = (replica_set["metadata"].get("annotations") or {}).get(CORES)
    annotations |= {} if known is None else {CORES: known}
    metadata = {"labels": labels, "annotations": dict(source["metadata"].get("annotations") or {})}
    spec = {key: value for key, value in desired["spec"].items() if key != "paused"}
    return {
        **desired,
        "metadata": {**desired["metadata"], "annotations": annotations},
        "spec": {**spec, "template": {"metadata": metadata, "spec": source["spec"]}},
    }
