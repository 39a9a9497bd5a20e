"""Reconciles one object: plans from the caches and applies the differences. Idempotent and level-triggered: the result
depends on the present state only.

The order of the writes lets the next reconcile continue after the process was killed at any point: objects first, then
the status.
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

from penstock.logs import log_event
from penstock_operator.cluster import api
from penstock_operator.cluster.api import KINDS, ClusterPort, Json, ResourceKind
from penstock_operator.cluster.errors import ClusterError, Conflict, Forbidden, NotFound, NotLeading, Refused
from penstock_operator.cluster.store import ObjectKey, PackedObject, StoreChange, StoreEntry, key_of
from penstock_operator.control.cache import ClusterCache
from penstock_operator.control.index_keys import texts_source
from penstock_operator.control.unused_models import reconcile_model
from penstock_operator.endpoint.objects.rollout import with_template_of
from penstock_operator.endpoint.plan import plan
from penstock_operator.endpoint.refused import with_apply_failure
from penstock_operator.endpoint.snapshot import EndpointSnapshot, ReconcilePlan
from penstock_operator.facts.findings import Event
from penstock_operator.facts.names import ENDPOINT, MANAGED_BY, MANAGER, Ref
from penstock_operator.facts.reasons import Reason
from penstock_operator.facts.workloads import scale_entries
from penstock_operator.metrics import WRITES_SKIPPED

REPORTER = "penstock.dev/operator"
REFUSED_SECONDS = 60.0
"""Retry interval after the API server refused an object, or while another object has a name that the operator needs."""
NOTE_LIMIT = 1024
"""Characters of an Event's note that the API accepts."""
EVENT_WINDOW_SECONDS = 600
"""The same Event about the same object is posted once within this time, also by a repeated reconcile."""

logger = logging.getLogger(__name__)


class ReconcileRequest(NamedTuple):
    """The object to reconcile."""

    kind: Literal["ModelEndpoint", "OptimizedModel"]
    key: ObjectKey

    def __str__(self) -> str:
        return f"{self.kind} {self.key}"


@dataclass(frozen=True, slots=True)
class _Applied:
    """An object as it was applied, and the identity, generation, labels and owners that it then had."""

    digest: str
    uid: str
    marker: int
    membership: int


@dataclass(frozen=True, slots=True)
class _Written:
    """Digests of a status as it was written and as the API server stored it (it may add defaults)."""

    wanted: str
    stored: str


class Reconciler:
    """Reconciles requests. The queue ensures that an object is reconciled by one worker at a time."""

    def __init__(self, port: ClusterPort, cache: ClusterCache, *, identity: str) -> None:
        self._port = port
        self._cache = cache
        self._identity = identity
        self._stores = cache.stores
        self._applied: dict[tuple[ResourceKind, ObjectKey], _Applied] = {}
        self._written: dict[tuple[ResourceKind, ObjectKey], _Written] = {}
        for store in self._stores.values():
            store.listen(partial(self._on_change, store.kind))

    async def reconcile(self, request: ReconcileRequest) -> float | None:
        """Seconds until the next reconcile; None: the resync is enough. ClusterError: retry."""
        if request.kind == "OptimizedModel":
            write = partial(self._write_status, api.OPTIMIZED_MODEL, request.key)
            return await reconcile_model(self._port, self._cache, request.key, write)
        try:
            again = await self._reconcile_endpoint(request.key)
        except BaseException:
            # No other endpoint must wait for one that cannot be reconciled.
            self._cache.slots.carried_out(request.key, failed=True)
            raise
        self._cache.slots.carried_out(request.key)
        return again

    async def _reconcile_endpoint(self, key: ObjectKey) -> float | None:
        await self._read_texts(key)
        # A conflicting object may have been deleted: it is looked up again below.
        self._cache.conflicting.pop(key, None)
        entry, observed, planned = self._planned(key)
        versions = self._versions(key.namespace, planned)
        if entry is None or observed is None:
            # The endpoint owns all its objects: the API server's garbage collector deletes them.
            return None
        new = [value for value in planned.apply if self._is_new(key, value)]
        if new:
            if not await self._still_exists(key, entry.uid):
                return None
            if await self._find_conflicts(key, entry.uid, new):
                entry, observed, planned = self._planned(key)
                versions = self._versions(key.namespace, planned)
                if entry is None or observed is None:
                    return None
        models = self._models(key.namespace, observed)
        problem = await self._act(key, planned, models, versions)
        status = planned.status
        if problem is not None:
            forbidden = isinstance(problem, Forbidden)
            status = with_apply_failure(status, problem.message, observed.now, forbidden=forbidden)
        for event in planned.events:
            await self._post_event(event, observed.endpoint)
        if problem is not None:
            await self._post_event(Event("Warning", Reason.APPLY_FAILED, str(problem)), observed.endpoint)
        await self._write_status(api.MODEL_ENDPOINT, key, entry, status)
        if problem is not None or observed.conflicting:
            # The API server may accept later an object that it refuses today (a quota, an admission policy); names
            # become free.
            return min(planned.requeue_seconds or REFUSED_SECONDS, REFUSED_SECONDS)
        return planned.requeue_seconds

    def _planned(
        self, key: ObjectKey
    ) -> tuple[StoreEntry[PackedObject] | None, EndpointSnapshot | None, ReconcilePlan]:
        """The plan and its input, all of one moment: nothing is awaited here."""
        self._cache.slots.plans(key)
        entry, observed = self._cache.endpoints.get(key), self._cache.observe(key)
        if entry is None or observed is None or "deletionTimestamp" in observed.endpoint["metadata"]:
            self._cache.slots.planned(key, None, None)
            return None, None, ReconcilePlan()
        planned = plan(observed)
        if self._cache.settings.quotas:
            self._cache.quotas.put(key, entry.uid, planned.allocation)
        self._cache.slots.planned(key, planned.optimization, planned.rollout)
        return entry, observed, planned

    def _is_new(self, key: ObjectKey, value: Json) -> bool:
        """Whether the caches have no such object; or one of another endpoint: one endpoint's gateway may have the
        name of another endpoint."""
        entry = self._stores[KINDS[value["kind"]]].get(key_of(value))
        return entry is None or (_named_after_endpoint(value) and ("endpoint", *key) not in entry.index)

    def _models(self, namespace: str, observed: EndpointSnapshot) -> dict[ObjectKey, StoreEntry[PackedObject]]:
        places = (ObjectKey(namespace, model.name) for model in observed.optimized_models)
        return {place: entry for place in places if (entry := self._cache.models.get(place)) is not None}

    def _versions(self, namespace: str, planned: ReconcilePlan) -> dict[Ref, int]:
        entries = ((ref, self._stores[KINDS[ref.kind]].get(ObjectKey(namespace, ref.name))) for ref in planned.guarded)
        return {ref: entry.version for ref, entry in entries if entry is not None}

    async def _act(
        self,
        key: ObjectKey,
        planned: ReconcilePlan,
        models: dict[ObjectKey, StoreEntry[PackedObject]],
        versions: dict[Ref, int],
    ) -> ClusterError | None:
        """Delete and apply. Returns the first refusal of the API server; the remaining objects are deleted and
        applied nevertheless, except for a job after an apply that was refused.

        `models` are the OptimizedModels that the plan was made from. Endpoints share them and are reconciled
        concurrently: a plan from an older version must not overwrite a newer one. `versions` are the versions of
        objects that other clients write too.
        """
        problem: ClusterError | None = None
        kept: ClusterError | None = None
        for ref in planned.delete:
            kind = KINDS[ref.kind]
            known = self._stores[kind].get(ObjectKey(key.namespace, ref.name))
            if known is None:
                continue
            try:
                await self._port.delete(kind, ref.name, key.namespace, uid=known.uid)
            except (Refused, Forbidden) as error:
                # Such as an admission policy. The endpoint must still scale, and its status has the message.
                kept = kept or error
        refused: dict[str, datetime | None] = {}
        for value in planned.apply:
            place = key_of(value)
            if value["kind"] == api.JOB.name and problem is not None:
                # It needs what comes before it: its input, and the NetworkPolicy without which its network is open.
                continue
            try:
                if value["kind"] == api.OPTIMIZED_MODEL.name and place in models:
                    await self._apply(value, version=models[place].version)
                    await self._give_up(value)
                    models[place] = self._cache.models.get(place) or models[place]
                else:
                    ref = Ref(value["kind"], place.name)
                    if ref in planned.taken_over:
                        await self._take_over_replicas(place)
                    goes_back = planned.template_of and ref == Ref(api.DEPLOYMENT.name, key.name)
                    chosen = await self._with_template_of(value, planned.template_of) if goes_back else value
                    await self._apply(chosen, version=versions.get(ref))
                # Of several Deployments, such as the gateway's, the first refusal counts.
                refused.setdefault(value["kind"], None)
            except (Refused, Forbidden, NotFound) as error:
                problem = problem or error
                refused[value["kind"]] = datetime.now(UTC)
        slots = self._cache.slots
        for name, line, decision in (
            (api.JOB.name, slots.optimizations, planned.optimization),
            (api.DEPLOYMENT.name, slots.rollouts, planned.rollout),
        ):
            if name in refused:
                slots.answered(line, decision, refused[name])
        deployment = self._stores[api.DEPLOYMENT].get(key)
        if planned.scaled is not None and deployment is not None:
            try:
                number, uid = planned.scaled, deployment.uid
                self._stores[api.DEPLOYMENT].put(
                    await self._port.scale(api.DEPLOYMENT, key.name, key.namespace, number, uid=uid)
                )
            except (Refused, Forbidden) as error:
                problem = problem or error
        for write in planned.optimized_status:
            place = ObjectKey(key.namespace, write.name)
            if place in models:
                await self._write_status(api.OPTIMIZED_MODEL, place, models[place], write.status)
        return problem or kept

    async def _apply(self, value: Json, *, version: int | None = None) -> None:
        """Apply an object unless nothing would change; with a version, only if the object still has that version."""
        kind, place = KINDS[value["kind"]], key_of(value)
        digest = _digest(value)
        known = self._stores[kind].get(place)
        before = self._applied.get((kind, place))
        if known is not None and before == _Applied(digest, known.uid, known.marker, known.membership):
            # Neither the desired object nor the stored one has changed since.
            WRITES_SKIPPED.inc()
            return
        if version is not None:
            value = {**value, "metadata": {**value["metadata"], "resourceVersion": str(version)}}
        result = await self._port.apply(value)
        # Store the answer immediately: the watch event comes some milliseconds later, and the next reconcile may be
        # sooner.
        self._stores[kind].put(result)
        now = self._stores[kind].get(place)
        if now is not None:
            self._applied[kind, place] = _Applied(digest, now.uid, now.marker, now.membership)

    async def _give_up(self, value: Json) -> None:
        """Remove the endpoints that still own an OptimizedModel which is to have no owners.

        A `kubectl replace` of the status from a backup without owners takes them from the operator's fields, and leaves
        them in the object. An apply without them does not remove them then: the operator has to take them back first.
        """
        place, metadata = key_of(value), value["metadata"]
        known = self._cache.models.get(place)
        if known is None or "ownerReferences" in metadata:
            return
        owners = known.facts.value["metadata"].get("ownerReferences") or []
        ours = [owner for owner in owners if owner.get("kind") == api.MODEL_ENDPOINT.name]
        for taken in ({"ownerReferences": ours}, {}) if ours else ():
            self._cache.models.put(await self._port.apply({**value, "metadata": {**metadata, **taken}}))

    async def _with_template_of(self, value: Json, name: str) -> Json:
        """The Deployment with the pod template of its ReplicaSet of this name; as it is, paused, if that is gone."""
        place = key_of(value)
        async for page in self._port.pages(api.REPLICA_SET, place.namespace, labels=f"{ENDPOINT}={place.name}"):
            for found in page.items:
                if found["metadata"]["name"] == name:
                    return with_template_of(value, found)
        return value

    async def _take_over_replicas(self, place: ObjectKey) -> None:
        """Remove the clients of the scale subresource from the owners of `spec.replicas`: applying the count that
        they have set would make both owners."""
        found = await self._port.get(api.DEPLOYMENT, place.name, place.namespace)
        others = scale_entries((found or {}).get("metadata", {}).get("managedFields") or [])
        if found is not None and others:
            self._stores[api.DEPLOYMENT].put(await self._port.remove_owners(api.DEPLOYMENT, found, others))

    async def _write_status(
        self, kind: ResourceKind, place: ObjectKey, entry: StoreEntry[PackedObject], status: Json
    ) -> None:
        """Write a status if it differs from the present one."""
        current = entry.facts.value.get("status") or {}
        if status == current:
            return
        wanted, written = _digest(status), self._written.get((kind, place))
        if written is not None and written == _Written(wanted, _digest(current)):
            return
        now = self._stores[kind].get(place)
        if now is None or now.uid != entry.uid:
            return
        value: Json = {
            "apiVersion": kind.api_version,
            "kind": kind.name,
            # Only if the object is the version that was planned: the status of an older spec would be wrong.
            "metadata": {"name": place.name, "namespace": place.namespace, "resourceVersion": str(entry.version)},
            "status": status,
        }
        try:
            result = await self._port.apply(value, subresource="status")
        except NotFound:
            # It was deleted, and the event was missed.
            self._stores[kind].remove(place)
            return
        self._written[kind, place] = _Written(wanted, _digest(result.get("status") or {}))
        self._stores[kind].put(result)

    async def _still_exists(self, key: ObjectKey, uid: str) -> bool:
        """Look the endpoint up before creating objects for it. If its deletion was missed, the garbage collector
        would delete the operator's objects, again and again."""
        live = await self._port.get(api.MODEL_ENDPOINT, key.name, key.namespace)
        if live is None:
            self._cache.endpoints.remove(key)
            return False
        self._cache.endpoints.put(live)
        # A new endpoint of that name: its event will come.
        return bool(live["metadata"].get("uid") == uid)

    async def _find_conflicts(self, key: ObjectKey, uid: str, new: list[Json]) -> bool:
        """Look up the names of new objects: an apply would take over an object that the operator did not create.

        True when there is such an object, or an object of the operator that the caches did not have: the plan must be
        made again.
        """
        conflicting: set[Ref] = set()
        changed = False
        for value in new:
            kind, place = KINDS[value["kind"]], key_of(value)
            if not _named_after_endpoint(value):
                # Its name has a digest: no other program uses such a name.
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
                conflicting.add(Ref(kind.name, place.name))
        if conflicting:
            self._cache.conflicting[key] = frozenset(conflicting)
        return bool(conflicting) or changed

    async def _read_texts(self, key: ObjectKey) -> None:
        endpoint = self._cache.endpoints.facts(key)
        source = texts_source(endpoint.value) if endpoint is not None else None
        place = ObjectKey(key.namespace, source[0]) if source is not None else None
        if place is None or place in self._cache.texts:
            return
        while not self._cache.put_texts(place, await self._port.get(api.CONFIG_MAP, place.name, place.namespace)):
            logger.debug("ConfigMap %s changed while it was read: reading it again", place)

    async def _post_event(self, event: Event, endpoint: Json) -> None:
        metadata, now = endpoint["metadata"], datetime.now(UTC)
        identity = f"{metadata['uid']} {event.type} {event.reason} {event.message}"
        window = int(now.timestamp()) // EVENT_WINDOW_SECONDS
        digest = hashlib.sha256(f"{identity} {window}".encode()).hexdigest()[:16]
        try:
            await self._port.create(
                {
                    "apiVersion": api.EVENT.api_version,
                    "kind": api.EVENT.name,
                    "metadata": {"name": f"{metadata['name']}.{digest}", "namespace": metadata["namespace"]},
                    "eventTime": now.isoformat(timespec="microseconds").replace("+00:00", "Z"),
                    "reportingController": REPORTER,
                    "reportingInstance": self._identity[:128],
                    "action": "Reconcile",
                    "type": event.type,
                    "reason": event.reason,
                    "note": event.message[:NOTE_LIMIT],
                    "regarding": {
                        "apiVersion": api.MODEL_ENDPOINT.api_version,
                        "kind": api.MODEL_ENDPOINT.name,
                        **{field: metadata[field] for field in ("name", "namespace", "uid")},
                    },
                }
            )
        except Conflict:
            return
        except NotLeading:
            raise
        except ClusterError as error:
            # An Event is optional, and must not keep the status, which has the same information, from being written.
            # A namespace that is being deleted refuses new objects, and an API server may limit the rate of Events.
            logger.warning(
                "cannot post Event %s: %s", event.reason, error, extra=log_event("EventNotPosted", reason=error)
            )

    def _on_change(self, kind: ResourceKind, change: StoreChange[Any]) -> None:
        if change.new is None:
            self._applied.pop((kind, change.key), None)
            self._written.pop((kind, change.key), None)


def _named_after_endpoint(value: Json) -> bool:
    return ENDPOINT in value["metadata"]["labels"]


def _digest(value: Json) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def jittered(seconds: float) -> float:
    """A fifth more or less, so that what began at the same time does not come back at the same time."""
    return seconds * random.uniform(0.8, 1.2)  # noqa: S311
