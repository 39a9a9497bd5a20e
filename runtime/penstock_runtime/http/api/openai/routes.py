"""The API of OpenAI: `/v1/embeddings`, `/v1/models`, `/v1/chat/completions` and `/v1/completions`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from penstock.tasks import TaskName
from penstock_runtime.errors import InvalidInput, PromptTooLong, UnsupportedOption
from penstock_runtime.generation.templates import Conversation
from penstock_runtime.http.api.core.bodies import (
    answer_response,
    checked,
    fields_named,
    json_response,
    read_json,
    tier_of,
)
from penstock_runtime.http.api.core.conversation import job_of, message_of, tools_of
from penstock_runtime.http.api.core.generation import GenerationApi, frame_of, generator_of
from penstock_runtime.http.api.core.service import ModelService
from penstock_runtime.http.api.core.unknown_fields import UnknownFields
from penstock_runtime.http.api.openai.answers import (
    EMBEDDINGS,
    MODEL,
    AnswerStream,
    ChatAnswer,
    CompletionAnswer,
    EchoedPrompts,
    answer_schema,
    embeddings,
)
from penstock_runtime.http.api.openai.requests import (
    CHAT_BODY,
    DEFAULT_COMPLETION_TOKENS,
    UNSUPPORTED,
    completion_body,
    embeddings_body,
    form_of,
    prompts_of,
)
from penstock_runtime.http.transport.message import ErrorFormat, Request, Response, Route
from penstock_runtime.tasks.base import RequestLimits
from penstock_runtime.tasks.embeddings.feature_extraction import AUTO
from penstock_runtime.tasks.fields import Object
from penstock_runtime.tasks.text_generation import Prompt, refuse_unsupported, require_template

TAG = "OpenAI"
TASKS = frozenset({TaskName.TEXT_GENERATION})


class OpenAI:
    """The handlers."""

    def __init__(self, service: ModelService, limits: RequestLimits) -> None:
        self._service = service
        self._embeddings = embeddings_body(limits)

    async def embeddings(self, request: Request) -> Response:
        """`/v1/embeddings`."""
        body = checked(self._embeddings, read_json(request))
        # Length 1, also where the model's files do not require it: as OpenAI and text-embeddings-inference do.
        parameters = {"pooling": AUTO, "normalize": True}
        parameters |= {name: body[name] for name in ("dimensions", "prompt_name") if body[name] is not None}
        with fields_named({"inputs": "input", "parameters.": ""}, absent=["truncate"]):
            answer = await self._service.predict(request, body["input"], parameters)
        data = embeddings(answer.value, body["encoding_format"])
        value = {
            "object": "list",
            "data": data,
            "model": self._service.status.name,
            "usage": {"prompt_tokens": answer.tokens, "total_tokens": answer.tokens},
        }
        value |= tier_of(request)
        if answer.fingerprint:
            value["system_fingerprint"] = answer.fingerprint
        return answer_response(answer, value)

    def models(self, _: Request) -> Response:
        """`/v1/models`."""
        data = [listed_model(self._service)]
        return json_response({"object": "list", "data": data, "models": [self._service.status.name]})

    def model(self, request: Request) -> Response:
        """`/v1/models/{model}`."""
        self._service.require_name(request.parameters["model"])
        return json_response(listed_model(self._service))


def listed_model(service: ModelService) -> dict[str, Any]:
    """A model in `/v1/models`."""
    # `name`, `ready` and `models` are what KServe's V1 protocol has on the same paths.
    status = service.status
    opened = {"id": status.name, "object": "model", "created": status.started, "owned_by": "penstock"}
    stated = {} if status.space is None else {"vector_space": status.space.id}
    return {**opened, "name": status.name, "ready": service.ready, **stated}


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
        self._service.require_model(body["model"])
        model = generator_of(self._service).model
        messages = [message_of(one, f"messages[{index}]") for index, one in enumerate(body["messages"])]
        variables = body["chat_template_kwargs"] or {}
        require_template(model.template, "messages")
        tools = tools_of(body["tools"], body["tool_choice"], model, several=body["parallel_tool_calls"])
        continues = body["continue_final_message"]
        if continues and body["add_generation_prompt"]:
            raise InvalidInput(
                "continue_final_message and add_generation_prompt are both true",
                field="add_generation_prompt",
                remedy="Send only one of them",
            )
        opens_answer = body["add_generation_prompt"] is not False and not continues
        conversation = Conversation(
            messages, None if tools is None else tools.offered, variables, opens_answer, continues
        )
        top = (body["top_logprobs"] or 0) if body["logprobs"] else None
        if body["top_logprobs"] and not body["logprobs"]:
            raise InvalidInput("top_logprobs needs logprobs", field="top_logprobs", remedy="Send logprobs: true")
        form = form_of(body) if tools is None or tools.grammar is None else tools.grammar
        tokens = body["max_completion_tokens"] or body["max_tokens"] or 0
        job = job_of(body, model, tokens, top, default_tokens=0)
        started = await self._start(request, [conversation], job, body["n"], field="messages", form=form)
        frame = frame_of(self._service, "chatcmpl-", request, model)
        writer = ChatAnswer(
            model,
            frame,
            with_logprobs=top is not None,
            tools=None if tools is None else tools.form,
            is_named=isinstance(body["tool_choice"], dict),
        )
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
        self._service.require_model(body["model"])
        model = generator_of(self._service).model
        prompts = prompts_of(body["prompt"], model, special=body["add_special_tokens"])
        job = job_of(body, model, body["max_tokens"] or 0, body["logprobs"], default_tokens=DEFAULT_COMPLETION_TOKENS)
        if body["echo"]:
            is_only = body["max_tokens"] == 0
            job = replace(
                job,
                prompt_logprobs=body["logprobs"],
                is_prompt_only=is_only,
                max_tokens=1 if is_only else job.max_tokens,
                is_default_limit=job.is_default_limit or is_only,
            )
        elif body["max_tokens"] == 0:
            raise InvalidInput(
                "max_tokens is 0, and without echo there is nothing to answer",
                field="max_tokens",
                remedy="Send a larger number, or echo: true",
            )
        started = await self._start(request, prompts, job, body["n"], field="prompt", form=form_of(body))
        frame = frame_of(self._service, "cmpl-", request, model)
        echoed = None
        if body["echo"]:
            texts = [
                one.text if isinstance(one, Prompt) else model.decode(ids)
                for one, ids in zip(prompts, started.tokens, strict=True)
            ]
            echoed = EchoedPrompts(started.generation, texts, started.tokens)
        writer = CompletionAnswer(model, with_logprobs=body["logprobs"] is not None, echoed=echoed)
        if body["stream"]:
            stream = AnswerStream(started.generation, frame, writer, body["stream_options"])
            return await self._stream(started, stream)
        return await self._answer(started, lambda ended: writer.whole(frame, ended, started.generation))


def _unknown_fields(route: str, body: Object) -> UnknownFields:
    return UnknownFields(route, [*body.required, *body.optional, *UNSUPPORTED])


def routes(service: ModelService, limits: RequestLimits) -> tuple[Route, ...]:
    """Their table."""
    openai, text = OpenAI(service, limits), OpenAIText(service, limits)
    return (
        Route(
            "POST", "/v1/embeddings", openai.embeddings, "Texts to vectors, OpenAI's shape", TAG,
            tasks=frozenset({TaskName.FEATURE_EXTRACTION}), inference=True, error_format=ErrorFormat.OPENAI,
            request=embeddings_body(limits).schema() | {"examples": [{"input": "I like you. I love you."}]},
            response=EMBEDDINGS,
        ),
        Route(
            "GET", "/v1/models", openai.models, "The one model", TAG, error_format=ErrorFormat.OPENAI,
            response={
                "type": "object",
                "properties": {
                    "object": {"const": "list"},
                    "data": {"type": "array", "items": MODEL},
                    "models": {"type": "array", "items": {"type": "string"}},
                },
                "required": ["object", "data", "models"],
            },
        ),
        Route(
            "GET", "/v1/models/{model}", openai.model, "The one model", TAG, error_format=ErrorFormat.OPENAI,
            response=MODEL,
        ),
        Route(
            "POST", "/v1/chat/completions", text.chat, "Answer a conversation", TAG, tasks=TASKS, inference=True,
            streams=True, error_format=ErrorFormat.OPENAI, errors=(PromptTooLong, UnsupportedOption),
            request=CHAT_BODY.schema() | {"examples": [
                {"messages": [{"role": "user", "content": "What is the capital of France?"}], "max_tokens": 50},
            ]},
            response=answer_schema("chat.completion"),
        ),
        Route(
            "POST", "/v1/completions", text.complete, "Continue texts", TAG, tasks=TASKS, inference=True,
            streams=True, error_format=ErrorFormat.OPENAI, errors=(PromptTooLong, UnsupportedOption),
            request=completion_body(limits).schema() | {"examples": [
                {"prompt": "The capital of France is", "max_tokens": 20},
            ]},
            response=answer_schema("text_completion"),
        ),
    )  # fmt: skip
