"""What the operator knows of the cluster: a store for each kind that plans depend on, and what its pods say.

`observe` puts together what belongs to one endpoint, from memory alone: no call is made, so that looking at five
thousand endpoints costs the API server nothing.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any, Generic, TypeVar

from penstock_operator.cluster.kinds import (
    CONFIG_MAP,
    CONFIG_MAP_METADATA,
    DEPLOYMENT,
    HARDWARE_CLASS,
    HORIZONTAL_POD_AUTOSCALER,
    JOB,
    MODEL_ENDPOINT,
    NETWORK_POLICY,
    NODE,
    OPTIMIZED_MODEL,
    POD,
    POD_DISRUPTION_BUDGET,
    REPLICA_SET,
    ROLE,
    ROLE_BINDING,
    SCALED_OBJECT,
    SERVICE,
    SERVICE_ACCOUNT,
    Json,
    Kind,
)
from penstock_operator.cluster.store import Index, Key, Packed, Store, version_of
from penstock_operator.plan.names import MANAGED_BY, MANAGER, gateway_name
from penstock_operator.plan.observed import (
    DeploymentFacts,
    HostReport,
    JobFacts,
    JobLog,
    Neighbour,
    Observed,
    OptimizedModelFacts,
    PodFacts,
    Ref,
    ReplicaSetFacts,
    RuntimePod,
    Scale,
    ScalerFacts,
    User,
)
from penstock_operator.plan.optimized_model import OWNERS
from penstock_operator.plan.settings import PlanSettings
from penstock_operator.watch.indexes import (
    endpoint_index,
    model_index,
    models_named,
    owner_index,
    pod_index,
    texts_source,
)

OURS = f"{MANAGED_BY}={MANAGER}"
"""Label selector of what the operator makes: nobody else's pods are ever listed."""

Value = TypeVar("Value")


class Said(Generic[Value]):
    """What pods have said, by their uid."""

    def __init__(self) -> None:
        self._values: dict[str, Value] = {}

    def get(self, uid: str) -> Value | None:
        """What this pod said last."""
        return self._values.get(uid)

    def put(self, uid: str, value: Value) -> bool:
        """Remember it; True when it is new."""
        if self._values.get(uid) == value:
            return False
        self._values[uid] = value
        return True

    def forget(self, uid: str) -> None:
        """The pod is gone."""
        self._values.pop(uid, None)

    def __len__(self) -> int:
        return len(self._values)


@dataclass(frozen=True, slots=True)
class Texts:
    """What a ConfigMap held when it was read."""

    version: int = 0
    """0: it was not there."""
    data: Mapping[str, str] = field(default_factory=dict)


class World:
    """All the stores."""

    def __init__(self, settings: PlanSettings) -> None:
        self.settings = settings
        self.endpoints = Store(MODEL_ENDPOINT, _packed, index=endpoint_index)
        self.models = Store(OPTIMIZED_MODEL, _packed, index=model_index)
        self.classes = Store(HARDWARE_CLASS, _trimmed)
        self.nodes = Store(NODE, _node)
        self.deployments = Store(DEPLOYMENT, DeploymentFacts.from_object, index=owner_index)
        self.replica_sets = Store(REPLICA_SET, ReplicaSetFacts.from_object, index=owner_index)
        self.pods = Store(POD, PodFacts.from_object, index=pod_index)
        self.jobs = Store(JOB, JobFacts.from_object, index=owner_index)
        self.services = Store(SERVICE, _nothing, index=owner_index)
        self.budgets = Store(POD_DISRUPTION_BUDGET, _nothing, index=owner_index)
        self.autoscalers = Store(HORIZONTAL_POD_AUTOSCALER, ScalerFacts.from_object, index=owner_index, marker=_of_spec)
        """KEDA's as well: they carry the labels of our ScaledObjects."""
        self.scaled_objects = Store(SCALED_OBJECT, ScalerFacts.from_object, index=owner_index)
        """Followed only where KEDA is to be: `PlanSettings.keda`."""
        self.policies = Store(NETWORK_POLICY, _nothing, index=owner_index)
        self.accounts = Store(SERVICE_ACCOUNT, _nothing, index=owner_index)
        self.roles = Store(ROLE, _nothing, index=owner_index)
        self.bindings = Store(ROLE_BINDING, _nothing, index=owner_index)
        """Of gateways, as the two above it."""
        self.config_maps = Store(CONFIG_MAP, _nothing, index=owner_index)
        self.reports: Said[tuple[HostReport | None, str]] = Said()
        """Of serving pods: what `/info` said, or why it could not be read."""
        self.logs: Said[JobLog] = Said()
        """Of jobs' pods."""
        self.text_sources = Store(CONFIG_MAP_METADATA, _nothing, wanted=lambda key: self.endpoints.has(("texts", *key)))
        """The ConfigMaps that endpoints take texts from, which are not ours: which version there is of each."""
        self.texts: dict[Key, Texts] = {}
        """Their contents, as far as they were read."""
        self.scales: dict[Key, Scale] = {}
        """By endpoint: what the autoscaler has decided."""
        self.foreign: dict[Key, frozenset[Ref]] = {}
        """By endpoint: objects that have the names of its own and are somebody else's."""
        self._said_listeners: list[Callable[[tuple[Index, ...]], None]] = []

    def listen_said(self, listener: Callable[[tuple[Index, ...]], None]) -> None:
        """Call this with the pod's index keys whenever a pod says something new."""
        self._said_listeners.append(listener)

    def tell_report(self, pod: Key, uid: str, report: tuple[HostReport | None, str]) -> None:
        """A serving pod said where it runs, or could not be asked."""
        if self.reports.put(uid, report):
            self._tell_said(pod)

    def tell_log(self, pod: Key, uid: str, log: JobLog) -> None:
        """A job's pod said how far it is."""
        if self.logs.put(uid, log):
            self._tell_said(pod)

    def tell_scale(self, endpoint: Key, scale: Scale | None) -> None:
        """The autoscaler has decided; None: it has nothing to say (any more)."""
        if self.scales.get(endpoint) == scale:
            return
        if scale is None:
            del self.scales[endpoint]
        else:
            self.scales[endpoint] = scale
        for listener in self._said_listeners:
            listener((("endpoint", *endpoint),))

    def _tell_said(self, pod: Key) -> None:
        entry = self.pods.get(pod)
        for listener in self._said_listeners if entry is not None else ():
            listener(entry.index if entry is not None else ())

    @property
    def stores(self) -> dict[Kind, Store[Any]]:
        """All of them, by kind."""
        stores: tuple[Store[Any], ...] = (self.endpoints, self.models, self.classes, self.nodes, *self.made)
        return {store.kind: store for store in stores}

    @property
    def made(self) -> tuple[Store[Any], ...]:
        """Of the kinds that the operator makes, directly or not, and labels."""
        return (
            self.deployments,
            self.replica_sets,
            self.pods,
            self.jobs,
            self.services,
            self.budgets,
            self.policies,
            self.accounts,
            self.roles,
            self.bindings,
            self.autoscalers,
            *((self.scaled_objects,) if self.settings.keda else ()),
            self.config_maps,
        )

    def put_texts(self, place: Key, value: Json | None) -> bool:
        """A ConfigMap of texts was read; None: it is not there. False: there is a newer one by now, so read again."""
        known = self.text_sources.get(place)
        if value is None:
            self.texts[place] = Texts()
            return True
        version = version_of(value)
        if known is not None and known.version > version:
            return False
        # First what was read, then that it is there: who hears of the latter compares the two.
        self.texts[place] = Texts(version, dict(value.get("data") or {}))
        self.text_sources.put(value)
        return True

    def users(self, namespace: str, model: str) -> list[Key]:
        """The endpoints that use an OptimizedModel, in order of their names."""
        return [key for key, _ in self.endpoints.of(("model", namespace, model))]

    def model(self, key: Key) -> OptimizedModelFacts | None:
        """An OptimizedModel with its jobs and those of its users that may own it."""
        entry = self.models.get(key)
        if entry is None:
            return None
        pods: dict[str, PodFacts] = {}
        for _, pod in self.pods.of(("model", *key)):
            before = pods.get(pod.facts.owner)
            # The newest pod of a job counts: an evicted one may still be there.
            if before is None or (pod.facts.created or _EPOCH) >= (before.created or _EPOCH):
                pods[pod.facts.owner] = pod.facts
        jobs = tuple(self._job(job.facts, pods.get(job.facts.name)) for _, job in self.jobs.of(("model", *key)))
        users = ((name, self.endpoints.get(name)) for name in self.users(*key)[:OWNERS])
        return replace(
            OptimizedModelFacts.from_object(entry.facts.value),
            jobs=tuple(sorted(jobs, key=lambda job: job.attempt)),
            users=tuple(User(name.name, endpoint.uid) for name, endpoint in users if endpoint is not None),
        )

    def observe(self, key: Key, *, model_names: Iterable[str] = ()) -> Observed | None:
        """All that belongs to an endpoint, now; None when there is no such endpoint.

        `model_names` are OptimizedModels that matter besides those that its status and its Deployment name.
        """
        endpoint = self.endpoints.get(key)
        if endpoint is None:
            return None
        value = endpoint.facts.value
        index = ("endpoint", *key)
        deployment = self.deployments.facts(key)
        names = {*models_named(value), *model_names}
        if deployment is not None and deployment.optimized_model:
            names.add(deployment.optimized_model)
        models = [self.model(Key(key.namespace, name)) for name in sorted(names)]
        pods = tuple(self._runtime_pod(pod.facts) for _, pod in self.pods.of(index))
        return Observed(
            endpoint=value,
            now=datetime.now(UTC),
            settings=self.settings,
            hardware_classes={name.name: entry.facts for name in self.classes if (entry := self.classes.get(name))},
            optimized_models=tuple(model for model in models if model is not None),
            deployment=deployment,
            gateway=self.deployments.facts(Key(key.namespace, gateway_name(key.name))),
            replica_sets=tuple(entry.facts for _, entry in self.replica_sets.of(index)),
            pods=pods,
            neighbours=tuple(self._neighbours(key, pods)),
            scalers=tuple(self._scalers(key)),
            unknown_kinds=frozenset(store.kind.name for store in self.made if not store.served),
            present=frozenset(self._present(key, names)),
            workload_texts=self._texts(key, value),
            foreign=self.foreign.get(key, frozenset()),
            scale=self.scales.get(key),
            nodes=tuple(entry.facts for name in self.nodes if (entry := self.nodes.get(name))),
        )

    def _job(self, job: JobFacts, pod: PodFacts | None) -> JobFacts:
        log = self.logs.get(pod.uid) if pod is not None else None
        return replace(job, pod=pod, log=log or JobLog())

    def _runtime_pod(self, pod: PodFacts) -> RuntimePod:
        report, problem = self.reports.get(pod.uid) or (None, "")
        return RuntimePod(pod, report, problem)

    def _neighbours(self, key: Key, own: Iterable[RuntimePod]) -> Iterator[Neighbour]:
        for node in sorted({entry.pod.node for entry in own} - {""}):
            for place, pod in self.pods.of(("node", node)):
                if ("endpoint", *key) in pod.index:
                    continue
                report, _ = self.reports.get(pod.uid) or (None, "")
                yield Neighbour(place.name, place.namespace, node, () if report is None else report.cpus)

    def _present(self, key: Key, models: Iterable[str]) -> Iterator[Ref]:
        for store in (
            self.deployments,
            self.services,
            self.budgets,
            self.policies,
            self.accounts,
            self.roles,
            self.bindings,
            self.config_maps,
        ):
            for place, _ in store.of(("endpoint", *key)):
                yield Ref(store.kind.name, place.name)
        for scaler in self._scalers(key):
            if scaler.ours and not scaler.deleting:
                yield Ref(scaler.kind, scaler.name)
        for name in models:
            if self.models.get(Key(key.namespace, name)) is not None:
                yield Ref(OPTIMIZED_MODEL.name, name)
            for owned in (self.jobs, self.config_maps):
                for place, _ in owned.of(("model", key.namespace, name)):
                    yield Ref(owned.kind.name, place.name)

    def _scalers(self, key: Key) -> Iterator[ScalerFacts]:
        for store in (self.autoscalers, self.scaled_objects):
            for _, entry in store.of(("endpoint", *key)):
                yield entry.facts

    def _texts(self, key: Key, endpoint: Json) -> tuple[str, ...] | None:
        source = texts_source(endpoint)
        if source is None:
            return None
        text = self.texts.get(Key(key.namespace, source[0]), Texts()).data.get(source[1])
        return None if text is None else tuple(line for line in text.splitlines() if line.strip())


_EPOCH = datetime.fromtimestamp(0, UTC)


_NOISE = {"managedFields", "resourceVersion", "selfLink"}


def _trimmed(value: Json) -> Json:
    """Without what changes on every write and what is large and says nothing to a plan."""
    metadata = {name: field for name, field in value["metadata"].items() if name not in _NOISE}
    annotations = dict(metadata.get("annotations") or {})
    annotations.pop("kubectl.kubernetes.io/last-applied-configuration", None)
    if "annotations" in metadata:
        metadata["annotations"] = annotations
    return {**value, "metadata": metadata}


def _packed(value: Json) -> Packed:
    return Packed(_trimmed(value))


def _node(value: Json) -> Json:
    """What placement asks of a node. Its heartbeats and images are left out, so that they wake nobody."""
    metadata, spec, status = value["metadata"], value.get("spec") or {}, value.get("status") or {}
    conditions = [
        {"type": entry["type"], "status": entry["status"]}
        for entry in status.get("conditions") or []
        if entry["type"] == "Ready"
    ]
    return {
        "metadata": {"name": metadata["name"], "labels": metadata.get("labels") or {}},
        "spec": {name: spec[name] for name in ("taints", "unschedulable") if name in spec},
        "status": {"allocatable": status.get("allocatable") or {}, "conditions": conditions},
    }


def _nothing(_: Json) -> None:
    """Of some kinds it matters only that they are there."""


def _of_spec(value: Json) -> int:
    """HorizontalPodAutoscalers have no generation, and their status changes with the load."""
    return zlib.crc32(json.dumps(value.get("spec"), sort_keys=True).encode())
