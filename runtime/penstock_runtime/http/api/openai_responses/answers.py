"""Answers of `/v1/responses`: the items of an output, and the events that announce them in a stream."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from penstock_runtime.errors import RequestError
from penstock_runtime.generation.loop import FinishReason, JobRequest
from penstock_runtime.generation.tool_calls import CallPart, ToolCallFinder, ToolForm
from penstock_runtime.http.api.core.bodies import dumps
from penstock_runtime.http.api.core.generation import EventStream, TokenWriter, new_tokens, separate
from penstock_runtime.serving.generation_model import GenerationModel
from penstock_runtime.serving.generation_request import Continuation, Generation
from penstock_runtime.tasks.fields import JsonSchema


def settings_of(body: Mapping[str, Any], job: JobRequest, form: Any) -> dict[str, Any]:
    """The fields of the request that the answer repeats, with the defaults that were used."""
    return {
        "background": False,
        "instructions": body["instructions"],
        "max_output_tokens": body["max_output_tokens"],
        "metadata": body["metadata"] or {},
        "parallel_tool_calls": body["parallel_tool_calls"],
        "previous_response_id": None,
        "reasoning": {"effort": None, "summary": None},
        "store": False,
        "temperature": job.sampling.temperature,
        "text": {"format": form},
        "tool_choice": body["tool_choice"],
        "tools": body["tools"] or [],
        "top_logprobs": body["top_logprobs"] or 0,
        "top_p": job.sampling.top_p,
        "truncation": "disabled",
        "user": body["user"],
    }


Event = dict[str, Any]
RESPONSE: JsonSchema = {
    "type": "object",
    "properties": {
        "id": {"type": "string"},
        "object": {"const": "response"},
        "created_at": {"type": "integer"},
        "model": {"type": "string"},
        "status": {"enum": ["completed", "incomplete"]},
        "output": {"type": "array", "items": {"type": "object"}, "minItems": 1},
        "usage": {"type": "object"},
    },
    "required": ["id", "object", "created_at", "model", "status", "output", "usage"],
}


class ResponseWriter:
    """Makes the output of one response, piece by piece, with the events of each piece."""

    def __init__(
        self, head: Mapping[str, Any], model: GenerationModel, *, has_logprobs: bool, tools: ToolForm | None
    ) -> None:
        """`head`: fields of the response that do not change. `tools`: the form of calls to look for in the text."""
        self._head = head
        self._tokens = TokenWriter(model)
        self._has_logprobs = has_logprobs
        self._finder = None if tools is None else ToolCallFinder(tools)
        self._output: list[dict[str, Any]] = []
        self._is_open = False
        """The last item is not complete."""
        self._finish: FinishReason | None = None

    def whole(self, ended: Continuation, generation: Generation) -> dict[str, Any]:
        """The response of a continuation that has ended."""
        self.push(ended, ended.text, self._logprobs(ended, is_whole=True))
        return self.response(generation)

    def part(self, one: Continuation) -> list[Event]:
        """The events for the new tokens."""
        return self.push(one, one.new_text, self._logprobs(one, is_whole=False))

    def push(self, one: Continuation, text: str, logprobs: list[dict[str, Any]]) -> list[Event]:
        """Add text to the output; the events that announce it."""
        text, parts = separate(self._finder, text, one.finish)
        events: list[Event] = []
        if text or (logprobs and not parts):
            events += self._add_text(text, logprobs)
        for part in parts:
            events += self._add_to_call(part)
        if one.finish is not None:
            self._finish = one.finish
            if not self._output:
                events += self._add_text("", [])
            events += self._close()
        return events

    def begin(self) -> list[Event]:
        """The first events of a stream."""
        response = {**self._frame("in_progress"), "output": [], "usage": None}
        return [{"type": f"response.{name}", "response": response} for name in ("created", "in_progress")]

    def end(self, generation: Generation) -> Event:
        """The last event of a stream."""
        response = self.response(generation)
        return {"type": f"response.{response['status']}", "response": response}

    def failed(self, error: RequestError) -> Event:
        """The last event of a stream that cannot be finished."""
        message = f"{error.message}. {error.remedy}" if error.remedy else error.message
        reason = {"code": "server_error", "message": message}
        return {
            "type": "response.failed",
            "response": {**self._frame("failed"), "error": reason, "output": self._output, "usage": None},
        }

    def response(self, generation: Generation) -> dict[str, Any]:
        """The response at its end."""
        prompt, generated = generation.prompt_tokens, generation.generated_tokens
        cached = generation.reused_tokens
        return {
            **self._frame(self._status),
            "output": self._output,
            "usage": {
                "input_tokens": prompt,
                "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": prompt - cached},
                "output_tokens": generated,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": prompt + generated,
            },
        }

    @property
    def _status(self) -> str:
        return "incomplete" if self._finish is FinishReason.LENGTH else "completed"

    def _frame(self, status: str) -> dict[str, Any]:
        is_cut = status == "incomplete"
        details = {"reason": "max_output_tokens"} if is_cut else None
        return {**self._head, "status": status, "error": None, "incomplete_details": details}

    def _logprobs(self, one: Continuation, *, is_whole: bool) -> list[dict[str, Any]]:
        if not self._has_logprobs:
            return []
        return [self._tokens.with_top(token) for token in (one.tokens if is_whole else new_tokens(one.new))]

    # The items of the output

    @property
    def _last(self) -> dict[str, Any]:
        return self._output[-1]

    def _place(self, **more: Any) -> dict[str, Any]:
        """Where the last item is."""
        return {"item_id": self._last["id"], "output_index": len(self._output) - 1, **more}

    def _open(self, kind: str, **fields: Any) -> list[Event]:
        events = self._close() if self._is_open else []
        number = f"{self._head['id'].removeprefix('resp_')}_{len(self._output)}"
        prefix = "msg" if kind == "message" else "fc"
        self._output.append({"id": f"{prefix}_{number}", "type": kind, "status": "in_progress", **fields})
        self._is_open = True
        item = {**self._last, "content": []} if kind == "message" else dict(self._last)
        return [*events, {"type": "response.output_item.added", "output_index": len(self._output) - 1, "item": item}]

    def _add_text(self, text: str, logprobs: list[dict[str, Any]]) -> list[Event]:
        events: list[Event] = []
        if not self._is_open or self._last["type"] != "message":
            part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
            events = self._open("message", role="assistant", content=[part])
            empty = {**part, "logprobs": []}
            events.append({"type": "response.content_part.added", **self._place(content_index=0, part=empty)})
        content = self._last["content"][0]
        content["text"] += text
        content["logprobs"] += logprobs
        if text or logprobs:
            place = self._place(content_index=0, delta=text, logprobs=logprobs)
            events.append({"type": "response.output_text.delta", **place})
        return events

    def _add_to_call(self, part: CallPart) -> list[Event]:
        events: list[Event] = []
        if part.name is not None:
            number = f"{self._head['id'].removeprefix('resp_')}_{part.number}"
            events = self._open("function_call", call_id=f"call_{number}", name=part.name, arguments="")
        self._last["arguments"] += part.arguments
        if part.arguments:
            delta = self._place(delta=part.arguments)
            events.append({"type": "response.function_call_arguments.delta", **delta})
        return events

    def _close(self) -> list[Event]:
        """The last item is complete."""
        item = self._last
        self._is_open = False
        item["status"] = self._status
        done = {"type": "response.output_item.done", "output_index": len(self._output) - 1, "item": item}
        if item["type"] == "function_call":
            place = self._place(arguments=item["arguments"], name=item["name"])
            return [{"type": "response.function_call_arguments.done", **place}, done]
        part = item["content"][0]
        text = self._place(content_index=0, text=part["text"], logprobs=part["logprobs"])
        return [
            {"type": "response.output_text.done", **text},
            {"type": "response.content_part.done", **self._place(content_index=0, part=part)},
            done,
        ]


class ResponseEvents(EventStream):
    """The events of one response."""

    def __init__(self, generation: Generation, writer: ResponseWriter) -> None:
        super().__init__(generation)
        self._writer = writer
        self._number = 0

    def events(self, changed: Sequence[Continuation]) -> list[bytes]:
        """See `EventStream`."""
        begin = self._writer.begin() if self._number == 0 else []
        return [self._event(one) for one in [*begin, *(event for one in changed for event in self._writer.part(one))]]

    def last(self) -> list[bytes]:
        """See `EventStream`."""
        return [self._event(self._writer.end(self._generation))]

    def failed(self, error: RequestError) -> bytes:
        """See `EventStream`."""
        return self._event(self._writer.failed(error))

    def _event(self, event: Event) -> bytes:
        numbered = {"type": event["type"], "sequence_number": self._number, **event}
        self._number += 1
        return b"event: %b\ndata: %b\n\n" % (event["type"].encode(), dumps(numbered))
