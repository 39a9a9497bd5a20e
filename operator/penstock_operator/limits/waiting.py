"""Counts used slots and waiting requests (`penstock_operator.limits.concurrency`) from the caches, as they change."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Set as AbstractSet
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from itertools import islice
from typing import Any, NamedTuple

from penstock_operator.cluster.api import Json
from penstock_operator.cluster.store import Index, ObjectKey, PackedObject, Store, StoreChange
from penstock_operator.facts.installation import PlanSettings
from penstock_operator.facts.names import canary_name
from penstock_operator.facts.pods import JobFacts, PodFacts
from penstock_operator.facts.workloads import DeploymentFacts, ReplicaSetFacts, rollout_has_slot
from penstock_operator.limits.concurrency import (
    EPOCH,
    NOW,
    SHOWN,
    Ask,
    Line,
    SlotDecision,
    SlotKey,
    in_rounds,
    job_has_slot,
    waits_since,
)

CANARY_SECONDS = 3600.0
"""A canary no longer uses a slot after this time: one with few requests may take days, and one whose endpoint
is changed all the time has no end."""
LEADER_SECONDS = 60.0
"""A new leader gives no slot before it has planned all endpoints, but for this long at most."""


class _Waiting(NamedTuple):
    """A subject that waits."""

    ask: Ask
    endpoints: set[SlotKey]
    """The endpoints that requested it: several may share an OptimizedModel."""


class WaitingList:
    """The requests of endpoints, at most one for each. It lives in the memory of the leader, and each plan of an
    endpoint replaces the request of that endpoint.

    Each change and each `line` has the cost of some bisections, with thousands that wait in thousands of namespaces.
    """

    def __init__(self) -> None:
        self._asks: dict[SlotKey, SlotKey] = {}
        """Subjects by the requesting endpoint."""
        self._waiting: dict[SlotKey, _Waiting] = {}
        self._rows: dict[str, list[Ask]] = {}
        """Of each namespace, in order."""
        self._order: list[tuple[datetime, str]] = []
        """The namespaces of these in the order of rounds."""
        self._last_slots: dict[str, datetime] = {}
        self._allocated: dict[SlotKey, SlotKey] = {}
        self._refused: dict[SlotKey, datetime] = {}

    def put(self, endpoint: SlotKey, slot: SlotDecision | None) -> None:
        """Replace the endpoint's request by the request of its new plan; None: it has none.

        An allowed one has a slot at once and until `finish`: its Job or Deployment is not in the caches yet.
        """
        self.finish(endpoint)
        self._leave(endpoint)
        if slot is None or slot.ask is None:
            return
        subject = slot.ask.subject
        if slot.allowed:
            self._allocated[endpoint] = subject
            return
        # Of several endpoints with the same subject, the last plan has the newest facts.
        endpoints = self._waiting[subject].endpoints if subject in self._waiting else set()
        endpoints.add(endpoint)
        self._asks[endpoint] = subject
        self._replace(subject, _Waiting(slot.ask, endpoints))

    def finish(self, endpoint: SlotKey) -> None:
        """The plan of this endpoint was carried out, or was not."""
        self._allocated.pop(endpoint, None)

    def answered(self, subject: SlotKey, refused: datetime | None = None) -> None:
        """The API server accepted the Job or Deployment, or refused it at this time, so that it has no slot."""
        if refused is None:
            self._refused.pop(subject, None)
        else:
            self._refused[subject] = refused
            self._allocated = {endpoint: one for endpoint, one in self._allocated.items() if one != subject}
            self.got_slot(subject.namespace, refused)

    def got_slot(self, namespace: str, when: datetime) -> None:
        """A subject of the namespace got a slot at this time."""
        if when > self._last_slots.get(namespace, EPOCH):
            self._unorder(namespace)
            self._last_slots[namespace] = when
            self._reorder(namespace)

    def forget(self, namespace: str) -> None:
        """The namespace has no endpoint left."""
        self._unorder(namespace)
        self._last_slots.pop(namespace, None)
        self._reorder(namespace)

    def __len__(self) -> int:
        """The number of subjects that wait, or have a slot since their last plan."""
        return len(self._waiting) + len(self._allocated)

    def line(self, limit: int, active: Iterable[SlotKey], *, ready: bool = True) -> Line:
        """The line now. `active`: the subjects that have a slot by the cluster's objects."""
        used = frozenset((*active, *self._allocated.values()))
        # Twice as many as matter: a request may leave the first position of its namespace for a later one, or take it.
        most = 2 * (SHOWN + 3 + max(limit - len(used), 0))
        # Their Jobs and Deployments are not in the caches yet.
        last_slots = {**self._last_slots, **{one.namespace: NOW for one in self._allocated.values()}}
        return Line(limit, used, tuple(self._first(most, used)), last_slots, dict(self._refused), ready=ready)

    def next(self, count: int, *, refused: bool) -> Iterator[SlotKey]:
        """The endpoints of the first `count` that wait, with or without those that were refused, which also try again
        by themselves."""
        asks = self._first(count if refused else count + len(self._refused))
        chosen = (ask for ask in asks if refused or ask.subject not in self._refused)
        for ask in islice(chosen, count):
            yield from self._waiting[ask.subject].endpoints

    def _first(self, count: int, used: AbstractSet[SlotKey] = frozenset()) -> Iterator[Ask]:
        """The first `count` waiting requests in their order, without the subjects in `used`."""
        if not self._order:
            return iter(())
        namespaces = islice(self._order, count + len(self._waiting.keys() & used))
        rows = (self._rows[namespace] for _, namespace in namespaces)
        return islice((ask for ask in in_rounds(rows) if ask.subject not in used), count)

    def _leave(self, endpoint: SlotKey) -> None:
        subject = self._asks.pop(endpoint, None)
        if subject is None:
            return
        endpoints = self._waiting[subject].endpoints
        endpoints.discard(endpoint)
        if not endpoints:
            self._replace(subject, None)

    def _replace(self, subject: SlotKey, now: _Waiting | None) -> None:
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
        """Take the namespace out of the order before its requests or its last slot change."""
        if namespace in self._rows:
            del self._order[bisect_left(self._order, waits_since(self._rows[namespace][0], self._last_slots))]

    def _reorder(self, namespace: str) -> None:
        """Put it back after the change."""
        if self._rows.get(namespace):
            insort(self._order, waits_since(self._rows[namespace][0], self._last_slots))
        else:
            self._rows.pop(namespace, None)


OPEN: Index = ("open",)
"""Index key of Jobs that have not ended."""


def open_job(value: Json) -> Iterator[Index]:
    """The index key of a Job that has not ended."""
    conditions = (value.get("status") or {}).get("conditions") or []
    ends = {one.get("type") for one in conditions if one.get("status") == "True"}
    if not ends & {"Complete", "Failed"}:
        yield OPEN


class Slots:
    """The lines for optimisations and rollouts of one process of the operator."""

    def __init__(
        self,
        settings: PlanSettings,
        endpoints: Store[PackedObject],
        models: Store[PackedObject],
        jobs: Store[JobFacts],
        pods: Store[PodFacts],
        *,
        deployments: Store[DeploymentFacts],
        replica_sets: Store[ReplicaSetFacts],
    ) -> None:
        self._settings = settings
        self._endpoints, self._models, self._jobs, self._pods = endpoints, models, jobs, pods
        self._deployments, self._replica_sets = deployments, replica_sets
        self.optimizations, self.rollouts = WaitingList(), WaitingList()
        self._unplanned: set[ObjectKey] = set()
        self._leading_since = EPOCH
        self._rolling: set[ObjectKey] = set()
        """Endpoints with a rollout or a canary by the labels of their Deployments, which anyone may set."""
        self._listeners: list[Callable[[set[ObjectKey]], None]] = []
        models.listen(self._on_model)
        jobs.listen(self._on_job)
        deployments.listen(self._on_deployment)
        replica_sets.listen(self._on_rollout)

    def begin(self, endpoints: set[ObjectKey], now: datetime) -> None:
        """This process leads now: the lines are complete when it has planned these endpoints."""
        self._unplanned, self._leading_since = endpoints, now

    def listen(self, listener: Callable[[set[ObjectKey]], None]) -> None:
        """Call this with the endpoints near the head of the lines when a slot has become free."""
        self._listeners.append(listener)

    def plans(self, key: ObjectKey) -> None:
        """The endpoint is about to be planned: its own plan does not wait for itself, and requests again the slot that
        an earlier one of the same reconcile was given."""
        self._unplanned.discard(key)
        for line in (self.optimizations, self.rollouts):
            line.finish(SlotKey(*key))

    def planned(self, key: ObjectKey, optimization: SlotDecision | None, rollout: SlotDecision | None) -> None:
        """Take the endpoint's requests from its new plan; None where the plan begins nothing."""
        self.optimizations.put(SlotKey(*key), optimization)
        self.rollouts.put(SlotKey(*key), rollout)

    def forget(self, key: ObjectKey) -> None:
        """The endpoint is gone. No plan of it follows, which would take it out of the lines."""
        self.plans(key)
        self.planned(key, None, None)
        self.rollouts.answered(SlotKey(*key))
        if not self._endpoints.has(("namespace", key.namespace)):
            for line in (self.optimizations, self.rollouts):
                line.forget(key.namespace)
        self._slot_is_free()

    def carried_out(self, key: ObjectKey, *, failed: bool = False) -> None:
        """The plan was carried out, and the caches have what it created; `failed`: it ended with an error, and the
        next plan requests again."""
        for line in (self.optimizations, self.rollouts):
            if failed:
                line.put(SlotKey(*key), None)
            line.finish(SlotKey(*key))

    def answered(self, line: WaitingList, decision: SlotDecision | None, refused: datetime | None) -> None:
        """Note whether the API server accepted the Job or Deployment that this decision of `line` allowed."""
        if decision is None or decision.ask is None:
            return
        line.answered(decision.ask.subject, refused)
        if refused is not None:
            # Only one that was not refused either: with nothing else in the line, it would be tried without a pause.
            self._wake(0, refused=False)

    def lines(self, now: datetime) -> tuple[Line, Line]:
        """The lines for optimisations and for rollouts."""
        ready = not self._unplanned or now - self._leading_since > timedelta(seconds=LEADER_SECONDS)
        # Counting takes a while where thousands of jobs are allowed: it is left out where there is room in any case.
        room = self._jobs.count(OPEN) + len(self.optimizations) < self._settings.max_concurrent_optimizations
        optimizing = () if room else tuple(self._optimizing(now))
        jobs, rollouts = self._settings.max_concurrent_optimizations, self._settings.max_concurrent_rollouts
        return (
            self.optimizations.line(jobs, (SlotKey(*key) for key in optimizing), ready=ready),
            self.rollouts.line(
                rollouts, (SlotKey(*key) for key in self._rolling if self._rolls(key, now)), ready=ready
            ),
        )

    def _optimizing(self, now: datetime) -> Iterator[ObjectKey]:
        """OptimizedModels with a Job that uses a slot. Jobs of another owner, which may have our labels, use none."""
        for place, entry in self._jobs.of(OPEN):
            job = entry.facts
            key = ObjectKey(place.namespace, job.owner.name)
            model = self._models.get(key)
            if model is None or model.uid != job.owner.uid:
                continue
            pods = (pod.facts for _, pod in self._pods.of(("model", *key)) if pod.facts.owner.uid == entry.uid)
            newest = max(pods, key=lambda pod: pod.created or EPOCH, default=None)
            if job_has_slot(replace(job, pod=newest), now):
                yield key

    def _on_job(self, change: StoreChange[JobFacts]) -> None:
        job = None if change.new is None else change.new.facts
        # Jobs that collect artefacts have no number.
        if job is not None and job.attempt and job.created is not None:
            self.optimizations.got_slot(change.key.namespace, job.created)
        if change.old is not None and OPEN in change.old.index and (change.new is None or OPEN not in change.new.index):
            self._slot_is_free()

    def _on_deployment(self, change: StoreChange[DeploymentFacts]) -> None:
        began = None if change.new is None else change.new.facts.rollout_began
        if began is not None:
            # Anyone may write the annotation.
            self.rollouts.got_slot(change.key.namespace, min(began, datetime.now(UTC)))
        self._on_rollout(change)

    def _on_rollout(self, change: StoreChange[Any]) -> None:
        for what, *rest in change.indexes:
            if what != "endpoint":
                continue
            key = ObjectKey(*rest)
            # A new leader knows the Deployments before the endpoints.
            if self._rolls(key, known=self._endpoints.get(key) is not None):
                self._rolling.add(key)
            elif key in self._rolling:
                self._rolling.discard(key)
                self._slot_is_free()

    def _rolls(self, key: ObjectKey, now: datetime | None = None, *, known: bool = True) -> bool:
        """Whether a rollout or a canary of the endpoint uses a slot; without `now`, whether it ever may. Only
        its own Deployments count: another endpoint may have the name of a canary. `known`: False if the endpoints are
        not listed yet."""
        present = self._deployments.facts(key)
        canary = self._deployments.facts(ObjectKey(key.namespace, canary_name(key.name)))
        if known:
            endpoint = self._endpoints.get(key)
            uid = "" if endpoint is None else endpoint.uid
            present, canary = (one if one is not None and one.owner.uid == uid else None for one in (present, canary))
        sets = (entry.facts for _, entry in self._replica_sets.of(("endpoint", *key)))
        began = None if present is None else present.rollout_began
        lasts = began is not None and now is not None and now - began > timedelta(seconds=CANARY_SECONDS)
        return (canary is not None and not lasts) or (present is not None and rollout_has_slot(present, sets))

    def _on_model(self, change: StoreChange[PackedObject]) -> None:
        if change.new is None:
            self.optimizations.answered(SlotKey(*change.key))

    def _slot_is_free(self) -> None:
        self._wake(SHOWN, refused=True)

    def _wake(self, more: int, *, refused: bool) -> None:
        """Have the first endpoints planned: as many as may get a slot, and `more`."""
        first = {
            *self.optimizations.next(self._settings.max_concurrent_optimizations + more, refused=refused),
            *self.rollouts.next(self._settings.max_concurrent_rollouts + more, refused=refused),
        }
        for listener in self._listeners:
            listener({ObjectKey(*endpoint) for endpoint in first})
