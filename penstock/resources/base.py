"""Base classes of the resources of `penstock.dev/v1alpha1`: field names, rules, strictness, reading and writing.

Field names are camelCase in files and snake_case in Python. Unknown fields are errors, so that a typo does not leave a
default in place.

A rule that a JSON schema cannot express has the check twice, in Python for files and in CEL for the API server, and its
message once, so that `penstock serve FILE` and `kubectl apply` report a mistake with the same sentence.
`dev/tools/make_crds.py` finds the CEL in the JSON schema, under `x-kubernetes-validations`; a test sends the same good
and bad objects to both.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    ValidationError,
    model_validator,
)
from pydantic.alias_generators import to_camel
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from penstock.errors import SpecError
from penstock.resources.problems import BrokenRules, intended_word, spec_error
from penstock.resources.yaml_documents import plain, read_documents

VALIDATIONS = "x-kubernetes-validations"
"""The key of a schema under which the API server looks for CEL rules."""
_SHOWN = re.compile(r"\{(\w+)\}")


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


GROUP = "penstock.dev"
VERSION = "v1alpha1"
API_VERSION = f"{GROUP}/{VERSION}"
CLUSTER: dict[str, Any] = {"x-cluster-only": True}
"""Marks a field that a local run ignores."""
NO_SCHEMA_DEFAULT: dict[str, Any] = {"x-no-schema-default": True}
"""Marks a field of a later release than 0.1.0. The API server does not fill in its default: after a rollback, the
operator of 0.1.0 refuses fields that it does not know."""


class Spec(BaseModel):
    """A part of a spec: frozen, camelCase in files, no unknown fields, no NaN or infinity."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", alias_generator=to_camel, populate_by_name=True, allow_inf_nan=False
    )
    RULES: ClassVar[tuple[Rule, ...]] = ()
    """Conditions on the fields of one object."""

    @model_validator(mode="after")
    def _check_rules(self) -> Self:
        broken = [rule.message_for(self) for rule in self.RULES if not rule.holds(self)]
        if broken:
            raise BrokenRules(broken)
        return self

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        """Adds the CEL of the rules."""
        found = handler.resolve_ref_schema(handler(schema))
        if cls.RULES:
            found[VALIDATIONS] = [rule.validation() for rule in cls.RULES]
        return found

    def to_object(self) -> dict[str, Any]:
        """JSON values for the API server, without fields that are None."""
        return self.model_dump(mode="json", by_alias=True, exclude_none=True)


class Facts(BaseModel):
    """A part of a status or a report: frozen, camelCase in files. Fields of a newer version are ignored."""

    model_config = ConfigDict(
        frozen=True, extra="ignore", alias_generator=to_camel, populate_by_name=True, allow_inf_nan=False
    )

    def to_object(self) -> dict[str, Any]:
        """JSON values for the API server, without fields that are None."""
        return self.model_dump(mode="json", by_alias=True, exclude_none=True)


class AnyMetadata(BaseModel):
    """The parts of the Kubernetes object metadata that Penstock reads."""

    model_config = ConfigDict(frozen=True, extra="allow")

    name: ObjectName
    namespace: str | None = None
    labels: dict[str, str] = Field(default_factory=dict)
    annotations: dict[str, str] = Field(default_factory=dict)


class Metadata(AnyMetadata):
    """The metadata of a resource that a Service is named after, or that a field names."""

    name: Annotated[str, LABEL_RULE]
    """A DNS label."""


class Resource(BaseModel):
    """A resource, read from a file or from the API server."""

    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True, allow_inf_nan=False)
    KIND: ClassVar[str]

    @classmethod
    def from_yaml(cls, text: str, *, origin: str = "the file") -> Self:
        """Read the one resource of this kind of a YAML text, which may hold other resources too.

        SpecError lists every problem: the field, the value and what to write instead.
        """
        documents = read_documents(text, origin)
        kinds = [document.get("kind") if isinstance(document, dict) else None for document in documents]
        found = [document for document, kind in zip(documents, kinds, strict=True) if kind == cls.KIND]
        if len(found) == 1:
            return cls.from_object(found[0], origin=origin)
        if found:
            raise SpecError(f"{origin} holds {len(found)} {cls.KIND}s", remedy="Keep one in each file")
        meant = next((kind for kind in kinds if isinstance(kind, str) and intended_word(kind, [cls.KIND])), None)
        if meant is not None:
            raise SpecError(f"{origin}: kind is {meant!r}", field="kind", remedy=f"Write kind: {cls.KIND}")
        named = ", ".join(kind if isinstance(kind, str) else "something without a kind" for kind in kinds)
        raise SpecError(
            f"{origin} holds {named or 'nothing'}, and no {cls.KIND}",
            remedy=f"Start it with `apiVersion: {API_VERSION}` and `kind: {cls.KIND}`",
        )

    @classmethod
    def from_object(cls, value: dict[str, Any], *, origin: str = "", stored: bool = False) -> Self:
        """Read one resource from parsed YAML or JSON; SpecError as `from_yaml`.

        As strict as the API server, so that what runs here is accepted there: no text for numbers, no snake_case.
        `stored`: it comes from the API server, which has removed unknown fields: a field that is unknown
        here is of a later release, and is ignored.
        """
        origin = origin or f"the {cls.KIND}"
        try:
            content = json.dumps(value if stored else plain(value, origin))
        except ValueError as error:  # whole numbers of thousands of digits
            raise SpecError(f"{origin}: {error}", remedy="Write numbers of a sensible size") from error
        try:
            return cls.model_validate_json(
                content, strict=True, extra="ignore" if stored else None, by_alias=True, by_name=False
            )
        except ValidationError as error:
            raise spec_error(error, cls, origin) from error

    @classmethod
    def from_file(cls, path: Path) -> Self:
        """Read one resource from a YAML file."""
        try:
            text = path.read_text(encoding="utf-8")
        except OSError as error:
            raise SpecError(f"{path}: {error.strerror}", remedy=f"Give the path of a {cls.KIND} YAML file") from error
        except UnicodeDecodeError as error:
            raise SpecError(f"{path} is not UTF-8 text", remedy=f"Give the path of a {cls.KIND} YAML file") from error
        return cls.from_yaml(text, origin=str(path))
