"""Parses a ModelEndpoint and the HardwareClass that it names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import ValidationError

from penstock.errors import PenstockError, SpecError
from penstock.resources.endpoint import ModelEndpoint, ModelEndpointSpec
from penstock.resources.hardware_class import HardwareClass, HardwareClassSpec
from penstock_operator.plan.conditions import Finding, Reason, no, sentence
from penstock_operator.plan.installation import Json
from penstock_operator.plan.names import API_VERSION, runtime_labels


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
        endpoint = ModelEndpoint.from_object(readable, origin=f"ModelEndpoint {metadata['name']}")
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
        return f"http://{self.name}.{self.namespace}.svc"


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
        return no(
            Reason.HARDWARE_CLASS_NOT_FOUND,
            f"There is no HardwareClass {name}; there are: {there}. Write one of them in spec.hardwareClass, or "
            "install the classes of the chart.",
        )
    try:
        readable = {key: value[key] for key in ("apiVersion", "kind", "spec") if key in value}
        return HardwareClass.from_object({**readable, "metadata": {"name": name}}).spec
    except (PenstockError, ValidationError) as error:
        return no(Reason.HARDWARE_CLASS_INVALID, sentence(f"the HardwareClass {name} cannot be read: {error}"))


def usable(found: HardwareClassSpec | Finding, cores: int) -> HardwareClassSpec | None:
    """The class if it exists and pods with this number of cores are possible on it; else None."""
    if isinstance(found, Finding):
        return None
    try:
        found.requests(cores)
    except SpecError:
        return None
    return found
