"""One tick for all endpoints, every few seconds: read the load, decide, tell the plan.

Writes nothing itself. What it decides is kept in `world.scales`; the plan applies it with the Deployment and says it in
the status, so that there is one writer of each. A new leader begins with what runs, and shrinks nothing before it has
watched for a whole window.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import defaultdict
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Self

from penstock_operator.cluster.errors import ClusterError, Forbidden, NotLeading
from penstock_operator.cluster.kinds import SECRET
from penstock_operator.cluster.port import ClusterPort
from penstock_operator.cluster.store import Key
from penstock_operator.logs import ENDPOINT
from penstock_operator.loop.time_slices import Slices
from penstock_operator.metrics import SCALING_DECISIONS, SCALING_ERRORS, SCALING_SECONDS
from penstock_operator.plan.names import GATEWAY_STATUS_PORT
from penstock_operator.plan.observed import Scale
from penstock_operator.plan.replicas import written_here
from penstock_operator.scaling.decide import Decision, Metrics, Observation, State, bequeathed, inherited
from penstock_operator.scaling.decide.decision import Cause
from penstock_operator.scaling.decide.zero import decide_from_zero
from penstock_operator.scaling.publish import as_available_as, blindness, scale_of, unavailable, worth_telling
from penstock_operator.scaling.read.gateways import Waker, combined
from penstock_operator.scaling.read.history import History
from penstock_operator.scaling.read.prometheus import Access, OwnPrometheus, PrometheusClient, Source
from penstock_operator.scaling.read.queries import Place, Windows
from penstock_operator.scaling.read.scraper import Pod, Scraper
from penstock_operator.scaling.read.target import Target, Targets
from penstock_operator.watch.cluster_cache import World

AT_ONCE = 256
"""Endpoints whose answers are waited for at the same time."""
REST = 3.0
"""Looking takes at most a quarter of the time..."""
LONGEST_REST_SECONDS = 5.0
"""... or comes this soon again: whatever its size, a fleet is not to wait for longer."""
SECRET_SECONDS = 60.0
"""A Secret is read again after this: tokens are renewed."""
CONSENT = "penstock.dev/prometheus"
"""Label that a Secret must have, with the value `true`, to be read: who may make ModelEndpoints need not be somebody
who may read Secrets, and must not be able to have any of them sent somewhere."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Pace:
    """How often, in seconds."""

    tick: float = 2.0
    """Between two looks at the pods."""
    prometheus: float = 15.0
    """Between two scrapes of the Prometheus that is asked, and between two questions."""


@dataclass
class _Member:
    """What is remembered of one endpoint."""

    uid: str
    state: State
    history: History = field(default_factory=History)
    gateway: History = field(default_factory=History)
    """What the gateway's pods have said."""
    gateways: tuple[Pod, ...] = ()
    """Where to ask whether anybody waits, while there is no replica."""
    decision: Decision | None = None
    told: Scale | None = None
    told_at: float = 0.0
    blind_since: float | None = None
    """Nothing has been known of the load since, seconds since the epoch."""
    asked_at: float | None = None
    """Prometheus only, seconds since the epoch."""


class Autoscaler:
    """Runs while this process leads. An async context manager, for whoever ticks it by himself."""

    def __init__(
        self,
        port: ClusterPort,
        world: World,
        *,
        scraper: Scraper,
        gateways: Scraper,
        prometheus: PrometheusClient,
        pace: Pace,
        gateway_port: int = GATEWAY_STATUS_PORT,
        default: OwnPrometheus | None = None,
    ) -> None:
        self._port = port
        self._world = world
        self._targets = Targets(world)
        self._scraper = scraper
        self._gateways = gateways
        self._waker = Waker(self._woken, port=gateway_port)
        self._turns: defaultdict[Key, asyncio.Lock] = defaultdict(asyncio.Lock)
        """One look at an endpoint at a time: a tick's, or one that a waiting request asks for."""
        self._prometheus = prometheus
        self._pace = pace
        self._windows = Windows.of(pace.prometheus)
        self._default = default
        self._members: dict[Key, _Member] = {}
        self._secrets: dict[Key, tuple[float, Access | str]] = {}
        self._connections = AsyncExitStack()
        self._slices = Slices()
        self._moved = time.monotonic()

    @property
    def age_seconds(self) -> float:
        """Since the last whole tick: part of liveness."""
        return time.monotonic() - self._moved

    async def __aenter__(self) -> Self:
        await self._connections.enter_async_context(self._scraper)
        await self._connections.enter_async_context(self._gateways)
        await self._connections.enter_async_context(self._waker)
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
                self._waker.watch({key: one.gateways for key, one in self._members.items() if one.gateways})
                seconds = time.monotonic() - begin
                SCALING_SECONDS.observe(seconds)
                self._moved = time.monotonic()
                # With thousands of pods a look takes as long as its interval: reconciles need their time as well.
                await asyncio.sleep(max(self._pace.tick - seconds, min(REST * seconds, LONGEST_REST_SECONDS)))

    async def tick(self, now: float) -> None:
        """Look at every endpoint once; `now` is seconds since the epoch."""
        keys = await self._scaled()
        for key in set(self._members).difference(keys):
            self._forget(key)
        self._targets.retain(set(keys))
        left = iter(keys)

        async def look() -> None:
            for key in left:
                await self._slices.give_way()
                await self._safely(key, now)

        await asyncio.gather(*(look() for _ in range(min(AT_ONCE, len(keys)))))

    async def _scaled(self) -> list[Key]:
        """The endpoints that there is something to decide about: a small part of many, or a few."""
        found: list[Key] = []
        for key in self._world.deployments:
            await self._slices.give_way()
            if self._targets.scales(key):
                found.append(key)
        return sorted(found)

    async def _safely(self, key: Key, now: float) -> None:
        """One endpoint that we have a mistake for must not keep the others from being scaled."""
        token = ENDPOINT.set(str(key))
        try:
            async with self._turns[key]:
                await self._look(key, now)
        except NotLeading:
            raise
        except Exception as error:
            SCALING_ERRORS.labels(type(error).__name__).inc()
            logger.exception("the autoscaler cannot decide: this is a defect of the operator; trying again")
        finally:
            ENDPOINT.reset(token)

    async def _woken(self, key: Key) -> None:
        """Somebody waits for the first replica."""
        if key in self._members:
            await self._safely(key, time.time())

    async def _look(self, key: Key, now: float) -> None:
        target = self._targets.find(key)
        if target is None:
            self._forget(key)
            return
        member = self._members.get(key)
        if member is None or member.uid != target.uid:
            state = inherited(target.memory, target.settings, now, slowdown=target.slowdown)
            member = self._members[key] = _Member(target.uid, state)
        metrics = await self._metrics(target, member, now)
        if target.gateways and not target.counted_by_query:
            metrics = await self._with_gateway(target, member, metrics, now)
        if metrics is None:
            return
        # What this process decided is in force, whatever somebody else may have written meanwhile.
        mine = member.told is not None and written_here(target.mode)
        replicas = member.told.replicas if mine and member.told is not None else target.replicas
        seen = Observation(replicas, len(target.ready), metrics, rolling_out=target.rolling_out, started=target.started)
        decision, member.state = decide_from_zero(target.settings, target.service, seen, member.state, now)
        member.gateways = target.gateways if decision.replicas == 0 else ()
        SCALING_DECISIONS.labels(decision.cause.value).inc()
        self._tell(target, member, decision, seen, now)

    def _tell(self, target: Target, member: _Member, decision: Decision, seen: Observation, now: float) -> None:
        member.decision = decision
        # Who sees a request wait sees enough, rate or no rate.
        why = "" if decision.cause is Cause.WOKEN else blindness(seen)
        member.blind_since = None if not why else now if member.blind_since is None else member.blind_since
        blind_seconds = 0.0 if member.blind_since is None else now - member.blind_since
        if why and member.told is None and blind_seconds < target.settings.unknown_seconds:
            # Two readings make a rate: until then there is nothing to say.
            return
        scale = scale_of(decision, seen, bequeathed(member.state))
        if why and member.told is not None and blind_seconds < target.settings.unknown_seconds:
            scale = as_available_as(member.told, scale)
        elif why:
            scale = unavailable(scale, why, blind_seconds)
        if not worth_telling(member.told, scale, seconds=now - member.told_at):
            return
        if member.told is not None and member.told.replicas != scale.replicas:
            logger.info("%s", scale.reason)
        member.told, member.told_at = scale, now
        self._world.tell_scale(target.key, scale)

    def _forget(self, key: Key) -> None:
        self._turns.pop(key, None)
        if self._members.pop(key, None) is not None:
            self._world.tell_scale(key, None)

    async def _metrics(self, target: Target, member: _Member, now: float) -> Metrics | None:
        """What is known of the load; None: it is not time to ask again yet."""
        source = await self._source(target, now)
        if source is None:
            return await self._scraped(target, member, now)
        if member.asked_at is not None and 0 <= now - member.asked_at < self._pace.prometheus - self._pace.tick / 2:
            return None
        member.asked_at = now
        if isinstance(source, str):
            return Metrics.unknown(source)
        place = Place(target.key.namespace, target.key.name, target.ready)
        objective = target.objective_seconds
        return await self._prometheus.metrics(source, place, self._windows, objective_seconds=objective)

    async def _scraped(self, target: Target, member: _Member, now: float) -> Metrics:
        answers = await self._scraper.scrape(target.pods)
        problem = ""
        for pod, answer in answers.items():
            if isinstance(answer, str):
                problem = problem or answer
            else:
                member.history.put(pod, now, answer)
        return member.history.metrics(
            target.ready,
            now,
            objective_seconds=target.objective_seconds,
            interval_seconds=self._pace.tick,
            problem=problem,
        )

    async def _with_gateway(
        self, target: Target, member: _Member, replicas: Metrics | None, now: float
    ) -> Metrics | None:
        """The load as the gateway counts it. `replicas` None: it is not time to ask about them; there may be none."""
        if replicas is None:
            if target.ready or target.replicas:
                return None
            replicas = Metrics.unknown("no replica is ready")
        answers = await self._gateways.scrape(target.gateways)
        problem = ""
        for pod, answer in answers.items():
            if isinstance(answer, str):
                problem = problem or answer
            else:
                member.gateway.put(pod, now, answer)
        counted = member.gateway.metrics(
            target.gateways_ready,
            now,
            objective_seconds=target.objective_seconds,
            interval_seconds=self._pace.tick,
            problem=problem,
        )
        ready, least = len(target.ready), target.settings.coverage_least
        return combined(counted, replicas, ready=ready, coverage_least=least)

    async def _source(self, target: Target, now: float) -> Source | str | None:
        """Where this endpoint's load is read; None: from its pods; text: why it cannot be, as a clause."""
        asked = target.prometheus
        if asked.url is None and asked.secret_name is None:
            if self._default is None or not self._default.url:
                return None
            return self._default.source(asked.queries)
        url = asked.url or (self._default.url if self._default is not None else "")
        if not url:
            return "scaling.metrics.prometheus has a secretName and no url"
        if asked.secret_name is None:
            # The operator's own way in is for its own Prometheus only.
            return Source(url, Access(), asked.queries)
        access = await self._access(Key(target.key.namespace, asked.secret_name), now)
        return access if isinstance(access, str) else Source(url, access, asked.queries)

    async def _access(self, place: Key, now: float) -> Access | str:
        known = self._secrets.get(place)
        if known is not None and 0 <= now - known[0] < SECRET_SECONDS:
            return known[1]
        try:
            value = await self._port.get(SECRET, place.name, place.namespace)
        except Forbidden:
            found: Access | str = (
                f"the operator may not read the Secret {place.name}: install the chart with prometheus.readSecrets"
            )
        except ClusterError as error:
            # What was read a minute ago is better than nothing.
            good = known is not None and isinstance(known[1], Access)
            found = known[1] if good and known is not None else f"the Secret {place.name} cannot be read: {error}"
        else:
            found = _consented(value, place.name)
        self._secrets[place] = (now, found)
        return found

    def decisions(self) -> dict[Key, Decision]:
        """The last one about each endpoint."""
        return {key: member.decision for key, member in self._members.items() if member.decision is not None}


def _consented(value: dict[str, object] | None, name: str) -> Access | str:
    if value is None:
        return f"there is no Secret {name}"
    metadata, data = value.get("metadata"), value.get("data")
    labels = metadata.get("labels") if isinstance(metadata, dict) else None
    if not isinstance(labels, dict) or labels.get(CONSENT) != "true":
        return f"the Secret {name} is not meant for this: give it the label {CONSENT}: 'true'"
    try:
        access = Access.from_secret(data if isinstance(data, dict) else {})
        access.trust()
    except ValueError as error:
        return f"the Secret {name} cannot be used: {error}"
    return access
