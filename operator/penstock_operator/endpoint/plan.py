"""Plans one ModelEndpoint: the objects to apply and delete and the statuses to write, from the observations.

The plan is the sum of its parts, each of which is a pure function of the snapshot and of earlier parts:

    accepted    is the spec valid and allowed, and do the objects exist that it names?      endpoint/conditions.py
    optimise    the OptimizedModel of the spec, and its next job                            endpoint/optimization
    choose      the artefact to serve: the result, the fp32 graph, or the present artefact  endpoint/serving.py
    count       the replicas, and who writes them                                           endpoint/replica_count.py
    objects     Service, Deployment, gateway, the object that scales, the route             endpoint/objects
    status      conditions and status from the state of the pods                            endpoint/status.py

The same observation gives the same plan. Planning again after the plan was carried out gives no further action.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from typing import NamedTuple

from penstock.resources.hardware_class import HardwareClassSpec
from penstock.resources.optimized_model import OptimizedModelStatus, Phase, optimized_model_name
from penstock.resources.rollout_status import CanaryStatus
from penstock.resources.status import EndpointStatus
from penstock_operator.endpoint.conditions import accepted
from penstock_operator.endpoint.live_guard import guard_live
from penstock_operator.endpoint.objects import gateway
from penstock_operator.endpoint.objects.deployment import deployment
from penstock_operator.endpoint.objects.exposure import NOT_EXPOSED, expose
from penstock_operator.endpoint.objects.rollout import RolloutPlan, roll_out
from penstock_operator.endpoint.objects.scalers import bounds, scaler_part, without_scalers
from penstock_operator.endpoint.objects.services import service_part
from penstock_operator.endpoint.optimization.job import JobHost
from penstock_operator.endpoint.optimization.model import (
    OptimizationState,
    find,
    optimized_model_object,
    pinned_model,
    read_state,
    status_of,
    wanted_spec,
    with_conditions,
    with_measured_capacity,
)
from penstock_operator.endpoint.optimization.replaces import is_kept
from penstock_operator.endpoint.optimization.runs import ended_jobs, next_run, run_part, superfluous_jobs
from penstock_operator.endpoint.pods.judging import PinVerdict, PodProblem, judge_pinning, pod_problems
from penstock_operator.endpoint.pods.placement import PodRequirements, missing_for
from penstock_operator.endpoint.pods.template import runtime_disk, runtime_memory
from penstock_operator.endpoint.refused import invalid_spec_status
from penstock_operator.endpoint.replica_count import (
    SCALER_MODES,
    ReplicaTarget,
    left_over,
    replica_target,
    scaling_events,
)
from penstock_operator.endpoint.serving import ServingChoice, choose
from penstock_operator.endpoint.snapshot import REPORT_SECONDS, EndpointSnapshot, Part, ReconcilePlan
from penstock_operator.endpoint.spec import HardwareClasses, ParsedEndpoint, read_endpoint
from penstock_operator.endpoint.status import EndpointState, conditions_of, endpoint_status, events, read_status
from penstock_operator.facts.findings import Finding
from penstock_operator.facts.names import TEMPLATE_HASH, Ref, canary_name, gateway_names
from penstock_operator.facts.pods import RuntimePod
from penstock_operator.facts.reasons import Reason
from penstock_operator.facts.routes import HTTP_ROUTE, INGRESS
from penstock_operator.facts.workloads import OptimizedModelFacts
from penstock_operator.limits.concurrency import Line
from penstock_operator.limits.quotas import WAITING_SECONDS, Allocation, QuotaShare


def plan(observed: EndpointSnapshot) -> ReconcilePlan:
    """What to do now for this endpoint."""
    if "deletionTimestamp" in observed.endpoint["metadata"]:
        # The API server's garbage collector deletes the endpoint's objects, also while no operator runs.
        return ReconcilePlan(status=dict(observed.endpoint.get("status") or {}))
    endpoint = observed.parsed if observed.parsed is not None else read_endpoint(observed.endpoint)
    before = read_status(dict(observed.endpoint.get("status") or {}))
    if isinstance(endpoint, Finding):
        # Nothing is changed for a spec that this version does not understand.
        after = invalid_spec_status(observed, endpoint)
        return ReconcilePlan(status=after.to_object(), events=events(before.conditions, after.conditions))
    classes = HardwareClasses(observed.hardware_classes)
    hardware = classes.get(endpoint.spec.hardware_class)
    acceptance = accepted(endpoint, observed, hardware)
    share = observed.quota.share() if observed.quota is not None else None
    most = share.most if share is not None and acceptance.true else None
    if share is not None and acceptance.true:
        acceptance = share.finding(endpoint.namespace) or acceptance
    models = _models(endpoint, observed, hardware, accepted=acceptance.true)
    serving = choose(
        endpoint, models.wanted, models.present, observed.deployment, accepted=acceptance.true, pinned=models.pinned
    )
    live = None
    if endpoint.spec.guard.live is not None:
        live = guard_live(endpoint.spec.guard.live, serving, observed, before.guard)
        serving = live.serving
    count = replica_target(
        endpoint,
        observed.deployment,
        observed.scale,
        others=bool(left_over(observed.scalers, endpoint.spec.scaling.mode)),
        most=most,
    )
    allocation, quota = _quota_part(endpoint, observed, share, count, acceptance)
    objects = _Objects((), count)
    if acceptance.true:
        objects = _objects(endpoint, observed, serving, count, classes=classes, canary=before.canary, most=most)
    if not objects.template:
        objects = _scale_only(objects, endpoint, observed, share, accepted=acceptance.true)
    exposure = NOT_EXPOSED
    if endpoint.spec.exposure is not None or any(ref.kind in {INGRESS, HTTP_ROUTE} for ref in observed.present):
        exposure = expose(endpoint, observed, accepted=acceptance.true)
    pods = _pods(endpoint, observed, serving, classes)
    state = EndpointState(
        endpoint=endpoint,
        observed=observed,
        acceptance=acceptance,
        wanted=models.wanted,
        serving=serving,
        models=tuple(model for model in (models.wanted, models.present) if model is not None),
        replicas=objects.replicas,
        desired_template=objects.template,
        cpus=pods.cpus,
        devices=pods.devices,
        hardware=pods.hardware,
        pods=pods.live,
        problems=pods.problems,
        verdicts=pods.verdicts,
        missing_for_job=_missing_for_job(endpoint, observed, models.wanted, classes),
        exposure=exposure,
        rollout=objects.rollout.decision,
        canary=objects.rollout.canary,
        live=live,
    )
    parts = (models.part, quota, *objects.parts, exposure.part, pods.part, live.part if live is not None else Part())
    return _sum(
        state, before, parts, objects, allocation=allocation if objects.allocation is None else objects.allocation
    )


def _sum(
    state: EndpointState,
    before: EndpointStatus,
    parts: Sequence[Part],
    objects: _Objects,
    *,
    allocation: Allocation | None,
) -> ReconcilePlan:
    """The plan: the sum of the parts, with the status."""
    endpoint, present, count = state.endpoint, state.observed.deployment, state.replicas
    after = endpoint_status(state, conditions_of(state), before)
    ref = Ref("Deployment", endpoint.name)
    return ReconcilePlan(
        apply=tuple(chain.from_iterable(part.apply for part in parts)),
        # An HPA may be writing the replica count now, and the count applied here was read earlier.
        guarded=frozenset({ref} if count.kept else ()),
        taken_over=frozenset({ref} if present is not None and present.replicas_scaled and count.chosen else ()),
        scaled=objects.scaled,
        template_of=objects.rollout.canary.back_to,
        delete=tuple(chain.from_iterable(part.delete for part in parts)),
        status=after.to_object(),
        optimized_status=tuple(chain.from_iterable(part.writes for part in parts)),
        events=(
            *events(before.conditions, after.conditions),
            *chain.from_iterable(part.events for part in parts),
            *scaling_events(before.scaling, after.scaling, count, suspended=endpoint.spec.suspend),
        ),
        allocation=allocation,
        optimization=None if state.wanted is None else state.wanted.slot,
        rollout=objects.rollout.decision,
        requeue_seconds=min(chain.from_iterable(part.requeue for part in parts), default=None),
    )


class _Models(NamedTuple):
    """The OptimizedModels of an endpoint."""

    wanted: OptimizationState | None
    """Of the present spec; None: pinned, or not known."""
    present: OptimizationState | None
    """Of the present Deployment."""
    pinned: OptimizedModelFacts | None
    """With the artefact that the spec pins."""
    part: Part


def _models(
    endpoint: ParsedEndpoint, observed: EndpointSnapshot, hardware: HardwareClassSpec | Finding, *, accepted: bool
) -> _Models:
    """The OptimizedModels of the spec and of the Deployment, and the next job."""
    wanted, part = None, Part()
    label = observed.deployment.optimized_model if observed.deployment is not None else ""
    served = find(observed.optimized_models, label)
    if accepted and isinstance(hardware, HardwareClassSpec):
        wanted, part = _optimise(endpoint, observed, hardware, served)
    pinned = pinned_model(endpoint.spec, observed.optimized_models, present=label) if accepted else None
    present = None if served is None else _assess(served, endpoint, observed)
    if wanted is not None and present is not None and present.name == wanted.name:
        present = wanted
    elif served is not None and present is not None and present.ready:
        # Pinned, or of an older spec: nothing else writes its status.
        measured = present.status.result != status_of(served).result
        part = replace(part, writes=(*part.writes, *((present.write,) if measured else ())))
    elif served is not None and present is not None and present.running and (wanted is not None or pinned is not None):
        # Its fp32 graph serves, of an older spec or pinned; the result of its job is not wanted.
        part = replace(part, delete=(*part.delete, *ended_jobs(served, endpoint, observed)))
    return _Models(wanted, present, pinned, part)


def _optimise(
    endpoint: ParsedEndpoint,
    observed: EndpointSnapshot,
    hardware: HardwareClassSpec,
    served: OptimizedModelFacts | None,
) -> tuple[OptimizationState | None, Part]:
    """The OptimizedModel of the spec, and its next job. `served`: the Deployment's."""
    spec = wanted_spec(endpoint.spec, observed.settings, observed.workload_texts, hardware.target)
    if spec is None:
        return None, Part()
    name, suspended = optimized_model_name(spec), endpoint.spec.suspend
    facts = find(observed.optimized_models, name)
    present = None if served is None or served.deleting or served.name == name else read_state(served)
    if present is not None and is_kept(present, spec) and (facts is None or status_of(facts).phase is not Phase.READY):
        spec, name, facts = present.spec, present.name, served
    if facts is None:
        new = () if suspended else (optimized_model_object(None, spec, endpoint, ready=False),)
        return OptimizationState(name, spec, OptimizedModelStatus(), exists=False), Part(apply=new)
    state = _assess(facts, endpoint, observed, suspended=suspended, line=observed.optimizations)
    if state is None or facts.deleting:
        # It is created again as soon as the deleted one has disappeared.
        return state, Part(requeue=(REPORT_SECONDS,))
    wanted = (optimized_model_object(facts, spec, endpoint, ready=state.ready),)
    if not state.ready:
        state, part = run_part(state, facts, endpoint, observed, hardware)
        return state, replace(part, apply=(*wanted, *part.apply), writes=(state.write,))
    left = (Ref("Job", job.name) for job in (superfluous_jobs(facts) if facts.jobs else ()))
    return state, Part(
        apply=wanted, delete=tuple(ref for ref in left if ref in observed.present), writes=(state.write,)
    )


def _assess(
    facts: OptimizedModelFacts,
    endpoint: ParsedEndpoint,
    observed: EndpointSnapshot,
    *,
    suspended: bool = False,
    line: Line | None = None,
) -> OptimizationState | None:
    """The state of an OptimizedModel, and its next run; None: of another version."""
    state = read_state(facts)
    if state is None:
        return None
    if not (state.ready or facts.deleting):
        store, namespace = observed.settings.store_of(endpoint.namespace), endpoint.namespace
        state = next_run(
            state,
            facts,
            store,
            now=observed.now,
            settings=observed.settings,
            suspended=suspended,
            line=line,
            namespace=namespace,
        )
    return with_conditions(with_measured_capacity(state, observed.pods), facts, observed.now)


def _quota_part(
    endpoint: ParsedEndpoint,
    observed: EndpointSnapshot,
    share: QuotaShare | None,
    count: ReplicaTarget,
    acceptance: Finding,
) -> tuple[Allocation | None, Part]:
    """The endpoint's allocation of the namespace's quota with this plan, and when to look at the quota again."""
    if share is None or not acceptance.true:
        waits = share is not None and acceptance.reason == Reason.QUOTA_EXCEEDED
        return None, Part(requeue=(share.waiting_seconds,) if share is not None and waits else ())
    scaling, replicas = endpoint.spec.scaling, count.wanted
    if scaling.mode in SCALER_MODES and not endpoint.spec.suspend:
        replicas = max(replicas, bounds(endpoint, observed, share.most).most)
    limited = share.most <= replicas and share.most < scaling.max_replicas
    return share.allocation(replicas), Part(requeue=(WAITING_SECONDS,) if limited else ())


class _Objects(NamedTuple):
    """The objects that serve, and what follows from them."""

    parts: tuple[Part, ...]
    replicas: ReplicaTarget
    rollout: RolloutPlan = RolloutPlan()
    template: str = ""
    """The hash of the desired pod template; empty: the present one stays."""
    scaled: int | None = None
    """Replicas of the present Deployment. Its other fields stay as they are."""
    allocation: Allocation | None = None
    """Of a Deployment that is only scaled."""


def _objects(
    endpoint: ParsedEndpoint,
    observed: EndpointSnapshot,
    serving: ServingChoice | None,
    count: ReplicaTarget,
    *,
    classes: HardwareClasses,
    canary: CanaryStatus | None,
    most: int | None,
) -> _Objects:
    """The parts of the objects that serve. `canary`: in the present status. `most`: the replicas that the quota allows;
    None: there is no quota."""
    through_gateway = endpoint.wants_gateway and gateway.answers(endpoint, observed.gateway)
    parts = [service_part(endpoint, observed, count.wanted, through_gateway=through_gateway)]
    names = {ref.name for ref in observed.present}
    has_gateway = endpoint.wants_gateway or not gateway_names(endpoint.name).isdisjoint(names)
    hardware = None
    if serving is not None and serving.known:
        hardware = classes.usable(serving.hardware_class, serving.cores)
    if serving is None or hardware is None or (serving.optimized_model and serving.target is not hardware.target):
        # Nothing to serve; or the class of an older spec was deleted or changed, and its pods keep running.
        if has_gateway:
            parts.append(Part(delete=tuple(gateway.superfluous(endpoint, observed))))
        return _Objects(tuple(parts), count)
    desired = deployment(endpoint, serving, hardware, count, observed.settings)
    template = str(desired["spec"]["template"]["metadata"]["annotations"][TEMPLATE_HASH])
    rollout = RolloutPlan(Part(apply=(desired,)))
    present, canary_ref = observed.deployment, Ref("Deployment", canary_name(endpoint.name))
    has_canary = endpoint.spec.rollout.canary is not None or canary_ref in observed.present
    rolls = present is not None and (
        present.template != template or present.paused or present.rollout_began is not None
    )
    if has_canary or rolls:
        rollout = roll_out(endpoint, observed, desired, template, serving.digest, count=count, before=canary)
    parts.append(rollout.part)
    if has_gateway:
        parts.append(gateway.part(endpoint, observed, canary_percent=rollout.canary.percent))
    if endpoint.spec.scaling.mode in SCALER_MODES or observed.scalers:
        parts.append(scaler_part(endpoint, observed, most))
    return _Objects(tuple(parts), count, rollout, template, scaled=rollout.scaled)


def _scale_only(
    objects: _Objects, endpoint: ParsedEndpoint, observed: EndpointSnapshot, share: QuotaShare | None, *, accepted: bool
) -> _Objects:
    """Scale the Deployment although its template is not known or not allowed.

    What serves scales on while its template is not known, as after its OptimizedModel was deleted. While the spec
    is not accepted, the number stays: it may be the spec's own bounds that are not. But an endpoint without
    replicas gets one for a request that waits, and a suspended one has none.
    """
    present, count, parts = observed.deployment, objects.replicas, objects.parts
    if present is None or present.deleting or present.owner.uid != endpoint.uid:
        return objects
    number, allocation = present.wanted, None
    if endpoint.spec.suspend:
        number, parts = 0, (*parts, without_scalers(endpoint, observed))
    elif count.chosen and accepted:
        number = count.wanted
    elif count.chosen and not number and count.wanted and (share is None or share.accepted):
        number = 1
        allocation = None if share is None else share.allocation(number)
    scaled = number if number != present.wanted else None
    return _Objects(parts, replace(count, wanted=number), scaled=scaled, allocation=allocation)


class _Pods(NamedTuple):
    """The runtime pods, judged."""

    cpus: int
    devices: str
    hardware: HardwareClassSpec | None
    live: tuple[RuntimePod, ...]
    verdicts: tuple[PinVerdict, ...] = ()
    problems: tuple[PodProblem, ...] = ()
    part: Part = Part()


def _pods(
    endpoint: ParsedEndpoint, observed: EndpointSnapshot, serving: ServingChoice | None, classes: HardwareClasses
) -> _Pods:
    """The state and the reports of the pods, and when to look again."""
    spec = endpoint.spec
    of = spec if serving is None else serving
    class_name, cores = of.hardware_class, of.cores
    hardware = classes.usable(class_name, cores)
    cpus = cores if hardware is None else hardware.requests(cores)["cpu"]
    devices = "" if hardware is None else hardware.devices_text(cores)
    live = tuple(entry for entry in observed.pods if not entry.pod.deleting)
    if not live:
        return _Pods(cpus, devices, hardware, live)
    verdicts = judge_pinning(
        [entry for entry in live if entry.pod.node and entry.pod.phase == "Running"],
        cpus=cpus,
        hardware=hardware,
        class_name=class_name,
        namespace=endpoint.namespace,
        neighbours=observed.neighbours,
    )
    missing = ""
    if serving is not None and hardware is not None and any(entry.pod.unschedulable for entry in live):
        memory = runtime_memory(
            spec.pod,
            observed.settings,
            result=serving.measured,
            artefact=serving.artefact,
            caches=spec.serving.caches,
            devices=hardware.neuron is not None,
            live=spec.guard.live,
        )
        disk = runtime_disk(serving.artefact, observed.settings)
        needs = PodRequirements.of(class_name, hardware, spec.pod, cores=cores, memory_bytes=memory, disk_bytes=disk)
        missing = missing_for(needs, observed.nodes)
    problems = pod_problems(live, missing, keys="" if spec.auth is None else spec.auth.secret_name)
    silent = any(verdict.pinned is None for verdict in verdicts)
    return _Pods(cpus, devices, hardware, live, verdicts, problems, Part(requeue=(REPORT_SECONDS,) if silent else ()))


def _missing_for_job(
    endpoint: ParsedEndpoint, observed: EndpointSnapshot, wanted: OptimizationState | None, classes: HardwareClasses
) -> str:
    """Why no node takes the job; empty: nothing is known to be missing."""
    if wanted is None or wanted.running is None or not wanted.running.unschedulable:
        return ""
    hardware = classes.usable(wanted.spec.hardware_class, wanted.spec.cores)
    if hardware is None:
        return ""
    host = JobHost.of(wanted.spec, endpoint.spec.pod, hardware, observed.settings)
    return missing_for(host.requirements(wanted.spec.hardware_class), observed.nodes)
