"""Whether a node belongs to a hardware class, by its labels. Not in the module of the class, which is read with each
endpoint."""

from __future__ import annotations

from collections.abc import Mapping

from penstock.resources.hardware_class import HardwareClassSpec, LabelRequirement, SelectorOperator

ARCHITECTURE = "kubernetes.io/arch"


def fulfilled(requirement: LabelRequirement, labels: Mapping[str, str]) -> bool:
    """Whether a node with these labels satisfies the requirement, by the rules of node affinity."""
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


def belongs(labels: Mapping[str, str], hardware: HardwareClassSpec) -> bool:
    """Whether a node with these labels belongs to the class."""
    if hardware.architecture is not None and labels.get(ARCHITECTURE) != hardware.architecture.value:
        return False
    terms = hardware.node_selector_terms
    return not terms or any(all(fulfilled(one, labels) for one in term.match_expressions) for term in terms)


def _integer(text: str | None) -> int | None:
    """An integer as the scheduler parses it: 64 bits; None for other text."""
    try:
        number = int(text or "", 10)
    except ValueError:
        return None
    plain = text is not None and text.isascii() and "_" not in text and text.strip() == text
    return number if plain and -(2**63) <= number < 2**63 else None
