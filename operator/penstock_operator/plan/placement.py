"""Whether a pod of a hardware class finds a node, and if not, which label, taint or resource is missing where.

Decides as the scheduler's filters do (node affinity, taints, resources); what the scheduler weighs beyond that, such as
spreading, is its own business. Pure: the operator hands in what it knows of the nodes, and puts the words into a
condition. That the scheduler decides alike is tested with the real one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any, Self

from penstock.resources.hardware_class import (
    NEURON_RESOURCES,
    HardwareClassSpec,
    LabelRequirement,
    NodeTerm,
    SelectorOperator,
)
from penstock.resources.pod import Pod, TaintEffect, Toleration, TolerationOperator
from penstock.resources.text_fields import parse_quantity
from penstock_operator.plan.placement_message import explanation

ARCHITECTURE = "kubernetes.io/arch"
UNSCHEDULABLE = "node.kubernetes.io/unschedulable"
_NEVER_MIND = TaintEffect.PREFER_NO_SCHEDULE.value


@dataclass(frozen=True)
class Taint:
    """A taint of a node."""

    key: str
    effect: str
    value: str = ""

    def __str__(self) -> str:
        return f"{self.key}{f'={self.value}' if self.value else ''}:{self.effect}"


@dataclass(frozen=True)
class Node:
    """A node, as far as a scheduler looks at it. Amounts are CPUs, bytes, pieces."""

    name: str
    labels: Mapping[str, str] = field(default_factory=dict)
    taints: tuple[Taint, ...] = ()
    allocatable: Mapping[str, Fraction] = field(default_factory=dict)
    requested: Mapping[str, Fraction] = field(default_factory=dict)
    """What the pods on it ask for together; empty: nobody knows, and the node counts as free."""
    cordoned: bool = False
    ready: bool = True

    @classmethod
    def from_object(cls, value: Mapping[str, Any], *, requested: Mapping[str, Fraction] | None = None) -> Self:
        """From a Node of the API server. Quantities that nobody can read count as nothing."""
        metadata, spec, status = value.get("metadata") or {}, value.get("spec") or {}, value.get("status") or {}
        conditions = {entry.get("type"): entry.get("status") for entry in status.get("conditions") or []}
        return cls(
            name=str(metadata.get("name", "")),
            labels=dict(metadata.get("labels") or {}),
            taints=tuple(
                Taint(key=taint.get("key", ""), effect=taint.get("effect", ""), value=taint.get("value") or "")
                for taint in spec.get("taints") or []
            ),
            allocatable={name: _amount(amount) for name, amount in (status.get("allocatable") or {}).items()},
            requested=dict(requested or {}),
            cordoned=bool(spec.get("unschedulable")),
            ready=conditions.get("Ready", "True") == "True",
        )

    def free(self, resource: str) -> Fraction:
        """What is left of a resource; below 0 where more was promised than is there now."""
        return self.allocatable.get(resource, Fraction(0)) - self.requested.get(resource, Fraction(0))


@dataclass(frozen=True)
class Needs:
    """What a pod asks of its node."""

    hardware_class: str
    terms: tuple[NodeTerm, ...] = ()
    """The class's: one of them has to hold; none: every node will do."""
    labels: Mapping[str, str] = field(default_factory=dict)
    """What the architecture and the endpoint's own nodeSelector add."""
    tolerations: tuple[Toleration, ...] = ()
    requests: Mapping[str, Fraction] = field(default_factory=dict)

    @classmethod
    def of(cls, name: str, hardware: HardwareClassSpec, pod: Pod, *, cores: int, memory_bytes: int = 0) -> Self:
        """What a pod of an endpoint asks for on this class; SpecError when Neuron devices would not be whole."""
        requests = {resource: Fraction(amount) for resource, amount in hardware.requests(cores).items()}
        architecture = {} if hardware.architecture is None else {ARCHITECTURE: hardware.architecture.value}
        return cls(
            hardware_class=name,
            terms=hardware.node_selector_terms,
            labels={**architecture, **pod.node_selector},
            tolerations=(*hardware.tolerations, *pod.tolerations),
            requests={**requests, "memory": Fraction(memory_bytes)},
        )


@dataclass(frozen=True)
class Miss:
    """Why one node does not take the pod: the first reason in the order of `Stage`."""

    node: str
    stage: str
    detail: str
    """What tells reasons of one stage apart: the label, the taint, the resource."""
    amount: Fraction = Fraction(0)
    """What the node has of a resource that is too scarce."""


@dataclass(frozen=True)
class Placement:
    """The verdict."""

    nodes: tuple[str, ...]
    """Names of the nodes that take the pod now."""
    explanation: str
    """What is missing, and what to do; empty when there are nodes."""
    misses: tuple[Miss, ...] = ()

    @property
    def placeable(self) -> bool:
        """True when there is a node for the pod."""
        return bool(self.nodes)


def place(needs: Needs, nodes: Iterable[Node]) -> Placement:
    """The nodes that take such a pod, or why none does."""
    fitting: list[str] = []
    misses: list[Miss] = []
    for node in nodes:
        miss = missed(needs, node)
        if miss is None:
            fitting.append(node.name)
        else:
            misses.append(miss)
    words = "" if fitting else explanation(needs, misses)
    return Placement(tuple(fitting), words, tuple(misses))


def missed(needs: Needs, node: Node) -> Miss | None:
    """Why this node does not take the pod; None when it does."""
    outside = _outside(needs.terms, node.labels)
    if outside is not None:
        return Miss(node.name, "class", outside)
    for key, value in sorted(needs.labels.items()):
        if node.labels.get(key) != value:
            return Miss(node.name, "selector", f"{key}={value}")
    for resource in sorted(needs.requests, key=lambda name: name not in NEURON_RESOURCES):
        wanted = needs.requests[resource]
        if wanted > 0 and "/" in resource and not node.allocatable.get(resource):
            return Miss(node.name, "advertised", resource)
    return _closed(needs, node) or _scarce(needs, node)


def tolerated(taint: Taint, tolerations: Sequence[Toleration]) -> bool:
    """True when one of these puts up with the taint."""
    return any(_tolerates(toleration, taint) for toleration in tolerations)


def fulfilled(requirement: LabelRequirement, labels: Mapping[str, str]) -> bool:
    """True when a node with these labels fulfils the condition, as node affinity has it."""
    value = labels.get(requirement.key)
    match requirement.operator:
        case SelectorOperator.EXISTS:
            return value is not None
        case SelectorOperator.DOES_NOT_EXIST:
            return value is None
        case SelectorOperator.IN:
            return value in requirement.values
        case SelectorOperator.NOT_IN:
            return value not in requirement.values
    number, bound = _integer(value), _integer(requirement.values[0])
    if number is None or bound is None:
        return False
    return number > bound if requirement.operator is SelectorOperator.GREATER else number < bound


def _outside(terms: Sequence[NodeTerm], labels: Mapping[str, str]) -> str | None:
    """None when one of the terms holds; else what is missing of the one that is nearest, empty when none is near."""
    if not terms:
        return None
    nearest: tuple[int, str] = (0, "")
    for term in terms:
        broken = [one for one in term.match_expressions if not fulfilled(one, labels)]
        if not broken:
            return None
        kept = sum(one.key in labels and fulfilled(one, labels) for one in term.match_expressions)
        has = labels.get(broken[0].key)
        # A label with another value says more than one that is not there.
        near = kept * 2 + (has is not None and kept > 0)
        if near > nearest[0]:
            nearest = (near, f"{broken[0].key}={has}" if has is not None else f"no {broken[0].key}")
    return nearest[1]


def _closed(needs: Needs, node: Node) -> Miss | None:
    if node.cordoned and not tolerated(Taint(UNSCHEDULABLE, "NoSchedule"), needs.tolerations):
        return Miss(node.name, "cordoned", "")
    if not node.ready:
        return Miss(node.name, "not ready", "")
    for taint in node.taints:
        if taint.effect != _NEVER_MIND and not tolerated(taint, needs.tolerations):
            return Miss(node.name, "taint", str(taint))
    return None


def _scarce(needs: Needs, node: Node) -> Miss | None:
    wanted = {name: amount for name, amount in needs.requests.items() if amount > 0}
    for resource, amount in wanted.items():
        whole = node.allocatable.get(resource, Fraction(0))
        if whole < amount:
            return Miss(node.name, "too small", resource, whole)
    if "pods" in node.allocatable:
        wanted["pods"] = Fraction(1)
    for resource, amount in wanted.items():
        if node.free(resource) < amount:
            return Miss(node.name, "full", resource, node.free(resource))
    return None


def _tolerates(toleration: Toleration, taint: Taint) -> bool:
    if toleration.effect is not None and toleration.effect.value != taint.effect:
        return False
    if toleration.key is not None and toleration.key != taint.key:
        return False
    return toleration.operator is TolerationOperator.EXISTS or (toleration.value or "") == taint.value


def _integer(text: str | None) -> int | None:
    """As the scheduler reads it: a whole number of 64 bits, or nothing."""
    try:
        number = int(text or "", 10)
    except ValueError:
        return None
    plain = text is not None and text.isascii() and "_" not in text and text.strip() == text
    return number if plain and -(2**63) <= number < 2**63 else None


def _amount(quantity: object) -> Fraction:
    try:
        return parse_quantity(str(quantity))
    except ValueError:
        return Fraction(0)
