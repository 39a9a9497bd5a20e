"""Answers of Ollama's API: objects, or lines of them; and what it shows of models."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from time import perf_counter
from typing import Any

from penstock_runtime.errors import RequestError
from penstock_runtime.generation.loop import FinishReason
from penstock_runtime.generation.tool_calls import CallPart, ToolCallFinder, ToolForm, joined
from penstock_runtime.http.api.core.bodies import dumps, error_response
from penstock_runtime.http.api.core.generation import EventStream, StartedGeneration, TokenWriter, new_tokens, separate
from penstock_runtime.http.api.core.service import ModelService
from penstock_runtime.http.transport.message import ErrorFormat
from penstock_runtime.serving.generation_request import Continuation
from penstock_runtime.tasks.fields import JsonSchema

LINES = b"application/x-ndjson"
NANOSECONDS = 10**9
ANSWER: JsonSchema = {
    "type": "object",
    "properties": {"model": {"type": "string"}, "created_at": {"type": "string"}, "done": {"type": "boolean"}},
    "required": ["model", "created_at", "done"],
}


def now() -> str:
    """The time, as in Ollama's answers."""
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")


class LineWriter:
    """One answer, while it is generated."""

    def __init__(
        self,
        name: str,
        started: StartedGeneration,
        *,
        is_chat: bool,
        tokens: TokenWriter | None,
        tools: ToolForm | None,
    ) -> None:
        """`tokens`: writes probabilities, if they are wanted. `tools`: the form of calls to look for in the text."""
        self._name, self._started, self._is_chat, self._tokens = name, started, is_chat, tokens
        self._finder = None if tools is None else ToolCallFinder(tools)
        self._parts: list[CallPart] = []
        self._first = 0.0

    def whole(self, ended: Continuation) -> dict[str, Any]:
        """The answer of a continuation that has ended."""
        self._first = self._started.tokenised
        text, calls = self._separate(ended, ended.text)
        return {**self._piece(text, calls, ended.tokens), **self._end(ended)}

    def lines(self, one: Continuation) -> list[dict[str, Any]]:
        """The lines for new tokens."""
        self._first = self._first or perf_counter()
        text, calls = self._separate(one, one.new_text)
        tokens = new_tokens(one.new)
        found = []
        if text or calls or (self._tokens is not None and tokens):
            found.append({**self._piece(text, calls, tokens), "done": False})
        if one.finish is not None:
            found.append({**self._piece("", [], []), **self._end(one)})
        return found

    def _separate(self, one: Continuation, text: str) -> tuple[str, list[dict[str, Any]]]:
        """New text, and at the end the calls, as Ollama sends them whole."""
        text, parts = separate(self._finder, text, one.finish)
        self._parts += parts
        return text, _calls(self._parts) if one.finish is not None else []

    def _piece(self, text: str, calls: list[dict[str, Any]], tokens: Sequence[Any]) -> dict[str, Any]:
        frame: dict[str, Any] = {"model": self._name, "created_at": now()}
        if self._is_chat:
            frame["message"] = {"role": "assistant", "content": text, **({"tool_calls": calls} if calls else {})}
        else:
            frame["response"] = text
        if self._tokens is not None and tokens:
            frame["logprobs"] = [self._tokens.with_top(one) for one in tokens]
        return frame

    def _end(self, one: Continuation) -> dict[str, Any]:
        started, ended = self._started, perf_counter()
        generation = started.generation
        return {
            "done": True,
            "done_reason": "length" if one.finish is FinishReason.LENGTH else "stop",
            "total_duration": int((ended - started.arrived) * NANOSECONDS),
            "load_duration": 0,
            "prompt_eval_count": generation.prompt_tokens,
            "prompt_eval_duration": int((self._first - started.tokenised) * NANOSECONDS),
            "eval_count": generation.generated_tokens,
            "eval_duration": int((ended - self._first) * NANOSECONDS),
        }


def _calls(parts: Sequence[CallPart]) -> list[dict[str, Any]]:
    found = []
    for call in joined(parts):
        try:
            found.append({"function": {"name": call.name, "arguments": json.loads(call.arguments)}})
        except ValueError:  # cut
            continue
    return found


class Lines(EventStream):
    """The lines of one answer."""

    def __init__(self, started: StartedGeneration, writer: LineWriter) -> None:
        super().__init__(started.generation)
        self._writer = writer

    def events(self, changed: Sequence[Continuation]) -> list[bytes]:
        """See `EventStream`."""
        return [dumps(line) + b"\n" for one in changed for line in self._writer.lines(one)]

    def last(self) -> list[bytes]:
        """See `EventStream`."""
        return []

    def failed(self, error: RequestError) -> bytes:
        """See `EventStream`."""
        return error_response(error, ErrorFormat.PENSTOCK).body + b"\n"


def model_entry(service: ModelService, started: str) -> dict[str, Any]:
    """The one model, in a list."""
    name, digest = service.status.name, service.status.digest.removeprefix("sha256:")
    entry = {"name": name, "model": name, "modified_at": started, "size": 0, "digest": digest or "0" * 64}
    return {**entry, "details": details(service)}


def details(service: ModelService) -> Mapping[str, Any]:
    """Of the model's form."""
    plan = service.status.plan
    precision = "" if plan is None else plan.recipe.precision.value
    return {
        "parent_model": "", "format": "penstock", "family": "", "families": [], "parameter_size": "",
        "quantization_level": precision,
    }  # fmt: skip
