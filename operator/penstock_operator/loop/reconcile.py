"""Makes the cluster what the plan says: read the caches, plan, apply what differs. Idempotent, and told by nothing but
the state: whoever calls it, and however often, gets the same.

The order of the writes is such that a process that is killed after any of them leaves a state from which the next
reconcile goes on: objects first, then what is said about them.
"""

from __future__ import annotations

import hashlib
import json
import logging
import random
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from typing import Any, Literal, NamedTuple

from penstock.errors import PenstockError
from penstock_operator.cluster.errors import ClusterError, Conflict, Forbidden, NotFound, Refused
from penstock_operator.cluster.kinds import (
    CONFIG_MAP,
    DEPLOYMENT,
    EVENT,
    KINDS,
    MODEL_ENDPOINT,
    OPTIMIZED_MODEL,
    Json,
    Kind,
)
from penstock_operator.cluster.port import ClusterPort
from penstock_operator.cluster.store import Difference, Entry, Key, Packed, key_of
from penstock_operator.loop.api_refusal import with_problem
from penstock_operator.metrics import COLLECTED, WRITES_SKIPPED
from penstock_operator.plan.actions import Event, Plan
from penstock_operator.plan.endpoint import Endpoint
from penstock_operator.plan.endpoint_plan import plan
from penstock_operator.plan.names import ENDPOINT, MANAGED_BY, MANAGER
from penstock_operator.plan.observed import Observed, Ref
from penstock_operator.plan.optimized_model import sweep, wanted_name
from penstock_operator.plan.ownership import left_behind
from penstock_operator.watch.cluster_cache import World
from penstock_operator.watch.indexes import texts_source

REPORTER = "penstock.dev/operator"
REFUSED_SECONDS = 60.0
"""When to try again what the API server does not take, or what somebody else's object is in the way of."""
NOTE_LIMIT = 1024
"""Characters of an Event's note that the API takes."""
EVENT_WINDOW_SECONDS = 600
"""The same words about the same object are one Event within this time: a reconcile that is repeated says nothing
twice."""

logger = logging.getLogger(__name__)


class Subject(NamedTuple):
    """What a reconcile is about."""

    kind: Literal["ModelEndpoint", "OptimizedModel"]
    key: Key

    def __str__(self) -> str:
        return f"{self.kind} {self.key}"


@dataclass(frozen=True, slots=True)
class _Applied:
    """An object as it was applied, and as it then was."""

    digest: str
    uid: str
    marker: int


@dataclass(frozen=True, slots=True)
class _Written:
    """Digests of a status as it was written, and as the API server then had it (it may add defaults)."""

    wanted: str
    became: str


class Reconciler:
    """Reconciles one subject at a time per key; the queue sees to that."""

    def __init__(self, port: ClusterPort, world: World, *, identity: str) -> None:
        self._port = port
        self._world = world
        self._identity = identity
        self._stores = world.stores
        self._applied: dict[tuple[Kind, Key], _Applied] = {}
        self._written: dict[tuple[Kind, Key], _Written] = {}
        for store in self._stores.values():
            store.listen(partial(self._on_change, store.kind))

    async def reconcile(self, subject: Subject) -> float | None:
        """Seconds until it is to be looked at again; None: the slow resync suffices. ClusterError: try again."""
        if subject.kind == "OptimizedModel":
            return await self._sweep(subject.key)
        return await self._endpoint(subject.key)

    async def _endpoint(self, key: Key) -> float | None:
        await self._read_texts(key)
        # What was somebody else's may be gone: it is looked at again below.
        self._world.foreign.pop(key, None)
        entry, observed, planned = self._planned(key)
        versions = self._versions(key.namespace, planned)
        if entry is None or observed is None:
            # Everything of it is owned by it: the API server's garbage collector takes it, whether we run or not.
            return None
        new = [value for value in planned.apply if self._is_new(key, value)]
        if new:
            if not await self._is_there(key, entry.uid):
                return None
            if await self._look_for_others(key, entry.uid, new):
                entry, observed, planned = self._planned(key)
                versions = self._versions(key.namespace, planned)
                if entry is None or observed is None:
                    return None
        models = self._models(key.namespace, observed)
        problem = await self._act(key, planned, models, versions)
        status = planned.status if problem is None else with_problem(planned.status, problem, observed.now)
        for event in planned.events:
            await self._post(event, observed.endpoint)
        if problem is not None:
            await self._post(Event("Warning", "ApplyFailed", str(problem)), observed.endpoint)
        await self._write_status(MODEL_ENDPOINT, key, entry, status)
        if problem is not None or observed.foreign:
            # What the API server refuses today (a quota, an admission policy) it may take later; names get free.
            return min(planned.requeue_seconds or REFUSED_SECONDS, REFUSED_SECONDS)
        return planned.requeue_seconds

    def _planned(self, key: Key) -> tuple[Entry[Packed] | None, Observed | None, Plan]:
        """The plan, and what it was made from: of one moment, since nothing is awaited here."""
        entry, observed = self._world.endpoints.get(key), self._world.observe(key)
        if entry is None or observed is None or "deletionTimestamp" in observed.endpoint["metadata"]:
            return None, None, Plan()
        name = _wanted_name(observed)
        if name and all(model.name != name for model in observed.optimized_models):
            observed = self._world.observe(key, model_names=[name]) or observed
        return entry, observed, plan(observed)

    def _is_new(self, key: Key, value: Json) -> bool:
        """Whether it has not been made yet, as far as the caches know; or is another endpoint's: the gateway of one may
        have the name of another."""
        entry = self._stores[KINDS[value["kind"]]].get(key_of(value))
        return entry is None or (_named_after_endpoint(value) and ("endpoint", *key) not in entry.index)

    def _models(self, namespace: str, observed: Observed) -> dict[Key, Entry[Packed]]:
        places = (Key(namespace, model.name) for model in observed.optimized_models)
        return {place: entry for place in places if (entry := self._world.models.get(place)) is not None}

    def _versions(self, namespace: str, planned: Plan) -> dict[Ref, int]:
        entries = ((ref, self._stores[KINDS[ref.kind]].get(Key(namespace, ref.name))) for ref in planned.guarded)
        return {ref: entry.version for ref, entry in entries if entry is not None}

    async def _act(
        self, key: Key, planned: Plan, models: dict[Key, Entry[Packed]], versions: dict[Ref, int]
    ) -> ClusterError | None:
        """Delete and apply; the first refusal, when there was one. The others are tried all the same.

        `models` are the OptimizedModels as they were when it was planned. Endpoints share them and are reconciled side
        by side: who planned for an older one than there is must not write it. `versions` are the same of what others
        write as well.
        """
        problem: ClusterError | None = None
        for ref in planned.delete:
            kind = KINDS[ref.kind]
            known = self._stores[kind].get(Key(key.namespace, ref.name))
            if known is not None:
                await self._port.delete(kind, ref.name, key.namespace, uid=known.uid)
        for value in planned.apply:
            place = key_of(value)
            try:
                if value["kind"] == OPTIMIZED_MODEL.name and place in models:
                    await self._apply(value, version=models[place].version)
                    models[place] = self._world.models.get(place) or models[place]
                else:
                    ref = Ref(value["kind"], place.name)
                    if ref in planned.taken_over:
                        await self._disown(place)
                    await self._apply(value, version=versions.get(ref))
            except (Refused, Forbidden, NotFound) as error:
                problem = problem or error
        for write in planned.optimized_status:
            place = Key(key.namespace, write.name)
            if place in models:
                await self._write_status(OPTIMIZED_MODEL, place, models[place], write.status)
        return problem

    async def _apply(self, value: Json, *, version: int | None = None) -> None:
        """Apply an object, unless that would change nothing; with a version, on condition that it still has it."""
        kind, place = KINDS[value["kind"]], key_of(value)
        digest = _digest(value)
        known = self._stores[kind].get(place)
        before = self._applied.get((kind, place))
        if known is not None and before == _Applied(digest, known.uid, known.marker):
            # Neither what is wanted nor what is asked of the object has changed since.
            WRITES_SKIPPED.inc()
            return
        if version is not None:
            value = {**value, "metadata": {**value["metadata"], "resourceVersion": str(version)}}
        result = await self._port.apply(value)
        # At once: the watch would tell some milliseconds later, and the next reconcile may be sooner.
        self._stores[kind].put(result)
        now = self._stores[kind].get(place)
        if now is not None:
            self._applied[kind, place] = _Applied(digest, now.uid, now.marker)

    async def _disown(self, place: Key) -> None:
        """Whoever has scaled the Deployment no longer owns the number that is about to be applied: an apply of the very
        number that stands would make two owners of it."""
        found = await self._port.get(DEPLOYMENT, place.name, place.namespace)
        others = left_behind((found or {}).get("metadata", {}).get("managedFields") or [])
        if found is not None and others:
            self._stores[DEPLOYMENT].put(await self._port.disown(DEPLOYMENT, found, others))

    async def _write_status(self, kind: Kind, place: Key, entry: Entry[Packed], status: Json) -> None:
        """Write a status, when it is another than what is there."""
        current = entry.facts.value.get("status") or {}
        if status == current:
            return
        wanted, written = _digest(status), self._written.get((kind, place))
        if written is not None and written == _Written(wanted, _digest(current)):
            return
        now = self._stores[kind].get(place)
        if now is None or now.uid != entry.uid:
            return
        result = await self._port.apply(
            {
                "apiVersion": kind.api_version,
                "kind": kind.name,
                # On condition that it is the one that was planned for: what was said of an older spec would be a lie.
                "metadata": {
                    "name": place.name,
                    "namespace": place.namespace,
                    "resourceVersion": str(entry.version),
                },
                "status": status,
            },
            subresource="status",
        )
        self._written[kind, place] = _Written(wanted, _digest(result.get("status") or {}))
        self._stores[kind].put(result)

    async def _sweep(self, key: Key) -> float | None:
        """What becomes of an OptimizedModel that nobody uses, or nobody did."""
        entry, facts = self._world.models.get(key), self._world.model(key)
        if entry is None or facts is None:
            return None
        outcome = sweep(facts, now=datetime.now(UTC), settings=self._world.settings)
        if outcome.status is not None:
            await self._write_status(OPTIMIZED_MODEL, key, entry, outcome.status.status)
        if outcome.delete and await self._port.delete(OPTIMIZED_MODEL, key.name, key.namespace, uid=entry.uid):
            COLLECTED.inc()
            logger.info("OptimizedModel %s is deleted: no endpoint uses it", key)
        return outcome.requeue_seconds

    async def _is_there(self, key: Key, uid: str) -> bool:
        """Nothing is made for an endpoint that is gone: a deletion may have been missed, and then the garbage collector
        would take away what we make, and we make it again, without end."""
        live = await self._port.get(MODEL_ENDPOINT, key.name, key.namespace)
        if live is None:
            self._world.endpoints.remove(key)
            return False
        self._world.endpoints.put(live)
        # Another one of that name: its event is under way.
        return bool(live["metadata"].get("uid") == uid)

    async def _look_for_others(self, key: Key, uid: str, new: list[Json]) -> bool:
        """Whether what is about to be made is there already and somebody else's: an apply would take it over.

        True when that, or anything of ours that the caches had not seen, changes the plan.
        """
        foreign: set[Ref] = set()
        changed = False
        for value in new:
            kind, place = KINDS[value["kind"]], key_of(value)
            if not _named_after_endpoint(value):
                # Named by a digest: nobody else comes to such a name.
                continue
            found = await self._port.get(kind, place.name, place.namespace)
            if found is None:
                continue
            metadata = found["metadata"]
            owners = {owner.get("uid") for owner in metadata.get("ownerReferences") or []}
            labels = metadata.get("labels") or {}
            if labels.get(MANAGED_BY) == MANAGER and labels.get(ENDPOINT) == key.name:
                changed |= self._stores[kind].put(found)
            elif uid not in owners:
                foreign.add(Ref(kind.name, place.name))
        if foreign:
            self._world.foreign[key] = frozenset(foreign)
        return bool(foreign) or changed

    async def _read_texts(self, key: Key) -> None:
        endpoint = self._world.endpoints.facts(key)
        source = texts_source(endpoint.value) if endpoint is not None else None
        place = Key(key.namespace, source[0]) if source is not None else None
        if place is None or place in self._world.texts:
            return
        while not self._world.put_texts(place, await self._port.get(CONFIG_MAP, place.name, place.namespace)):
            logger.debug("ConfigMap %s was changed while it was read: reading it again", place)

    async def _post(self, event: Event, endpoint: Json) -> None:
        metadata, now = endpoint["metadata"], datetime.now(UTC)
        words = f"{metadata['uid']} {event.type} {event.reason} {event.message}"
        window = int(now.timestamp()) // EVENT_WINDOW_SECONDS
        digest = hashlib.sha256(f"{words} {window}".encode()).hexdigest()[:16]
        try:
            await self._port.create(
                {
                    "apiVersion": EVENT.api_version,
                    "kind": EVENT.name,
                    "metadata": {"name": f"{metadata['name']}.{digest}", "namespace": metadata["namespace"]},
                    "eventTime": now.isoformat(timespec="microseconds").replace("+00:00", "Z"),
                    "reportingController": REPORTER,
                    "reportingInstance": self._identity[:128],
                    "action": "Reconcile",
                    "type": event.type,
                    "reason": event.reason,
                    "note": event.message[:NOTE_LIMIT],
                    "regarding": {
                        "apiVersion": MODEL_ENDPOINT.api_version,
                        "kind": MODEL_ENDPOINT.name,
                        "name": metadata["name"],
                        "namespace": metadata["namespace"],
                        "uid": metadata["uid"],
                    },
                }
            )
        except Conflict:
            return
        except (Refused, Forbidden) as error:
            # An Event is a courtesy; the status says it too. A namespace that is being deleted refuses new objects.
            logger.warning("%s", error)

    def _on_change(self, kind: Kind, change: Difference[Any]) -> None:
        if change.new is None:
            self._applied.pop((kind, change.key), None)
            self._written.pop((kind, change.key), None)


def _named_after_endpoint(value: Json) -> bool:
    return ENDPOINT in value["metadata"]["labels"]


def _digest(value: Json) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def _wanted_name(observed: Observed) -> str:
    """The OptimizedModel of the present spec, which another endpoint may have had made already."""
    try:
        spec = Endpoint.from_object(observed.endpoint).spec
    except PenstockError:
        # The plan says what is wrong with it.
        return ""
    return wanted_name(spec, observed.settings, observed.workload_texts)


def jittered(seconds: float) -> float:
    """A fifth more or less, so that what began at the same time does not come back at the same time."""
    return seconds * random.uniform(0.8, 1.2)  # noqa: S311
