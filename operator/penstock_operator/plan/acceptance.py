"""Whether a ModelEndpoint can be acted upon at all: it is understood, and what it names is there."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from pydantic import ValidationError

from penstock.errors import PenstockError, SpecError
from penstock.resources.hardware_class import HardwareClass, HardwareClassSpec
from penstock_operator.plan.conditions import Finding, no, sentence, yes
from penstock_operator.plan.endpoint import Endpoint
from penstock_operator.plan.names import gateway_name, pods_service_name
from penstock_operator.plan.observed import Observed, Ref

OURS = ("Deployment", "Service", "PodDisruptionBudget", "NetworkPolicy", "ServiceAccount", "Role", "RoleBinding")
"""Kinds whose objects are named after the endpoint."""


def read(observed: Observed) -> Endpoint | Finding:
    """The endpoint, or why it cannot be read: the API server takes what an older schema allowed."""
    try:
        return Endpoint.from_object(observed.endpoint)
    except SpecError as error:
        return no("InvalidSpec", sentence(str(error)))


def accepted(endpoint: Endpoint, observed: Observed, hardware: HardwareClassSpec | Finding) -> Finding:
    """What the condition Accepted says."""
    spec = endpoint.spec
    if isinstance(hardware, Finding):
        return hardware
    try:
        hardware.requests(spec.cores)
    except SpecError as error:
        return no("InvalidCores", sentence(str(error)))
    taken = taken_names(endpoint, observed.foreign)
    if taken:
        objects = " and ".join(f"a {ref.kind} named {ref.name}" for ref in taken)
        return no(
            "NameTaken",
            f"There is {objects} in this namespace that was not made for this endpoint, and it is left alone. Delete "
            "it, or give the endpoint another name.",
        )
    source = spec.workload.texts_from
    if source is not None and observed.workload_texts is None:
        return no(
            "TextsNotFound",
            f"workload.textsFrom names the key {source.key} of the ConfigMap {source.config_map_name}, which is not "
            "in this namespace. Create it with one text on each line, or remove textsFrom.",
        )
    if source is not None and not observed.workload_texts:
        return no(
            "TextsEmpty",
            f"The key {source.key} of the ConfigMap {source.config_map_name} holds no text. Write one on each line, "
            "or remove textsFrom.",
        )
    return yes("Valid", f"The spec is valid, and the hardware class {spec.hardware_class} exists.")


def hardware_class(name: str, classes: Mapping[str, Mapping[str, Any]]) -> HardwareClassSpec | Finding:
    """The class of this name, or why there is none that can be used."""
    value = classes.get(name)
    if value is None:
        there = ", ".join(sorted(classes)) or "none"
        return no(
            "HardwareClassNotFound",
            f"There is no HardwareClass {name}; there are: {there}. Write one of them in spec.hardwareClass, or "
            "install the classes of the chart.",
        )
    try:
        readable = {key: value[key] for key in ("apiVersion", "kind", "spec") if key in value}
        return HardwareClass.from_object({**readable, "metadata": {"name": name}}).spec
    except (PenstockError, ValidationError) as error:
        return no("HardwareClassInvalid", sentence(f"the HardwareClass {name} cannot be read: {error}"))


def fitting(found: HardwareClassSpec | Finding, cores: int) -> HardwareClassSpec | None:
    """The class, if there is one and pods of so many cores can be made on it."""
    if isinstance(found, Finding):
        return None
    try:
        found.requests(cores)
    except SpecError:
        return None
    return found


def taken_names(endpoint: Endpoint, foreign: Iterable[Ref]) -> list[Ref]:
    """Objects of other people that have the names of ours."""
    ours = {endpoint.name, gateway_name(endpoint.name), pods_service_name(endpoint.name)}
    return sorted(ref for ref in foreign if ref.kind in OURS and ref.name in ours)
