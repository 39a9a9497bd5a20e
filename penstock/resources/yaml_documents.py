"""Resource files: from YAML to plain JSON values, as strictly as the Kubernetes API server reads them.

Stricter than YAML: no key twice, no binaries or sets, nothing that JSON cannot hold. As Kubernetes does, a key
whose value is null counts as left out.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import yaml

from penstock.errors import SpecError
from penstock.resources.yaml_scalars import Loader

LONGEST_TEXT = 1_500_000
"""Characters; etcd takes no larger object."""
MOST_VALUES = 100_000
"""After anchors are expanded: a few lines of YAML can name billions."""
DEEPEST = 50
_EXACT = 2**53
"""Whole numbers below are the same as floats: `2.0` is a whole number, as it is in JSON schema."""


def read_documents(text: str, origin: str) -> list[Any]:
    """The documents of a YAML text as plain JSON values, empty ones left out.

    SpecError names `origin`, the place and what is wrong with it.
    """
    if len(text) > LONGEST_TEXT:
        raise SpecError(f"{origin} is longer than {LONGEST_TEXT:,} characters", remedy="Keep to one ModelEndpoint")
    try:
        documents = list(_documents(text, origin))
    except SpecError:
        raise
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = f", line {mark.line + 1}, column {mark.column + 1}" if mark is not None else ""
        raise SpecError(f"{origin}{where}: not YAML: {error.problem}", remedy="Check indentation and quotes") from error
    except Exception as error:  # PyYAML lets ValueError, KeyError, AttributeError, RecursionError out for odd scalars
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise SpecError(f"{origin} is not YAML that can be read: {reason}", remedy="Check scalars and tags") from error
    return [plain(document, origin) for document in documents if document is not None]


def _documents(text: str, origin: str) -> Iterator[Any]:
    loader = Loader(text)
    try:
        while loader.check_node():
            node = loader.get_node()
            if node is not None:
                _check_keys(node, origin)
                yield loader.construct_document(node)
    finally:
        loader.dispose()


def _check_keys(document: yaml.Node, origin: str) -> None:
    """SpecError for a key that is there twice, of which PyYAML would silently take the last.

    On the nodes, before they are constructed: that expands merges in place.
    """
    pending, visited = [document], set()
    while pending:
        node = pending.pop()
        if id(node) in visited:
            continue
        visited.add(id(node))
        if isinstance(node, yaml.SequenceNode):
            pending.extend(node.value)
        elif isinstance(node, yaml.MappingNode):
            keys = set()
            for key, value in node.value:
                pending += [key, value]
                if isinstance(key, yaml.ScalarNode) and key.tag != "tag:yaml.org,2002:merge":
                    if (key.tag, key.value) in keys:
                        where = f"{origin}, line {key.start_mark.line + 1}"
                        raise SpecError(f"{where}: {key.value} is there twice", remedy="Remove one of the two")
                    keys.add((key.tag, key.value))


def plain(value: Any, origin: str) -> Any:
    """The value with nothing in it but dicts by text, lists, text, numbers and booleans; null keys left out."""
    budget = iter(range(MOST_VALUES))
    return _plain(value, "", origin, budget, 0)


def _plain(value: Any, path: str, origin: str, budget: Iterator[int], depth: int) -> Any:
    if depth > DEEPEST or next(budget, None) is None:
        raise SpecError(f"{origin} is nested or repeated beyond measure", remedy="Write it without so many anchors")
    if isinstance(value, dict):
        for key in value:
            if not isinstance(key, str):
                raise SpecError(
                    f"{origin}: the key {key!r} {f'below {path} ' if path else ''}is not text",
                    field=path,
                    remedy="Put it in quotes (YAML reads y, yes, no, on, off and numbers as what they look like)",
                )
        return {
            _text(key, path, origin): _plain(inner, f"{path}.{key}".lstrip("."), origin, budget, depth + 1)
            for key, inner in value.items()
            if inner is not None
        }
    if isinstance(value, list | tuple):
        return [_plain(inner, f"{path}[{index}]", origin, budget, depth + 1) for index, inner in enumerate(value)]
    if isinstance(value, str):
        return _text(value, path, origin)
    if isinstance(value, float) and value.is_integer() and abs(value) < _EXACT:
        return int(value)
    if value is None or isinstance(value, bool | int) or (isinstance(value, float) and math.isfinite(value)):
        return value
    if isinstance(value, float):
        raise SpecError(f"{path or origin}: {value} is no number in JSON", field=path, remedy="Write a finite number")
    raise SpecError(
        f"{path or origin}: {type(value).__name__} is no value that JSON knows",
        field=path,
        remedy="Write text, a number or a list",
    )


def _text(value: str, path: str, origin: str) -> str:
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise SpecError(
            f"{path or origin}: half of a character (a lone surrogate)", field=path, remedy="Write the character itself"
        ) from error
    return str(value)
