"""The limits on how many optimisations run, and how many endpoints replace their pods, at a time in the whole cluster.

Each limit has slots. Namespaces get them in the order of their waiting time, one slot each in every round. A namespace
waits since it last got a slot, or since its first request if this is later. In a namespace, the oldest request comes
first; ties are decided by name.

The used slots, and when namespaces last got one, are counted from the objects of the cluster, so that a new leader of
the operator counts the same:

- An optimisation has a slot while its Job has not ended. A Job whose pod does not run `START_SECONDS` after its
  creation (no node, no image) has none until it runs.
- A rollout has a slot while it has a canary, for `CANARY_SECONDS` at most, and while pods of another template are to
  be replaced. It has none once Kubernetes reports `ProgressDeadlineExceeded`: no new pod became ready for
  `PROGRESS_DEADLINE_SECONDS`.

A stuck job or rollout therefore keeps no slot, at the price of one more at a time if it begins to run after all. A Job
or Deployment that the API server refuses has used a slot of its namespace, and goes to the end of the namespace's line.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from itertools import zip_longest
from typing import NamedTuple

from penstock_operator.facts.pods import JobFacts

SHOWN = 10
"""Longest line in front of an endpoint that its status counts exactly."""
AGAIN_SECONDS = 30.0
"""Interval between plans of an endpoint near the head of the line, in case the event that frees a slot is missed."""
OPTIMIZATIONS = ("optimisation", "maxConcurrentOptimizations")
ROLLOUTS = ("rollout", "maxConcurrentRollouts")
"""A word for one, and the value of the chart that limits them."""
EPOCH = datetime.fromtimestamp(0, UTC)
NOW = datetime.max.replace(tzinfo=UTC)
"""Later than any time that another namespace waits since."""


class SlotKey(NamedTuple):
    """What waits: an OptimizedModel for its job, or a ModelEndpoint for its rollout."""

    namespace: str
    name: str


class Ask(NamedTuple):
    """What waits, and since when. Of one namespace, smaller ones are first."""

    since: datetime
    subject: SlotKey


@dataclass(frozen=True)
class SlotDecision:
    """Whether a slot was given to a request."""

    allowed: bool
    ahead: int = 0
    """Requests before this one, at most `SHOWN` + 1; 0 also if all slots are used."""
    limit: int = 1
    ask: Ask | None = None
    """The request."""
    ready: bool = True
    """False: a new leader does not know the whole line yet."""

    @property
    def requeue_seconds(self) -> float | None:
        """When to request again without an event; None: far from the head of the line, the resync is enough."""
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
        return f"It waits for a slot, with {line} before it: {rule}."


def in_rounds(rows: Iterable[Iterable[Ask]]) -> Iterator[Ask]:
    """The first one of each row, then the second ones, and so on."""
    return (ask for asks in zip_longest(*rows) for ask in asks if ask is not None)


def waits_since(first: Ask, last_slots: Mapping[str, datetime]) -> tuple[datetime, str]:
    """The order of a namespace in each round, by its first request and when namespaces last got a slot."""
    namespace = first.subject.namespace
    return max(first.since, last_slots.get(namespace, first.since)), namespace


@dataclass(frozen=True)
class Line:
    """The used slots and the waiting requests, at one moment."""

    limit: int
    active: frozenset[SlotKey] = frozenset()
    """The subjects that have a slot."""
    waiting: tuple[Ask, ...] = ()
    """The waiting requests in their order, as far as `slot` needs them. They may include the present request."""
    last_slots: Mapping[str, datetime] = field(default_factory=dict)
    """When a namespace last got a slot."""
    refused: Mapping[SlotKey, datetime] = field(default_factory=dict)
    """When the API server last refused their Job or Deployment."""
    ready: bool = True
    """Whether all endpoints have been planned: otherwise the line may not be complete."""

    def slot(self, subject: SlotKey, since: datetime, *, anew: bool = False) -> SlotDecision:
        """Whether it may start now. `since`: when it began to wait. `anew`: it gives back the slot that it has."""
        if subject in self.active and not anew:
            return SlotDecision(allowed=True, limit=self.limit)
        ask = Ask(max(since, self.refused.get(subject, since)), subject)
        rows = {subject.namespace: [ask]}
        for one in self.waiting:
            if one.subject != subject and one.subject not in self.active:
                insort(rows.setdefault(one.subject.namespace, []), one)
        order = sorted(rows.values(), key=lambda row: waits_since(row[0], self.last_slots))
        ahead = next(position for position, one in enumerate(in_rounds(order)) if one is ask)
        free = self.limit - len(self.active - {subject})
        allowed = self.ready and ahead < free
        return SlotDecision(allowed=allowed, ahead=min(ahead, SHOWN + 1), limit=self.limit, ask=ask, ready=self.ready)


START_SECONDS = 300.0
"""A Job whose pod does not run after this time no longer uses a slot."""


def job_has_slot(job: JobFacts, now: datetime) -> bool:
    """Whether a Job uses a slot."""
    if job.complete or job.failed:
        return False
    runs = job.pod is not None and job.pod.phase == "Running"
    return runs or job.created is None or now - job.created < timedelta(seconds=START_SECONDS)
