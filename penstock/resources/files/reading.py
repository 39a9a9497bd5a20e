"""Reads one resource from a YAML text or file."""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

from penstock.errors import SpecError
from penstock.resources.base import API_VERSION, Resource
from penstock.resources.files.problems import intended_word
from penstock.resources.files.yaml_documents import read_documents

Kind = TypeVar("Kind", bound=Resource)


def from_yaml(kind: type[Kind], text: str, *, origin: str = "the file") -> Kind:
    """The one resource of this kind of a YAML text, which may hold other resources too.

    SpecError lists every problem: the field, the value and what to write instead.
    """
    documents = read_documents(text, origin)
    kinds = [document.get("kind") if isinstance(document, dict) else None for document in documents]
    found = [document for document, name in zip(documents, kinds, strict=True) if name == kind.KIND]
    if len(found) == 1:
        return kind.from_object(found[0], origin=origin)
    if found:
        raise SpecError(f"{origin} holds {len(found)} {kind.KIND}s", remedy="Keep one in each file")
    meant = next((name for name in kinds if isinstance(name, str) and intended_word(name, [kind.KIND])), None)
    if meant is not None:
        raise SpecError(f"{origin}: kind is {meant!r}", field="kind", remedy=f"Write kind: {kind.KIND}")
    named = ", ".join(name if isinstance(name, str) else "something without a kind" for name in kinds)
    raise SpecError(
        f"{origin} holds {named or 'nothing'}, and no {kind.KIND}",
        remedy=f"Start it with `apiVersion: {API_VERSION}` and `kind: {kind.KIND}`",
    )


def from_file(kind: type[Kind], path: Path) -> Kind:
    """The resource of a YAML file."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise SpecError(f"{path}: {error.strerror}", remedy=f"Give the path of a {kind.KIND} YAML file") from error
    except UnicodeDecodeError as error:
        raise SpecError(f"{path} is not UTF-8 text", remedy=f"Give the path of a {kind.KIND} YAML file") from error
    return from_yaml(kind, text, origin=str(path))
