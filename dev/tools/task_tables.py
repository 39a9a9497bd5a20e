"""Generates the tables of docs/reference/tasks.md from the schemas of the tasks."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from typing import Any

from penstock.tasks import TaskName
from penstock_runtime.tasks.factory import request_schema
from penstock_runtime.tasks.fields import JsonSchema

DOCUMENT = "docs/reference/tasks.md"


def parameters_table(name: TaskName) -> str:
    """A row for every parameter of the task."""
    parameters = request_schema(name)["properties"]["parameters"]
    required = parameters.get("required", ())
    rows = ["| parameter | type | default | meaning |", "|---|---|---|---|"]
    for parameter, schema in parameters["properties"].items():
        default = "(required)" if parameter in required else _default(schema["default"])
        rows.append(f"| `{parameter}` | {_type(schema)} | {default} | {schema['description']} |")
    return "\n".join(rows)


def _default(value: Any) -> str:
    return "" if value is None else f"`{json.dumps(value)}`"


def _type(schema: JsonSchema) -> str:
    """The schema in a few words; null, which every optional parameter takes, goes without saying."""
    if "anyOf" in schema:
        return " or ".join(_type(kind) for kind in schema["anyOf"] if kind != {"type": "null"})
    if "enum" in schema:
        return ", ".join(f"`{option}`" for option in schema["enum"] if option is not None)
    kind = schema["type"] if isinstance(schema["type"], str) else schema["type"][0]
    if kind == "integer":
        return f"integer, {schema['minimum']:,} to {schema['maximum']:,}"
    return "list of strings" if kind == "array" else str(kind)


PARTS: dict[str, tuple[str, Callable[[], str]]] = {
    f"parameters of {name.value}": (DOCUMENT, partial(parameters_table, name)) for name in TaskName
}
"""Name of the part -> document and the function that makes it."""
