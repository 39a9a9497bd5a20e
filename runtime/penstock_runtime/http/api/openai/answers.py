"""Answers of OpenAI's API: embeddings, whole texts, and the events of streams."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from penstock_runtime.errors import RequestError
from penstock_runtime.generation.loop import FinishReason
from penstock_runtime.generation.sampling import SampledToken
from penstock_runtime.generation.tool_calls import CallPart, ToolCall, ToolCallFinder, ToolForm, joined
from penstock_runtime.http.api.core.bodies import (
    error_response,
)
from penstock_runtime.http.api.core.generation import (
    EventStream,
    Frame,
    TokenWriter,
    event,
    new_tokens,
    separate,
    usage,
)
from penstock_runtime.http.transport.message import ErrorFormat
from penstock_runtime.serving.generation_model import GenerationModel
from penstock_runtime.serving.generation_request import Continuation, Generation
from penstock_runtime.tasks.fields import JsonSchema


def embeddings(vectors: Any, encoding: str) -> list[dict[str, Any]]:
    """The vectors of a list or array [texts, width], as numbers or, with `encoding` base64, as text."""
    if encoding == "base64":
        vectors = [base64.b64encode(np.asarray(one, dtype="<f4").tobytes()).decode("ascii") for one in vectors]
    return [{"object": "embedding", "index": index, "embedding": one} for index, one in enumerate(vectors)]


def answer_schema(kind: str) -> JsonSchema:
    """Of a whole text answer."""
    number = {"type": "integer", "minimum": 0}
    return {
        "type": "object",
        "properties": {
            "id": {"type": "string"},
            "object": {"const": kind},
            "created": {"type": "integer"},
            "model": {"type": "string"},
            "system_fingerprint": {"type": "string"},
            "choices": {"type": "array", "items": {"type": "object"}, "minItems": 1},
            "usage": {
                "type": "object",
                "properties": {"prompt_tokens": number, "completion_tokens": number, "total_tokens": number},
            },
        },
        "required": ["id", "object", "created", "model", "choices", "usage"],
    }


MODEL: JsonSchema = {
    "type": "object",
    "properties": {
        "id": {"type": "string"},
        "object": {"const": "model"},
        "created": {"type": "integer"},
        "owned_by": {"type": "string"},
        "name": {"type": "string"},
        "ready": {"type": "boolean"},
        "vector_space": {"type": "string"},
    },
    "required": ["id", "object", "created", "owned_by", "name", "ready"],
}
EMBEDDINGS: JsonSchema = {
    "type": "object",
    "properties": {
        "object": {"const": "list"},
        "data": {
            "type": "array",
            "items": {
                "type": "object",
                "properties": {
                    "object": {"const": "embedding"},
                    "index": {"type": "integer"},
                    "embedding": {"anyOf": [{"type": "array", "items": {"type": "number"}}, {"type": "string"}]},
                },
                "required": ["object", "index", "embedding"],
            },
        },
        "model": {"type": "string"},
        "usage": {
            "type": "object",
            "properties": {"prompt_tokens": {"type": "integer"}, "total_tokens": {"type": "integer"}},
            "required": ["prompt_tokens", "total_tokens"],
        },
    },
    "required": ["object", "data", "model", "usage"],
}
DONE = b"data: [DONE]\n\n"
FINISH = dict.fromkeys(FinishReason, "stop") | {FinishReason.LENGTH: "length"}


class ChatAnswer:
    """Answers of `/v1/chat/completions`."""

    whole_kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"

    def __init__(
        self,
        model: GenerationModel,
        frame: Frame,
        *,
        with_logprobs: bool,
        tools: ToolForm | None = None,
        is_named: bool = False,
    ) -> None:
        """`tools`: the form of calls to look for in the text; None: it is text. `is_named`: the request has chosen one,
        which OpenAI answers with the reason `stop`."""
        self._tokens = TokenWriter(model)
        self._frame = frame
        self._with_logprobs = with_logprobs
        self._tools = tools
        self._called = "stop" if is_named else "tool_calls"
        self._finders: dict[int, ToolCallFinder] = {}

    def whole(self, frame: Frame, ended: Sequence[Continuation], generation: Generation) -> dict[str, Any]:
        """The whole answer."""
        choices = [
            {
                "index": one.choice,
                "message": self._message(one),
                "logprobs": self._logprobs(one.tokens),
                "finish_reason": self._finish(one),
            }
            for one in ended
        ]
        return frame.of(self.whole_kind, choices, usage=usage(generation))

    def _message(self, one: Continuation) -> dict[str, Any]:
        text, parts = self._separate(one, one.text)
        message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
        if parts:
            calls = [self._call(one, number, call) for number, call in enumerate(joined(parts))]
            message |= {"content": text or None, "tool_calls": calls}
        return message

    def _separate(self, one: Continuation, text: str) -> tuple[str, list[CallPart]]:
        """Text and pieces of calls of new text."""
        if self._tools is not None:
            self._finders.setdefault(one.choice, ToolCallFinder(self._tools))
        return separate(self._finders.get(one.choice), text, one.finish)

    def _call(self, one: Continuation, number: int, call: ToolCall) -> dict[str, Any]:
        identifier = f"call_{self._frame.identifier.removeprefix('chatcmpl-')}_{one.choice}_{number}"
        return {
            "id": identifier,
            "type": "function",
            "function": {"name": call.name, "arguments": call.arguments},
        }

    def _part_of_call(self, one: Continuation, part: CallPart) -> dict[str, Any]:
        if part.name is None:
            return {"index": part.number, "function": {"arguments": part.arguments}}
        return {"index": part.number, **self._call(one, part.number, ToolCall(part.name, part.arguments))}

    def _finish(self, one: Continuation) -> str | None:
        finder = self._finders.get(one.choice)
        return self._called if finder is not None and finder.found and not finder.is_cut else _finish(one)

    def opening(self, choice: int) -> dict[str, Any] | None:
        """The first part of a choice in a stream; None: there is none."""
        delta = {"role": "assistant", "content": ""}
        return {"index": choice, "delta": delta, "logprobs": None, "finish_reason": None}

    def part(self, one: Continuation) -> dict[str, Any] | None:
        """The new part of a choice, in a stream; None: nothing."""
        logprobs = self._logprobs(new_tokens(one.new))
        text, parts = self._separate(one, one.new_text)
        if not text and not parts and logprobs is None:
            return None
        delta: dict[str, Any] = {"content": text} if text or not parts else {}
        if parts:
            delta["tool_calls"] = [self._part_of_call(one, part) for part in parts]
        return {"index": one.choice, "delta": delta, "logprobs": logprobs, "finish_reason": None}

    def ending(self, one: Continuation) -> dict[str, Any]:
        """The last part of a choice in a stream: the reason of its end."""
        return {"index": one.choice, "delta": {}, "logprobs": None, "finish_reason": self._finish(one)}

    def _logprobs(self, tokens: Sequence[SampledToken]) -> dict[str, Any] | None:
        if not self._with_logprobs or not tokens:
            return {"content": [], "refusal": None} if self._with_logprobs and tokens else None
        return {"content": [self._tokens.with_top(one) for one in tokens], "refusal": None}


@dataclass(frozen=True)
class EchoedPrompts:
    """The prompts of a request that answers begin with."""

    generation: Generation
    texts: Sequence[str]
    tokens: Sequence[Sequence[int]]

    def of(self, one: Continuation) -> tuple[str, list[SampledToken]]:
        """The prompt's text and tokens, with their probabilities if they were wanted."""
        count = len(self.generation.continuations) // len(self.texts)
        index = one.choice // count
        # Further answers to a prompt do not compute it again.
        scored = self.generation.continuations[index * count].prompt
        return self.texts[index], [SampledToken(self.tokens[index][0]), *scored]


class CompletionAnswer:
    """Answers of `/v1/completions`."""

    whole_kind = chunk_kind = "text_completion"

    def __init__(self, model: GenerationModel, *, with_logprobs: bool, echoed: EchoedPrompts | None = None) -> None:
        """`echoed`: the prompts, if answers begin with them."""
        self._tokens = TokenWriter(model)
        self._specials = model.special_tokens
        self._with_logprobs = with_logprobs
        self._echoed = echoed
        self._offsets: dict[int, int] = {}

    def whole(self, frame: Frame, ended: Sequence[Continuation], generation: Generation) -> dict[str, Any]:
        """The whole answer."""
        choices = [self._choice(one, one.text, one.tokens, _finish(one)) for one in ended]
        return frame.of(self.whole_kind, choices, usage=usage(generation))

    def opening(self, choice: int) -> dict[str, Any] | None:
        """The first part of a choice in a stream; None: there is none."""
        _ = choice
        return None

    def part(self, one: Continuation) -> dict[str, Any] | None:
        """The new part of a choice, in a stream; None: nothing."""
        tokens = new_tokens(one.new)
        if not one.new_text and not (self._with_logprobs and tokens) and not self._is_echoed(one):
            return None
        return self._choice(one, one.new_text, tokens, None)

    def ending(self, one: Continuation) -> dict[str, Any]:
        """The last part of a choice in a stream: the reason of its end."""
        return {"index": one.choice, "text": "", "logprobs": None, "finish_reason": _finish(one)}

    def _choice(
        self, one: Continuation, text: str, tokens: Sequence[SampledToken], finish: str | None
    ) -> dict[str, Any]:
        if self._echoed is not None and self._is_echoed(one):
            prompt, scored = self._echoed.of(one)
            text, tokens = prompt + text, [*scored, *tokens]
        logprobs = self._logprobs(one, tokens) if self._with_logprobs else None
        self._offsets.setdefault(one.choice, 0)
        return {"index": one.choice, "text": text, "logprobs": logprobs, "finish_reason": finish}

    def _is_echoed(self, one: Continuation) -> bool:
        """The next part begins with the prompt."""
        return self._echoed is not None and one.choice not in self._offsets

    def _logprobs(self, one: Continuation, tokens: Sequence[SampledToken]) -> dict[str, Any]:
        texts = [self._tokens.text(each.token) for each in tokens]
        offset = self._offsets.get(one.choice, 0)
        offsets = []
        for text, each in zip(texts, tokens, strict=True):
            offsets.append(offset)
            offset += 0 if each.token in self._specials else len(text)
        self._offsets[one.choice] = offset
        return {
            "tokens": texts,
            "token_logprobs": [each.logprob for each in tokens],
            "top_logprobs": [None if each.logprob is None else self._by_text(each.top) for each in tokens],
            "text_offset": offsets,
        }

    def _by_text(self, top: Sequence[tuple[int, float]]) -> dict[str, float]:
        """Of tokens with one text, such as parts of characters, the most probable one, which comes first."""
        found: dict[str, float] = {}
        for token, value in top:
            found.setdefault(self._tokens.text(token), value)
        return found


class AnswerStream(EventStream):
    """The events of both routes."""

    def __init__(
        self,
        generation: Generation,
        frame: Frame,
        writer: ChatAnswer | CompletionAnswer,
        options: Mapping[str, Any] | None,
    ) -> None:
        super().__init__(generation)
        self._frame = frame
        self._writer = writer
        self._with_usage = bool(options and options["include_usage"])
        self._opened: set[int] = set()

    def events(self, changed: Sequence[Continuation]) -> list[bytes]:
        """See `EventStream`."""
        choices: list[dict[str, Any] | None] = []
        for one in changed:
            if one.choice not in self._opened:
                self._opened.add(one.choice)
                choices.append(self._writer.opening(one.choice))
            choices.append(self._writer.part(one))
            if one.finish is not None:
                choices.append(self._writer.ending(one))
        return [self._chunk([choice]) for choice in choices if choice is not None]

    def last(self) -> list[bytes]:
        """See `EventStream`."""
        if not self._with_usage:
            return [DONE]
        return [event(self._frame.of(self._writer.chunk_kind, [], usage=usage(self._generation))), DONE]

    def failed(self, error: RequestError) -> bytes:
        """See `EventStream`."""
        return b"data: %b\n\n%b" % (error_response(error, ErrorFormat.OPENAI).body, DONE)

    def _chunk(self, choices: list[dict[str, Any]]) -> bytes:
        more = {"usage": None} if self._with_usage else {}
        return event(self._frame.of(self._writer.chunk_kind, choices, **more))


def _finish(one: Continuation) -> str | None:
    return None if one.finish is None else FINISH[one.finish]
