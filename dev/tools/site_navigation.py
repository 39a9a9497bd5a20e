"""Expands the patterns in the navigation of mkdocs.yml, such as `decisions/*.md`, to the pages that match them.

A hook of MkDocs. A page that the navigation names is left out of the patterns; a section without a page is left out.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol


class Configuration(Protocol):
    """The part of MkDocs' configuration that is used here."""

    docs_dir: str
    nav: list[Any] | None


def on_config(config: Configuration) -> Configuration:
    """Replace the patterns; MkDocs calls it once the configuration is read."""
    if config.nav is not None:
        config.nav = expanded(config.nav, Path(config.docs_dir), frozenset(named(config.nav)))
    return config


def named(entries: list[Any]) -> list[str]:
    """Pages that the navigation names itself, relative to the folder of the documents."""
    found: list[str] = []
    for entry in entries:
        content = next(iter(entry.values())) if isinstance(entry, dict) else entry
        found += named(content) if isinstance(content, list) else [content]
    return [page for page in found if "*" not in page]


def expanded(entries: list[Any], folder: Path, taken: frozenset[str]) -> list[Any]:
    """The same entries with patterns replaced by pages in alphabetical order."""
    found: list[Any] = []
    for entry in entries:
        if isinstance(entry, str):
            found += matching(entry, folder, taken) if "*" in entry else [entry]
            continue
        ((title, content),) = entry.items()
        inner = expanded(content, folder, taken) if isinstance(content, list) else content
        if inner:
            found.append({title: inner})
    return found


def matching(pattern: str, folder: Path, taken: frozenset[str]) -> list[str]:
    """Pages that match a pattern, without those that are named elsewhere."""
    pages = sorted(path.relative_to(folder).as_posix() for path in folder.glob(pattern))
    return [page for page in pages if page not in taken]
