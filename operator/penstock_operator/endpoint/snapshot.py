"""The input of a plan, the observations of the cluster for one endpoint at one moment, and its output.

`penstock_operator.facts` has the values, so that tests can state facts instead of whole API objects.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from penstock_operator.endpoint.spec import ParsedEndpoint
from penstock_operator.facts.findings import Event, Finding
from penstock_operator.facts.installation import PlanSettings
from penstock_operator.facts.names import Json, Ref
from penstock_operator.facts.pods import Neighbour, RuntimePod
from penstock_operator.facts.routes import HostClaim, RouteFacts
from penstock_operator.facts.scaling import CanaryReport, DesiredScale, ScalerFacts
from penstock_operator.facts.workloads import DeploymentFacts, OptimizedModelFacts, ReplicaSetFacts
from penstock_operator.limits.concurrency import Line, SlotDecision
from penstock_operator.limits.quotas import Allocation, NamespaceUse


@dataclass(frozen=True)
class StatusWrite:
    """The whole status of an OptimizedModel, to write if it differs from the present one."""

    name: str
    status: Json


REPORT_SECONDS = 2.0
"""Interval between plans while a pod has not yet reported its host."""


@dataclass(frozen=True)
class Part:
    """What one question or one kind of object adds to the plan of an endpoint."""

    apply: tuple[Json, ...] = ()
    """Desired objects in the order to apply them."""
    delete: tuple[Ref, ...] = ()
    """Existing objects to delete."""
    writes: tuple[StatusWrite, ...] = ()
    """Statuses of OptimizedModels."""
    events: tuple[Event, ...] = ()
    requeue: tuple[float, ...] = ()
    """Seconds until the next plan; the shortest of all parts counts."""


@dataclass(frozen=True)
class EndpointSnapshot:
    """One endpoint and everything that belongs to it, at one moment."""

    endpoint: Json
    """The ModelEndpoint object as JSON, with metadata and status."""
    now: datetime
    """With a time zone."""
    settings: PlanSettings
    parsed: ParsedEndpoint | Finding | None = None
    """The endpoint as it was parsed for this reconcile, or why it cannot be; None: the plan parses it."""
    hardware_classes: Mapping[str, Json] = field(default_factory=dict)
    """The HardwareClass objects of the cluster by name."""
    optimized_models: tuple[OptimizedModelFacts, ...] = ()
    """Of its namespace: at least the OptimizedModel of the spec's key, the one that the Deployment serves, and those
    that have the artefact which the spec pins."""
    deployment: DeploymentFacts | None = None
    gateway: DeploymentFacts | None = None
    """The Deployment of its gateway."""
    canary: DeploymentFacts | None = None
    """The Deployment of its canary."""
    canary_pods: tuple[RuntimePod, ...] = ()
    canary_report: CanaryReport | None = None
    """None: no look yet."""
    replica_sets: tuple[ReplicaSetFacts, ...] = ()
    pods: tuple[RuntimePod, ...] = ()
    """The runtime pods, including those that are being deleted."""
    neighbours: tuple[Neighbour, ...] = ()
    present: frozenset[Ref] = frozenset()
    """Which of the operator's objects exist: only these are ever deleted."""
    workload_texts: tuple[str, ...] | None = None
    """The texts of `workload.textsFrom` without empty lines; None: the ConfigMap or the key does not exist."""
    conflicting: frozenset[Ref] = frozenset()
    """Objects with the operator's names that it did not create (no label `app.kubernetes.io/managed-by: penstock`).
    They are never changed; the condition Accepted names them."""
    namespace_labels: Mapping[str, str] = field(default_factory=dict)
    """Labels of the endpoint's namespace."""
    quota: NamespaceUse | None = None
    """The use of the namespace's quota; None: it has none."""
    nodes: tuple[Json, ...] = ()
    """Node objects as JSON (labels, taints, unschedulable, allocatable are enough)."""
    scale: DesiredScale | None = None
    """None: no decision, and the present replica count stays."""
    optimizations: Line | None = None
    """The line for optimisation jobs, of OptimizedModels; None: without a limit."""
    rollouts: Line | None = None
    """The line for rollouts, of endpoints; None: without a limit."""
    scalers: tuple[ScalerFacts, ...] = ()
    """The objects besides the operator that scale the Deployment: those that it created, and KEDA's HPAs."""
    unknown_kinds: frozenset[str] = frozenset()
    """Optional kinds that the API server does not serve: `ScaledObject`, `HTTPRoute`."""
    route: RouteFacts | None = None
    """Its Ingress or HTTPRoute."""
    host_claims: tuple[HostClaim, ...] = ()
    """The other endpoints of the cluster that name the same host or have it."""


@dataclass(frozen=True)
class ReconcilePlan:
    """What to do now for one endpoint. Carrying it out and planning again gives no further action."""

    apply: tuple[Json, ...] = ()
    """Desired objects in the order to apply them: server-side apply as field manager `penstock-operator`, with force.
    Fields that are left out (such as `replicas` where an HPA scales) are not owned by the operator."""
    guarded: frozenset[Ref] = frozenset()
    """Desired objects to apply only if they have not changed since this plan was made."""
    taken_over: frozenset[Ref] = frozenset()
    """Deployments of which the operator takes over `spec.replicas`: other owners of the field are removed first."""
    scaled: int | None = None
    """Replicas of the present Deployment. Its other fields stay as they are. None: it is applied, or stays."""
    template_of: str = ""
    """The ReplicaSet that gives the applied Deployment its pod template; empty: it has its own."""
    delete: tuple[Ref, ...] = ()
    """Existing objects to delete before anything is applied, with background propagation."""
    status: Json = field(default_factory=dict)
    """The whole status of the ModelEndpoint, to write if it differs from the present one."""
    optimized_status: tuple[StatusWrite, ...] = ()
    """Statuses of existing OptimizedModels. A new OptimizedModel gets its status with the next plan."""
    events: tuple[Event, ...] = ()
    allocation: Allocation | None = None
    """What of the namespace's quota the endpoint gets with this plan; None: there is no quota, or it gets nothing."""
    optimization: SlotDecision | None = None
    """Whether the job that is to begin has a slot; None: there is none, or no limit."""
    rollout: SlotDecision | None = None
    """The same of the rollout."""
    requeue_seconds: float | None = None
    """Plan again after this time even without an event; None: the resync is enough."""

    def object(self, kind: str, name: str | None = None) -> dict[str, Any] | None:
        """The desired object of this kind (and name), if there is one."""
        for value in self.apply:
            if value["kind"] == kind and name in {None, value["metadata"]["name"]}:
                return value
        return None
