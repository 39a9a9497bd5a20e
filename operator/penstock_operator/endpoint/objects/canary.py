"""Everything that is decided about the canary of a rollout (`spec.rollout.canary`): its objects and status, and whether
its pods are worse than the present ones. Pure. `scaling/canaries.py` reads the pods; docs/explanation/canary.md has the
rule.

The canary is a Deployment with a few pods of the new template, to which the gateway sends a share of the requests. The
endpoint's Deployment has the new template, too, and is paused meanwhile: Kubernetes keeps and scales its present pods.
When the canary has passed it is no longer paused. When the canary was rejected it gets the template of the pods that
serve again, and is only scaled until the template changes or the spec has no canary: a paused one that wakes from zero
would get pods of an older plan. The Deployment of the canary is deleted only once the status has the outcome: without
both, the next plan would begin the canary again. So it also keeps its slot until the rollout has one.

The pods are compared by two sequential tests of a share (`penstock.evidence.ShareEvidence`): of requests with an error,
and of requests slower than a bound of the histogram, the one next to the p95 of both plans together. The choice of the
bound does not change the error of the test, which is conditional on the requests of both plans together. Each reading
is a look. New pods are rejected when the mean of the evidence of both reaches 1 / `LEVEL`, so that new pods that are
equal are rejected with a probability of at most `LEVEL`, whatever the number of looks.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from penstock.evidence import ShareEvidence
from penstock.resources.conditions import timestamp
from penstock.resources.rollout_status import CanaryPhase, CanaryStatus
from penstock_operator.decide.measurement import PodReading
from penstock_operator.endpoint.objects import gateway
from penstock_operator.endpoint.pods.judging import pod_problems
from penstock_operator.endpoint.snapshot import EndpointSnapshot
from penstock_operator.endpoint.spec import ParsedEndpoint
from penstock_operator.facts.findings import Event, Finding, clipped, no, sentence, stopped, yes
from penstock_operator.facts.names import CANARY, FP32, Json, Ref, canary_name
from penstock_operator.facts.reasons import Reason
from penstock_operator.facts.scaling import CanaryOutcome, CanaryReason, CanaryReport
from penstock_operator.facts.workloads import DeploymentFacts, ReplicaSetFacts, replaced

LEVEL = 0.02
"""Largest probability that equal pods are rejected, over all looks."""
REPORTS = 10
"""Times that the figures of a canary that continues are published, at equal intervals."""
SLOW_SHARE = 0.05
"""Share of the requests that are slower than the p95."""
SLOWER_BY = 1.5
"""New pods are slower only if their share of slow requests is this many times the share of the present ones: with many
requests, differences are significant that do not matter."""
LEAST_REQUESTS = 200
"""Requests that new pods must have answered."""
LONGEST = 10
"""Times the length of a canary that it may take until they have."""


@dataclass(frozen=True)
class PlanCounts:
    """Counts of the answers of one plan's pods since the canary began."""

    requests: int = 0
    errors: int = 0
    """Answers with a status of 500 or more; they are among the requests."""
    buckets: dict[float, float] = field(default_factory=dict)
    """Answers up to each bound in seconds."""

    def slower(self, bound: float) -> int:
        """Requests that took longer than a bound; 0 if they were not counted by it."""
        return max(0, round(self.requests - self.buckets.get(bound, self.requests)))


class PlanCounter:
    """Adds up the answers of the pods of one plan."""

    def __init__(self) -> None:
        self._last: dict[str, PodReading] = {}
        self._requests = self._errors = 0.0
        self._buckets: dict[float, float] = {}

    def put(self, pod: str, reading: PodReading, *, new: bool) -> None:
        """Add a reading of a pod, by its uid. `new`: all that the pod has answered counts, also before this reading."""
        before = self._last.get(pod)
        self._last[pod] = reading
        if before is None and not new:
            self._keep(reading.bounds)
            return
        if before is None or before.bounds != reading.bounds or before.requests > reading.requests:
            # Another process, which counts from zero.
            before = PodReading(0.0, 0.0, reading.bounds, type(reading.counts)("d", [0.0] * len(reading.counts)))
        self._requests += reading.requests - before.requests
        self._errors += max(0.0, reading.errors - before.errors)
        self._keep(reading.bounds)
        for bound, now, then in zip(reading.bounds, reading.counts, before.counts, strict=True):
            if bound in self._buckets:
                self._buckets[bound] += max(0.0, now - then)

    def _keep(self, bounds: tuple[float, ...]) -> None:
        """Only bounds that all pods have."""
        if len(self._last) == 1 and not self._buckets:
            self._buckets = dict.fromkeys(bounds, 0.0)
        self._buckets = {bound: count for bound, count in self._buckets.items() if bound in bounds}

    @property
    def counts(self) -> PlanCounts | None:
        """The counts so far; None before the first reading."""
        if not self._last:
            return None
        return PlanCounts(round(self._requests), min(round(self._errors), round(self._requests)), dict(self._buckets))


@dataclass(frozen=True)
class Judgement:
    """The outcome of a look."""

    outcome: CanaryOutcome
    reason: CanaryReason | None = None
    """None while it continues."""
    message: str = ""
    """The figures of both plans, as a clause."""


def slow_bound(old: PlanCounts, new: PlanCounts) -> float | None:
    """The bound in seconds that the share of slower requests of both plans together is nearest to `SLOW_SHARE` at; None
    if there is none with slower requests."""
    everything = old.requests + new.requests
    found: dict[float, float] = {}
    for bound in sorted(old.buckets.keys() & new.buckets.keys()):
        share = 1 - (old.buckets[bound] + new.buckets[bound]) / everything if everything else 0.0
        if math.isfinite(bound) and 0 < share < 0.5:
            found[bound] = abs(share - SLOW_SHARE)
    return min(found, key=lambda bound: (found[bound], bound), default=None)


@dataclass(frozen=True)
class CanaryTrial:
    """A canary between two looks."""

    seconds: float
    """How long it is to take."""
    old: PlanCounts = field(default_factory=PlanCounts)
    """At the last look, as `new`."""
    new: PlanCounts = field(default_factory=PlanCounts)
    errors: ShareEvidence = field(default_factory=ShareEvidence)
    """That new pods have a larger share of errors."""
    slow: ShareEvidence = field(default_factory=ShareEvidence)
    reports: int = 0
    """How often the figures were published."""

    def look(self, old: PlanCounts | None, new: PlanCounts | None, elapsed: float) -> tuple[Judgement, CanaryTrial]:
        """Judge after `elapsed` seconds. None: the pods of a plan could not be read, now or before."""
        waiting = Judgement(CanaryOutcome.CONTINUE)
        if old is None or new is None:
            if elapsed < LONGEST * self.seconds:
                return waiting, self
            message = f"the metrics of {'new pods' if new is None else 'the present pods'} could not be read"
            return Judgement(CanaryOutcome.REJECT, CanaryReason.NO_METRICS, message), self
        enough = new.requests >= LEAST_REQUESTS
        last = (elapsed >= self.seconds and enough) or elapsed >= LONGEST * self.seconds
        found, after = self._compare(old, new)
        after = replace(after, reports=min(REPORTS - 1, int(elapsed / self.seconds * REPORTS)))
        if found.outcome is CanaryOutcome.REJECT or not last:
            return found, after
        reason = CanaryReason.NOT_WORSE if enough else CanaryReason.FEW_REQUESTS
        return Judgement(CanaryOutcome.PASS, reason, found.message), after

    def _compare(self, old: PlanCounts, new: PlanCounts) -> tuple[Judgement, CanaryTrial]:
        """Reject, or continue."""
        requests = new.requests - self.new.requests
        everything = requests + old.requests - self.old.requests
        share = requests / everything if everything > 0 else 0.0
        failed = new.errors - self.new.errors
        errors, slow = self.errors.add(failed, failed + old.errors - self.old.errors, share), self.slow
        figures = failures = (
            f"{new.errors} of {new.requests} requests to new pods had an error, and {old.errors} of {old.requests} to "
            "the others"
        )
        bound, slower = slow_bound(old, new), False
        if bound is not None and old.requests and new.requests:
            slow_new, slow_old = new.slower(bound), old.slower(bound)
            late = max(0, slow_new - self.new.slower(bound))
            slow = slow.add(late, late + max(0, slow_old - self.old.slower(bound)), share)
            slower = slow_new * old.requests > SLOWER_BY * slow_old * new.requests
            figures = (
                f"{slow_new / new.requests:.1%} of {new.requests} requests to new pods took longer than "
                f"{bound * 1000:g} ms, and {slow_old / old.requests:.1%} of {old.requests} to the others"
            )
        after = replace(self, old=old, new=new, errors=errors, slow=slow)
        if (errors.value + slow.value) / 2 >= 1 / LEVEL:
            if errors.value >= slow.value:
                return Judgement(CanaryOutcome.REJECT, CanaryReason.MORE_ERRORS, failures), after
            if slower:
                return Judgement(CanaryOutcome.REJECT, CanaryReason.SLOWER, figures), after
        return Judgement(CanaryOutcome.CONTINUE, message=figures), after


@dataclass
class CanaryWatch:
    """A canary from its first ready pod to its outcome."""

    identity: tuple[str, str]
    """The uid of its Deployment, and the template that it tries."""
    begin: float
    """Since when a pod of it is ready, in seconds of a monotonic clock."""
    trial: CanaryTrial
    old: PlanCounter = field(default_factory=PlanCounter)
    new: PlanCounter = field(default_factory=PlanCounter)
    over: bool = False

    def look(self, old: Mapping[str, PodReading], new: Mapping[str, PodReading], now: float) -> CanaryReport | None:
        """Count the readings of the present and of the new pods, by uid, and judge; None: nothing new to publish."""
        for counter, readings in ((self.old, old), (self.new, new)):
            for pod, reading in readings.items():
                counter.put(pod, reading, new=counter is self.new)
        found, trial = self.trial.look(self.old.counts, self.new.counts, now - self.begin)
        before, self.trial = self.trial, trial
        self.over = found.outcome is not CanaryOutcome.CONTINUE
        if trial.reports == before.reports and not self.over:
            return None
        counts = self.new.counts or PlanCounts()
        return CanaryReport(
            template=self.identity[1],
            outcome=found.outcome,
            reason=found.reason,
            message=found.message,
            requests=counts.requests,
            errors=counts.errors,
        )


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
    if wanted is None or present is None or present.deleting or FP32 in desired["metadata"].get("annotations", {}):
        # A return to fp32 does not wait: the plan that serves is the suspect.
        return CanaryPlan(delete=remove)
    if before is not None and before.phase is CanaryPhase.REJECTED:
        went_back = present.template != template and not present.paused and present.owner.uid == endpoint.uid
        back_to = "" if went_back else _serving(present, observed.replica_sets)
        return CanaryPlan(
            holds=True, back_to=back_to, went_back=went_back, delete=remove, status=before, finding=_rejected(before)
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
