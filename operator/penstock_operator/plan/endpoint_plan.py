"""From what was observed of one endpoint to what to do: the whole of the operator's judgement, as one function.

    read, accept          is there anything that can be acted upon?
    optimise              the OptimizedModel of the spec's key, its next run
    choose                what to serve: the result, the fp32 graph, or what serves already
    objects               Service, NetworkPolicy, PodDisruptionBudget, Deployment
    findings              conditions, from what the pods do and report

Pure: the same observation gives the same plan, and acting on it changes nothing that would change the plan.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from penstock.resources.hardware_class import HardwareClassSpec
from penstock.resources.optimized_model import OptimizedModelStatus, Phase, optimized_model_name
from penstock.resources.scaling import ScalingMode
from penstock.resources.status import ConditionType, EndpointStatus
from penstock_operator.plan import gateway
from penstock_operator.plan.acceptance import accepted, fitting, hardware_class, read
from penstock_operator.plan.actions import Event, Plan, StatusWrite
from penstock_operator.plan.autoscaling import bounds, horizontal_pod_autoscaler, prometheus_of, scaled_object
from penstock_operator.plan.availability import available, progressing, troubles
from penstock_operator.plan.conditions import Finding, conditions, no, unknown
from penstock_operator.plan.deployment import deployment
from penstock_operator.plan.disruption import disruption_budget
from penstock_operator.plan.endpoint import Endpoint
from penstock_operator.plan.events import events
from penstock_operator.plan.evidence import accuracy, model_resolved, objective, optimized, p95_words, speed_words
from penstock_operator.plan.job import config_map, job
from penstock_operator.plan.memory import job_memory, runtime_memory
from penstock_operator.plan.names import TEMPLATE_HASH
from penstock_operator.plan.network_policy import network_policy
from penstock_operator.plan.observed import DeploymentFacts, Observed, OptimizedModelFacts, Ref, RuntimePod
from penstock_operator.plan.optimized_model import Optimization, assess, find, resource, wanted_spec
from penstock_operator.plan.pinning import cores_pinned, judge
from penstock_operator.plan.readiness import ready, reason_words
from penstock_operator.plan.replicas import DECIDED, Replicas, replicas
from penstock_operator.plan.scalers import left_over
from penstock_operator.plan.scaling import curve_current, metrics_available, scaled, scaling_status
from penstock_operator.plan.scheduling import missing_for
from penstock_operator.plan.service import service
from penstock_operator.plan.serving import Serving, choose
from penstock_operator.plan.settings import Json
from penstock_operator.plan.status import (
    history,
    plan_status,
    pod_reports,
    read_status,
    selector,
)

PROGRESS_SECONDS = 5.0
"""How often the log of a running job is looked into."""
REPORT_SECONDS = 2.0
"""How often a pod that has not told where it runs is asked."""


def plan(observed: Observed) -> Plan:
    """What to do now for this endpoint."""
    if "deletionTimestamp" in observed.endpoint["metadata"]:
        # What it owns goes with it, whether an operator runs or not.
        return Plan(status=dict(observed.endpoint.get("status") or {}))
    endpoint = read(observed)
    if isinstance(endpoint, Finding):
        return _unreadable(observed, endpoint)
    return _Planning(endpoint, observed).run()


def _unreadable(observed: Observed, why: Finding) -> Plan:
    """The spec is of another version, or was let through: all stays as it is, and is said."""
    metadata, status = observed.endpoint["metadata"], dict(observed.endpoint.get("status") or {})
    before = read_status(status)
    findings: dict[str, Finding] = {kind: unknown("NotAccepted", why.message) for kind in ConditionType}
    findings[ConditionType.ACCEPTED] = why
    findings[ConditionType.READY] = no(why.reason, why.message)
    generation = int(metadata.get("generation") or 1)
    written = conditions(findings, before=status.get("conditions") or (), generation=generation, now=observed.now)
    update = {"conditions": written, "observed_generation": generation, "reason": why.reason}
    after = before.model_copy(update=update)
    return Plan(status=after.to_object(), events=events(before.conditions, written))


@dataclass
class _Planning:
    """One plan in the making."""

    endpoint: Endpoint
    observed: Observed
    apply: list[Json] = field(default_factory=list)
    delete: list[Ref] = field(default_factory=list)
    writes: list[StatusWrite] = field(default_factory=list)
    requeue: list[float] = field(default_factory=list)
    classes: dict[str, HardwareClassSpec | Finding] = field(default_factory=dict)
    """Those that were read for this plan: reading is a good part of its cost."""

    def run(self) -> Plan:
        """The whole of it."""
        endpoint, observed = self.endpoint, self.observed
        hardware = self._class(endpoint.spec.hardware_class)
        acceptance = accepted(endpoint, observed, hardware)
        wanted: Optimization | None = None
        if acceptance.true and not isinstance(hardware, Finding):
            wanted = self._optimise(hardware)
        present = observed.deployment
        served = find(observed.optimized_models, present.optimized_model if present is not None else "")
        serving_model = None if served is None else assess(served, now=observed.now, settings=observed.settings)
        if wanted is not None and serving_model is not None and serving_model.name == wanted.name:
            serving_model = wanted
        elif wanted is not None and served is not None and serving_model is not None and serving_model.running:
            # The fp32 graph of an older spec serves; what its job would find is no longer wanted.
            self._end_jobs(served)
        serving = choose(endpoint, wanted, serving_model, present)
        others = bool(left_over(observed.scalers, endpoint.spec.scaling.mode))
        count = replicas(endpoint, present, observed.scale, others=others)
        template = self._objects(serving, count) if acceptance.true else ""
        models = tuple(model for model in (wanted, serving_model) if model is not None)
        return self._told(acceptance, wanted, serving, count, template=template, models=models)

    def _class(self, name: str) -> HardwareClassSpec | Finding:
        if name not in self.classes:
            self.classes[name] = hardware_class(name, self.observed.hardware_classes)
        return self.classes[name]

    def _optimise(self, hardware: HardwareClassSpec) -> Optimization | None:
        """The OptimizedModel of the spec, and its next run."""
        endpoint, observed = self.endpoint, self.observed
        spec = wanted_spec(endpoint.spec, observed.settings, observed.workload_texts)
        if spec is None:
            return None
        name = optimized_model_name(spec)
        facts = find(observed.optimized_models, name)
        suspended = endpoint.spec.suspend
        if facts is None:
            if not suspended:
                self.apply.append(resource(None, spec, endpoint, ready=False))
            return Optimization(name, spec, OptimizedModelStatus(), exists=False)
        found = assess(facts, now=observed.now, settings=observed.settings, suspended=suspended)
        if found is None or facts.deleting:
            # Made again as soon as it is gone.
            self.requeue.append(REPORT_SECONDS)
            return found
        self.apply.append(resource(facts, spec, endpoint, ready=found.ready))
        if found.start:
            self.apply.append(config_map(found, facts, endpoint.namespace, observed.workload_texts))
            self.apply.append(job(found, facts, endpoint, hardware, observed.settings))
        if suspended and found.running is not None:
            self._end_jobs(facts)
        self.writes.append(found.write)
        if found.requeue_seconds is not None:
            self.requeue.append(found.requeue_seconds)
        if found.running is not None and found.status.phase is Phase.OPTIMIZING:
            self.requeue.append(PROGRESS_SECONDS)
        return found

    def _end_jobs(self, facts: OptimizedModelFacts) -> None:
        """Jobs of an OptimizedModel end, unless somebody else waits for it."""
        if any(user.uid != self.endpoint.uid for user in facts.users):
            return
        jobs = (Ref("Job", entry.name) for entry in facts.jobs if not entry.deleting)
        self.delete += [ref for ref in jobs if ref in self.observed.present]

    def _objects(self, serving: Serving | None, count: Replicas) -> str:
        """What serves. The hash of the desired pod template; empty when the present one stays as it is."""
        endpoint, observed = self.endpoint, self.observed
        self.apply.append(service(endpoint, through_gateway=gateway.answers(endpoint, observed.gateway)))
        # Its pods go on until the Service has turned away from them.
        self.delete += gateway.superfluous(endpoint, observed)
        self.apply.append(network_policy(endpoint, observed.settings))
        budget = disruption_budget(endpoint, count.wanted)
        if budget is not None:
            self.apply.append(budget)
        elif (ref := Ref("PodDisruptionBudget", endpoint.name)) in observed.present:
            self.delete.append(ref)
        if serving is None or not serving.known:
            return ""
        hardware = fitting(self._class(serving.hardware_class), serving.cores)
        if hardware is None:
            # The class of an older spec was deleted or changed; its pods go on.
            return ""
        desired = deployment(endpoint, serving, hardware, count, observed.settings)
        self.apply.append(desired)
        self.apply += gateway.objects(endpoint, observed)
        self._scalers()
        return str(desired["spec"]["template"]["metadata"]["annotations"][TEMPLATE_HASH])

    def _scalers(self) -> None:
        """The object that scales in the modes HPA and KEDA. It is not made before that of the mode before is gone, and
        KEDA's with it: there is one writer at any time."""
        endpoint, observed = self.endpoint, self.observed
        scaling, suspended = endpoint.spec.scaling, endpoint.spec.suspend
        wanted: Json | None = None
        url = prometheus_of(endpoint, observed.settings)
        between = bounds(scaling, observed.scale, observed.scalers)
        if scaling.mode is ScalingMode.HPA:
            wanted = horizontal_pod_autoscaler(endpoint, between)
        elif scaling.mode is ScalingMode.KEDA and observed.settings.keda and url:
            wanted = scaled_object(endpoint, url, between)
        if suspended or (wanted is not None and wanted["kind"] in observed.unknown_kinds):
            wanted = None
        if wanted is not None and not left_over(observed.scalers, scaling.mode):
            self.apply.append(wanted)
        kept = "" if wanted is None else wanted["kind"]
        self.delete += [
            ref
            for kind in ("HorizontalPodAutoscaler", "ScaledObject")
            if kind != kept and (ref := Ref(kind, endpoint.name)) in observed.present
        ]

    def _told(
        self,
        acceptance: Finding,
        wanted: Optimization | None,
        serving: Serving | None,
        count: Replicas,
        *,
        template: str,
        models: Sequence[Optimization],
    ) -> Plan:
        """What is said about it."""
        endpoint, observed = self.endpoint, self.observed
        before = read_status(endpoint.status)
        class_name, cores = (
            (serving.hardware_class, serving.cores)
            if serving is not None
            else (endpoint.spec.hardware_class, endpoint.spec.cores)
        )
        hardware = fitting(self._class(class_name), cores)
        cpus = cores if hardware is None else hardware.requests(cores)["cpu"]
        live = [entry for entry in observed.pods if not entry.pod.deleting]
        wrong = troubles(live, self._missing_for_pods(serving, hardware, class_name, cores, live))
        verdicts = judge(
            [entry for entry in live if entry.pod.node and entry.pod.phase == "Running"],
            cpus=cpus,
            hardware=hardware,
            class_name=class_name,
            neighbours=observed.neighbours,
        )
        answering = {entry.pod.name for entry in live if entry.pod.ready}
        if any(verdict.pinned is None for verdict in verdicts):
            self.requeue.append(REPORT_SECONDS)
        pinned = cores_pinned(verdicts, answering)
        findings: dict[str, Finding] = {
            ConditionType.ACCEPTED: acceptance,
            ConditionType.MODEL_RESOLVED: model_resolved(endpoint, wanted),
            ConditionType.OPTIMIZED: optimized(endpoint, wanted, serving, self._missing_for_job(wanted)),
            ConditionType.ACCURACY_WITHIN_BUDGET: accuracy(wanted, serving),
            ConditionType.CORES_PINNED: pinned,
            ConditionType.AVAILABLE: available(
                endpoint,
                serving,
                observed.deployment,
                count,
                wrong,
                held=gateway.answers(endpoint, observed.gateway) if gateway.wanted(endpoint) else None,
            ),
            ConditionType.OBJECTIVE_MET: objective(endpoint, serving, pinned, verdicts),
            ConditionType.CURVE_CURRENT: curve_current(endpoint, observed.scale),
            ConditionType.METRICS_AVAILABLE: metrics_available(observed, endpoint),
            ConditionType.PROGRESSING: progressing(
                endpoint,
                observed.deployment,
                count,
                desired_template=template,
                pods=live,
                wrong=wrong,
                cpus=cpus,
            ),
        }
        summed = ready(endpoint, findings, wrong)
        findings[ConditionType.READY] = summed
        written = conditions(
            findings,
            before=endpoint.status.get("conditions") or (),
            generation=endpoint.generation,
            now=observed.now,
        )
        shown = plan_status(serving, before.plan, live, models)
        figures = _figures(endpoint, serving, shown, findings)
        present = observed.deployment
        deployment_ref = Ref("Deployment", endpoint.name)
        after = EndpointStatus(
            observed_generation=endpoint.generation,
            conditions=written,
            reason=reason_words(summed, wanted),
            optimized_model=wanted.name if wanted is not None else "",
            plan=shown,
            replicas=present.replicas if present is not None else 0,
            ready_replicas=present.ready if present is not None else 0,
            selector=selector(endpoint.name),
            url=endpoint.url,
            p95=figures[0],
            speed_up=figures[1],
            scaling=scaling_status(
                before.scaling if endpoint.spec.scaling.mode in DECIDED else None,
                count,
                observed.scale,
                observed.now,
            ),
            pods=pod_reports(live, verdicts, wrong),
            history=history(before, shown, observed.now),
        )
        return Plan(
            apply=tuple(self.apply),
            # Somebody else may be writing the number at this moment, and what is written here is his of a moment ago.
            guarded=frozenset({deployment_ref} if count.kept else ()),
            taken_over=frozenset({deployment_ref} if _taken_over(present, count) else ()),
            delete=tuple(self.delete),
            status=after.to_object(),
            optimized_status=tuple(self.writes),
            events=(
                *events(before.conditions, written),
                *self._started(wanted),
                *scaled(before.scaling, after.scaling, count, suspended=endpoint.spec.suspend),
            ),
            requeue_seconds=min(self.requeue, default=None),
        )

    def _missing_for_pods(
        self,
        serving: Serving | None,
        hardware: HardwareClassSpec | None,
        class_name: str,
        cores: int,
        live: Sequence[RuntimePod],
    ) -> str:
        if serving is None or not any(entry.pod.unschedulable for entry in live):
            return ""
        pod, settings = self.endpoint.spec.pod, self.observed.settings
        memory = runtime_memory(pod, settings, result=serving.result, artefact=serving.artefact)
        return missing_for(
            self.endpoint, self.observed, hardware, class_name=class_name, cores=cores, memory_bytes=memory
        )

    def _missing_for_job(self, wanted: Optimization | None) -> str:
        if wanted is None or wanted.running is None or not wanted.running.unschedulable:
            return ""
        spec = wanted.spec
        memory = job_memory(self.endpoint.spec.pod, self.observed.settings)
        return missing_for(
            self.endpoint,
            self.observed,
            fitting(self._class(spec.hardware_class), spec.cores),
            class_name=spec.hardware_class,
            cores=spec.cores,
            memory_bytes=memory,
        )

    @staticmethod
    def _started(wanted: Optimization | None) -> tuple[Event, ...]:
        if wanted is None or not wanted.start:
            return ()
        which = "" if wanted.start == 1 else f", run {wanted.start}"
        return (Event("Normal", "OptimizationStarted", f"The job {wanted.status.job} is made{which}."),)


def _taken_over(present: DeploymentFacts | None, count: Replicas) -> bool:
    """The number is written here, and somebody who has scaled still counts as an owner."""
    return present is not None and present.replicas_scaled and count.written and not count.kept


def _figures(
    endpoint: Endpoint, serving: Serving | None, shown: object, findings: Mapping[str, Finding]
) -> tuple[str, str]:
    """p95 and speed-up for people. Only for pods that own their cores, and once they serve that plan."""
    if serving is None or not findings[ConditionType.CORES_PINNED].true:
        return "", ""
    if getattr(shown, "digest", "") != serving.digest:
        return "", ""
    return p95_words(serving.result, endpoint.spec.scaling.headroom), speed_words(serving.result)
