"""The API of OpenAI for text generation: `/v1/chat/completions` and `/v1/completions`."""

from __future__ import annotations

from penstock.tasks import TaskName
from penstock_runtime.errors import InvalidInput, PromptTooLong, UnsupportedOption
from penstock_runtime.http.api.bodies import checked, read_json
from penstock_runtime.http.api.generation import GenerationApi, generator_of
from penstock_runtime.http.api.openai_answers import AnswerStream, ChatAnswer, CompletionAnswer, frame_of
from penstock_runtime.http.api.openai_requests import (
    CHAT_BODY,
    DEFAULT_COMPLETION_TOKENS,
    UNSUPPORTED,
    completion_body,
    form_of,
    job_of,
    message_of,
    prompts_of,
    tools_of,
)
from penstock_runtime.http.api.service import ModelService
from penstock_runtime.http.api.unknown_fields import UnknownFields
from penstock_runtime.http.transport.message import ErrorFormat, Request, Response, Route
from penstock_runtime.tasks.base import RequestLimits
from penstock_runtime.tasks.fields import JsonSchema, Object
from penstock_runtime.tasks.text_generation import Prompt, refuse_unsupported, require_template

TAG = "OpenAI"
TASKS = frozenset({TaskName.TEXT_GENERATION})


class OpenAIText(GenerationApi):
    """The handlers."""

    def __init__(self, service: ModelService, limits: RequestLimits) -> None:
        super().__init__(service)
        self._completion = completion_body(limits)
        self._unknown_of_chat = _unknown_fields("/v1/chat/completions", CHAT_BODY)
        self._unknown_of_completions = _unknown_fields("/v1/completions", self._completion)

    async def chat(self, request: Request) -> Response:
        """`/v1/chat/completions`."""
        raw = read_json(request)
        body = checked(CHAT_BODY, raw)
        self._unknown_of_chat.look(raw)
        refuse_unsupported(raw, UNSUPPORTED)
        model = generator_of(self._service).model
        messages = [message_of(one, f"messages[{index}]") for index, one in enumerate(body["messages"])]
        variables = body["chat_template_kwargs"] or {}
        template = require_template(model.template, "messages")
        tools = tools_of(body["tools"], body["tool_choice"], model, several=body["parallel_tool_calls"])
        text = template.render(messages, tools=None if tools is None else tools.offered, variables=variables)
        top = (body["top_logprobs"] or 0) if body["logprobs"] else None
        if body["top_logprobs"] is not None and not body["logprobs"]:
            raise InvalidInput("top_logprobs needs logprobs", field="top_logprobs", remedy="Send logprobs: true")
        form = form_of(body) if tools is None or tools.grammar is None else tools.grammar
        tokens = body["max_completion_tokens"] or body["max_tokens"] or 0
        job = job_of(body, model, tokens, top, default_tokens=0)
        started = await self._start(request, [Prompt(text, special=False)], job, body["n"], field="messages", form=form)
        frame = frame_of(self._service, "chatcmpl-", request, model)
        writer = ChatAnswer(model, frame, with_logprobs=top is not None, tools=None if tools is None else tools.form)
        if body["stream"]:
            stream = AnswerStream(started.generation, frame, writer, body["stream_options"])
            return await self._stream(started, stream)
        return await self._answer(started, lambda ended: writer.whole(frame, ended, started.generation))

    async def complete(self, request: Request) -> Response:
        """`/v1/completions`."""
        raw = read_json(request)
        body = checked(self._completion, raw)
        self._unknown_of_completions.look(raw)
        refuse_unsupported(raw, UNSUPPORTED)
        model = generator_of(self._service).model
        prompts = prompts_of(body["prompt"], model)
        job = job_of(
            body, model, body["max_tokens"] or 0, body["logprobs"], default_tokens=DEFAULT_COMPLETION_TOKENS,
        )  # fmt: skip
        started = await self._start(request, prompts, job, body["n"], field="prompt", form=form_of(body))
        frame = frame_of(self._service, "cmpl-", request, model)
        writer = CompletionAnswer(model, with_logprobs=body["logprobs"] is not None)
        if body["stream"]:
            stream = AnswerStream(started.generation, frame, writer, body["stream_options"])
            return await self._stream(started, stream)
        return await self._answer(started, lambda ended: writer.whole(frame, ended, started.generation))


def _unknown_fields(route: str, body: Object) -> UnknownFields:
    return UnknownFields(route, [*body.required, *body.optional, *UNSUPPORTED])


def routes(service: ModelService, limits: RequestLimits) -> tuple[Route, ...]:
    """Their table."""
    handlers = OpenAIText(service, limits)
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
            "POST", "/v1/completions", handlers.complete, "Continue texts", TAG, tasks=TASKS, inference=True,
            streams=True, error_format=ErrorFormat.OPENAI, errors=(PromptTooLong, UnsupportedOption),
            request=completion_body(limits).schema() | {"examples": [
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
