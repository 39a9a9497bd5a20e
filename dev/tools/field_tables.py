"""Generates tables of the documents from the resource types: fields, hardware classes, conditions."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
import types
import typing
from collections.abc import Iterable, Iterator
from enum import StrEnum
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from penstock.resources.conditions import ConditionType
from penstock.resources.endpoint import ModelEndpointSpec
from penstock.resources.hardware_class import HardwareClassSpec, NodeTerm
from penstock.resources.optimized_model import OptimizedModelSpec, OptimizedModelStatus
from penstock.resources.shipped_classes import (
    GKE_FAMILY,
    HARDWARE_CLASSES,
    INSTANCE_TYPE,
    KARPENTER_FAMILY,
    NEURON_PRESENT,
    NFD,
)
from penstock.resources.status import EndpointStatus

_AZURE_SIZE = re.compile(r"^(Standard_[A-Z])\d+(.*)$")
_WORDS = {"str": "string", "int": "integer", "float": "number", "bool": "boolean"}


def fields(model: type[BaseModel], *, where: bool = False) -> str:
    """A row for every field of a type and below it. `where`: mark those that a local run ignores."""
    heads = ["field", "type", "default", "meaning"]
    rows = [heads, ["---"] * len(heads), *_rows(model, "", where=where, cluster=False)]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def facts(model: type[BaseModel]) -> str:
    """A row for every field of a status, which has no defaults that matter."""
    rows = [["field", "type", "meaning"], ["---"] * 3]
    rows += [[path, kind, meaning] for path, kind, _, meaning in _rows(model, "", where=False, cluster=False)]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def conditions() -> str:
    """A row for every condition of an endpoint."""
    meanings = _documented(ConditionType)
    rows = [f"| `{one.value}` | {meanings[one.name]} |" for one in ConditionType]
    return "\n".join(["| condition | true when |", "|---|---|", *rows])


def hardware_classes() -> str:
    """A row for every class that the chart installs."""
    rows = ["| class | nodes | instruction set | CPUs a core |", "|---|---|---|---|"]
    for name, spec in HARDWARE_CLASSES.items():
        isa = f"`{spec.isa.value}`" if spec.isa else "any"
        threads = f"{spec.threads_per_core}"
        if spec.neuron is not None:
            isa = f"{spec.neuron.cores_per_device} NeuronCores a device"
            threads = f"{spec.neuron.host_cpus_per_device} a device"
        rows.append(f"| `{name}` | {spec.description} | {isa} | {threads} |")
    return "\n".join(rows)


def hardware_labels() -> str:
    """A row for every way in which nodes belong to a class."""
    rows = ["| class | where | labels |", "|---|---|---|"]
    for name, spec in HARDWARE_CLASSES.items():
        rows += [f"| `{name}` | {_place(term)} | {_labels(term)} |" for term in spec.node_selector_terms]
    return "\n".join(rows)


def _place(term: NodeTerm) -> str:
    first = term.match_expressions[0]
    if first.key == INSTANCE_TYPE:
        return "AKS" if first.values[0].startswith("Standard_") else "EKS"
    if first.key == KARPENTER_FAMILY:
        return "EKS with Karpenter"
    if first.key == NEURON_PRESENT:
        return "EKS with Karpenter and the Neuron device plugin"
    if first.key == GKE_FAMILY:
        return "GKE"
    return "any, with NFD" if first.key.startswith(NFD) else "any"


def _labels(term: NodeTerm) -> str:
    return ", ".join(_label(one.key, one.operator.value, one.values) for one in term.match_expressions)


def _label(key: str, operator: str, values: tuple[str, ...]) -> str:
    short = key.replace(f"{NFD}/", "…/")
    if operator == "Exists":
        return f"`{short}`"
    if operator == "DoesNotExist":
        return f"no `{short}`"
    return f"`{short}`: {_families(values)}"


def _families(values: Iterable[str]) -> str:
    """Instance types of a family as one, when there are many: `c6i.*`, `Standard_D*s_v6`."""
    listed = list(values)
    if len(listed) > 8 and all(value.isdigit() for value in listed):
        return f"`{listed[0]}` to `{listed[-1]}`, {len(listed)} of them"
    if len(listed) > 8 and any(mark in listed[0] for mark in (".", "_")):
        listed = list(dict.fromkeys(_AZURE_SIZE.sub(r"\1*\2", value.split(".")[0]) for value in listed))
        listed = [value if "*" in value else f"{value}.*" for value in listed]
    return ", ".join(f"`{value}`" for value in listed)


def _documented(enumeration: type[StrEnum]) -> dict[str, str]:
    """Member -> the text below it in the source."""
    (definition,) = ast.parse(textwrap.dedent(inspect.getsource(enumeration))).body
    assert isinstance(definition, ast.ClassDef)  # noqa: S101 - the source of a class
    found = {}
    for statement, following in zip(definition.body, definition.body[1:], strict=False):
        if isinstance(statement, ast.Assign) and isinstance(following, ast.Expr):
            name = statement.targets[0]
            text = following.value
            if isinstance(name, ast.Name) and isinstance(text, ast.Constant):
                found[name.id] = str(text.value)
    return found


def _rows(model: type[BaseModel], prefix: str, *, where: bool, cluster: bool) -> Iterator[list[str]]:
    for name, field in model.model_fields.items():
        path = f"{prefix}{field.alias or name}"
        nested, entry = _nested(field.annotation)
        meaning = " ".join((field.description or _own_words(field.annotation) or "").split())
        extra = field.json_schema_extra
        only = isinstance(extra, dict) and bool(extra.get("x-cluster-only"))
        mark = " *Cluster only.*" if where and only and not cluster else ""
        yield [f"`{path}`", _type(field.annotation), _default(field), f"{meaning}{mark}".replace("|", "\\|")]
        if nested is not None:
            yield from _rows(nested, f"{path}{entry}.", where=where, cluster=cluster or only)


def _members(annotation: Any) -> tuple[Any, ...]:
    """The alternatives of a union less None; else the annotation alone."""
    if typing.get_origin(annotation) is typing.Annotated:
        annotation = typing.get_args(annotation)[0]
    if typing.get_origin(annotation) in {typing.Union, types.UnionType}:
        return tuple(member for member in typing.get_args(annotation) if member is not type(None))
    return (annotation,)


def _nested(annotation: Any) -> tuple[type[BaseModel] | None, str]:
    """The model type of a field, and what is between its path and theirs: of lists `[]`, of maps `.<key>`."""
    for member in _members(annotation):
        if typing.get_origin(member) is tuple:
            return _nested(typing.get_args(member)[0])[0], "[]"
        if typing.get_origin(member) is dict:
            return _nested(typing.get_args(member)[1])[0], ".<key>"
        if isinstance(member, type) and issubclass(member, BaseModel):
            return member, ""
    return None, ""


def _own_words(annotation: Any) -> str | None:
    """The description of a field's type, for a field without one."""
    member = _members(annotation)[0]
    ours = isinstance(member, type) and issubclass(member, BaseModel | StrEnum)
    return member.__doc__ if ours else None


def _type(annotation: Any) -> str:
    names = []
    for member in _members(annotation):
        origin, arguments = typing.get_origin(member), typing.get_args(member)
        if origin is typing.Annotated:
            names.append(_type(arguments[0]))
        elif origin is tuple:
            names.append(f"list of {_type(arguments[0])}")
        elif origin is dict:
            names.append(f"map of {_type(arguments[1])}")
        elif origin is typing.Literal:
            names.append(", ".join(f"`{choice}`" for choice in arguments))
        elif isinstance(member, type) and issubclass(member, StrEnum):
            names.append(", ".join(f"`{choice.value}`" for choice in member))
        elif isinstance(member, type) and issubclass(member, BaseModel):
            names.append("object")
        else:
            names.append(_WORDS[getattr(member, "__name__", str(member))])
    return " or ".join(names)


def _default(field: FieldInfo) -> str:
    if field.default_factory is not None:
        return "(none)"
    value = field.default
    if value is PydanticUndefined:
        return "(required)"
    if isinstance(value, BaseModel):
        return ""
    if isinstance(value, StrEnum):
        return f"`{value.value}`"
    if isinstance(value, tuple):
        return "all" if value and all(isinstance(part, StrEnum) for part in value) else "(none)"
    if value is None or value == "":
        return "(none)"
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


PARTS = {
    "endpoint-fields": ("docs/reference/model-endpoint.md", lambda: fields(ModelEndpointSpec, where=True)),
    "endpoint-status": ("docs/reference/model-endpoint.md", lambda: facts(EndpointStatus)),
    "conditions": ("docs/reference/model-endpoint.md", conditions),
    "hardware-classes": ("docs/reference/hardware-classes.md", hardware_classes),
    "hardware-labels": ("docs/reference/hardware-classes.md", hardware_labels),
    "hardware-class-fields": ("docs/reference/hardware-classes.md", lambda: fields(HardwareClassSpec)),
    "optimized-model-fields": ("docs/reference/optimized-model.md", lambda: fields(OptimizedModelSpec)),
    "optimized-model-status": ("docs/reference/optimized-model.md", lambda: facts(OptimizedModelStatus)),
}
"""Name of the part -> document and the function that makes it."""
