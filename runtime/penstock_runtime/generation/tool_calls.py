"""Finds calls of tools in generated text, in the form that a model's chat template taught it. Pure."""

from __future__ import annotations

import json
from dataclasses import dataclass
from enum import Enum
from typing import Any

from penstock_runtime.generation.detokeniser import StopStrings

BEGIN, END = "<tool_call>", "</tool_call>"


class ToolForm(Enum):
    """How a model writes its calls."""

    TAGGED = "tagged"
    """Each as {"name", "arguments"} between <tool_call> and </tool_call>, with text around them: Qwen, Hermes."""
    WHOLE = "whole"
    """The whole answer is a call, or a list of calls, with "arguments" or "parameters": Llama 3, Mistral."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of a tool."""

    name: str
    arguments: str
    """JSON."""


def tool_form(template: str) -> ToolForm | None:
    """The form that a chat template shows to the model; None if the template does not know tools."""
    if "tools" not in template:
        return None
    return ToolForm.TAGGED if BEGIN in template else ToolForm.WHOLE


class ToolCallFinder:
    """Separates one answer, which arrives in pieces, into text and calls."""

    def __init__(self, form: ToolForm) -> None:
        self._form = form
        self._tag = StopStrings([BEGIN])
        self._held = ""
        """Text that is a call, or may become one."""
        self._is_inside = False
        self._is_text = False
        """`WHOLE`: the answer does not begin like a call."""
        self.found = 0
        """The number of calls so far."""

    def push(self, piece: str) -> tuple[str, list[ToolCall]]:
        """The text and the calls that this piece completes."""
        text, calls = self._whole(piece) if self._form is ToolForm.WHOLE else self._tagged(piece)
        self.found += len(calls)
        return text, calls

    def finish(self) -> tuple[str, list[ToolCall]]:
        """What was held back, at the end of the answer: a call without its end tag counts, other text stays text."""
        held, self._held = self._held, ""
        if not self._is_inside and self._form is ToolForm.TAGGED:
            return self._tag.finish(), []
        calls = read_calls(held)
        self.found += len(calls)
        if calls:
            return "", calls
        return (BEGIN + held if self._is_inside else held), []

    def _whole(self, piece: str) -> tuple[str, list[ToolCall]]:
        if self._is_text:
            return piece, []
        self._held += piece
        begin = self._held.lstrip()
        if not begin or begin[0] in "{[":
            return "", []
        self._is_text = True
        text, self._held = self._held, ""
        return text, []

    def _tagged(self, piece: str) -> tuple[str, list[ToolCall]]:
        text = ""
        calls: list[ToolCall] = []
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
            self._held += piece
            piece = ""
            content, tag, rest = self._held.partition(END)
            if tag:
                found = read_calls(content)
                text += "" if found else BEGIN + content + END
                calls += found
                self._held, piece, self._is_inside = "", rest, False
        # Line ends around the tags are part of the form, not of the text.
        return ("" if not text.strip() and (calls or self.found or self._is_inside) else text), calls


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
