"""Reads resource files: from YAML to plain JSON values, as strictly as kubectl and the Kubernetes API server.

Stricter than YAML: no duplicate keys, no binaries or sets, nothing that JSON cannot hold. As in Kubernetes, a key whose
value is null counts as left out.

Plain scalars follow neither YAML 1.1 nor 1.2: kubectl converts YAML to JSON with sigs.k8s.io/yaml, which contains
go-yaml v2, and `number` follows its resolve.go (v2.4.2; compared with kubectl 1.33). `1e2` is a number, `1:30` is text,
`0o17` and `017` are 15, `y` is true, and dates are text.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from typing import Any

import yaml

from penstock.errors import SpecError

MOST_VALUES = 100_000
"""Values after anchors are expanded: a few lines of YAML can expand to billions."""
DEEPEST = 50
_EXACT = 2**53
"""Whole numbers below are the same as floats: `2.0` is a whole number, as it is in JSON schema."""


def plain(value: Any, origin: str) -> Any:
    """The value as dicts with text keys, lists, text, numbers and booleans only; null keys are left out."""
    budget = iter(range(MOST_VALUES))
    return _plain_value(value, "", origin, budget, 0)


def _plain_value(value: Any, path: str, origin: str, budget: Iterator[int], depth: int) -> Any:
    if depth > DEEPEST or next(budget, None) is None:
        raise SpecError(f"{origin} is nested or repeated beyond measure", remedy="Write it with fewer anchors")
    if isinstance(value, dict):
        for key in value:
            if not isinstance(key, str):
                raise SpecError(
                    f"{origin}: the key {key!r} {f'below {path} ' if path else ''}is not text",
                    field=path,
                    remedy="Put it in quotes (YAML reads y, yes, no, on, off and numbers as what they look like)",
                )
        return {
            _text(key, path, origin): _plain_value(inner, f"{path}.{key}".lstrip("."), origin, budget, depth + 1)
            for key, inner in value.items()
            if inner is not None
        }
    if isinstance(value, list | tuple):
        return [_plain_value(inner, f"{path}[{index}]", origin, budget, depth + 1) for index, inner in enumerate(value)]
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


LONGEST_TEXT = 1_500_000
"""Characters; etcd rejects larger objects."""


def read_documents(text: str, origin: str) -> list[Any]:
    """The documents of a YAML text as plain JSON values, empty ones left out.

    SpecError names `origin`, the line and the problem.
    """
    if len(text) > LONGEST_TEXT:
        raise SpecError(f"{origin} is longer than {LONGEST_TEXT:,} characters", remedy="Keep to one ModelEndpoint")
    try:
        documents = _json(text)
        documents = list(_documents(text, origin)) if documents is None else documents
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


def _json(text: str) -> list[Any] | None:
    """The document of a text that is JSON, which kubectl does not read as YAML: escapes of surrogates are pairs there.
    None for other texts; errors in JSON are found as YAML, with their lines."""
    if not text.lstrip().startswith("{"):
        return None

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            raise ValueError
        return found

    try:
        return [json.loads(text, object_pairs_hook=unique, parse_int=number)]
    except (ValueError, RecursionError):
        return None


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
    """Raise SpecError for a duplicate key, of which PyYAML would silently use the last.

    Checked on the nodes before construction, which expands merges.
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


_SPECIAL_SCALARS: dict[str, bool | None] = {
    **dict.fromkeys(["y", "Y", "yes", "Yes", "YES", "true", "True", "TRUE", "on", "On", "ON"], True),
    **dict.fromkeys(["n", "N", "no", "No", "NO", "false", "False", "FALSE", "off", "Off", "OFF"], False),
    **dict.fromkeys(["", "~", "null", "Null", "NULL"], None),
}
_NON_FINITE = {
    **dict.fromkeys([".nan", ".NaN", ".NAN"], math.nan),
    **dict.fromkeys([".inf", ".Inf", ".INF", "+.inf", "+.Inf", "+.INF"], math.inf),
    **dict.fromkeys(["-.inf", "-.Inf", "-.INF"], -math.inf),
}
_MERGE = "<<"
_TAG = "tag:yaml.org,2002:"
_BASES = {16: re.compile("0[xX]([0-9a-fA-F]+)"), 2: re.compile("0[bB]([01]+)"), 8: re.compile("0[oO]?([0-7]+)")}
_DECIMAL = re.compile("0|[1-9][0-9]*")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_POINT_FIRST = re.compile(r"\.[0-9]+(_[0-9]+)*([eE][-+]?[0-9]+(_[0-9]+)*)?")
_SMALLEST, _LARGEST, _LARGEST_WITHOUT_SIGN = -(2**63), 2**63 - 1, 2**64 - 1


def number(text: str) -> int | float | None:
    """The number that a plain scalar is; None when it is text."""
    if text in _NON_FINITE:
        return _NON_FINITE[text]
    if text[:1] == ".":
        return _finite(text) if _POINT_FIRST.fullmatch(text) else None
    if re.match("[-+0-9]", text) is None:
        return None
    digits = text.replace("_", "")
    whole = _whole(digits)
    if whole is not None:
        return whole
    return _finite(digits) if _FLOAT.fullmatch(digits) else None


def _whole(text: str) -> int | None:
    """None also for numbers beyond 64 bits: these are floats, where their form allows."""
    sign, digits = (text[0], text[1:]) if text[0] in "+-" else ("", text)
    found: int | None = int(digits) if _DECIMAL.fullmatch(digits) and len(digits) <= len(str(2**64)) else None
    for base, form in _BASES.items():
        match = form.fullmatch(digits)
        if match is not None:
            found = int(match[1], base)
    if found is None:
        return None
    value = -found if sign == "-" else found
    return value if _SMALLEST <= value <= (_LARGEST if sign else _LARGEST_WITHOUT_SIGN) else None


def _finite(text: str) -> float | None:
    """None for numbers beyond a float: these are text."""
    value = float(text)
    return value if math.isfinite(value) else None


class Loader(yaml.SafeLoader):
    """SafeLoader with the scalars of kubectl."""

    def resolve(self, kind: type[yaml.Node], value: str | None, implicit: tuple[bool, bool] | bool) -> str:
        """The tag of a node without an explicit one."""
        plain = kind is yaml.ScalarNode and isinstance(implicit, tuple) and implicit[0]
        if not plain or value is None:
            return str(super().resolve(kind, value, implicit))  # type: ignore[no-untyped-call] # PyYAML's has no types
        if value == _MERGE:
            return f"{_TAG}merge"
        if value in _SPECIAL_SCALARS:
            return f"{_TAG}null" if _SPECIAL_SCALARS[value] is None else f"{_TAG}bool"
        found = number(value)
        return f"{_TAG}str" if found is None else f"{_TAG}{type(found).__name__}"


def _bool(loader: Loader, node: yaml.ScalarNode) -> bool:
    value = _SPECIAL_SCALARS.get(loader.construct_scalar(node))
    if value is None:
        raise _not(node, "boolean")
    return value


def _int(loader: Loader, node: yaml.ScalarNode) -> int:
    value = number(loader.construct_scalar(node))
    if not isinstance(value, int):
        raise _not(node, "whole number")
    return value


def _float(loader: Loader, node: yaml.ScalarNode) -> float:
    value = number(loader.construct_scalar(node))
    if value is None:
        raise _not(node, "number")
    return float(value)


def _not(node: yaml.ScalarNode, what: str) -> yaml.constructor.ConstructorError:
    return yaml.constructor.ConstructorError(None, None, f"{node.value!r} is no {what}", node.start_mark)


Loader.add_constructor(f"{_TAG}bool", _bool)
Loader.add_constructor(f"{_TAG}int", _int)
Loader.add_constructor(f"{_TAG}float", _float)
