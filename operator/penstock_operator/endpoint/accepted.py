"""The condition Accepted: the spec is valid and allowed, and the objects that it names exist."""

from __future__ import annotations

from collections.abc import Iterable

from penstock.hardware import NeuronGeneration
from penstock.resources.hardware_class import HardwareClassSpec
from penstock.tasks import TaskName
from penstock_operator.endpoint.conditions import short_digest
from penstock_operator.endpoint.optimization.model import is_of_later_release, pinned_model, target_of
from penstock_operator.endpoint.snapshot import EndpointSnapshot
from penstock_operator.endpoint.spec import ParsedEndpoint, refusal, refused_store
from penstock_operator.facts.findings import Finding, no, sentence, yes
from penstock_operator.facts.names import Ref, gateway_binding_name, gateway_name, pods_service_name
from penstock_operator.facts.reasons import Reason

NAMED_KINDS = ("Deployment", "Service", "PodDisruptionBudget", "NetworkPolicy", "ServiceAccount", "RoleBinding")
"""Kinds whose objects are named after the endpoint."""


def accepted(endpoint: ParsedEndpoint, observed: EndpointSnapshot, hardware: HardwareClassSpec | Finding) -> Finding:
    """The condition Accepted: the spec is valid and allowed, and what it names exists."""
    spec = endpoint.spec
    if isinstance(hardware, Finding):
        return hardware
    allowed = hardware.allowed_namespaces
    if allowed is not None and not allowed.includes(observed.namespace_labels):
        return no(
            Reason.HARDWARE_CLASS_NOT_ALLOWED,
            f"The HardwareClass {spec.hardware_class} is not for the namespace {endpoint.namespace}: its "
            "allowedNamespaces does not select the labels of the namespace. Write another class in "
            "spec.hardwareClass, or ask an administrator of the cluster to add the namespace.",
        )
    wrong = hardware.objection_to_cores(spec.cores)
    if wrong is not None:
        return no(Reason.INVALID_CORES, sentence(str(wrong)))
    if hardware.neuron is not None and spec.task is TaskName.TEXT_GENERATION:
        return no(
            Reason.TASK_NOT_SUPPORTED,
            f"The HardwareClass {spec.hardware_class} has Inferentia devices, and Penstock compiles encoders for them, "
            "no models that generate text. Write a class of CPUs in spec.hardwareClass.",
        )
    refused = refusal(spec, observed.settings.allowed, observed.namespace_labels) or refused_store(
        spec.source, observed.settings
    )
    if refused is not None:
        return refused
    pins = spec.optimization.artefact
    shared = observed.settings.allowed.shared_artefacts
    pinned_digits = short_digest(str(pins))
    pinned = pinned_model(spec, observed.optimized_models)
    target = hardware.target
    if pins is not None and not shared and pinned is None:
        return no(
            Reason.ARTEFACT_NOT_ALLOWED,
            f"No OptimizedModel of the namespace {endpoint.namespace} has the artefact {pinned_digits} that "
            "optimization.artefact names. Write a digest from the status of an OptimizedModel of this namespace "
            "(kubectl get optimizedmodels -o yaml), or mode: Auto; or ask the cluster's administrator to allow "
            "artefacts that were made elsewhere (policy.sharedArtefacts of the chart).",
        )
    if pinned is not None and target_of(pinned) is not target:
        return no(
            Reason.ARTEFACT_NOT_FOR_CLASS,
            f"The artefact {pinned_digits} that optimization.artefact names is for {_devices(target_of(pinned))}, "
            f"and the HardwareClass {spec.hardware_class} has {_devices(target)}. Write a class that fits in "
            "spec.hardwareClass, or mode: Auto in optimization.",
        )
    if pinned is not None and is_of_later_release(pinned):
        return no(
            Reason.ARTEFACT_NOT_FOR_VERSION,
            f"A later version of Penstock made the artefact {pinned_digits} that optimization.artefact names, and "
            "this version does not read its format. Write mode: Auto in optimization, or upgrade Penstock.",
        )
    taken = _taken_names(endpoint, observed.conflicting)
    if taken:
        objects = " and ".join(f"a {ref.kind} named {ref.name}" for ref in taken)
        return no(
            Reason.NAME_TAKEN,
            f"There is {objects} in this namespace that was not made for this endpoint, and it is left alone. Delete "
            "it, or give the endpoint another name.",
        )
    source = spec.workload.texts_from
    if source is not None and observed.workload_texts is None:
        return no(
            Reason.TEXTS_NOT_FOUND,
            f"workload.textsFrom names the key {source.key} of the ConfigMap {source.config_map_name}, which is not "
            "in this namespace. Create it with one text on each line, or remove textsFrom.",
        )
    if source is not None and not observed.workload_texts:
        return no(
            Reason.TEXTS_EMPTY,
            f"The key {source.key} of the ConfigMap {source.config_map_name} holds no text. Write one on each line, "
            "or remove textsFrom.",
        )
    return yes(Reason.VALID, f"The spec is valid, and the hardware class {spec.hardware_class} exists.")


def _devices(target: NeuronGeneration | None) -> str:
    return "CPUs" if target is None else f"devices of {target.value}"


def _taken_names(endpoint: ParsedEndpoint, conflicting: Iterable[Ref]) -> list[Ref]:
    """Objects with the names of the operator's own that it did not create."""
    ours = {endpoint.name, gateway_name(endpoint.name), pods_service_name(endpoint.name)}
    ours.add(gateway_binding_name(endpoint.name))
    return sorted(ref for ref in conflicting if ref.kind in NAMED_KINDS and ref.name in ours)
