"""Parses a ModelEndpoint and the HardwareClass that it names, and compares the spec with the lists of the
cluster's administrator.

A ModelEndpoint becomes pods. Without these lists, a user who may create ModelEndpoints but no pods could mount folders
of the nodes, use service accounts with a cloud role, or run on nodes that are reserved.
"""

from __future__ import annotations

import posixpath
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any

from pydantic import ValidationError

from penstock.errors import PenstockError, SpecError, closest
from penstock.hardware import NeuronGeneration
from penstock.resources.core import ModelSource, Scheme
from penstock.resources.endpoint import ModelEndpoint, ModelEndpointSpec
from penstock.resources.endpoint_parts.rollout import GatewayMode
from penstock.resources.hardware_class import HardwareClass, HardwareClassSpec
from penstock_operator.facts.findings import Finding, no, sentence
from penstock_operator.facts.installation import PlanSettings
from penstock_operator.facts.names import (
    API_VERSION,
    DEFAULT_ACCOUNT,
    SERVICE_PORT,
    SERVICE_TLS_PORT,
    Json,
    runtime_labels,
)
from penstock_operator.facts.reasons import Reason
from penstock_operator.facts.tenants import (
    AllowList,
    allowed_sources,
    is_allowed,
    is_covered,
    is_of_the_system,
    is_well_known,
)

_SHOWN = 80
"""Characters of a name in a message."""


@dataclass(frozen=True)
class ParsedEndpoint:
    """A ModelEndpoint with a valid spec."""

    name: str
    namespace: str
    uid: str
    generation: int
    spec: ModelEndpointSpec
    status: Json = field(default_factory=dict)

    @classmethod
    def from_object(cls, value: Json) -> ParsedEndpoint:
        """Parse the object of the API. SpecError when this version does not understand its spec."""
        metadata = value["metadata"]
        # Only the spec is parsed: metadata such as managedFields is the API server's own.
        readable: Json = {key: value[key] for key in ("apiVersion", "kind", "spec") if key in value}
        readable["metadata"] = {"name": metadata["name"]}
        endpoint = ModelEndpoint.from_object(readable, origin=f"ModelEndpoint {metadata['name']}", stored=True)
        return cls(
            name=metadata["name"],
            namespace=metadata.get("namespace") or "default",
            uid=metadata.get("uid") or "",
            generation=int(metadata.get("generation") or 1),
            spec=endpoint.spec,
            status=dict(value.get("status") or {}),
        )

    def owned(self, api_version: str, kind: str, spec: Json, *, name: str | None = None) -> Json:
        """An object that this endpoint owns: it has the endpoint's name and labels and is deleted with it."""
        return {
            "apiVersion": api_version,
            "kind": kind,
            "metadata": {
                "name": name or self.name,
                "namespace": self.namespace,
                "labels": runtime_labels(self.name),
                "ownerReferences": [
                    {
                        "apiVersion": API_VERSION,
                        "kind": "ModelEndpoint",
                        "name": self.name,
                        "uid": self.uid,
                        "controller": True,
                        "blockOwnerDeletion": False,
                    }
                ],
            },
            "spec": spec,
        }

    @property
    def url(self) -> str:
        """The URL of the endpoint inside the cluster."""
        return f"http{'' if self.spec.tls is None else 's'}://{self.name}.{self.namespace}.svc"

    @property
    def wants_gateway(self) -> bool:
        """Whether it needs a gateway. Not while it is suspended: no replica would come to answer held requests."""
        spec = self.spec
        if spec.suspend or spec.gateway.mode is GatewayMode.NEVER:
            return False
        canary = spec.rollout.canary is not None
        return spec.gateway.mode is GatewayMode.ALWAYS or spec.scaling.min_replicas == 0 or canary

    @property
    def service_port(self) -> int:
        """The port of its Service."""
        return SERVICE_PORT if self.spec.tls is None else SERVICE_TLS_PORT


def read_endpoint(value: Json) -> ParsedEndpoint | Finding:
    """The parsed endpoint, or the finding why it is invalid: the API server may hold an object of an older schema."""
    try:
        return ParsedEndpoint.from_object(value)
    except SpecError as error:
        return no(Reason.INVALID_SPEC, sentence(str(error)))


def hardware_class(name: str, classes: Mapping[str, Mapping[str, Any]]) -> HardwareClassSpec | Finding:
    """The HardwareClass of this name, or the finding why it cannot be used."""
    value = classes.get(name)
    if value is None:
        there = ", ".join(sorted(classes)) or "none"
        near = closest(name, classes)
        hint = f" Did you mean {near}?" if near else ""
        return no(
            Reason.HARDWARE_CLASS_NOT_FOUND,
            f"There is no HardwareClass {name}; there are: {there}.{hint} Write one of them in spec.hardwareClass, or "
            "install the classes of the chart.",
        )
    try:
        readable = {key: value[key] for key in ("apiVersion", "kind", "spec") if key in value}
        return HardwareClass.from_object({**readable, "metadata": {"name": name}}, stored=True).spec
    except (PenstockError, ValidationError) as error:
        return no(Reason.HARDWARE_CLASS_INVALID, sentence(f"the HardwareClass {name} cannot be read: {error}"))


def neuron_target(name: str, classes: Mapping[str, Mapping[str, Any]]) -> NeuronGeneration | None:
    """The Inferentia devices of the HardwareClass of this name; None: it has none, or it cannot be used."""
    if "neuron" not in (classes.get(name, {}).get("spec") or {}):
        return None  # without parsing the class, which takes long
    found = hardware_class(name, classes)
    return found.target if isinstance(found, HardwareClassSpec) else None


class HardwareClasses:
    """The HardwareClasses of the cluster. Each is parsed once for a plan: parsing is a large part of its cost."""

    def __init__(self, values: Mapping[str, Mapping[str, Any]]) -> None:
        self._values = values
        self._found: dict[str, HardwareClassSpec | Finding] = {}

    def get(self, name: str) -> HardwareClassSpec | Finding:
        """The class of this name, or the finding why it cannot be used."""
        if name not in self._found:
            self._found[name] = hardware_class(name, self._values)
        return self._found[name]

    def usable(self, name: str, cores: int) -> HardwareClassSpec | None:
        """The class if it exists and pods with this number of cores are possible on it; else None."""
        found = self.get(name)
        if isinstance(found, Finding):
            return None
        try:
            found.requests(cores)
        except SpecError:
            return None
        return found


def refusal(spec: ModelEndpointSpec, allowed: AllowList, namespace: Mapping[str, str]) -> Finding | None:
    """Why the spec is not allowed: the finding of the first refused field; None if all is allowed.
    `namespace`: the labels of its namespace."""
    for name, source in spec.sources.items():
        if allowed.sources and not is_covered(source, prefixes := allowed_sources(allowed.sources, namespace)):
            return no(
                Reason.SOURCE_NOT_ALLOWED,
                f"{name} is {str(source)[:_SHOWN]!r}, and the cluster's administrator allows these sources in this "
                f"namespace: {_listed(prefixes)}. Use one of them, or ask the administrator to add a rule to "
                "policy.allowedSources of the chart.",
            )
        if source.scheme is Scheme.FILE and allowed_folder(source, allowed) is None:
            return no(
                Reason.SOURCE_NOT_ALLOWED,
                f"{name} is the folder {source.location} of a node, which is below none of the folders that the "
                f"cluster's administrator allows ({_listed(allowed.file_prefixes)}). Use a hf://, s3://, gs://, az://, "
                "oci:// or pvc:// source, or ask the administrator to add a folder to policy.fileSources of the chart.",
            )
    for setting, name, value in _refused(spec, allowed):
        return no(
            Reason.POD_SETTING_NOT_ALLOWED,
            f"spec.pod.{setting} asks for {name[:_SHOWN]!r}, which the cluster's administrator does not allow. Remove "
            f"it, or ask the administrator to add it to {value} of the chart.",
        )
    return None


def refused_store(sources: Mapping[str, ModelSource], settings: PlanSettings) -> Finding | None:
    """Why a model may not come from where it is: it is in the artefact store, which has the models of other namespaces.
    None if it is elsewhere, or if all namespaces share the artefacts. `sources` by field."""
    if settings.allowed.shared_artefacts:
        return None
    for name, source in sources.items():
        if not _in_store(source, settings):
            continue
        return no(
            Reason.SOURCE_NOT_ALLOWED,
            f"{name} {source.scheme.value}://{source.location} is in the artefact store, which has artefacts of other "
            "namespaces. Keep the model in another claim, bucket or folder; to serve an artefact, use "
            "optimization.mode: Pinned.",
        )
    return None


def _in_store(source: ModelSource, settings: PlanSettings) -> bool:
    whole, volume = settings.whole_store, settings.store_volume
    claim = volume.claim if volume is not None else ""
    if source.scheme is Scheme.PVC:
        # Whatever the path: the job would mount the claim as a whole.
        return bool(claim) and source.location.partition("/")[0] == claim
    if claim or source.scheme.value != whole.scheme.value:
        return False
    folder = volume.host_path if volume is not None else whole.location
    return _normal(source.location).is_relative_to(_normal(folder))


def _normal(path: str) -> PurePosixPath:
    """A path without `.`, `..` and empty parts: some servers of object stores take keys as paths of a file system."""
    return PurePosixPath(posixpath.normpath("/" + path.lstrip("/")))


def allowed_folder(source: ModelSource, allowed: AllowList) -> tuple[str, str] | None:
    """The allowed folder of a `file://` source and the path below it (`.` for the folder itself); None if there is
    none. Paths are compared by components: `/models` does not allow `/models-of-others`."""
    if ".." in source.location.split("/"):
        return None
    path = _normal(source.location)
    holding = [prefix for prefix in allowed.file_prefixes if path.is_relative_to(prefix)]
    if not holding:
        return None
    prefix = max(holding, key=len)
    return prefix, str(path.relative_to(prefix))


def _refused(spec: ModelEndpointSpec, allowed: AllowList) -> Iterator[tuple[str, str, str]]:
    """Each refused setting of the pods: field below `spec.pod`, name, and the chart value that would allow it."""
    pod = spec.pod
    for toleration in pod.tolerations:
        if toleration.key is None:
            yield "tolerations", "every taint", "policy.pod.tolerations, taint by taint,"
        elif not is_allowed(toleration.key, allowed.tolerations, is_well_known):
            yield "tolerations", toleration.key, "policy.pod.tolerations"
    for key in pod.node_selector:
        if not is_allowed(key, allowed.node_selectors, is_well_known):
            yield "nodeSelector", key, "policy.pod.nodeSelectors"
    for key in pod.labels:
        if not is_allowed(key, allowed.labels, is_well_known):
            yield "labels", key, "policy.pod.labels"
    for key in pod.annotations:
        if not is_allowed(key, allowed.annotations, is_well_known):
            yield "annotations", key, "policy.pod.annotations"
    priority = pod.priority_class_name
    if priority is not None and not is_allowed(priority, allowed.priority_classes, is_of_the_system):
        yield "priorityClassName", priority, "policy.pod.priorityClasses"
    account = pod.service_account_name
    if account not in {None, DEFAULT_ACCOUNT} and not is_allowed(account, allowed.service_accounts, lambda _: False):
        yield "serviceAccountName", account, "policy.pod.serviceAccounts"


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names) or "none"
