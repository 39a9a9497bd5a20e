"""Writes the parts of the documents that come from the code: `make docs`. A test fails when they are stale.

Each generated part stands between `<!-- begin NAME -->` and `<!-- end NAME -->`; the words around it are ours.
"""

from __future__ import annotations

import re
import sys
import types
import typing
from collections.abc import Callable, Iterator
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Any

import click
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from penstock.cli.main import COMMANDS, cli
from penstock.endpoint import ModelEndpointSpec
from penstock_operator import manual as operator_manual
from penstock_optimizer.pod.variables import JobVariables
from penstock_runtime import manual

ROOT = Path(__file__).parents[1]


def endpoint_fields() -> str:
    """A row for every field below `spec`."""
    rows = ["| field | type | default | meaning |", "|---|---|---|---|", *_rows(ModelEndpointSpec, "")]
    return "\n".join(rows)


def _rows(model: type[BaseModel], prefix: str) -> Iterator[str]:
    for name, field in model.model_fields.items():
        path = f"{prefix}{field.alias or name}"
        nested = _nested(field.annotation)
        meaning = field.description or (nested.__doc__ or "").strip() if nested else field.description or ""
        first_line = meaning.splitlines()[0] if meaning else ""
        yield f"| `{path}` | {_type(field.annotation)} | {_default(field)} | {first_line} |"
        if nested is not None:
            yield from _rows(nested, f"{path}.")


def _members(annotation: Any) -> tuple[Any, ...]:
    """The alternatives of a union less None; else the annotation alone."""
    if typing.get_origin(annotation) in {typing.Union, types.UnionType}:
        return tuple(member for member in typing.get_args(annotation) if member is not type(None))
    return (annotation,)


def _nested(annotation: Any) -> type[BaseModel] | None:
    for member in _members(annotation):
        if isinstance(member, type) and issubclass(member, BaseModel):
            return member
    return None


def _type(annotation: Any) -> str:
    names = []
    for member in _members(annotation):
        if typing.get_origin(member) is typing.Annotated:
            names.append(_type(typing.get_args(member)[0]))
        elif typing.get_origin(member) is tuple:
            names.append(f"list of {_type(typing.get_args(member)[0])}")
        elif isinstance(member, type) and issubclass(member, StrEnum):
            names.append(", ".join(f"`{choice.value}`" for choice in member))
        elif isinstance(member, type) and issubclass(member, BaseModel):
            names.append("object")
        else:
            plain = {"str": "string", "int": "integer", "float": "number", "bool": "boolean"}
            names.append(plain.get(getattr(member, "__name__", ""), str(member)))
    return " or ".join(names)


def _default(field: FieldInfo) -> str:
    if field.default is PydanticUndefined:
        return "(required)"
    value = field.default
    if isinstance(value, BaseModel):
        return ""
    if isinstance(value, StrEnum):
        return f"`{value.value}`"
    if isinstance(value, tuple):
        return "all" if value and all(isinstance(part, StrEnum) for part in value) else "(none)"
    if value is None:
        return "(none)"
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


def command_help() -> str:
    """The help page of every command."""
    pages = []
    for name in ["", *COMMANDS]:
        widths: dict[str, Any] = {"max_content_width": 100, "terminal_width": 100}
        context = click.Context(cli, info_name="penstock", **{**cli.context_settings, **widths})
        command: click.Command = cli
        if name:
            found = cli.get_command(context, name)
            assert found is not None, name  # noqa: S101 - COMMANDS and the modules belong together
            command = found
            context = click.Context(command, info_name=name, parent=context, **{**command.context_settings, **widths})
        title = f"penstock {name}".strip()
        pages.append(f"## {title}\n\n```\n{command.get_help(context)}\n```")
    return "\n\n".join(pages)


PARTS: dict[str, tuple[str, Callable[[], str]]] = {
    "endpoint-fields": ("docs/model-endpoint.md", endpoint_fields),
    "commands": ("docs/cli.md", command_help),
    **manual.PARTS,
    "job-variables": ("docs/settings.md", partial(manual.variables_table, JobVariables)),
    **operator_manual.PARTS,
}
"""Name of the part -> document and the function that makes it."""


def refreshed(text: str, name: str, content: str) -> str:
    """The document with the part replaced; ValueError when it has no such part."""
    pattern = re.compile(rf"(<!-- begin {name} -->\n).*?(<!-- end {name} -->)", re.DOTALL)
    if not pattern.search(text):
        raise ValueError(f"there is no part {name}")
    return pattern.sub(lambda match: f"{match[1]}\n{content}\n\n{match[2]}", text)


def stale() -> list[str]:
    """Documents whose generated parts differ from the code."""
    return [name for name, old, new in _documents() if old != new]


def _documents() -> Iterator[tuple[str, str, str]]:
    for name, (document, make) in PARTS.items():
        old = (ROOT / document).read_text(encoding="utf-8")
        yield document, old, refreshed(old, name, make())


def main() -> None:
    """Write all parts."""
    for name, old, new in _documents():
        if old != new:
            (ROOT / name).write_text(new, encoding="utf-8")
            sys.stdout.write(f"wrote {name}\n")


if __name__ == "__main__":
    main()
