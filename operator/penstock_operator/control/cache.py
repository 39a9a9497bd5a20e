"""The caches of the operator: a store for each watched kind, the reports of pods and jobs, and the autoscaler's
decisions.

`observe` collects what belongs to one endpoint from memory alone: planning an endpoint costs the API server nothing.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any, TypeVar

from penstock.resources.endpoint_parts.exposure import ROOT
from penstock.resources.optimized_model import texts_of
from penstock_operator.cluster import api
from penstock_operator.cluster.api import Json, ResourceKind
from penstock_operator.cluster.store import Index, ObjectKey, PackedObject, Store, StoreChange, version_of
from penstock_operator.control import index_keys
from penstock_operator.control.index_keys import owner_index
from penstock_operator.endpoint.objects.exposure import hosts_of, may_use, moment_of
from penstock_operator.endpoint.optimization.model import OWNERS, wanted_name
from penstock_operator.endpoint.pods.placement import node_fields
from penstock_operator.endpoint.snapshot import EndpointSnapshot
from penstock_operator.endpoint.spec import ParsedEndpoint, neuron_target, read_endpoint
from penstock_operator.facts.installation import PlanSettings
from penstock_operator.facts.names import MANAGED_BY, MANAGER, Ref, canary_name, gateway_name
from penstock_operator.facts.pods import HostReport, JobFacts, JobReport, Neighbour, PodFacts, RuntimePod
from penstock_operator.facts.routes import HostClaim, RouteFacts
from penstock_operator.facts.scaling import CanaryReport, DesiredScale, ScalerFacts
from penstock_operator.facts.workloads import DeploymentFacts, ModelUser, OptimizedModelFacts, ReplicaSetFacts
from penstock_operator.limits.quota_use import QuotaUse
from penstock_operator.limits.waiting import Slots, open_job

MANAGED_SELECTOR = f"{MANAGED_BY}={MANAGER}"
"""Label selector of the operator's objects: no other pods are ever listed."""
Key = TypeVar("Key")
Value = TypeVar("Value")


@dataclass(frozen=True, slots=True)
class ConfigMapTexts:
    """The content of a ConfigMap when it was read."""

    version: int = 0
    """resourceVersion; 0: it did not exist."""
    data: Mapping[str, str] = field(default_factory=dict)


class ClusterCache:
    """All stores."""

    def __init__(self, settings: PlanSettings) -> None:
        self.settings = settings
        self.endpoints = Store(api.MODEL_ENDPOINT, _packed, index=index_keys.endpoint_index, wanted=self._is_ours)
        self.models = Store(api.OPTIMIZED_MODEL, _packed, index=index_keys.model_index, wanted=self._is_ours)
        self.classes = Store(api.HARDWARE_CLASS, _trimmed)
        self.nodes = Store(api.NODE, node_fields)
        self.namespaces = Store(api.NAMESPACE, lambda value: dict(value["metadata"].get("labels") or {}))
        self.deployments = Store(api.DEPLOYMENT, DeploymentFacts.from_object, index=index_keys.deployment_index)
        self.replica_sets = Store(api.REPLICA_SET, ReplicaSetFacts.from_object, index=owner_index)
        self.pods = Store(api.POD, PodFacts.from_object, index=index_keys.pod_index)
        self.jobs = Store(api.JOB, JobFacts.from_object, index=lambda job: (*owner_index(job), *open_job(job)))
        self.services = Store(api.SERVICE, _no_facts, index=owner_index)
        self.budgets = Store(api.POD_DISRUPTION_BUDGET, _no_facts, index=owner_index)
        self.ingresses = Store(api.INGRESS, RouteFacts.from_object, index=index_keys.route_index)
        self.http_routes = Store(api.HTTP_ROUTE, RouteFacts.from_object, index=index_keys.route_index)
        """Watched only where the Gateway API is installed: `PlanSettings.gateway_api`."""
        self.autoscalers = Store(
            api.HORIZONTAL_POD_AUTOSCALER, ScalerFacts.from_object, index=owner_index, marker=_of_spec
        )
        """Including KEDA's: they carry the labels of the operator's ScaledObjects."""
        self.scaled_objects = Store(api.SCALED_OBJECT, ScalerFacts.from_object, index=owner_index)
        """Watched only where KEDA is installed: `PlanSettings.keda`."""
        self.policies = Store(api.NETWORK_POLICY, _no_facts, index=owner_index)
        self.accounts = Store(api.SERVICE_ACCOUNT, _no_facts, index=owner_index)
        self.bindings = Store(api.ROLE_BINDING, _no_facts, index=owner_index)
        """ServiceAccounts and RoleBindings belong to gateways."""
        scalers = (self.autoscalers, self.scaled_objects)
        self.quotas = QuotaUse(settings.quotas, self.endpoints, self.deployments, scalers, self.namespace_labels)
        self.reports: dict[str, tuple[HostReport | None, str]] = {}
        """By the uid of a runtime pod: the parsed `/info`, or why it could not be read."""
        self.job_reports: dict[str, JobReport] = {}
        """By the uid of a job's pod: the parsed `/progress`."""
        self.text_sources = Store(api.CONFIG_MAP, _no_facts, wanted=lambda key: self.endpoints.has(("texts", *key)))
        """Versions of the ConfigMaps that endpoints take texts from. Users own these ConfigMaps."""
        self.texts: dict[ObjectKey, ConfigMapTexts] = {}
        """The contents of those ConfigMaps that were read."""
        self.scales: dict[ObjectKey, DesiredScale] = {}
        """By endpoint: the autoscaler's last published decision."""
        self.canaries: dict[ObjectKey, CanaryReport] = {}
        """By endpoint: the last look at its canary."""
        self.endpoints_listed = False
        """Whether all endpoints are in their store. A new leader reads pods before."""
        self.conflicting: dict[ObjectKey, frozenset[Ref]] = {}
        """By endpoint: objects with the operator's names that it did not create."""
        work = (self.endpoints, self.models, self.jobs, self.pods)
        self.slots = Slots(settings, *work, deployments=self.deployments, replica_sets=self.replica_sets)
        self._report_listeners: list[Callable[[tuple[Index, ...]], None]] = []
        self.endpoints.listen(self._on_endpoint)

    def _on_endpoint(self, change: StoreChange[PackedObject]) -> None:
        """Forget the entries of an endpoint that is gone: the next one of that name starts anew."""
        if change.old is None or (change.new is not None and change.new.uid == change.old.uid):
            return
        self.conflicting.pop(change.key, None)
        self.scales.pop(change.key, None)
        self.canaries.pop(change.key, None)
        self.slots.forget(change.key)

    def _is_ours(self, key: ObjectKey) -> bool:
        return key.namespace not in self.settings.ignored_namespaces

    def listen_reports(self, listener: Callable[[tuple[Index, ...]], None]) -> None:
        """Call this with the pod's index keys whenever a pod's report or an endpoint's scale changes."""
        self._report_listeners.append(listener)

    def put_report(self, pod: ObjectKey, uid: str, report: tuple[HostReport | None, str]) -> None:
        """Store the report of a runtime pod, or why it could not be read."""
        self._publish(self.reports, uid, report, self._indexes(pod))

    def put_job_report(self, pod: ObjectKey, uid: str, report: JobReport) -> None:
        """Store the progress of a job's pod."""
        self._publish(self.job_reports, uid, report, self._indexes(pod))

    def put_scale(self, endpoint: ObjectKey, scale: DesiredScale | None) -> None:
        """Publish the autoscaler's decision for an endpoint; None: withdraw it."""
        self._publish(self.scales, endpoint, scale, (("endpoint", *endpoint),))

    def put_canary(self, endpoint: ObjectKey, report: CanaryReport | None) -> None:
        """Publish a look at the canary of an endpoint; None: it has none any more."""
        self._publish(self.canaries, endpoint, report, (("endpoint", *endpoint),))

    def _publish(self, values: dict[Key, Value], key: Key, value: Value | None, indexes: tuple[Index, ...]) -> None:
        if values.get(key) == value:
            return
        if value is None:
            del values[key]
        else:
            values[key] = value
        for listener in self._report_listeners:
            listener(indexes)

    def _indexes(self, pod: ObjectKey) -> tuple[Index, ...]:
        entry = self.pods.get(pod)
        return () if entry is None else entry.index

    @property
    def stores(self) -> dict[ResourceKind, Store[Any]]:
        """All stores by kind."""
        read: tuple[Store[Any], ...] = (self.endpoints, self.models, self.classes, self.nodes, self.namespaces)
        return {store.kind: store for store in (*read, *self.made)}

    @property
    def made(self) -> tuple[Store[Any], ...]:
        """The stores of the kinds that carry the operator's labels."""
        return (
            self.deployments,
            self.replica_sets,
            self.pods,
            self.jobs,
            self.services,
            self.budgets,
            self.policies,
            self.accounts,
            self.bindings,
            self.ingresses,
            *((self.http_routes,) if self.settings.gateway_api else ()),
            *((self.autoscalers,) if self.settings.hpa or self.settings.keda else ()),
            *((self.scaled_objects,) if self.settings.keda else ()),
        )

    def put_texts(self, place: ObjectKey, value: Json | None) -> bool:
        """Store a ConfigMap of texts that was read; None: it does not exist. False: a newer version is known; read
        it again."""
        known = self.text_sources.get(place)
        if value is None:
            self.texts[place] = ConfigMapTexts()
            return True
        version = version_of(value)
        if known is not None and known.version > version:
            return False
        # Store the content first: listeners of the store compare the two versions.
        self.texts[place] = ConfigMapTexts(version, dict(value.get("data") or {}))
        self.text_sources.put(value)
        return True

    def users(self, namespace: str, model: str) -> list[ObjectKey]:
        """The endpoints that use an OptimizedModel, ordered by name."""
        return [key for key, _ in self.endpoints.of(("model", namespace, model))]

    def writer(self, namespace: str, model: str) -> ObjectKey | None:
        """The endpoint that writes the status of an OptimizedModel when it is reconciled; None: no endpoint uses it.

        One that pins an artefact writes none, and is returned only if there is no other.
        """
        users = self.endpoints.of(("model", namespace, model))
        return min(users, key=lambda user: any(index[0] == "pinned" for index in user[1].index), default=(None,))[0]

    def runtime_pods(self, endpoint: ObjectKey) -> list[PodFacts]:
        """The pods of an endpoint's Deployment. Labels alone make no pod its own: anyone who may create pods sets
        them. So the controllers must lead to the endpoint, by uid."""
        return self._pods_of("endpoint", endpoint, endpoint.name)

    def gateway_pods(self, endpoint: ObjectKey) -> list[PodFacts]:
        """The pods of the Deployment of an endpoint's gateway, in the same way."""
        return self._pods_of("gateway", endpoint, gateway_name(endpoint.name))

    def canary_pods(self, endpoint: ObjectKey) -> list[PodFacts]:
        """The pods of the Deployment of an endpoint's canary."""
        return self._pods_of("endpoint", endpoint, canary_name(endpoint.name))

    def is_runtime_pod(self, place: ObjectKey) -> bool:
        """Whether a pod belongs to the Deployment of the endpoint that its labels name, or to its canary's."""
        entry = self.pods.get(place)
        names = [index[2] for index in entry.index if index[0] == "endpoint"] if entry is not None else []
        return entry is not None and any(
            self._created(entry.facts, ObjectKey(place.namespace, name), deployment)
            for name in names
            for deployment in (name, canary_name(name))
        )

    def _pods_of(self, what: str, endpoint: ObjectKey, deployment: str) -> list[PodFacts]:
        pods = (entry.facts for _, entry in self.pods.of((what, *endpoint)))
        return [pod for pod in pods if self._created(pod, endpoint, deployment)]

    def _created(self, pod: PodFacts, endpoint: ObjectKey, deployment: str) -> bool:
        """Whether the endpoint's Deployment of this name created the pod."""
        replica_set = self.replica_sets.get(ObjectKey(endpoint.namespace, pod.owner.name))
        created = self.deployments.get(ObjectKey(endpoint.namespace, deployment))
        if replica_set is None or created is None:
            return False
        if replica_set.uid != pod.owner.uid or created.uid != replica_set.facts.owner.uid:
            return False
        known = self.endpoints.get(endpoint)
        return known.uid == created.facts.owner.uid if known is not None else not self.endpoints_listed

    def model(self, key: ObjectKey) -> OptimizedModelFacts | None:
        """An OptimizedModel with its jobs, and the users that may own it."""
        entry = self.models.get(key)
        if entry is None:
            return None
        pods: dict[str, PodFacts] = {}
        for _, pod in self.pods.of(("model", *key)):
            before = pods.get(pod.facts.owner.uid)
            # The newest pod of a job counts: an evicted one may still exist.
            if before is None or (pod.facts.created or _EPOCH) >= (before.created or _EPOCH):
                pods[pod.facts.owner.uid] = pod.facts
        # A Job of another owner may be one that a user created, or one of a deleted OptimizedModel of this name.
        own = (job.facts for _, job in self.jobs.of(("model", *key)) if job.facts.owner.uid == entry.uid)
        jobs = tuple(self._job(job, pods.get(job.uid)) for job in own)
        users = ((name, self.endpoints.get(name)) for name in self.users(*key)[:OWNERS])
        return replace(
            OptimizedModelFacts.from_object(entry.facts.value),
            jobs=tuple(sorted(jobs, key=lambda job: job.attempt)),
            users=tuple(ModelUser(name.name, endpoint.uid) for name, endpoint in users if endpoint is not None),
        )

    def observe(self, key: ObjectKey) -> EndpointSnapshot | None:
        """Everything that belongs to an endpoint, now; None when there is no such endpoint. Parses its spec once."""
        endpoint = self.endpoints.get(key)
        if endpoint is None:
            return None
        value = endpoint.facts.value
        parsed = read_endpoint(value)
        index = ("endpoint", *key)
        deployment = self.deployments.facts(key)
        texts = self._texts(key, value)
        names = index_keys.models_named(value)
        classes = {name.name: entry.facts for name in self.classes if (entry := self.classes.get(name))}
        if isinstance(parsed, ParsedEndpoint):
            # Another endpoint may have created the OptimizedModel of the present spec.
            target = neuron_target(parsed.spec.hardware_class, classes)
            names.add(wanted_name(parsed.spec, self.settings, texts, target))
            pinned = parsed.spec.optimization.artefact
            names |= {place.name for place, _ in self.models.of(("artefact", key.namespace, pinned or ""))}
        if deployment is not None:
            names.add(deployment.optimized_model)
        names.discard("")
        models = [self.model(ObjectKey(key.namespace, name)) for name in sorted(names)]
        optimizations, rollouts = self.slots.lines(now := datetime.now(UTC))
        pods = tuple(self._runtime_pod(pod) for pod in self.runtime_pods(key))
        return EndpointSnapshot(
            endpoint=value,
            now=now,
            settings=self.settings,
            parsed=parsed,
            hardware_classes=classes,
            optimized_models=tuple(model for model in models if model is not None),
            deployment=deployment,
            gateway=self._own_deployment(key, gateway_name(key.name)),
            canary=self._own_deployment(key, canary_name(key.name)),
            canary_pods=tuple(self._runtime_pod(pod) for pod in self.canary_pods(key)),
            canary_report=self.canaries.get(key),
            replica_sets=tuple(entry.facts for _, entry in self.replica_sets.of(index)),
            pods=pods,
            neighbours=tuple(self._neighbours(key, pods)),
            optimizations=optimizations,
            rollouts=rollouts,
            scalers=tuple(self._scalers(key)),
            unknown_kinds=frozenset(store.kind.name for store in self.made if not store.served),
            present=frozenset(self._present(key, names)),
            workload_texts=texts,
            conflicting=self.conflicting.get(key, frozenset()),
            scale=self.scales.get(key),
            namespace_labels=self.namespace_labels(key.namespace),
            quota=self.quotas.seen_by(key) if self.settings.quotas else None,
            nodes=tuple(entry.facts for name in self.nodes if (entry := self.nodes.get(name))),
            route=self._route(key, endpoint.uid),
            host_claims=tuple(self._host_claims(key, value)),
        )

    def _own_deployment(self, key: ObjectKey, name: str) -> DeploymentFacts | None:
        """The Deployment of this name if it is the endpoint's: another endpoint may have the name."""
        endpoint, found = self.endpoints.get(key), self.deployments.facts(ObjectKey(key.namespace, name))
        return found if found is not None and endpoint is not None and found.owner.uid == endpoint.uid else None

    def _route(self, key: ObjectKey, uid: str) -> RouteFacts | None:
        """The route that the operator created for the endpoint of this uid."""
        found = (self.ingresses.facts(key), self.http_routes.facts(key))
        return next((route for route in found if route is not None and route.owner.uid == uid), None)

    def _host_claims(self, key: ObjectKey, value: Json) -> Iterator[HostClaim]:
        """The other endpoints with the host of this one that may use it, or that still have a route to it."""
        host = str(((value.get("spec") or {}).get("exposure") or {}).get("host") or "")
        stores: tuple[Store[Any], ...] = (self.endpoints, self.ingresses, self.http_routes)
        found = {place for store in stores for place, _ in store.of(("host", host))} if host else set()
        for place in sorted(found - {key}):
            entry = self.endpoints.get(place)
            if entry is None:
                continue
            other = entry.facts.value
            exposure = (other.get("spec") or {}).get("exposure") or {}
            patterns = hosts_of(self.namespace_labels(place.namespace), self.settings.allowed)
            ends = "deletionTimestamp" in other["metadata"]
            asks = exposure.get("host") == host and not ends and may_use(host, patterns)
            route = self._route(place, entry.uid)
            since = route.created if route is not None and route.host == host else None
            if asks or since is not None:
                path = str(exposure.get("path") or ROOT)
                yield HostClaim(place.namespace, place.name, path, since, moment_of(other))

    def namespace_labels(self, namespace: str) -> Mapping[str, str]:
        """At least the label that every namespace has."""
        known = self.namespaces.facts(ObjectKey("", namespace))
        return {"kubernetes.io/metadata.name": namespace, **(known or {})}

    def _job(self, job: JobFacts, pod: PodFacts | None) -> JobFacts:
        report = self.job_reports.get(pod.uid) if pod is not None else None
        return replace(job, pod=pod, report=report or JobReport())

    def _runtime_pod(self, pod: PodFacts) -> RuntimePod:
        report, problem = self.reports.get(pod.uid) or (None, "")
        return RuntimePod(pod, report, problem)

    def _neighbours(self, key: ObjectKey, own: Iterable[RuntimePod]) -> Iterator[Neighbour]:
        for node in sorted({entry.pod.node for entry in own} - {""}):
            for place, pod in self.pods.of(("node", node)):
                if ("endpoint", *key) in pod.index or not self.is_runtime_pod(place):
                    continue
                report, _ = self.reports.get(pod.uid) or (None, "")
                yield Neighbour(place.name, place.namespace, node, () if report is None else report.cpus)

    def _present(self, key: ObjectKey, models: Iterable[str]) -> Iterator[Ref]:
        routes, access = (self.ingresses, self.http_routes), (self.policies, self.accounts, self.bindings)
        for store in (self.deployments, self.services, self.budgets, *routes, *access):
            for place, _ in store.of(("endpoint", *key)):
                yield Ref(store.kind.name, place.name)
        for scaler in self._scalers(key):
            if scaler.ours and not scaler.deleting:
                yield Ref(scaler.kind, scaler.name)
        for name in models:
            if self.models.get(ObjectKey(key.namespace, name)) is not None:
                yield Ref(api.OPTIMIZED_MODEL.name, name)
            for place, _ in self.jobs.of(("model", key.namespace, name)):
                yield Ref(api.JOB.name, place.name)

    def _scalers(self, key: ObjectKey) -> Iterator[ScalerFacts]:
        for store in (self.autoscalers, self.scaled_objects):
            for _, entry in store.of(("endpoint", *key)):
                yield entry.facts

    def _texts(self, key: ObjectKey, endpoint: Json) -> tuple[str, ...] | None:
        source = index_keys.texts_source(endpoint)
        if source is None:
            return None
        text = self.texts.get(ObjectKey(key.namespace, source[0]), ConfigMapTexts()).data.get(source[1])
        return None if text is None else texts_of(text)


_EPOCH = datetime.fromtimestamp(0, UTC)
_IRRELEVANT = {"managedFields", "resourceVersion", "selfLink"}


def _trimmed(value: Json) -> Json:
    """The object without metadata that changes on every write or is large and irrelevant to plans."""
    metadata = {name: field for name, field in value["metadata"].items() if name not in _IRRELEVANT}
    annotations = dict(metadata.get("annotations") or {})
    annotations.pop("kubectl.kubernetes.io/last-applied-configuration", None)
    if "annotations" in metadata:
        metadata["annotations"] = annotations
    return {**value, "metadata": metadata}


def _packed(value: Json) -> PackedObject:
    return PackedObject(_trimmed(value))


def _no_facts(_: Json) -> None:
    """For kinds of which only the existence matters."""


def _of_spec(value: Json) -> int:
    """HorizontalPodAutoscalers have no generation, and their status changes with the load: use a hash of the spec."""
    return zlib.crc32(json.dumps(value.get("spec"), sort_keys=True).encode())
