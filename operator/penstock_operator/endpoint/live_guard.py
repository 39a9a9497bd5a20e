"""The guard of live traffic (`spec.guard.live`): the condition AnswersAgree, and the return to fp32. Pure.

Each pod reports its evidence that live answers are worse than those that judged the plan: a value that reaches 1/alpha
with a probability of at most alpha while they are not (`penstock.evidence`), at any time. The mean over the pods is
such a value again. A single pod that differs from the others is deleted, so that its Deployment makes another. An
artefact keeps its alarm, and fp32 serves instead of it, until another artefact is made, or the
spec has `action: Report` or removes `guard.live`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta

from penstock.resources.conditions import timestamp
from penstock.resources.endpoint_parts.guard import GuardAction, LiveGuard
from penstock.resources.rollout_status import GuardAlarm, GuardStatus, ReplacedPod
from penstock.tasks import TaskName
from penstock_operator.endpoint.serving import ServingChoice
from penstock_operator.endpoint.snapshot import EndpointSnapshot, Part
from penstock_operator.facts.findings import Finding, no, unknown, yes
from penstock_operator.facts.names import Ref
from penstock_operator.facts.pods import LiveReport
from penstock_operator.facts.reasons import Reason

ENOUGH = 200
"""Compared answers of all pods from which the condition is True."""
MOST_ALARMS = 5
MOST_REPLACED = 3
"""Pods that are deleted in `REPLACED_WITHIN`: with more of them, it is not the pods."""
REPLACED_WITHIN = timedelta(days=1)
NOTHING = Part()


@dataclass(frozen=True)
class LiveGuardPlan:
    """What follows from the comparisons of the pods."""

    serving: ServingChoice | None
    """What to serve."""
    finding: Finding
    """The condition AnswersAgree."""
    status: GuardStatus | None = None
    part: Part = NOTHING
    """The pod to delete."""


def guard_live(
    live: LiveGuard, serving: ServingChoice | None, observed: EndpointSnapshot, before: GuardStatus | None
) -> LiveGuardPlan:
    """`serving`: what is to serve as far as the optimisation decides. `before`: of the present status."""
    if serving is None:
        return LiveGuardPlan(serving, unknown(Reason.NOTHING_SERVES, "Nothing serves yet."), before)
    if serving.baseline:
        return LiveGuardPlan(serving, yes(Reason.BASELINE, "The fp32 graph serves: it is the reference."), before)
    if serving.target is not None or serving.task is TaskName.TEXT_GENERATION:
        message = "Answers of text generation and of Inferentia are not compared in live traffic."
        return LiveGuardPlan(serving, unknown(Reason.NOT_NEEDED, message), before)
    alarms = () if before is None else before.alarms
    alarm = next((one for one in alarms if one.digest == serving.digest), None)
    if alarm is not None and live.action is GuardAction.RETURN:
        return LiveGuardPlan(replace(serving, fp32=True, result=None), _returned(alarm), before)
    known = before is not None and before.digest == serving.digest
    since = before.since if before is not None and known else timestamp(observed.now)
    reports = {
        entry.pod.name: entry.report.live
        for entry in observed.pods
        if entry.pod.ready
        and not entry.pod.deleting
        and entry.pod.artefact == serving.digest
        and entry.report
        and entry.report.live
    }
    found = list(reports.values())
    answers = sum(one.answers for one in found)
    evidence = _mean([one.evidence for one in found])
    replaced = () if before is None else before.replaced
    status = GuardStatus(
        digest=serving.digest, since=since, answers=answers, evidence=evidence, alarms=alarms, replaced=replaced
    )
    level = 1 / live.false_returns
    figures = f"{answers} answers of {_pods(len(found))} were compared with those of fp32"
    if not found:
        message = "No pod has compared answers yet, or the artefact has no limits for it: optimise again (guard.live)."
        return LiveGuardPlan(serving, unknown(Reason.WATCHING, message), status)
    if _mean([one.check for one in found]) >= level:
        message = (
            f"{figures}, and some gave another result when they were computed once more: the comparison itself is "
            "wrong, and nothing follows from it. Report it as a defect, with /info of the pods."
        )
        return LiveGuardPlan(serving, unknown(Reason.SHADOW_UNRELIABLE, message), status)
    if evidence < level:
        if evidence < 10 and answers >= ENOUGH:
            return LiveGuardPlan(serving, yes(Reason.AGREES, f"{figures}, and agree."), status)
        return LiveGuardPlan(serving, unknown(Reason.WATCHING, f"{figures} (evidence {evidence:.2g})."), status)
    single = _single(reports)
    if single is not None:
        node = next(entry.pod.node for entry in observed.pods if entry.pod.name == single)
        differs = ReplacedPod(pod=single, node=node, at=timestamp(observed.now), evidence=reports[single].evidence)
        return _replace_pod(live, serving, differs, status)
    message = f"{figures}, and they differ more than when the plan was judged (evidence {evidence:.2g})."
    kept = _why_not_fp32(live, serving, observed)
    if kept:
        advice = "Optimise with texts of the present traffic (workload.textsFrom)."
        return LiveGuardPlan(serving, no(Reason.LIVE_TRAFFIC_DIFFERS, f"{message} {kept} {advice}"), status)
    alarm = GuardAlarm(
        digest=serving.digest, since=since, until=timestamp(observed.now), answers=answers, evidence=evidence
    )
    status = status.model_copy(update={"alarms": (alarm, *alarms)[:MOST_ALARMS]})
    return LiveGuardPlan(replace(serving, fp32=True, result=None), _returned(alarm), status)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 1.0


def _pods(count: int) -> str:
    return "one pod" if count == 1 else f"{count} pods"


def _single(reports: dict[str, LiveReport]) -> str | None:
    """The one pod with other answers than the rest; None: it is alone, or the rest do not clear the artefact.

    Quiet answers of the others lower their evidence below 1; they must be about as many.
    """
    worst = max(reports, key=lambda name: reports[name].evidence)
    others = [report for name, report in reports.items() if name != worst]
    quiet = [one for one in others if one.evidence < 1 and 2 * one.answers >= reports[worst].answers]
    return worst if others and len(quiet) == len(others) else None


def _replace_pod(live: LiveGuard, serving: ServingChoice, differs: ReplacedPod, status: GuardStatus) -> LiveGuardPlan:
    """Delete the pod, unless several were deleted today, or the endpoint only wants reports."""
    message = (
        f"The answers of the pod {differs.pod} on the node {differs.node} differ from those of fp32 (evidence "
        f"{differs.evidence:.2g}), and those of the other pods do not. The memory of that node may be damaged."
    )
    now = datetime.fromisoformat(differs.at)
    today = [one for one in status.replaced if now - datetime.fromisoformat(one.at) < REPLACED_WITHIN]
    deleted = no(Reason.REPLICA_DIFFERS, f"{message} The pod is deleted, and another one replaces it.")
    if any(one.pod == differs.pod for one in status.replaced):  # its end is not in the cache yet
        return LiveGuardPlan(serving, deleted, status)
    if live.action is GuardAction.REPORT or len(today) >= MOST_REPLACED:
        others = "" if live.action is GuardAction.REPORT else f" {len(today)} pods were deleted for that within a day."
        advice = f"{others} Examine the node, then replace the pod: kubectl delete pod {differs.pod}."
        return LiveGuardPlan(serving, no(Reason.REPLICA_DIFFERS, message + advice), status)
    status = status.model_copy(update={"replaced": (differs, *status.replaced)[:MOST_ALARMS]})
    return LiveGuardPlan(serving, deleted, status, Part(delete=(Ref("Pod", differs.pod),)))


def _why_not_fp32(live: LiveGuard, serving: ServingChoice, observed: EndpointSnapshot) -> str:
    """Why the plan goes on serving, as a sentence; empty: fp32 takes the load."""
    if live.action is GuardAction.REPORT:
        return "The plan goes on serving (guard.live.action: Report)."
    result = serving.result
    rate = None if result is None else result.capacity.requests_per_second
    if result is None or rate is None or not result.speed_up:
        return "The plan goes on serving, since the capacity of fp32 is not known."
    load = None if observed.scale is None else observed.scale.requests_per_second
    replicas = 0 if observed.deployment is None else observed.deployment.available
    if load is None:
        return "The plan goes on serving, since the load is not known, which fp32 would have to take."
    capacity = rate / max(1.0, result.speed_up) * replicas
    if load > capacity:
        return (
            f"The plan goes on serving, since {load:.4g} requests/s are more than fp32 takes on "
            f"the present {replicas} replicas ({capacity:.4g}): raise scaling.minReplicas."
        )
    return ""


def _returned(alarm: GuardAlarm) -> Finding:
    return no(
        Reason.RETURNED,
        f"fp32 serves instead of the artefact {alarm.digest.removeprefix('sha256:')[:12]}: {alarm.answers} of its "
        f"answers were compared with those of fp32 until {alarm.until}, and they differed more than when it "
        f"was judged (evidence {alarm.evidence:.2g}). Optimise with texts of the present traffic (workload.textsFrom). "
        "To serve it all the same: guard.live.action: Report. What it answered since "
        f"{alarm.since} may have to be computed again.",
    )
