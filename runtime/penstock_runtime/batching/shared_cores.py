"""Several models on one set of cores: whose batch runs next, how long it may be, and which requests are accepted.

Each model has its queue and its engine. Here are the cores that they share. The first part is pure: functions and
values without a clock. `SharedCores` applies it, in the thread of the event loop; `StepTurns` is for a model that
generates text in a thread of its own.

Order. Work of a lower level runs first: the level is the priority class of the model, and bulk work has a level of its
own after all others. Within a level the work that is due first runs first, of whichever model. Work is due at the
deadline of the request or, if that is earlier, when the latency objective of the model has passed since its arrival.
When the next work needs more cores than are free, no other starts: smaller batches could otherwise keep it out.

Batches. A batch that runs cannot be interrupted. So it takes no longer than `HOLD_SHARE` of the shortest objective
among the other models of its level and those before it, and no longer than the slack of their work that waits. It has
at least one row.

Acceptance. A request is refused at once if it cannot end by the time it is due behind the work that runs before it, or
if work of its level that was accepted would become late. Before that, waiting requests of its level give way if their
model has more work waiting than the new request's: so a model that gets too many requests loses its own.
"""

from __future__ import annotations

import asyncio
import math
import threading
from bisect import bisect, insort
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from time import perf_counter
from typing import NamedTuple, Protocol

from penstock.manifest import Manifest, served_latency
from penstock.recipe import Plan
from penstock_runtime.admission import MOST_SECONDS_TO_RETRY, BulkFloor, Work
from penstock_runtime.batching.queue import QueuedRow
from penstock_runtime.errors import Overloaded

BULK_LEVEL = 1 << 20
"""Of bulk work: after every priority class."""
HOLD_SHARE = 0.25
"""A batch holds its cores for at most this share of the shortest objective of other models."""
PROMISED_SHARE = 0.8
"""Of an objective: a request is accepted if its computation is predicted to end within it. The rest is for what is not
predicted: reading, tokenising, writing, and other work on the cores (docs/decisions/shared-cores.md)."""
LEAST_HOLD_SECONDS = 0.002
"""Shorter batches cost more than they help."""
MOST_HOLD_SECONDS = 1.0
"""Of any batch."""
MOST_GIVING_WAY = 16
"""Requests that give way to one."""
STEADY_SECONDS = 0.5
"""A model that generates text is expected to go on for this long after a step."""
MOST_LOAD = 0.9
_SMOOTHING = 0.1
"""Weight of the newest measurement."""
_WIDEST_FACTOR = 8.0

Order = tuple[int, float]
"""Level, and when it is due: less runs first."""


@dataclass(eq=False, slots=True)
class CoreClaim:
    """A request that waits for cores."""

    member: str
    level: int
    due: float
    """Seconds, on the clock of arrivals; infinite: never."""
    seconds: float
    """Time of all its work that has not started, on one core."""
    least: float = 0.0
    """Seconds that it takes at least once it runs: its longest row."""
    work: Work | None = None
    serial: int = 0

    @property
    def order(self) -> Order:
        """See `Order`."""
        return self.level, self.due


class Acceptance(NamedTuple):
    """Whether a request is accepted."""

    accepted: bool
    ends: float
    """When it ends, as far as is known."""
    gives_way: Sequence[CoreClaim] = ()
    """Requests that are refused for it."""


def predicted_end(ahead: float, claim: CoreClaim, *, now: float, cores: float) -> float:
    """When a request ends with `ahead` seconds of one core before it."""
    return now + max((ahead + claim.seconds) / cores, ahead / cores + claim.least)


def judge(claims: Sequence[CoreClaim], new: CoreClaim, *, now: float, cores: float, busy: float) -> Acceptance:
    """Whether `new` is accepted next to `claims`, which are in their order. `busy`: seconds of one core until all work
    that runs has ended."""
    gone: set[int] = set()
    first: Acceptance | None = None
    while True:
        kept = [claim for claim in claims if id(claim) not in gone]
        ends, late = _first_late(kept, new, now=now, cores=cores, busy=busy)
        if late is None:
            return Acceptance(accepted=True, ends=ends, gives_way=[claim for claim in claims if id(claim) in gone])
        first = first or Acceptance(accepted=False, ends=ends)
        leaving = _gives_way(kept, new, late)
        if leaving is None or len(gone) == MOST_GIVING_WAY:
            return first
        gone.add(id(leaving))


def _first_late(
    claims: Sequence[CoreClaim], new: CoreClaim, *, now: float, cores: float, busy: float
) -> tuple[float, CoreClaim | None]:
    """When `new` ends, and the first of its level that is late with it and was not without it."""
    at = bisect(claims, new.order, key=_order)
    ahead = busy + sum(claim.seconds for claim in claims[:at])
    ends = predicted_end(ahead, new, now=now, cores=cores)
    if ends > new.due:
        return ends, new
    for claim in claims[at:]:
        if claim.level != new.level:
            break
        before = predicted_end(ahead, claim, now=now, cores=cores)
        after = predicted_end(ahead + new.seconds, claim, now=now, cores=cores)
        if before <= claim.due < after:
            return ends, claim
        ahead += claim.seconds
    return ends, None


def _gives_way(claims: Sequence[CoreClaim], new: CoreClaim, late: CoreClaim) -> CoreClaim | None:
    """The last request before the late one, of the model that has the most work waiting in this level and more than
    the model of the new request would have; None: there is none."""
    waiting: dict[str, float] = {}
    for claim in claims:
        if claim.level == new.level:
            waiting[claim.member] = waiting.get(claim.member, 0.0) + claim.seconds
    own = waiting.pop(new.member, 0.0) + new.seconds
    for member in sorted(waiting, key=waiting.__getitem__, reverse=True):
        if waiting[member] <= own:
            return None
        for claim in reversed(claims):
            is_before = claim.order <= late.order
            if claim.member == member and claim.level == new.level and is_before and _may_leave(claim):
                return claim
    return None


def _may_leave(claim: CoreClaim) -> bool:
    return claim.work is None or claim.work.is_waiting()


def _order(claim: CoreClaim) -> Order:
    return claim.order


class NextWork(NamedTuple):
    """The next work of a queue."""

    order: Order
    seconds: float
    """On one core."""
    cores: int
    """That it needs."""


class Terms(NamedTuple):
    """What is declared of a model."""

    level: int
    objective: float
    """Seconds; infinite: none."""


def next_queue(heads: Sequence[NextWork | None], floor: BulkFloor) -> int | None:
    """The index of the queue that is next; None if none has work."""
    waiting = [(head.order, index) for index, head in enumerate(heads) if head is not None]
    if not waiting:
        return None
    bulk = min((one for one in waiting if one[0][0] >= BULK_LEVEL), default=None)
    if bulk is not None and (head := heads[bulk[1]]) is not None and floor.is_due(head.seconds):
        return bulk[1]
    return min(waiting)[1]


def longest_hold(level: int, others: Iterable[Terms], waiting: Iterable[NextWork], now: float) -> float:
    """Seconds for which a batch of this level may hold its cores. `others`: of the other models; `waiting`: their
    work."""
    longest = MOST_HOLD_SECONDS
    for terms in others:
        if terms.level <= level:
            longest = min(longest, HOLD_SHARE * terms.objective)
    for head in waiting:
        if head.order[0] <= level:
            longest = min(longest, head.order[1] - now - head.seconds)
    return max(LEAST_HOLD_SECONDS, longest)


@dataclass(slots=True)
class Cost:
    """The time of rows on one core: of the measured curve of the artefact, corrected by what was measured since;
    without a curve, of the tokens alone."""

    points: Sequence[tuple[int, float]] = ()
    """Tokens of a row and its seconds on one core, rising."""
    factor: float = 1.0

    def seconds(self, tokens: int, tokens_per_second: float) -> float:
        """Of a row. `tokens_per_second`: of one core, as measured."""
        if not self.points:
            return tokens / tokens_per_second
        at = bisect(self.points, tokens, key=_tokens)
        if at == 0:
            return self.factor * self.points[0][1]
        (low, before), (high, after) = self.points[at - 1], self.points[min(at, len(self.points) - 1)]
        if high == low:  # beyond the last point
            return self.factor * before * tokens / low
        return self.factor * (before + (after - before) * (tokens - low) / (high - low))

    def observe(self, expected: float, seconds: float) -> None:
        """Work that was expected to take so long has taken `seconds` on one core."""
        if self.points and expected > 0:
            found = self.factor * seconds / expected
            self.factor += _SMOOTHING * (min(_WIDEST_FACTOR, max(1 / _WIDEST_FACTOR, found)) - self.factor)


def _tokens(point: tuple[int, float]) -> int:
    return point[0]


class SharedQueue(Protocol):
    """The queue of one model."""

    def head(self) -> NextWork | None:
        """Its next work; None if nothing waits."""
        ...

    def run_next(self, *, seconds: float, is_alone: bool) -> tuple[int, float]:
        """Start its next batch, of no more than about `seconds` if that leaves it a row: the cores that it takes (0:
        nothing has started), and for how long it is expected to. `is_alone`: nothing else runs or waits."""
        ...

    def load(self, now: float) -> float:
        """The share of the cores that it will go on to use for work that has no claim."""
        ...


class SharedCores:
    """The cores. Used from the thread of one event loop."""

    def __init__(self, cores: int, clock: Callable[[], float] = perf_counter) -> None:
        self.cores = cores
        self.clock = clock
        self.members: dict[str, CoreShare] = {}
        self._free = cores
        self._claims: list[CoreClaim] = []
        self._serial = count()
        self._running: dict[int, tuple[int, float]] = {}
        """Cores, and when they are expected to be free, by number of the run."""
        self._runs = count()
        self._floor = BulkFloor()
        self._filling = False

    def share(self, name: str, *, priority: int = 0, objective_seconds: float = math.inf) -> CoreShare:
        """The share of a model. `priority`: models of a higher one go first."""
        share = self.members[name] = CoreShare(self, name, Terms(-priority, objective_seconds))
        return share

    @property
    def busy(self) -> float:
        """Seconds of one core until all work that runs has ended, as expected."""
        now = self.clock()
        return sum(cores * max(0.0, ends - now) for cores, ends in self._running.values())

    def admit(self, claim: CoreClaim) -> None:
        """Add a request, after others have given way if they must. Overloaded. It is to be released at its end."""
        now = self.clock()
        load = sum(queue.load(now) for share in self.members.values() for queue in share.queues)
        left = self.cores * (1 - min(MOST_LOAD, load))
        verdict = judge(self._claims, claim, now=now, cores=left, busy=self.busy)
        if not verdict.accepted:
            raise cannot_end(verdict.ends - now, claim.due - now)
        for leaving in verdict.gives_way:
            self.release(leaving)
            if leaving.work is not None:
                leaving.work.refuse(cannot_end(verdict.ends - now, leaving.due - now))
        claim.serial = next(self._serial)
        insort(self._claims, claim, key=_order)

    def release(self, claim: CoreClaim) -> None:
        """A request has started all its work, or has ended. Further calls do nothing."""
        with suppress(ValueError):
            self._claims.remove(claim)

    def fill(self) -> None:
        """Give the free cores to the work that is next."""
        if self._filling:
            return
        self._filling = True
        try:
            while self._free and self._start_next():
                pass
        finally:
            self._filling = False

    def _start_next(self) -> bool:
        queues = [(share, queue) for share in self.members.values() for queue in share.queues]
        heads = [queue.head() for _, queue in queues]
        index = next_queue(heads, self._floor)
        if index is None:
            return False
        (share, queue), head = queues[index], heads[index]
        if head is None or head.cores > self._free:
            return False  # it is next, and waits for more cores
        level = head.order[0]
        others = [other for other in self.members.values() if other is not share]
        waiting = [one for (other, _), one in zip(queues, heads, strict=True) if one is not None and other is not share]
        hold = longest_hold(level, (other.terms for other in others), waiting, self.clock())
        is_alone = self._free == self.cores and not waiting
        cores, seconds = queue.run_next(seconds=hold, is_alone=is_alone)
        if level < BULK_LEVEL:
            self._floor.served(cores * seconds, bulk_waits=any(one.order[0] >= BULK_LEVEL for one in waiting))
        else:
            self._floor.took(cores * seconds)
        return True

    def started(self, cores: int, seconds: float) -> int:
        """Work has started, and is expected to take so long: its number for `ended`."""
        self._free -= cores
        number = next(self._runs)
        self._running[number] = cores, self.clock() + seconds
        return number

    def ended(self, number: int) -> None:
        """The cores of a run are free."""
        self._free += self._running.pop(number)[0]


class CoreShare:
    """The share that one model has of the cores."""

    def __init__(self, cores: SharedCores, name: str, terms: Terms) -> None:
        self.cores = cores
        self.name = name
        self.terms = terms
        self.cost = Cost()
        self.queues: list[SharedQueue] = []
        """One, or two while a model takes over from another."""

    def measured(self, plan: Plan, manifest: Manifest | None) -> None:
        """Take the costs from the curve that was measured with the artefact, if there is one."""
        points = () if manifest is None else served_latency(plan, manifest.candidates)
        cores = 1 if manifest is None else manifest.cores
        self.cost = Cost([(point.tokens, cores * point.p50_milliseconds / 1000) for point in points])

    def level(self, *, is_bulk: bool) -> int:
        """The level of a request."""
        return BULK_LEVEL if is_bulk else self.terms.level

    def head(self, entry: QueuedRow, seconds: float, cores: int) -> NextWork:
        """Of the row that is next in a queue: its seconds on one core, and the cores that it needs."""
        due = entry.deadline if entry.is_bulk else min(entry.deadline, entry.rank + self.terms.objective)
        return NextWork((self.level(is_bulk=entry.is_bulk), due), seconds, cores)

    def claim(self, seconds: float, longest: float, *, arrived: float, deadline: float, is_bulk: bool) -> CoreClaim:
        """The claim of a request for `seconds` of one core, of which its longest row takes `longest`. Overloaded."""
        due = deadline if is_bulk else min(deadline, arrived + max(PROMISED_SHARE * self.terms.objective, 2 * seconds))
        claim = CoreClaim(self.name, self.level(is_bulk=is_bulk), due, seconds, longest)
        self.cores.admit(claim)
        return claim

    def turns(self, loop: asyncio.AbstractEventLoop, gap_seconds: float) -> StepTurns:
        """Turns for the thread of a model that generates text, which is to have a step every `gap_seconds`."""
        turns = StepTurns(self, loop, gap_seconds)
        self.queues.append(turns)
        return turns

    @property
    def longest_step(self) -> float:
        """Seconds for which a step of generated text may hold the cores."""
        others = (other.terms for name, other in self.cores.members.items() if name != self.name)
        return longest_hold(self.terms.level, others, (), 0.0)


class StepTurns:
    """Turns on all cores for a thread that computes steps of generated text. `begin` and `end` are for that thread."""

    def __init__(self, share: CoreShare, loop: asyncio.AbstractEventLoop, gap_seconds: float) -> None:
        self._share = share
        self._gap = gap_seconds
        self._ended = -math.inf
        self._loop = loop
        self._granted = threading.Event()
        self._wanted: float | None = None
        """When the step that waits was asked for."""
        self._seconds = 0.0
        """Of the last step."""
        self._run: int | None = None

    def close(self) -> None:
        """In the thread of the event loop. A step that waits goes on."""
        self._share.queues.remove(self)
        self._granted.set()

    def head(self) -> NextWork | None:
        """See `SharedQueue`."""
        if self._wanted is None:
            return None
        cores, terms = self._share.cores.cores, self._share.terms
        return NextWork((terms.level, self._wanted + self._gap), self._seconds * cores, cores)

    def load(self, now: float) -> float:
        """See `SharedQueue`."""
        is_running = now - self._ended < self._gap + STEADY_SECONDS
        return self._seconds / (self._seconds + self._gap) if is_running else 0.0

    def run_next(self, *, seconds: float, is_alone: bool) -> tuple[int, float]:
        """See `SharedQueue`."""
        _ = seconds, is_alone
        cores = self._share.cores
        self._wanted = None
        self._run = cores.started(cores.cores, self._seconds)
        self._granted.set()
        return cores.cores, self._seconds

    def begin(self) -> None:
        """Wait for the cores."""
        self._granted.clear()
        if self._call(self._want):
            self._granted.wait()

    def end(self, seconds: float) -> None:
        """The step has taken so long."""
        self._seconds = seconds
        self._ended = self._share.cores.clock()
        self._call(self._give_back)

    def _call(self, function: Callable[[], None]) -> bool:
        try:
            self._loop.call_soon_threadsafe(function)
        except RuntimeError:  # the loop is closed
            return False
        return True

    def _want(self) -> None:
        if self not in self._share.queues:
            self._granted.set()
            return
        self._wanted = self._share.cores.clock()
        self._share.cores.fill()

    def _give_back(self) -> None:
        if self._run is not None:
            self._share.cores.ended(self._run)
            self._run = None
        self._share.cores.fill()


def cannot_end(seconds: float, due: float) -> Overloaded:
    """The error of a request that would end after `seconds`, and is due after `due`."""
    after = max(1, min(MOST_SECONDS_TO_RETRY, math.ceil(seconds - max(0.0, due))))
    return Overloaded(
        f"the request would end after {seconds * 1000:.0f} ms, and is due after {max(0.0, due) * 1000:.0f} ms: the "
        "cores are busy with other requests",
        retry_after_seconds=after,
    )
