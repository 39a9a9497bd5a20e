"""Finds the nodes for a pod of a hardware class, and explains which label, taint or resource is missing if there are
none.

Decides like the scheduler's filters (node affinity, taints, resources); spreading and scoring are not considered. A
test compares it with the real scheduler.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any, Self

from penstock.prices import instance_price
from penstock.resources.endpoint_parts.pod import Pod
from penstock.resources.fields.text_fields import parse_quantity, written
from penstock.resources.hardware_class import (
    HardwareClassSpec,
    LabelRequirement,
    NodeTerm,
    Price,
    SelectorOperator,
    TaintEffect,
    Toleration,
    TolerationOperator,
)
from penstock.resources.processors import NEURON_RESOURCES
from penstock.resources.shipped_classes import ARCHITECTURE, INSTANCE_TYPE, fulfilled
from penstock_operator.endpoint.pods.template import DISK, requested_disk
from penstock_operator.facts.names import Json

SERVING_DISK, JOB_DISK = "jobs.servingDisk", "jobs.disk"
UNSCHEDULABLE = "node.kubernetes.io/unschedulable"
_PREFERENCE_ONLY = TaintEffect.PREFER_NO_SCHEDULE.value


@dataclass(frozen=True)
class Taint:
    """A taint of a node."""

    key: str
    effect: str
    value: str = ""

    def __str__(self) -> str:
        return f"{self.key}{f'={self.value}' if self.value else ''}:{self.effect}"


@dataclass(frozen=True)
class NodeFacts:
    """A node as the scheduler's filters see it. Amounts are CPUs, bytes or pieces."""

    name: str
    labels: Mapping[str, str] = field(default_factory=dict)
    taints: tuple[Taint, ...] = ()
    allocatable: Mapping[str, Fraction] = field(default_factory=dict)
    requested: Mapping[str, Fraction] = field(default_factory=dict)
    """Sum of the requests of the pods on it; empty: not known, and the node counts as free."""
    cordoned: bool = False
    ready: bool = True

    @classmethod
    def from_object(cls, value: Mapping[str, Any], *, requested: Mapping[str, Fraction] | None = None) -> Self:
        """Extract the facts of a Node object. Quantities that cannot be parsed count as 0."""
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
        """The unrequested amount of a resource; negative when more is requested than allocatable."""
        return self.allocatable.get(resource, Fraction(0)) - self.requested.get(resource, Fraction(0))


@dataclass(frozen=True)
class PodRequirements:
    """The requirements of a pod on its node."""

    hardware_class: str
    terms: tuple[NodeTerm, ...] = ()
    """The class's node selector terms: one of them must hold; none: every node matches."""
    labels: Mapping[str, str] = field(default_factory=dict)
    """Required by the architecture and by the endpoint's own nodeSelector."""
    tolerations: tuple[Toleration, ...] = ()
    requests: Mapping[str, Fraction] = field(default_factory=dict)
    compiles: bool = False
    """It is a job that compiles for the class, on nodes without devices."""
    disk_setting: str = SERVING_DISK
    """The value of the chart that the request of disk comes from."""

    @property
    def whose(self) -> str:
        """For messages: the class, or its compile job."""
        return f"{'compile jobs of ' if self.compiles else ''}hardwareClass {self.hardware_class}"

    @classmethod
    def of(
        cls,
        name: str,
        hardware: HardwareClassSpec,
        pod: Pod,
        *,
        cores: int,
        memory_bytes: int = 0,
        disk_bytes: int = 0,
    ) -> Self:
        """The requirements of an endpoint's pod on this class; SpecError when the Neuron devices would not be whole.

        `disk_bytes`: the limit of its scratch volumes.
        """
        requests = {resource: Fraction(amount) for resource, amount in hardware.requests(cores).items()}
        architecture = {} if hardware.architecture is None else {ARCHITECTURE: hardware.architecture.value}
        return cls(
            hardware_class=name,
            terms=hardware.node_selector_terms,
            labels={**architecture, **pod.node_selector},
            tolerations=(*hardware.tolerations, *pod.tolerations),
            requests={**requests, "memory": Fraction(memory_bytes), DISK: Fraction(requested_disk(disk_bytes))},
        )


@dataclass(frozen=True)
class NodeMismatch:
    """Why a node does not take the pod: the first reason in the order of `STAGES`."""

    node: str
    stage: str
    detail: str
    """The label, taint or resource."""
    amount: Fraction = Fraction(0)
    """The node's amount of a resource that is too small."""


@dataclass(frozen=True)
class PlacementResult:
    """The nodes for a pod, or why there are none."""

    nodes: tuple[str, ...]
    """Names of the nodes that take the pod now."""
    explanation: str
    """The missing label, taint or resource, and the remedy; empty when there are nodes."""
    misses: tuple[NodeMismatch, ...] = ()

    @property
    def placeable(self) -> bool:
        """Whether a node takes the pod."""
        return bool(self.nodes)


def place(needs: PodRequirements, nodes: Iterable[NodeFacts]) -> PlacementResult:
    """The nodes that take such a pod, or why none does."""
    fitting: list[str] = []
    misses: list[NodeMismatch] = []
    for node in nodes:
        miss = mismatch(needs, node)
        if miss is None:
            fitting.append(node.name)
        else:
            misses.append(miss)
    words = "" if fitting else explanation(needs, misses)
    return PlacementResult(tuple(fitting), words, tuple(misses))


def mismatch(needs: PodRequirements, node: NodeFacts) -> NodeMismatch | None:
    """Why this node does not take the pod; None when it does."""
    outside = _outside(needs.terms, node.labels)
    if outside is not None:
        return NodeMismatch(node.name, "class", outside)
    for key, value in sorted(needs.labels.items()):
        if node.labels.get(key) != value:
            return NodeMismatch(node.name, "selector", f"{key}={value}")
    for resource in sorted(needs.requests, key=lambda name: name not in NEURON_RESOURCES):
        wanted = needs.requests[resource]
        if wanted > 0 and "/" in resource and not node.allocatable.get(resource):
            return NodeMismatch(node.name, "advertised", resource)
    return _closed(needs, node) or _scarce(needs, node)


NODE_RESERVE = 1
"""Physical cores of each node that no replica gets, as in `penstock plan`."""


def price_of_nodes(hardware: HardwareClassSpec, nodes: Iterable[Mapping[str, Any]]) -> Price | None:
    """The on-demand price of a core of the dearest of the class's nodes, by their instance types in the shipped lists;
    None if none of them has a known type."""
    found: list[tuple[float, str]] = []
    for value in nodes:
        labels = (value.get("metadata") or {}).get("labels") or {}
        known = instance_price(str(labels.get(INSTANCE_TYPE, "")))
        if known is None or _outside(hardware.node_selector_terms, labels) is not None:
            continue
        prices, node = known
        cores = node.cpus // hardware.threads_per_core - NODE_RESERVE
        if hardware.neuron is not None:
            cores = node.devices * hardware.neuron.cores_per_device
        if cores > 0:
            found.append((node.per_hour / cores, prices.currency))
    if not found:
        return None
    per_core, currency = max(found)
    return Price(per_core_hour=per_core, currency=currency)


def tolerated(taint: Taint, tolerations: Sequence[Toleration]) -> bool:
    """Whether one of these tolerations tolerates the taint."""
    return any(_tolerates(toleration, taint) for toleration in tolerations)


def _outside(terms: Sequence[NodeTerm], labels: Mapping[str, str]) -> str | None:
    """None when one of the terms holds; else the missing part of the nearest term, empty when none is near."""
    if not terms:
        return None
    nearest: tuple[int, str] = (0, "")
    for term in terms:
        broken = [one for one in term.match_expressions if not fulfilled(one, labels)]
        if not broken:
            return None
        kept = sum(one.key in labels and fulfilled(one, labels) for one in term.match_expressions)
        has = labels.get(broken[0].key)
        # A label with another value is more specific than a missing label.
        near = kept * 2 + (has is not None and kept > 0)
        if near > nearest[0]:
            nearest = (near, f"{broken[0].key}={has}" if has is not None else f"no {broken[0].key}")
    return nearest[1]


def _closed(needs: PodRequirements, node: NodeFacts) -> NodeMismatch | None:
    if node.cordoned and not tolerated(Taint(UNSCHEDULABLE, "NoSchedule"), needs.tolerations):
        return NodeMismatch(node.name, "cordoned", "")
    if not node.ready:
        return NodeMismatch(node.name, "not ready", "")
    for taint in node.taints:
        if taint.effect != _PREFERENCE_ONLY and not tolerated(taint, needs.tolerations):
            return NodeMismatch(node.name, "taint", str(taint))
    return None


def _scarce(needs: PodRequirements, node: NodeFacts) -> NodeMismatch | None:
    wanted = {name: amount for name, amount in needs.requests.items() if amount > 0}
    for resource, amount in wanted.items():
        whole = node.allocatable.get(resource, Fraction(0))
        if whole < amount:
            return NodeMismatch(node.name, "too small", resource, whole)
    if "pods" in node.allocatable:
        wanted["pods"] = Fraction(1)
    for resource, amount in wanted.items():
        if node.free(resource) < amount:
            return NodeMismatch(node.name, "full", resource, node.free(resource))
    return None


def _tolerates(toleration: Toleration, taint: Taint) -> bool:
    if toleration.effect is not None and toleration.effect.value != taint.effect:
        return False
    if toleration.key is not None and toleration.key != taint.key:
        return False
    return toleration.operator is TolerationOperator.EXISTS or (toleration.value or "") == taint.value


def _amount(quantity: object) -> Fraction:
    try:
        return parse_quantity(str(quantity))
    except ValueError:
        return Fraction(0)


STAGES = ("class", "selector", "advertised", "cordoned", "not ready", "taint", "too small", "full")
"""Order in which a node is checked: the further a node gets, the nearer it is."""
_SHOWN_NAMES, _SHOWN_VALUES, _SHOWN_TERMS, _SHOWN_GROUPS = 3, 3, 2, 6


def explanation(needs: PodRequirements, misses: Sequence[NodeMismatch]) -> str:
    """A clause on the missing label, taint or resource, and one for each kind of checked node."""
    if not misses:
        return (
            f"{needs.whose} finds no node, for the cluster has none that the operator sees: "
            "add nodes, or wait until the autoscaler of the cluster does"
        )
    best = max(misses, key=lambda miss: STAGES.index(miss.stage))
    looked = f"{_count(len(misses), 'node')} looked at: {_groups(misses, needs)}"
    return f"{_headline(needs, best, misses)}; {looked}"


def _headline(needs: PodRequirements, best: NodeMismatch, misses: Sequence[NodeMismatch]) -> str:
    whose = needs.whose
    devices = sorted(resource for resource in needs.requests if "/" in resource)
    if best.stage == "class":
        if devices:
            return f"no node offers {devices[0]}: {whose} wants {_wanted(needs.terms)}{_plugin(devices[0])}"
        return f"no node belongs to {whose}: it wants {_wanted(needs.terms)}"
    if best.stage == "selector":
        return (
            f"no node has {best.detail}: {whose} or spec.pod.nodeSelector asks for it. "
            "Label the nodes, or change nodeSelector"
        )
    if best.stage == "advertised":
        wanted = f"wants {_wanted(needs.terms)}{_plugin(best.detail)}" if needs.terms else "asks for it"
        return f"no node offers {best.detail}: {whose} {wanted}"
    if best.stage == "cordoned":
        return f"every node of {whose} that could take the pod is cordoned: kubectl uncordon one of them"
    if best.stage == "not ready":
        return f"no node of {whose} is ready: look at it with kubectl describe node"
    if best.stage == "taint":
        return (
            f"the nodes of {whose} have taints that the pod does not tolerate: add a toleration of "
            f"{best.detail} to spec.pod.tolerations or to the class, or remove the taint"
        )
    return _scarcity(needs, best, misses)


def _scarcity(needs: PodRequirements, best: NodeMismatch, misses: Sequence[NodeMismatch]) -> str:
    resource, whose = best.detail, needs.whose
    wanted = _amount_text(needs.requests.get(resource, Fraction(1)), resource)
    most = max((miss for miss in misses if miss.stage == best.stage and miss.detail == resource), key=_has)
    amount = f"{_amount_text(max(most.amount, Fraction(0)), resource)} ({most.node})"
    if best.stage == "too small":
        disk = f"{needs.disk_setting} of the chart, of which pods request an eighth"
        lower = {"cpu": "spec.cores", "memory": "spec.pod.memory", DISK: disk}.get(resource, "spec.cores")
        if needs.compiles and resource != DISK:
            lower = {"cpu": "inferentia.compileCpus", "memory": "inferentia.compileMemory"}.get(resource, lower)
            lower += " of the chart"
        return (
            f"no node of {whose} is large enough: {wanted} are wanted, and the largest has {amount} for "
            f"pods. Lower {lower}, or add larger nodes"
        )
    return (
        f"the nodes of {whose} are full: {wanted} are wanted, and the most that is free is {amount}. "
        "Add nodes, or lower replicas or cores of what runs there"
    )


def _has(miss: NodeMismatch) -> Fraction:
    return miss.amount


def _groups(misses: Sequence[NodeMismatch], needs: PodRequirements) -> str:
    groups: dict[tuple[str, str], list[NodeMismatch]] = defaultdict(list)
    for miss in misses:
        groups[miss.stage, miss.detail].append(miss)
    order = sorted(groups, key=lambda key: (STAGES.index(key[0]), -len(groups[key]), key[1]))
    groups_text = [_group(key, groups[key], needs) for key in order[:_SHOWN_GROUPS]]
    if len(order) > _SHOWN_GROUPS:
        groups_text.append(f"{sum(len(groups[key]) for key in order[_SHOWN_GROUPS:])} for other reasons")
    return ", ".join(groups_text)


def _group(key: tuple[str, str], misses: Sequence[NodeMismatch], needs: PodRequirements) -> str:
    stage, detail = key
    one = len(misses) == 1
    who = f"{len(misses)} ({_names(misses)})"
    if stage == "class" and not detail:
        labels = {requirement.key for term in needs.terms for requirement in term.match_expressions}
        return f"{len(misses)} {'lacks' if one else 'lack'} the label{'' if len(labels) == 1 else 's'}"
    if stage in {"class", "selector"}:
        return f"{who} {'has' if one else 'have'} {_instead(detail, needs) if stage == 'class' else f'not {detail}'}"
    if stage == "advertised":
        has = "has the labels but advertises" if one else "have the labels but advertise"
        if not needs.terms:
            has = "advertises" if one else "advertise"
        ask = ": is the device plugin running there?" if detail in NEURON_RESOURCES else ""
        return f"{who} {has} no {detail}{ask}"
    if stage == "taint":
        return f"{who} {'is' if one else 'are'} tainted {detail}"
    if stage in {"cordoned", "not ready"}:
        return f"{who} {'is' if one else 'are'} {stage}"
    most = _amount_text(max(Fraction(0), *map(_has, misses)), detail)
    if stage == "too small":
        return f"{who} {'has' if one else 'have'} at most {most}"
    return f"{who} {'has' if one else 'have'} at most {most} free"


def _instead(detail: str, needs: PodRequirements) -> str:
    """For a node that nearly matches the class: the label that excludes it, and the wanted value."""
    key = detail.removeprefix("no ").partition("=")[0]
    wanted = next(
        (requirement for term in needs.terms for requirement in term.match_expressions if requirement.key == key), None
    )
    return f"{detail} where {_requirement(wanted, with_key=False)} is wanted" if wanted is not None else detail


def _wanted(terms: Sequence[NodeTerm]) -> str:
    ways = [" and ".join(map(_requirement, term.match_expressions)) for term in terms[:_SHOWN_TERMS]]
    more = len(terms) - _SHOWN_TERMS
    others = (
        f" or in {more} other way{'s' if more > 1 else ''} that docs/reference/hardware-classes.md lists"
        if more > 0
        else ""
    )
    return f"nodes labelled {', or '.join(ways)}{others}"


def _requirement(requirement: LabelRequirement, *, with_key: bool = True) -> str:
    values = list(requirement.values[:_SHOWN_VALUES])
    if len(requirement.values) > _SHOWN_VALUES:
        values.append("…")
    key = f"{requirement.key} " if with_key else ""
    match requirement.operator:
        case SelectorOperator.IN if len(requirement.values) == 1:
            return f"{requirement.key}={values[0]}" if with_key else values[0]
        case SelectorOperator.IN:
            return f"{key}in ({', '.join(values)})"
        case SelectorOperator.NOT_IN:
            return f"{key}not in ({', '.join(values)})"
        case SelectorOperator.EXISTS:
            return requirement.key if with_key else "any value"
        case SelectorOperator.DOES_NOT_EXIST:
            return f"no {requirement.key}" if with_key else "no such label"
        case SelectorOperator.GREATER:
            return f"{key}over {values[0]}"
    return f"{key}under {values[0]}"


def _plugin(resource: str) -> str:
    return " with the Neuron device plugin" if resource in NEURON_RESOURCES else f" that advertise {resource}"


def _amount_text(amount: Fraction, resource: str) -> str:
    words = written(amount, resource)
    unit: Mapping[str, str] = {"cpu": "CPUs", "memory": "of memory", "pods": "pods", DISK: "of disk"}
    return f"{words} {unit.get(resource, resource)}"


def _names(misses: Sequence[NodeMismatch]) -> str:
    names = sorted(miss.node for miss in misses)
    shown = ", ".join(names[:_SHOWN_NAMES])
    return f"{shown} and {len(names) - _SHOWN_NAMES} more" if len(names) > _SHOWN_NAMES else shown


def _count(count: int, noun: str) -> str:
    return f"1 {noun} was" if count == 1 else f"{count} {noun}s were"


def missing_for(needs: PodRequirements, nodes: Sequence[Json]) -> str:
    """The reason why no node takes such a pod; empty when a node would take it if it were free, or when that is not
    known.

    Called only when the scheduler has reported no node: clusters have many nodes, and mostly they fit.
    """
    return place(needs, map(NodeFacts.from_object, nodes)).explanation if nodes else ""


def node_fields(value: Json) -> Json:
    """The fields of a node that plans need. Heartbeats and images are left out, so they cause no reconcile."""
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
