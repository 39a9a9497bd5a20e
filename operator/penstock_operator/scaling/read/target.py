"""Describes one endpoint to the autoscaler, from the caches: its settings, its pods, the capacity of a
replica."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from pydantic import ValidationError

from penstock.errors import PenstockError
from penstock.resources.endpoint_parts.scaling import Prometheus, ScalingMode
from penstock.resources.optimized_model import OptimizedModelStatus
from penstock.resources.result import Result
from penstock_operator.cluster.store import ObjectKey
from penstock_operator.control.cache import ClusterCache
from penstock_operator.decide import MeasuredTexts, ScalingSettings, Service, Started, WhenMissing
from penstock_operator.endpoint.replica_count import DECIDED
from penstock_operator.endpoint.spec import ParsedEndpoint
from penstock_operator.facts.pods import PodFacts
from penstock_operator.facts.workloads import DeploymentFacts
from penstock_operator.scaling.read.scrape import PodAddress, address_of

DEFAULT_OBJECTIVE_SECONDS = 1.0
"""Objective for the share of good answers of an endpoint without a measured capacity: no decision depends on it."""


@dataclass(frozen=True)
class ScalingTarget:
    """One endpoint that scales."""

    key: ObjectKey
    uid: str
    mode: ScalingMode
    settings: ScalingSettings
    service: Service | None
    prometheus: Prometheus
    replicas: int
    """`spec.replicas` of the Deployment."""
    rolling_out: bool
    ready: tuple[str, ...]
    pods: tuple[PodAddress, ...]
    """Pods to scrape: ready ones, and those that finish their last requests."""
    gateways: tuple[PodAddress, ...]
    """Gateway pods that take requests or finish their last ones. Empty: requests go to the pods directly."""
    gateways_ready: tuple[str, ...]
    """Names of those that take requests."""
    slowdown: float | None
    """From the status, as an earlier leader wrote it..."""
    memory: str
    """... and the rest of that leader's state."""
    started: tuple[Started, ...]
    """Start-up times of the ready pods."""

    @property
    def counted_by_query(self) -> bool:
        """Whether the endpoint has its own query for the request rate."""
        return self.prometheus.queries.request_rate is not None

    @property
    def generates(self) -> bool:
        """Whether it generates text, and its capacity in tokens was measured."""
        return self.service is not None and self.service.tokens_per_request is not None

    @property
    def objective_seconds(self) -> float:
        """The p95 objective, of text generation of the time to the first token."""
        if self.service is None:
            return DEFAULT_OBJECTIVE_SECONDS
        return self.service.p95_objective_milliseconds / 1000


class ScalingTargets:
    """Reads the caches; keeps parsed specs and the capacity of replicas until they change."""

    def __init__(self, cache: ClusterCache) -> None:
        self._cache = cache
        self._endpoints: dict[ObjectKey, tuple[int, ParsedEndpoint | None, bool]] = {}
        """Version, spec, and whether it wants a gateway."""
        self._services: dict[ObjectKey, tuple[tuple[object, ...], Service | None]] = {}

    def scales(self, key: ObjectKey) -> bool:
        """Whether the autoscaler decides on the endpoint."""
        endpoint, deployment = self._endpoint(key), self._cache.deployments.facts(key)
        return endpoint is not None and deployment is not None and not deployment.deleting and _scales(endpoint)

    def find(self, key: ObjectKey) -> ScalingTarget | None:
        """The endpoint as it is now; None when the autoscaler does not decide on it."""
        endpoint = self._endpoint(key)
        deployment = self._cache.deployments.facts(key)
        if endpoint is None or deployment is None or deployment.deleting or not _scales(endpoint):
            return None
        scaling = endpoint.spec.scaling
        alive = _alive(self._cache.runtime_pods(key))
        gateways, gateways_ready = self._gateways(key)
        status = endpoint.status.get("scaling") or {}
        return ScalingTarget(
            key=key,
            uid=endpoint.uid,
            mode=scaling.mode,
            settings=scaling_settings(endpoint, gateway=bool(gateways), most=self._cache.quotas.most(key)),
            service=self._service(key, deployment, endpoint, pooled=bool(gateways)),
            prometheus=scaling.metrics.prometheus,
            replicas=deployment.wanted,
            rolling_out=rolling_out(deployment),
            ready=tuple(sorted(pod.name for pod in alive if pod.ready and not pod.deleting)),
            pods=tuple(address_of(pod) for pod in alive),
            gateways=gateways,
            gateways_ready=gateways_ready,
            slowdown=_positive(status.get("slowDown")),
            memory=memory if isinstance(memory := status.get("memory"), str) else "",
            started=tuple(filter(None, map(_started, alive))),
        )

    def retain(self, keys: set[ObjectKey]) -> None:
        """Forget deleted endpoints and models."""
        self._endpoints = {key: value for key, value in self._endpoints.items() if key in keys}
        self._services = {key: value for key, value in self._services.items() if key in keys}

    def _endpoint(self, key: ObjectKey) -> ParsedEndpoint | None:
        entry = self._cache.endpoints.get(key)
        if entry is None:
            return None
        known = self._endpoints.get(key)
        if known is None or known[0] != entry.version:
            value = entry.facts.value
            try:
                endpoint = None if "deletionTimestamp" in value["metadata"] else ParsedEndpoint.from_object(value)
            except PenstockError:  # the plan reports it in the status
                endpoint = None
            known = self._endpoints[key] = (entry.version, endpoint, endpoint is not None and endpoint.wants_gateway)
        return known[1]

    def _gateways(self, key: ObjectKey) -> tuple[tuple[PodAddress, ...], tuple[str, ...]]:
        """The gateway's pods, and the names of the ready ones. Both empty while none is ready: then the Service
        selects the replicas."""
        if not self._endpoints[key][2]:
            return (), ()
        alive = _alive(self._cache.gateway_pods(key))
        ready = tuple(sorted(pod.name for pod in alive if pod.ready and not pod.deleting))
        return (tuple(sorted(address_of(pod) for pod in alive)) if ready else (), ready)

    def _service(
        self, key: ObjectKey, deployment: DeploymentFacts, endpoint: ParsedEndpoint, *, pooled: bool
    ) -> Service | None:
        """The capacity of a replica that serves; None where it was not measured, as of the fp32 graph. `pooled`:
        behind a gateway, which sends each request to the least loaded replica."""
        name, artefact = self._served(key, deployment)
        entry = self._cache.models.get(ObjectKey(key.namespace, name))
        if entry is None:
            return None
        version, parts = self._endpoints[key][0], (deployment.cores, deployment.paused, pooled)
        basis = (name, entry.version, artefact, deployment.serves_fp32, version, *parts)
        known = self._services.get(key)
        if known is None or known[0] != basis:
            try:
                status = OptimizedModelStatus.model_validate(entry.facts.value.get("status") or {})
            except ValidationError:  # written by another version
                status = None
            serves = status is not None and status.artefact is not None and status.artefact.digest == artefact
            result = status.result if status is not None and serves else None
            service = None if result is None else _service_of(result, deployment, endpoint, pooled=pooled)
            if service is not None and result is not None and deployment.serves_fp32 and result.speed_up:
                service = service.slower(max(1.0, result.speed_up))
            known = self._services[key] = (basis, service)
        return known[1]

    def _served(self, key: ObjectKey, deployment: DeploymentFacts) -> tuple[str, str]:
        """The OptimizedModel and the artefact of the pods. A paused Deployment names those for the next pods."""
        if not deployment.paused:
            return deployment.optimized_model, deployment.artefact
        pods = [pod for pod in self._cache.runtime_pods(key) if not pod.deleting]
        return max(((pod.optimized_model, pod.artefact) for pod in pods), default=("", ""))


def _service_of(
    result: Result, deployment: DeploymentFacts, endpoint: ParsedEndpoint, *, pooled: bool
) -> Service | None:
    """The capacity of a replica from the result of its optimisation."""
    latency = endpoint.spec.objective.latency
    # A changed objective starts another optimisation; what serves was made for its own objective.
    objective = result.capacity.p95_objective_milliseconds or (latency.p95_milliseconds if latency else None)
    if result.token_capacity is None:
        curve = result.capacity.curve
        times = [(float(one.tokens), one.p50_milliseconds) for one in result.latency]
        texts = MeasuredTexts.of(curve.tokens_per_request, times)
        found = Service.from_curve(curve, p95_objective_milliseconds=objective, pooled=pooled, texts=texts)
    else:
        found = Service.from_tokens(result.token_capacity.curve, pooled=pooled)
    # A paused Deployment has the cores of the next pods. With more cores than it was made for, a plan leaves some
    # unused.
    fewer = 0 < deployment.cores < result.cores and not deployment.paused
    return found.slower(result.cores / deployment.cores) if found is not None and fewer else found


def _scales(endpoint: ParsedEndpoint) -> bool:
    scaling = endpoint.spec.scaling
    if scaling.mode not in DECIDED or endpoint.spec.suspend:
        return False
    return scaling.mode is not ScalingMode.INTERNAL or scaling.min_replicas != scaling.max_replicas


def _positive(value: object) -> float | None:
    """A number from the status, which any client may have edited."""
    number = float(value) if isinstance(value, int | float) and not isinstance(value, bool) else 0.0
    return number if 0 < number < float("inf") else None


def _started(pod: PodFacts) -> Started | None:
    """Time from creation to readiness; None for a pod that restarted or is being deleted."""
    if pod.created is None or pod.ready_since is None or pod.deleting or pod.container.restarts:
        return None
    seconds = (pod.ready_since - pod.created).total_seconds()
    return Started(at=pod.ready_since.timestamp(), seconds=seconds) if seconds >= 0 else None


def scaling_settings(endpoint: ParsedEndpoint, *, gateway: bool, most: int | None = None) -> ScalingSettings:
    """The spec as the autoscaler's settings. `most`: replicas that the quota of the namespace allows; None: it has
    none.

    An endpoint without pods can only be woken if its requests are counted elsewhere. Without a ready gateway and
    without its own query for the request rate it keeps one replica, whatever minReplicas is. The same applies to an
    HPA, which cannot scale to zero.
    """
    scaling = endpoint.spec.scaling
    counted = gateway or scaling.metrics.prometheus.queries.request_rate is not None
    least = scaling.min_replicas if counted and scaling.mode is not ScalingMode.HPA else max(1, scaling.min_replicas)
    limited = most is not None and most < scaling.max_replicas
    settings = ScalingSettings(
        min_replicas=least,
        max_replicas=max(1, least, most or 0) if limited else scaling.max_replicas,
        limited_by_quota=limited,
        headroom=scaling.headroom,
        when_metrics_missing=WhenMissing(scaling.when_metrics_missing.value),
        fallback_replicas=scaling.fallback_replicas,
    )
    if scaling.scale_down_window_seconds is None:
        return settings
    window = {"shrink_window_seconds": float(scaling.scale_down_window_seconds), "strict_window": True}
    return settings.model_copy(update=window)


def _alive(pods: Iterable[PodFacts]) -> list[PodFacts]:
    """The pods that serve requests: ready ones, and deleted ones that still answer."""
    return [pod for pod in pods if pod.ip and pod.phase == "Running" and (pod.ready or pod.deleting)]


def rolling_out(deployment: DeploymentFacts) -> bool:
    """Old and new pods run side by side, or are about to."""
    behind = deployment.generation != deployment.observed_generation
    return behind or deployment.updated < deployment.replicas
