"""All policies on the same traffic, held against each other at equal replica-hours.

A policy with more replicas has fewer late requests: two points say nothing. So everybody's one knob is swept, with the
same bounds on the number of replicas, which gives frontiers: replica-hours against late requests. They are read to a
rival's favour: dominated points are left out, and between two points the straight line counts, although no setting of
the knob may give it. Two readings with the rival's knob chosen in hindsight, for this very traffic:

- **at our setting**: the replica-hours that ours takes at its headroom. A rival that never takes so few is met at its
  fewest, on our frontier. So it is for a user who sets nothing.
- **over the range**: the mean of either frontier over all replica-hours that both can take, and the share of that range
  in which ours has fewer. So it is for a user who pays for more.

And one without hindsight, since tomorrow's traffic is unknown when a target is written into a manifest:

- **all traces together**: late requests and replica-hours are added up over the traces, with one and the same setting
  for all of them, and these frontiers are read in the same way.


`simulate` runs one policy with one seed through one trace.
"""

from __future__ import annotations

import math
import multiprocessing
import signal
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise

import numpy as np

from penstock_operator.decide import Service
from penstock_simulator.choices import Dispatch, PolicyKind
from penstock_simulator.fleet import Fleet, FleetSettings, ReplicaModel
from penstock_simulator.policies import OWN_SCRAPE_SECONDS, POLICIES, Endpoint, Limits, Policy, View, make_policy
from penstock_simulator.scraper import Scraper
from penstock_simulator.traces import WARM_UP_SECONDS, Trace, built_in


@dataclass(frozen=True)
class RunResult:
    """The figures of one run, warm-up left out."""

    requests: int
    late: int
    """Answered after the objective, or not at all."""
    lost: int
    """Of these: refused with 429, or given up with 504."""
    replica_hours: float
    flips: int
    """How often the number of replicas turned from growing to shrinking or back."""
    replicas: tuple[int, ...]
    """Requested, one figure a second."""


@dataclass(frozen=True)
class Traffic:
    """The requests of one trace and seed: the same for every policy."""

    trace: Trace
    arrivals: np.ndarray
    """Shape [requests], seconds, rising; the warm-up first."""
    services: np.ndarray
    """Shape [requests], seconds of one server."""

    @classmethod
    def of(cls, trace: Trace, endpoint: Endpoint, seed: int) -> Traffic:
        """Drawn with a seed."""
        random = np.random.default_rng(seed)
        arrivals = trace.arrivals(random)
        return cls(trace, arrivals, endpoint.model.service_seconds(random, len(arrivals)))


def simulate(
    traffic: Traffic,
    endpoint: Endpoint,
    policy: Policy,
    fleet_settings: FleetSettings,
    *,
    scrape_interval: int,
    own_interval: int | None = None,
    on_answered: Callable[[Sequence[tuple[float, int, float]]], None] = lambda _: None,
) -> RunResult:
    """Run one policy through the traffic. Deterministic.

    `scrape_interval`: Prometheus', seconds; `own_interval`: the policy's, where it reads the pods itself.
    `on_answered` gets, batch by batch, (when, pod, latency in seconds) of all requests but the refused ones; times
    count from the begin of the warm-up.
    """
    trace = traffic.trace
    fleet = Fleet(endpoint.model, fleet_settings)
    objective = endpoint.service.p95_objective_milliseconds / 1000
    scrapers = {interval: Scraper(objective) for interval in {scrape_interval, own_interval or scrape_interval}}
    unread: dict[int, list[tuple[float, int, float]]] = {interval: [] for interval in scrapers}
    # Where a planner with the curve would begin; during the warm-up every policy reaches its own number.
    begin = endpoint.limits.clamp(math.ceil(float(trace.rates[0]) / (0.75 * endpoint.service.rate)))
    fleet.resize(begin, -fleet_settings.start_up_seconds)
    fleet.activate(0.0)
    seconds = WARM_UP_SECONDS + trace.seconds
    edges = np.searchsorted(traffic.arrivals, np.arange(seconds + 1)).tolist()
    arrivals, services = traffic.arrivals.tolist(), traffic.services.tolist()
    replicas: list[int] = []
    concurrency: list[float] = []
    counter = _Counter(objective)
    area = 0.0
    for second in range(seconds):
        now = second + 1
        part = slice(edges[second], edges[now])
        refused = fleet.refused
        fleet.advance(arrivals[part], services[part], float(now))
        counter.refused(second, fleet.refused - refused)
        concurrency.append(fleet.area - area)
        area = fleet.area
        fleet.activate(float(now))
        due = [interval for interval in scrapers if now % interval == 0]
        if due:
            log = fleet.take_log()
            counter.answered(log)
            on_answered(log)
            for waiting in unread.values():
                waiting.extend(log)
        for interval in due:
            scrapers[interval].scrape(fleet, unread[interval], float(now))
            unread[interval] = []
        if now % policy.interval == 0:
            own = scrapers[own_interval or scrape_interval]
            wanted = policy.decide(View(float(now), fleet, scrapers[scrape_interval], own, concurrency))
            if wanted is not None and wanted != fleet.replicas:
                fleet.resize(wanted, float(now))
        replicas.append(fleet.replicas)
    # Requests that are still in the replicas are answered, or not.
    fleet.advance([], [], math.inf)
    rest = fleet.take_log()
    counter.answered(rest)
    on_answered(rest)
    hours = fleet.replica_seconds(WARM_UP_SECONDS, seconds) / 3600
    requests = len(arrivals) - edges[WARM_UP_SECONDS]
    asked = replicas[WARM_UP_SECONDS:]
    return RunResult(
        requests=requests,
        late=counter.late,
        lost=counter.lost,
        replica_hours=hours,
        flips=flips(asked),
        replicas=tuple(asked),
    )


def flips(replicas: list[int]) -> int:
    """How often a series of numbers turned from growing to shrinking or back."""
    count, direction = 0, 0
    for before, after in pairwise(replicas):
        turn = (after > before) - (after < before)
        if turn and direction and turn != direction:
            count += 1
        direction = turn or direction
    return count


class _Counter:
    """Late and lost requests among those that came after the warm-up."""

    def __init__(self, objective: float) -> None:
        self._objective = objective
        self.late = 0
        self.lost = 0

    def answered(self, log: Sequence[tuple[float, int, float]]) -> None:
        for when, _, latency in log:
            if latency > self._objective:
                # One that was given up at its deadline came before that; the exact second does not matter.
                is_lost = latency == math.inf
                if (when if is_lost else when - latency) >= WARM_UP_SECONDS:
                    self.late += 1
                    self.lost += is_lost

    def refused(self, second: int, count: int) -> None:
        if second >= WARM_UP_SECONDS:
            self.late += count
            self.lost += count


RANGE_STEPS = 40
"""Steps at which a range of replica-hours is evaluated."""


@dataclass(frozen=True)
class Experiment:
    """The runs of a comparison."""

    service: Service
    model: ReplicaModel
    traces: tuple[str | Trace, ...]
    """Names of built-in traces, or traces of one's own."""
    policies: tuple[PolicyKind, ...] = tuple(PolicyKind)
    limits: Limits = field(default_factory=Limits)
    fleet: FleetSettings = field(default_factory=FleetSettings)
    scrape_interval: int = 5
    """Seconds between Prometheus' scrapes."""
    headroom: float = 0.75
    """Ours, at which the policies are held against each other."""
    seeds: tuple[int, ...] = (1, 2, 3)
    knobs: Mapping[PolicyKind, tuple[float, ...]] = field(default_factory=dict)
    """Values to try instead of a policy's own."""

    def values(self, kind: PolicyKind) -> tuple[float, ...]:
        """The values of a policy's knob that are tried, the headroom of ours among them."""
        values = self.knobs.get(kind, POLICIES[kind].values)
        return tuple(sorted({*values, self.headroom})) if POLICIES[kind].is_ours else values

    @property
    def plan(self) -> list[tuple[PolicyKind, float]]:
        """What meets each trace with each seed: policies with a value of their knob."""
        return [(kind, knob) for kind in self.policies for knob in self.values(kind)]

    @property
    def runs(self) -> int:
        """How many are simulated."""
        return len(self.traces) * len(self.seeds) * len(self.plan)

    @property
    def requests(self) -> float:
        """How many are simulated in all, about: the time is proportional to it."""
        return sum(self.trace(index, self.seeds[0]).requests for index in range(len(self.traces))) * (
            len(self.seeds) * len(self.plan)
        )

    def trace(self, index: int, seed: int) -> Trace:
        """One of the traces, made with a seed where it is a built-in one."""
        name = self.traces[index]
        return built_in(name, self.service.rate, seed) if isinstance(name, str) else name


@dataclass(frozen=True)
class Point:
    """A policy with one value of its knob on one trace: means over the seeds."""

    kind: PolicyKind
    knob: float
    requests: float
    late: float
    lost: float
    replica_hours: float
    flips: float
    most_flips: int
    """Of any seed."""
    most_replicas: int

    @property
    def late_share(self) -> float:
        """Late ones of all requests, 0 to 1."""
        return self.late / self.requests if self.requests else 0.0


class Compared:
    """Late requests of ours and of a rival."""

    our_late: float
    rival_late: float

    @property
    def fewer(self) -> bool:
        """True when ours had fewer late requests."""
        return self.our_late < self.rival_late

    @property
    def even(self) -> bool:
        """True when both had as many: where nothing has to be scaled, the same requests are late."""
        return self.our_late == self.rival_late


@dataclass(frozen=True)
class Range(Compared):
    """Two frontiers over the replica-hours that both can take."""

    least: float
    most: float
    """Replica-hours."""
    our_late: float
    """Late requests, the mean over the range."""
    rival_late: float
    ahead: float
    """The share of the range in which ours has fewer, 0 to 1."""


@dataclass(frozen=True)
class PolicyVerdict(Compared):
    """One of ours against one rival on one trace, at equal replica-hours."""

    ours: PolicyKind
    rival: PolicyKind
    replica_hours: float
    """Our hours at our headroom, or the rival's fewest where these are more."""
    our_late: float
    """Late requests of ours at these, a mean over the seeds."""
    rival_late: float
    over: Range | None = None
    """None where the frontiers share no more than one point."""


@dataclass(frozen=True)
class TraceResult:
    """All policies on one trace."""

    trace: Trace
    points: tuple[Point, ...]
    verdicts: tuple[PolicyVerdict, ...]
    runs: Mapping[PolicyKind, RunResult]
    """One run each to look at, of the first seed: ours at the headroom, rivals at the nearest replica-hours."""

    def of(self, kind: PolicyKind) -> list[Point]:
        """A policy's points by rising replica-hours."""
        return sorted((point for point in self.points if point.kind is kind), key=lambda point: point.replica_hours)


def late_at(points: Iterable[Point], replica_hours: float) -> float | None:
    """Late requests of a frontier at some replica-hours, to its favour; None when it never takes so few."""
    front: list[Point] = []
    for point in sorted(points, key=lambda point: (point.replica_hours, point.late)):
        if not front or point.late < front[-1].late:
            front.append(point)
    if not front or replica_hours < front[0].replica_hours:
        return None
    for left, right in pairwise(front):
        if replica_hours <= right.replica_hours:
            share = (replica_hours - left.replica_hours) / (right.replica_hours - left.replica_hours)
            return left.late + share * (right.late - left.late)
    return front[-1].late


def over_range(ours: Sequence[Point], rival: Sequence[Point]) -> Range | None:
    """Two frontiers over their common replica-hours; None where these are no range."""
    least = max(min(point.replica_hours for point in points) for points in (ours, rival))
    most = min(max(point.replica_hours for point in points) for points in (ours, rival))
    if most <= least:
        return None
    pairs = [
        (late_at(ours, hours) or 0.0, late_at(rival, hours) or 0.0)
        for hours in (least + (most - least) * step / RANGE_STEPS for step in range(RANGE_STEPS + 1))
    ]
    count = len(pairs)
    return Range(
        least,
        most,
        sum(own for own, _ in pairs) / count,
        sum(other for _, other in pairs) / count,
        sum(own < other for own, other in pairs) / count,
    )


def together(results: Sequence[TraceResult]) -> tuple[Point, ...]:
    """The points of all traces added up, for each policy and setting."""
    found: dict[tuple[PolicyKind, float], list[Point]] = {}
    for result in results:
        for point in result.points:
            found.setdefault((point.kind, point.knob), []).append(point)
    return tuple(
        Point(
            kind=kind,
            knob=knob,
            requests=sum(point.requests for point in points),
            late=sum(point.late for point in points),
            lost=sum(point.lost for point in points),
            replica_hours=sum(point.replica_hours for point in points),
            flips=sum(point.flips for point in points),
            most_flips=max(point.most_flips for point in points),
            most_replicas=max(point.most_replicas for point in points),
        )
        for (kind, knob), points in found.items()
    )


def judge(ours: Point, points: Sequence[Point], rival: PolicyKind) -> PolicyVerdict | None:
    """One of our points against a rival's frontier; None where their frontiers share no replica-hours."""
    theirs = [point for point in points if point.kind is rival]
    hours = max(ours.replica_hours, min(point.replica_hours for point in theirs))
    mine = [point for point in points if point.kind is ours.kind]
    own = ours.late if hours == ours.replica_hours else late_at(mine, hours)
    other = late_at(theirs, hours)
    if own is None or other is None:
        return None
    return PolicyVerdict(ours.kind, rival, hours, own, other, over_range(mine, theirs))


_Job = tuple[Experiment, int, int, PolicyKind, float]


def compare(
    experiment: Experiment, *, workers: int = 1, on_progress: Callable[[int, int, str], None] = lambda *_: None
) -> Iterator[TraceResult]:
    """Results trace by trace; `on_progress(done, total, what)` after each run. Deterministic for any workers."""
    plan, total, done = experiment.plan, experiment.runs, 0
    # All of a pool's processes start with its first job.
    workers = min(workers, total)
    pool = None
    if workers > 1:
        # Ctrl-C ends the workers at once: by default they would go on with the runs that they were given.
        pool = ProcessPoolExecutor(workers, initializer=signal.signal, initargs=(signal.SIGINT, signal.SIG_DFL))
    try:
        for index, name in enumerate(experiment.traces):
            jobs: list[_Job] = [
                (experiment, index, seed, kind, knob) for seed in experiment.seeds for kind, knob in plan
            ]
            outcomes: dict[tuple[int, PolicyKind, float], RunResult] = {}
            # Not `map`, which cancels what is left when it is interrupted.
            futures = [pool.submit(_run, job) for job in jobs] if pool is not None else []
            results = (future.result() for future in futures) if futures else map(_run, jobs)
            for job, outcome in zip(jobs, results, strict=True):
                outcomes[job[2:]] = outcome
                done += 1
                on_progress(done, total, name if isinstance(name, str) else name.name)
            yield _result(experiment, index, plan, outcomes)
    except BaseException:
        # The end of the workers fails what is left. To cancel that, too, would race with the pool's own thread, which
        # then prints a traceback.
        for worker in multiprocessing.active_children() if pool is not None else ():
            worker.terminate()
        raise
    finally:
        if pool is not None:
            pool.shutdown()


def _run(job: _Job) -> RunResult:
    experiment, index, seed, kind, knob = job
    endpoint = Endpoint(experiment.service, experiment.model, experiment.limits, experiment.scrape_interval)
    name = experiment.traces[index]
    traffic = _built_in(name, seed, endpoint) if isinstance(name, str) else Traffic.of(name, endpoint, seed)
    return simulate(
        traffic,
        endpoint,
        make_policy(kind, endpoint, knob),
        experiment.fleet,
        scrape_interval=experiment.scrape_interval if POLICIES[kind].uses_prometheus else OWN_SCRAPE_SECONDS,
        own_interval=OWN_SCRAPE_SECONDS if POLICIES[kind].is_ours else None,
    )


@lru_cache(maxsize=1)
def _built_in(name: str, seed: int, endpoint: Endpoint) -> Traffic:
    return Traffic.of(built_in(name, endpoint.service.rate, seed), endpoint, seed)


def _result(
    experiment: Experiment,
    index: int,
    plan: Sequence[tuple[PolicyKind, float]],
    outcomes: Mapping[tuple[int, PolicyKind, float], RunResult],
) -> TraceResult:
    seeds = experiment.seeds
    points = tuple(_mean(kind, knob, [outcomes[seed, kind, knob] for seed in seeds]) for kind, knob in plan)
    ours = [point for point in points if POLICIES[point.kind].is_ours and point.knob == experiment.headroom]
    rivals = [kind for kind in experiment.policies if not POLICIES[kind].is_ours]
    verdicts = tuple(
        verdict for point in ours for rival in rivals if (verdict := judge(point, points, rival)) is not None
    )
    hours = ours[0].replica_hours if ours else 0.0
    runs = {}
    for kind in experiment.policies:
        own = [point for point in points if point.kind is kind]
        near = min(own, key=lambda point: (abs(point.replica_hours - hours), point.late))
        knob = experiment.headroom if POLICIES[kind].is_ours else near.knob
        runs[kind] = outcomes[seeds[0], kind, knob]
    return TraceResult(experiment.trace(index, seeds[0]), points, verdicts, runs)


def _mean(kind: PolicyKind, knob: float, outcomes: Sequence[RunResult]) -> Point:
    count = len(outcomes)
    return Point(
        kind=kind,
        knob=knob,
        requests=sum(outcome.requests for outcome in outcomes) / count,
        late=sum(outcome.late for outcome in outcomes) / count,
        lost=sum(outcome.lost for outcome in outcomes) / count,
        replica_hours=sum(outcome.replica_hours for outcome in outcomes) / count,
        flips=sum(outcome.flips for outcome in outcomes) / count,
        most_flips=max(outcome.flips for outcome in outcomes),
        most_replicas=max(max(outcome.replicas) for outcome in outcomes),
    )


def pooled(dispatch: Dispatch) -> bool:
    """Whether replicas are more than their sum under a dispatch."""
    return dispatch is not Dispatch.RANDOM
