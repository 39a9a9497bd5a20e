"""Real replicas that are started on demand, behind a dispatcher that knows who is least busy.

The load, the dispatcher and the operator's own scraping and judging, in one process with reserved cores.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import psutil

from penstock_operator.decide import Observation, ScalingSettings, Service, Started, State, decide
from penstock_operator.scaling.read.history import History
from penstock_operator.scaling.read.scrape import parse_metrics
from penstock_optimizer.capacity.curve import ReplicaServer, serve_replica
from penstock_optimizer.load.generator import ResourceUsage, process_tree
from penstock_simulator.policies import OWN_SCRAPE_SECONDS

START_SECONDS = 60.0
PATIENCE_SECONDS = 60.0
"""For the last answers."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request."""

    at: float
    """When it was due, seconds from the begin."""
    milliseconds: float
    """From then until it was answered; infinite when it was not."""


@dataclass(frozen=True)
class Played:
    """What came of it."""

    arrivals: list[Arrival]
    grown_at: float | None
    """When the operator first wanted more replicas, seconds from the begin."""
    start_up_seconds: float
    """From the decision to add a replica until it could serve, the longest."""
    seconds: float
    foreign_share: float
    """Share of the replicas' CPUs that other processes took, 0 to 1."""


@dataclass
class Member:
    """A replica that serves."""

    server: ReplicaServer
    name: str
    outstanding: int = 0

    @property
    def base(self) -> str:
        """Its address."""
        return self.server.url


@dataclass
class Replicas:
    """Processes, one core each. They end with the stack."""

    artefact: Path
    cpus: Sequence[int]
    folder: Path
    members: list[Member] = field(default_factory=list)
    started: list[Started] = field(default_factory=list)
    asked: int = 0
    stack: ExitStack = field(default_factory=ExitStack)

    async def add(self) -> None:
        """One more; it takes traffic when it is ready."""
        number = self.asked
        self.asked += 1
        begin = time.monotonic()
        context = serve_replica(
            self.artefact,
            cores=1,
            cpus=(self.cpus[number],),
            log=self.folder / f"replica-{number}.log",
            start_seconds=START_SECONDS,
        )
        server = await asyncio.to_thread(self.stack.enter_context, context)
        self.started.append(Started(at=time.time(), seconds=time.monotonic() - begin))
        self.members.append(Member(server, f"replica-{number}"))

    def least_busy(self) -> Member:
        """Of those that serve."""
        return min(self.members, key=lambda member: member.outstanding)

    def used_seconds(self) -> float:
        """CPU time of all of them."""
        return ResourceUsage.of(pid for member in self.members for pid in process_tree(member.server.pid)).seconds


async def play(
    replicas: Replicas,
    service: Service,
    settings: ScalingSettings,
    due: Sequence[float],
    bodies: Sequence[str],
    *,
    seconds: float,
    cpus: Sequence[int],
) -> Played:
    """Send requests when they are due, and let the operator's code decide meanwhile. Replicas are never taken away."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, set(cpus))
    try:
        with replicas.stack:
            await replicas.add()
            async with aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0), headers={"content-type": "application/json"}
            ) as session:
                return await _Play(replicas, service, settings, session).run(due, bodies, seconds)
    finally:
        os.sched_setaffinity(0, before)


class _Play:
    def __init__(
        self, replicas: Replicas, service: Service, settings: ScalingSettings, session: aiohttp.ClientSession
    ) -> None:
        self._replicas = replicas
        self._service = service
        self._settings = settings
        self._session = session
        self._arrivals: list[Arrival] = []
        self._grown_at: float | None = None
        self._begin = 0.0

    async def run(self, due: Sequence[float], bodies: Sequence[str], seconds: float) -> Played:
        for body in bodies[:8]:  # connections and caches, as any replica in service has them
            await self._send(body, 0.0)
        self._arrivals.clear()
        busy, used = _busy_seconds(self._replicas.cpus), self._replicas.used_seconds()
        self._begin = time.monotonic()
        watching = asyncio.create_task(self._watch())
        async with asyncio.TaskGroup() as group:
            for number, at in enumerate(due):
                await asyncio.sleep(self._begin + at - time.monotonic())
                group.create_task(self._send(bodies[number % len(bodies)], at))
        watching.cancel()
        with suppress(asyncio.CancelledError):
            await watching
        lasted = time.monotonic() - self._begin
        foreign = _busy_seconds(self._replicas.cpus) - busy - (self._replicas.used_seconds() - used)
        return Played(
            self._arrivals,
            self._grown_at,
            max(one.seconds for one in self._replicas.started),
            seconds,
            max(0.0, foreign) / (lasted * len(self._replicas.cpus)),
        )

    async def _send(self, body: str, at: float) -> None:
        member = self._replicas.least_busy()
        member.outstanding += 1
        milliseconds = float("inf")
        with suppress(aiohttp.ClientError, TimeoutError):
            timeout = aiohttp.ClientTimeout(total=PATIENCE_SECONDS)
            url = f"{member.server.url}/predict"
            async with self._session.post(url, data=body.encode(), timeout=timeout) as answer:
                await answer.read()
                if answer.status == 200:
                    milliseconds = (time.monotonic() - self._begin - at) * 1000
        member.outstanding -= 1
        self._arrivals.append(Arrival(at, milliseconds))

    async def _watch(self) -> None:
        """As the operator does it: scrape, judge, start more."""
        history, state = History(), State()
        starting: set[asyncio.Task[None]] = set()
        while True:
            now = time.time()
            for member in list(self._replicas.members):
                async with self._session.get(f"{member.base}/metrics", headers={"accept": "text/plain"}) as answer:
                    history.put(member.name, now, parse_metrics(await answer.text()))
            names = [member.name for member in self._replicas.members]
            metrics = history.metrics(
                names,
                now,
                objective_seconds=self._service.p95_objective_milliseconds / 1000,
                interval_seconds=OWN_SCRAPE_SECONDS,
            )
            seen = Observation(self._replicas.asked, len(names), metrics, started=tuple(self._replicas.started))
            decision, state = decide(self._settings, self._service, seen, state, now)
            while decision.replicas > self._replicas.asked:
                if self._grown_at is None:
                    self._grown_at = round(time.monotonic() - self._begin, 1)
                task = asyncio.create_task(self._replicas.add())
                starting.add(task)
                await asyncio.sleep(0)
            for task in {one for one in starting if one.done()}:
                starting.discard(task)
                task.result()
            await asyncio.sleep(max(0.0, OWN_SCRAPE_SECONDS - (time.time() - now)))


def _busy_seconds(cpus: Sequence[int]) -> float:
    """What all processes have used of these CPUs."""
    times = psutil.cpu_times(percpu=True)
    return sum(sum(times[cpu][:3]) + sum(times[cpu][5:8]) for cpu in cpus)
