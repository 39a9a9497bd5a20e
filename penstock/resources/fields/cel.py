"""Rules as entries of `x-kubernetes-validations`, in CEL for the API server. `dev/tools/make_crds.py` finds them in the
JSON schema."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

VALIDATIONS = "x-kubernetes-validations"
"""The key of a schema under which the API server looks for CEL rules."""
SHOWN = re.compile(r"\{(\w+)\}")
"""The value of a field in a message."""


def object_rule(cel: str, words: str, field_path: str) -> dict[str, Any]:
    """A condition on the fields of one object."""
    entry: dict[str, Any] = {"rule": cel, "message": SHOWN.sub(r"\1", words)}
    if SHOWN.search(words):
        entry["messageExpression"] = _expression(words, lambda name: f"self.{name}")
    if field_path:
        entry["fieldPath"] = field_path
    return entry


def text_rule(pattern: str, words: str, also: str) -> dict[str, Any]:
    """The required form of a text, and a further condition on it."""
    rule = f"self.matches({_quoted(f'^(?:{pattern})$')})"
    return {
        "rule": f"{rule} && {also}" if also else rule,
        "message": words.replace("{self}", "this"),
        "messageExpression": _expression(words.replace("{self}", "'{self}'"), lambda _: "self"),
    }


def _expression(words: str, value: Callable[[str], str]) -> str:
    """A CEL expression for the message. It uses `format`, because the API server assumes an unbounded cost for the
    concatenation of a number."""
    values = ", ".join(value(found[1]) for found in SHOWN.finditer(words))
    return f"{_quoted(SHOWN.sub('%s', words.replace('%', '%%')))}.format([{values}])"


def _quoted(text: str) -> str:
    """A CEL string literal."""
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'
