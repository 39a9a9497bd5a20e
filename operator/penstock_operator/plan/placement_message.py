"""Why no node takes a pod, in words: what was wanted, what the nodes have instead, what to do."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import TYPE_CHECKING

from penstock.resources.hardware_class import NEURON_RESOURCES, LabelRequirement, NodeTerm, SelectorOperator
from penstock.resources.text_fields import written

if TYPE_CHECKING:
    from penstock_operator.plan.placement import Miss, Needs

STAGES = ("class", "selector", "advertised", "cordoned", "not ready", "taint", "too small", "full")
"""In the order in which a node is looked at: the further it got, the nearer it was."""
_SHOWN_NAMES, _SHOWN_VALUES, _SHOWN_TERMS, _SHOWN_GROUPS = 3, 3, 2, 6


def explanation(needs: Needs, misses: Sequence[Miss]) -> str:
    """One sentence on what is missing, one on each kind of node that was looked at."""
    if not misses:
        return (
            f"hardwareClass {needs.hardware_class} finds no node, for the cluster has none that the operator sees: "
            "add nodes, or wait until the autoscaler of the cluster does"
        )
    best = max(misses, key=lambda miss: STAGES.index(miss.stage))
    looked = f"{_count(len(misses), 'node')} looked at: {_groups(misses, needs)}"
    return f"{_headline(needs, best, misses)}; {looked}"


def _headline(needs: Needs, best: Miss, misses: Sequence[Miss]) -> str:
    name = needs.hardware_class
    devices = sorted(resource for resource in needs.requests if "/" in resource)
    if best.stage == "class":
        if devices:
            return (
                f"no node offers {devices[0]}: hardwareClass {name} wants {_wanted(needs.terms)}{_plugin(devices[0])}"
            )
        return f"no node belongs to hardwareClass {name}: it wants {_wanted(needs.terms)}"
    if best.stage == "selector":
        return (
            f"no node has {best.detail}: hardwareClass {name} or spec.pod.nodeSelector asks for it. "
            "Label the nodes, or change nodeSelector"
        )
    if best.stage == "advertised":
        wanted = f"wants {_wanted(needs.terms)}{_plugin(best.detail)}" if needs.terms else "asks for it"
        return f"no node offers {best.detail}: hardwareClass {name} {wanted}"
    if best.stage == "cordoned":
        return f"every node of hardwareClass {name} that could take the pod is cordoned: kubectl uncordon one of them"
    if best.stage == "not ready":
        return f"no node of hardwareClass {name} is ready: look at it with kubectl describe node"
    if best.stage == "taint":
        return (
            f"the nodes of hardwareClass {name} have taints that the pod does not tolerate: add a toleration of "
            f"{best.detail} to spec.pod.tolerations or to the class, or remove the taint"
        )
    return _scarcity(needs, best, misses)


def _scarcity(needs: Needs, best: Miss, misses: Sequence[Miss]) -> str:
    resource, name = best.detail, needs.hardware_class
    wanted = _amount(needs.requests.get(resource, Fraction(1)), resource)
    most = max((miss for miss in misses if miss.stage == best.stage and miss.detail == resource), key=_has)
    amount = f"{_amount(max(most.amount, Fraction(0)), resource)} ({most.node})"
    if best.stage == "too small":
        lower = {"cpu": "spec.cores", "memory": "spec.pod.memory"}.get(resource, "spec.cores")
        return (
            f"no node of hardwareClass {name} is large enough: {wanted} are wanted, and the largest has {amount} for "
            f"pods. Lower {lower}, or add larger nodes"
        )
    return (
        f"the nodes of hardwareClass {name} are full: {wanted} are wanted, and the most that is free is {amount}. "
        "Add nodes, or lower replicas or cores of what runs there"
    )


def _has(miss: Miss) -> Fraction:
    return miss.amount


def _groups(misses: Sequence[Miss], needs: Needs) -> str:
    groups: dict[tuple[str, str], list[Miss]] = defaultdict(list)
    for miss in misses:
        groups[miss.stage, miss.detail].append(miss)
    order = sorted(groups, key=lambda key: (STAGES.index(key[0]), -len(groups[key]), key[1]))
    told = [_group(key, groups[key], needs) for key in order[:_SHOWN_GROUPS]]
    if len(order) > _SHOWN_GROUPS:
        told.append(f"{sum(len(groups[key]) for key in order[_SHOWN_GROUPS:])} for other reasons")
    return ", ".join(told)


def _group(key: tuple[str, str], misses: Sequence[Miss], needs: Needs) -> str:
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
    most = _amount(max(Fraction(0), *map(_has, misses)), detail)
    if stage == "too small":
        return f"{who} {'has' if one else 'have'} at most {most}"
    return f"{who} {'has' if one else 'have'} at most {most} free"


def _instead(detail: str, needs: Needs) -> str:
    """Of a node that is near to the class: the label that keeps it out, and what it should be."""
    key = detail.removeprefix("no ").partition("=")[0]
    wanted = next(
        (requirement for term in needs.terms for requirement in term.match_expressions if requirement.key == key),
        None,
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


def _amount(amount: Fraction, resource: str) -> str:
    words = written(amount, resource)
    unit: Mapping[str, str] = {"cpu": "CPUs", "memory": "of memory", "pods": "pods"}
    return f"{words} {unit.get(resource, resource)}"


def _names(misses: Sequence[Miss]) -> str:
    names = sorted(miss.node for miss in misses)
    shown = ", ".join(names[:_SHOWN_NAMES])
    return f"{shown} and {len(names) - _SHOWN_NAMES} more" if len(names) > _SHOWN_NAMES else shown


def _count(count: int, noun: str) -> str:
    return f"1 {noun} was" if count == 1 else f"{count} {noun}s were"
