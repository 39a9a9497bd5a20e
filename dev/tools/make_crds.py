"""Generates crds/ and the chart's hardware classes from the types in `penstock` (`make crds`).

A test fails when they are stale.

Structural OpenAPI schemas for the API server: no references, no `anyOf` with null, defaults only where the API server
fills them in, and the rules of the types as CEL.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel

from penstock.resources.base import API_VERSION, GROUP, VERSION, Resource
from penstock.resources.endpoint import ModelEndpoint, ModelEndpointSpec
from penstock.resources.fields.cel import VALIDATIONS
from penstock.resources.fields.rules import LABEL_RULE
from penstock.resources.hardware_class import HardwareClass, HardwareClassSpec
from penstock.resources.optimized_model import OptimizedModel, OptimizedModelSpec, OptimizedModelStatus
from penstock.resources.shipped_classes import HARDWARE_CLASSES
from penstock.resources.status import EndpointStatus

ROOT = Path(__file__).parents[2]
HEAD = "# Written by `make crds` from the types in penstock/: change those.\n"
_KEPT = (
    "type", "format", "description", "enum", "minimum", "maximum", "minLength", "maxLength", "pattern", "minItems",
    "maxItems", "minProperties", "maxProperties", "x-kubernetes-int-or-string", VALIDATIONS,
)  # fmt: skip
_IMMUTABLE = {
    "rule": "self == oldSelf",
    "message": "an OptimizedModel cannot be changed, because its name is a hash of its spec: "
    "change the ModelEndpoint, and the operator creates another one",
}


@dataclass(frozen=True)
class Column:
    """A column of `kubectl get`."""

    name: str
    path: str
    type: str = "string"
    priority: int = 0
    """0: always; 1: with `-o wide`."""

    def entry(self) -> dict[str, Any]:
        """As the CRD has it."""
        return {"name": self.name, "type": self.type, "jsonPath": self.path, "priority": self.priority}


_AGE = Column("Age", ".metadata.creationTimestamp", "date")


@dataclass(frozen=True)
class Definition:
    """One CRD."""

    resource: type[Resource]
    spec: type[BaseModel]
    status: type[BaseModel] | None
    plural: str
    short: str
    columns: tuple[Column, ...]
    scope: str = "Namespaced"
    named_by_rule: bool = True
    """Whether a rule with its own message checks that the name is a DNS label."""
    subresources: dict[str, Any] = field(default_factory=dict)
    immutable: bool = False

    def manifest(self) -> dict[str, Any]:
        """The CustomResourceDefinition."""
        kind = self.resource.KIND
        version: dict[str, Any] = {
            "name": VERSION,
            "served": True,
            "storage": True,
            "schema": {"openAPIV3Schema": self._schema()},
            "additionalPrinterColumns": [column.entry() for column in self.columns],
        }
        if self.subresources:
            version["subresources"] = self.subresources
        names = {"kind": kind, "listKind": f"{kind}List", "plural": self.plural, "singular": kind.lower()}
        return {
            "apiVersion": "apiextensions.k8s.io/v1",
            "kind": "CustomResourceDefinition",
            "metadata": {"name": f"{self.plural}.{GROUP}"},
            "spec": {
                "group": GROUP,
                "scope": self.scope,
                "names": {**names, "shortNames": [self.short], "categories": ["penstock"]},
                "versions": [version],
            },
        }

    def _schema(self) -> dict[str, Any]:
        spec = schema_of(self.spec)
        if self.immutable:
            spec[VALIDATIONS] = [*spec.get(VALIDATIONS, ()), _IMMUTABLE]
        if "required" not in spec:
            spec["default"] = _defaults_of(spec["properties"])
        properties = {
            "apiVersion": {"type": "string", "description": f"{GROUP}/{VERSION}"},
            "kind": {"type": "string", "description": self.resource.KIND},
            "metadata": {"type": "object", "properties": {"name": {"type": "string"}}},
            "spec": spec,
        }
        if self.status is not None:
            properties["status"] = schema_of(self.status, defaults=False)
        schema: dict[str, Any] = {
            "type": "object",
            "description": _sentences(self.resource.__doc__),
            "properties": properties,
        }
        schema["required"] = ["spec"]
        if self.named_by_rule:
            rule = LABEL_RULE.validation()
            for part in ("rule", "messageExpression"):
                rule[part] = rule[part].replace("self", "self.metadata.name")
            schema[VALIDATIONS] = [{**rule, "fieldPath": ".metadata.name"}]
        return schema


DEFINITIONS = (
    Definition(
        ModelEndpoint,
        ModelEndpointSpec,
        EndpointStatus,
        "modelendpoints",
        "mep",
        (
            Column("Model", ".spec.model"),
            Column("Class", ".spec.hardwareClass"),
            Column("Cores", ".spec.cores", "integer"),
            Column("Plan", ".status.plan.summary"),
            Column("Ready", '.status.conditions[?(@.type=="Ready")].status'),
            Column("Reason", ".status.reason"),
            Column("Replicas", ".status.replicas", "integer"),
            Column("P95", ".status.p95"),
            Column("Speed-up", ".status.speedUp"),
            Column("$/M", ".status.plan.costPerMillion", "number"),
            Column("Task", ".spec.task", priority=1),
            Column("URL", ".status.publicUrl", priority=1),
            Column("Artefact", ".status.plan.digest", priority=1),
            Column("Space", ".status.vectorSpaces[*]", priority=1),
            Column("Message", '.status.conditions[?(@.type=="Ready")].message', priority=1),
            _AGE,
        ),
        subresources={
            "status": {},
            "scale": {
                "specReplicasPath": ".spec.replicas",
                "statusReplicasPath": ".status.replicas",
                "labelSelectorPath": ".status.selector",
            },
        },
    ),
    Definition(
        OptimizedModel,
        OptimizedModelSpec,
        OptimizedModelStatus,
        "optimizedmodels",
        "om",
        (
            Column("Model", ".spec.model"),
            Column("Class", ".spec.hardwareClass"),
            Column("Cores", ".spec.cores", "integer"),
            Column("Phase", ".status.phase"),
            Column("Progress", ".status.progress"),
            Column("Plan", ".status.result.plan.summary"),
            Column("Speed-up", ".status.result.speedUp", "number"),
            Column("Failure", ".status.failure.reason"),
            Column("Task", ".spec.task", priority=1),
            Column("Artefact", ".status.artefact.digest", priority=1),
            Column("Last-used", ".status.lastUsed", "date", priority=1),
            _AGE,
        ),
        named_by_rule=False,
        subresources={"status": {}},
        immutable=True,
    ),
    Definition(
        HardwareClass,
        HardwareClassSpec,
        None,
        "hardwareclasses",
        "hwc",
        (
            Column("Architecture", ".spec.architecture"),
            Column("ISA", ".spec.isa"),
            Column("Threads", ".spec.threadsPerCore", "integer"),
            Column("NeuronCores", ".spec.neuron.coresPerDevice", "integer"),
            Column("Description", ".spec.description"),
            _AGE,
        ),
        scope="Cluster",
    ),
)


def schema_of(model: type[BaseModel], *, defaults: bool = True) -> dict[str, Any]:
    """The structural schema of a type; without `defaults` the API server fills nothing in."""
    whole = model.model_json_schema(by_alias=True)
    schema = _structural(whole, whole.get("$defs", {}), defaults=defaults)
    schema.setdefault("description", _sentences(model.__doc__))
    return schema


def _structural(node: dict[str, Any], known: dict[str, Any], *, defaults: bool) -> dict[str, Any]:
    if "$ref" in node:
        target = known[node["$ref"].rsplit("/", 1)[1]]
        node = {**target, **{key: value for key, value in node.items() if key != "$ref"}}
    if node.get("x-kubernetes-int-or-string"):
        return {key: node[key] for key in (*_KEPT, "anyOf") if key in node and key != "type"}
    if "anyOf" in node:
        return _structural(_without_null(node), known, defaults=defaults)
    schema = {key: node[key] for key in _KEPT if key in node}
    if "description" in schema:
        schema["description"] = _sentences(schema["description"])
    for bound in ("minimum", "maximum"):
        exclusive = f"exclusive{bound.capitalize()}"
        if exclusive in node:  # OpenAPI 3.0 has it as a flag of the bound
            schema |= {bound: node[exclusive], exclusive: True}
        if bound in schema:
            schema[bound] = _plain_number(schema[bound])
    if "properties" in node:
        schema["properties"] = {
            name: _structural(inner, known, defaults=defaults) for name, inner in node["properties"].items()
        }
        if "required" in node:
            schema["required"] = list(node["required"])
    elif isinstance(node.get("additionalProperties"), dict):
        schema["additionalProperties"] = _structural(node["additionalProperties"], known, defaults=defaults)
    if "items" in node:
        schema["items"] = _structural(node["items"], known, defaults=defaults)
    if defaults and node.get("default") is not None and not node.get("x-no-schema-default"):
        schema |= _default(node["default"], schema)
    if schema.get("items", {}).get("properties", {}).keys() >= {"type", "lastTransitionTime"}:
        schema |= {"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["type"]}
    return schema


def _without_null(node: dict[str, Any]) -> dict[str, Any]:
    """An optional field in the form of the API server: left out rather than null."""
    (only,) = (one for one in node["anyOf"] if one.get("type") != "null")
    return {**only, **{key: value for key, value in node.items() if key != "anyOf"}}


def _default(value: Any, schema: dict[str, Any]) -> dict[str, Any]:
    """The default that the API server fills in: scalars, and objects with the defaults of their fields, because the
    rules are checked against them. No lists: leaving one out may mean more in a later version."""
    if isinstance(value, list):
        return {}
    if isinstance(value, dict):
        fields = schema.get("properties")
        return {} if fields is None else {"default": _defaults_of(fields)}
    return {"default": _plain_number(value)}


def _defaults_of(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: inner["default"] for name, inner in fields.items() if "default" in inner}


def _plain_number(value: Any) -> Any:
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _sentences(text: str | None) -> str:
    return " ".join((text or "").split())


def manifests() -> Iterator[tuple[Path, str]]:
    """Every generated file with its content."""
    for definition in DEFINITIONS:
        yield ROOT / "crds" / f"{definition.plural}.yaml", written(definition.manifest())
    yield ROOT / "charts/penstock/files/hardware-classes.yaml", written(*hardware_classes())


def hardware_classes() -> Iterator[dict[str, Any]]:
    """The classes that the chart installs."""
    for name, spec in HARDWARE_CLASSES.items():
        yield {
            "apiVersion": API_VERSION,
            "kind": HardwareClass.KIND,
            "metadata": {"name": name},
            "spec": spec.model_dump(mode="json", by_alias=True, exclude_defaults=True),
        }


def written(*documents: dict[str, Any]) -> str:
    """YAML, readable and deterministic."""
    return HEAD + yaml.dump_all(
        documents,
        Dumper=_WithoutAliases,
        sort_keys=False,
        width=118,
        allow_unicode=True,
        explicit_start=len(documents) > 1,
    )


class _WithoutAliases(yaml.SafeDumper):
    """Writes a value that occurs twice twice, without YAML anchors such as `&id001`."""

    def ignore_aliases(self, data: Any) -> bool:  # noqa: ARG002 - the base class's signature
        return True


def stale() -> list[str]:
    """Files that differ from the types."""
    return [
        str(path.relative_to(ROOT))
        for path, content in manifests()
        if not path.is_file() or path.read_text(encoding="utf-8") != content
    ]


def main() -> None:
    """Write all files."""
    for path, content in manifests():
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.is_file() or path.read_text(encoding="utf-8") != content:
            path.write_text(content, encoding="utf-8")
            sys.stdout.write(f"wrote {path.relative_to(ROOT)}\n")


if __name__ == "__main__":
    main()
