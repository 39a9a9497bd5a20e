"""The generated files are up to date, and keep to the API server's limits for schemas."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from penstock.resources.hardware_class import HardwareClass
from penstock.resources.shipped_classes import HARDWARE_CLASSES
from tools import make_crds
from tools.make_crds import DEFINITIONS, Definition, schema_of

BY_KIND = pytest.mark.parametrize("definition", DEFINITIONS, ids=lambda it: it.resource.KIND)
FIELDS_OF_0_1_0 = Path(__file__).parent / "fields_0_1_0.txt"
"""Fields of the specs of 0.1.0, with their kind."""
FREE_TEXT = {"apiVersion", "kind", "name"}


def nodes(schema: dict[str, Any], path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Every part of a schema, with its path."""
    yield path, schema
    for name, inner in schema.get("properties", {}).items():
        yield from nodes(inner, f"{path}.{name}")
    for key in ("items", "additionalProperties"):
        if key in schema:
            yield from nodes(schema[key], f"{path}[]")


def root(definition: Definition) -> dict[str, Any]:
    version = definition.manifest()["spec"]["versions"][0]
    return dict(version["schema"]["openAPIV3Schema"])


def test_the_files_are_those_of_the_types() -> None:
    assert make_crds.stale() == [], "run `make crds`"


@BY_KIND
def test_every_field_has_a_description_that_kubectl_explain_can_show(definition: Definition) -> None:
    properties = root(definition)["properties"]
    bare = [
        path
        for part in ("spec", "status")
        if part in properties
        for path, node in nodes(properties[part], part)
        if not path.endswith("[]") and not node.get("description")
    ]
    assert bare == []


@BY_KIND
def test_every_text_list_and_map_is_bounded(definition: Definition) -> None:
    unbounded = []
    for path, node in nodes(root(definition)):
        if path.startswith(".metadata") or path in {".apiVersion", ".kind"}:
            continue
        if node.get("type") == "string" and not ({"maxLength", "enum", "format"} & node.keys()):
            unbounded.append(path)
        if node.get("type") == "array" and "maxItems" not in node:
            unbounded.append(path)
        if "additionalProperties" in node and "maxProperties" not in node:
            unbounded.append(path)
    assert unbounded == []


@BY_KIND
def test_every_rule_has_a_remedy(definition: Definition) -> None:
    for path, node in nodes(root(definition)):
        for rule in node.get("x-kubernetes-validations", ()):
            assert len(rule["message"]) > 20, path
            assert "\n" not in rule["message"], path


def test_conditions_are_merged_by_type() -> None:
    for definition in DEFINITIONS:
        status = root(definition)["properties"].get("status")
        if status is None:
            continue
        conditions = status["properties"]["conditions"]
        assert conditions["x-kubernetes-list-type"] == "map"
        assert conditions["x-kubernetes-list-map-keys"] == ["type"]
        assert set(conditions["items"]["required"]) >= {"type", "status", "reason", "lastTransitionTime"}


def test_the_schema_has_no_defaults_in_the_status() -> None:
    for definition in DEFINITIONS:
        if definition.status is not None:
            assert [
                path for path, node in nodes(schema_of(definition.status, defaults=False)) if "default" in node
            ] == []


def test_a_field_that_0_1_0_does_not_know_has_no_default_in_the_schema() -> None:
    """`helm rollback` to 0.1.0 leaves the definitions: its operator would refuse endpoints with such a field."""
    known = set(FIELDS_OF_0_1_0.read_text("utf-8").splitlines())

    found = [
        field
        for definition in DEFINITIONS
        for path, node in nodes(root(definition)["properties"]["spec"], "spec")
        if "default" in node and path != "spec" and (field := f"{definition.resource.KIND} {path}") not in known
    ]

    assert known
    assert [field for field in found if parent(field) in known or parent(field).endswith(" spec")] == []


def parent(field: str) -> str:
    """The field that has this one. What is in a new field is only filled in where that is written."""
    return field.rsplit(".", 1)[0]


def test_the_chart_has_every_class() -> None:
    text = (make_crds.ROOT / "charts/penstock/files/hardware-classes.yaml").read_text(encoding="utf-8")
    classes = [HardwareClass.from_object(document) for document in yaml.safe_load_all(text)]
    assert {one.metadata.name: one.spec for one in classes} == HARDWARE_CLASSES
