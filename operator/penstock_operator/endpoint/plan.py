"""Plans one ModelEndpoint: computes the objects to apply and delete and the statuses to write from what was observed.

    accept      is the spec valid, and does what it names exist?
    optimise    the OptimizedModel of the spec and its next job
    choose      the artefact to serve: the result, the fp32 graph, or the present artefact
    objects     Service, NetworkPolicy, PodDisruptionBudget, Deployment, gateway, the object that scales, the route
    status      conditions and status from what the pods do and report

Pure: the same observation gives the same plan. Planning again after the plan was carried out gives no further action.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from penstock.resources.hardware_class import HardwareClassSpec
from penstock.resources.optimized_model import OptimizedModelStatus, Phase, optimized_model_name
from penstock.resources.scaling import ScalingMode
from penstock_operator.endpoint.accepted import accepted
from penstock_operator.endpoint.conditions import EndpointState, conditions_of
from penstock_operator.endpoint.objects import gateway
from penstock_operator.endpoint.objects.canary import NO_CANARY, CanaryPlan, plan_canary
from penstock_operator.endpoint.objects.deployment import deployment
from penstock_operator.endpoint.objects.exposure import ExposurePlan, expose
from penstock_operator.endpoint.objects.rollout import noting_turn, paused, rollout_turn
from penstock_operator.endpoint.objects.scalers import HpaBounds, horizontal_pod_autoscaler, hpa_bounds, scaled_object
from penstock_operator.endpoint.objects.services import disruption_budget, network_policy, service
from penstock_operator.endpoint.optimization.job import JobHost, job, job_policy
from penstock_operator.endpoint.optimization.model import (
    OptimizationState,
    OptimizedModelFacts,
    StatusWrite,
    find,
    optimized_model_object,
    pinned_model,
    wanted_spec,
)
from penstock_operator.endpoint.optimization.runs import assess, superfluous_jobs
from penstock_operator.endpoint.pods.judging import judge_pinning, pod_problems
from penstock_operator.endpoint.pods.placement import PodRequirements, missing_for
from penstock_operator.endpoint.pods.template import runtime_memory
from penstock_operator.endpoint.replica_count import (
    ReplicaTarget,
    left_over,
    prometheus_of,
    replica_target,
    scaling_events,
)
from penstock_operator.endpoint.serving import ServingChoice, choose
from penstock_operator.endpoint.snapshot import EndpointSnapshot
from penstock_operator.endpoint.spec import ParsedEndpoint, hardware_class, read_endpoint, usable
from penstock_operator.endpoint.status import endpoint_status, events, invalid_spec_status, read_status
from penstock_operator.facts.deployments import DeploymentFacts
from penstock_operator.facts.findings import Event, Finding
from penstock_operator.facts.names import TEMPLATE_HASH, Json, Ref, job_name
from penstock_operator.facts.pods import RuntimePod
from penstock_operator.facts.reasons import Reason
from penstock_operator.limits.concurrency import Line, TurnDecision
from penstock_operator.limits.quotas import WAITING_SECONDS, Grant, QuotaShare

PROGRESS_SECONDS = 5.0
"""Interval between plans while a job runs, to show its progress."""
REPORT_SECONDS = 2.0
"""Interval between plans while a pod has not yet reported its host."""


@dataclass(frozen=True)
class ReconcilePlan:
    """What to do now for one endpoint. Carrying it out and planning again gives no further action."""

    apply: tuple[Json, ...] = ()
    """Desired objects in the order to apply them: server-side apply as field manager `penstock-operator`, with force.
    Fields that are left out (such as `replicas` where an HPA scales) are not owned by the operator."""
    guarded: frozenset[Ref] = frozenset()
    """Desired objects to apply only if they have not changed since this plan was made."""
    taken_over: frozenset[Ref] = frozenset()
    """Deployments whose `spec.replicas` the operator takes over: other owners of the field are removed first."""
    scaled: int | None = None
    """Replicas of the present Deployment, whose other fields stay as they are; None: it is applied, or stays."""
    template_of: str = ""
    """The ReplicaSet whose pod template the applied Deployment is to have instead of its own; empty: its own."""
    delete: tuple[Ref, ...] = ()
    """Existing objects to delete before anything is applied, with background propagation."""
    status: Json = field(default_factory=dict)
    """The whole status of the ModelEndpoint, to write if it differs from the present one."""
    optimized_status: tuple[StatusWrite, ...] = ()
    """Statuses of existing OptimizedModels. A new OptimizedModel gets its status with the next plan."""
    events: tuple[Event, ...] = ()
    grant: Grant | None = None
    """What of the namespace's quota the endpoint gets with this plan; None: there is no quota, or it gets nothing."""
    optimization: TurnDecision | None = None
    """The place in the line of the job that is to begin; None: there is none, or no limit."""
    rollout: TurnDecision | None = None
    """The same of the rollout."""
    requeue_seconds: float | None = None
    """Plan again after this time even without an event; None: the resync is enough."""

    def object(self, kind: str, name: str | None = None) -> dict[str, Any] | None:
        """The desired object of this kind (and name), if there is one."""
        for value in self.apply:
            if value["kind"] == kind and name in {None, value["metadata"]["name"]}:
                return value
        return None


def plan(observed: EndpointSnapshot) -> ReconcilePlan:
    """What to do now for this endpoint."""
    if "deletionTimestamp" in observed.endpoint["metadata"]:
        # The API server's garbage collector deletes what the endpoint owns, also while no operator runs.
        return ReconcilePlan(status=dict(observed.endpoint.get("status") or {}))
    endpoint = observed.parsed if observed.parsed is not None else read_endpoint(observed.endpoint)
    if isinstance(endpoint, Finding):
        # Nothing is changed for a spec that this version does not understand.
        before = read_status(dict(observed.endpoint.get("status") or {}))
        after = invalid_spec_status(observed, endpoint)
        return ReconcilePlan(status=after.to_object(), events=events(before.conditions, after.conditions))
    return _Planner(endpoint, observed).run()


@dataclass
class _Planner:
    """Builds one plan."""

    endpoint: ParsedEndpoint
    observed: EndpointSnapshot
    apply: list[Json] = field(default_factory=list)
    delete: list[Ref] = field(default_factory=list)
    writes: list[StatusWrite] = field(default_factory=list)
    requeue: list[float] = field(default_factory=list)
    rollout: TurnDecision | None = None
    canary: CanaryPlan = NO_CANARY
    classes: dict[str, HardwareClassSpec | Finding] = field(default_factory=dict)
    """HardwareClasses parsed for this plan: parsing is a large part of its cost."""
    most: int | None = None
    """Replicas that the quota of the namespace allows; None: it has none."""
    grant: Grant | None = None
    scaled: int | None = None

    def run(self) -> ReconcilePlan:
        """The whole plan."""
        endpoint, observed = self.endpoint, self.observed
        hardware = self._class(endpoint.spec.hardware_class)
        acceptance = accepted(endpoint, observed, hardware)
        share = observed.quota.share() if observed.quota is not None else None
        if share is not None and acceptance.true:
            acceptance = share.finding(endpoint.namespace) or acceptance
            self.most = share.most
        wanted: OptimizationState | None = None
        if acceptance.true and not isinstance(hardware, Finding):
            wanted = self._optimise(hardware)
        present = observed.deployment
        label = present.optimized_model if present is not None else ""
        served = find(observed.optimized_models, label)
        pinned = pinned_model(endpoint.spec, observed.optimized_models, present=label) if acceptance.true else None
        present_model = None if served is None else self._assess(served)
        if wanted is not None and present_model is not None and present_model.name == wanted.name:
            present_model = wanted
        elif (
            served is not None
            and present_model is not None
            and present_model.running
            and (wanted is not None or pinned is not None)
        ):
            # Its fp32 graph serves, of an older spec or pinned; the result of its job is not wanted.
            self._end_jobs(served)
        serving = choose(endpoint, wanted, present_model, present, accepted=acceptance.true, pinned=pinned)
        others = bool(left_over(observed.scalers, endpoint.spec.scaling.mode))
        count = replica_target(endpoint, present, observed.scale, others=others, most=self.most)
        if share is not None and acceptance.true:
            self._take(share, count)
        elif share is not None and acceptance.reason == Reason.QUOTA_EXCEEDED:
            self.requeue.append(share.waiting_seconds)
        template = self._objects(serving, count) if acceptance.true else ""
        if not template:
            count = self._scale_only(count, share, accepted=acceptance.true)
        exposure = expose(endpoint, observed, accepted=acceptance.true)
        self.apply += exposure.apply
        self.delete += exposure.delete
        models = tuple(model for model in (wanted, present_model) if model is not None)
        state = self._state(acceptance, wanted, serving, count, template=template, models=models, exposure=exposure)
        return self._finished(state)

    def _take(self, share: QuotaShare, count: ReplicaTarget) -> None:
        """Take what the endpoint gets with this plan out of the quota."""
        scaling = self.endpoint.spec.scaling
        replicas = count.wanted
        if scaling.mode in {ScalingMode.HPA, ScalingMode.KEDA} and not self.endpoint.spec.suspend:
            replicas = max(replicas, self._bounds().most)
        self.grant = share.grant(replicas)
        if share.most <= replicas and share.most < scaling.max_replicas:
            self.requeue.append(WAITING_SECONDS)

    def _scale_only(self, count: ReplicaTarget, share: QuotaShare | None, *, accepted: bool) -> ReplicaTarget:
        """Scale the Deployment although its template is not known or not allowed. Returns the resulting replicas.

        What serves scales on while its template is not known, as after its OptimizedModel was deleted. While the spec
        is not accepted, the number stays: it may be the spec's own bounds that are not. But an endpoint without
        replicas gets one for a request that waits, and a suspended one has none.
        """
        present = self.observed.deployment
        if present is None or present.deleting or present.owner.uid != self.endpoint.uid:
            return count
        number = present.wanted
        if self.endpoint.spec.suspend:
            number = 0
            self._delete_scalers()
        elif count.chosen and accepted:
            number = count.wanted
        elif count.chosen and not number and count.wanted and (share is None or share.accepted):
            number = 1
            self.grant = None if share is None else share.grant(number)
        if number != present.wanted:
            self.scaled = number
        return replace(count, wanted=number)

    def _bounds(self) -> HpaBounds:
        observed = self.observed
        present = 1 if observed.deployment is None else observed.deployment.wanted
        scaling = self.endpoint.spec.scaling
        return hpa_bounds(scaling, observed.scale, observed.scalers, present=present, most=self.most)

    def _class(self, name: str) -> HardwareClassSpec | Finding:
        if name not in self.classes:
            self.classes[name] = hardware_class(name, self.observed.hardware_classes)
        return self.classes[name]

    def _optimise(self, hardware: HardwareClassSpec) -> OptimizationState | None:
        """The OptimizedModel of the spec, and its next job."""
        endpoint, observed = self.endpoint, self.observed
        spec = wanted_spec(endpoint.spec, observed.settings, observed.workload_texts, hardware.target)
        if spec is None:
            return None
        name = optimized_model_name(spec)
        facts = find(observed.optimized_models, name)
        suspended = endpoint.spec.suspend
        if facts is None:
            if not suspended:
                self.apply.append(optimized_model_object(None, spec, endpoint, ready=False))
            return OptimizationState(name, spec, OptimizedModelStatus(), exists=False)
        found = self._assess(facts, suspended=suspended, line=observed.optimizations)
        if found is None or facts.deleting:
            # It is created again as soon as the deleted one has disappeared.
            self.requeue.append(REPORT_SECONDS)
            return found
        self.apply.append(optimized_model_object(facts, spec, endpoint, ready=found.ready))
        superfluous = (Ref("Job", job.name) for job in superfluous_jobs(facts))
        self.delete += [ref for ref in superfluous if ref in observed.present]
        if found.start and (left := Ref("Job", job_name(name, found.start))) in observed.present:
            # Of a deleted OptimizedModel of this name. An apply would take it over with its result, faster than the API
            # server deletes it.
            self.delete.append(left)
            self.requeue.append(REPORT_SECONDS)
            found = replace(found, start=0)
        if found.start:
            self.apply.append(job_policy(found, facts, endpoint, observed.settings))
            self.apply.append(job(found, facts, endpoint, hardware, observed.settings))
        if suspended and found.running is not None:
            self._end_jobs(facts)
        self.writes.append(found.write)
        if found.requeue_seconds is not None:
            self.requeue.append(found.requeue_seconds)
        if found.running is not None and found.status.phase is Phase.OPTIMIZING:
            self.requeue.append(PROGRESS_SECONDS)
        return found

    def _assess(
        self, facts: OptimizedModelFacts, *, suspended: bool = False, line: Line | None = None
    ) -> OptimizationState | None:
        settings, namespace = self.observed.settings, self.endpoint.namespace
        return assess(
            facts,
            settings.store_of(namespace),
            now=self.observed.now,
            settings=settings,
            suspended=suspended,
            line=line,
            namespace=namespace,
        )

    def _end_jobs(self, facts: OptimizedModelFacts) -> None:
        """Delete the jobs of an OptimizedModel unless another endpoint uses it."""
        if any(user.uid != self.endpoint.uid for user in facts.users):
            return
        jobs = (Ref("Job", entry.name) for entry in facts.jobs if not entry.deleting)
        self.delete += [ref for ref in jobs if ref in self.observed.present]

    def _objects(self, serving: ServingChoice | None, count: ReplicaTarget) -> str:
        """Add the objects that serve. Returns the hash of the desired pod template; empty: the present one stays."""
        endpoint, observed = self.endpoint, self.observed
        self.apply.append(service(endpoint, through_gateway=gateway.answers(endpoint, observed.gateway)))
        # The gateway's pods stay until the Service no longer selects them.
        self.delete += gateway.superfluous(endpoint, observed)
        self.apply.append(network_policy(endpoint, observed.settings))
        budget = disruption_budget(endpoint, count.wanted)
        if budget is not None:
            self.apply.append(budget)
        elif (ref := Ref("PodDisruptionBudget", endpoint.name)) in observed.present:
            self.delete.append(ref)
        if serving is None or not serving.known:
            return ""
        hardware = usable(self._class(serving.hardware_class), serving.cores)
        if hardware is None or (serving.optimized_model and serving.target is not hardware.target):
            # The class of an older spec was deleted or changed; its pods keep running.
            return ""
        desired = deployment(endpoint, serving, hardware, count, observed.settings)
        template = str(desired["spec"]["template"]["metadata"]["annotations"][TEMPLATE_HASH])
        self._roll_out(desired, template, serving.digest, count)
        self.apply += gateway.objects(endpoint, observed, canary_percent=self.canary.percent)
        self._scalers()
        return template

    def _roll_out(self, desired: Json, template: str, digest: str, count: ReplicaTarget) -> None:
        """Add the Deployment, and that of its canary. A rollout, with its canary, begins when it has a turn."""
        endpoint, observed = self.endpoint, self.observed
        before = read_status(endpoint.status).canary
        canary = plan_canary(endpoint, observed, desired, template=template, digest=digest, before=before)
        if canary.begins or not (canary.holds or canary.passed):
            self.rollout = rollout_turn(endpoint, observed, template)
        desired = noting_turn(desired, observed.deployment, self.rollout, observed.now)
        present = observed.deployment
        if canary.went_back:
            if present is not None and count.chosen and count.wanted != present.wanted:
                self.scaled = count.wanted
        elif self.rollout is not None and not self.rollout.allowed:
            canary = canary.without_turn()
            self.apply.append(paused(desired, self.rollout))
            if self.rollout.requeue_seconds is not None:
                self.requeue.append(self.rollout.requeue_seconds)
        else:
            self.apply.append(paused(desired) if canary.holds else desired)
        if canary.deployment is not None:
            self.apply.append(canary.deployment)
        self.delete += canary.delete
        self.canary = canary

    def _scalers(self) -> None:
        """Add the object that scales in the modes HPA and KEDA. It is created only after the object of the previous
        mode (and KEDA's HPA) has disappeared: there is one writer of the replica count at any time."""
        endpoint, observed = self.endpoint, self.observed
        scaling, suspended = endpoint.spec.scaling, endpoint.spec.suspend
        wanted: Json | None = None
        url = prometheus_of(endpoint, observed.settings)
        between = self._bounds()
        if scaling.mode is ScalingMode.HPA and observed.settings.hpa:
            wanted = horizontal_pod_autoscaler(endpoint, between)
        elif scaling.mode is ScalingMode.KEDA and observed.settings.keda and url:
            wanted = scaled_object(endpoint, url, between)
        if suspended or (wanted is not None and wanted["kind"] in observed.unknown_kinds):
            wanted = None
        if wanted is not None and not left_over(observed.scalers, scaling.mode):
            self.apply.append(wanted)
        self._delete_scalers("" if wanted is None else wanted["kind"])

    def _delete_scalers(self, kept: str = "") -> None:
        """Delete the objects that scale, but for the kind `kept`."""
        self.delete += [
            ref
            for kind in ("HorizontalPodAutoscaler", "ScaledObject")
            if kind != kept and (ref := Ref(kind, self.endpoint.name)) in self.observed.present
        ]

    def _state(
        self,
        acceptance: Finding,
        wanted: OptimizationState | None,
        serving: ServingChoice | None,
        count: ReplicaTarget,
        *,
        template: str,
        models: tuple[OptimizationState, ...],
        exposure: ExposurePlan,
    ) -> EndpointState:
        """What the conditions and the status are computed from."""
        spec, observed = self.endpoint.spec, self.observed
        of = spec if serving is None else serving
        class_name, cores = of.hardware_class, of.cores
        hardware = usable(self._class(class_name), cores)
        cpus = cores if hardware is None else hardware.requests(cores)["cpu"]
        live = tuple(entry for entry in observed.pods if not entry.pod.deleting)
        verdicts = judge_pinning(
            [entry for entry in live if entry.pod.node and entry.pod.phase == "Running"],
            cpus=cpus,
            hardware=hardware,
            class_name=class_name,
            namespace=self.endpoint.namespace,
            neighbours=observed.neighbours,
        )
        if any(verdict.pinned is None for verdict in verdicts):
            self.requeue.append(REPORT_SECONDS)
        return EndpointState(
            endpoint=self.endpoint,
            observed=observed,
            acceptance=acceptance,
            wanted=wanted,
            serving=serving,
            models=models,
            replicas=count,
            desired_template=template,
            cpus=cpus,
            devices="" if hardware is None else hardware.devices_text(cores),
            pods=live,
            problems=pod_problems(
                live,
                self._missing_for_pods(serving, hardware, class_name, cores, live),
                keys="" if spec.auth is None else spec.auth.secret_name,
            ),
            verdicts=verdicts,
            missing_for_job=self._missing_for_job(wanted),
            rollout=self.rollout,
            canary=self.canary,
            exposure=exposure,
        )

    def _finished(self, state: EndpointState) -> ReconcilePlan:
        before = read_status(self.endpoint.status)
        after = endpoint_status(state, conditions_of(state), before)
        present, count = self.observed.deployment, state.replicas
        ref = Ref("Deployment", self.endpoint.name)
        return ReconcilePlan(
            apply=tuple(self.apply),
            # An HPA may be writing the replica count now, and what is applied here is the count that was read earlier.
            guarded=frozenset({ref} if count.kept else ()),
            taken_over=frozenset({ref} if _taken_over(present, count) else ()),
            scaled=self.scaled,
            template_of=self.canary.back_to,
            delete=tuple(self.delete),
            status=after.to_object(),
            optimized_status=tuple(self.writes),
            events=(
                *events(before.conditions, after.conditions),
                *_started(state.wanted),
                *self.canary.events,
                *scaling_events(before.scaling, after.scaling, count, suspended=self.endpoint.spec.suspend),
            ),
            grant=self.grant,
            optimization=None if state.wanted is None else state.wanted.turn,
            rollout=self.rollout,
            requeue_seconds=min(self.requeue, default=None),
        )

    def _missing_for_pods(
        self,
        serving: ServingChoice | None,
        hardware: HardwareClassSpec | None,
        class_name: str,
        cores: int,
        live: Sequence[RuntimePod],
    ) -> str:
        if serving is None or hardware is None or not any(entry.pod.unschedulable for entry in live):
            return ""
        pod, settings = self.endpoint.spec.pod, self.observed.settings
        memory = runtime_memory(
            pod,
            settings,
            result=serving.measured,
            artefact=serving.artefact,
            caches=self.endpoint.spec.serving.caches,
            devices=hardware.neuron is not None,
        )
        return missing_for(
            PodRequirements.of(class_name, hardware, pod, cores=cores, memory_bytes=memory), self.observed.nodes
        )

    def _missing_for_job(self, wanted: OptimizationState | None) -> str:
        if wanted is None or wanted.running is None or not wanted.running.unschedulable:
            return ""
        spec = wanted.spec
        hardware = usable(self._class(spec.hardware_class), spec.cores)
        if hardware is None:
            return ""
        host = JobHost.of(spec, self.endpoint.spec.pod, hardware, self.observed.settings)
        return missing_for(host.requirements(spec.hardware_class), self.observed.nodes)


def _started(wanted: OptimizationState | None) -> tuple[Event, ...]:
    if wanted is None or not wanted.start:
        return ()
    which = "" if wanted.start == 1 else f", run {wanted.start}"
    return (Event("Normal", Reason.OPTIMIZATION_STARTED, f"The job {wanted.status.job} is created{which}."),)


def _taken_over(present: DeploymentFacts | None, count: ReplicaTarget) -> bool:
    """Whether the operator writes the replica count while another scaler still counts as an owner of the field."""
    return present is not None and present.replicas_scaled and count.chosen
