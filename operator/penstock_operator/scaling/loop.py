"""The autoscaler's loop: at an interval, for each endpoint that scales, read the load, decide, and publish the
decision.

Published decisions are in `ClusterCache.scales`; the plan applies the replica count with the Deployment and writes the
status, so that each has one writer. Not every decision is published: a decision is made every few seconds with slightly
different figures, and each publication causes a write. A new leader starts from the present state and does not shrink
before it has observed a whole window.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import defaultdict
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from typing import Self

from penstock.logs import OBJECT, log_event
from penstock.resources.conditions import ConditionStatus
from penstock.resources.endpoint_parts.scaling import Prometheus
from penstock_operator.cluster.api import ClusterPort
from penstock_operator.cluster.errors import NotLeading
from penstock_operator.cluster.store import ObjectKey
from penstock_operator.control.cache import ClusterCache
from penstock_operator.control.queue import TimeSlices
from penstock_operator.decide import (
    Cause,
    Decision,
    DecisionCondition,
    Metrics,
    Observation,
    State,
    Unknown,
    Value,
    decide,
    dump_handover,
    in_measured_requests,
    known,
    restore_handover,
)
from penstock_operator.endpoint.replica_count import operator_writes
from penstock_operator.facts.findings import Finding, no, yes
from penstock_operator.facts.names import GATEWAY_STATUS_PORT
from penstock_operator.facts.reasons import Reason
from penstock_operator.facts.scaling import DesiredScale
from penstock_operator.metrics import SCALING_DECISIONS, SCALING_ERRORS, SCALING_SECONDS
from penstock_operator.scaling.read.gateways import DemandWatcher, combined
from penstock_operator.scaling.read.history import History
from penstock_operator.scaling.read.prometheus import OwnPrometheus, PrometheusClient, PrometheusSource
from penstock_operator.scaling.read.queries import EndpointPods, Windows
from penstock_operator.scaling.read.scrape import PodAddress, PodScraper
from penstock_operator.scaling.read.sources import PrometheusSources
from penstock_operator.scaling.read.target import ScalingTarget, ScalingTargets

NO_PROMETHEUS = Prometheus()
CONCURRENCY = 256
"""Endpoints that are read at the same time."""
PAUSE_FACTOR = 3.0
"""Reading takes at most a quarter of the time..."""
MAX_PAUSE_SECONDS = 5.0
"""... but starts again after at most this pause."""
QUIET_SECONDS = 60.0
"""Minimum interval between publications that change neither the count nor the availability of metrics."""
NOTICEABLE = 0.25
"""Figures that differ by less count as equal."""

logger = logging.getLogger(__name__)


def desired_scale(decision: Decision, seen: Observation, memory: str = "") -> DesiredScale:
    """The decision as plans read it, with the state for a new leader. Figures are rounded to three digits."""
    demand, p95 = decision.demand, seen.metrics.p95_milliseconds
    return DesiredScale(
        replicas=decision.replicas,
        reason=f"{decision.reason}.",
        cause=decision.cause.value,
        metrics=_finding(decision.metrics_available),
        curve=_finding(decision.curve_current),
        requests_per_second=None if demand is None else _rounded(demand.now),
        capacity_per_replica=None if decision.capacity is None else _rounded(decision.capacity),
        p95_milliseconds=_rounded(p95.value) if isinstance(p95, Value) else None,
        slowdown=round(decision.slowdown, 2),
        memory=memory,
    )


def _finding(condition: DecisionCondition) -> Finding:
    """The finding of a decision's condition."""
    return (yes if condition.status else no)(condition.reason, condition.message)


def unknown_load(seen: Observation) -> str:
    """Why neither rate of the load is known, as a clause; empty: at least one is."""
    fast, slow = seen.metrics.arrivals_fast, seen.metrics.arrivals_slow
    return fast.reason if isinstance(fast, Unknown) and isinstance(slow, Unknown) else ""


def with_metrics_missing(scale: DesiredScale, why: str, seconds: float) -> DesiredScale:
    """The same scale with MetricsAvailable false: the load has been unknown for `seconds`."""
    message = f"{why}, for {seconds:.0f} s: replicas do not shrink"
    return replace(scale, metrics=no(Reason.METRICS_MISSING, message))


def with_metrics_of(before: DesiredScale, scale: DesiredScale) -> DesiredScale:
    """The same scale with the finding published before: one or two missed readings do not change the condition."""
    return replace(scale, metrics=before.metrics)


def worth_publishing(before: DesiredScale | None, now: DesiredScale, *, seconds: float) -> bool:
    """Whether to publish `now`, `seconds` after `before` was published."""
    if before is None or before.replicas != now.replicas:
        return True
    if _status(before.metrics) != _status(now.metrics):
        return True
    if _status(before.curve)[0] is not _status(now.curve)[0]:
        return True
    # Negative after the clock was set back.
    if 0 <= seconds < QUIET_SECONDS:
        return False
    if before.cause != now.cause or before.memory != now.memory:
        return True
    return any(
        _differ(old, new)
        for old, new in (
            (before.requests_per_second, now.requests_per_second),
            (before.capacity_per_replica, now.capacity_per_replica),
            (before.slowdown, now.slowdown),
        )
    )


def _status(finding: Finding | None) -> tuple[ConditionStatus | None, str]:
    return (None, "") if finding is None else (finding.status, finding.reason)


def _differ(old: float | None, new: float | None) -> bool:
    if old is None or new is None:
        return old is not new
    # Below one request per second only the change from or to zero matters.
    if max(old, new) < 1:
        return (old == 0) is not (new == 0)
    return abs(new - old) > NOTICEABLE * max(old, new)


def _rounded(value: float) -> float:
    return float(f"{value:.3g}")


@dataclass(frozen=True)
class ScalingIntervals:
    """Intervals in seconds."""

    tick: float = 2.0
    """Between two scrapes of the pods."""
    prometheus: float = 15.0
    """Between two scrapes by the Prometheus that is queried, and between two queries."""


@dataclass
class _ScaledEndpoint:
    """The state of one endpoint."""

    uid: str
    state: State
    history: History = field(default_factory=History)
    gateway: History = field(default_factory=History)
    """Readings of the gateway's pods."""
    gateways: tuple[PodAddress, ...] = ()
    """Gateway pods to query for waiting requests while there is no replica."""
    decision: Decision | None = None
    published: DesiredScale | None = None
    published_at: float = 0.0
    unknown_since: float | None = None
    """The load has been unknown since then, seconds since the epoch."""
    asked_at: float | None = None
    """Last query of Prometheus, seconds since the epoch."""
    queried: Metrics = field(default_factory=lambda: Metrics.unknown("Prometheus was not queried yet"))
    """Its answers."""


class Autoscaler:
    """Runs while this process leads. An async context manager."""

    def __init__(
        self,
        port: ClusterPort,
        cache: ClusterCache,
        *,
        scraper: PodScraper,
        gateways: PodScraper,
        prometheus: PrometheusClient,
        intervals: ScalingIntervals,
        gateway_port: int = GATEWAY_STATUS_PORT,
        default: OwnPrometheus | None = None,
    ) -> None:
        self._cache = cache
        self._targets = ScalingTargets(cache)
        self._scraper = scraper
        self._gateways = gateways
        self._demand = DemandWatcher(self._on_demand, port=gateway_port)
        self._locks: defaultdict[ObjectKey, asyncio.Lock] = defaultdict(asyncio.Lock)
        """One decision on an endpoint at a time: by a tick, or because a request waits."""
        self._prometheus = prometheus
        self._intervals = intervals
        self._windows = Windows.of(intervals.prometheus)
        self._sources = PrometheusSources(port, cache, default)
        self._own_prometheus = default is not None and bool(default.url)
        self._endpoints: dict[ObjectKey, _ScaledEndpoint] = {}
        self._connections = AsyncExitStack()
        self._slices = TimeSlices()
        self._last_tick = time.monotonic()

    @property
    def age_seconds(self) -> float:
        """Seconds since the last complete tick: part of liveness."""
        return time.monotonic() - self._last_tick

    async def __aenter__(self) -> Self:
        await self._connections.enter_async_context(self._scraper)
        await self._connections.enter_async_context(self._gateways)
        await self._connections.enter_async_context(self._demand)
        await self._connections.enter_async_context(self._prometheus)
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._connections.aclose()

    async def run(self) -> None:
        """Until cancelled."""
        async with self:
            while True:
                begin = time.monotonic()
                await self.tick(time.time())
                self._demand.watch({key: one.gateways for key, one in self._endpoints.items() if one.gateways})
                seconds = time.monotonic() - begin
                SCALING_SECONDS.observe(seconds)
                self._last_tick = time.monotonic()
                # With thousands of pods a tick takes as long as its interval: reconciles need their time as well.
                await asyncio.sleep(max(self._intervals.tick - seconds, min(PAUSE_FACTOR * seconds, MAX_PAUSE_SECONDS)))

    async def tick(self, now: float) -> None:
        """Decide on every endpoint once; `now` is seconds since the epoch."""
        keys = await self._scaled()
        for key in set(self._endpoints).difference(keys):
            self._forget(key)
        self._targets.retain(set(keys))
        left = iter(keys)

        async def look() -> None:
            for key in left:
                await self._slices.pause()
                await self._look_safely(key, now)

        await asyncio.gather(*(look() for _ in range(min(CONCURRENCY, len(keys)))))

    async def _scaled(self) -> list[ObjectKey]:
        """The endpoints that scale."""
        found: list[ObjectKey] = []
        for key in self._cache.deployments:
            await self._slices.pause()
            if self._targets.scales(key):
                found.append(key)
        return sorted(found)

    async def _look_safely(self, key: ObjectKey, now: float) -> None:
        """A defect that one endpoint triggers must not stop the other endpoints from being scaled."""
        token = OBJECT.set(str(key))
        try:
            async with self._locks[key]:
                await self._look(key, now)
        except NotLeading:
            raise
        except Exception as error:
            SCALING_ERRORS.labels(type(error).__name__).inc()
            logger.exception(
                "the scaling decision failed, retrying: this is a defect of the operator",
                extra=log_event("ScalingDefect", object=str(key), reason=error),
            )
        finally:
            OBJECT.reset(token)

    async def _on_demand(self, key: ObjectKey) -> None:
        """A request waits for the first replica."""
        if key in self._endpoints:
            await self._look_safely(key, time.time())

    async def _look(self, key: ObjectKey, now: float) -> None:
        target = self._targets.find(key)
        if target is None:
            self._forget(key)
            return
        endpoint = self._endpoints.get(key)
        if endpoint is None or endpoint.uid != target.uid:
            state = restore_handover(target.memory, target.settings, now, slowdown=target.slowdown)
            endpoint = self._endpoints[key] = _ScaledEndpoint(target.uid, state)
        metrics = await self._metrics(target, endpoint, now)
        if metrics is None:
            return
        if target.gateways and not target.counted_by_query:
            metrics = await self._with_gateway(target, endpoint, metrics, now)
        entry = self._cache.endpoints.get(key)
        if entry is None or entry.uid != target.uid:
            # It was deleted while its metrics were read; another one may have its name.
            return
        metrics = in_measured_requests(metrics, target.service)
        # The decision of this process is in force, whatever another client may have written meanwhile.
        mine = endpoint.published is not None and operator_writes(target.mode)
        replicas = endpoint.published.replicas if mine and endpoint.published is not None else target.replicas
        seen = Observation(replicas, len(target.ready), metrics, rolling_out=target.rolling_out, started=target.started)
        decision, endpoint.state = decide(target.settings, target.service, seen, endpoint.state, now)
        endpoint.gateways = target.gateways if decision.replicas == 0 else ()
        SCALING_DECISIONS.labels(decision.cause.value).inc()
        self._publish(target, endpoint, decision, seen, now)

    def _publish(
        self, target: ScalingTarget, endpoint: _ScaledEndpoint, decision: Decision, seen: Observation, now: float
    ) -> None:
        endpoint.decision = decision
        # A waiting request is enough to know, with or without a rate.
        why = "" if decision.cause is Cause.WOKEN else unknown_load(seen)
        # The clock may have been set back.
        since = now if endpoint.unknown_since is None else min(endpoint.unknown_since, now)
        endpoint.unknown_since = since if why else None
        unknown_for = 0.0 if endpoint.unknown_since is None else now - endpoint.unknown_since
        if why and endpoint.published is None and unknown_for < target.settings.unknown_seconds:
            # A rate needs two readings: until then nothing is published.
            return
        scale = desired_scale(decision, seen, dump_handover(endpoint.state))
        if why and endpoint.published is not None and unknown_for < target.settings.unknown_seconds:
            scale = with_metrics_of(endpoint.published, scale)
        elif why:
            scale = with_metrics_missing(scale, why, unknown_for)
        if not worth_publishing(endpoint.published, scale, seconds=now - endpoint.published_at):
            return
        if endpoint.published is not None and endpoint.published.replicas != scale.replicas:
            logger.info(
                "scaling: %s",
                scale.reason,
                extra=log_event("ReplicasChanged", object=str(target.key), reason=scale.cause),
            )
        endpoint.published, endpoint.published_at = scale, now
        self._cache.put_scale(target.key, scale)

    def _forget(self, key: ObjectKey) -> None:
        self._locks.pop(key, None)
        if self._endpoints.pop(key, None) is not None:
            self._cache.put_scale(key, None)

    async def _metrics(self, target: ScalingTarget, endpoint: _ScaledEndpoint, now: float) -> Metrics | None:
        """The known load; None: it comes from queries alone, and their interval has not passed.

        With a Prometheus the latency comes from its queries, and the load from the pods as well as without one: a rise
        of the load would be seen up to three intervals later in queries.
        """
        named = self._own_prometheus or target.prometheus != NO_PROMETHEUS
        source = await self._sources.find(target, now) if named else None
        if source is None:
            return await self._scraped(target, endpoint, now)
        since = math.inf if endpoint.asked_at is None else now - endpoint.asked_at
        due = not 0 <= since < self._intervals.prometheus - self._intervals.tick / 2
        if due:
            endpoint.asked_at = now
            endpoint.queried = await self._queried(target, source)
        queried, queries = endpoint.queried, target.prometheus.queries
        if target.gateways and not target.counted_by_query:
            return queried
        if queries.request_rate is None and queries.in_flight is None and known(queried.arrivals_fast) is not None:
            own = await self._scraped(target, endpoint, now)
            if known(own.arrivals_fast) is not None and own.coverage >= queried.coverage:
                least = target.settings.coverage_least
                return combined(own, queried, ready=len(target.ready), coverage_least=least)
        return queried if due else None

    async def _queried(self, target: ScalingTarget, source: PrometheusSource | str) -> Metrics:
        """The answers of a Prometheus."""
        if isinstance(source, str):
            return Metrics.unknown(source)
        place = EndpointPods(target.key.namespace, target.key.name, target.ready, target.generates)
        objective = target.objective_seconds
        return await self._prometheus.metrics(source, place, self._windows, objective_seconds=objective)

    async def _scraped(self, target: ScalingTarget, endpoint: _ScaledEndpoint, now: float) -> Metrics:
        answers = await self._scraper.scrape(target.pods)
        problem = ""
        for pod, answer in answers.items():
            if isinstance(answer, str):
                problem = problem or answer
            else:
                endpoint.history.put(pod, now, answer)
        return endpoint.history.metrics(
            target.ready,
            now,
            objective_seconds=target.objective_seconds,
            interval_seconds=self._intervals.tick,
            problem=problem,
        )

    async def _with_gateway(
        self, target: ScalingTarget, endpoint: _ScaledEndpoint, replicas: Metrics, now: float
    ) -> Metrics:
        """The load as the gateway counts it, with the latency of the replicas."""
        answers = await self._gateways.scrape(target.gateways)
        problem = ""
        for pod, answer in answers.items():
            if isinstance(answer, str):
                problem = problem or answer
            else:
                endpoint.gateway.put(pod, now, answer)
        counted = endpoint.gateway.metrics(
            target.gateways_ready,
            now,
            objective_seconds=target.objective_seconds,
            interval_seconds=self._intervals.tick,
            problem=problem,
        )
        ready, least = len(target.ready), target.settings.coverage_least
        return combined(counted, replicas, ready=ready, coverage_least=least)

    def decisions(self) -> dict[ObjectKey, Decision]:
        """The last decision on each endpoint."""
        return {key: endpoint.decision for key, endpoint in self._endpoints.items() if endpoint.decision is not None}
