"""The API of OpenAI for text generation: `/v1/chat/completions` and `/v1/completions`."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.tasks import TaskName
from penstock_runtime.errors import InvalidInput, PromptTooLong, RequestError, UnsupportedOption
from penstock_runtime.generation.loop import Delta, FinishReason, JobRequest
from penstock_runtime.generation.sampling import SampledToken
from penstock_runtime.generation.token_text import token_bytes
from penstock_runtime.http.api.bodies import checked, error_response, read_json
from penstock_runtime.http.api.generation import EventStream, GenerationApi, event, generator_of, usage
from penstock_runtime.http.api.service import ModelService
from penstock_runtime.http.transport.message import ErrorFormat, Request, Response, Route
from penstock_runtime.serving.generation_model import GenerationModel
from penstock_runtime.serving.generator import Continuation, Generation
from penstock_runtime.tasks.base import RequestLimits
from penstock_runtime.tasks.fields import Boolean, Either, FieldKind, Integer, JsonSchema, ListOf, Object, Others, Text
from penstock_runtime.tasks.text_generation import (
    MESSAGES_LIMIT,
    MOST_CHOICES,
    MOST_TOKENS,
    PENALTY,
    REPETITION,
    SEED,
    SHARE,
    STOPS,
    TEMPERATURE,
    TOP_K,
    Number,
    Prompt,
    refuse_unsupported,
    require_template,
    sampling,
)

TAG = "OpenAI"
MOST_LOGPROBS = 20
DEFAULT_COMPLETION_TOKENS = 16
"""Of `/v1/completions`, as OpenAI's."""
TASKS = frozenset({TaskName.TEXT_GENERATION})
DONE = b"data: [DONE]\n\n"
FINISH = {FinishReason.END_TOKEN: "stop", FinishReason.STOP_STRING: "stop", FinishReason.LENGTH: "length"}
ROLES = ("system", "developer", "user", "assistant", "tool")
ANY = Object({}, others=Others.KEPT)
BIASES = Object({}, others=Others.KEPT, words="an object of token ids and biases")

COMMON: dict[str, tuple[FieldKind, Any]] = {
    "model": (Text("the name of a model"), None),
    "max_tokens": (Integer(1, MOST_TOKENS), None),
    "temperature": (TEMPERATURE, None),
    "top_p": (SHARE, None),
    "top_k": (TOP_K, None),
    "min_p": (SHARE, None),
    "repetition_penalty": (REPETITION, None),
    "presence_penalty": (PENALTY, None),
    "frequency_penalty": (PENALTY, None),
    "logit_bias": (BIASES, None),
    "seed": (SEED, None),
    "stop": (Either((Text(), STOPS)), None),
    "n": (Integer(1, MOST_CHOICES), 1),
    "stream": (Boolean(), False),
    "stream_options": (Object({}, {"include_usage": (Boolean(), False)}, others=Others.IGNORED), None),
    "user": (Text("the name of a user"), None),
}
NOTES = {
    "model": "Not used: an endpoint has one model.",
    "max_tokens": "Tokens to generate.",
    "top_k": "Not part of OpenAI's API: choose among this number of most probable tokens; 0: all.",
    "min_p": "Not part of OpenAI's API: choose among tokens with this share of the highest probability.",
    "repetition_penalty": "Not part of OpenAI's API: divides the scores of tokens of prompt and answer.",
    "logit_bias": "Added to the scores of tokens, by token id; -100 to 100.",
    "seed": "The same seed gives the same answer.",
    "n": "The number of answers.",
    "user": "Not used.",
}
CHAT_BODY = Object(
    {"messages": ListOf(Object({"role": Text()}, others=Others.KEPT, words="a message"), MESSAGES_LIMIT)},
    {
        **COMMON,
        "max_completion_tokens": (Integer(1, MOST_TOKENS), None),
        "logprobs": (Boolean(), False),
        "top_logprobs": (Integer(0, MOST_LOGPROBS), None),
        "chat_template_kwargs": (ANY, None),
    },
    notes={
        **NOTES,
        "max_completion_tokens": "The same as max_tokens; default: as many as fit.",
        "chat_template_kwargs": "Variables of the model's chat template, such as enable_thinking.",
    },
    others=Others.IGNORED,
)
COMPLETION_BODY = Object(
    {"prompt": Either((Text(), ListOf(Integer(0, MOST_TOKENS), 1_000_000, words="a list of token ids")))},
    {**COMMON, "logprobs": (Integer(0, MOST_LOGPROBS), None)},
    notes={**NOTES, "prompt": "A text, or token ids.", "max_tokens": f"Default {DEFAULT_COMPLETION_TOKENS}."},
    others=Others.IGNORED,
)
UNSUPPORTED: Mapping[str, Sequence[Any]] = {
    "response_format": ({"type": "text"},),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "web_search_options": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_grammar": (),
    "guided_choice": (),
    "structured_outputs": (),
    "use_beam_search": (False,),
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "prompt_logprobs": (),
    "lora": (),
}
"""Fields of the API, and of similar servers, that would change the answer; with the values that change nothing."""


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


class OpenAIText(GenerationApi):
    """The handlers."""

    async def chat(self, request: Request) -> Response:
        """`/v1/chat/completions`."""
        raw = read_json(request)
        body = checked(CHAT_BODY, raw)
        refuse_unsupported(raw, UNSUPPORTED)
        model = generator_of(self._service).model
        messages = [_message(one, f"messages[{index}]") for index, one in enumerate(body["messages"])]
        variables = body["chat_template_kwargs"] or {}
        text = require_template(model.template, "messages").render(messages, variables=variables)
        top = (body["top_logprobs"] or 0) if body["logprobs"] else None
        if body["top_logprobs"] is not None and not body["logprobs"]:
            raise InvalidInput("top_logprobs needs logprobs", field="top_logprobs", remedy="Send logprobs: true")
        job = _job(body, model, body["max_completion_tokens"] or body["max_tokens"] or 0, top)
        with _field_named("messages"):
            started = await self._start(request, Prompt(text, special=False), job, body["n"])
        frame = self._frame("chatcmpl-", request, model)
        writer = _Chat(model, with_logprobs=top is not None)
        if body["stream"]:
            stream = _Stream(started.generation, frame, writer, body["stream_options"])
            return await self._stream(started, stream)
        return await self._answer(started, lambda ended: writer.whole(frame, ended, started.generation))

    async def complete(self, request: Request) -> Response:
        """`/v1/completions`."""
        raw = read_json(request)
        body = checked(COMPLETION_BODY, raw)
        refuse_unsupported(raw, UNSUPPORTED)
        model = generator_of(self._service).model
        prompt = body["prompt"]
        if isinstance(prompt, list):
            model.tokenizer.require_embedded(prompt, "prompt")
            if max(prompt) >= model.engine.vocabulary:
                raise InvalidInput(
                    f"prompt has the token {max(prompt)}; this model's tokens are 0 to {model.engine.vocabulary - 1}",
                    field="prompt",
                    remedy="Use the tokenizer of this model",
                )
        job = _job(body, model, body["max_tokens"] or DEFAULT_COMPLETION_TOKENS, body["logprobs"])
        with _field_named("prompt"):
            asked = Prompt(prompt, special=True) if isinstance(prompt, str) else prompt
            started = await self._start(request, asked, job, body["n"])
        frame = self._frame("cmpl-", request, model)
        writer = _Completion(model, with_logprobs=body["logprobs"] is not None)
        if body["stream"]:
            stream = _Stream(started.generation, frame, writer, body["stream_options"])
            return await self._stream(started, stream)
        return await self._answer(started, lambda ended: writer.whole(frame, ended, started.generation))

    def _frame(self, prefix: str, request: Request, model: GenerationModel) -> Frame:
        key = model.manifest.key[:12] if model.manifest is not None else "local"
        invariant = model.facts.get("batch_invariant")
        fingerprint = f"fp_{key}" if invariant else f"fp_{key}_varies_with_batch"
        name = self._service.status.name
        return Frame(prefix + request.identifier.decode("ascii"), int(time.time()), name, fingerprint)


class _Chat:
    """Answers of `/v1/chat/completions`."""

    whole_kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"

    def __init__(self, model: GenerationModel, *, with_logprobs: bool) -> None:
        self._tokens = TokenWriter(model)
        self._with_logprobs = with_logprobs

    def whole(self, frame: Frame, ended: Sequence[Continuation], generation: Generation) -> dict[str, Any]:
        choices = [
            {
                "index": one.choice,
                "message": {"role": "assistant", "content": one.text, "refusal": None},
                "logprobs": self._logprobs(one.tokens),
                "finish_reason": _finish(one),
            }
            for one in ended
        ]
        return frame.of(self.whole_kind, choices, usage=usage(generation))

    def opening(self, choice: int) -> dict[str, Any] | None:
        delta = {"role": "assistant", "content": ""}
        return {"index": choice, "delta": delta, "logprobs": None, "finish_reason": None}

    def part(self, one: Continuation) -> dict[str, Any] | None:
        logprobs = self._logprobs(_tokens(one.new))
        if not one.new_text and logprobs is None:
            return None
        delta = {"content": one.new_text}
        return {"index": one.choice, "delta": delta, "logprobs": logprobs, "finish_reason": None}

    def ending(self, one: Continuation) -> dict[str, Any]:
        return {"index": one.choice, "delta": {}, "logprobs": None, "finish_reason": _finish(one)}

    def _logprobs(self, tokens: Sequence[SampledToken]) -> dict[str, Any] | None:
        if not self._with_logprobs or not tokens:
            return {"content": [], "refusal": None} if self._with_logprobs and tokens else None
        content = [
            {
                **self._tokens.entry(one.token, one.logprob),
                "top_logprobs": [self._tokens.entry(token, logprob) for token, logprob in one.top],
            }
            for one in tokens
        ]
        return {"content": content, "refusal": None}


class _Completion:
    """Answers of `/v1/completions`."""

    whole_kind = chunk_kind = "text_completion"

    def __init__(self, model: GenerationModel, *, with_logprobs: bool) -> None:
        self._tokens = TokenWriter(model)
        self._with_logprobs = with_logprobs
        self._offsets: dict[int, int] = {}

    def whole(self, frame: Frame, ended: Sequence[Continuation], generation: Generation) -> dict[str, Any]:
        choices = [self._choice(one, one.text, one.tokens, _finish(one)) for one in ended]
        return frame.of(self.whole_kind, choices, usage=usage(generation))

    def opening(self, choice: int) -> dict[str, Any] | None:
        _ = choice
        return None

    def part(self, one: Continuation) -> dict[str, Any] | None:
        tokens = _tokens(one.new)
        if not one.new_text and not (self._with_logprobs and tokens):
            return None
        return self._choice(one, one.new_text, tokens, None)

    def ending(self, one: Continuation) -> dict[str, Any]:
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
            "top_logprobs": [{self._tokens.text(token): value for token, value in each.top} for each in tokens],
            "text_offset": offsets,
        }


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


class _Stream(EventStream):
    """The events of both routes."""

    def __init__(
        self, generation: Generation, frame: Frame, writer: _Chat | _Completion, options: Mapping[str, Any] | None
    ) -> None:
        super().__init__(generation)
        self._frame = frame
        self._writer = writer
        self._with_usage = bool(options and options["include_usage"])
        self._opened: set[int] = set()

    def events(self, changed: Sequence[Continuation]) -> list[bytes]:
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
        if not self._with_usage:
            return [DONE]
        return [event(self._frame.of(self._writer.chunk_kind, [], usage=usage(self._generation))), DONE]

    def failed(self, error: RequestError) -> bytes:
        return b"data: %b\n\n%b" % (error_response(error, ErrorFormat.OPENAI).body, DONE)

    def _chunk(self, choices: list[dict[str, Any]]) -> bytes:
        more = {"usage": None} if self._with_usage else {}
        return event(self._frame.of(self._writer.chunk_kind, choices, **more))


def _tokens(deltas: Sequence[Delta]) -> list[SampledToken]:
    return [delta.token for delta in deltas if delta.token is not None]


def _finish(one: Continuation) -> str | None:
    return None if one.finish is None else FINISH[one.finish]


class _field_named:  # noqa: N801 - used like a function
    """Adds the API's field to an error about the prompt's length."""

    def __init__(self, field: str) -> None:
        self._field = field

    def __enter__(self) -> None:
        return

    def __exit__(self, kind: object, error: BaseException | None, _trace: object) -> None:
        if isinstance(error, PromptTooLong):
            error.field = self._field


def _message(value: Mapping[str, Any], where: str) -> dict[str, Any]:
    """A message as chat templates take it: the content as one text."""
    role = value["role"]
    if role not in ROLES:
        raise InvalidInput(
            f"{where}.role is {role[:100]!r}", field=f"{where}.role", remedy=f"Send one of {', '.join(ROLES)}"
        )
    content = value.get("content")
    if isinstance(content, list):
        content = "\n".join(_part(part, f"{where}.content[{index}]") for index, part in enumerate(content))
    elif content is None and role == "assistant":
        content = ""
    elif not isinstance(content, str):
        raise InvalidInput(f"{where}.content must be a text", field=f"{where}.content", remedy="Send a text")
    if content:
        Text().parse(content, f"{where}.content")
    # Models were trained with the older name.
    return {**value, "role": "system" if role == "developer" else role, "content": content}


def _part(part: Any, where: str) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind is not None and kind != "text":
        raise UnsupportedOption(
            f"{where} is of type {str(kind)[:100]!r}; this model takes texts",
            field=f"{where}.type",
            remedy="Leave it out",
        )
    if kind is None or not isinstance(part.get("text"), str):
        raise InvalidInput(
            f"{where} must be a part with a text", field=where, remedy='Send {"type": "text", "text": …}'
        )
    text: str = part["text"]
    return text


def _job(body: Mapping[str, Any], model: GenerationModel, max_tokens: int, top_logprobs: int | None) -> JobRequest:
    names = (
        "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty",
    )  # fmt: skip
    defaults = {name: value for name, value in model.defaults.items() if name in names}
    values = {**defaults, **{name: body[name] for name in names if body[name] is not None}}
    values["logit_bias"] = _biases(body["logit_bias"] or {}, model.engine.vocabulary)
    stop = body["stop"] or ()
    return JobRequest(
        prompt=(),
        max_tokens=max_tokens,
        sampling=sampling(values, seed=body["seed"], top_logprobs=top_logprobs),
        stop=(stop,) if isinstance(stop, str) else tuple(stop),
        end_tokens=model.end_tokens,
    )


def _biases(given: Mapping[str, Any], vocabulary: int) -> dict[int, float]:
    biases = {}
    for token, bias in given.items():
        field = f"logit_bias.{token[:20]}"
        if not token.isdecimal() or int(token) >= vocabulary:
            raise InvalidInput(
                f"{field} is no token of this model", field=field, remedy=f"Send token ids from 0 to {vocabulary - 1}"
            )
        biases[int(token)] = Number(-100, 100).parse(bias, field)
    return biases


def routes(service: ModelService, limits: RequestLimits) -> tuple[Route, ...]:
    """Their table."""
    _ = limits
    handlers = OpenAIText(service)
    return (
        Route(
            "POST", "/v1/chat/completions", handlers.chat, "Answer a conversation", TAG, tasks=TASKS, inference=True,
            streams=True, error_format=ErrorFormat.OPENAI, errors=(PromptTooLong, UnsupportedOption),
            request=CHAT_BODY.schema() | {"examples": [
                {"messages": [{"role": "user", "content": "What is the capital of France?"}], "max_tokens": 50},
            ]},
            response=_response("chat.completion"),
        ),
        Route(
            "POST", "/v1/completions", handlers.complete, "Continue a text", TAG, tasks=TASKS, inference=True,
            streams=True, error_format=ErrorFormat.OPENAI, errors=(PromptTooLong, UnsupportedOption),
            request=COMPLETION_BODY.schema() | {"examples": [
                {"prompt": "The capital of France is", "max_tokens": 20},
            ]},
            response=_response("text_completion"),
        ),
    )  # fmt: skip


def _response(kind: str) -> JsonSchema:
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
