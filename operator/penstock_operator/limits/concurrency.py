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

from bisect import insort
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import zip_longest
from typing import NamedTuple

SHOWN = 10
"""Longest line in front of an endpoint that its status counts exactly."""
AGAIN_SECONDS = 30.0
"""Interval between plans of an endpoint near the head of the line, in case the event that frees a place is missed."""
EPOCH = datetime.fromtimestamp(0, UTC)
NOW = datetime.max.replace(tzinfo=UTC)
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


def waits_since(first: Ask, turns: Mapping[str, datetime]) -> tuple[datetime, str]:
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
        order = sorted(rows.values(), key=lambda row: waits_since(row[0], self.turns))
        ahead = next(place for place, one in enumerate(in_rounds(order)) if one is ask)
        free = self.limit - len(self.active - {subject})
        allowed = self.ready and ahead < free
        return TurnDecision(allowed=allowed, ahead=min(ahead, SHOWN + 1), limit=self.limit, ask=ask, ready=self.ready)
