"""Fields of requests: one declaration provides both validation, with remedies, and the JSON Schema.

A kind checks one JSON value (`parse`) and describes it (`schema`). `parse` accepts what `schema` allows, except lone
surrogates (JSON Schema cannot express them). `parse` raises nothing but InvalidInput.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import islice
from typing import Any, Protocol

from penstock.errors import closest
from penstock_runtime.errors import InvalidInput

JsonSchema = dict[str, Any]

COMPARED = 100
"""Fields of an object that are compared with a missing field: there may be a hundred thousand."""


class FieldKind(Protocol):
    """A kind of JSON value."""

    @property
    def words(self) -> str:
        """Its name in messages: `a text`."""
        ...

    @property
    def python(self) -> type:
        """The Python type of the JSON value."""
        ...

    def parse(self, value: Any, where: str) -> Any:
        """The checked value; `where` is its path for the error."""
        ...

    def schema(self) -> JsonSchema:
        """Its JSON Schema."""
        ...


def json_words(value: Any) -> str:
    """The name of a JSON value in messages."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return f"the number {value!r}" if isinstance(value, float) or abs(value) < 10**18 else "a very large number"
    names = {str: "a text", list: "a list", dict: "an object"}
    return next((name for kind, name in names.items() if isinstance(value, kind)), f"a {type(value).__name__}")


def shortened_name(name: object) -> str:
    """A name from a client, for error messages: shortened, and without characters that JSON cannot hold."""
    return str(name)[:100].encode(errors="replace").decode()


def near(name: str, known: Sequence[str]) -> str:
    """A hint for an unknown name: the nearest known one, or all."""
    close = closest(name[:100], known)
    return f"Did you mean {close!r}?" if close else f"Known here: {', '.join(known) or 'none'}"


def _wrong(kind: FieldKind, value: Any, where: str) -> InvalidInput:
    return InvalidInput(
        f"{where} must be {kind.words}, not {json_words(value)}", field=where, remedy=f"Send {kind.words}"
    )


def _unknown(name: str, where: str, known: Sequence[str]) -> InvalidInput:
    path = f"{where}.{shortened_name(name)}"
    return InvalidInput(f"{path}: there is no such field", field=path, remedy=near(str(name), known))


@dataclass(frozen=True)
class Text:
    """A text that is not empty and can be written as UTF-8."""

    words: str = "a text"
    python: type = str
    description: str = ""

    def parse(self, value: Any, where: str) -> str:
        """The text."""
        if not isinstance(value, str):
            raise _wrong(self, value, where)
        if not value:
            raise InvalidInput(f"{where} is empty", field=where, remedy="Send a text with at least one character")
        if not value.isascii():
            try:
                value.encode()
            except UnicodeEncodeError as error:
                raise InvalidInput(
                    f"{where} has half a surrogate pair at character {error.start}, which is no character",
                    field=where,
                    remedy="Cut texts between characters, not inside a \\uD83D\\uDE00 pair",
                ) from error
        return value

    def schema(self) -> JsonSchema:
        """A string of at least one character."""
        described = {"description": self.description} if self.description else {}
        return {"type": "string", "minLength": 1, **described}


@dataclass(frozen=True)
class Boolean:
    """true or false."""

    words: str = "true or false"
    python: type = bool

    def parse(self, value: Any, where: str) -> bool:
        """The truth value."""
        if not isinstance(value, bool):
            raise _wrong(self, value, where)
        return value

    def schema(self) -> JsonSchema:
        """A boolean."""
        return {"type": "boolean"}


@dataclass(frozen=True)
class Integer:
    """An integer within limits (both included)."""

    minimum: int
    maximum: int
    python: type = int

    @property
    def words(self) -> str:
        """Its name with the limits."""
        return f"a whole number from {self.minimum} to {self.maximum}"

    def parse(self, value: Any, where: str) -> int:
        """The number; 3.0 counts as whole, as it does in JSON Schema."""
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or not self.minimum <= value <= self.maximum:
            raise _wrong(self, value, where)
        return int(value)

    def takes_all(self, values: Sequence[Any]) -> bool:
        """True if all values are valid integers, checked in bulk: a body may hold a million."""
        return set(map(type, values)) == {int} and min(values) >= self.minimum and max(values) <= self.maximum

    def schema(self) -> JsonSchema:
        """An integer with its limits."""
        return {"type": "integer", "minimum": self.minimum, "maximum": self.maximum}


@dataclass(frozen=True)
class Number:
    """A number within limits (both included)."""

    minimum: float
    maximum: float
    python: type = object

    @property
    def words(self) -> str:
        """Its name with the limits."""
        return f"a number from {self.minimum:g} to {self.maximum:g}"

    def parse(self, value: Any, where: str) -> float:
        """The number."""
        if isinstance(value, bool) or not isinstance(value, int | float) or not self.minimum <= value <= self.maximum:
            raise _wrong(self, value, where)
        return float(value)

    def schema(self) -> JsonSchema:
        """A number with its limits."""
        return {"type": "number", "minimum": self.minimum, "maximum": self.maximum}


@dataclass(frozen=True)
class Choice:
    """One of several words; `any_case` also accepts capitals, and returns the spelling of `options`."""

    options: tuple[str, ...]
    any_case: bool = False
    python: type = str

    @property
    def words(self) -> str:
        """All options."""
        return f"one of {', '.join(self.options)}"

    def parse(self, value: Any, where: str) -> str:
        """The option."""
        if not isinstance(value, str):
            raise _wrong(self, value, where)
        given = value.lower() if self.any_case else value
        if given not in self.options:
            raise InvalidInput(
                f"{where} must be {self.words}, not {value[:100]!r}", field=where, remedy=near(given, self.options)
            )
        return given

    def schema(self) -> JsonSchema:
        """An enumeration."""
        capitals = [option.capitalize() for option in self.options] if self.any_case else []
        return {"type": "string", "enum": [*self.options, *capitals]}


@dataclass(frozen=True)
class ListOf:
    """A list of values of one kind with a limited length."""

    item: FieldKind
    at_most: int
    at_least: int = 1
    words: str = "a list of texts"
    python: type = list

    def parse(self, value: Any, where: str) -> list[Any]:
        """The checked items."""
        if not isinstance(value, list):
            raise _wrong(self, value, where)
        if len(value) < self.at_least:
            found = "is empty" if not value else f"has {len(value)} entries"
            raise InvalidInput(f"{where} {found}", field=where, remedy=f"Send {self.at_least} or more")
        if len(value) > self.at_most:
            raise InvalidInput(
                f"{where} has {len(value)} entries; at most {self.at_most} fit into one request",
                field=where,
                remedy="Split it over several requests",
            )
        if isinstance(self.item, Integer) and self.item.takes_all(value):
            return value
        return [self.item.parse(entry, f"{where}[{index}]") for index, entry in enumerate(value)]

    def schema(self) -> JsonSchema:
        """An array with its limits."""
        return {"type": "array", "items": self.item.schema(), "minItems": self.at_least, "maxItems": self.at_most}


class Others(Enum):
    """The rule of an object for fields that it does not know."""

    REFUSED = "refused"
    KEPT = "kept"
    """They are in the parsed object, unchanged."""
    IGNORED = "ignored"
    """For the APIs of other servers, with clients that send fields of newer versions and of similar servers."""


@dataclass(frozen=True)
class Object:
    """An object with known fields; optional fields may be absent or null and then have their default."""

    required: Mapping[str, FieldKind]
    optional: Mapping[str, tuple[FieldKind, Any]] = field(default_factory=dict)
    """Kind and default of each."""
    notes: Mapping[str, str] = field(default_factory=dict)
    """The description of each field in the schema."""
    words: str = "an object"
    others: Others = Others.REFUSED
    python: type = dict

    def parse(self, value: Any, where: str) -> dict[str, Any]:
        """All fields, with defaults."""
        if not isinstance(value, Mapping):
            raise _wrong(self, value, where)
        if not value and not self.required:
            return {name: default for name, (_, default) in self.optional.items()}
        known = [*self.required, *self.optional]
        parsed = {}
        if self.others is Others.IGNORED:
            self._refuse_misspelt(value, where)
        else:
            for name in value:
                if name in known:
                    continue
                if self.others is Others.REFUSED:
                    raise _unknown(name, where, known)
                parsed[name] = value[name]
        for name, kind in self.required.items():
            if name not in value:
                path = f"{where}.{name}"
                raise InvalidInput(f"{path} is missing", field=path, remedy=f"Add {kind.words}")
            parsed[name] = kind.parse(value[name], f"{where}.{name}")
        for name, (kind, default) in self.optional.items():
            given = value.get(name)
            parsed[name] = default if given is None else kind.parse(given, f"{where}.{name}")
        return parsed

    def _refuse_misspelt(self, value: Mapping[str, Any], where: str) -> None:
        """InvalidInput for an unknown field that is called nearly as a required one that is missing."""
        missing = [name for name in self.required if name not in value]
        if not missing:
            return
        unknown = (name for name in value if name not in self.required and name not in self.optional)
        for name in islice(unknown, COMPARED):
            if closest(name[:100], missing):
                raise _unknown(name, where, missing)

    def schema(self) -> JsonSchema:
        """An object, by default without further fields; optional ones are nullable."""
        properties: JsonSchema = {}
        for name, kind in self.required.items():
            properties[name] = kind.schema() | self._note(name)
        for name, (kind, default) in self.optional.items():
            properties[name] = _nullable(kind.schema()) | self._note(name) | {"default": default}
        required = {"required": list(self.required)} if self.required else {}
        return {
            "type": "object",
            "properties": properties,
            **required,
            "additionalProperties": self.others is not Others.REFUSED,
        }

    def _note(self, name: str) -> JsonSchema:
        return {"description": self.notes[name]} if name in self.notes else {}


@dataclass(frozen=True)
class Either:
    """One of several kinds, distinguished by their JSON type."""

    kinds: tuple[FieldKind, ...]
    python: type = object

    @property
    def words(self) -> str:
        """All of them."""
        return " or ".join(kind.words for kind in self.kinds)

    def parse(self, value: Any, where: str) -> Any:
        """The value, parsed by the kind of its JSON type."""
        for kind in self.kinds:
            if isinstance(value, kind.python) and isinstance(value, bool) == (kind.python is bool):
                return kind.parse(value, where)
        raise _wrong(self, value, where)

    def schema(self) -> JsonSchema:
        """Any of their schemas."""
        return {"anyOf": [kind.schema() for kind in self.kinds]}


def parse_parameters(value: Any, kinds: Object) -> dict[str, Any]:
    """The `parameters` of a request; null and absent are the same as none."""
    return kinds.parse({} if value is None else value, "parameters")


def body_schema(
    inputs: FieldKind, parameter_kinds: Object, *, examples: Sequence[JsonSchema], about: str
) -> JsonSchema:
    """The schema of a whole request body."""
    required = ["inputs", "parameters"] if parameter_kinds.required else ["inputs"]
    schema = parameter_kinds.schema()
    return {
        "type": "object",
        "description": about,
        "properties": {
            "inputs": inputs.schema(),
            "parameters": schema if parameter_kinds.required else _nullable(schema),
        },
        "required": required,
        "additionalProperties": False,
        "examples": list(examples),
    }


def _nullable(schema: JsonSchema) -> JsonSchema:
    if "anyOf" in schema:
        return schema | {"anyOf": [*schema["anyOf"], {"type": "null"}]}
    wider = schema | {"type": [schema["type"], "null"]}
    return wider | {"enum": [*schema["enum"], None]} if "enum" in schema else wider
