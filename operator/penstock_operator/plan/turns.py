"""Turns: how many optimisations run, and how many endpoints replace their pods, at the same time in the whole cluster.

Who waits is served in the order of the time since which it waits, then of namespace and name. The places are counted
from the cluster's objects, so that a new leader of the operator counts the same:

- An optimisation has a place while its Job has not ended. A Job whose pod does not run `START_SECONDS` after its
  creation (no node, no image) has none until it runs.
- A rollout has a place while it has a canary, for `CANARY_SECONDS` at most, and while pods of another template are to
  be replaced. It has none once Kubernetes reports `ProgressDeadlineExceeded`: no new pod became ready for
  `PROGRESS_DEADLINE_SECONDS`.

A Job or Deployment that the API server refuses goes to the end of the line. So none of these blocks the others, at the
price of one more at the same time if it begins to run after all.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
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


class TurnKey(NamedTuple):
    """What waits: an OptimizedModel for its job, or a ModelEndpoint for its rollout."""

    namespace: str
    name: str


class Ask(NamedTuple):
    """A place in the line. Smaller ones are first."""

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


@dataclass(frozen=True)
class Line:
    """Who has a place and who waits, at one moment."""

    limit: int
    active: frozenset[TurnKey] = frozenset()
    """Those that have a place."""
    waiting: tuple[Ask, ...] = ()
    """In order. It may contain a subject twice, and those that ask now."""
    refused: Mapping[TurnKey, datetime] = field(default_factory=dict)
    """When the API server last refused their Job or Deployment."""
    ready: bool = True
    """Whether all endpoints have been planned: otherwise the line may not be complete."""

    def turn(self, subject: TurnKey, since: datetime, *, anew: bool = False) -> TurnDecision:
        """Whether it may start now. `since`: when it began to wait. `anew`: it gives back the place that it has."""
        if subject in self.active and not anew:
            return TurnDecision(allowed=True, limit=self.limit)
        ask = Ask(max(since, self.refused.get(subject, since)), subject)
        free = self.limit - len(self.active - {subject})
        first: set[TurnKey] = set()
        for one in self.waiting:
            if one >= ask or len(first) > SHOWN + max(free, 0):
                break
            if one.subject != subject and one.subject not in self.active:
                first.add(one.subject)
        allowed = self.ready and len(first) < free
        return TurnDecision(
            allowed=allowed, ahead=min(len(first), SHOWN + 1), limit=self.limit, ask=ask, ready=self.ready
        )


class WaitingList:
    """The asks of endpoints, each with at most one. It lives in the memory of the leader, and each plan of an endpoint
    replaces that endpoint's ask."""

    def __init__(self) -> None:
        self._order: list[Ask] = []
        self._asks: dict[TurnKey, Ask] = {}
        self._granted: dict[TurnKey, TurnKey] = {}
        self._refused: dict[TurnKey, datetime] = {}

    def put(self, endpoint: TurnKey, turn: TurnDecision | None) -> None:
        """Replace the endpoint's ask by that of its new plan; None: it does not ask.

        An allowed one has a place at once and until `finish`: its Job or Deployment is not in the caches yet.
        """
        self.finish(endpoint)
        known = self._asks.pop(endpoint, None)
        if known is not None:
            del self._order[bisect_left(self._order, known)]
        if turn is None or turn.ask is None:
            return
        if turn.allowed:
            self._granted[endpoint] = turn.ask.subject
        else:
            self._asks[endpoint] = turn.ask
            insort(self._order, turn.ask)

    def finish(self, endpoint: TurnKey) -> None:
        """The plan of this endpoint was carried out, or was not."""
        self._granted.pop(endpoint, None)

    def answered(self, subject: TurnKey, refused: datetime | None = None) -> None:
        """The API server accepted the Job or Deployment, or refused it at this time."""
        if refused is None:
            self._refused.pop(subject, None)
        else:
            self._refused[subject] = refused

    def __len__(self) -> int:
        """Those that wait, or have a place since their last plan."""
        return len(self._asks) + len(self._granted)

    def line(self, limit: int, active: Iterable[TurnKey], *, ready: bool = True) -> Line:
        """The line now. `active`: those that have a place by the cluster's objects."""
        places = frozenset((*active, *self._granted.values()))
        return Line(limit, places, tuple(self._order), dict(self._refused), ready=ready)

    def next(self, count: int) -> Iterator[TurnKey]:
        """The endpoints of the first `count` asks, without those that were refused, which try again by themselves."""
        first = {ask for ask in self._order[:count] if ask.subject not in self._refused}
        return (endpoint for endpoint, ask in self._asks.items() if ask in first)


def job_has_place(job: JobFacts, now: datetime) -> bool:
    """Whether a Job keeps others waiting."""
    if job.complete or job.failed:
        return False
    runs = job.pod is not None and job.pod.phase == "Running"
    return runs or job.created is None or now - job.created < timedelta(seconds=START_SECONDS)
