"""Turns: how many optimisations run, and how many endpoints replace their pods, at the same time in the whole cluster.

Namespaces take turns: the next turn is that of the one that waits longest. A namespace waits since the last turn of one
of its subjects, or since the first one that waits if that is later. In a namespace, the first one is the one that waits
longest; ties are decided by name. So the first one of a namespace waits for one subject of each other namespace at
most, the second one for two, and so on.

The places, and the last turns of namespaces, are counted from the cluster's objects, so that a new leader of the
operator counts the same:

- An optimisation has a place while its Job has not ended. A Job whose pod does not run `START_SECONDS` after its
  creation (no node, no image) has none until it runs.
- A rollout has a place while it has a canary, for `CANARY_SECONDS` at most, and while pods of another template are to
  be replaced. It has none once Kubernetes reports `ProgressDeadlineExceeded`: no new pod became ready for
  `PROGRESS_DEADLINE_SECONDS`.

None of these blocks the others, at the price of one more at the same time if it begins to run after all. A Job or
Deployment that the API server refuses was a turn of its namespace, and goes to the end of that namespace's line.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from itertools import islice, zip_longest
from typing import NamedTuple

from penstock_operator.plan.workloads import JobFacts

START_SECONDS = 300.0
"""A Job whose pod does not run after this time no longer keeps others waiting."""
CANARY_SECONDS = 3600.0
"""A canary no longer keeps others waiting after this time: one with few requests may take days, and one whose endpoint
is changed all the time has no end."""
LEADER_SECONDS = 60.0
"""A new leader gives no turn before it has planned all endpoints, but for this long at most."""
SHOWN = 10
"""Longest line in front of an endpoint that its status counts exactly."""
AGAIN_SECONDS = 30.0
"""Interval between plans of an endpoint near the head of the line, in case the event that frees a place is missed."""
_EPOCH = datetime.fromtimestamp(0, UTC)
_NOW = datetime.max.replace(tzinfo=UTC)
"""Later than any time that another namespace waits since."""


class TurnKey(NamedTuple):
    """What waits: an OptimizedModel for its job, or a ModelEndpoint for its rollout."""

    namespace: str
    name: str


class Ask(NamedTuple):
    """What waits, and since when. Of one namespace, smaller ones are first."""

    since: datetime
    subject: TurnKey


@dataclass(frozen=True)
class TurnDecision:
    """The answer to an ask."""

    allowed: bool
    ahead: int = 0
    """Others that are first, at most `SHOWN` + 1; 0 also if all places are taken."""
    limit: int = 1
    ask: Ask | None = None
    """What was asked for."""
    ready: bool = True
    """False: a new leader does not know the whole line yet."""

    @property
    def requeue_seconds(self) -> float | None:
        """When to ask again without an event; None: far from the head of the line, the resync is enough."""
        if not self.ready:
            return 2.0
        return AGAIN_SECONDS if self.ahead <= SHOWN else None

    def waits_for(self, what: str, setting: str) -> str:
        """Why it waits, in one sentence. Endpoints of other namespaces are not named. `what`: in the singular."""
        works = f"one {what}" if self.limit == 1 else f"{self.limit} {what}s"
        rule = f"at most {works} may run at a time in this cluster ({setting})"
        if not self.ready:
            return f"It waits until the operator, which has just started, has looked at all endpoints: {rule}."
        if not self.ahead:
            return f"It is the next one in the line: {rule}."
        line = f"more than {SHOWN}" if self.ahead > SHOWN else str(self.ahead)
        return f"It waits for its turn, with {line} before it: {rule}."


def in_rounds(rows: Iterable[Iterable[Ask]]) -> Iterator[Ask]:
    """The first one of each row, then the second ones, and so on."""
    return (ask for asks in zip_longest(*rows) for ask in asks if ask is not None)


def _waits_since(first: Ask, turns: Mapping[str, datetime]) -> tuple[datetime, str]:
    """The order of a namespace in each round, by its first ask and the last turns of namespaces."""
    namespace = first.subject.namespace
    return max(first.since, turns.get(namespace, first.since)), namespace


@dataclass(frozen=True)
class Line:
    """Who has a place and who waits, at one moment."""

    limit: int
    active: frozenset[TurnKey] = frozenset()
    """Those that have a place."""
    waiting: tuple[Ask, ...] = ()
    """Those that wait, in the order of turns, as far as `turn` needs them. They may include those that ask now."""
    turns: Mapping[str, datetime] = field(default_factory=dict)
    """When the last turn of a namespace was."""
    refused: Mapping[TurnKey, datetime] = field(default_factory=dict)
    """When the API server last refused their Job or Deployment."""
    ready: bool = True
    """Whether all endpoints have been planned: otherwise the line may not be complete."""

    def turn(self, subject: TurnKey, since: datetime, *, anew: bool = False) -> TurnDecision:
        """Whether it may start now. `since`: when it began to wait. `anew`: it gives back the place that it has."""
        if subject in self.active and not anew:
            return TurnDecision(allowed=True, limit=self.limit)
        ask = Ask(max(since, self.refused.get(subject, since)), subject)
        rows = {subject.namespace: [ask]}
        for one in self.waiting:
            if one.subject != subject and one.subject not in self.active:
                insort(rows.setdefault(one.subject.namespace, []), one)
        order = sorted(rows.values(), key=lambda row: _waits_since(row[0], self.turns))
        ahead = next(place for place, one in enumerate(in_rounds(order)) if one is ask)
        free = self.limit - len(self.active - {subject})
        allowed = self.ready and ahead < free
        return TurnDecision(allowed=allowed, ahead=min(ahead, SHOWN + 1), limit=self.limit, ask=ask, ready=self.ready)


class _Waiting(NamedTuple):
    """A subject that waits."""

    ask: Ask
    endpoints: set[TurnKey]
    """Those that ask for it: several may share an OptimizedModel."""


class WaitingList:
    """The asks of endpoints, each with at most one. It lives in the memory of the leader, and each plan of an endpoint
    replaces that endpoint's ask.

    Each change and each `line` has the cost of some bisections, with thousands that wait in thousands of namespaces.
    """

    def __init__(self) -> None:
        self._asks: dict[TurnKey, TurnKey] = {}
        """Subjects by the endpoint that asks."""
        self._waiting: dict[TurnKey, _Waiting] = {}
        self._rows: dict[str, list[Ask]] = {}
        """Of each namespace, in order."""
        self._order: list[tuple[datetime, str]] = []
        """The namespaces of these in the order of rounds."""
        self._turns: dict[str, datetime] = {}
        self._granted: dict[TurnKey, TurnKey] = {}
        self._refused: dict[TurnKey, datetime] = {}

    def put(self, endpoint: TurnKey, turn: TurnDecision | None) -> None:
        """Replace the endpoint's ask by that of its new plan; None: it does not ask.

        An allowed one has a place at once and until `finish`: its Job or Deployment is not in the caches yet.
        """
        self.finish(endpoint)
        self._leave(endpoint)
        if turn is None or turn.ask is None:
            return
        subject = turn.ask.subject
        if turn.allowed:
            self._granted[endpoint] = subject
            return
        # Of several endpoints with the same subject, the last plan has the newest facts.
        endpoints = self._waiting[subject].endpoints if subject in self._waiting else set()
        endpoints.add(endpoint)
        self._asks[endpoint] = subject
        self._replace(subject, _Waiting(turn.ask, endpoints))

    def finish(self, endpoint: TurnKey) -> None:
        """The plan of this endpoint was carried out, or was not."""
        self._granted.pop(endpoint, None)

    def answered(self, subject: TurnKey, refused: datetime | None = None) -> None:
        """The API server accepted the Job or Deployment, or refused it at this time, so that it has no place."""
        if refused is None:
            self._refused.pop(subject, None)
        else:
            self._refused[subject] = refused
            self._granted = {endpoint: one for endpoint, one in self._granted.items() if one != subject}
            self.had_turn(subject.namespace, refused)

    def had_turn(self, namespace: str, when: datetime) -> None:
        """A subject of the namespace had its turn at this time."""
        if when > self._turns.get(namespace, _EPOCH):
            self._unorder(namespace)
            self._turns[namespace] = when
            self._reorder(namespace)

    def forget(self, namespace: str) -> None:
        """The namespace has no endpoint left."""
        self._unorder(namespace)
        self._turns.pop(namespace, None)
        self._reorder(namespace)

    def __len__(self) -> int:
        """Those that wait, or have a place since their last plan."""
        return len(self._waiting) + len(self._granted)

    def line(self, limit: int, active: Iterable[TurnKey], *, ready: bool = True) -> Line:
        """The line now. `active`: those that have a place by the cluster's objects."""
        places = frozenset((*active, *self._granted.values()))
        # Twice as many as matter: one that asks may leave the first place of its namespace for a later one, or take it.
        most = 2 * (SHOWN + 3 + max(limit - len(places), 0))
        # Their Jobs and Deployments are not in the caches yet.
        turns = {**self._turns, **{one.namespace: _NOW for one in self._granted.values()}}
        return Line(limit, places, tuple(self._first(most, places)), turns, dict(self._refused), ready=ready)

    def next(self, count: int, *, refused: bool) -> Iterator[TurnKey]:
        """The endpoints of the first `count` that wait, with or without those that were refused, which also try again
        by themselves."""
        asks = self._first(count if refused else count + len(self._refused))
        chosen = (ask for ask in asks if refused or ask.subject not in self._refused)
        for ask in islice(chosen, count):
            yield from self._waiting[ask.subject].endpoints

    def _first(self, count: int, places: AbstractSet[TurnKey] = frozenset()) -> Iterator[Ask]:
        """The first `count` of those that wait without one of these places, in the order of turns."""
        namespaces = islice(self._order, count + len(self._waiting.keys() & places))
        rows = (self._rows[namespace] for _, namespace in namespaces)
        return islice((ask for ask in in_rounds(rows) if ask.subject not in places), count)

    def _leave(self, endpoint: TurnKey) -> None:
        subject = self._asks.pop(endpoint, None)
        if subject is None:
            return
        endpoints = self._waiting[subject].endpoints
        endpoints.discard(endpoint)
        if not endpoints:
            self._replace(subject, None)

    def _replace(self, subject: TurnKey, now: _Waiting | None) -> None:
        known = self._waiting.pop(subject, None)
        self._unorder(subject.namespace)
        row = self._rows.setdefault(subject.namespace, [])
        if known is not None:
            del row[bisect_left(row, known.ask)]
        if now is not None:
            self._waiting[subject] = now
            insort(row, now.ask)
        self._reorder(subject.namespace)

    def _unorder(self, namespace: str) -> None:
        """Take the namespace out of the order before its asks or its last turn change."""
        if namespace in self._rows:
            del self._order[bisect_left(self._order, _waits_since(self._rows[namespace][0], self._turns))]

    def _reorder(self, namespace: str) -> None:
        """Put it back after the change."""
        if self._rows.get(namespace):
            insort(self._order, _waits_since(self._rows[namespace][0], self._turns))
        else:
            self._rows.pop(namespace, None)


def job_has_place(job: JobFacts, now: datetime) -> bool:
    """Whether a Job keeps others waiting."""
    if job.complete or job.failed:
        return False
    runs = job.pod is not None and job.pod.phase == "Running"
    return runs or job.created is None or now - job.created < timedelta(seconds=START_SECONDS)
