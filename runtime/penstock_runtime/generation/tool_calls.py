"""Calls of tools in generated text: finds them in the form that a model's chat template taught it, and makes a grammar
of that form. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from penstock_runtime.generation.detokeniser import StopStrings

BEGIN, END = "<tool_call>", "</tool_call>"
LIST_TOKEN = "[TOOL_CALLS]"  # noqa: S105 - not a password
"""Before a list of calls, in Mistral's templates."""
WRITTEN_AS: Mapping[str, Any] = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""JSON as templates write it, in arguments and in answers by a schema: with one space after commas and colons. Small
models otherwise fill an answer with white space, which JSON allows anywhere."""
HALF_CALL = re.compile(r'\s*(?:\[\s*)?(?:\{\s*(?:"(?:n(?:a(?:m(?:e(?:"\s*(?::.*)?)?)?)?)?)?)?)?', re.DOTALL)
"""What an answer that was cut can be the beginning of a call with."""
NAMED = re.compile(r'\s*(?:\[\s*)?\{\s*"name"\s*:(?!.*\}\s*\]?\s*$)', re.DOTALL)
"""A call that is not complete: no brace ends it."""
BEGINNING = re.compile(
    r'\s*(?:\[\s*)?\{\s*"name"\s*:\s*"((?:[^"\\]|\\.)*)"\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)', re.DOTALL
)
"""A call up to its arguments. Calls that begin otherwise are found when they are complete."""


class ToolForm(Enum):
    """How a model writes its calls."""

    TAGGED = "tagged"
    """Each as {"name", "arguments"} between <tool_call> and </tool_call>, with text around them: Qwen, Hermes."""
    WHOLE = "whole"
    """The whole answer is a call, or a list of calls, with "arguments" or "parameters": Llama 3."""
    LIST = "list"
    """The whole answer is a list of calls with "arguments", after the token [TOOL_CALLS]: Mistral."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of a tool."""

    name: str
    arguments: str
    """JSON; the model may have ended before it was complete."""


@dataclass(frozen=True, slots=True)
class CallPart:
    """A piece of a call, while the model writes it."""

    number: int
    """Of the call in its answer, from 0."""
    name: str | None
    """In the first piece of a call."""
    arguments: str
    """The next characters of the JSON."""


def tool_form(template: str) -> ToolForm | None:
    """The form that a chat template shows to the model; None if the template does not know tools."""
    if "tools" not in template:
        return None
    if BEGIN in template:
        return ToolForm.TAGGED
    return ToolForm.LIST if LIST_TOKEN in template else ToolForm.WHOLE


def arguments_name(template: str, form: ToolForm) -> str:
    """The field with the arguments, as the template shows it to the model."""
    is_llama = form is ToolForm.WHOLE and re.search(r'"parameters\\?"\s*:', template) is not None
    return "parameters" if is_llama else "arguments"


def calls_grammar(
    form: ToolForm, tools: Sequence[Mapping[str, Any]], *, field: str, several: bool, token: int | None = None
) -> str:
    """A grammar in llguidance's variant of Lark: an answer that calls one of `tools`, and nothing else.

    `tools`: functions with `name` and perhaps `parameters`, a JSON schema. `field`: the name of the arguments.
    `several`: more calls may follow. `token`: of [TOOL_CALLS], if the model has it.
    """
    names = [f"call_{index}" for index in range(len(tools))]
    rules = [f"call: {' | '.join(names)}"]
    for name, tool in zip(names, tools, strict=True):
        begin = f'{{"name": {json.dumps(tool["name"], ensure_ascii=False)}, "{field}": '
        schema = {"type": "object", **(tool.get("parameters") or {}), "x-guidance": dict(WRITTEN_AS)}
        rules.append(f'{name}: {json.dumps(begin, ensure_ascii=False)} %json {json.dumps(schema)} "}}"')
    if form is ToolForm.TAGGED:
        start = 'start: tagged ("\\n" tagged)*' if several else "start: tagged"
        rules.append(f'tagged: "{BEGIN}\\n" call "\\n{END}"')
    elif form is ToolForm.LIST:
        more = '(", " call)* ' if several else ""
        start = f'start: {"" if token is None else f"<[{token}]> "}"[" call {more}"]"'
    else:
        start = "start: call"
    return "\n".join([start, *rules]) + "\n"


def joined(parts: Iterable[CallPart]) -> list[ToolCall]:
    """The calls of these pieces."""
    calls: dict[int, ToolCall] = {}
    for part in parts:
        before = calls.get(part.number, ToolCall(part.name or "", ""))
        calls[part.number] = ToolCall(before.name, before.arguments + part.arguments)
    return list(calls.values())


class ToolCallFinder:
    """Separates one answer, which arrives in pieces, into text and calls."""

    def __init__(self, form: ToolForm) -> None:
        self._form = form
        self._tag = StopStrings([BEGIN])
        self._held = ""
        """Text that is a call, or may become one."""
        self._arguments: _ObjectReader | None = None
        """The arguments of the call that is held, once they have begun."""
        self._begin = 0
        """Where they begin in the held text."""
        self._is_inside = False
        self._is_text = False
        """The answer is a call as a whole, or none: it does not begin like a call."""
        self.found = 0
        """The number of calls that have begun."""
        self.is_cut = False
        """The answer ended inside of the arguments of a call."""

    @property
    def is_open(self) -> bool:
        """A call has begun, and its arguments are not complete."""
        return self._arguments is not None and not self._arguments.is_complete

    def push(self, piece: str) -> tuple[str, list[CallPart]]:
        """The text, and the pieces of calls, that are certain with this piece."""
        return self._tagged(piece) if self._form is ToolForm.TAGGED else self._whole(piece)

    def finish(self, *, is_cut: bool = False) -> tuple[str, list[CallPart]]:
        """The text that was held back, at the end of the answer: a call without its end tag counts, and half a call is
        no text. `is_cut`: the answer ended at a limit of tokens."""
        if not self._is_inside and self._form is ToolForm.TAGGED:
            tag = self._tag.finish()
            return "" if is_cut else tag, []
        held = self._held
        self.is_cut = self.is_open
        parts, is_call = self._end_call(held)
        is_half = self._is_inside or (is_cut and HALF_CALL.fullmatch(held)) or NAMED.match(held)
        return ("" if is_call or is_half else held), parts

    def _whole(self, piece: str) -> tuple[str, list[CallPart]]:
        if self._is_text:
            return piece, []
        begin = (self._held + piece).lstrip()
        if not begin or begin[0] in "{[":
            return "", self._add(piece)
        self._is_text = True
        text, self._held = self._held + piece, ""
        return text, []

    def _tagged(self, piece: str) -> tuple[str, list[CallPart]]:
        text = ""
        parts: list[CallPart] = []
        while piece:
            if not self._is_inside:
                before = self._tag.held + piece
                text += self._tag.push(piece)
                piece = ""
                if self._tag.found is not None:
                    piece = before[before.index(BEGIN) + len(BEGIN) :]
                    self._tag = StopStrings([BEGIN])
                    self._is_inside = True
                continue
            parts += self._add(piece)
            piece = ""
            if self.is_open:  # the end tag may be part of an argument
                continue
            end = self._held.find(END, 0 if self._arguments is None else self._begin + self._arguments.size)
            if end >= 0:
                content, piece = self._held[:end], self._held[end + len(END) :]
                last, is_call = self._end_call(content)
                text += "" if is_call else BEGIN + content + END
                parts += last
                self._is_inside = False
        # Line ends around the tags are part of the form, not of the text.
        return ("" if not text.strip() and (parts or self.found or self._is_inside) else text), parts

    def _add(self, piece: str) -> list[CallPart]:
        """More text of what may be a call."""
        self._held += piece
        if self._arguments is not None:
            new = self._arguments.push(piece)
            return [CallPart(self.found - 1, None, new)] if new else []
        begin = BEGINNING.match(self._held)
        name = None if begin is None else _text(begin[1])
        if begin is None or name is None:
            return []
        self._arguments, self._begin = _ObjectReader(), begin.end()
        self.found += 1
        return [CallPart(self.found - 1, name, self._arguments.push(self._held[begin.end() :]))]

    def _end_call(self, content: str) -> tuple[list[CallPart], bool]:
        """The calls in the text of a call which have not begun yet, and whether it is one."""
        has_begun, self._arguments, self._held = self._arguments is not None, None, ""
        calls = read_calls(content)[1 if has_begun else 0 :]
        parts = [CallPart(self.found + index, call.name, call.arguments) for index, call in enumerate(calls)]
        self.found += len(calls)
        return parts, has_begun or bool(calls)


class _ObjectReader:
    """The text of one JSON object, which arrives in pieces, up to its last brace."""

    def __init__(self) -> None:
        self.size = 0
        self._depth = 0
        self._is_string = self._is_escaped = False

    @property
    def is_complete(self) -> bool:
        return self.size > 0 and self._depth == 0

    def push(self, piece: str) -> str:
        """What of this piece belongs to the object."""
        taken = 0
        for character in "" if self.is_complete else piece:
            taken += 1
            if self._is_escaped:
                self._is_escaped = False
            elif self._is_string:
                self._is_escaped = character == "\\"
                self._is_string = character != '"'
            elif character == '"':
                self._is_string = True
            elif character in "{[":
                self._depth += 1
            elif character in "}]":
                self._depth -= 1
                if self._depth == 0:
                    break
        self.size += taken
        return piece[:taken]


def _text(escaped: str) -> str | None:
    """The text of a JSON string without its quotation marks; None if it is none."""
    try:
        return str(json.loads(f'"{escaped}"'))
    except ValueError:
        return None


def read_calls(text: str) -> list[ToolCall]:
    """The calls of a JSON object or list; empty for anything else."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return []
    calls = [_call(one) for one in (value if isinstance(value, list) else [value])]
    return [] if None in calls else [one for one in calls if one is not None]


def _call(value: Any) -> ToolCall | None:
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):
        return ToolCall(value["name"], arguments)
    return ToolCall(value["name"], json.dumps(arguments, ensure_ascii=False)) if isinstance(arguments, dict) else None
