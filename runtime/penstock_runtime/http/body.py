"""From bytes to checked values: JSON, then the shape of an API. Pure; every refusal says where and what to do."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

import orjson
from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic_core import ErrorDetails

from penstock_runtime.errors import InvalidInput, MalformedBody, UnsupportedMediaType
from penstock_runtime.http.message import Request

Model = TypeVar("Model", bound=BaseModel)
JSON_REMEDY = "Send JSON with the header content-type: application/json"


class Shape(BaseModel):
    """The body of a route: no unknown fields, no conversions (a number is not a string)."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


def read_json(request: Request) -> Any:
    """The body as a value.

    UnsupportedMediaType for another content type or a compressed body; MalformedBody names line and column.
    Lone surrogates, NaN and Infinity are not JSON. Of duplicate keys the last one counts.
    """
    content_type = request.headers.get(b"content-type", b"application/json")
    if content_type != b"application/json":
        _check_content_type(content_type)
    if b"content-encoding" in request.headers:
        encoding = request.headers[b"content-encoding"].decode("latin-1").strip().lower()
        if encoding not in {"", "identity"}:
            raise UnsupportedMediaType(f"the body is compressed ({encoding})", remedy="Send it uncompressed")
    try:
        return orjson.loads(request.body)
    except orjson.JSONDecodeError as error:
        raise malformed(request.body, error) from None


def malformed(body: bytes, error: orjson.JSONDecodeError) -> MalformedBody:
    """The error in words."""
    if not body:
        return MalformedBody("the body is empty", remedy='Send JSON such as {"inputs": "some text"}')
    reason = error.msg.split(": line", 1)[0]
    remedy = JSON_REMEDY
    if "surrogate" in reason and "UTF-8" not in reason:
        remedy = "Send characters outside the basic plane as a pair of escapes, or as UTF-8"
    elif "UTF-8" in reason:
        remedy = "Encode the body as UTF-8"
    elif "infinity" in reason or body[error.pos : error.pos + 3] in {b"NaN", b"Inf", b"-In"}:
        remedy = "JSON has no NaN and no Infinity: send null or leave the field out"
    return MalformedBody(f"the body is not JSON: {reason} at line {error.lineno}, column {error.colno}", remedy=remedy)


def _check_content_type(value: bytes) -> None:
    kind, _, parameters = value.decode("latin-1").partition(";")
    kind = kind.strip().lower()
    if kind and kind != "application/json" and not (kind.startswith("application/") and kind.endswith("+json")):
        raise UnsupportedMediaType(f"the body is {kind}, not JSON", remedy=JSON_REMEDY)
    for parameter in parameters.split(";"):
        name, _, charset = parameter.partition("=")
        if name.strip().lower() == "charset" and charset.strip(' "').lower() not in {"utf-8", "utf8", "us-ascii"}:
            raise UnsupportedMediaType(f"the body's charset is {charset.strip()}", remedy="Encode the body as UTF-8")


def checked(shape: type[Model], value: Any) -> Model:
    """`value` as `shape`; InvalidInput names the field, the problem and, for a typo, what was probably meant."""
    if not isinstance(value, dict):
        fields = ", ".join(f'"{name}"' for name, field in shape.model_fields.items() if field.is_required())
        raise InvalidInput(f"the body is {kind_of(value)}, not an object", remedy=f"Send an object with {fields}")
    try:
        return shape.model_validate(value)
    except ValidationError as error:
        raise _invalid(shape, value, error.errors(include_url=False, include_context=False)) from None


def _invalid(shape: type[BaseModel], value: dict[str, Any], errors: Sequence[ErrorDetails]) -> InvalidInput:
    names = [field.alias or name for name, field in shape.model_fields.items()]
    unknown = [
        str(error["loc"][0]) for error in errors if error["type"] == "extra_forbidden" and len(error["loc"]) == 1
    ]
    missing = [str(error["loc"][0]) for error in errors if error["type"] == "missing" and len(error["loc"]) == 1]
    if missing:
        return missing_field(missing[0], unknown)
    if unknown:
        return unknown_field(unknown[0], [name for name in names if name not in value], names)
    first = errors[0]
    name = str(first["loc"][0]) if first["loc"] else ""
    field = shape.model_fields.get(name)
    wanted = (field.description or "").partition(". ")[0].rstrip(".") if field is not None else ""
    if len({error["loc"] for error in errors if error["loc"][:1] == first["loc"][:1]}) > 1:
        # Every member of a union has complained: none of their messages is the one that helps.
        return InvalidInput(f"'{name}' is {kind_of(value[name])}, which does not fit", field=name, remedy=_give(wanted))
    where = ".".join(str(part) for part in first["loc"] if isinstance(part, int) or part in value or part in names)
    message = first["msg"].removeprefix("Value error, ")
    return InvalidInput(
        f"'{where or name}': {message[0].lower()}{message[1:]}", field=where or name, remedy=_give(wanted)
    )


def _give(wanted: str) -> str:
    return f"Give {wanted[0].lower()}{wanted[1:]}" if wanted else ""


def missing_field(name: str, unknown: Iterable[str] = ()) -> InvalidInput:
    """A required field is not there; a field that looks like it may be meant."""
    close = difflib.get_close_matches(name, list(unknown), n=1, cutoff=0.6)
    if close:
        return InvalidInput(
            f"body has no field '{name}'; did you mean it instead of '{close[0]}'?",
            field=name,
            remedy=f"Rename '{close[0]}' to '{name}'",
        )
    return InvalidInput(f"body has no field '{name}'", field=name, remedy=f"Add '{name}' (/docs has an example)")


def unknown_field(name: str, free: Sequence[str], known: Sequence[str], *, what: str = "field") -> InvalidInput:
    """A field that does not exist. `free`: known ones that were not given, the likelier meaning of a typo."""
    shown = name if len(name) <= 60 else name[:60] + "…"
    close = difflib.get_close_matches(name, free, n=1, cutoff=0.6) or difflib.get_close_matches(name, known, n=1)
    if close:
        return InvalidInput(f"there is no {what} '{shown}'", field=shown, remedy=f"Did you mean '{close[0]}'?")
    have = ", ".join(known) or "none"
    return InvalidInput(f"there is no {what} '{shown}'", field=shown, remedy=f"Known here: {have}")


def kind_of(value: Any) -> str:
    """A JSON value's type in words."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "a boolean"
    if isinstance(value, int | float):
        return "a number"
    if isinstance(value, str):
        return "a string" if value else "an empty string"
    if isinstance(value, list):
        return "a list" if value else "an empty list"
    return "an object"
