"""Validation rules that a JSON schema cannot express: in Python for files, in CEL for the API server.

A rule has the check twice and its message once, so that `penstock serve FILE` and `kubectl apply` report a mistake with
the same sentence. `dev/tools/make_crds.py` finds the CEL in the JSON schema, under `x-kubernetes-validations`; a test
sends the same good and bad objects to both sides.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel, GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

VALIDATIONS = "x-kubernetes-validations"
"""The key of a schema under which the API server looks for CEL rules."""
_SHOWN = re.compile(r"\{(\w+)\}")


@dataclass(frozen=True)
class Rule:
    """A condition on the fields of one object, for `Spec.RULES`.

    `words` is the message: the problem, and the remedy. `{fieldName}` in it is the value of a field of the
    object, which must be set whenever the rule is broken.
    """

    cel: str
    holds: Callable[[Any], bool]
    words: str
    field_path: str = ""
    """The field that the API server names, such as `.artefact`; empty: the object."""

    def message_for(self, value: BaseModel) -> str:
        """The message with the values of this object."""
        names = {info.alias or name: name for name, info in type(value).model_fields.items()}
        return _SHOWN.sub(lambda found: _plain(getattr(value, names[found[1]])), self.words)

    def validation(self) -> dict[str, Any]:
        """The rule as an entry of `x-kubernetes-validations`."""
        entry: dict[str, Any] = {"rule": self.cel, "message": _SHOWN.sub(r"\1", self.words)}
        if _SHOWN.search(self.words):
            entry["messageExpression"] = _expression(self.words, lambda name: f"self.{name}")
        if self.field_path:
            entry["fieldPath"] = self.field_path
        return entry


@dataclass(frozen=True)
class TextRule:
    """The required form of a text, as metadata of an annotated `str`.

    `pattern` matches the whole text. It must have the same meaning in Python's `re` and in RE2 of the API server: ASCII
    classes written out, no look-around.
    """

    pattern: str
    problem: str
    """Such as `{self} is not a DNS label`."""
    remedy: str
    also: str = ""
    """A further condition in CEL on `self`; `holds` is the same in Python."""
    holds: Callable[[str], bool] = field(default=lambda _: True)
    mend: Callable[[str], str] = field(default=lambda _: "")
    """A better remedy for a given text, which CEL cannot compute; empty: `remedy`."""

    def check(self, text: str) -> str:
        """The text itself; an error with problem and remedy (of type `spec`) when it has another form."""
        if re.fullmatch(self.pattern, text) and self.holds(text):
            return text
        problem = self.problem.replace("{self}", repr(text[:80]))
        raise PydanticCustomError("spec", "{problem}", {"problem": problem, "remedy": self.mend(text) or self.remedy})

    def validation(self) -> dict[str, Any]:
        """The rule as an entry of `x-kubernetes-validations`."""
        rule = f"self.matches({_quoted(f'^(?:{self.pattern})$')})"
        words = f"{self.problem}. {self.remedy}"
        return {
            "rule": f"{rule} && {self.also}" if self.also else rule,
            "message": words.replace("{self}", "this"),
            "messageExpression": _expression(words.replace("{self}", "'{self}'"), lambda _: "self"),
        }

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Adds the check after the checks of the type."""
        return core_schema.no_info_after_validator_function(self.check, handler(source))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        """Adds the CEL."""
        found = handler(schema)
        found[VALIDATIONS] = [*found.get(VALIDATIONS, ()), self.validation()]
        return found


def _plain(value: object) -> str:
    """As CEL's `string()` writes it."""
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    return str(value)


def _expression(words: str, value: Callable[[str], str]) -> str:
    """A CEL expression for the message. It uses `format`, because the API server assumes an unbounded cost for the
    concatenation of a number."""
    values = ", ".join(value(found[1]) for found in _SHOWN.finditer(words))
    return f"{_quoted(_SHOWN.sub('%s', words.replace('%', '%%')))}.format([{values}])"


def _quoted(text: str) -> str:
    """A CEL string literal."""
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'
