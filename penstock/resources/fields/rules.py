"""Rules of fields and objects that a JSON schema cannot express.

A rule has the check twice, in Python for files and in CEL for the API server, and its message once, so that
`penstock serve FILE` and `kubectl apply` report a mistake with the same sentence. A test sends the same good and bad
objects to both.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated, Any

from pydantic import (
    BaseModel,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
)
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from penstock.resources.fields.cel import SHOWN, VALIDATIONS, object_rule, text_rule


@dataclass(frozen=True)
class Rule:
    """A condition on the fields of one object, for `Spec.RULES`.

    `words` is the message: what is wrong, and what to write instead. `{fieldName}` in it is the value of a field of the
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
        return SHOWN.sub(lambda found: _plain(getattr(value, names[found[1]])), self.words)

    def validation(self) -> dict[str, Any]:
        """The rule in CEL."""
        return object_rule(self.cel, self.words, self.field_path)


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
        """The rule in CEL."""
        return text_rule(self.pattern, f"{self.problem}. {self.remedy}", self.also)

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


_SUBDOMAIN = r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*"
DNS_LABEL = r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?"
"""As in RFC 1035: the name of a Service must begin with a letter."""
_LABEL_RULE = "Use at most 63 lower-case letters, digits and '-', a letter first and no '-' last"


def mend_label(text: str) -> str:
    """What to write instead of a text that is no DNS label."""
    better = re.sub(r"[^a-z0-9]+", "-", text.lower()).lstrip("-0123456789")[:63].rstrip("-")
    return f"{_LABEL_RULE}, such as {better}" if better else _LABEL_RULE


LABEL_RULE = TextRule(DNS_LABEL, "{self} is not a DNS label", _LABEL_RULE, mend=mend_label)
ObjectName = Annotated[
    str,
    Field(min_length=1, max_length=253),
    TextRule(
        _SUBDOMAIN,
        "{self} is not the name of a Kubernetes object",
        "Use lower-case letters, digits, '-' and '.', with a letter or digit at both ends",
    ),
]
"""The name of a Secret, ConfigMap, ServiceAccount: a DNS subdomain."""
