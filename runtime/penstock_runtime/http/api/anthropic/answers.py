"""Answers of Anthropic's API: a message of blocks, whole or as events."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from penstock_runtime.errors import RequestError
from penstock_runtime.generation.loop import FinishReason
from penstock_runtime.generation.tool_calls import CallPart, ToolCallFinder, ToolForm
from penstock_runtime.http.api.core.bodies import dumps, error_response
from penstock_runtime.http.api.core.generation import EventStream, separate
from penstock_runtime.http.transport.message import ErrorFormat
from penstock_runtime.serving.generation_request import Continuation, Generation
from penstock_runtime.tasks.fields import JsonSchema

STOP_REASONS = dict.fromkeys(FinishReason, "end_turn") | {
    FinishReason.LENGTH: "max_tokens",
    FinishReason.STOP_STRING: "stop_sequence",
}
ANSWER: JsonSchema = {
    "type": "object",
    "properties": {
        "id": {"type": "string"},
        "type": {"const": "message"},
        "role": {"const": "assistant"},
        "model": {"type": "string"},
        "content": {"type": "array", "items": {"type": "object"}},
        "stop_reason": {"type": ["string", "null"]},
        "stop_sequence": {"type": ["string", "null"]},
        "usage": {"type": "object"},
    },
    "required": ["id", "type", "role", "model", "content", "stop_reason", "stop_sequence", "usage"],
}


class MessageWriter:
    """One message, while it is generated."""

    def __init__(self, identifier: str, model: str, tools: ToolForm | None) -> None:
        """`tools`: the form of calls to look for in the text."""
        self._head = {"id": identifier, "type": "message", "role": "assistant", "model": model}
        self._finder = None if tools is None else ToolCallFinder(tools)
        self._blocks: list[dict[str, Any]] = []
        self._arguments = ""
        """JSON of the last block, if that is a call."""
        self._is_open = False
        self._finish: FinishReason | None = None
        self._stop: str | None = None

    def whole(self, ended: Continuation, generation: Generation) -> dict[str, Any]:
        """The message of a continuation that has ended."""
        self._push(ended, ended.text)
        return self._message(generation)

    def part(self, one: Continuation) -> list[Mapping[str, Any]]:
        """The events for the new tokens."""
        return self._push(one, one.new_text)

    def begin(self, generation: Generation) -> Mapping[str, Any]:
        """The first event of a stream."""
        return {"type": "message_start", "message": {**self._message(generation), "content": [], "stop_reason": None}}

    def end(self, generation: Generation) -> list[Mapping[str, Any]]:
        """The last events of a stream."""
        message = self._message(generation)
        delta = {name: message[name] for name in ("stop_reason", "stop_sequence")}
        return [{"type": "message_delta", "delta": delta, "usage": message["usage"]}, {"type": "message_stop"}]

    def _message(self, generation: Generation) -> dict[str, Any]:
        is_call = self._finder is not None and self._finder.found and not self._finder.is_cut
        reason = "tool_use" if is_call else STOP_REASONS.get(self._finish) if self._finish is not None else None
        return {
            **self._head,
            "content": self._blocks,
            "stop_reason": reason,
            "stop_sequence": self._stop if reason == "stop_sequence" else None,
            "usage": {
                "input_tokens": generation.prompt_tokens - generation.reused_tokens,
                "cache_creation_input_tokens": 0,
                "cache_read_input_tokens": generation.reused_tokens,
                "output_tokens": generation.generated_tokens,
            },
        }

    def _push(self, one: Continuation, text: str) -> list[Mapping[str, Any]]:
        text, parts = separate(self._finder, text, one.finish)
        events: list[Mapping[str, Any]] = []
        if text:
            if not self._is_open or self._blocks[-1]["type"] != "text":
                events += self._open({"type": "text", "text": ""})
            self._blocks[-1]["text"] += text
            events.append(self._delta({"type": "text_delta", "text": text}))
        for part in parts:
            events += self._add_to_call(part)
        if one.finish is not None:
            self._finish, self._stop = one.finish, one.stop or None
            events += self._close()
        return events

    def _add_to_call(self, part: CallPart) -> list[Mapping[str, Any]]:
        events: list[Mapping[str, Any]] = []
        if part.name is not None:
            identifier = f"toolu_{self._head['id'].removeprefix('msg_')}_{part.number}"
            events = self._open({"type": "tool_use", "id": identifier, "name": part.name, "input": {}})
        self._arguments += part.arguments
        if part.arguments:
            events.append(self._delta({"type": "input_json_delta", "partial_json": part.arguments}))
        return events

    def _open(self, block: dict[str, Any]) -> list[Mapping[str, Any]]:
        events = self._close()
        self._blocks.append(block)
        self._is_open = True
        start = {"type": "content_block_start", "index": len(self._blocks) - 1, "content_block": dict(block)}
        return [*events, start]

    def _delta(self, delta: Mapping[str, Any]) -> Mapping[str, Any]:
        return {"type": "content_block_delta", "index": len(self._blocks) - 1, "delta": delta}

    def _close(self) -> list[Mapping[str, Any]]:
        """The last block is complete."""
        if not self._is_open:
            return []
        self._is_open = False
        stop = {"type": "content_block_stop", "index": len(self._blocks) - 1}
        if self._blocks[-1]["type"] == "tool_use":
            arguments, self._arguments = self._arguments, ""
            try:
                self._blocks[-1]["input"] = json.loads(arguments)
            except ValueError:  # cut
                del self._blocks[-1]
        return [stop]


class MessageEvents(EventStream):
    """The events of one message."""

    def __init__(self, generation: Generation, writer: MessageWriter) -> None:
        super().__init__(generation)
        self._writer = writer
        self._is_begun = False

    def events(self, changed: Sequence[Continuation]) -> list[bytes]:
        """See `EventStream`."""
        begin = [] if self._is_begun else [self._writer.begin(self._generation)]
        self._is_begun = True
        return [_event(one) for one in [*begin, *(event for one in changed for event in self._writer.part(one))]]

    def last(self) -> list[bytes]:
        """See `EventStream`."""
        return [_event(one) for one in self._writer.end(self._generation)]

    def failed(self, error: RequestError) -> bytes:
        """See `EventStream`."""
        return b"event: error\ndata: %b\n\n" % error_response(error, ErrorFormat.ANTHROPIC).body


def _event(value: Mapping[str, Any]) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (value["type"].encode(), dumps(value))
