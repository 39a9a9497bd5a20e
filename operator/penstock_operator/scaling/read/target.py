"""What the autoscaler has to know of one endpoint, from the caches: how it may scale, its pods, what each takes."""

from __future__ import annotations

from dataclasses import dataclass

from pydantic import ValidationError

from penstock.errors import PenstockError
from penstock.resources.optimized_model import OptimizedModelStatus
from penstock.resources.result import Result
from penstock.resources.scaling import Prometheus, ScalingMode
from penstock_operator.cluster.store import Key
from penstock_operator.plan import gateway
from penstock_operator.plan.endpoint import Endpoint
from penstock_operator.plan.observed import DeploymentFacts
from penstock_operator.plan.pod_facts import PodFacts
from penstock_operator.plan.replicas import DECIDED
from penstock_operator.scaling.decide import ScalingSettings, Service, Started, WhenMissing
from penstock_operator.scaling.read.scraper import Pod
from penstock_operator.watch.cluster_cache import World

DEFAULT_OBJECTIVE_SECONDS = 1.0
"""Only for the share of good answers of an endpoint whose capacity nobody measured: no decision depends on it."""


@dataclass(frozen=True)
class Target:
    """One endpoint that scales."""

    key: Key
    uid: str
    mode: ScalingMode
    settings: ScalingSettings
    service: Service | None
    prometheus: Prometheus
    replicas: int
    """What the Deployment asks for."""
    rolling_out: bool
    ready: tuple[str, ...]
    pods: tuple[Pod, ...]
    """Those that may have something to say: ready ones, and those that finish their last requests."""
    gateways: tuple[Pod, ...]
    """The pods of its gateway that take requests, or finish their last ones. None: requests go to the pods directly."""
    gateways_ready: tuple[str, ...]
    """Those of them that take requests."""
    slowdown: float | None
    """As an earlier leader left it in the status..."""
    memory: str
    """... and what else it left there."""
    started: tuple[Started, ...]
    """How long the ready pods took to start."""

    @property
    def counted_by_query(self) -> bool:
        """A query of the endpoint's own says how many requests come."""
        return self.prometheus.queries.request_rate is not None

    @property
    def objective_seconds(self) -> float:
        """The p95 that is kept."""
        if self.service is None:
            return DEFAULT_OBJECTIVE_SECONDS
        return self.service.p95_objective_milliseconds / 1000


class Targets:
    """Reads the caches; keeps what was read of specs and results for as long as they are the same."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._endpoints: dict[Key, tuple[int, Endpoint | None]] = {}
        self._results: dict[Key, tuple[int, OptimizedModelStatus | None]] = {}

    def scales(self, key: Key) -> bool:
        """Whether there is something to decide about the endpoint."""
        endpoint, deployment = self._endpoint(key), self._world.deployments.facts(key)
        return endpoint is not None and deployment is not None and not deployment.deleting and _scales(endpoint)

    def find(self, key: Key) -> Target | None:
        """The endpoint as it is now; None when there is nothing to decide about it."""
        endpoint = self._endpoint(key)
        deployment = self._world.deployments.facts(key)
        if endpoint is None or deployment is None or deployment.deleting or not _scales(endpoint):
            return None
        scaling = endpoint.spec.scaling
        facts = [entry.facts for _, entry in self._world.pods.of(("endpoint", *key))]
        alive = [pod for pod in facts if pod.ip and pod.phase == "Running" and (pod.ready or pod.deleting)]
        gateways, gateways_ready = self._gateways(key, endpoint)
        status = endpoint.status.get("scaling") or {}
        return Target(
            key=key,
            uid=endpoint.uid,
            mode=scaling.mode,
            settings=scaling_settings(endpoint, gateway=bool(gateways)),
            service=self._service(key.namespace, deployment, endpoint, pooled=bool(gateways)),
            prometheus=scaling.metrics.prometheus,
            replicas=deployment.wanted,
            rolling_out=rolling_out(deployment),
            ready=tuple(sorted(pod.name for pod in alive if pod.ready and not pod.deleting)),
            pods=tuple(Pod(pod.name, pod.ip) for pod in alive),
            gateways=gateways,
            gateways_ready=gateways_ready,
            slowdown=_positive(status.get("slowDown")),
            memory=memory if isinstance(memory := status.get("memory"), str) else "",
            started=tuple(filter(None, map(_started, alive))),
        )

    def retain(self, keys: set[Key]) -> None:
        """Forget endpoints that are gone, and models that nobody has."""
        self._endpoints = {key: value for key, value in self._endpoints.items() if key in keys}
        self._results = {key: value for key, value in self._results.items() if self._world.models.get(key) is not None}

    def _endpoint(self, key: Key) -> Endpoint | None:
        entry = self._world.endpoints.get(key)
        if entry is None:
            return None
        known = self._endpoints.get(key)
        if known is None or known[0] != entry.version:
            value = entry.facts.value
            try:
                endpoint = None if "deletionTimestamp" in value["metadata"] else Endpoint.from_object(value)
            except PenstockError:  # the plan says so
                endpoint = None
            known = self._endpoints[key] = (entry.version, endpoint)
        return known[1]

    def _gateways(self, key: Key, endpoint: Endpoint) -> tuple[tuple[Pod, ...], tuple[str, ...]]:
        """The gateway's pods, and those that are ready. Neither where none is: the Service leads straight to the
        replicas."""
        if not gateway.wanted(endpoint):
            return (), ()
        facts = [entry.facts for _, entry in self._world.pods.of(("gateway", *key))]
        alive = [pod for pod in facts if pod.ip and pod.phase == "Running" and (pod.ready or pod.deleting)]
        ready = tuple(sorted(pod.name for pod in alive if pod.ready and not pod.deleting))
        return (tuple(sorted(Pod(pod.name, pod.ip) for pod in alive)) if ready else (), ready)

    def _service(
        self, namespace: str, deployment: DeploymentFacts, endpoint: Endpoint, *, pooled: bool
    ) -> Service | None:
        """What a replica takes of what serves; None where that was not measured, as of the fp32 graph. `pooled`: behind
        a gateway, which sends each request to the replica with the least to do."""
        result = self._result(namespace, deployment)
        if result is None:
            return None
        latency = endpoint.spec.objective.latency
        # A changed objective asks for another optimisation; what serves was made for, and counts by, its own.
        objective = result.capacity.p95_objective_milliseconds or (latency.p95_milliseconds if latency else None)
        return Service.from_curve(result.capacity.curve, p95_objective_milliseconds=objective, pooled=pooled)

    def _result(self, namespace: str, deployment: DeploymentFacts) -> Result | None:
        places = [Key(namespace, deployment.optimized_model)]
        if not deployment.optimized_model:
            # A pinned artefact: whichever optimisation found it.
            places = [key for key in self._world.models if key.namespace == namespace]
        for place in places:
            status = self._status(place)
            if status is not None and status.artefact is not None and status.artefact.digest == deployment.artefact:
                return status.result
        return None

    def _status(self, place: Key) -> OptimizedModelStatus | None:
        entry = self._world.models.get(place)
        if entry is None:
            return None
        known = self._results.get(place)
        if known is None or known[0] != entry.version:
            try:
                status = OptimizedModelStatus.model_validate(entry.facts.value.get("status") or {})
            except ValidationError:  # another version's
                status = None
            known = self._results[place] = (entry.version, status)
        return known[1]


def _scales(endpoint: Endpoint) -> bool:
    scaling = endpoint.spec.scaling
    if scaling.mode not in DECIDED or endpoint.spec.suspend:
        return False
    return scaling.mode is not ScalingMode.INTERNAL or scaling.min_replicas != scaling.max_replicas


def _positive(value: object) -> float | None:
    """A figure of the status, which anybody may have edited."""
    number = float(value) if isinstance(value, int | float) and not isinstance(value, bool) else 0.0
    return number if 0 < number < float("inf") else None


def _started(pod: PodFacts) -> Started | None:
    """Made until ready. Of one that was restarted, or is going, its readiness tells something else."""
    if pod.created is None or pod.ready_since is None or pod.deleting or pod.container.restarts:
        return None
    seconds = (pod.ready_since - pod.created).total_seconds()
    return Started(at=pod.ready_since.timestamp(), seconds=seconds) if seconds >= 0 else None


def scaling_settings(endpoint: Endpoint, *, gateway: bool) -> ScalingSettings:
    """The spec in the autoscaler's terms.

    Nobody wakes an endpoint that has no pods unless somebody counts its requests elsewhere: without a gateway that is
    up, and without a query of its own for the request rate, it keeps one replica, whatever minReplicas says. So it does
    where an HPA scales, which cannot go to zero.
    """
    scaling = endpoint.spec.scaling
    counted = gateway or scaling.metrics.prometheus.queries.request_rate is not None
    least = scaling.min_replicas if counted and scaling.mode is not ScalingMode.HPA else max(1, scaling.min_replicas)
    settings = ScalingSettings(
        min_replicas=least,
        max_replicas=scaling.max_replicas,
        headroom=scaling.headroom,
        when_metrics_missing=WhenMissing(scaling.when_metrics_missing.value),
        fallback_replicas=scaling.fallback_replicas,
    )
    if scaling.scale_down_window_seconds is None:
        return settings
    window = {"shrink_window_seconds": float(scaling.scale_down_window_seconds), "strict_window": True}
    return settings.model_copy(update=window)


def rolling_out(deployment: DeploymentFacts) -> bool:
    """Old and new pods are there side by side, or are about to be."""
    behind = deployment.generation != deployment.observed_generation
    return behind or deployment.updated < deployment.replicas
