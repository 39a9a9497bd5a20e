"""The status of the endpoint: what people read in `kubectl get`, and what the autoscaler and the next plan build on."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

from pydantic import ValidationError

from penstock.hardware import CpuIdentity
from penstock.resources.status import (
    EndpointStatus,
    PlanStatus,
    PodReport,
    ServedBefore,
    timestamp,
)
from penstock_operator.plan.availability import Trouble
from penstock_operator.plan.conditions import clipped
from penstock_operator.plan.names import runtime_selector
from penstock_operator.plan.observed import RuntimePod
from penstock_operator.plan.optimized_model import Optimization
from penstock_operator.plan.pinning import PinVerdict, spoken
from penstock_operator.plan.serving import Serving
from penstock_operator.plan.settings import Json

MOST_PODS = 32
MOST_HISTORY = 5


def read_status(value: Json) -> EndpointStatus:
    """The status as it stands; an empty one when somebody else wrote it."""
    try:
        return EndpointStatus.model_validate(value)
    except ValidationError:
        return EndpointStatus()


def selector(name: str) -> str:
    """The labels of the pods, for the scale subresource."""
    return ",".join(f"{key}={value}" for key, value in sorted(runtime_selector(name).items()))


def plan_status(
    serving: Serving | None, before: PlanStatus | None, pods: Sequence[RuntimePod], models: Sequence[Optimization]
) -> PlanStatus | None:
    """What is served: in a rollout the old plan, until a pod answers with the new one."""
    answering = {entry.pod.artefact for entry in pods if entry.pod.ready and not entry.pod.deleting}
    if before is not None and before.digest in answering and (serving is None or serving.digest not in answering):
        return before
    return None if serving is None else _plan_status(serving, pods, models)


def _plan_status(serving: Serving, pods: Sequence[RuntimePod], models: Sequence[Optimization]) -> PlanStatus:
    words = serving.result.plan.summary if serving.result is not None else ""
    if not words:
        said = (
            entry.report.plan for entry in pods if entry.report is not None and entry.pod.artefact == serving.digest
        )
        words = next(filter(None, said), "fp32, while the optimisation runs" if serving.baseline else "")
    if not words:
        known = (model.status for model in models if model.status.artefact is not None)
        same = (status.result for status in known if status.artefact and status.artefact.digest == serving.digest)
        words = next((result.plan.summary for result in same if result is not None), "")
    return PlanStatus(
        summary=clipped(words, 256),
        digest=serving.digest,
        optimized_model=serving.optimized_model,
        baseline=serving.baseline,
    )


def history(before: EndpointStatus, plan: PlanStatus | None, now: datetime) -> tuple[ServedBefore, ...]:
    """Plans that were served before, the latest first, each once."""
    past = before.history
    last = before.plan
    if last is not None and last.digest and plan is not None and plan.digest != last.digest:
        past = (ServedBefore(digest=last.digest, summary=last.summary, until=timestamp(now)), *past)
    present = plan.digest if plan is not None else ""
    unique = {entry.digest: entry for entry in reversed(past) if entry.digest != present}
    return tuple(reversed(unique.values()))[:MOST_HISTORY]


def pod_reports(
    pods: Sequence[RuntimePod], verdicts: Sequence[PinVerdict], wrong: Sequence[Trouble]
) -> tuple[PodReport, ...]:
    """What the pods say of themselves."""
    judged = {verdict.pod: verdict for verdict in verdicts}
    trouble = {entry.pod: entry.message for entry in wrong}
    reports = []
    for entry in sorted(pods, key=lambda entry: entry.pod.name)[:MOST_PODS]:
        pod, report, verdict = entry.pod, entry.report, judged.get(entry.pod.name)
        said = trouble.get(pod.name) or (verdict.message or verdict.wrong_cpu if verdict is not None else "")
        reports.append(
            PodReport(
                name=pod.name,
                node=pod.node,
                ready=pod.ready,
                digest=pod.artefact,
                pinned=verdict.pinned if verdict is not None else None,
                reason=clipped(said, 512),
                cpus=clipped(spoken(report.cpus), 256) if report is not None else "",
                cpu=_cpu(report.cpu) if report is not None else "",
            )
        )
    return tuple(reports)


def _cpu(value: Json) -> str:
    try:
        return clipped(CpuIdentity.model_validate(value).summary, 256)
    except ValidationError:
        return ""
