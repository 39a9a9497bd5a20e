"""Plans the canary of a rollout (`spec.rollout.canary`): a Deployment with a few pods of the new template, to which the
gateway sends a share of the requests.

The endpoint's Deployment has the new template, too, and is paused meanwhile: Kubernetes keeps and scales its present
pods. When the canary has passed it is no longer paused. When the canary was rejected it gets the template of the pods
that serve again, and is only scaled until the template changes or the spec has no canary. A paused one that wakes
from zero would get pods of its own template, if that had been rolled out before, or else of its newest ReplicaSet:
pods of an older plan, perhaps. docs/explanation/canary.md has the rule.

The Deployment of the canary is deleted only once the status has the outcome: without both, the next plan would begin
the canary again. So it also keeps its slot until the rollout has one.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

from penstock.resources.status import CanaryPhase, CanaryStatus, timestamp
from penstock_operator.decide.canary import CanaryOutcome, CanaryReason
from penstock_operator.endpoint.objects import gateway
from penstock_operator.endpoint.pods.judging import pod_problems
from penstock_operator.endpoint.snapshot import EndpointSnapshot
from penstock_operator.endpoint.spec import ParsedEndpoint
from penstock_operator.facts.findings import Event, Finding, clipped, no, sentence, stopped, yes
from penstock_operator.facts.names import CANARY, Json, Ref, canary_name
from penstock_operator.facts.reasons import Reason
from penstock_operator.facts.workloads import DeploymentFacts, ReplicaSetFacts, replaced

REMEDY = (
    "Change the spec to try again, or remove spec.rollout.canary to roll the plan out all the same; status.history has "
    "earlier plans."
)


@dataclass(frozen=True)
class CanaryPlan:
    """The state of the canary, and its objects."""

    holds: bool = False
    """The endpoint's Deployment is paused for it."""
    begins: bool = False
    """Its pods do not exist yet: it needs a slot among the rollouts first."""
    passed: bool = False
    """The rollout begins, in the slot of the canary."""
    back_to: str = ""
    """The ReplicaSet of the pods that serve: the endpoint's Deployment gets its template again."""
    went_back: bool = False
    """The endpoint's Deployment has it, and is only scaled."""
    deployment: Json | None = None
    """The desired Deployment of its pods; None: no such pods."""
    delete: tuple[Ref, ...] = ()
    percent: int = 0
    """Share of the requests."""
    status: CanaryStatus | None = None
    finding: Finding | None = None
    """For the condition Progressing."""
    events: tuple[Event, ...] = ()

    def without_slot(self) -> CanaryPlan:
        """The same while the rollout waits for a slot."""
        return replace(self, deployment=None, percent=0, finding=None, status=None)


NO_CANARY = CanaryPlan()


def plan_canary(
    endpoint: ParsedEndpoint,
    observed: EndpointSnapshot,
    desired: Json,
    *,
    template: str,
    digest: str,
    before: CanaryStatus | None,
) -> CanaryPlan:
    """The canary of the rollout to `desired`, the endpoint's Deployment. Its template has the hash `template` and
    serves the artefact `digest`. `before`: of the present status."""
    wanted, present, canary = endpoint.spec.rollout.canary, observed.deployment, observed.canary
    name = canary_name(endpoint.name)
    ref = Ref("Deployment", name)
    remove = (ref,) if ref in observed.present else ()
    if before is not None and before.template != template:
        before = None
    if wanted is None or present is None or present.deleting:
        return CanaryPlan(delete=remove)
    if before is not None and before.phase is CanaryPhase.REJECTED:
        went_back = present.template != template and not present.paused and present.owner.uid == endpoint.uid
        back_to = "" if went_back else _serving(present, observed.replica_sets)
        return CanaryPlan(
            holds=True,
            back_to=back_to,
            went_back=went_back,
            delete=remove,
            status=before,
            finding=_rejected(before),
        )
    kept = before if before is not None and before.phase is CanaryPhase.PASSED else None
    rolls = present.template == template and not present.paused
    if rolls or kept is not None or endpoint.spec.suspend or not replaced(present, observed.replica_sets, template):
        # The rollout is under way or over, or there are no pods to compare with.
        return CanaryPlan(delete=remove, status=kept, passed=kept is not None)
    if canary is None and not present.available:
        return CanaryPlan(delete=remove)
    status = before or CanaryStatus(
        phase=CanaryPhase.RUNNING, template=template, digest=digest, since=timestamp(observed.now)
    )
    return _running(endpoint, observed, desired, status)


def _serving(present: DeploymentFacts, replica_sets: Iterable[ReplicaSetFacts]) -> str:
    """The one ReplicaSet that has pods; empty: none has, or several have."""
    names = [one.name for one in replica_sets if one.owner.uid == present.uid and one.wanted]
    return names[0] if len(names) == 1 else ""


def _running(endpoint: ParsedEndpoint, observed: EndpointSnapshot, desired: Json, status: CanaryStatus) -> CanaryPlan:
    canary, present, wanted = observed.canary, observed.deployment, endpoint.spec.rollout.canary
    assert wanted is not None and present is not None  # noqa: S101, PT018 - by the caller
    report = observed.canary_report
    if report is not None and report.template == status.template:
        update = {"requests": report.requests, "errors": report.errors, "message": clipped(report.message, 1024)}
        status = status.model_copy(update=update)
        reason = "" if report.reason is None else report.reason.value
        if report.outcome is CanaryOutcome.PASS:
            status = status.model_copy(update={"phase": CanaryPhase.PASSED, "reason": reason})
            event = Event("Normal", Reason.CANARY_PASSED, sentence(f"{reason}: {report.message}"))
            return CanaryPlan(passed=True, status=status, events=(event,))
        if report.outcome is CanaryOutcome.REJECT:
            return _back(status, reason, report.message)
    failure = _failure(observed, canary, status.template)
    if failure:
        return _back(status, CanaryReason.POD_FAILS.value, failure)
    name = canary_name(endpoint.name)
    if canary is None and Ref("Deployment", name) in observed.conflicting:
        return CanaryPlan(
            holds=True,
            finding=no(
                Reason.NAME_TAKEN,
                f"A new plan is to be tried on a share of the requests, and its Deployment cannot be made: there is "
                f"another one named {name}. The present pods serve on. Delete it, give one of the endpoints another "
                "name, or remove spec.rollout.canary.",
            ),
        )
    if canary is None and not gateway.divides(endpoint, observed.gateway):
        message = "A new plan is to be tried on a share of the requests, and waits until all pods of the gateway run."
        return CanaryPlan(holds=True, finding=yes(Reason.CANARY_RUNNING, message))
    count = max(1, math.ceil(wanted.percent * present.wanted / 100))
    share = f"New pods get {wanted.percent} % of the requests for {_minutes(wanted.minutes)}"
    ready = canary.available if canary is not None else 0
    state = "" if ready else ", once they are ready"
    message = f"{share}{state}. {sentence(status.message)}".strip()
    return CanaryPlan(
        holds=True,
        begins=canary is None,
        deployment=_deployment(endpoint, desired, count),
        percent=wanted.percent,
        status=status,
        finding=yes(Reason.CANARY_RUNNING, message),
    )


def _minutes(count: int) -> str:
    return "a minute" if count == 1 else f"{count} minutes"


def _back(status: CanaryStatus, reason: str, message: str) -> CanaryPlan:
    update = {"phase": CanaryPhase.REJECTED, "reason": reason, "message": clipped(message, 1024)}
    after = status.model_copy(update=update)
    return CanaryPlan(holds=True, status=after, finding=_rejected(after))


def _rejected(status: CanaryStatus) -> Finding:
    return no(
        Reason.CANARY_REJECTED,
        f"The new plan was tried on a share of the requests and rejected ({status.reason}): {stopped(status.message)} "
        f"The present pods serve on. {REMEDY}",
    )


def _failure(observed: EndpointSnapshot, canary: DeploymentFacts | None, template: str) -> str:
    """Why the canary's pods cannot serve; empty: they can, or may still become ready."""
    if canary is None or canary.template != template:
        return ""
    live = [entry for entry in observed.canary_pods if not entry.pod.deleting and entry.pod.template == template]
    problems = pod_problems(live, "")
    crashing = next((problem.message for problem in problems if problem.crashing), "")
    if crashing or canary.progressing != "ProgressDeadlineExceeded":
        return crashing
    return problems[0].message if problems else "no new pod became ready in time"


def _deployment(endpoint: ParsedEndpoint, desired: Json, count: int) -> Json:
    """The Deployment of the canary's pods: the endpoint's Deployment with another label, so that they are also behind
    its Service, NetworkPolicy and PodDisruptionBudget."""
    spec = desired["spec"]
    template, selector = spec["template"], spec["selector"]["matchLabels"]
    metadata = {**template["metadata"], "labels": {**template["metadata"]["labels"], CANARY: "true"}}
    changed = {
        **spec,
        "selector": {"matchLabels": {**selector, CANARY: "true"}},
        "replicas": count,
        "template": {**template, "metadata": metadata},
    }
    made = endpoint.owned("apps/v1", "Deployment", changed, name=canary_name(endpoint.name))
    made["metadata"]["labels"] = {**made["metadata"]["labels"], CANARY: "true"}
    return made
