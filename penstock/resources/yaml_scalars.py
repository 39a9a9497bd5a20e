"""Plain scalars of YAML as kubectl reads them, which are neither those of YAML 1.1 nor those of 1.2.

kubectl turns YAML into JSON with sigs.k8s.io/yaml, which has go-yaml v2 within: `resolve` here is what its resolve.go
does (v2.4.2; tried on kubectl 1.33). `1e2` is a number, `1:30` is text, `0o17` and `017` are 15, `y` is true, and dates
are text.
"""

from __future__ import annotations

import math
import re

import yaml

_WORDS: dict[str, bool | None] = {
    **dict.fromkeys(["y", "Y", "yes", "Yes", "YES", "true", "True", "TRUE", "on", "On", "ON"], True),
    **dict.fromkeys(["n", "N", "no", "No", "NO", "false", "False", "FALSE", "off", "Off", "OFF"], False),
    **dict.fromkeys(["", "~", "null", "Null", "NULL"], None),
}
_NO_NUMBERS = {
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
    if text in _NO_NUMBERS:
        return _NO_NUMBERS[text]
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
    """None for what has no place in 64 bits, too: it is a float then, where its form allows."""
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
    """None for what is beyond a float: it is text."""
    value = float(text)
    return value if math.isfinite(value) else None


class Loader(yaml.SafeLoader):
    """Safe, with these scalars."""

    def resolve(self, kind: type[yaml.Node], value: str | None, implicit: tuple[bool, bool] | bool) -> str:
        """The tag of a node that states none."""
        plain = kind is yaml.ScalarNode and isinstance(implicit, tuple) and implicit[0]
        if not plain or value is None:
            return str(super().resolve(kind, value, implicit))  # type: ignore[no-untyped-call] # PyYAML's has no types
        if value == _MERGE:
            return f"{_TAG}merge"
        if value in _WORDS:
            return f"{_TAG}null" if _WORDS[value] is None else f"{_TAG}bool"
        found = number(value)
        return f"{_TAG}str" if found is None else f"{_TAG}{type(found).__name__}"


def _bool(loader: Loader, node: yaml.ScalarNode) -> bool:
    value = _WORDS.get(loader.construct_scalar(node))
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
