"""Answers of OpenAI's API for text generation: whole ones, and the events of streams."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from penstock_runtime.errors import RequestError
from penstock_runtime.generation.loop import Delta, FinishReason
from penstock_runtime.generation.sampling import SampledToken
from penstock_runtime.generation.token_text import token_bytes
from penstock_runtime.generation.tool_calls import CallPart, ToolCall, ToolCallFinder, ToolForm, joined
from penstock_runtime.http.api.bodies import error_response
from penstock_runtime.http.api.generation import EventStream, event, usage
from penstock_runtime.http.api.service import ModelService
from penstock_runtime.http.transport.message import ErrorFormat, Request
from penstock_runtime.serving.generation_model import GenerationModel
from penstock_runtime.serving.generation_request import Continuation, Generation

DONE = b"data: [DONE]\n\n"
FINISH = dict.fromkeys(FinishReason, "stop") | {FinishReason.LENGTH: "length"}


@dataclass(frozen=True)
class Frame:
    """What all objects of one answer have in common."""

    identifier: str
    created: int
    model: str
    fingerprint: str

    def of(self, kind: str, choices: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        """An object of the API."""
        return {
            "id": self.identifier,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
            "choices": choices,
            **more,
        }


def frame_of(service: ModelService, prefix: str, request: Request, model: GenerationModel) -> Frame:
    """The frame of the answer to a request. `prefix`: of its identifier."""
    key = model.manifest.key[:12] if model.manifest is not None else "local"
    invariant = model.facts.get("batch_invariant")
    fingerprint = f"fp_{key}" if invariant else f"fp_{key}_varies_with_batch"
    identifier = prefix + request.identifier.decode("ascii")
    return Frame(identifier, int(time.time()), service.status.name, fingerprint)


class ChatAnswer:
    """Answers of `/v1/chat/completions`."""

    whole_kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"

    def __init__(
        self, model: GenerationModel, frame: Frame, *, with_logprobs: bool, tools: ToolForm | None = None
    ) -> None:
        """`tools`: the form of calls to look for in the text; None: it is text."""
        self._tokens = TokenWriter(model)
        self._frame = frame
        self._with_logprobs = with_logprobs
        self._tools = tools
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
        if self._tools is None:
            return text, []
        finder = self._finders.setdefault(one.choice, ToolCallFinder(self._tools))
        text, parts = finder.push(text)
        if one.finish is not None:
            rest, last = finder.finish()
            text, parts = text + rest, parts + last
        return text, parts

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
        return "tool_calls" if finder is not None and finder.found and not finder.is_cut else _finish(one)

    def opening(self, choice: int) -> dict[str, Any] | None:
        """The first part of a choice in a stream; None: there is none."""
        delta = {"role": "assistant", "content": ""}
        return {"index": choice, "delta": delta, "logprobs": None, "finish_reason": None}

    def part(self, one: Continuation) -> dict[str, Any] | None:
        """What is new of a choice, in a stream; None: nothing."""
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


class CompletionAnswer:
    """Answers of `/v1/completions`."""

    whole_kind = chunk_kind = "text_completion"

    def __init__(self, model: GenerationModel, *, with_logprobs: bool) -> None:
        self._tokens = TokenWriter(model)
        self._with_logprobs = with_logprobs
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
        """What is new of a choice, in a stream; None: nothing."""
        tokens = new_tokens(one.new)
        if not one.new_text and not (self._with_logprobs and tokens):
            return None
        return self._choice(one, one.new_text, tokens, None)

    def ending(self, one: Continuation) -> dict[str, Any]:
        """The last part of a choice in a stream: the reason of its end."""
        return {"index": one.choice, "text": "", "logprobs": None, "finish_reason": _finish(one)}

    def _choice(
        self, one: Continuation, text: str, tokens: Sequence[SampledToken], finish: str | None
    ) -> dict[str, Any]:
        logprobs = self._logprobs(one, tokens) if self._with_logprobs else None
        return {"index": one.choice, "text": text, "logprobs": logprobs, "finish_reason": finish}

    def _logprobs(self, one: Continuation, tokens: Sequence[SampledToken]) -> dict[str, Any]:
        texts = [self._tokens.text(each.token) for each in tokens]
        offset = self._offsets.get(one.choice, 0)
        offsets = []
        for text in texts:
            offsets.append(offset)
            offset += len(text)
        self._offsets[one.choice] = offset
        return {
            "tokens": texts,
            "token_logprobs": [each.logprob for each in tokens],
            "top_logprobs": [self._by_text(each.top) for each in tokens],
            "text_offset": offsets,
        }

    def _by_text(self, top: Sequence[tuple[int, float]]) -> dict[str, float]:
        """Of tokens with one text, such as parts of characters, the most probable one, which comes first."""
        found: dict[str, float] = {}
        for token, value in top:
            found.setdefault(self._tokens.text(token), value)
        return found


class TokenWriter:
    """The text of single tokens of a model, in the form of the API."""

    def __init__(self, model: GenerationModel) -> None:
        self._backend = model.tokenizer.backend
        self._byte_level = model.byte_level

    def text(self, token: int) -> str:
        """The text of a token; U+FFFD where it is a part of a character."""
        return token_bytes(self._backend, token, byte_level=self._byte_level).decode(errors="replace")

    def entry(self, token: int, logprob: float | None) -> dict[str, Any]:
        """A token with its bytes and logarithm."""
        content = token_bytes(self._backend, token, byte_level=self._byte_level)
        return {"token": content.decode(errors="replace"), "logprob": logprob, "bytes": list(content)}

    def with_top(self, sampled: SampledToken) -> dict[str, Any]:
        """A token, and the most probable ones in its place."""
        top = [self.entry(token, logprob) for token, logprob in sampled.top]
        return {**self.entry(sampled.token, sampled.logprob), "top_logprobs": top}


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


def new_tokens(deltas: Sequence[Delta]) -> list[SampledToken]:
    """The tokens of these deltas."""
    return [delta.token for delta in deltas if delta.token is not None]


def _finish(one: Continuation) -> str | None:
    return None if one.finish is None else FINISH[one.finish]
