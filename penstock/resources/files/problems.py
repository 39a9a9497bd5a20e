"""Makes one SpecError of pydantic's errors about a resource: field paths as in the file, and remedies."""

from __future__ import annotations

import re
import types
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import StrEnum
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from penstock.errors import SpecError, closest
from penstock.resources.files.yaml_documents import number

SYNONYMS = {
    "embedding": "feature-extraction",
    "embeddings": "feature-extraction",
    "sentence-embedding": "feature-extraction",
    "similarity": "sentence-similarity",
    "rerank": "text-ranking",
    "reranking": "text-ranking",
    "cross-encoder": "text-ranking",
    "sentiment-analysis": "text-classification",
    "classification": "text-classification",
    "sequence-classification": "text-classification",
    "ner": "token-classification",
    "qa": "question-answering",
    "extractive-qa": "question-answering",
    "masked-lm": "fill-mask",
    "mlm": "fill-mask",
    "zero-shot": "zero-shot-classification",
    "gliner": "zero-shot-token-classification",
    "zero-shot-ner": "zero-shot-token-classification",
    "ort": "onnxruntime",
    "onnx": "onnxruntime",
    "float32": "fp32",
    "f32": "fp32",
    "bfloat16": "bf16",
    "int8": "int8-static",
    "off": "Disabled",
    "never": "Disabled",
    "none": "Disabled",
}
"""Names of our values in other software."""
REFERENCE = "docs/reference/model-endpoint.md lists the fields"
_WORDS = {
    "string_type": "must be text",
    "string_too_short": "must not be empty",
    "int_type": "must be a whole number",
    "int_from_float": "must be a whole number",
    "float_type": "must be a number",
    "finite_number": "must be a finite number",
    "bool_type": "must be true or false",
    "tuple_type": "must be a list",
    "list_type": "must be a list",
    "dict_type": "must hold fields of its own",
    "model_type": "must hold fields of its own",
    "model_attributes_type": "must hold fields of its own",
}
_LONGEST_SHOWN = 60


class BrokenRules(ValueError):
    """One or more rules over the fields of an object do not hold; `messages` has a sentence for each."""

    def __init__(self, messages: Sequence[str]) -> None:
        super().__init__("; ".join(messages))
        self.messages = tuple(messages)


def spec_error(error: ValidationError, model: type[BaseModel], origin: str) -> SpecError:
    """All problems of a resource of type `model` as one error; `origin` names the file when there are several."""
    details = error.errors(include_url=False)
    problems = [found for one in details if not _follows(one, details) for found in _problems(one, model)]
    if len(problems) == 1:
        return problems[0]
    lines = "".join(f"\n  {problem}" for problem in problems)
    return SpecError(f"{origin} has {len(problems)} problems:{lines}", field=problems[0].field, problems=problems)


def intended_word(word: str, words: Sequence[str]) -> str | None:
    """The allowed word that the author probably meant: a synonym, a similar word, or one that begins so; or None."""
    lowered = {candidate.lower(): candidate for candidate in words}
    known = SYNONYMS.get(word.lower().replace("_", "-"))
    if known in words:
        return known
    near = closest(word.lower(), lowered)
    if near is None and len(word) >= 3:  # `p95` for p95Milliseconds
        near = next((candidate for candidate in lowered if candidate.startswith(word.lower())), None)
    return None if near is None else lowered[near]


def _follows(one: ErrorDetails, details: Sequence[ErrorDetails]) -> bool:
    """True for a list that is too short only because its entries are wrong."""
    location = one["loc"]
    return one["type"] == "too_short" and any(
        len(other["loc"]) > len(location) and other["loc"][: len(location)] == location for other in details
    )


def _problems(details: ErrorDetails, model: type[BaseModel]) -> list[SpecError]:
    error = details.get("ctx", {}).get("error")
    if isinstance(error, BrokenRules):
        path = _path(details["loc"])
        return [SpecError(f"{path}: {message}", field=path) for message in error.messages]
    return [_problem(details, model)]


def _problem(details: ErrorDetails, model: type[BaseModel]) -> SpecError:
    path = _path(details["loc"])
    kind, given, context = details["type"], details["input"], details.get("ctx", {})
    if kind == "missing":
        return SpecError(f"{path} is missing", field=path, remedy=f"Add it ({REFERENCE})")
    if kind == "extra_forbidden":
        return SpecError(f"{path}: there is no such field", field=path, remedy=_meant_field(details["loc"], model))
    if kind in {"enum", "literal_error"}:
        return _no_choice(path, given, str(context.get("expected", "")))
    if kind == "spec":
        return SpecError(f"{path}: {context['problem']}", field=path, remedy=str(context["remedy"]))
    if kind == "value_error":
        return SpecError(f"{path}: {details['msg'].removeprefix('Value error, ')}", field=path)
    return SpecError(
        f"{path}: {_rule(kind, context, details['msg'])}{_given(given)}", field=path, remedy=_hint(kind, given)
    )


def _rule(kind: str, context: Mapping[str, Any], message: str) -> str:
    if kind == "greater_than":
        return f"must be over {context['gt']:g}"
    if kind == "greater_than_equal":
        return f"must be at least {context['ge']:g}"
    if kind == "less_than_equal":
        return f"must be at most {context['le']:g}"
    if kind == "too_short":
        return f"must have at least {context['min_length']} entry"
    if kind == "too_long":
        return f"must have at most {context['max_length']} entries"
    if kind == "string_too_long":
        return f"must have at most {context['max_length']} characters"
    return _WORDS.get(kind, message)


def _hint(kind: str, given: object) -> str:
    if kind == "string_type" and isinstance(given, bool | int | float):
        return "Put it in quotes"
    if kind in {"float_type", "int_type"} and isinstance(given, str):
        if number(given) is not None:
            return "Write it without quotes"
        return "Write the number alone: the unit is in the field's name"
    if kind in {"tuple_type", "list_type"}:
        return "Start each entry on a line of its own with '- '"
    if kind in {"model_type", "model_attributes_type", "dict_type"}:
        return f"Indent its fields below it ({REFERENCE})"
    return ""


def _no_choice(path: str, given: object, expected: str) -> SpecError:
    choices = re.findall(r"'([^']*)'", expected)
    message = (
        f"{path}: {_shown(given)} is not one of {', '.join(choices)}"
        if len(choices) > 1
        else (f"{path} is {_shown(given)}")
    )
    if len(choices) == 1:
        return SpecError(message, field=path, remedy=f"Write {choices[0]}")
    # YAML reads off and no as false.
    written = "off" if given is False else given
    meant = intended_word(written, choices) if isinstance(written, str) else None
    if meant is not None:
        return SpecError(message, field=path, remedy=f"Did you mean {meant}?")
    quotes = " in quotes (YAML reads on, off, yes and no as booleans)" if isinstance(given, bool) else ""
    return SpecError(message, field=path, remedy=f"Write one of them{quotes}")


def _meant_field(location: Sequence[int | str], model: type[BaseModel]) -> str:
    """The field that the author probably meant: another name at this path, or this name at another path."""
    name, parent = str(location[-1]), tuple(str(part) for part in location[:-1])
    here = _fields_at(parent, model)
    near = intended_word(name.replace("_", ""), here)
    same = name.replace("_", "").lower()
    elsewhere = [path for path in _all_paths(model) if path[-1].lower() == same]
    if near is not None and (near.lower() == same or not elsewhere):
        return f"Did you mean {near}?"
    if elsewhere:
        return f"Did you mean {' or '.join('.'.join(path) for path in elsewhere)}?"
    return f"Fields here: {', '.join(here)}" if here else f"See {REFERENCE.removesuffix(' lists the fields')}"


def _fields_at(path: Sequence[str], model: type[BaseModel]) -> list[str]:
    """The names of the fields below a path of the resource, as they are written."""
    found: type[BaseModel] | None = model
    for part in path:
        fields = {} if found is None else dict(_fields(found, entries=True))
        # Else the key or the index of an entry, of which `found` is the type.
        found = fields.get(part, found)
    return [name for name, _ in _fields(found)] if found is not None else []


def _all_paths(model: type[BaseModel], above: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for name, nested in _fields(model):
        yield (*above, name)
        if nested is not None:
            yield from _all_paths(nested, (*above, name))


def _fields(model: type[BaseModel], *, entries: bool = False) -> Iterator[tuple[str, type[BaseModel] | None]]:
    """Field names as written, with the type of those that have fields themselves; `entries`: or of lists and maps of
    such."""
    for name, field in model.model_fields.items():
        yield field.alias or name, _nested(field.annotation, entries=entries)


def _nested(annotation: object, *, entries: bool) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    is_union = typing.get_origin(annotation) in {typing.Union, types.UnionType}
    members = typing.get_args(annotation) if entries or is_union else ()
    return next((found for one in members if (found := _nested(one, entries=entries)) is not None), None)


def _path(location: Sequence[int | str]) -> str:
    """`spec.workload.sequenceLengths[0]`."""
    parts = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in location)
    return parts.lstrip(".") or "the resource"


def _given(value: object) -> str:
    return "" if isinstance(value, dict | list | StrEnum) else f" (given: {_shown(value)})"


def _shown(value: object) -> str:
    """The value as in the file, shortened: `true` rather than `True`."""
    text = str(value).lower() if isinstance(value, bool) else repr(value)
    return text if len(text) <= _LONGEST_SHOWN else f"{text[: _LONGEST_SHOWN - 3]}..."


_OTHER_NAMES = {"huggingface": "hf", "hub": "hf", "gcs": "gs", "abfs": "az", "azure": "az", "azblob": "az"}
_REPOSITORY = re.compile(r"[\w.-]+/[\w.-]+(@[\w./-]+)?", re.ASCII)
_HUB_PAGE = re.compile(
    r"https?://(?:www\.)?(?:huggingface\.co|hf\.co)/([\w.-]+/[\w.-]+)(?:/tree/([\w./-]+?))?/?", re.ASCII
)
_HUB_FILE = re.compile(
    r"https?://(?:www\.)?(?:huggingface\.co|hf\.co)/([\w.-]+/[\w.-]+)/(?:blob|resolve)/([\w.-]+)/([\w./-]+\.gguf)",
    re.ASCII,
)


def meant_source(text: str, schemes: Iterable[str]) -> str:
    """The remedy for a text that is no model source: the probable correct form; empty: none is known."""
    page = _HUB_PAGE.fullmatch(text)
    if page is not None:
        return f"Did you mean hf://{page[1]}{f'@{page[2]}' if page[2] else ''}?"
    file = _HUB_FILE.fullmatch(text)
    if file is not None:
        return f"Did you mean hf://{file[1]}/{file[3]}@{file[2]}?"
    scheme, separator, rest = text.partition(":")
    rest = rest.lstrip("/")
    if separator and rest:
        lowered = scheme.strip().lower()
        known = _OTHER_NAMES.get(lowered) or closest(lowered, schemes)
        if known is not None:
            return f"Did you mean {known}://{'/' if known == 'file' else ''}{rest}?"
    if text.startswith("/"):
        return f"Did you mean file://{text}?"
    if text.startswith(("./", "../", "~")):
        return "Write a local folder with its absolute path: file:///absolute/path"
    if _REPOSITORY.fullmatch(text):
        return f"Did you mean hf://{text}?"
    return ""
