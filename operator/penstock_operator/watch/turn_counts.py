"""Counts who has a place and who waits (`penstock_operator.plan.turns`) from the caches, as they change."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

from penstock_operator.cluster.api import Json
from penstock_operator.cluster.store import Index, ObjectKey, PackedObject, Store, StoreChange
from penstock_operator.plan.endpoint_plan import ReconcilePlan
from penstock_operator.plan.installation import PlanSettings
from penstock_operator.plan.names import canary_name
from penstock_operator.plan.observed import DeploymentFacts, ReplicaSetFacts, rollout_has_place
from penstock_operator.plan.turns import (
    CANARY_SECONDS,
    LEADER_SECONDS,
    SHOWN,
    Line,
    TurnKey,
    WaitingList,
    job_has_place,
)
from penstock_operator.plan.workloads import JobFacts, PodFacts

OPEN: Index = ("open",)
"""Index key of Jobs that have not ended."""
_EPOCH = datetime.fromtimestamp(0, UTC)


def open_job(value: Json) -> Iterator[Index]:
    """The index key of a Job that has not ended."""
    conditions = (value.get("status") or {}).get("conditions") or []
    ends = {one.get("type") for one in conditions if one.get("status") == "True"}
    if not ends & {"Complete", "Failed"}:
        yield OPEN


class Turns:
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
        self._leading_since = _EPOCH
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
        """Call this with the endpoints near the head of the lines when a place has become free."""
        self._listeners.append(listener)

    def plans(self, key: ObjectKey) -> None:
        """The endpoint is about to be planned: its own plan does not wait for itself, and asks again for the place that
        an earlier one of the same reconcile was given."""
        self._unplanned.discard(key)
        for line in (self.optimizations, self.rollouts):
            line.finish(TurnKey(*key))

    def planned(self, key: ObjectKey, made: ReconcilePlan) -> None:
        """Take the endpoint's places in the lines from its new plan; an empty plan for an endpoint that is gone."""
        self.optimizations.put(TurnKey(*key), made.optimization)
        self.rollouts.put(TurnKey(*key), made.rollout)

    def forget(self, key: ObjectKey) -> None:
        """The endpoint is gone. No plan of it follows, which would take it out of the lines."""
        self.plans(key)
        self.planned(key, ReconcilePlan())
        self.rollouts.answered(TurnKey(*key))
        if not self._endpoints.has(("namespace", key.namespace)):
            for line in (self.optimizations, self.rollouts):
                line.forget(key.namespace)
        self._place_is_free()

    def carried_out(self, key: ObjectKey, *, failed: bool = False) -> None:
        """The plan was carried out, and the caches have what it created; `failed`: it ended with an error, and the
        next plan asks again."""
        for line in (self.optimizations, self.rollouts):
            if failed:
                line.put(TurnKey(*key), None)
            line.finish(TurnKey(*key))

    def answered(self, planned: ReconcilePlan, kind: str, refused: datetime | None) -> None:
        """Note whether the API server accepted the object of this kind that the plan had its turn for."""
        if kind == "Job" and planned.optimization is not None and planned.optimization.ask is not None:
            self.optimizations.answered(planned.optimization.ask.subject, refused)
        elif kind == "Deployment" and planned.rollout is not None and planned.rollout.ask is not None:
            self.rollouts.answered(planned.rollout.ask.subject, refused)
        else:
            return
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
            self.optimizations.line(jobs, (TurnKey(*key) for key in optimizing), ready=ready),
            self.rollouts.line(
                rollouts, (TurnKey(*key) for key in self._rolling if self._rolls(key, now)), ready=ready
            ),
        )

    def _optimizing(self, now: datetime) -> Iterator[ObjectKey]:
        """OptimizedModels with a Job that keeps others waiting. Jobs of others, which may have our labels, do not."""
        for place, entry in self._jobs.of(OPEN):
            job = entry.facts
            key = ObjectKey(place.namespace, job.owner.name)
            model = self._models.get(key)
            if model is None or model.uid != job.owner.uid:
                continue
            pods = (pod.facts for _, pod in self._pods.of(("model", *key)) if pod.facts.owner.uid == entry.uid)
            newest = max(pods, key=lambda pod: pod.created or _EPOCH, default=None)
            if job_has_place(replace(job, pod=newest), now):
                yield key

    def _on_job(self, change: StoreChange[JobFacts]) -> None:
        job = None if change.new is None else change.new.facts
        # Jobs that collect artefacts have no number.
        if job is not None and job.attempt and job.created is not None:
            self.optimizations.had_turn(change.key.namespace, job.created)
        if change.old is not None and OPEN in change.old.index and (change.new is None or OPEN not in change.new.index):
            self._place_is_free()

    def _on_deployment(self, change: StoreChange[DeploymentFacts]) -> None:
        began = None if change.new is None else change.new.facts.rollout_began
        if began is not None:
            # Anyone may write the annotation.
            self.rollouts.had_turn(change.key.namespace, min(began, datetime.now(UTC)))
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
                self._place_is_free()

    def _rolls(self, key: ObjectKey, now: datetime | None = None, *, known: bool = True) -> bool:
        """Whether a rollout or a canary of the endpoint keeps others waiting; without `now`, whether it ever may. Only
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
        return (canary is not None and not lasts) or (present is not None and rollout_has_place(present, sets))

    def _on_model(self, change: StoreChange[PackedObject]) -> None:
        if change.new is None:
            self.optimizations.answered(TurnKey(*change.key))

    def _place_is_free(self) -> None:
        self._wake(SHOWN, refused=True)

    def _wake(self, more: int, *, refused: bool) -> None:
        """Have the first endpoints planned: as many as may have a place, and `more`."""
        first = {
            *self.optimizations.next(self._settings.max_concurrent_optimizations + more, refused=refused),
            *self.rollouts.next(self._settings.max_concurrent_rollouts + more, refused=refused),
        }
        for listener in self._listeners:
            listener({ObjectKey(*endpoint) for endpoint in first})
